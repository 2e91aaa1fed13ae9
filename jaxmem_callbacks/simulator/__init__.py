"""Pure models of allocators, and the replay of a trace under their settings."""
