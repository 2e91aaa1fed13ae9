"""A checkpoint around each block that repeats: found in what frameworks trace, and equal to what is written by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import LossRefusedError
from jaxmem_callbacks.transforms.costs import jaxpr_flops
from tests.comparisons import assert_close, checkpoints, stored_bytes

WIDTH, ROWS, LAYERS = 8, 16, 3
X = jnp.ones((ROWS, WIDTH))


def as_blocks(loss: Callable[..., Any], **policy: Any) -> Callable[..., Any]:
    return jm.remat(loss, "full", segments="blocks", **policy)


def mlp(x: jax.Array, p: Any) -> jax.Array:
    h = (x - x.mean(-1, keepdims=True)) * p["scale"]
    return x + jax.nn.gelu(h @ p["up"]) @ p["down"]


def attention(x: jax.Array, p: Any) -> jax.Array:
    return x + jax.nn.softmax((x @ p["up"]) @ (x @ p["up"]).T) @ x @ p["up"] @ p["down"]


def weights(layers: int, hidden: int = 4 * WIDTH) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), 2 * layers).reshape(layers, 2)
    return [
        {
            "scale": jnp.ones(WIDTH),
            "up": jax.random.normal(up, (WIDTH, hidden)) / WIDTH,
            "down": jax.random.normal(down, (hidden, WIDTH)) / WIDTH,
        }
        for up, down in keys
    ]


def stack_of(one: Callable[..., Any], *others: Callable[..., Any]) -> Callable[..., Any]:
    """A net whose layers are written out: those of each kind one after the other."""

    def loss(groups: Any, head: jax.Array, x: jax.Array) -> jax.Array:
        x = jnp.sin(x @ head @ head.T)
        for layer, group in zip((one, *others), groups, strict=True):
            for p in group:
                x = layer(x, p)
        return (jax.nn.log_softmax(x @ head) ** 2).mean()

    return loss


def same_gradients(loss: Callable[..., Any], *args: Any) -> None:
    ours, theirs = (jax.jit(jax.value_and_grad(each))(*args) for each in (as_blocks(loss), loss))
    assert_close(ours, theirs)


def equal_to_the_hand(by_hand: Callable[..., Any], loss: Callable[..., Any], *args: Any) -> None:
    """As many checkpoints, as many operations and as many stored bytes, and the same gradients."""
    ours = as_blocks(loss)
    assert len(checkpoints(ours, *args)) == len(checkpoints(by_hand, *args))
    flops = [jaxpr_flops(jax.make_jaxpr(jax.value_and_grad(each))(*args)) for each in (ours, by_hand)]
    assert flops[0] == flops[1]
    assert stored_bytes(ours, *args) == stored_bytes(by_hand, *args)
    same_gradients(loss, *args)


@pytest.mark.core
@pytest.mark.parametrize("kinds", [(mlp,), (attention,), (attention, mlp)], ids=["mlp", "attention", "two kinds"])
def test_layers_written_out_get_the_checkpoints_that_are_written_by_hand(kinds):
    args = [weights(LAYERS) for _ in kinds], jnp.ones((WIDTH, 5)), X
    equal_to_the_hand(stack_of(*map(jax.checkpoint, kinds)), stack_of(*kinds), *args)


@pytest.mark.core
def test_layers_of_linen_get_the_checkpoints_of_its_own_remat():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
            return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))

    class Net(nn.Module):
        block: Any

        @nn.compact
        def __call__(self, x):
            for place in range(LAYERS):
                x = self.block(name=f"block_{place}")(x)
            return nn.Dense(5)(nn.LayerNorm()(x))

    params = Net(Block).init(jax.random.key(0), X)
    loss, by_hand = (
        lambda p, x, block=block: (Net(block).apply(p, x) ** 2).mean() for block in (Block, nn.remat(Block))
    )
    equal_to_the_hand(by_hand, loss, params, X)


@pytest.mark.core
def test_layers_of_nnx_get_a_checkpoint_each():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.up, self.down = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.Linear(32, WIDTH, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
            self.head = nnx.Linear(WIDTH, 5, rngs=rngs)

        def __call__(self, x, wrap=lambda block: block):
            for block in self.blocks:
                x = wrap(block)(x)
            return self.head(x)

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    loss, by_hand = (
        lambda s, x, wrap=wrap: (nnx.merge(graph, s)(x, wrap) ** 2).mean()
        for wrap in (lambda block: block, jax.checkpoint)
    )
    equal_to_the_hand(by_hand, loss, state, X)


@pytest.mark.core
def test_blocks_of_unlike_shapes_are_told_apart_by_their_scopes():
    class Block(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x):
            return nn.Conv(self.width, (1, 1))(nn.swish(nn.Conv(self.width, (3, 3))(nn.GroupNorm(4)(x))))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for width in (8, 16, 32):
                x = nn.avg_pool(Block(width)(x), (2, 2), (2, 2))
            return x

    x = jnp.ones((2, 16, 16, 8))
    params = Net().init(jax.random.key(0), x)
    found = checkpoints(as_blocks(lambda p, x: (Net().apply(p, x) ** 2).mean()), params, x)
    scopes = [{str(eqn.source_info.name_stack) for eqn in each.params["jaxpr"].eqns} for each in found]
    names = [{name for scope in each for name in re.findall(r"Block_\d", scope)} for each in scopes]
    assert names == [{"Block_0"}, {"Block_1"}, {"Block_2"}][: len(names)]
    assert len(names) >= 2


@pytest.mark.core
def test_a_loop_over_layers_gets_its_checkpoint_inside_and_nothing_else_does():
    def loss(params, head, x):
        x = jax.lax.scan(lambda x, p: (mlp(x, p), None), jnp.sin(x @ head.T @ head), params)[0]
        return ((x @ head.T) ** 2).mean()

    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights(LAYERS))
    args = params, jnp.ones((5, WIDTH)), X
    (found,) = checkpoints(as_blocks(loss), *args)
    assert len(found.params["jaxpr"].eqns) > 3
    same_gradients(loss, *args)


def test_keeping_more_of_the_blocks_computes_less_again():
    loss, args = stack_of(mlp), ([weights(LAYERS)], jnp.ones((WIDTH, 5)), X)
    flops = [jaxpr_flops(jax.make_jaxpr(jax.grad(as_blocks(loss, keep=keep)))(*args)) for keep in (0.0, 0.4, 1.0)]
    stored = [stored_bytes(as_blocks(loss, keep=keep), *args) for keep in (0.0, 0.4, 1.0)]
    assert flops == sorted(flops, reverse=True)
    assert flops[0] > flops[-1]
    assert stored == sorted(stored)


@pytest.mark.parametrize("loss", [lambda w, x: ((x @ w) ** 2).mean(), lambda w, x: jnp.exp(x).sum() * w.sum()])
def test_a_loss_without_blocks_is_refused(loss):
    with pytest.raises(LossRefusedError, match="segments='blocks' would do nothing: no block of this loss repeats"):
        as_blocks(loss)(jnp.ones((WIDTH, 5)), X)


@pytest.mark.core
def test_checkpoints_of_the_author_stay_the_only_ones_around_their_blocks():
    args = [weights(LAYERS)], jnp.ones((WIDTH, 5)), X
    with pytest.raises(LossRefusedError, match="own checkpoints"):
        as_blocks(stack_of(jax.checkpoint(mlp)))(*args)


@settings(deadline=None, max_examples=15)
@given(
    layers=st.integers(2, 6),
    depth=st.integers(1, 3),
    before=st.integers(0, 2),
    after=st.integers(0, 2),
    same=st.booleans(),
)
def test_however_a_net_is_made_less_is_stored_and_no_layer_has_two_checkpoints(layers, depth, before, after, same):
    """Blocks of any depth, with other layers before and behind them that may be like parts of a block."""
    square = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * (layers * depth)

    def loss(weights, x):
        for _ in range(before):
            x = jnp.tanh(x @ weights[0]) if same else jnp.sin(x)
        for layer in range(layers):
            for place in range(depth):
                x = x + jnp.tanh(x @ weights[layer * depth + place]) * (place + 1)
        for _ in range(after):
            x = jnp.tanh(x @ weights[0]) if same else jnp.cos(x)
        return (x**2).mean()

    found = checkpoints(as_blocks(loss), square, X)
    products = [sum(eqn.primitive.name == "dot_general" for eqn in each.params["jaxpr"].eqns) for each in found]
    assert 2 <= len(found) <= layers * depth + 2 * (before + after)
    assert sum(products) <= layers * depth + (before + after) * same
    assert stored_bytes(as_blocks(loss), square, X) < stored_bytes(loss, square, X)
