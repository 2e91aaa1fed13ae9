"""LoRA: a classifier that knows five digits learns the other five. Its weights stay frozen; EMA, and evaluation beside training.

python examples/lora.py --steps 200 --logdir runs/lora && tensorboard --logdir runs
Pure JAX with Optax, the step under the user's own `jax.jit`; jm.value_and_grad, jm.jit_step and jm.MemoryMonitor were added.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import digits
import jax
import jax.numpy as jnp
import optax

import jaxmem_callbacks as jm

SHAPES = {"embed": (64, 128), "layers": (4, 128, 128), "head": (128, 10)}
RANK, ROWS, DECAY, EVERY, NEW = 8, 128, 0.9, 10, 5
ADAM = optax.adam(3e-3)
Arrays = dict[str, jax.Array]


class State(NamedTuple):
    """What training moves: adapters, their average, their optimizer. The frozen weights are none of it."""

    adapters: dict[str, tuple[jax.Array, jax.Array]]
    average: dict[str, tuple[jax.Array, jax.Array]]
    optimizer: Any


def new_state() -> State:
    """Two thin factors for each matrix; their product is zero, so training begins where the frozen weights are."""
    adapters = {}
    for name, (*layers, wide, out) in SHAPES.items():
        down = jax.random.normal(jax.random.key(1), (*layers, wide, RANK)) / RANK
        adapters[name] = (down, jnp.zeros((*layers, RANK, out)))
    return State(adapters, jax.tree.map(jnp.copy, adapters), ADAM.init(adapters))


def logits(adapters: Any, frozen: Arrays, image: jax.Array) -> jax.Array:
    weights = {name: kernel + adapters[name][0] @ adapters[name][1] for name, kernel in frozen.items()}
    x, _ = jax.lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w), None), image @ weights["embed"], weights["layers"])
    return x @ weights["head"]


def loss_fn(adapters: Any, frozen: Arrays, batch: Arrays) -> jax.Array:
    outputs = logits(adapters, frozen, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["label"]).mean()


@jax.jit(donate_argnames="state")  # the user's own jit and donation; jm.jit_step keeps both
def train_step(state: State, frozen: Arrays, batch: Arrays) -> tuple[State, Arrays]:
    loss, grads = jm.value_and_grad(loss_fn)(state.adapters, frozen, batch)  # was jax.value_and_grad
    updates, optimizer = ADAM.update(grads, state.optimizer)
    adapters = optax.apply_updates(state.adapters, updates)
    return State(adapters, optax.incremental_update(adapters, state.average, 1 - DECAY), optimizer), {"loss": loss}


@jax.jit
def eval_step(adapters: Any, frozen: Arrays, batch: Arrays) -> jax.Array:
    return (logits(adapters, frozen, batch["image"]).argmax(-1) == batch["label"]).mean()


def pretrained(images: Arrays) -> Arrays:
    """A base model; in real life it is loaded."""
    weights = {name: jax.nn.initializers.lecun_normal()(jax.random.key(0), shape) for name, shape in SHAPES.items()}
    gradient = jax.jit(jax.grad(loss_fn, argnums=1))  # all of it is trained, and the adapters add nothing yet
    for batch in digits.batches(images, 60, ROWS):
        weights = jax.tree.map(
            lambda weight, slope: weight - 0.1 * slope, weights, gradient(new_state().adapters, weights, batch)
        )
    return weights


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--logdir", default="runs/lora")
    parser.add_argument("--presets", nargs="+", default=["full_remat"])
    args = parser.parse_args()

    train, unseen = digits.load()
    frozen, state = pretrained(digits.chosen(train, train["label"] < NEW)), new_state()
    preset = jm.load_preset(*args.presets)
    step = jm.jit_step(train_step, preset)
    with jm.MemoryMonitor(preset, logdir=args.logdir) as monitor:
        for i, batch in enumerate(digits.batches(train, args.steps, ROWS)):
            state, metrics = step(state, frozen, batch)
            if i % EVERY == 0 or i == args.steps - 1:  # evaluation beside training, by the averaged adapters
                metrics["unseen"] = eval_step(state.average, frozen, unseen)
                print(f"step {i:4d}  loss {metrics['loss']:.3f}  unseen images right {metrics['unseen']:.1%}")
            monitor(i, metrics)
    print(jm.step_memory(step, state, frozen, batch))  # compiled already


if __name__ == "__main__":
    main()
