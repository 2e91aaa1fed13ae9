"""Half as many cuts are asked for where the compiler needs more than these are estimated to take, and the better goes on."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.candidate_policies import candidates_for, with_enough_cuts, with_half_the_cuts
from jaxmem_callbacks.planning.compile_candidate import Compiler
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.request import Budget
from jaxmem_callbacks.planning.search import RematSearch
from jaxmem_callbacks.programs.targets.target import resolve_target
from tests.said import Said

FULL = jm.StepPolicy(remat="full")
LAYERS, ROWS, WIDTH = 12, 64, 16


def step(weights: Any, batch: Any) -> Any:
    def loss(weights: Any) -> Any:
        x = batch
        for weight in weights:
            x = jnp.tanh(x @ weight) @ weight.T + x
        return jnp.square(x).mean()

    return jm.value_and_grad(loss)(weights)


def said(temporaries: dict[int | None, int]) -> Said:
    """What compilers say of temporaries: so many bytes for a number of segments; what the library chooses is None."""
    return Said(
        lambda policy: (10**6 if policy.remat == "none" else temporaries[policy.segments]) + int(policy.keep * 10**5)
    )


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return compiler_for(None)


def compiler_for(budget: int | None, train_step: Any = step, dtype: Any = jnp.float32) -> Compiler:
    weights = [jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), dtype)] * LAYERS
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)
    given = Budget(bytes=budget, limit_bytes=budget, reason="asked for")
    return Compiler(Problem(train_step=train_step, args=(weights, batch), kwargs={}, target=None, budget=given))


@pytest.fixture(scope="module")
def fewer(compiler: Compiler) -> tuple[jm.StepPolicy, int]:
    """The policy of half as many cuts, and its estimated peak."""
    many = candidates_for(compiler, FULL).segments
    found = with_half_the_cuts(compiler, FULL, many)
    assert found is not None
    assert many > 4
    assert found.policy == jm.StepPolicy(remat="full", segments=many // 2 + 1)
    return found.policy, found.candidates.peak


@pytest.mark.parametrize("budget", [None, 150_000], ids=["frontier", "budget"])
def test_the_better_of_the_two_goes_on(fewer: tuple[jm.StepPolicy, int], budget: int | None) -> None:
    policy, estimate = fewer
    queue = said({None: estimate + 1, policy.segments: estimate // 2})
    search = RematSearch(compiler_for(budget), queue)
    search.run(frontier=budget is None)
    assert queue.asked[:3] == [jm.StepPolicy(), FULL, policy]
    assert len(queue.asked) > 3
    assert {each.segments for each in queue.asked[3:]} == {policy.segments}
    assert search.full is search.found[policy]


def test_what_more_cuts_gave_is_a_point_of_the_frontier_where_it_is_not_beaten(
    compiler: Compiler, fewer: tuple[jm.StepPolicy, int]
) -> None:
    """Then fewer compiles are left to be near to, and more for the others."""
    policy, estimate = fewer
    kept: dict[int, list[float]] = {}
    for more in (10**3, 10**6):
        queue = said({None: estimate + more, policy.segments: estimate})
        RematSearch(compiler, queue).run(frontier=True)
        assert queue.asked[3].keep == 1, "alone, since it tells what the others are chosen by"
        kept[more] = sorted(each.keep for each in queue.asked[4:])
        assert len(kept[more]) == 2
    near, beaten = kept.values()
    assert near[0] > beaten[0], kept
    assert near[1] >= beaten[1], kept


def test_more_bytes_change_nothing(compiler: Compiler, fewer: tuple[jm.StepPolicy, int]) -> None:
    policy, estimate = fewer
    queue = said({None: estimate + 1, policy.segments: estimate + 2})
    search = RematSearch(compiler, queue)
    search.run(frontier=True)
    assert queue.asked[:3] == [jm.StepPolicy(), FULL, policy]
    assert {each.segments for each in queue.asked[3:]} == {None}
    assert search.full is search.found[FULL]


def test_a_compiler_that_fuses_as_estimated_is_not_asked(compiler: Compiler, fewer: tuple[jm.StepPolicy, int]) -> None:
    queue = said({None: fewer[1]})
    RematSearch(compiler, queue).run(frontier=True)
    assert {each.segments for each in queue.asked} == {None}


def step_with_a_head(weights: Any, batch: Any, layers: int = LAYERS, products: int = 1) -> Any:
    """Logits, and what JAX keeps of their float32 form: all cuts are alive beside them."""

    def loss(weights: Any) -> Any:
        x = batch
        for weight in weights[:layers]:
            h = x
            for _ in range(products):
                h = jnp.tanh(h @ weight) @ weight.T
            x = h + x
        logits = (x @ weights[0]).astype(jnp.float32)
        return (jax.nn.logsumexp(logits, -1) - logits[:, 0]).mean()

    return jm.value_and_grad(loss)(weights)


def asked_for_fewer(platform: str, layers: int, products: int) -> tuple[float, bool, bool]:
    """Their estimated peak over that of the library's own cuts, whether as many would take more, whether they are compiled."""
    compiler = compiler_for(None, functools.partial(step_with_a_head, layers=layers, products=products), jnp.bfloat16)
    many = candidates_for(compiler, FULL)
    few = with_enough_cuts(compiler, FULL, many.segments)
    assert few is not None
    queue = said({None: few.candidates.peak // 2, few.policy.segments: few.candidates.peak // 4})
    there = replace(resolve_target("cpu"), platform=platform)
    RematSearch(Compiler(replace(compiler.problem, target=there)), queue).run(frontier=True)
    return few.candidates.peak / many.peak, few.is_less, queue.asked[2] == few.policy


def test_a_tpus_compiler_is_asked_where_the_estimate_itself_is_less() -> None:
    """What is in the chip's own memory is not in its figure."""
    much = asked_for_fewer("tpu", 12, 1)
    assert much[0] < 0.8
    assert much[2]
    less, is_less, asked = asked_for_fewer("tpu", 4, 2)
    assert 0.8 < less < 0.9
    assert is_less
    assert asked
    less, is_less, asked = asked_for_fewer("tpu", 4, 4)
    assert 0.8 < less < 0.9
    assert not is_less, "by the library's own cuts alone, whose last segment is estimated otherwise"
    assert not asked
    assert not asked_for_fewer("cuda", 12, 1)[2]


def test_a_tpus_compiler_is_asked_for_as_many_cuts_as_leave_no_other_segment_much_longer() -> None:
    """Half as many would make the others too long here."""
    compiler = compiler_for(None, functools.partial(step_with_a_head, layers=6, products=3), jnp.bfloat16)
    segments = candidates_for(compiler, FULL).segments
    found = with_enough_cuts(compiler, FULL, segments)
    assert found is not None
    policy, few = found.policy, found.candidates
    peaks = {
        count: candidates_for(compiler, replace(FULL, segments=count)).peak
        for count in range(segments // 2 + 1, segments + 1)
    }
    near = [count for count, peak in peaks.items() if peak <= 1.1 * peaks[segments]]
    assert segments // 2 + 1 < near[0] < segments
    assert policy == replace(FULL, segments=near[0])
    assert few.peak == peaks[near[0]]


def test_without_a_compile_left_nothing_is_traced_or_told(compiler: Compiler, fewer: tuple[jm.StepPolicy, int]) -> None:
    queue = said({None: fewer[1] + 1})
    queue.remaining = 2
    RematSearch(compiler, queue).run(frontier=True)
    assert queue.asked == [jm.StepPolicy(), FULL]
    assert not queue.results.notes


def test_few_segments_are_not_halved(compiler: Compiler) -> None:
    assert with_half_the_cuts(compiler, FULL, 4) is None
    assert with_enough_cuts(compiler, FULL, 4) is None
