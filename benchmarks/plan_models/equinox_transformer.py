"""An Equinox transformer for one sequence, mapped over the batch by `jax.vmap`; its static leaves are closed over."""

from __future__ import annotations

from typing import Any

import equinox as eqx
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

SAVED = ("attention", "up")


class Block(eqx.Module):
    """Pre-norm attention and a GELU layer; x[T, width]."""

    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, heads: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.norm1 = eqx.nn.LayerNorm(width)
        self.norm2 = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[2])

    def __call__(self, x: jax.Array, mask: jax.Array, remat: str) -> jax.Array:
        h = jax.vmap(self.norm1)(x)
        x = x + named(self.attention(h, h, h, mask=mask), "attention", remat)
        h = named(jax.vmap(self.up)(jax.vmap(self.norm2)(x)), "up", remat)
        return x + jax.vmap(self.down)(jax.nn.gelu(h))


class Transformer(eqx.Module):
    """tokens[T] -> logits[T, vocabulary], learned positions."""

    embed: eqx.nn.Embedding
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(  # noqa: PLR0913 - sizes
        self, *, width: int, heads: int, layers: int, length: int, vocabulary: int, key: jax.Array
    ) -> None:
        keys = jax.random.split(key, layers + 3)
        self.embed = eqx.nn.Embedding(vocabulary, width, key=keys[0])
        self.positions = 0.02 * jax.random.normal(keys[1], (length, width))
        self.blocks = [Block(width, heads, k) for k in keys[3:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, vocabulary, use_bias=False, key=keys[2])

    def __call__(self, tokens: jax.Array, remat: str) -> jax.Array:
        x = jax.vmap(self.embed)(tokens) + self.positions
        mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        for block in self.blocks:
            if remat == NONE:
                x = block(x, mask, remat)
            else:
                call = lambda block, x, mask: block(x, mask, remat)  # noqa: E731
                x = eqx.filter_checkpoint(call, policy=policy(remat, SAVED))(block, x, mask)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def equinox_transformer(  # noqa: PLR0913 - sizes
    *,
    batch: int = 32,
    length: int = 256,
    width: int = 256,
    heads: int = 8,
    layers: int = 6,
    vocabulary: int = 2048,
) -> PlanCase:
    """The Equinox transformer, float32; parameters are the model's arrays, as `eqx.partition` gives them."""

    def make(key: jax.Array) -> Transformer:
        return Transformer(width=width, heads=heads, layers=layers, length=length, vocabulary=vocabulary, key=key)

    _, static = eqx.partition(eqx.filter_eval_shape(make, jax.random.key(0)), _is_parameter)

    def loss_of(remat: str) -> Loss:
        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            model = eqx.combine(params, static)
            logits = jax.vmap(lambda row: model(row, remat))(tokens[:, :-1])
            return next_token_loss(logits, tokens)

        return loss

    def initial(key: jax.Array) -> tuple[Any, ...]:
        params = eqx.filter(make(key), eqx.is_inexact_array)
        return params, OPTIMIZER.init(params), random_tokens(key, batch, length, vocabulary)

    return compared_losses("transformer, Equinox", loss_of, initial)


def _is_parameter(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)
