"""Measurements whose results are committed under results/. Not part of the package."""
