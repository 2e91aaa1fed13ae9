"""The run that the TensorBoard page is judged on: `python -m tests.page_run FOLDER` trains, and prints its last step.

In a process of its own, because arrays that other tests keep would count as live, and make their probe rest.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxmem_callbacks as jm
from jaxmem_callbacks.analysis.figures import Window
from jaxmem_callbacks.records.presets import MonitorSettings
from tests import sample_plans as samples

POINTS, SHORT_AT, MOST_STEPS = 110, 60, 4000
ROWS, SHORT_ROWS = 1024, 300
TAG = "memory/live_arrays_mib"


def page_step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    loss, gradient = jm.value_and_grad(lambda w: jnp.mean((jnp.tanh(batch @ w) @ w - 1.0) ** 2))(weights)
    return weights - 0.05 * gradient, {"loss": loss}


def train(folder: Path) -> int:
    """A run with both events and at least 110 points of the live arrays, in the folder above its own, as users have it."""
    settings = MonitorSettings(window_s=0.02, scan_s=0.02, limit_bytes=4 * 2**20, on_error="raise")
    step = jm.jit_step(page_step, jm.StepPolicy())
    weights, batch = jnp.full((256, 256), 0.01), jnp.ones((ROWS, 256))
    double = jm.CollectingWriter()
    plan = jm.plan(page_step, weights, batch, budget="1TiB")
    jm.Plan(samples.six()).to_tensorboard(folder / "plan")
    last = 0
    with jm.MemoryMonitor(settings, logdir=folder / "demo", writer=double, plan=plan) as monitor:
        for last in range(MOST_STEPS):  # as many as it takes on a busy machine
            weights, metrics = step(weights, batch if last != SHORT_AT else batch[:SHORT_ROWS])
            monitor(last, metrics)
            time.sleep(0.03)
            if last > SHORT_AT and sum(TAG in window.spreads for window in double.of(Window)) >= POINTS:
                break
    kinds = [event.kind for event in monitor.events]
    if kinds != ["near_oom", "recompilation"]:
        sys.exit(f"both events were wanted, once each, not {kinds}")
    return last


if __name__ == "__main__":
    sys.stdout.write(f"{train(Path(sys.argv[1]))}\n")
