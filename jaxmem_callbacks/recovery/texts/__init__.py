"""Out-of-memory failures read from the text of an exception or from a log."""
