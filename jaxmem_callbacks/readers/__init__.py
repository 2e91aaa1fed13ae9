"""Files that runs, plans and commands have written enter; records leave. Errors name file and line."""
