"""A training that runs out of memory at its 13th step, where one long batch comes, and that finishes with `jm.Recovery`.

    python examples/recover.py                 # with recovery: finishes
    python examples/recover.py --without       # without: ends with the out-of-memory error

The process takes a limit for itself (Linux), so that it ends like this on any machine.
"""

import argparse
import resource
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem_callbacks as jm

WIDTH, LAYERS, STEPS, LONG_AT = 32, 48, 20, 12
SPARE = 205 * 2**20  # bytes that the process may take besides what it has when it starts to train


def loss_fn(params, batch):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], params)
    return ((h - batch["y"]) ** 2).mean()


def train_step(state, batch):
    loss, grads = jm.value_and_grad(loss_fn)(state["params"], batch)
    momentum = 0.9 * state["momentum"] + grads
    return {"params": state["params"] - 0.5 * momentum, "momentum": momentum}, {"loss": loss}


def new_state():
    params = 0.7 * jnp.eye(WIDTH) + 0.1 * jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH))
    return {"params": params, "momentum": jnp.zeros_like(params)}


def batch_at(step):
    """The batch of a step, the same whenever it is asked for. One is 128 times as long as the others."""
    rows = 32768 if step == LONG_AT else 256
    x = np.random.default_rng(step).standard_normal((rows, WIDTH), np.float32)
    return {"x": x, "y": np.roll(x, 1, axis=1)}


def take_limit():
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + SPARE, resource.RLIM_INFINITY))


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--without", action="store_true", help="train without recovery")
    without = arguments.parse_args().without

    state = new_state()
    if without:
        step = jm.jit_step(train_step, jm.load_preset("donate"))
    else:
        preset = jm.load_preset("donate", "recover", recovery={"every_steps": 5})
        recovery = jm.Recovery(train_step, preset, batch_at=batch_at)
    for i in range(STEPS):
        if i == LONG_AT:
            take_limit()
        state, metrics = step(state, batch_at(i)) if without else recovery.step(i, state)
        print(f"step {i:4d}  loss {float(metrics['loss']):.4f}")
    if not without:
        print(f"finished under: {recovery.report.policy}")


if __name__ == "__main__":
    main()
