"""Arrays of a GPU moved together: which, in which order, and the moves themselves."""
