"""A mixture of experts in Flax Linen: top-2 routing into buffers of fixed capacity, dispatched and combined by einsum."""

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

SAVED = ("attention", "expert_up")


def top2(gates: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """gates[B, T, E] -> combine[B, T, E, C] of the two best experts that have room, and the balance loss."""
    experts = gates.shape[-1]
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), experts)
    second = jax.nn.one_hot(jnp.argmax(gates * (1 - first), axis=-1), experts)
    balance = experts * jnp.mean(jnp.mean(gates, axis=1) * jnp.mean(first, axis=1)) * experts
    place1 = (jnp.cumsum(first, axis=1) - 1) * first
    place2 = (jnp.cumsum(second, axis=1) - 1 + jnp.sum(first, axis=1, keepdims=True)) * second
    combine = jnp.zeros((*gates.shape, capacity))
    total = jnp.sum(gates * (first + second), axis=-1, keepdims=True)
    for chosen, place in ((first, place1), (second, place2)):
        room = chosen * (place < capacity)
        slot = jax.nn.one_hot(place.astype(jnp.int32), capacity)
        combine = combine + (room * gates / total)[..., None] * slot
    return combine, balance


class Experts(nn.Module):
    """x[B, T, width] through two of ``experts`` GELU layers; each row of the batch is one group of the routing."""

    width: int
    hidden: int
    experts: int
    dtype: Any
    remat: str

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = nn.Dense(self.experts, use_bias=False, dtype=jnp.float32, name="router")(x.astype(jnp.float32))
        combine, balance = top2(jax.nn.softmax(logits), max(1, 5 * x.shape[1] // (2 * self.experts)))
        start = nn.initializers.lecun_normal(batch_axis=(0,))
        up = self.param("up", start, (self.experts, self.width, self.hidden)).astype(self.dtype)
        down = self.param("down", start, (self.experts, self.hidden, self.width)).astype(self.dtype)
        dispatch = (combine > 0).astype(self.dtype)
        inputs = jnp.einsum("btec,btd->ebcd", dispatch, x.astype(self.dtype))
        hidden = named(jnp.einsum("ebcd,edh->ebch", inputs, up), "expert_up", self.remat)
        outputs = jnp.einsum("ebch,ehd->ebcd", nn.gelu(hidden), down)
        return jnp.einsum("btec,ebcd->btd", combine.astype(self.dtype), outputs), balance


class Block(nn.Module):
    """Pre-norm attention, then the experts; returns the balance loss besides."""

    width: int
    heads: int
    hidden: int
    experts: int
    dtype: Any
    remat: str

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        attention = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)
        h = attention(nn.LayerNorm(dtype=self.dtype)(x), mask=nn.make_causal_mask(x[..., 0]))
        x = x + named(h, "attention", self.remat)
        experts = Experts(self.width, self.hidden, self.experts, self.dtype, self.remat)
        h, balance = experts(nn.LayerNorm(dtype=self.dtype)(x))
        return x + h, balance


class Mixture(nn.Module):
    """tokens[B, T] -> logits[B, T, vocabulary] and the mean balance loss."""

    width: int
    heads: int
    layers: int
    hidden: int
    experts: int
    vocabulary: int
    dtype: Any
    remat: str = NONE

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        block = Block if self.remat == NONE else nn.remat(Block, policy=policy(self.remat, SAVED))
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        balances: list[jax.Array] = []
        for index in range(self.layers):
            layer = block(
                self.width, self.heads, self.hidden, self.experts, self.dtype, self.remat, name=f"block_{index}"
            )
            x, balance = layer(x)
            balances.append(balance)
        logits = nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return logits, jnp.mean(jnp.stack(balances))


def mixture(  # noqa: PLR0913 - sizes
    *,
    batch: int = 64,
    length: int = 256,
    width: int = 256,
    heads: int = 4,
    layers: int = 4,
    hidden: int = 512,
    experts: int = 8,
    vocabulary: int = 4096,
    dtype: Any = jnp.bfloat16,
) -> PlanCase:
    """The mixture of experts."""

    def model(remat: str) -> Any:
        return Mixture(width, heads, layers, hidden, experts, vocabulary, dtype, remat)

    def loss_of(remat: str) -> Loss:
        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            logits, balance = model(remat).apply(params, tokens[:, :-1])
            return next_token_loss(logits, tokens) + 0.01 * balance

        return loss

    def initial(key: jax.Array) -> tuple[Any, ...]:
        tokens = random_tokens(key, batch, length, vocabulary)
        params = model(NONE).init(key, tokens[:1, :-1])
        return params, OPTIMIZER.init(params), tokens

    return compared_losses("mixture of experts, Linen", loss_of, initial)
