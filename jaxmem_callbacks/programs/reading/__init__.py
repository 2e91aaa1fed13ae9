"""Text and dumps of the compiler enter, figures leave: bytes, aliases, instructions, buffers and their live ranges."""
