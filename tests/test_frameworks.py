"""Loops as they are written with Flax NNX, Flax Linen, Equinox and plain optax need no adapter: `monitor(step, metrics)`, or
`hooks.append(monitor)`. Each is trained to its end with and without one. The frameworks that need an environment of their own
are in test_adapters_*.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from tests.watching import NotingMonitor, assert_written

pytestmark = pytest.mark.core

STEPS, WIDTH = 12, 8
Step = Callable[[Any, jax.Array], tuple[Any, dict[str, jax.Array]]]


class Net(nnx.Module):
    """Statistics and dropout, so that a step changes more than weights."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(WIDTH, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.drop(jnp.tanh(self.norm(self.up(x)))))


def nnx_loss(model: Net, batch: jax.Array) -> jax.Array:
    return (model(batch) ** 2).mean()


def nnx_with_nnx_jit() -> tuple[Any, Step]:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def update(model: Net, optimizer: nnx.Optimizer, batch: jax.Array) -> dict[str, jax.Array]:
        loss, grads = nnx.value_and_grad(nnx_loss)(model, batch)
        optimizer.update(model, grads)
        return {"loss": loss}

    def step(state: tuple[Net, nnx.Optimizer], batch: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        return state, update(*state, batch)

    return (model, optimizer), step


def nnx_with_jax_jit() -> tuple[Any, Step]:
    graph, state = nnx.split(nnx_with_nnx_jit()[0])

    @jax.jit
    def step(state: Any, batch: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(nnx_loss)(model, batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {"loss": loss}

    return state, step


def linen() -> tuple[Any, Step]:
    net = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(1)])
    params = net.init(jax.random.key(0), jnp.ones((1, WIDTH)))
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(1e-2))

    @jax.jit
    def step(state: TrainState, batch: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(lambda params: (state.apply_fn(params, batch) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return state, step


def equinox() -> tuple[Any, Step]:
    model = eqx.nn.MLP(WIDTH, 1, 16, 2, key=jax.random.key(0))
    optimizer = optax.adam(1e-2)

    @eqx.filter_jit
    def step(state: Any, batch: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        model, moments = state
        loss, grads = eqx.filter_value_and_grad(lambda model: (jax.vmap(model)(batch) ** 2).mean())(model)
        updates, moments = optimizer.update(grads, moments, eqx.filter(model, eqx.is_array))
        return (eqx.apply_updates(model, updates), moments), {"loss": loss}

    return (model, optimizer.init(eqx.filter(model, eqx.is_array))), step


def plain_optax() -> tuple[Any, Step]:
    params, optimizer = {"w": jnp.full((WIDTH, 1), 0.5)}, optax.adam(1e-2)

    def step(state: Any, batch: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        params, moments = state
        loss, grads = jax.value_and_grad(lambda params: ((batch @ params["w"]) ** 2).mean())(params)
        updates, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), {"loss": loss}

    return (params, optimizer.init(params)), jax.jit(step, donate_argnums=0)


def trained(make: Callable[[], tuple[Any, Step]], hooks: Sequence[Callable[[int], object]]) -> list[np.ndarray]:
    """The losses and the last state of a training, as arrays."""
    state, step = make()
    losses = []
    for number, batch in enumerate(jax.random.normal(jax.random.key(1), (STEPS, 4, WIDTH))):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        for hook in hooks:
            hook(number)
    nnx_arrays = jax.tree.leaves(nnx.state(state)) if make is nnx_with_nnx_jit else jax.tree.leaves(state)
    found = [each for each in [*losses, *nnx_arrays] if isinstance(each, jax.Array)]
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in found]


@pytest.mark.parametrize("make", [nnx_with_nnx_jit, nnx_with_jax_jit, linen, equinox, plain_optax])
def test_a_loop_with_a_monitor_among_its_hooks_trains_as_without(make: Any, tmp_path: Path) -> None:
    without = trained(make, [])
    others: list[int] = []
    hooks: list[Callable[[int], object]] = [others.append]
    with NotingMonitor(tmp_path) as monitor:
        hooks.append(monitor)
        watched = trained(make, hooks)
    assert len(without) > STEPS
    assert [np.array_equal(one, other) for one, other in zip(without, watched, strict=True)] == [True] * len(without)
    assert not np.array_equal(without[0], without[STEPS - 1]), "it trained"
    assert others == list(range(STEPS))
    assert_written(monitor, range(STEPS))


def test_a_loop_that_hands_over_its_metrics_finds_them_in_the_event_file(tmp_path: Path) -> None:
    state, step = plain_optax()
    with NotingMonitor(tmp_path) as monitor:
        for number in range(STEPS):
            state, metrics = step(state, jnp.ones((4, WIDTH)))
            monitor(number, metrics)
    assert_written(monitor, range(STEPS), "loss")
