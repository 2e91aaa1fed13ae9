"""A GPT-2-like transformer in Flax Linen with dropout, tied embeddings, and parameters cast to bf16 at the top of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.plan_models.case import (
    NONE,
    OPTIMIZER,
    PlanCase,
    Step,
    compared,
    named,
    next_token_loss,
    policy,
    random_tokens,
)

SAVED = ("attention", "up")


class Block(nn.Module):
    """Pre-norm attention and a GELU layer with dropout after each, and on the attention weights; x[B, T, width]."""

    width: int
    heads: int
    dropout: float
    remat: str

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:  # noqa: FBT001 - as Linen models have it
        attention = nn.MultiHeadDotProductAttention(self.heads, dropout_rate=self.dropout, deterministic=not train)
        h = attention(nn.LayerNorm()(x), mask=nn.make_causal_mask(x[..., 0]))
        h = named(h, "attention", self.remat)
        x = x + nn.Dropout(self.dropout)(h, deterministic=not train)
        h = named(nn.Dense(4 * self.width)(nn.LayerNorm()(x)), "up", self.remat)
        h = nn.Dense(self.width)(nn.gelu(h))
        return x + nn.Dropout(self.dropout)(h, deterministic=not train)


class GPT(nn.Module):
    """tokens[B, T] -> logits[B, T, vocabulary], by the transposed embedding."""

    width: int
    heads: int
    layers: int
    vocabulary: int
    dropout: float
    remat: str = NONE

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:  # noqa: FBT001 - as Linen models have it
        block = Block
        if self.remat != NONE:
            block = nn.remat(Block, policy=policy(self.remat, SAVED), static_argnums=(2,))
        embed = nn.Embed(self.vocabulary, self.width)
        positions = self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        x = nn.Dropout(self.dropout)(embed(tokens) + positions, deterministic=not train)
        for index in range(self.layers):
            x = block(self.width, self.heads, self.dropout, self.remat, name=f"block_{index}")(x, train)
        return embed.attend(nn.LayerNorm()(x))


def _step(value_and_grad: Callable[..., Any], model: GPT, dtype: Any) -> Step:
    def step(params: Any, opt_state: Any, batch: jax.Array, key: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            low = jax.tree.map(lambda p: p.astype(dtype), params)
            logits = model.apply(low, batch[:, :-1], True, rngs={"dropout": key})
            return next_token_loss(logits, batch)

        loss, grads = value_and_grad(loss_fn)(params)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def dropout_transformer(  # noqa: PLR0913 - sizes
    *,
    batch: int = 32,
    length: int = 256,
    width: int = 512,
    heads: int = 8,
    layers: int = 4,
    vocabulary: int = 4096,
    dropout: float = 0.1,
    dtype: Any = jnp.bfloat16,
) -> PlanCase:
    """The GPT-2-like transformer; its step takes a dropout key."""

    def model(remat: str) -> GPT:
        return GPT(width, heads, layers, vocabulary, dropout, remat)

    def initial(key: jax.Array) -> tuple[Any, ...]:
        tokens = random_tokens(key, batch, length, vocabulary)
        params = model(NONE).init(key, tokens[:1, :-1], False)
        return params, OPTIMIZER.init(params), tokens, key

    def step_of(value_and_grad: Callable[..., Any], remat: str) -> Step:
        return _step(value_and_grad, model(remat), dtype)

    return compared("transformer, Linen, dropout, tied, bf16 cast", step_of, initial)
