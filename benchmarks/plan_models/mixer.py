"""An MLP-mixer in plain JAX: parameters in dicts and lists, functions of arrays, a Python loop over the blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

SAVED = ("tokens_up", "channels_up")


def _dense(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, (inputs, outputs)) / inputs**0.5, "b": jnp.zeros(outputs)}


def _norm(width: int) -> dict[str, jax.Array]:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def _apply_dense(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


def _apply_norm(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    mean, variance = x.mean(axis=-1, keepdims=True), x.var(axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6) * p["scale"] + p["bias"]


def _block(p: dict[str, Any], x: jax.Array, remat: str) -> jax.Array:
    """Mix tokens, then channels; x[B, T, width]."""
    h = _apply_norm(p["norm1"], x).swapaxes(1, 2)
    h = jax.nn.gelu(named(_apply_dense(p["tokens_up"], h), "tokens_up", remat))
    x = x + _apply_dense(p["tokens_down"], h).swapaxes(1, 2)
    h = jax.nn.gelu(named(_apply_dense(p["channels_up"], _apply_norm(p["norm2"], x)), "channels_up", remat))
    return x + _apply_dense(p["channels_down"], h)


def forward(params: Any, images: jax.Array, patch: int, remat: str) -> jax.Array:
    """images[B, H, W, 3] -> logits[B, classes]."""
    batch, size = images.shape[0], images.shape[1] // patch
    x = images.reshape(batch, size, patch, size, patch, 3).swapaxes(2, 3).reshape(batch, size * size, -1)
    x = _apply_dense(params["patches"], x)
    block: Callable[..., Any] = lambda p, x: _block(p, x, remat)  # noqa: E731
    if remat != NONE:
        block = jax.checkpoint(block, policy=policy(remat, SAVED))
    for p in params["blocks"]:
        x = block(p, x)
    return _apply_dense(params["head"], _apply_norm(params["norm"], x).mean(axis=1))


def mixer(  # noqa: PLR0913 - sizes
    *,
    batch: int = 64,
    size: int = 224,
    patch: int = 16,
    width: int = 384,
    hidden: int = 192,
    layers: int = 8,
    classes: int = 1000,
) -> PlanCase:
    """The MLP-mixer (S/16 but for its width), float32."""

    def initial(key: jax.Array) -> tuple[Any, ...]:
        tokens = (size // patch) ** 2
        keys = jax.random.split(key, 4 * layers + 2)
        blocks = [
            {
                "norm1": _norm(width),
                "tokens_up": _dense(keys[4 * i], tokens, hidden),
                "tokens_down": _dense(keys[4 * i + 1], hidden, tokens),
                "norm2": _norm(width),
                "channels_up": _dense(keys[4 * i + 2], width, 4 * width),
                "channels_down": _dense(keys[4 * i + 3], 4 * width, width),
            }
            for i in range(layers)
        ]
        patches, head = _dense(keys[-2], 3 * patch * patch, width), _dense(keys[-1], width, classes)
        params = {"patches": patches, "blocks": blocks, "norm": _norm(width), "head": head}
        return params, OPTIMIZER.init(params), random_images(key, batch, size, classes)

    def loss_of(remat: str) -> Loss:
        return lambda params, batch: class_loss(forward(params, batch["image"], patch, remat), batch["label"])

    return compared_losses("MLP-mixer, plain JAX", loss_of, initial)
