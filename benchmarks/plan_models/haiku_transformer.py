"""A language model after haiku's example: one flat dictionary of parameters by path, dropout, one-hot cross entropy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.plan_models.case import NONE, OPTIMIZER, PlanCase, Step, compared, named, policy, random_tokens

SAVED = ("attended", "up")
Parameters = dict[str, dict[str, jax.Array]]


def linear(params: Parameters, path: str, x: jax.Array) -> jax.Array:
    """x[..., in] -> [..., out] by the weights at a path."""
    return x @ params[path]["w"] + params[path]["b"]


def layer_norm(params: Parameters, path: str, x: jax.Array) -> jax.Array:
    """LayerNorm by the scale and offset at a path."""
    centred = x - x.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    return params[path]["scale"] * inverse * centred + params[path]["offset"]


def dropout(key: jax.Array, rate: float, x: jax.Array) -> jax.Array:
    """Zeros in place of a share of the elements, the others larger for it."""
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return kept * x / (1 - rate)


def block(  # noqa: PLR0913 - what a module would hold
    params: Parameters, path: str, x: jax.Array, key: jax.Array, *, heads: int, remat: str
) -> jax.Array:
    """Attention and a GELU layer, with dropout behind each; x[B, T, width]."""
    batch, length, width = x.shape
    first, second = jax.random.split(key)
    h = layer_norm(params, f"{path}/ln1", x)
    query, key_, value = (
        linear(params, f"{path}/attention/{name}", h).reshape(batch, length, heads, width // heads)
        for name in ("query", "key", "value")
    )
    scores = jnp.einsum("bthd,bThd->bhtT", query, key_) / math.sqrt(width // heads)
    scores = jnp.where(jnp.tril(jnp.ones((1, 1, length, length))), scores, -1e30)
    attended = jnp.einsum("bhtT,bThd->bthd", jax.nn.softmax(scores), value).reshape(batch, length, width)
    attended = named(linear(params, f"{path}/attention/linear", attended), "attended", remat)
    x = x + dropout(first, 0.1, attended)
    up = named(linear(params, f"{path}/mlp/up", layer_norm(params, f"{path}/ln2", x)), "up", remat)
    return x + dropout(second, 0.1, linear(params, f"{path}/mlp/down", jax.nn.gelu(up)))


def haiku_transformer(  # noqa: PLR0913 - sizes
    *,
    batch: int = 16,
    length: int = 256,
    width: int = 512,
    heads: int = 8,
    layers: int = 6,
    vocabulary: int = 16_384,
) -> PlanCase:
    """The language model of haiku's form, float32; its step takes a random key."""

    def step_of(value_and_grad: Callable[..., Any], remat: str) -> Step:
        def layer(params: Parameters, index: int, x: jax.Array, key: jax.Array) -> jax.Array:
            call = lambda some, h, rng: block(some, f"block_{index}", h, rng, heads=heads, remat=remat)  # noqa: E731
            return (call if remat == NONE else jax.checkpoint(call, policy=policy(remat, SAVED)))(params, x, key)

        def loss(params: Parameters, tokens: jax.Array, key: jax.Array) -> jax.Array:
            x = params["embed"]["w"][tokens[:, :-1]] + params["positions"]["w"][None, :length]
            for index in range(layers):
                key, own = jax.random.split(key)
                mine = {path: some for path, some in params.items() if path.startswith(f"block_{index}/")}
                x = layer(mine, index, x, own)
            logits = linear(params, "head", layer_norm(params, "ln", x))
            words = jax.nn.one_hot(tokens[:, 1:], vocabulary)
            mask = (tokens[:, 1:] > 0).astype(jnp.float32)
            return -jnp.sum(jnp.sum(words * jax.nn.log_softmax(logits), -1) * mask) / jnp.sum(mask)

        def step(params: Any, opt_state: Any, tokens: jax.Array, key: jax.Array) -> Any:
            value, grads = value_and_grad(loss)(params, tokens, key)
            updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        return step

    def initial(key: jax.Array) -> tuple[Any, ...]:
        shapes = {"embed": (vocabulary, width), "positions": (length, width), "head": (width, vocabulary)}
        norms = ["ln"]
        for index in range(layers):
            path = f"block_{index}"
            shapes |= {f"{path}/attention/{name}": (width, width) for name in ("query", "key", "value", "linear")}
            shapes |= {f"{path}/mlp/up": (width, 4 * width), f"{path}/mlp/down": (4 * width, width)}
            norms += [f"{path}/ln1", f"{path}/ln2"]
        keys = jax.random.split(key, len(shapes))
        params: Parameters = {
            path: {"w": 0.02 * jax.random.normal(one, shape), "b": jnp.zeros(shape[1])}
            for (path, shape), one in zip(shapes.items(), keys, strict=True)
        }
        for path in ("embed", "positions"):
            del params[path]["b"]
        params |= {path: {"scale": jnp.ones(width), "offset": jnp.zeros(width)} for path in norms}
        return params, OPTIMIZER.init(params), random_tokens(key, batch, length, vocabulary), key

    return compared("transformer after haiku", step_of, initial)
