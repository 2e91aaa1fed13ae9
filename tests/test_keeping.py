"""What a segment keeps, against every possible set of values: on functions small enough to enumerate, the cut is exact."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.transforms.costs import (
    equation_flops,
    is_inexact,
    jaxpr_flops,
    nbytes,
    residual_bytes,
    residual_values,
)
from jaxmem_callbacks.transforms.policy import ActivePolicy, activate
from jaxmem_callbacks.transforms.save_frontier import SaveSet, frontier, merge_frontiers
from jaxmem_callbacks.transforms.tracing import flatten, open_jaxpr, variables
from tests.comparisons import checkpoints, stored_bytes

# The discount that separates values alike may cost this much of the true optimum.
WITHIN = 1.06


@st.composite
def functions(draw: st.DrawFn) -> Any:
    """Equations of a random small network: products of several widths, elementwise functions, skips and diamonds."""
    widths = draw(st.lists(st.sampled_from([2, 8, 32]), min_size=2, max_size=5))
    choices = draw(st.lists(st.integers(0, 3), min_size=len(widths), max_size=len(widths)))
    weights = [jnp.ones((a, b)) for a, b in itertools.pairwise([4, *widths])]

    def network(x: Any, weights: Any) -> Any:
        seen = [x]
        for weight, choice in zip(weights, choices, strict=True):
            x = x @ weight
            x = (jnp.tanh, jnp.sin, lambda v: v * v, lambda v: v)[choice](x)
            if seen[-1].shape == x.shape:
                x = x + seen[-1]
            seen.append(x)
        return (x**2).sum()

    return flatten(jax.make_jaxpr(network)(jnp.ones((16, 4)), weights)).eqns


def every_choice(eqns: list[Any]) -> list[tuple[int, int]]:
    """Bytes and recomputed operations of every set of values that could be kept."""
    maker = {var: index for index, eqn in enumerate(eqns) for var in eqn.outvars}
    inputs = {var for eqn in eqns for var in variables(eqn.invars)} - set(maker)
    active = {var for var in inputs if is_inexact(var)}
    needed = residual_values(eqns, inputs, active)
    # tanh is differentiated by its own result, and so is done again whatever is kept of it.
    anyway = {i for i, eqn in enumerate(eqns) if eqn.primitive.name == "tanh" and active & set(eqn.invars)}
    found = []
    for count in range(len(maker) + 1):
        for kept in itertools.combinations(maker, count):
            again = set(anyway)
            pending = [var for var in needed if var not in kept]
            pending += [v for i in anyway for v in variables(eqns[i].invars) if v in maker and v not in kept]
            while pending:
                index = maker[pending.pop()]
                if index not in again:
                    again.add(index)
                    pending += [v for v in variables(eqns[index].invars) if v in maker and v not in kept]
            found.append((sum(map(nbytes, kept)), sum(equation_flops(eqns[index]) for index in again)))
    return found


@settings(max_examples=30, deadline=None)
@given(functions())
def test_no_choice_beats_a_point_of_the_frontier(eqns: list[Any]) -> None:
    eqns = eqns[:9]  # of so many values every set is tried
    possible, points = np.array(every_choice(eqns), np.float64), frontier(eqns)
    assert [p.bytes for p in points] == sorted({p.bytes for p in points})
    assert [p.flops for p in points] == sorted({p.flops for p in points}, reverse=True)
    assert points[0].bytes == 0
    for point in points:
        assert point.flops == possible[possible[:, 0] <= point.bytes, 1].min()
    for point, following in itertools.pairwise(points):
        between = possible[possible[:, 0] < following.bytes, 1].min()
        assert between == point.flops, "a choice that the frontier does not have"


def test_threads_that_ask_for_one_frontier_at_once_get_the_same() -> None:
    eqns = flatten(jax.make_jaxpr(unrolled)([(jnp.ones((5, 7)), jnp.ones((7, 5)))] * 40, jnp.ones((3, 5)))).eqns
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            first, *others = pool.map(frontier, [eqns] * 4)
    finally:
        sys.setswitchinterval(before)
    assert others == [first] * 3
    assert frontier(eqns) == first


def kept(bytes_: int, flops: int) -> SaveSet:
    return SaveSet(bytes_, flops, frozenset([bytes_] if bytes_ else []), float(bytes_), float(flops))


def test_bytes_go_first_to_what_saves_most_and_of_equals_to_the_last_segment() -> None:
    dear, cheap = [kept(0, 100), kept(10, 0)], [kept(0, 10), kept(10, 0)]
    merged = merge_frontiers([cheap, dear, cheap], [1, 1, 1])
    assert merged.kept(merged.within(0.34)) == [frozenset(), {10}, frozenset()]
    assert merged.kept(merged.within(0.67)) == [frozenset(), {10}, {10}]
    assert merged.kept(merged.within(1.0)) == [{10}, {10}, {10}]
    # A loop stores what it keeps once a step: what would not fit leaves room for what does.
    merged = merge_frontiers([dear, cheap], [8, 1])
    assert merged.kept(merged.within(0.5)) == [frozenset(), {10}]


DEPTH, WIDTH, ROWS = 6, 64, 256


def unrolled(weights: Any, x: Any) -> Any:
    for up, down in weights:
        x = x + jnp.tanh(x @ up) @ down
    return (x**2).mean()


def scanned(weights: Any, x: Any) -> Any:
    def layer(x: Any, weight: Any) -> Any:
        return x + jnp.tanh(x @ weight[0]) @ weight[1], None

    stacked = jax.tree.map(lambda *each: jnp.stack(each), *weights)
    return (jax.lax.scan(layer, x, stacked)[0] ** 2).mean()


def arguments() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), (DEPTH, 2))
    weights = [
        (jax.random.normal(up, (WIDTH, 4 * WIDTH)) / 8, jax.random.normal(down, (4 * WIDTH, WIDTH)) / 16)
        for up, down in keys
    ]
    return weights, jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


MOST_SHARES = 30  # traced of one loss, evenly from the first on


@pytest.mark.core
@pytest.mark.parametrize("loss", [unrolled, scanned])
def test_more_kept_is_less_computed_again_and_the_same_numbers(loss: Any) -> None:
    args = arguments()
    plain_value, plain_grads = jax.jit(jax.value_and_grad(loss))(*args)
    plain_flops = jaxpr_flops(jax.make_jaxpr(jax.value_and_grad(loss))(*args))
    rows = []
    for keep in (0.0, 0.5, 1.0):
        cheaper = jm.remat(loss, keep=keep)
        value, grads = jax.jit(jax.value_and_grad(cheaper))(*args)
        np.testing.assert_allclose(value, plain_value, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), grads, plain_grads)
        flops = jaxpr_flops(jax.make_jaxpr(jax.value_and_grad(cheaper))(*args))
        rows.append((stored_bytes(cheaper, *args), flops / plain_flops))
    (low, most), _, (high, least) = rows
    assert [stored for stored, _ in rows] == sorted(stored for stored, _ in rows)
    assert [flops for _, flops in rows] == sorted((flops for _, flops in rows), reverse=True)
    assert high > low
    assert least < 1.02 < most
    assert high <= stored_bytes(loss, *args)


def attention(weights: Any, x: Any) -> Any:
    """What transformers have: a norm, scores, a softmax, a gate, masks by division and by selection."""

    def layer(x: Any, weight: Any) -> Any:
        up, down = weight
        h = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
        scores = jnp.where(jnp.tri(ROWS, dtype=bool), h @ h.T, -1e9)
        h = jax.nn.softmax(scores) @ h
        h = jax.nn.silu(h @ up) * jnp.where(h.sum(-1, keepdims=True) > 0, h @ up, 0.0) / 0.9
        return x + h @ down, None

    stacked = jax.tree.map(lambda *each: jnp.stack(each), *weights)
    return (jax.lax.scan(layer, x, stacked)[0] ** 2).mean()


def branching(weights: Any, x: Any) -> Any:
    """A branch in every layer, another branch in that, and a loop in this one."""

    def twice(h: Any, up: Any, down: Any) -> Any:
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ up) @ down + h, None), h, None, length=2)[0]

    def flat(h: Any, up: Any, _: Any) -> Any:
        return jnp.sin(h @ up)[:, :WIDTH]

    for each in weights[:3]:
        deep = functools.partial(lambda weight, h: jax.lax.cond(h.mean() > 0, twice, flat, h, *weight), each)
        x = x + jax.lax.cond(x.sum() > 0, deep, lambda h: h, jnp.sin(x))
    return (x**2).mean()


def in_blocks(weights: Any, x: Any) -> Any:
    """Attention over blocks, as flash attention does it: a loop in every layer of a loop, carrying sums, stacking results."""

    def layer(x: Any, weight: Any) -> Any:
        up, down = weight

        def block(carry: Any, keys: Any) -> Any:
            total, weighed = carry
            scores = jnp.exp(x @ keys.T / WIDTH)
            return (total + scores.sum(-1, keepdims=True), weighed + scores @ jnp.sin(keys)), scores.mean()

        start = (jnp.zeros((ROWS, 1)), jnp.zeros_like(x))
        (total, weighed), means = jax.lax.scan(block, start, x.reshape(4, -1, WIDTH), reverse=True)
        return x + jnp.tanh(weighed / total @ up) @ down * means.sum(), None

    stacked = jax.tree.map(lambda *each: jnp.stack(each), *weights)
    return (jax.lax.scan(layer, x, stacked)[0] ** 2).mean()


@pytest.mark.core
@pytest.mark.parametrize("loss", [branching, in_blocks])
def test_what_lies_in_inner_loops_and_branches_is_kept_one_by_one(loss: Any) -> None:
    args = arguments()
    plain = jax.value_and_grad(loss)
    flops = jaxpr_flops(jax.make_jaxpr(plain)(*args))
    value, grads = jax.jit(plain)(*args)
    found = dict[float, tuple[int, float]]()
    for keep in (0.0, 0.2, 1.0):
        cheaper = jm.remat(loss, keep=keep)
        ours, our_grads = jax.jit(jax.value_and_grad(cheaper))(*args)
        np.testing.assert_allclose(ours, value, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), our_grads, grads)
        again = jaxpr_flops(jax.make_jaxpr(jax.value_and_grad(cheaper))(*args))
        found[keep] = stored_bytes(cheaper, *args), again / flops
    (least, most), (_, some), (stored, hardly) = found.values()
    assert least < stored < stored_bytes(loss, *args)
    assert hardly < 1.02 < some < most


@pytest.mark.core
@pytest.mark.parametrize("loss", [unrolled, scanned, attention, branching, in_blocks])
def test_the_survey_foretells_the_work_of_a_share(loss: Any) -> None:
    args = arguments()
    surveyed = ActivePolicy(jm.StepPolicy(remat="full"), survey=True)

    def flops(active: ActivePolicy) -> int:
        with activate(active):
            return jaxpr_flops(jax.make_jaxpr(jm.value_and_grad(loss))(*args))

    plain, _ = flops(ActivePolicy(jm.StepPolicy())), flops(surveyed)
    (curve,) = surveyed.frontiers
    assert len(curve) > 1
    for share in (*curve[:: -(-len(curve) // MOST_SHARES)], curve[-1]):
        extra = flops(ActivePolicy(jm.StepPolicy(remat="full", keep=share.share))) - plain
        assert abs(extra - share.flops) <= 0.01 * plain, share


def added_behind(weights: Any, x: Any) -> Any:
    """A sum stores none of its operands: what only one in the last segment takes is there for no derivative."""
    first = x @ weights[0]
    x = first @ weights[1] @ weights[2] @ weights[3]
    return ((x + first) @ weights[4]).sum()


def read_by_a_loop(weights: Any, x: Any) -> Any:
    """A loop in the last segment stores what its body needs of what it is given."""
    for weight in weights[:1]:
        x = jnp.tanh(x @ weight) @ weight
    x = x @ weights[1] @ weights[2] @ weights[3]
    step = lambda carry, _: (carry + (jnp.tanh(x * carry) @ weights[4]).sum() * 1e-3, None)  # noqa: E731
    return jax.lax.scan(step, (x**2).sum(), None, length=4)[0]


@pytest.mark.core
@pytest.mark.parametrize("loss", [added_behind, read_by_a_loop])
def test_the_survey_foretells_the_bytes_of_every_share(loss: Any) -> None:
    args = [jnp.ones(shape) for shape in itertools.pairwise((64, 64, 64, 128, 64, 64))], jnp.ones((256, 64))
    active = ActivePolicy(jm.StepPolicy(remat="full"), survey=True)
    with activate(active):
        jax.make_jaxpr(jm.value_and_grad(loss))(*args)
    least = stored_bytes(jm.remat(loss), *args)
    stored = [stored_bytes(jm.remat(loss, keep=share.share), *args) - least for share in active.frontiers[0]]
    assert stored == [share.bytes for share in active.frontiers[0]]
    assert len(stored) > 1


@pytest.mark.core
def test_what_only_leads_to_a_stopped_gradient_is_kept_for_no_derivative() -> None:
    """As of a softmax's maximum: JAX keeps the exponentials and nothing of what leads to what is subtracted."""

    def weighed(weight: Any, x: Any) -> Any:
        scores = x @ weight
        highest = jnp.sin(scores * scores).max(-1, keepdims=True)
        return (jnp.exp(scores - jax.lax.stop_gradient(highest)) @ weight).sum()

    args = jnp.ones((64, 64)), jnp.ones((16, 64))
    flat = flatten(jax.make_jaxpr(weighed)(*args))
    kept = stored_bytes(weighed, *args) - sum(each.nbytes for each in args)
    assert kept == 4 * 16 * 64 == residual_bytes(flat.eqns, set(flat.invars)).sum()
    (nothing, *_), (value, grads) = frontier(flat.eqns), jax.value_and_grad(jm.remat(weighed, segments=2))(*args)
    assert nothing.bytes == 0
    expected, plain = jax.value_and_grad(weighed)(*args)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grads, plain, rtol=1e-5)


