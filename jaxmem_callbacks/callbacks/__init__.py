"""MemoryMonitor: sampler, detectors and recorder joined on one page."""
