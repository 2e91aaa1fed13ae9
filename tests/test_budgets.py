"""A plan for a budget finds the cheapest step that fits: no policy that any plan of the same step compiled does better."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.bisect import BytesBracket, closer
from tests.target_step import keeps_remat, needs_compiler, shape

TARGETS = [
    pytest.param("h100_sxm", marks=[pytest.mark.targets, pytest.mark.recorded]),
    pytest.param("cpu", marks=[pytest.mark.core, keeps_remat]),
]
BLOCKS, ROWS, WIDTH = 6, 1024, 128
# Of the plain step's bytes, what the least step takes at most.
LEAST = 0.8
# As many operations, as a share of the plain step's, are no notable difference.
NOTABLE = 0.015


def block(x: jax.Array, w: jax.Array) -> jax.Array:
    """It keeps several times what it hands on."""
    h = jax.nn.gelu(x @ w)
    return x + jnp.sin(h) * jnp.cos(h) + jnp.tanh(h)


def loss(params: list[jax.Array], batch: jax.Array) -> jax.Array:
    return (functools.reduce(block, params, batch) ** 2).mean()


def adapted(params: list[jax.Array], batch: jax.Array) -> jax.Array:
    """The loss after one step of its own: a gradient inside a gradient."""
    gradients = jm.grad(loss)(params, batch)
    return loss([p - 0.1 * g for p, g in zip(params, gradients, strict=True)], batch)


def step_of(value: Callable[..., Any]) -> Any:
    def step(params: Any, batch: Any) -> Any:
        found, gradients = jm.value_and_grad(value)(params, batch)
        return [p - 0.1 * g for p, g in zip(params, gradients, strict=True)], found

    return step


ARGUMENTS = [shape(WIDTH, WIDTH) for _ in range(BLOCKS)], shape(ROWS, WIDTH)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("value", "parts"), [(loss, (0.01, 0.12, 0.3)), (adapted, (0.3,))])
def test_no_policy_that_fits_does_notably_less_than_the_chosen_one(
    target: str, value: Callable[..., Any], parts: tuple[float, ...]
) -> None:
    if target != "cpu":
        needs_compiler(target)
    planned = functools.partial(jm.plan, step_of(value), *ARGUMENTS, target=target, progress=False)
    frontier = planned()
    needs = [each.step_bytes or 0 for each in frontier.candidates]
    assert min(needs) < LEAST * max(each.step_bytes or 0 for each in frontier.candidates if each.policy.remat == "none")
    budgets = [int(min(needs) + part * (max(needs) - min(needs))) for part in parts]
    plans = [planned(budget=budget) for budget in budgets]
    every = [each for plan in (frontier, *plans) for each in plan.candidates if each.step_bytes]
    for budget, plan in zip(budgets, plans, strict=True):
        chosen, best = plan.chosen, min(each.extra_flops for each in every if (each.step_bytes or 0) <= budget)
        assert chosen.fits, str(plan)
        assert plan.compiles <= 8
        assert chosen.extra_flops <= best + NOTABLE * (chosen.plain_flops or 0), (budget, best, str(plan))


def asked(kept: list[int], needs: list[int], room: int, most: int, knee: int) -> tuple[tuple[int, int], int]:
    """What is open in the end, and how many were asked."""
    known, between, left = {0: needs[0]}, (0, len(kept)), most
    open_ = BytesBracket(bytes=room, kept=np.array(kept, np.float64), knee=knee)
    while places := open_.next_places(known, between, left):
        assert len(set(places)) == len(places) <= left
        assert all(between[0] < place < between[1] for place in places)
        known |= {place: needs[place] for place in places}
        left -= len(places)
        low, high = closer(*between, {place: needs[place] <= room for place in places})
        between = low, len(kept) if high is None else high
    return between, most - left


SIZES = st.lists(st.integers(1, 100), min_size=1, max_size=40).map(
    lambda gaps: [0, *(sum(gaps[: n + 1]) for n in range(len(gaps)))]
)


@settings(max_examples=300, deadline=None)
@given(SIZES, st.integers(0, 2000), st.integers(0, 3000), st.integers(3, 4))
def test_needs_that_are_flat_and_then_rise_are_found_by_few(kept: list[int], flat: int, more: int, most: int) -> None:
    needs = [max(flat, size) for size in kept]
    room = needs[0] + more
    (low, _), count = asked(kept, needs, room, most, len(kept) - 1)
    assert low == max(place for place, need in enumerate(needs) if need <= room)
    assert count <= most


@settings(max_examples=300, deadline=None)
@given(SIZES, st.lists(st.integers(0, 100), min_size=40, max_size=40), st.integers(0, 3000))
def test_any_needs_that_rise_are_found_in_the_end(kept: list[int], rises: list[int], more: int) -> None:
    needs = [1000 + sum(rises[:n]) for n in range(len(kept))]
    (low, high), _ = asked(kept, needs, 1000 + more, 1000, len(kept) // 2)
    assert low == max(place for place, need in enumerate(needs) if need <= 1000 + more)
    assert high == low + 1


@settings(max_examples=300, deadline=None)
@given(SIZES, st.floats(1, 1.3), st.integers(0, 3000), st.integers(1, 2))
def test_where_a_byte_takes_more_than_one_the_last_two_asks_find_what_fits(
    kept: list[int], each: float, more: int, most: int
) -> None:
    """What a compiler needs for a byte that is kept is a little more than that where it lays all out anew."""
    needs = [1000 + int(each * size) for size in kept]
    (low, _), _ = asked(kept, needs, 1000 + more, most, len(kept) - 1)
    assert low > 0 or most == 1 or needs[1] > 1000 + more
    assert low > 0 or each > 1 or needs[1] > 1000 + more
