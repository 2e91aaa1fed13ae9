"""A ResNet with bottlenecks and BatchNorm in Flax Linen; the statistics travel beside the parameters as mutable state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
    class_loss,
    compared,
    named,
    policy,
    random_images,
)

# No row of dots: a convolution is no dot to JAX's policies, so that row would equal `full`.
SAVED = ("conv",)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with BatchNorm, and a projected skip where the shape changes; x[B, H, W, C]."""

    channels: int
    stride: int
    dtype: Any
    remat: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype)

        def conv(x: jax.Array, channels: int, size: int, stride: int = 1) -> jax.Array:
            layer = nn.Conv(channels, (size, size), (stride, stride), use_bias=False, dtype=self.dtype)
            return named(layer(x), "conv", self.remat)

        h = nn.relu(norm()(conv(x, self.channels, 1)))
        h = nn.relu(norm()(conv(h, self.channels, 3, self.stride)))
        h = norm()(conv(h, 4 * self.channels, 1))
        if x.shape != h.shape:
            x = norm()(conv(x, 4 * self.channels, 1, self.stride))
        return nn.relu(x + h)


class ResNet(nn.Module):
    """images[B, H, W, 3] -> logits[B, classes]."""

    stages: Sequence[int]
    channels: int
    classes: int
    dtype: Any
    remat: str = NONE

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        block = Bottleneck if self.remat == NONE else nn.remat(Bottleneck, policy=policy(self.remat, SAVED))
        x = nn.Conv(self.channels, (7, 7), (2, 2), use_bias=False, dtype=self.dtype)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, count in enumerate(self.stages):
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                name = f"block_{stage}_{index}"
                x = block(self.channels * 2**stage, stride, self.dtype, self.remat, name=name)(x)
        return nn.Dense(self.classes)(x.mean(axis=(1, 2)).astype(jnp.float32))


def _step(value_and_grad: Callable[..., Any], model: ResNet) -> Step:
    def step(state: Any, opt_state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            logits, new = model.apply(variables, batch["image"], mutable=["batch_stats"])
            return class_loss(logits, batch["label"]), new["batch_stats"]

        (loss, statistics), grads = value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = OPTIMIZER.update(grads, opt_state, state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "batch_stats": statistics}, opt_state, loss

    return step


def resnet(  # noqa: PLR0913 - sizes
    *,
    batch: int = 64,
    size: int = 224,
    channels: int = 64,
    stages: Sequence[int] = (2, 2),
    classes: int = 1000,
    dtype: Any = jnp.bfloat16,
) -> PlanCase:
    """The ResNet (the first two stages of a ResNet-26)."""

    def model(remat: str) -> ResNet:
        return ResNet(stages, channels, classes, dtype, remat)

    def initial(key: jax.Array) -> tuple[Any, ...]:
        images = random_images(key, batch, size, classes)
        state = dict(model(NONE).init(key, images["image"][:1]))
        return state, OPTIMIZER.init(state["params"]), images

    return compared(
        "ResNet, Linen, BatchNorm",
        lambda gradient, remat: _step(gradient, model(remat)),
        initial,
        rows=(FULL, NAMES),
        donate_argnames=("state", "opt_state"),
    )
