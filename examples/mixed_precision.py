"""Mixed precision: a classifier computes in bfloat16 and keeps its weights in float32. What that saves is printed before it runs.

python examples/mixed_precision.py --steps 200 --logdir runs/mixed --target h100_sxm
A CPU saves nothing by it; ``--target`` asks the compiler of hardware that is not here. The step is the user's own `nnx.jit`;
jm.nnx.value_and_grad, jm.jit_step and jm.MemoryMonitor are what was added.
"""

from __future__ import annotations

import argparse

import digits
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxmem_callbacks as jm

ROWS, WIDTH, LAYERS = 256, 64, 3


class Block(nnx.Module):
    """A normed layer with a residual; its weights are float32, its products are in ``dtype``."""

    def __init__(self, width: int, dtype: jnp.dtype, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, param_dtype=jnp.float32, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, param_dtype=jnp.float32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Classifier(nnx.Module):
    """images[B, 64] -> logits[B, 10]."""

    def __init__(self, dtype: jnp.dtype, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Linear(64, WIDTH, dtype=dtype, param_dtype=jnp.float32, rngs=rngs)
        self.blocks = nnx.List([Block(WIDTH, dtype, rngs=rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, 10, dtype=jnp.float32, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.astype(jnp.float32))  # the loss in float32


def loss_fn(model: Classifier, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()


@nnx.jit(donate_argnames=("model", "optimizer"))  # the user's own jit and donation; jm.jit_step keeps both
def train_step(model: Classifier, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    loss, grads = jm.nnx.value_and_grad(loss_fn)(model, batch)  # was nnx.value_and_grad
    optimizer.update(model, grads)
    return {"loss": loss}


def new_state(dtype: jnp.dtype) -> tuple[Classifier, nnx.Optimizer]:
    model = Classifier(dtype, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def main() -> Classifier:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--logdir", default="runs/mixed")
    parser.add_argument("--presets", nargs="+", default=["full_remat"])
    parser.add_argument("--target", help="such as h100_sxm; without it the bytes are those of this machine")
    args = parser.parse_args()

    train, _ = digits.load()
    preset = jm.load_preset(*args.presets)
    step = jm.jit_step(train_step, preset)
    batch = digits.chosen(train, slice(ROWS))
    for dtype in (jnp.float32, jnp.bfloat16):  # abstract states: planning takes no memory for them
        state = nnx.eval_shape(lambda dtype=dtype: new_state(dtype))
        memory = jm.step_memory(step, *state, batch, target=args.target)
        print(
            f"in {jnp.dtype(dtype).name}: {memory.step_bytes / 2**20:.1f} MiB, state {memory.alias_bytes / 2**20:.1f} MiB"
        )

    model, optimizer = new_state(jnp.bfloat16)
    with jm.MemoryMonitor(preset, logdir=args.logdir) as monitor:
        for i, batch in enumerate(digits.batches(train, args.steps, ROWS)):
            metrics = step(model, optimizer, batch)
            monitor(i, metrics)
            if i % 10 == 0 or i == args.steps - 1:
                print(f"step {i:4d}  loss {float(metrics['loss']):.3f}")
    return model


if __name__ == "__main__":
    main()
