"""Readers of the compiler's text and dumps: bytes, aliases, instructions, buffers and their live ranges."""
