"""jaxmem: the command line."""
