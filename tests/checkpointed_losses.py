"""Losses whose authors put checkpoints into them, each also as it would be written without them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm

POLICIES = jax.checkpoint_policies
LAYERS, ROWS, WIDTH, HIDDEN = 4, 32, 16, 48
KEY = jax.random.key(5)
INPUTS = jax.random.normal(KEY, (ROWS, WIDTH))
STACK = {
    "up": jax.random.normal(jax.random.fold_in(KEY, 1), (LAYERS, WIDTH, HIDDEN)) / 4,
    "down": jax.random.normal(jax.random.fold_in(KEY, 2), (LAYERS, HIDDEN, WIDTH)) / 8,
}
Loss = Callable[..., Any]
Form = tuple[Loss, Loss, Any]  # with its author's checkpoints, without them, its parameters


def block(x: Any, p: Any) -> Any:
    hidden = checkpoint_name(x @ p["up"], "hidden")
    return x + checkpoint_name(jnp.sin(jnp.tanh(hidden)) @ p["down"], "out")


def layers_of(stack: Any) -> list[Any]:
    return [jax.tree.map(lambda leaf, i=i: leaf[i], stack) for i in range(LAYERS)]


def in_python(wrap: Callable[[Loss], Loss]) -> Loss:
    """Blocks one after the other, each under the author's wrapper."""

    def loss(stack: Any, x: Any) -> Any:
        for p in layers_of(stack):
            x = wrap(block)(x, p)
        return (x**2).mean()

    return loss


def in_a_scan(wrap: Callable[[Loss], Loss]) -> Loss:
    """Blocks in a scan whose body is under the author's wrapper."""

    def loss(stack: Any, x: Any) -> Any:
        return (jax.lax.scan(wrap(lambda x, p: (block(x, p), None)), x, stack)[0] ** 2).mean()

    return loss


def nested(wrap: Callable[[Loss], Loss]) -> Loss:
    """Checkpoints in a checkpoint: around blocks, and around pairs of them."""

    def pair(x: Any, first: Any, second: Any) -> Any:
        return wrap(block)(wrap(block)(x, first), second)

    def loss(stack: Any, x: Any) -> Any:
        layers = layers_of(stack)
        for first, second in zip(layers[::2], layers[1::2], strict=True):
            x = wrap(pair)(x, first, second)
        return (x**2).mean()

    return loss


def branching(wrap: Callable[[Loss], Loss]) -> Loss:
    """A checkpoint in a branch, and one in a loop that runs as often as it takes."""

    def loss(stack: Any, x: Any) -> Any:
        steps = jax.lax.while_loop(wrap(lambda n: n < 3), wrap(lambda n: n + 1), 0)
        for p in layers_of(stack):
            x = jax.lax.cond(x.sum() > 0, wrap(block), lambda x, _: x * 0.5, x, p)
        return (x**2).mean() * steps

    return loss


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -1, 1) * jnp.cos(x),))


def with_rules(wrap: Callable[[Loss], Loss]) -> Loss:
    """Checkpoints around a custom derivative, inside the function that has one, and around a jitted function."""

    @jax.custom_jvp
    def ruled(x: Any) -> Any:
        return wrap(jnp.cos)(x)

    ruled.defjvp(lambda primals, tangents: (jnp.cos(primals[0]), -jnp.sin(primals[0]) * tangents[0]))

    def loss(stack: Any, x: Any) -> Any:
        for p in layers_of(stack):
            x = jax.jit(wrap(lambda x, p: ruled(clipped(block(x, p)))))(x, p)
        return (x**2).mean()

    return loss


def dropped(wrap: Callable[[Loss], Loss]) -> Loss:
    """Dropout under checkpoints: the masks of a recomputation are those of the first computation."""

    def layer(x: Any, p: Any, key: Any) -> Any:
        return block(x, p) * jax.random.bernoulli(key, 0.8, x.shape)

    def loss(stack: Any, x: Any, key: Any = KEY) -> Any:
        for index, p in enumerate(layers_of(stack)):
            x = wrap(layer)(x, p, jax.random.fold_in(key, index))
        return (x**2).mean()

    return loss


def in_a_shard_map(wrap: Callable[[Loss], Loss]) -> Loss:
    def loss(stack: Any, x: Any) -> Any:
        mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))

        def local(stack: Any, x: Any) -> Any:
            x = jax.lax.scan(wrap(lambda x, p: (block(x, p), None)), x, stack)[0]
            return jax.lax.pmean((x**2).mean(), "data")

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(stack, x)

    return loss


