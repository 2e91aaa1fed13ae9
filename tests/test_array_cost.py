"""What a kept scalar costs the host, by which the number of arrays is judged: more than a kibibyte, on every JAX line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEEPING = """
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from jaxmem_callbacks.probes.host import HostProbe
def resident():
    (reading,) = HostProbe().read(0)
    return reading.resident_bytes
step = jax.jit(lambda x: (x + 1, x.sum()))
x, loss = step(jnp.zeros(8))
kept = []
def keep(count):
    global x
    for _ in range(count):
        x, loss = step(x)
        kept.append(loss)
    x.block_until_ready()
keep(2000)  # what the first steps cost beside
before = resident()
keep(20000)
print((resident() - before) / 20000)
"""


def test_a_kept_scalar_costs_the_host_more_than_a_kibibyte():
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", KEEPING],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 2**10 < float(done.stdout) < 2**13
