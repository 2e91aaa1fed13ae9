"""Eight virtual CPU devices, set the way that overwrites nothing of the environment; the backend starts after this file."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
