"""What microbatches save, and how wrong a plain mean over them can be. Writes results/accumulation_jax_<version>.json.

    python -m benchmarks.accumulation

Temporary bytes of one SGD step by the attached CPU's compiler, for layers in a Python loop and in a scan; and the gradients of
two losses that are no mean over rows, averaged over microbatches without the library, against those of the whole batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem_callbacks as jm
from benchmarks.sources import write_result

LAYERS, WIDTH, ROWS, COUNT = 8, 64, 4096, 4
POLICIES = {
    "whole": jm.StepPolicy(),
    "4 microbatches": jm.StepPolicy(microbatches=COUNT),
    "16 microbatches": jm.StepPolicy(microbatches=16),
    "4 microbatches, remat full": jm.StepPolicy(microbatches=COUNT, remat="full"),
}
Loss = Callable[..., Any]


def in_a_loop(weights: Any, batch: Any) -> Any:
    """Tanh layers in a Python loop: (layers, 64, 64) weights, [rows, 64] batch."""
    hidden = batch
    for layer in range(LAYERS):
        hidden = jnp.tanh(hidden @ weights[layer])
    return (hidden**2).mean()


def in_a_scan(weights: Any, batch: Any) -> Any:
    """The same layers as one scan."""
    hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, weights)
    return (hidden**2).mean()


def masked_mean(weights: Any, batch: Any) -> Any:
    """Mean square over the rows that a mask leaves, about four in ten."""
    mask = batch[:, 0] > 0.25  # noqa: PLR2004 - of a normal distribution
    return ((jnp.tanh(batch @ weights[0]) ** 2).mean(1) * mask).sum() / mask.sum()


def contrastive(weights: Any, batch: Any) -> Any:
    """Each row is to be told from all others of its batch, by the angles between them."""
    hidden = batch @ weights[0]
    hidden /= jnp.linalg.norm(hidden, axis=1, keepdims=True)
    return -jnp.diag(jax.nn.log_softmax(10 * hidden @ hidden.T)).mean()


def temp_bytes(loss: Loss, policy: jm.StepPolicy) -> int:
    """Temporary bytes of one step."""

    def train_step(weights: Any, batch: Any) -> Any:
        value, gradients = jm.value_and_grad(loss)(weights, batch)
        return weights - 0.1 * gradients, value

    shapes = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return jm.step_memory(jm.jit_step(train_step, policy), *shapes).temp_bytes


def mean_is_off_by(loss: Loss, rows: int = 32) -> float:
    """Distance of the mean of the microbatches' gradients from the whole batch's gradient, over the length of that."""
    weights = jax.random.normal(jax.random.key(0), (1, WIDTH, WIDTH)) / WIDTH**0.5
    batch = jax.random.normal(jax.random.key(1), (rows, WIDTH))
    gradient = jax.jit(jax.grad(loss))
    whole = gradient(weights, batch)
    mean = sum(gradient(weights, batch[part::COUNT]) for part in range(COUNT)) / COUNT
    return float(jnp.linalg.norm(mean - whole) / jnp.linalg.norm(whole))


def main() -> None:
    """Measure and write the result file."""
    saved = {
        loss.__name__: {name: temp_bytes(loss, policy) for name, policy in POLICIES.items()}
        for loss in (in_a_loop, in_a_scan)
    }
    off = {loss.__name__: round(mean_is_off_by(loss), 3) for loss in (masked_mean, contrastive)}
    what = (
        f"{LAYERS} tanh layers of {WIDTH} x {WIDTH} on {ROWS} rows: temporary bytes of a step by the CPU's compiler; and "
        f"gradients averaged over {COUNT} microbatches of 8 rows by hand: their distance from the whole batch's, relative"
    )
    write_result("accumulation", what=what, temp_bytes=saved, mean_is_off_by=off)
    print(json.dumps({**saved, **off}, indent=1))


if __name__ == "__main__":
    main()
