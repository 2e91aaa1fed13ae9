"""Gradients accumulated over microbatches: the same gradient in less memory."""
