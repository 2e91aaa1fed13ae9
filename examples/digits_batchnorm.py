"""An image classifier with BatchNorm on scikit-learn's bundled digits, in Flax Linen: its running statistics stay right.

python examples/digits_batchnorm.py --steps 300 --logdir runs/digits && tensorboard --logdir runs
"""

from __future__ import annotations

import argparse
from typing import Any

import digits
import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training import train_state

import jaxmem_callbacks as jm


class TrainState(train_state.TrainState):
    """The usual state, with BatchNorm's running means and variances beside the parameters."""

    batch_stats: Any


class Classifier(nn.Module):
    """images[B, 8, 8, 1] -> logits[B, 10]: three convolutions, each with BatchNorm."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        for channels in (32, 64, 64):
            x = nn.Conv(channels, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(10)(x.mean(axis=(1, 2)))


def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updates = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, updates["batch_stats"]

    (loss, batch_stats), grads = jm.value_and_grad(loss_fn, has_aux=True)(state.params)  # was jax.value_and_grad
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), {"loss": loss}


def as_images(batch: digits.Images) -> np.ndarray:
    return batch["image"].reshape(-1, 8, 8, 1)


def accuracy(state: TrainState, unseen: digits.Images) -> float:
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return float((state.apply_fn(variables, as_images(unseen), train=False).argmax(-1) == unseen["label"]).mean())


def main() -> TrainState:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--logdir", default="runs/digits")
    parser.add_argument("--presets", nargs="+", default=["donate", "full_remat"])
    args = parser.parse_args()

    train, unseen = digits.load()
    model = Classifier()
    variables = model.init(jax.random.key(0), as_images(unseen)[:1], train=False)
    state = TrainState.create(apply_fn=model.apply, tx=optax.adamw(3e-3), **variables)

    preset = jm.load_preset(*args.presets)
    step = jm.jit_step(train_step, preset)  # was jax.jit(train_step)
    with jm.MemoryMonitor(preset, logdir=args.logdir) as monitor:
        for i, batch in enumerate(digits.batches(train, args.steps, 64)):
            state, metrics = step(state, as_images(batch), batch["label"])
            monitor(i, metrics)
            if i % 20 == 0 or i == args.steps - 1:
                print(f"step {i:4d}  loss {metrics['loss']:.3f}")
    print(f"test accuracy {accuracy(state, unseen):.3f}")
    return state


if __name__ == "__main__":
    main()
