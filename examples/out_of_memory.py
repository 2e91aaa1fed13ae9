"""A training step that runs out of memory, and the report that explains it: a limit that the script sets itself makes it real.

    python examples/out_of_memory.py --outdir reports

The step below keeps 1.5 GiB between its two passes; the process may take 700 MiB more than it has.
"""

from __future__ import annotations

import argparse
import resource
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmem_callbacks as jm

LAYERS, WIDTH, ROWS = 24, 256, 32_768
OPTIMIZER = optax.adam(1e-3)


def loss_fn(params: Any, batch: Any) -> Any:
    """A residual network of scanned layers."""

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w) + x, None

    x, _ = jax.lax.scan(layer, batch["x"], params["w"])
    return ((x - batch["y"]) ** 2).mean()


def train_step(state: Any, batch: Any) -> Any:
    """One step of Adam."""
    loss, grads = jm.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


def new_state() -> Any:
    """Parameters and optimizer."""
    params = {"w": jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / 100}
    return {"params": params, "opt": OPTIMIZER.init(params)}


def rows(count: int) -> Any:
    """A batch."""
    x = jax.random.normal(jax.random.key(1), (count, WIDTH))
    return {"x": x, "y": jnp.roll(x, 1, axis=1)}


def limit_memory(more: int) -> None:
    """Let this process take so many bytes more than it has, as a full machine would."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + more, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    """Train on a small batch, then on one that does not fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outdir", default="oom", help="where the report's folder is made")
    parser.add_argument("--plan-seconds", type=float, default=60.0, help="how long to compile for remedies; 0 for none")
    options = parser.parse_args()

    step = jm.jit_step(train_step)
    state, metrics = step(new_state(), rows(256))
    print(f"256 rows: loss {float(metrics['loss']):.3f}")
    batch = rows(ROWS)
    limit_memory(700 * 2**20)
    with jm.oom_guard(outdir=options.outdir, plan_seconds=options.plan_seconds):
        state, metrics = step(state, batch)
        print(f"{ROWS} rows: loss {float(metrics['loss']):.3f}")


if __name__ == "__main__":
    main()
