"""A diffusion transformer in Flax Linen, layers unrolled: a condition shifts, scales and gates each block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.plan_models.case import NONE, OPTIMIZER, PlanCase, Step, compared, named, policy

SAVED = ("attended", "up")


def modulated(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """x[B, N, width] under one shift and scale an image."""
    return x * (1 + scale[:, None]) + shift[:, None]


class Block(nn.Module):
    """Attention and a GELU layer, each modulated and gated; x[B, N, width], condition[B, width]."""

    width: int
    heads: int
    dtype: Any
    remat: str

    @nn.compact
    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        norm = lambda: nn.LayerNorm(dtype=self.dtype, use_bias=False, use_scale=False)  # noqa: E731
        parts = nn.Dense(6 * self.width, dtype=self.dtype)(nn.silu(condition))
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(parts, 6, axis=-1)
        h = modulated(norm()(x), shift1, scale1)
        attended = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype, deterministic=True)(h, h)
        x = x + gate1[:, None] * named(attended, "attended", self.remat)
        h = modulated(norm()(x), shift2, scale2)
        up = named(nn.Dense(4 * self.width, dtype=self.dtype)(h), "up", self.remat)
        return x + gate2[:, None] * nn.Dense(self.width, dtype=self.dtype)(nn.gelu(up, approximate=True))


class DiT(nn.Module):
    """latent[B, size, size, channels], time[B], label[B] -> noise, as the latent."""

    patch: int
    width: int
    heads: int
    layers: int
    classes: int
    dtype: Any
    remat: str = NONE

    @nn.compact
    def __call__(self, latent: jax.Array, time: jax.Array, label: jax.Array) -> jax.Array:
        batch, size, _, channels = latent.shape
        cells = (self.patch, self.patch)
        x = nn.Conv(self.width, cells, strides=cells, padding="VALID", dtype=self.dtype)(latent)
        side = size // self.patch
        x = x.reshape(batch, side * side, self.width)
        x = x + self.param("positions", nn.initializers.normal(0.02), (side * side, self.width)).astype(self.dtype)
        angles = time[:, None] * jnp.exp(-jnp.log(10_000.0) * jnp.arange(128) / 128)
        waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)
        condition = nn.Dense(self.width, dtype=self.dtype)(nn.silu(nn.Dense(self.width, dtype=self.dtype)(waves)))
        condition = condition + nn.Embed(self.classes + 1, self.width, dtype=self.dtype)(label)
        block = Block if self.remat == NONE else nn.remat(Block, policy=policy(self.remat, SAVED))
        for index in range(self.layers):
            x = block(self.width, self.heads, self.dtype, self.remat, name=f"block_{index}")(x, condition)
        shift, scale = jnp.split(nn.Dense(2 * self.width, dtype=self.dtype)(nn.silu(condition)), 2, axis=-1)
        x = modulated(nn.LayerNorm(dtype=self.dtype, use_bias=False, use_scale=False)(x), shift, scale)
        x = nn.Dense(self.patch**2 * channels, dtype=jnp.float32)(x)
        x = x.reshape(batch, side, side, self.patch, self.patch, channels).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(latent.shape)


def dit(  # noqa: PLR0913 - sizes
    *,
    batch: int = 32,
    size: int = 32,
    patch: int = 2,
    width: int = 384,
    heads: int = 6,
    layers: int = 12,
    classes: int = 1000,
    dtype: Any = jnp.bfloat16,
) -> PlanCase:
    """The diffusion transformer; its step takes latents, labels and a random key."""

    def step_of(value_and_grad: Callable[..., Any], remat: str) -> Step:
        model = DiT(patch, width, heads, layers, classes, dtype, remat)

        def loss(params: Any, latent: jax.Array, label: jax.Array, key: jax.Array) -> jax.Array:
            when, what = jax.random.split(key)
            time = jax.random.uniform(when, (latent.shape[0],))
            noise = jax.random.normal(what, latent.shape)
            alpha = jnp.cos(0.5 * jnp.pi * time)[:, None, None, None]
            noisy = alpha * latent + jnp.sqrt(1 - alpha**2) * noise
            return jnp.square(model.apply(params, noisy, 1000 * time, label) - noise).mean()

        def step(params: Any, opt_state: Any, latent: jax.Array, label: jax.Array, key: jax.Array) -> Any:
            value, grads = value_and_grad(loss)(params, latent, label, key)
            updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        return step

    def initial(key: jax.Array) -> tuple[Any, ...]:
        latent = jax.random.normal(key, (batch, size, size, 4))
        label = jax.random.randint(key, (batch,), 0, classes)
        model = DiT(patch, width, heads, layers, classes, dtype)
        params = model.init(key, latent[:1], jnp.zeros(1), label[:1])
        return params, OPTIMIZER.init(params), latent, label, key

    return compared("diffusion transformer", step_of, initial)
