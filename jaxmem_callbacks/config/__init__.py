"""YAML presets in, frozen records out. Imports no JAX."""
