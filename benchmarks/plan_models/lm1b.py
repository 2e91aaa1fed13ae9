"""A language model after Flax's lm1b example: sinusoids, dropout, label smoothing, padding weights, a head in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.plan_models.case import NONE, OPTIMIZER, PlanCase, Step, compared, named, policy, random_tokens

SAVED = ("attended", "up")


def sinusoids(length: int, width: int) -> np.ndarray:
    """Fixed positions, float32[length, width]."""
    angles = np.arange(length)[:, None] * np.exp(np.arange(0, width, 2) * -(np.log(10_000.0) / width))
    return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, width).astype(np.float32)


class Block(nn.Module):
    """Pre-norm attention and a ReLU layer, with dropout behind each; x[B, T, width]."""

    heads: int
    hidden: int
    rate: float
    dtype: Any
    remat: str

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        drop = nn.Dropout(self.rate, deterministic=False)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.MultiHeadDotProductAttention(
            self.heads, dtype=self.dtype, use_bias=False, dropout_rate=self.rate, deterministic=False
        )(h, mask=mask)
        x = x + drop(named(h, "attended", self.remat))
        h = named(nn.Dense(self.hidden, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)), "up", self.remat)
        h = drop(nn.relu(h))
        return x + drop(nn.Dense(x.shape[-1], dtype=self.dtype)(h))


class Decoder(nn.Module):
    """tokens[B, T] -> float32 logits[B, T, vocabulary]; 0 is padding."""

    width: int
    heads: int
    layers: int
    vocabulary: int
    dtype: Any
    remat: str = NONE

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        block = Block if self.remat == NONE else nn.remat(Block, policy=policy(self.remat, SAVED))
        mask = nn.combine_masks(nn.make_attention_mask(tokens > 0, tokens > 0), nn.make_causal_mask(tokens))
        x = nn.Embed(self.vocabulary, self.width, embedding_init=nn.initializers.normal(1.0))(tokens)
        x = x + sinusoids(tokens.shape[1], self.width)[None]
        x = nn.Dropout(0.1, deterministic=False)(x).astype(self.dtype)
        for index in range(self.layers):
            x = block(self.heads, 4 * self.width, 0.1, self.dtype, self.remat, name=f"decoderblock_{index}")(x, mask)
        x = nn.LayerNorm(dtype=self.dtype, name="decoder_norm")(x)
        return nn.Dense(self.vocabulary, dtype=jnp.float32, name="logits")(x)


def smoothed(logits: jax.Array, targets: jax.Array, smoothing: float = 0.1) -> jax.Array:
    """Cross entropy against softened labels, over targets that are no padding."""
    words = logits.shape[-1]
    low = smoothing / (words - 1)
    soft = jax.nn.one_hot(targets, words) * (1 - smoothing - low) + low
    losses = -jnp.sum(soft * nn.log_softmax(logits), axis=-1)
    weights = (targets > 0).astype(jnp.float32)
    return (losses * weights).sum() / weights.sum()


def lm1b(  # noqa: PLR0913 - sizes
    *,
    batch: int = 16,
    length: int = 256,
    width: int = 512,
    heads: int = 8,
    layers: int = 6,
    vocabulary: int = 30_000,
    dtype: Any = jnp.bfloat16,
) -> PlanCase:
    """The language model of lm1b's form; its step takes a random key."""

    def step_of(value_and_grad: Callable[..., Any], remat: str) -> Step:
        model = Decoder(width, heads, layers, vocabulary, dtype, remat)

        def loss(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
            return smoothed(model.apply(params, tokens[:, :-1], rngs={"dropout": key}), tokens[:, 1:])

        def step(params: Any, opt_state: Any, tokens: jax.Array, key: jax.Array) -> Any:
            value, grads = value_and_grad(loss)(params, tokens, key)
            updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        return step

    def initial(key: jax.Array) -> tuple[Any, ...]:
        tokens = random_tokens(key, batch, length, vocabulary)
        params = Decoder(width, heads, layers, vocabulary, dtype).init({"params": key, "dropout": key}, tokens[:1, :8])
        return params, OPTIMIZER.init(params), tokens, key

    return compared("language model after lm1b", step_of, initial)
