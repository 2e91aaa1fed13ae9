"""What recorded runs train: a small network with momentum, on one device or on a mesh."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm

WIDTH, DEPTH, ROWS = 128, 4, 32
Watch = Callable[..., jm.MemoryMonitor]  # opens the run's monitor; more of its arguments may be given

PACE_S = 0.008  # a step; the monitor of a recording looks as often


def parameters(width: int = WIDTH, depth: int = DEPTH) -> dict[str, jax.Array]:
    """Weights of a plain network and a wider head."""
    keys = jax.random.split(jax.random.key(0), depth + 1)
    layers = {f"w{i}": jax.random.normal(keys[i], (width, width)) / width**0.5 for i in range(depth)}
    return layers | {"wout": jax.random.normal(keys[-1], (width, 4 * width)) / width**0.5}


def state_of(params: dict[str, jax.Array]) -> dict[str, Any]:
    """Parameters with momentum and a step counter."""
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params), "count": jnp.zeros((), jnp.int32)}


def loss_of(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A loss on rows of any number."""
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return (x**2).mean()


def train_step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """One step of momentum."""
    loss, grads = jm.value_and_grad(loss_of)(state["params"], batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.01 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum, "count": state["count"] + 1}, loss


def batch_of(step: int, rows: int = ROWS, width: int = WIDTH) -> np.ndarray[Any, Any]:
    """A batch from the host."""
    return np.random.default_rng(step).standard_normal((rows, width), dtype=np.float32)


def mesh_of(devices: int = 4) -> Mesh:
    """A mesh with one axis."""
    return Mesh(np.array(jax.devices()[:devices]), ("data",))


def split_over(tree: Any, mesh: Mesh, *, whole: tuple[str, ...] = ()) -> Any:
    """The tree with every matrix split over the mesh, but for those whose name is in ``whole``."""

    def placed(path: Any, leaf: Any) -> Any:
        keep = leaf.ndim < 2 or path[-1].key in whole  # noqa: PLR2004 - matrices
        return jax.device_put(leaf, NamedSharding(mesh, P() if keep else P("data")))

    return jax.tree_util.tree_map_with_path(placed, tree)


def shardings_of(tree: Any) -> Any:
    """Where everything is."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def run(  # noqa: PLR0913 - what the runs differ in
    monitor: Any,
    steps: int,
    *,
    step: Callable[..., Any] | None = None,
    state: Any = None,
    batch: Callable[[int], Any] = batch_of,
    each: Callable[[int, Any, jax.Array], Any] | None = None,
    first: int = 0,
    pace_s: float = PACE_S,
) -> Any:
    """A training loop as users write it.

    Args:
        monitor: Called after every step.
        steps: How many.
        step: By default `train_step`, jitted with donation.
        state: By default fresh.
        batch: From the step's number.
        each: Called with the step's number, the state and the loss; what it returns, unless None, is the state from then on.
        first: Number of the first step.
        pace_s: Seconds that the loop rests after each step.
    """
    step = jm.jit_step(train_step) if step is None else step
    state = state_of(parameters()) if state is None else state
    for index in range(first, first + steps):
        state, loss = step(state, batch(index))
        monitor(index, {"loss": loss})
        if each is not None:
            changed = each(index, state, loss)
            state = state if changed is None else changed
        time.sleep(pace_s)
    return state
