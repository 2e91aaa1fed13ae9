"""Verdicts on an exception: whether memory ran out, and which program failed."""
