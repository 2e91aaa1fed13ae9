"""A step that failed done in less memory: the rungs, the copies to go back to, and what all processes agree on."""
