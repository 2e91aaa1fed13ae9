"""A byte-level transformer in Flax Linen with a TrainState: jm.value_and_grad, jm.jit_step and jm.MemoryMonitor were added.

python examples/linen_transformer.py --steps 200 --logdir runs/linen && tensorboard --logdir runs
"""

from __future__ import annotations

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import text
from flax.training.train_state import TrainState

import jaxmem_callbacks as jm


class Block(nn.Module):
    """Causal attention, then a GELU layer, both with dropout; x[B, T, width]."""

    width: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> tuple[jax.Array, None]:  # noqa: FBT001 - nn.scan passes by position
        mask = nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(4, dropout_rate=self.dropout, deterministic=not train)
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        h = nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return x + nn.Dropout(self.dropout, deterministic=not train)(h), None


class Transformer(nn.Module):
    """tokens[B, T] -> logits[B, T, 256]; one scan over the stacked blocks."""

    width: int = 128
    layers: int = 4
    dropout: float = 0.1

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool) -> jax.Array:
        x = nn.Embed(text.VOCABULARY, self.width)(tokens)
        x = x + nn.Embed(tokens.shape[1], self.width, name="places")(jnp.arange(tokens.shape[1]))
        blocks = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=self.layers,
        )
        x, _ = blocks(self.width, self.dropout)(x, train)
        return nn.Dense(text.VOCABULARY)(nn.LayerNorm()(x))


def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
    dropout = jax.random.fold_in(jax.random.key(1), state.step)

    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = state.apply_fn({"params": params}, batch[:, :-1], train=True, rngs={"dropout": dropout})
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()
        return loss, (logits.argmax(-1) == batch[:, 1:]).mean()

    (loss, accuracy), grads = jm.value_and_grad(loss_fn, has_aux=True)(state.params)  # was jax.value_and_grad
    return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}


def main() -> TrainState:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--logdir", default="runs/linen")
    parser.add_argument("--presets", nargs="+", default=["donate", "full_remat"])
    args = parser.parse_args()

    train, _ = text.standard_library()
    rows = text.sequences(train, count=args.steps * 8, length=128)
    model = Transformer()
    params = model.init(jax.random.key(0), rows[:1, :-1], train=False)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    preset = jm.load_preset(*args.presets)
    step = jm.jit_step(train_step, preset)  # was jax.jit(train_step)
    with jm.MemoryMonitor(preset, logdir=args.logdir) as monitor:
        for i, batch in enumerate(text.batches(rows, 8)):
            state, metrics = step(state, batch)
            monitor(i, metrics)
            if i % 10 == 0 or i == args.steps - 1:
                print(f"step {i:4d}  loss {metrics['loss']:.3f}  next byte right {metrics['accuracy']:.1%}")
    return state


if __name__ == "__main__":
    main()
