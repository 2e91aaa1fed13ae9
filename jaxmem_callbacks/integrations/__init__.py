"""The only importers of frameworks, one file each, loaded when the user asks for them."""
