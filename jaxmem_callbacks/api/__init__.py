"""Public functions that need several rooms: `jm.plan`, `jm.apply_environment` and `jm.simulate_allocator`."""
