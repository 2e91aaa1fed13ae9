"""A byte-level transformer in Flax NNX with Optax: jm.nnx.value_and_grad, jm.jit_step and jm.MemoryMonitor are what was added.

python examples/nnx_transformer.py --steps 200 --logdir runs/nnx && tensorboard --logdir runs
"""

from __future__ import annotations

import argparse

import jax
import optax
import text
from flax import nnx

import jaxmem_callbacks as jm


class Block(nnx.Module):
    """Causal attention, then a GELU layer, both with dropout; x[B, T, width]."""

    def __init__(self, width: int, heads: int, dropout: float, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, dropout_rate=dropout, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class Transformer(nnx.Module):
    """tokens[B, T] -> logits[B, T, 256]; one scan over the stacked blocks."""

    def __init__(self, width: int, layers: int, length: int, dropout: float, *, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(width, 4, dropout, rngs=rngs)

        self.embed = nnx.Embed(text.VOCABULARY, width, rngs=rngs)
        self.places = nnx.Embed(length, width, rngs=rngs)
        self.blocks = stack(rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, text.VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        def layer(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        x = self.embed(tokens) + self.places.embedding[: tokens.shape[1]]
        x = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        return self.head(self.norm(x))


def loss_fn(model: Transformer, batch: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:]).mean()


def train_step(model: Transformer, optimizer: nnx.Optimizer, batch: jax.Array) -> dict[str, jax.Array]:
    loss, grads = jm.nnx.value_and_grad(loss_fn)(model, batch)  # was nnx.value_and_grad
    optimizer.update(model, grads)
    return {"loss": loss}


def main() -> Transformer:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--logdir", default="runs/nnx")
    parser.add_argument("--presets", nargs="+", default=["donate", "full_remat"])
    args = parser.parse_args()

    train, _ = text.standard_library()
    rows = text.sequences(train, count=args.steps * 8, length=128)
    model = Transformer(width=128, layers=4, length=128, dropout=0.1, rngs=nnx.Rngs(0))
    model.train()  # dropout on
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    preset = jm.load_preset(*args.presets)
    step = jm.jit_step(train_step, preset)  # was nnx.jit(train_step)
    with jm.MemoryMonitor(preset, logdir=args.logdir) as monitor:
        for i, batch in enumerate(text.batches(rows, 8)):
            metrics = step(model, optimizer, batch)
            monitor(i, metrics)
            if i % 10 == 0 or i == args.steps - 1:
                print(f"step {i:4d}  loss {float(metrics['loss']):.3f}")
    return model


if __name__ == "__main__":
    main()
