"""Gradients over microbatches: one gradient call and its batch enter, the same gradient in less memory leaves."""
