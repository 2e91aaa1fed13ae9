"""The settings of XLA's client, as data in and data out: what JAX makes of them, what is wrong, what to set. Imports no JAX."""
