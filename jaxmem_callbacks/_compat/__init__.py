"""Every touch of JAX that is not documented, one file each, with its public fallback."""
