"""A vision transformer in Flax Linen: patches by a convolution, a class token, learned positions, bf16 compute."""

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
    class_loss,
    compared_losses,
    named,
    policy,
    random_images,
)

SAVED = ("attention", "up")


class Block(nn.Module):
    """Pre-norm attention and a GELU layer; x[B, T, width]."""

    width: int
    heads: int
    dtype: Any
    remat: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(h, h)
        x = x + named(h, "attention", self.remat)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = named(nn.Dense(4 * self.width, dtype=self.dtype)(h), "up", self.remat)
        return x + nn.Dense(self.width, dtype=self.dtype)(nn.gelu(h))


class ViT(nn.Module):
    """images[B, H, W, 3] -> logits[B, classes]."""

    width: int
    heads: int
    layers: int
    patch: int
    classes: int
    dtype: Any
    remat: str = NONE

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        block = Block if self.remat == NONE else nn.remat(Block, policy=policy(self.remat, SAVED))
        patch = (self.patch, self.patch)
        x = nn.Conv(self.width, patch, strides=patch, padding="VALID", dtype=self.dtype, name="patches")(images)
        x = x.reshape(x.shape[0], -1, self.width)
        token = self.param("token", nn.initializers.zeros, (1, 1, self.width)).astype(x.dtype)
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, self.width)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:])).astype(x.dtype)
        for index in range(self.layers):
            x = block(self.width, self.heads, self.dtype, self.remat, name=f"block_{index}")(x)
        return nn.Dense(self.classes, name="head")(nn.LayerNorm(dtype=self.dtype)(x)[:, 0])


def vit(  # noqa: PLR0913 - sizes
    *,
    batch: int = 64,
    size: int = 224,
    patch: int = 16,
    width: int = 384,
    heads: int = 6,
    layers: int = 6,
    classes: int = 1000,
    dtype: Any = jnp.bfloat16,
) -> PlanCase:
    """The vision transformer (ViT-S/16, half as deep)."""

    def model(remat: str) -> ViT:
        return ViT(width, heads, layers, patch, classes, dtype, remat)

    def loss_of(remat: str) -> Loss:
        return lambda params, batch: class_loss(model(remat).apply(params, batch["image"]), batch["label"])

    def initial(key: jax.Array) -> tuple[Any, ...]:
        images = random_images(key, batch, size, classes)
        params = model(NONE).init(key, images["image"][:1])
        return params, OPTIMIZER.init(params), images

    return compared_losses("ViT, Linen", loss_of, initial)
