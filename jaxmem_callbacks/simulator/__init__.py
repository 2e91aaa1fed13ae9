"""Allocators as pure models: a trace and settings enter, what the memory would have looked like leaves."""
