"""Two levels of checkpoints: the same numbers, fewer bytes between the passes, for loops and for long chains."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.transforms.costs import jaxpr_flops
from jaxmem_callbacks.transforms.segments import sizes
from jaxmem_callbacks.transforms.tracing import open_jaxpr, subjaxprs
from tests.comparisons import assert_close, checkpoints, stored_bytes
from tests.target_step import keeps_remat, needs_compiler

pytestmark = pytest.mark.core

WIDTH, ROWS = 32, 512


def wide(h: Any) -> Any:
    """Something that keeps far more than what a layer hands on, so that every layer wants a checkpoint of its own."""
    for _ in range(12):
        h = jnp.sin(h)
    return h


def looped(weights: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        x = x + wide(x @ w)
        return x, x.mean()

    x, means = jax.lax.scan(layer, x, weights)
    return (x**2).mean() + (means * jnp.arange(len(weights))).sum()


def backwards(weights: Any, x: Any) -> Any:
    return (jax.lax.scan(lambda x, w: (x + wide(x @ w), x[0]), x, weights, reverse=True)[1] ** 2).mean()


def chained(weights: Any, x: Any) -> Any:
    skip = x
    for w in weights:
        x = x + jnp.tanh(x @ w)
    return ((x + skip) ** 2).mean()


def arguments(layers: int = 16) -> tuple[Any, Any]:
    weights = jax.random.normal(jax.random.key(0), (layers, WIDTH, WIDTH)) / 8
    return weights, jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


@pytest.mark.parametrize("loss", [looped, backwards, chained])
def test_the_root_is_stored_and_the_numbers_stay(loss: Any) -> None:
    args = arguments()
    wanted = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*args)
    segments = 12 if loss is chained else None
    once, twice = (jm.remat(loss, segments=segments, levels=levels) for levels in (1, 2))
    got = jax.jit(jax.value_and_grad(twice, argnums=(0, 1)))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)
    weights = args[0].nbytes
    assert stored_bytes(twice, *args) - weights < 0.75 * (stored_bytes(once, *args) - weights)
    nested = checkpoints(twice, *args)
    assert len(nested) > len(checkpoints(once, *args)) or loss is not chained
    flops = [jaxpr_flops(jax.make_jaxpr(jax.value_and_grad(each))(*args)) for each in (loss, once, twice)]
    assert flops == sorted(flops)


@pytest.mark.parametrize("loss", [looped, backwards])
def test_a_loop_without_divisors_is_divided_too(loss: Any) -> None:
    args = arguments(13)
    once, twice = (jm.remat(loss, levels=levels) for levels in (1, 2))
    wanted, got = (jax.jit(jax.value_and_grad(each, argnums=(0, 1)))(*args) for each in (loss, twice))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)
    weights = args[0].nbytes
    assert stored_bytes(twice, *args) - weights < 0.75 * (stored_bytes(once, *args) - weights)


def test_the_compiler_needs_fewer_bytes() -> None:
    args = arguments(64)
    temp = [
        jax.jit(jax.grad(jm.remat(looped, levels=levels))).lower(*args).compile().memory_analysis().temp_size_in_bytes
        for levels in (1, 2)
    ]
    assert temp[1] < 0.6 * temp[0]


def hidden(weights: Any, x: Any) -> Any:
    """Blocks that each keep several times what they hand on."""
    for w in weights:
        x = x + jnp.sin(jax.nn.gelu(x @ w))
    return (x**2).mean()


def nested_by_hand(weights: Any, x: Any, each: int) -> Any:
    """A checkpoint around every block, and one around every group of them, as one writes it."""
    block = jax.checkpoint(lambda x, w: x + jnp.sin(jax.nn.gelu(x @ w)))
    for start in range(0, len(weights), each):
        x = jax.checkpoint(lambda x, some: functools.reduce(block, some, x))(x, weights[start : start + each])
    return (x**2).mean()


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("cpu", marks=keeps_remat),
        pytest.param("h100_sxm", marks=[pytest.mark.targets, pytest.mark.recorded]),
    ],
)
def test_blocks_written_out_need_no_more_than_nested_checkpoints_by_hand(target: str) -> None:
    """With cuts that were chosen for two levels: those of one level are too far apart, since all of them are alive at once."""
    if target != "cpu":
        needs_compiler(target)
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 36
    args = weights, jax.ShapeDtypeStruct((4 * ROWS, WIDTH), jnp.float32)

    def needs(gradient: Any) -> tuple[int, float]:
        memory = jm.step_memory(jax.jit(gradient), *args, target=target)
        return memory.step_bytes, jaxpr_flops(jax.make_jaxpr(gradient)(*args))

    once, twice = (needs(jax.grad(jm.remat(hidden, levels=levels))) for levels in (1, 2))
    hand = [needs(jax.grad(functools.partial(nested_by_hand, each=each))) for each in (5, 6, 7)]
    assert twice[0] < 0.9 * once[0]
    assert twice[0] <= 1.02 * min(bytes_ for bytes_, _ in hand)
    assert twice[1] <= min(flops for _, flops in hand)


def test_what_reports_between_blocks_changes_no_group(capfd: Any) -> None:
    def reporting(weights: Any, x: Any) -> Any:
        for w in weights:
            x = x + jnp.sin(jax.nn.gelu(x @ w))
            jax.debug.print("mean {}", x.mean())
        return (x**2).mean()

    weights, x = arguments(24)
    cheaper = jm.remat(reporting, levels=2)
    got = jax.jit(jax.grad(cheaper))(weights, x)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("mean") == len(weights)
    np.testing.assert_allclose(got, jax.jit(jax.grad(hidden))(weights, x), rtol=1e-4, atol=1e-6)
    assert stored_bytes(cheaper, weights, x) < stored_bytes(jm.remat(reporting), weights, x)


@pytest.mark.parametrize("levels", [0, 3, True])
def test_other_numbers_of_levels_are_refused(levels: Any) -> None:
    with pytest.raises(PolicyError, match=r"levels=.*: expected 1 or 2"):
        jm.StepPolicy(remat="full", levels=levels)


def recurrent(weights: Any, x: Any, steps: int = 64, *, reverse: bool = False) -> Any:
    """A cell over time: its carry is large beside what one step computes, so a checkpoint around each step stores too much."""

    def cell(carry: Any, x: Any) -> Any:
        h, c = carry
        gate = jax.nn.sigmoid(x + h @ weights)
        c = gate * c + (1 - gate) * jnp.tanh(x)
        return (gate * jnp.tanh(c), c), h.mean()

    zeros = jnp.zeros((ROWS, WIDTH))
    inputs = x * jnp.arange(1.0, steps + 1.0)[:, None, None] / steps
    (h, _), means = jax.lax.scan(cell, (zeros, zeros), inputs, reverse=reverse)
    return (h**2).mean() + (means * jnp.arange(steps)).sum()


def test_steps_with_large_carries_share_a_checkpoint() -> None:
    weights, x = arguments()
    args = (weights[0], x)
    wanted = jax.jit(jax.value_and_grad(recurrent, argnums=(0, 1)))(*args)
    cheaper = jm.remat(recurrent)
    got = jax.jit(jax.value_and_grad(cheaper, argnums=(0, 1)))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)
    carries = 64 * 2 * ROWS * WIDTH * 4
    assert stored_bytes(cheaper, *args) < 0.8 * carries
    # Computed again once, as with a checkpoint around each step, and not twice.
    plain, ours = (jaxpr_flops(jax.make_jaxpr(jax.value_and_grad(each))(*args)) for each in (recurrent, cheaper))
    assert ours < 1.5 * plain


@pytest.mark.parametrize("reverse", [False, True])
def test_a_prime_number_of_steps_needs_as_few_bytes_as_one_more(reverse: bool) -> None:
    weights, x = arguments()
    args = (weights[0], x)
    losses = [functools.partial(recurrent, steps=steps, reverse=reverse) for steps in (127, 128)]
    prime, whole = (
        jax.jit(jax.value_and_grad(jm.remat(loss), argnums=(0, 1))).lower(*args).compile() for loss in losses
    )
    temp = [each.memory_analysis().temp_size_in_bytes for each in (prime, whole)]
    assert temp[0] < 1.25 * temp[1], temp
    wanted = jax.jit(jax.value_and_grad(losses[0], argnums=(0, 1)))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), prime(*args), wanted)
    once = jax.jit(jax.grad(jm.remat(losses[0]), argnums=(0, 1)))(*args)
    assert_close(once, wanted[1])


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5000))
def test_sizes_are_all_divisors_and_no_two_lie_far_apart(length: int) -> None:
    found = sizes(length)
    assert set(found) >= {part for part in range(1, length) if length % part == 0}
    assert all(low < high <= 3 * low for low, high in itertools.pairwise([*found, length]))
    for part in found:
        assert -(-length // -(-length // part)) == part or length % part == 0, (
            "another size makes as many parts of fewer steps"
        )


def test_a_loop_on_an_explicit_mesh_stays_where_it_lies() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    weights, x = arguments(16)
    with jax.set_mesh(mesh):
        placed = jax.device_put(weights, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, P("data")))
        wanted, *got = (
            jax.jit(jax.value_and_grad(loss)).lower(*placed).compile()
            for loss in (looped, *(jm.remat(looped, levels=levels) for levels in (1, 2)))
        )
        for each in got:
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), each(*placed), wanted(*placed)
            )
        # An eighth of the carries on each device: one that lost its place would be gathered whole.
        carries = len(weights) * x.nbytes
        assert got[1].memory_analysis().temp_size_in_bytes < carries / 4


def test_a_loop_inside_shard_map() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    args = arguments(16)

    def everywhere(loss: Any) -> Any:
        def mine(weights: Any, x: Any) -> Any:
            return jax.lax.pmean(loss(weights, x), "data")

        return jax.jit(jax.value_and_grad(jax.shard_map(mine, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())))

    wanted, got = (everywhere(loss)(*args) for loss in (looped, jm.remat(looped, levels=2)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)


@pytest.mark.parametrize("levels", [1, 2])
def test_a_loop_is_unrolled_as_it_was(levels: int) -> None:
    def unrolled(weights: Any, x: Any) -> Any:
        return (jax.lax.scan(lambda x, w: (x + wide(x @ w), x[0]), x, weights, unroll=4)[1] ** 2).mean()

    def innermost(jaxpr: Any) -> list[int]:
        found = [unroll for eqn in jaxpr.eqns for body in subjaxprs(eqn) for unroll in innermost(open_jaxpr(body))]
        return found or [eqn.params["unroll"] for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]

    traced = jax.make_jaxpr(jm.remat(unrolled, levels=levels))(*arguments(16))
    assert innermost(open_jaxpr(traced)) == [4]
