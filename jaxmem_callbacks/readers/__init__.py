"""Readers of the files that runs, plans and commands write. Errors name file and line."""
