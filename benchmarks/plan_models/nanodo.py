"""A decoder after nanodo's, in Flax Linen, layers unrolled: no biases, learned positions, a tied head in float32."""

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

SAVED = ("attended", "up")


class Block(nn.Module):
    """Pre-norm causal attention and a GELU layer, neither with biases; x[B, T, width]."""

    width: int
    heads: int
    hidden: int
    dtype: Any
    remat: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        depth = self.width // self.heads
        dense = lambda name: nn.DenseGeneral((self.heads, depth), use_bias=False, dtype=self.dtype, name=name)  # noqa: E731
        h = nn.LayerNorm(dtype=self.dtype, use_bias=False)(x)
        query, key, value = dense("query")(h), dense("key")(h), dense("value")(h)
        scores = jnp.einsum("...qhd,...khd->...hqk", query / depth**0.5, key)
        causal = nn.make_causal_mask(x[..., 0], dtype=bool)
        scores = jnp.where(causal, scores, jnp.finfo(self.dtype).min)
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(self.dtype)
        attended = named(jnp.einsum("...hqk,...khd->...qhd", weights, value), "attended", self.remat)
        x = x + nn.DenseGeneral(self.width, axis=(-2, -1), use_bias=False, dtype=self.dtype, name="out")(attended)
        h = nn.LayerNorm(dtype=self.dtype, use_bias=False)(x)
        up = named(nn.Dense(self.hidden, use_bias=False, dtype=self.dtype)(h), "up", self.remat)
        return x + nn.Dense(self.width, use_bias=False, dtype=self.dtype)(nn.gelu(up))


class Decoder(nn.Module):
    """tokens[B, T] -> float32 logits[B, T, vocabulary]."""

    width: int
    heads: int
    layers: int
    length: int
    vocabulary: int
    dtype: Any
    remat: str = NONE

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        block = Block if self.remat == NONE else nn.remat(Block, policy=policy(self.remat, SAVED))
        embed = nn.Embed(self.vocabulary, self.width, embedding_init=nn.initializers.normal(0.02))
        positions = nn.Embed(self.length, self.width, embedding_init=nn.initializers.normal(0.02))
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))[None]
        x = x.astype(self.dtype)
        for index in range(self.layers):
            x = block(self.width, self.heads, 4 * self.width, self.dtype, self.remat, name=f"block_{index}")(x)
        x = nn.LayerNorm(dtype=self.dtype, use_bias=False)(x)
        return embed.attend(x.astype(jnp.float32))


def nanodo(  # noqa: PLR0913 - sizes
    *,
    batch: int = 16,
    length: int = 512,
    width: int = 512,
    heads: int = 8,
    layers: int = 6,
    vocabulary: int = 32_768,
    dtype: Any = jnp.bfloat16,
) -> PlanCase:
    """The decoder of nanodo's form."""

    def loss_of(remat: str) -> Loss:
        model = Decoder(width, heads, layers, length, vocabulary, dtype, remat)
        return lambda params, tokens: next_token_loss(model.apply(params, tokens[:, :-1]), tokens)

    def initial(key: jax.Array) -> tuple[Any, ...]:
        tokens = random_tokens(key, batch, length, vocabulary)
        params = Decoder(width, heads, layers, length, vocabulary, dtype).init(key, tokens[:1, :-1])
        return params, OPTIMIZER.init(params), tokens

    return compared_losses("decoder after nanodo", loss_of, initial)
