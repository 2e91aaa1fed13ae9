"""What a failure for want of memory says in its text or in a log."""
