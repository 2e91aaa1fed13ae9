"""Small models of each kind with eight scanned layers, so that eight devices could split the layer axis and must not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import jaxmem_callbacks as jm

LAYERS, WIDTH, VOCABULARY = 8, 48, 40
# Adam would divide a gradient that is zero but for rounding by itself; momentum keeps differences in proportion.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9))


class Case(NamedTuple):
    """A step of one kind with its state and a batch; `result` reads the arrays of a state."""

    step: Callable[..., Any]
    state: tuple[Any, ...]
    batch: jax.Array
    result: Callable[[tuple[Any, ...]], Any] = lambda state: state


def tokens(rows: int = 16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (rows, 9)), jnp.int32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def plain() -> Case:
    """Parameters and optimizer state as two arguments."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, 0.1, shape), jnp.float32)

    blocks = {"wide": normal(LAYERS, WIDTH, 2 * WIDTH), "narrow": normal(LAYERS, 2 * WIDTH, WIDTH)}
    params = {
        "embed": normal(VOCABULARY, WIDTH),
        "blocks": blocks | {"bias": normal(LAYERS, WIDTH)},
        "head": normal(WIDTH, VOCABULARY),
    }

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return x + jax.nn.gelu(x @ layer["wide"]) @ layer["narrow"] + layer["bias"], None

        x, _ = jax.lax.scan(block, params["embed"][batch[:, :-1]], params["blocks"])
        return cross_entropy(x @ params["head"], batch[:, 1:])

    def train_step(params: Any, opt_state: Any, batch: jax.Array) -> Any:
        loss, grads = jm.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return Case(train_step, (params, jax.jit(OPTIMIZER.init)(params)), tokens())


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        wide = nn.Dense(2 * WIDTH, kernel_init=nn.with_logical_partitioning(KERNEL, ("embed", "mlp")))(
            nn.LayerNorm()(x)
        )
        return x + nn.Dense(WIDTH, kernel_init=nn.with_logical_partitioning(KERNEL, ("mlp", "embed")))(
            nn.gelu(wide)
        ), None


KERNEL = nn.initializers.lecun_normal()


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, batch: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH)(batch)
        blocks = nn.scan(
            LinenBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = blocks()(x)
        return nn.Dense(VOCABULARY)(x)


def linen() -> Case:
    """A TrainState with boxed parameters, annotated by logical names."""
    model = LinenModel()

    def make() -> TrainState:
        params = model.init(jax.random.key(0), tokens()[:, :-1])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=OPTIMIZER)

    state = jax.jit(make)()

    def train_step(state: TrainState, batch: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return cross_entropy(state.apply_fn({"params": params}, batch[:, :-1]), batch[:, 1:])

        loss, grads = jm.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return Case(train_step, (state,), tokens(), lambda state: (state[0].params, state[0].opt_state))


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.wide = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.narrow(nnx.gelu(self.wide(self.norm(x))))


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> NnxBlock:
            return NnxBlock(rngs)

        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = make(rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, batch: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, block: NnxBlock) -> jax.Array:
            return block(x)

        return self.head(run(self.embed(batch), self.blocks))


def nnx_model() -> Case:
    """A module and an optimizer, changed in place."""

    @nnx.jit
    def make() -> tuple[NnxModel, nnx.Optimizer]:
        model = NnxModel(nnx.Rngs(0))
        return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    def train_step(model: NnxModel, optimizer: nnx.Optimizer, batch: jax.Array) -> Any:
        def loss_fn(model: NnxModel) -> jax.Array:
            return cross_entropy(model(batch[:, :-1]), batch[:, 1:])

        loss, grads = jm.nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    return Case(train_step, make(), tokens(), lambda state: tuple(nnx.to_pure_dict(nnx.state(s)) for s in state))


def equinox() -> Case:
    """An Equinox model, its arrays apart from its functions."""

    @eqx.filter_jit
    def make() -> Any:
        keys = jax.random.split(jax.random.key(0), LAYERS)
        stack = eqx.filter_vmap(lambda key: eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, activation=jax.nn.gelu, key=key))(
            keys
        )
        return eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0]), stack, eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[1])

    arrays, static = eqx.partition(make(), eqx.is_array)

    def loss_fn(arrays: Any, batch: jax.Array) -> jax.Array:
        embed, stack, head = eqx.combine(arrays, static)
        layers, functions = eqx.partition(stack, eqx.is_array)

        def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            mlp = eqx.combine(layer, functions)
            return x + jax.vmap(jax.vmap(mlp))(x), None

        x, _ = jax.lax.scan(block, jax.vmap(jax.vmap(embed))(batch[:, :-1]), layers)
        return cross_entropy(jax.vmap(jax.vmap(head))(x), batch[:, 1:])

    def train_step(arrays: Any, opt_state: Any, batch: jax.Array) -> Any:
        loss, grads = jm.value_and_grad(loss_fn)(arrays, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, arrays)
        return optax.apply_updates(arrays, updates), opt_state, loss

    return Case(train_step, (arrays, jax.jit(OPTIMIZER.init)(arrays)), tokens())


@functools.cache
def case_of(kind: str) -> Case:
    """One case of a kind, made once; its state is shared, so nobody donates it."""
    return CASES[kind]()


def fresh(state: Any) -> Any:
    """A copy that may be donated."""
    return jax.tree.map(jnp.copy, state)


CASES = {"plain": plain, "linen": linen, "nnx": nnx_model, "equinox": equinox}
