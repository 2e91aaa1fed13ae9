"""A diffusion U-Net in Flax Linen: time embedding, GroupNorm, skips from one end to the other, attention in the middle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.plan_models.case import (
    FULL,
    NAMES,
    NONE,
    OPTIMIZER,
    PlanCase,
    Step,
    compared,
    named,
    policy,
)

# No row of dots: a convolution is no dot to JAX's policies, so that row would equal `full`.
SAVED = ("conv",)


class ResBlock(nn.Module):
    """Two convolutions after GroupNorm and silu, shifted by the time; x[B, H, W, C] -> [B, H, W, channels]."""

    channels: int
    dtype: Any
    remat: str

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        h = nn.silu(nn.GroupNorm(num_groups=8, dtype=self.dtype)(x))
        h = named(nn.Conv(self.channels, (3, 3), dtype=self.dtype)(h), "conv", self.remat)
        h = h + nn.Dense(self.channels, dtype=self.dtype)(nn.silu(time))[:, None, None, :]
        h = nn.silu(nn.GroupNorm(num_groups=8, dtype=self.dtype)(h))
        h = named(nn.Conv(self.channels, (3, 3), dtype=self.dtype)(h), "conv", self.remat)
        if x.shape != h.shape:
            x = nn.Conv(self.channels, (1, 1), dtype=self.dtype)(x)
        return x + h


class AttentionBlock(nn.Module):
    """Attention over all pixels; x[B, H, W, C]."""

    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.GroupNorm(num_groups=8, dtype=self.dtype)(x).reshape(x.shape[0], -1, x.shape[-1])
        return x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(h, h).reshape(x.shape)


class UNet(nn.Module):
    """Noisy images[B, H, W, 3] at times[B] -> the noise in them."""

    channels: Sequence[int]
    dtype: Any
    remat: str = NONE

    @nn.compact
    def __call__(self, x: jax.Array, times: jax.Array) -> jax.Array:
        block: Any = ResBlock
        attention: Any = AttentionBlock
        if self.remat != NONE:
            block, attention = (nn.remat(m, policy=policy(self.remat, SAVED)) for m in (ResBlock, AttentionBlock))
        width = 4 * self.channels[0]
        angles = times[:, None] * jnp.exp(-jnp.log(10_000.0) * jnp.arange(self.channels[0] // 2) / self.channels[0])
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        time = nn.Dense(width, dtype=self.dtype)(nn.silu(nn.Dense(width, dtype=self.dtype)(time)))
        x = nn.Conv(self.channels[0], (3, 3), dtype=self.dtype)(x)
        skips: list[jax.Array] = []
        for index, channels in enumerate(self.channels):
            x = block(channels, self.dtype, self.remat, name=f"down_{index}")(x, time)
            skips.append(x)
            x = nn.Conv(channels, (3, 3), (2, 2), dtype=self.dtype)(x)
        x = block(2 * self.channels[-1], self.dtype, self.remat, name="middle")(x, time)
        x = attention(4, self.dtype, name="attention")(x)
        for index, channels in reversed(list(enumerate(self.channels))):
            x = jax.image.resize(x, (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "nearest")
            x = jnp.concatenate([x, skips.pop()], axis=-1)
            x = block(channels, self.dtype, self.remat, name=f"up_{index}")(x, time)
        return nn.Conv(3, (3, 3), dtype=jnp.float32)(nn.silu(nn.GroupNorm(num_groups=8, dtype=self.dtype)(x)))


def _step(value_and_grad: Callable[..., Any], model: Any) -> Step:
    def step(params: Any, opt_state: Any, batch: jax.Array, key: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            time_key, noise_key = jax.random.split(key)
            times = jax.random.uniform(time_key, batch.shape[:1])
            noise = jax.random.normal(noise_key, batch.shape)
            share = jnp.cos(0.5 * jnp.pi * times)[:, None, None, None]
            noisy = share * batch + jnp.sqrt(1 - share**2) * noise
            return jnp.mean((model.apply(params, noisy, 1000 * times) - noise) ** 2)

        loss, grads = value_and_grad(loss_fn)(params)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def unet(
    batch: int = 32,
    size: int = 64,
    channels: Sequence[int] = (64, 128),
    dtype: Any = jnp.bfloat16,
) -> PlanCase:
    """The diffusion U-Net; its step takes the key of times and noise."""

    def model(remat: str) -> UNet:
        return UNet(channels, dtype, remat)

    def initial(key: jax.Array) -> tuple[Any, ...]:
        images = jax.random.normal(key, (batch, size, size, 3))
        params = model(NONE).init(key, images[:1], jnp.zeros(1))
        return params, OPTIMIZER.init(params), images, key

    return compared("U-Net, Linen", lambda gradient, remat: _step(gradient, model(remat)), initial, rows=(FULL, NAMES))
