"""A ViT after Equinox's example: patches of one image, a class token, dropout with keys, mapped over the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from benchmarks.plan_models.case import (
    NONE,
    OPTIMIZER,
    PlanCase,
    Step,
    class_loss,
    compared,
    named,
    policy,
    random_images,
)

SAVED = ("attention", "up")


class Block(eqx.Module):
    """Attention and a GELU layer, with dropout; x[N, width]."""

    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, width: int, heads: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.norm1 = eqx.nn.LayerNorm(width)
        self.norm2 = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[2])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x: jax.Array, key: jax.Array, remat: str) -> jax.Array:
        first, second = jax.random.split(key)
        h = jax.vmap(self.norm1)(x)
        x = x + named(self.attention(h, h, h), "attention", remat)
        h = named(jax.vmap(self.up)(jax.vmap(self.norm2)(x)), "up", remat)
        h = self.dropout(jax.nn.gelu(h), key=first)
        return x + self.dropout(jax.vmap(self.down)(h), key=second)


class ViT(eqx.Module):
    """image[3, size, size] -> logits[classes]."""

    patches: eqx.nn.Conv2d
    positions: jax.Array
    token: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(  # noqa: PLR0913 - sizes
        self, *, size: int, patch: int, width: int, heads: int, layers: int, classes: int, key: jax.Array
    ) -> None:
        keys = jax.random.split(key, layers + 4)
        self.patches = eqx.nn.Conv2d(3, width, patch, patch, key=keys[0])
        self.positions = 0.02 * jax.random.normal(keys[1], ((size // patch) ** 2 + 1, width))
        self.token = 0.02 * jax.random.normal(keys[2], (1, width))
        self.blocks = [Block(width, heads, one) for one in keys[4:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, classes, key=keys[3])

    def __call__(self, image: jax.Array, key: jax.Array, remat: str) -> jax.Array:
        x = self.patches(image)
        x = jnp.concatenate([self.token, x.reshape(x.shape[0], -1).T]) + self.positions
        for block, own in zip(self.blocks, jax.random.split(key, len(self.blocks)), strict=True):
            if remat == NONE:
                x = block(x, own, remat)
            else:
                call = lambda block, x, own: block(x, own, remat)  # noqa: E731
                x = eqx.filter_checkpoint(call, policy=policy(remat, SAVED))(block, x, own)
        return self.head(self.norm(x[0]))


def equinox_vit(  # noqa: PLR0913 - sizes
    *,
    batch: int = 64,
    size: int = 32,
    patch: int = 4,
    width: int = 256,
    heads: int = 8,
    layers: int = 6,
    classes: int = 10,
) -> PlanCase:
    """The Equinox ViT, float32; its step takes a random key."""

    def make(key: jax.Array) -> ViT:
        return ViT(size=size, patch=patch, width=width, heads=heads, layers=layers, classes=classes, key=key)

    shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    _, static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def step_of(value_and_grad: Callable[..., Any], remat: str) -> Step:
        def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
            model = eqx.combine(params, static)
            images = batch["image"].transpose(0, 3, 1, 2)
            logits = jax.vmap(lambda image, own: model(image, own, remat))(images, jax.random.split(key, len(images)))
            return class_loss(logits, batch["label"])

        def step(params: Any, opt_state: Any, batch: Any, key: jax.Array) -> Any:
            value, grads = value_and_grad(loss)(params, batch, key)
            updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        return step

    def initial(key: jax.Array) -> tuple[Any, ...]:
        params = eqx.filter(make(key), eqx.is_inexact_array)
        return params, OPTIMIZER.init(params), random_images(key, batch, size, classes), key

    return compared("ViT, Equinox", step_of, initial)
