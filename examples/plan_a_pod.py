"""A plan for a pod from a laptop: does a 7-billion-parameter transformer fit on 64 H100, and how is it trained cheapest there?

Nothing runs and no accelerator is needed: the state is shapes only, and the pod's own compiler is asked.
python examples/plan_a_pod.py --target v5p:4x4x4 --budget 80GiB --logdir runs/pod && tensorboard --logdir runs
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.targets.target import resolve_target
from jaxmem_callbacks.records.errors import TargetError

LENGTH, VOCABULARY, HEAD = 2048, 32_000, 128


class Block(nn.Module):
    """Causal attention, then a gated layer, in bfloat16; x[B, T, width]."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        y = nn.RMSNorm(dtype=x.dtype)(x)
        heads = (self.width // HEAD, HEAD)
        q, k, v = (nn.DenseGeneral(heads, use_bias=False, dtype=x.dtype, name=name)(y) for name in ("q", "k", "v"))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.DenseGeneral(self.width, axis=(-2, -1), use_bias=False, dtype=x.dtype, name="out")(attended)
        y = nn.RMSNorm(dtype=x.dtype)(x)
        gate, up = (nn.Dense(11 * self.width // 4, use_bias=False, dtype=x.dtype, name=n)(y) for n in ("gate", "up"))
        return x + nn.Dense(self.width, use_bias=False, dtype=x.dtype, name="down")(nn.silu(gate) * up), None


class Transformer(nn.Module):
    """tokens[B, T] -> logits[B, T, VOCABULARY]; one scan over the stacked blocks."""

    width: int
    layers: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, self.width, dtype=jnp.bfloat16)(tokens)
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
        x, _ = blocks(self.width)(x)
        return nn.Dense(VOCABULARY, use_bias=False, dtype=jnp.bfloat16)(nn.RMSNorm()(x)).astype(jnp.float32)


def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
    def loss_fn(params: dict[str, object]) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    loss, grads = jm.value_and_grad(loss_fn)(state.params)  # was jax.value_and_grad
    return state.apply_gradients(grads=grads), {"loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="h100_sxm:64")
    parser.add_argument("--budget", help="such as 70GiB; without it all that a program can use there")
    parser.add_argument("--model", type=int, nargs=2, default=(4096, 32), metavar=("WIDTH", "LAYERS"))
    parser.add_argument("--rows", type=int, default=4, help=f"sequences of {LENGTH} tokens on each device")
    parser.add_argument("--json", type=Path, help="file for the whole plan, which jm.load_plan reads on the pod")
    parser.add_argument("--logdir", help="folder where TensorBoard finds the plan")
    args = parser.parse_args()
    try:
        devices = resolve_target(args.target).device_count
    except TargetError as error:  # an unknown name, or what to install
        sys.exit(str(error))

    model = Transformer(*args.model)
    batch = jax.ShapeDtypeStruct((args.rows * devices, LENGTH + 1), jnp.int32)

    def new_state() -> TrainState:
        params = model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-4))

    state = jax.eval_shape(new_state)  # shapes and dtypes only
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params)) / 1e9
    print(f"{size:.2f} billion parameters, {batch.shape[0]} rows of {LENGTH} tokens, {devices} devices", flush=True)
    plan = jm.plan(train_step, state, batch, target=args.target, budget=args.budget)
    print(plan if plan.chosen.fits is False else f"{plan}\n\nAs a preset:\n\n{plan.to_yaml()}")
    if args.json:
        args.json.write_text(plan.to_json() + "\n")
    if args.logdir:
        print(f"tensorboard --logdir {plan.to_tensorboard(args.logdir)}")


if __name__ == "__main__":
    main()
