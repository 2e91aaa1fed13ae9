"""Lower, compile (in a worker process where the target is absent) and read what the compiler says."""
