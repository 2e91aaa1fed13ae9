"""An image classifier in Equinox on scikit-learn's digits: the whole model is the step's argument, functions and all.

python examples/equinox_digits.py --steps 200 --logdir runs/equinox && tensorboard --logdir runs
"""

from __future__ import annotations

import argparse
from typing import Any

import digits
import equinox as eqx
import jax
import optax

import jaxmem_callbacks as jm

OPTIMIZER = optax.adamw(3e-3)


@jm.eqx.value_and_grad  # was eqx.filter_value_and_grad
def loss_and_gradients(model: eqx.Module, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train_step(model: eqx.Module, opt_state: Any, batch: digits.Images) -> tuple[eqx.Module, Any, dict[str, jax.Array]]:
    loss, gradients = loss_and_gradients(model, batch["image"], batch["label"])
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, {"loss": loss}


def accuracy(model: eqx.Module, unseen: digits.Images) -> float:
    return float((jax.vmap(model)(unseen["image"]).argmax(-1) == unseen["label"]).mean())


def main() -> eqx.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--logdir", default="runs/equinox")
    parser.add_argument("--presets", nargs="+", default=["donate", "full_remat"])
    args = parser.parse_args()

    train, unseen = digits.load()
    model = eqx.nn.MLP(64, 10, width_size=128, depth=4, activation=jax.nn.gelu, key=jax.random.key(0))
    opt_state = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))

    preset = jm.load_preset(*args.presets)
    step = jm.jit_step(train_step, preset)  # was eqx.filter_jit(train_step)
    with jm.MemoryMonitor(preset, logdir=args.logdir) as monitor:
        for i, batch in enumerate(digits.batches(train, args.steps, 64)):
            model, opt_state, metrics = step(model, opt_state, batch)
            monitor(i, metrics)
            if i % 20 == 0 or i == args.steps - 1:
                print(f"step {i:4d}  loss {metrics['loss']:.3f}")
    print(f"test accuracy {accuracy(model, unseen):.3f}")
    return model


if __name__ == "__main__":
    main()
