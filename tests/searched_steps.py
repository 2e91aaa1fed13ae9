"""A small step whose searches are quick, what is trained with it, and what holds of every plan with a budget."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem_callbacks as jm

DEPTH, WIDTH, ROWS = 4, 16, 1024
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)


def forward(params: Any, batch: Any) -> Any:
    def layer(x: Any, weight: Any) -> Any:
        return x + jnp.tanh(x @ weight["up"]) @ weight["down"], None

    return jax.lax.scan(layer, batch, params)[0]


def loss_fn(params: Any, batch: Any) -> Any:
    return (forward(params, batch) ** 2).mean()


def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
    loss, grads = jm.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def eval_step(params: Any, batch: Any) -> Any:
    """Keeps every layer's input and result: more than a step under remat."""
    outputs = [forward(params, batch * scale) for scale in range(1, 9)]
    return jnp.stack([jnp.repeat(output, 8, axis=0) for output in outputs])


def abstract(rows: int = ROWS) -> Any:
    params = {
        "up": jax.ShapeDtypeStruct((DEPTH, WIDTH, 4 * WIDTH), jnp.float32),
        "down": jax.ShapeDtypeStruct((DEPTH, 4 * WIDTH, WIDTH), jnp.float32),
    }
    return params, jax.eval_shape(OPTIMIZER.init, params), jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)


@functools.cache
def parameters() -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 2))
    return jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) / 8, abstract()[0])


def rows_of(count: int) -> Any:
    return jax.random.normal(jax.random.key(1), (count, WIDTH))


def same(got: Any, wanted: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)


def obeys(plan: jm.Plan) -> None:
    """What holds of every plan with a budget, whatever was searched."""
    record = plan.record
    assert record.budget_bytes is not None
    for each in plan.candidates:
        assert each.need_bytes is not None
        assert each.need_bytes >= (each.step_bytes or 0) + record.resident_bytes
        assert each.fits == (each.need_bytes <= record.budget_bytes)
    fitting = [each for each in plan.candidates if each.fits]
    assert plan.chosen in (fitting or plan.candidates)
    most = max((each.batch_rows or 0 for each in fitting), default=0)
    best = [each for each in fitting if (each.batch_rows or 0) == most]
    assert plan.chosen.extra_flops == min((each.extra_flops for each in best), default=plan.chosen.extra_flops)
    assert len({(each.policy, each.batch_rows) for each in plan.candidates}) == len(plan.candidates), (
        "one compiled twice"
    )
