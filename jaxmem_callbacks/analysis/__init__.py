"""Readings and compilations in, MemoryEvents out: pure functions, no JAX."""
