"""Lower, compile (in a worker process where the target is absent) and read the compiler's figures."""
