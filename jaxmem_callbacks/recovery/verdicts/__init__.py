"""Whether memory ran out, and which program it was: an exception and the bounds of memory enter, a verdict leaves."""
