"""Function in, function out: the same mathematics in less memory."""