def of_slopes(wrap: Callable[[Loss], Loss]) -> Loss:
    """A gradient inside the loss, of a function with checkpoints."""
    inner = in_python(wrap)

    def loss(stack: Any, x: Any) -> Any:
        return inner(stack, x) + (jax.grad(inner, argnums=1)(stack, x) ** 2).sum()

    return loss


class Block(nn.Module):
    """Attention-free transformer block of Linen with dropout."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        hidden = nn.gelu(nn.Dense(HIDDEN)(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.1, deterministic=not train)(nn.Dense(WIDTH)(hidden))


class Stack(nn.Module):
    """Blocks in a scan over layers, as in public vision and language code: the body under `nn.remat` with a policy, or not."""

    checkpointed: bool

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        policy = POLICIES.dots_with_no_batch_dims_saveable
        body = nn.remat(Block, prevent_cse=False, static_argnums=(2,), policy=policy) if self.checkpointed else Block
        scanned = nn.scan(
            lambda block, x, _: (block(x, train), None),
            variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=LAYERS,
        )  # fmt: skip
        return scanned(body(name="layers"), x, None)[0]


def linen_scan(checkpointed: bool) -> Loss:
    model = Stack(checkpointed)

    def loss(params: Any, x: Any) -> Any:
        return (model.apply({"params": params}, x, True, rngs={"dropout": KEY}) ** 2).mean()

    return loss


class Layer(eqx.Module):
    """A block of Equinox."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        self.up = eqx.nn.Linear(WIDTH, HIDDEN, key=key)
        self.down = eqx.nn.Linear(HIDDEN, WIDTH, key=jax.random.fold_in(key, 1))

    def __call__(self, x: Any) -> Any:
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))


def equinox_scan(wrap: Callable[[Loss], Loss]) -> Loss:
    """Layers stacked and scanned, with the step of the loop under `eqx.filter_checkpoint`."""
    _, static = eqx.partition(Layer(KEY), eqx.is_array)

    def loss(stacked: Any, x: Any) -> Any:
        def step(x: Any, arrays: Any) -> Any:
            return wrap(lambda layer, x: layer(x))(eqx.combine(arrays, static), x), None

        return (jax.lax.scan(step, x, stacked)[0] ** 2).mean()

    return loss


def _plain(function: Loss) -> Loss:
    return function


named = functools.partial(jax.checkpoint, policy=POLICIES.save_only_these_names("out"))
offloading = functools.partial(
    jax.checkpoint,
    policy=POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["hidden"], offload_src="device", offload_dst="pinned_host"
    ),
)  # fmt: skip
ours = functools.partial(jm.remat, policy="full", keep=0.6)


def _form(make: Callable[[Any], Loss], wrap: Callable[[Loss], Loss] = jax.checkpoint, params: Any = STACK) -> Form:
    return make(wrap), make(_plain), params


def _whole() -> Form:
    loss = in_python(_plain)
    return jax.checkpoint(loss), loss, STACK


def _linen() -> Form:
    params = Stack(checkpointed=False).init({"params": KEY, "dropout": KEY}, INPUTS, False)["params"]
    return linen_scan(True), linen_scan(False), params


def _equinox() -> Form:
    stacked = eqx.filter_vmap(Layer)(jax.random.split(KEY, LAYERS))
    return _form(equinox_scan, eqx.filter_checkpoint, eqx.filter(stacked, eqx.is_array))


FORMS: dict[str, Callable[[], Form]] = {
    "by_block": functools.partial(_form, in_python),
    "by_block_named": functools.partial(_form, in_python, named),
    "by_block_offloading": functools.partial(_form, in_python, offloading),
    "by_jm_remat": functools.partial(_form, nested, ours),
    "scan": functools.partial(_form, in_a_scan),
    "scan_without_barrier": functools.partial(
        _form, in_a_scan, functools.partial(jax.checkpoint, prevent_cse=False, policy=POLICIES.dots_saveable)
    ),
    "nested": functools.partial(_form, nested),
    "branching": functools.partial(_form, branching),
    "with_rules": functools.partial(_form, with_rules),
    "dropped": functools.partial(_form, dropped),
    "shard_map": functools.partial(_form, in_a_shard_map),
    "of_slopes": functools.partial(_form, of_slopes),
    "whole": _whole,
    "linen_scan": _linen,
    "equinox_scan": _equinox,
}
