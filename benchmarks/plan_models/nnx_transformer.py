"""A transformer in Flax NNX whose layers are stacked and scanned; the step merges and splits the model, as for `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxmem_callbacks as jm
from benchmarks.plan_models.case import (
    NONE,
    OPTIMIZER,
    PlanCase,
    Step,
    compared,
    named,
    next_token_loss,
    policy,
    random_tokens,
)

SAVED = ("attention", "up")


class Block(nnx.Module):
    """Pre-norm attention and a GELU layer; x[B, T, width]."""

    def __init__(self, width: int, heads: int, dtype: Any, remat: str, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, dtype=dtype, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)
        self.remat = remat

    def __call__(self, x: jax.Array) -> jax.Array:
        attended = self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        x = x + named(attended, "attention", self.remat)
        return x + self.down(nnx.gelu(named(self.up(self.norm2(x)), "up", self.remat)))


class Transformer(nnx.Module):
    """tokens[B, T] -> logits[B, T, vocabulary], learned positions, one scan over the stacked blocks."""

    def __init__(  # noqa: PLR0913 - sizes
        self,
        *,
        width: int,
        heads: int,
        layers: int,
        length: int,
        vocabulary: int,
        dtype: Any,
        remat: str,
        rngs: nnx.Rngs,
    ) -> None:
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(width, heads, dtype, remat, rngs=rngs)

        self.embed = nnx.Embed(vocabulary, width, dtype=dtype, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, width)))
        self.blocks = stack(rngs)
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, use_bias=False, dtype=dtype, rngs=rngs)
        self.remat = remat

    def __call__(self, tokens: jax.Array) -> jax.Array:
        def layer(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        if self.remat != NONE:
            layer = nnx.remat(layer, policy=policy(self.remat, SAVED), prevent_cse=False)
        x = self.embed(tokens)
        x = x + self.positions[...].astype(x.dtype)
        x = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        return self.head(self.norm(x))


def _loss(model: Transformer, tokens: jax.Array) -> jax.Array:
    return next_token_loss(model(tokens[:, :-1]), tokens)


def functional_step(value_and_grad: Callable[..., Any], graph: Any, loss: Callable[..., Any]) -> Step:
    """A step of a model's state: merge, differentiate, update, split."""

    def step(state: Any, opt_state: Any, batch: Any) -> Any:
        model = nnx.merge(graph, state)
        value, grads = value_and_grad(loss)(model, batch)
        params = nnx.state(model, nnx.Param)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        nnx.update(model, optax.apply_updates(params, updates))
        return nnx.state(model), opt_state, value

    return step


def functional_case(
    name: str,
    make: Callable[[str, Any], nnx.Module],
    loss: Callable[..., Any],
    initial: Callable[[jax.Array], tuple[Any, ...]],
) -> PlanCase:
    """The case of a module made for a remat policy and a key, whose step is of its state."""

    def step_of(value_and_grad: Callable[..., Any], remat: str) -> Step:
        graph = nnx.graphdef(nnx.eval_shape(lambda: make(remat, 0)))
        return functional_step(value_and_grad, graph, loss)

    gradients = (jm.nnx.value_and_grad, nnx.value_and_grad)
    return compared(name, step_of, initial, gradients=gradients, donate_argnames=("state", "opt_state"))


def nnx_transformer(  # noqa: PLR0913 - sizes
    *,
    batch: int = 32,
    length: int = 256,
    width: int = 512,
    heads: int = 8,
    layers: int = 8,
    vocabulary: int = 4096,
    dtype: Any = jnp.bfloat16,
) -> PlanCase:
    """The scanned NNX transformer."""

    def make(remat: str, key: Any) -> Transformer:
        return Transformer(
            width=width,
            heads=heads,
            layers=layers,
            length=length,
            vocabulary=vocabulary,
            dtype=dtype,
            remat=remat,
            rngs=nnx.Rngs(key),
        )

    def initial(key: jax.Array) -> tuple[Any, ...]:
        model = make(NONE, key)
        opt_state = OPTIMIZER.init(nnx.state(model, nnx.Param))
        return nnx.state(model), opt_state, random_tokens(key, batch, length, vocabulary)

    return functional_case("transformer, NNX, scanned", make, _loss, initial)
