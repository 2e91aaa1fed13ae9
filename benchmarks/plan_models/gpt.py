"""GPT-2's form in plain JAX, layers unrolled: learned positions, LayerNorm and biases, GELU; a head of few or many words."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.plan_models.case import (
    NONE,
    OPTIMIZER,
    Loss,
    PlanCase,
    compared_losses,
    named,
    next_token_loss,
    policy,
    random_tokens,
)

SAVED = ("attended", "up")


def normed(x: jax.Array, weights: Any) -> jax.Array:
    """LayerNorm of x[..., width], in float32."""
    wide = x.astype(jnp.float32)
    wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
    return (wide * weights["scale"] + weights["bias"]).astype(x.dtype)


def dense(x: jax.Array, weights: Any) -> jax.Array:
    """x[..., in] @ kernel[in, out] + bias[out], in the dtype of x."""
    return x @ weights["kernel"].astype(x.dtype) + weights["bias"].astype(x.dtype)


def block(x: jax.Array, weights: Any, heads: int, remat: str) -> jax.Array:
    """Pre-norm causal attention and a GELU layer; x[B, T, width]."""
    batch, length, width = x.shape
    query, key, value = (
        part.reshape(batch, length, heads, width // heads)
        for part in jnp.split(dense(normed(x, weights["norm1"]), weights["qkv"]), 3, axis=-1)
    )
    scores = jnp.einsum("bthd,bshd->bhts", query, key) / math.sqrt(width // heads)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e10)
    attended = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), value).reshape(batch, length, width)
    x = x + dense(named(attended, "attended", remat), weights["out"])
    up = named(dense(normed(x, weights["norm2"]), weights["up"]), "up", remat)
    return x + dense(jax.nn.gelu(up), weights["down"])


def _gpt(  # noqa: PLR0913 - sizes
    name: str,
    *,
    batch: int,
    length: int,
    width: int,
    heads: int,
    layers: int,
    vocabulary: int,
    tied: bool,
    dtype: Any,
) -> PlanCase:
    def loss_of(remat: str) -> Loss:
        def layer(x: jax.Array, weights: Any) -> jax.Array:
            return block(x, weights, heads, remat)

        if remat != NONE:
            layer = jax.checkpoint(layer, policy=policy(remat, SAVED))

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            x = (params["embed"][tokens[:, :-1]] + params["positions"][:length]).astype(dtype)
            for weights in params["layers"]:
                x = layer(x, weights)
            x = normed(x, params["norm"])
            head = params["embed"].T if tied else params["head"]
            return next_token_loss(x @ head.astype(dtype), tokens)

        return loss

    def initial(key: jax.Array) -> tuple[Any, ...]:
        def matrix(index: int, rows: int, columns: int) -> jax.Array:
            return 0.02 * jax.random.normal(jax.random.fold_in(key, index), (rows, columns))

        def affine(index: int, rows: int, columns: int) -> dict[str, jax.Array]:
            return {"kernel": matrix(index, rows, columns), "bias": jnp.zeros(columns)}

        def scale() -> dict[str, jax.Array]:
            return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

        some = [
            {
                "norm1": scale(),
                "qkv": affine(10 * place, width, 3 * width),
                "out": affine(10 * place + 1, width, width),
                "norm2": scale(),
                "up": affine(10 * place + 2, width, 4 * width),
                "down": affine(10 * place + 3, 4 * width, width),
            }
            for place in range(1, layers + 1)
        ]
        params = {"embed": matrix(1, vocabulary, width), "positions": matrix(2, length, width), "layers": some}
        params |= {"norm": scale()} | ({} if tied else {"head": matrix(3, width, vocabulary)})
        return params, OPTIMIZER.init(params), random_tokens(key, batch, length, vocabulary)

    return compared_losses(name, loss_of, initial)


def gpt_512_words(  # noqa: PLR0913 - sizes
    *,
    batch: int = 16,
    length: int = 512,
    width: int = 512,
    heads: int = 8,
    layers: int = 6,
    vocabulary: int = 512,
    dtype: Any = jnp.bfloat16,
) -> PlanCase:
    """Few words: the logits are a tenth of what a block keeps. The head is the embedding."""
    sizes = {"batch": batch, "length": length, "width": width, "heads": heads, "layers": layers}
    return _gpt("GPT-2, 512 words, tied", **sizes, vocabulary=vocabulary, tied=True, dtype=dtype)


def gpt_50k_words(  # noqa: PLR0913 - sizes
    *,
    batch: int = 16,
    length: int = 512,
    width: int = 512,
    heads: int = 8,
    layers: int = 6,
    vocabulary: int = 50_304,
    dtype: Any = jnp.bfloat16,
) -> PlanCase:
    """GPT-2's own words; the head is the embedding."""
    sizes = {"batch": batch, "length": length, "width": width, "heads": heads, "layers": layers}
    return _gpt("GPT-2, 50,304 words, tied", **sizes, vocabulary=vocabulary, tied=True, dtype=dtype)


def gpt_131k_words(  # noqa: PLR0913 - sizes
    *,
    batch: int = 8,
    length: int = 512,
    width: int = 512,
    heads: int = 8,
    layers: int = 8,
    vocabulary: int = 131_072,
    dtype: Any = jnp.float32,
) -> PlanCase:
    """Many words: the logits are ten times what a block keeps. The head has its own weights."""
    sizes = {"batch": batch, "length": length, "width": width, "heads": heads, "layers": layers}
    return _gpt("GPT-2, 131,072 words, untied", **sizes, vocabulary=vocabulary, tied=False, dtype=dtype)
