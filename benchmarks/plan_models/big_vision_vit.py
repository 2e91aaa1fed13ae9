"""A ViT after big_vision's, in Flax Linen: one scan over layers, fixed positions, attention pooling, sigmoid loss."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.plan_models.case import (
    NONE,
    OPTIMIZER,
    Loss,
    PlanCase,
    compared_losses,
    named,
    policy,
    random_images,
)

SAVED = ("attended", "up")


class Layer(nn.Module):
    """Pre-norm attention and a GELU layer; x[B, N, width], as a scan's body."""

    heads: int
    dtype: Any
    remat: str

    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        h = nn.LayerNorm(dtype=self.dtype)(x)
        attention = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype, deterministic=True)
        x = x + named(attention(h, h), "attended", self.remat)
        h = named(nn.Dense(4 * x.shape[-1], dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)), "up", self.remat)
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(nn.gelu(h)), None


class ViT(nn.Module):
    """image[B, size, size, 3] -> float32 logits[B, classes]."""

    patch: int
    width: int
    heads: int
    layers: int
    classes: int
    dtype: Any
    remat: str = NONE

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        cells = (self.patch, self.patch)
        x = nn.Conv(self.width, cells, strides=cells, padding="VALID", dtype=self.dtype)(image)
        x = x.reshape(x.shape[0], -1, self.width)
        angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** jnp.linspace(0, 1, self.width // 2)
        x = x + jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(self.dtype)
        layer: Any = Layer
        if self.remat != NONE:
            layer = nn.remat(Layer, policy=policy(self.remat, SAVED), prevent_cse=False)
        stack = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
        x, _ = stack(self.heads, self.dtype, self.remat, name="layers")(x, None)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, self.width)).astype(self.dtype)
        pooled = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype, deterministic=True)(
            jnp.tile(probe, (x.shape[0], 1, 1)), x
        )
        return nn.Dense(self.classes, dtype=jnp.float32)(pooled[:, 0])


def big_vision_vit(  # noqa: PLR0913 - sizes
    *,
    batch: int = 64,
    size: int = 224,
    patch: int = 16,
    width: int = 384,
    heads: int = 6,
    layers: int = 12,
    classes: int = 1000,
    dtype: Any = jnp.bfloat16,
) -> PlanCase:
    """The scanned ViT of big_vision's form."""

    def loss_of(remat: str) -> Loss:
        model = ViT(patch, width, heads, layers, classes, dtype, remat)

        def loss(params: Any, batch: Any) -> jax.Array:
            logits = model.apply(params, batch["image"])
            return optax.sigmoid_binary_cross_entropy(logits, jax.nn.one_hot(batch["label"], classes)).sum(-1).mean()

        return loss

    def initial(key: jax.Array) -> tuple[Any, ...]:
        images = random_images(key, batch, size, classes)
        params = ViT(patch, width, heads, layers, classes, dtype).init(key, images["image"][:1])
        return params, OPTIMIZER.init(params), images

    return compared_losses("ViT after big_vision, scanned", loss_of, initial)
