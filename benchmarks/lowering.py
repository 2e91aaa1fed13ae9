"""What cutting costs at start-up: lowering a cut loss against the plain one. Writes results/lowering_jax_<version>.json.

    python -m benchmarks.lowering

Processor time of this process, so that a busy machine changes little; plain and cut alternate, and the best of each is
taken, since noise only ever adds.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem_callbacks as jm
from benchmarks.models import Llama, next_token_loss
from benchmarks.sources import write_result
from jaxmem_callbacks.transforms.tracing import flatten

Problem = tuple[Callable[..., Any], tuple[Any, ...]]


def loop_of_layers(layers: int) -> Problem:
    """Layers in a Python loop of jnp calls: tracing the model itself costs almost nothing, the worst case for a cut."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for w in weights:
            h = (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)) @ w
            x = x + jnp.tanh(h) * jax.nn.sigmoid(h) + jnp.exp(-h * h)
        return (x**2).mean()

    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * layers
    return loss, (weights, jax.ShapeDtypeStruct((32, 64), jnp.float32))


def unrolled_llama(layers: int) -> Problem:
    """The Llama-like Linen model of the other benchmarks, small and deep; no two layers share a module path."""
    model = Llama(width=128, layers=layers, vocabulary=512)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return next_token_loss(model.apply(params, tokens[:, :-1]), tokens)

    params = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32))
    return loss, (params, jax.ShapeDtypeStruct((4, 129), jnp.int32))


def equations(problem: Problem) -> int:
    """Number of equations of a loss, nested jits inlined."""
    loss, args = problem
    return len(flatten(jax.make_jaxpr(loss)(*args)).eqns)


def lowering_ratio(problem: Problem, rounds: int = 3, enough: float = 0.0) -> float:
    """Seconds to trace and lower the value and gradient of the cut loss, over those of the plain one.

    Args:
        problem: A loss and its arguments.
        rounds: How often both are lowered, at most.
        enough: A ratio that may be left at that, once the plain loss was lowered twice.
    """
    loss, args = problem
    best: dict[str, float] = dict.fromkeys(("plain", "cut"), float("inf"))
    gc.collect()
    gc.freeze()  # what else lives in this process is walked by each full collection, and is nobody's lowering
    try:
        for turn, (name, candidate) in enumerate((("plain", loss), ("cut", jm.remat(loss))) * rounds):
            jax.clear_caches()
            begun = time.process_time()
            jax.jit(jax.value_and_grad(candidate)).lower(*args)
            best[name] = min(best[name], time.process_time() - begun)
            if turn > 1 and best["cut"] <= enough * best["plain"]:
                break
    finally:
        gc.unfreeze()
    return best["cut"] / best["plain"]


def main() -> None:
    """Measure both losses at 10,000 equations and write the result file."""
    rows = [
        {"loss": name, "equations": equations(problem), "cut_over_plain": round(lowering_ratio(problem, 5), 3)}
        for name, problem in (("loop of layers", loop_of_layers(770)), ("llama, Linen", unrolled_llama(72)))
    ]
    write_result("lowering", rows=rows)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
