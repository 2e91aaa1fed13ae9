"""A Llama-like transformer in Flax Linen, layers unrolled: RMSNorm, rotary positions, grouped queries, SwiGLU, bf16."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
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

SAVED = ("attended", "gate", "up")


def rotary(x: jax.Array) -> jax.Array:
    """Rotary positions for x[B, T, heads, depth]."""
    length, depth = x.shape[1], x.shape[-1]
    angles = jnp.arange(length)[:, None] / 10_000 ** (jnp.arange(0, depth, 2) / depth)
    cos, sin = jnp.cos(angles)[:, None, :].astype(x.dtype), jnp.sin(angles)[:, None, :].astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Block(nn.Module):
    """Pre-norm attention with grouped queries, then SwiGLU; x[B, T, width]."""

    width: int
    heads: int
    groups: int
    dtype: Any
    remat: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        depth = self.width // self.heads
        dense = lambda *shape, name: nn.DenseGeneral(shape, use_bias=False, dtype=self.dtype, name=name)  # noqa: E731
        h = nn.RMSNorm(dtype=self.dtype)(x)
        query = rotary(dense(self.heads, depth, name="query")(h))
        key = rotary(dense(self.groups, depth, name="key")(h))
        value = dense(self.groups, depth, name="value")(h)
        key, value = (jnp.repeat(a, self.heads // self.groups, axis=2) for a in (key, value))
        mask = nn.make_causal_mask(x[..., 0])
        attended = nn.dot_product_attention(query, key, value, mask=mask, dtype=self.dtype)
        attended = named(attended, "attended", self.remat)
        out = nn.DenseGeneral(self.width, axis=(-2, -1), use_bias=False, dtype=self.dtype, name="out")
        x = x + out(attended)
        h = nn.RMSNorm(dtype=self.dtype)(x)
        gate = named(dense(4 * self.width, name="gate")(h), "gate", self.remat)
        up = named(dense(4 * self.width, name="up")(h), "up", self.remat)
        return x + nn.Dense(self.width, use_bias=False, dtype=self.dtype, name="down")(nn.silu(gate) * up)


class Transformer(nn.Module):
    """tokens[B, T] -> logits[B, T, vocabulary]."""

    width: int
    heads: int
    layers: int
    vocabulary: int
    dtype: Any
    remat: str = NONE

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        block = Block if self.remat == NONE else nn.remat(Block, policy=policy(self.remat, SAVED))
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for index in range(self.layers):
            x = block(self.width, self.heads, self.heads // 4, self.dtype, self.remat, name=f"block_{index}")(x)
        x = nn.RMSNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(x)


def linen_transformer(  # noqa: PLR0913 - sizes
    *,
    batch: int = 32,
    length: int = 512,
    width: int = 512,
    heads: int = 8,
    layers: int = 6,
    vocabulary: int = 4096,
    dtype: Any = jnp.bfloat16,
) -> PlanCase:
    """The unrolled Linen transformer."""

    def model(remat: str) -> Transformer:
        return Transformer(width, heads, layers, vocabulary, dtype, remat)

    def loss_of(remat: str) -> Loss:
        return lambda params, tokens: next_token_loss(model(remat).apply(params, tokens[:, :-1]), tokens)

    def initial(key: jax.Array) -> tuple[Any, ...]:
        tokens = random_tokens(key, batch, length, vocabulary)
        params = model(NONE).init(key, tokens[:1, :8])
        return params, OPTIMIZER.init(params), tokens

    return compared_losses("transformer, Linen, unrolled", loss_of, initial)