@pytest.mark.parametrize("keep", [-0.1, 1.5, True])
def test_a_share_that_is_none_is_refused(keep: Any) -> None:
    with pytest.raises(PolicyError, match=r"keep=.*: expected a share from 0 .* to 1"):
        jm.StepPolicy(remat="full", keep=keep)


def test_keeping_without_remat_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"remat='none' leaves the loss untouched, so segments, levels, keep"):
        jm.StepPolicy(keep=0.5)


@pytest.mark.core
def test_every_process_keeps_several_results_of_one_equation_in_the_same_order() -> None:
    """A set's order differs from process to process; programs must not, or none is found again in the cache."""

    @jax.custom_jvp
    def eight(w: Any, x: Any) -> Any:
        return [x @ w] * 8

    eight.defjvp(lambda primals, tangents: jax.jvp(eight.fun, primals, tangents))

    def loss(w: Any, x: Any) -> Any:
        for _ in range(3):
            x = sum(jnp.sin(part) for part in eight(w, x))
        return x.sum()

    orders = []
    for checkpoint in checkpoints(jm.remat(loss, keep=1.0, segments=3), jnp.ones((64, 64)), jnp.ones((64, 64))):
        eqns = open_jaxpr(checkpoint.params["jaxpr"]).eqns
        places = {var: place for eqn in eqns if len(eqn.outvars) == 8 for place, var in enumerate(eqn.outvars)}
        named = [eqn.invars[0] for eqn in eqns if eqn.primitive.name == "name"]
        orders.append([places[var] for var in named if var in places])
    assert max(map(len, orders)) > 5
    assert orders == [sorted(order) for order in orders]
