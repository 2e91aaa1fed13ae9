"""Shardings of a training state on a mesh, by a policy."""
