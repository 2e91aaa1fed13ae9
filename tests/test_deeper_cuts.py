"""Nets of a few blocks with nothing behind them: another number of segments, where it is estimated to take less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.candidate_policies import candidates_for
from jaxmem_callbacks.planning.compile_candidate import Compiler
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.request import Budget
from jaxmem_callbacks.planning.search import RematSearch
from jaxmem_callbacks.programs.targets.compile import compile_for_target
from jaxmem_callbacks.programs.targets.target import resolve_target
from jaxmem_callbacks.transforms.costs import jaxpr_flops
from jaxmem_callbacks.transforms.cuts import SLACK
from tests.said import Said
from tests.target_step import keeps_remat, needs_compiler, shape

FULL = jm.StepPolicy(remat="full")
BLOCKS, ROWS, WIDTH, RANK = 4, 4096, 256, 8
OPTIMIZER = optax.sgd(1e-3)  # of AdamW a GPU's compiler has five times as many loops to make
DONATED = ("params", "opt_state")


def residual(p: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ p["w"] + p["b"] + (x @ p["down"]) @ p["up"])


def rectified(p: Any, x: jax.Array) -> jax.Array:
    return x + jax.nn.relu(x @ p["w"])


def wide(p: Any, x: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(x @ p["in"]) @ p["out"]


def step_of(gradient: Callable[..., Any], block: Callable[..., Any]) -> Any:
    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for p in params["blocks"]:
            x = block(p, x)
        x = (x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-5) * params["scale"]
        return jnp.square(x - batch["y"]).mean()

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = gradient(loss)(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def arguments(**weights: tuple[int, ...]) -> tuple[Any, ...]:
    params = {
        "blocks": [{name: shape(*sizes) for name, sizes in weights.items()} for _ in range(BLOCKS)],
        "scale": shape(WIDTH),
    }
    return params, jax.eval_shape(OPTIMIZER.init, params), {"x": shape(ROWS, WIDTH), "y": shape(ROWS, WIDTH)}


RESIDUAL = residual, arguments(w=(WIDTH, WIDTH), b=(WIDTH,), down=(WIDTH, RANK), up=(RANK, WIDTH))
RESIDUAL_STEP = step_of(jm.value_and_grad, residual)
RECTIFIED = rectified, arguments(w=(WIDTH, WIDTH))
WIDE = wide, arguments(**{"in": (WIDTH, 4 * WIDTH), "out": (4 * WIDTH, WIDTH)})


TARGETS = [
    pytest.param("h100_sxm", marks=[pytest.mark.targets, pytest.mark.recorded]),
    pytest.param("cpu", marks=[pytest.mark.core, keeps_remat]),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("net", [RESIDUAL, WIDE], ids=["residual", "wide"])
def test_the_plan_is_as_good_as_remat_by_hand_around_each_block(net: tuple[Any, Any], target: str) -> None:
    """A checkpoint around each block, the last one too: the plan has a point within 1.05 of its bytes and its operations."""
    needs_compiler(target)
    block, args = net
    hand = step_of(jax.value_and_grad, jax.checkpoint(block))
    theirs = compile_for_target(hand, args, target=target, donate_argnames=DONATED, keep_hlo=False).needed_bytes
    operations = jaxpr_flops(jax.make_jaxpr(hand)(*args))
    plan = jm.plan(step_of(jm.value_and_grad, block), *args, target=target, progress=False)
    ratios = [
        max(each.step_bytes / theirs, each.flops / operations) for each in plan.candidates if each.step_bytes and theirs
    ]
    assert plan.compiles <= 6
    assert min(ratios) <= 1.05, [(each.policy, each.step_bytes, each.flops) for each in plan.candidates]


def compiler_for(
    budget: int | None,
    platform: str = "cpu",
    *,
    step: Any = RESIDUAL_STEP,
    args: tuple[Any, ...] = RESIDUAL[1],
) -> Compiler:
    given = Budget(bytes=budget, limit_bytes=budget, reason="asked for")
    there = replace(resolve_target("cpu"), platform=platform)
    return Compiler(Problem(train_step=step, args=args, kwargs={}, target=there, budget=given))


def asked(
    compiler: Compiler, deeper: jm.StepPolicy, deeper_needs: int | None, *, left: int = 6
) -> tuple[list[jm.StepPolicy], RematSearch]:
    """What is asked of a compiler that needs 1,000 bytes for the library's own cuts and so many for deeper ones, and the search.

    What a step keeps besides takes up to as much again. Refused without a figure are deeper cuts that need None.
    """

    def bytes_of(policy: jm.StepPolicy) -> int | None:
        own = 4000 if policy.remat == "none" else 1000
        needs = deeper_needs if policy.segments == deeper.segments else own
        return None if needs is None else needs + int(policy.keep * 1000)

    queue = Said(bytes_of)
    queue.remaining = left
    search = RematSearch(compiler, queue)
    search.run(frontier=compiler.problem.budget.bytes is None)
    return queue.asked, search


@pytest.fixture(scope="module")
def deeper() -> jm.StepPolicy:
    found = candidates_for(compiler_for(None), FULL)
    assert found.segments <= 4
    assert found.deeper is not None
    assert found.deeper.candidates.peak <= 0.95 * found.peak
    return found.deeper.policy


@pytest.mark.core
def test_of_numbers_estimated_alike_it_is_the_largest() -> None:
    """More cuts leave less to what a compiler may do otherwise."""
    block, args = RECTIFIED
    compiler = compiler_for(None, step=step_of(jm.value_and_grad, block), args=args)
    own = candidates_for(compiler, FULL)
    ends = {number: candidates_for(compiler, replace(FULL, segments=number)) for number in range(2, own.segments + 4)}
    assert own.deeper is not None
    low = {number: end for number, end in ends.items() if end.peak <= SLACK * min(each.peak for each in ends.values())}
    work = low[own.deeper.policy.segments or 0].between[0].work
    alike = [number for number, end in low.items() if end.between[0].work <= 1.01 * work]
    assert len(alike) > 1
    assert own.deeper.policy.segments == max(alike)


@pytest.mark.core
def test_where_the_estimate_promises_less_than_a_twentieth_nothing_is_asked() -> None:
    """The logits make the peak, whatever is cut before them."""

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            x = batch["x"]
            for p in params["blocks"]:
                x = rectified(p, x)
            return jax.nn.logsumexp(x @ params["head"], axis=-1).mean()

        return jm.value_and_grad(loss)(params)

    params, _, batch = RECTIFIED[1]
    found = candidates_for(compiler_for(None, step=step, args=({**params, "head": shape(WIDTH, 4096)}, batch)), FULL)
    assert found.segments <= 4
    assert found.deeper is None


@pytest.mark.core
@pytest.mark.parametrize("budget", [None, 1300], ids=["frontier", "budget"])
def test_it_goes_on_where_it_takes_less(deeper: jm.StepPolicy, budget: int | None) -> None:
    places, search = asked(compiler_for(budget), deeper, 980)
    assert places[:3] == [jm.StepPolicy(), FULL, deeper]
    assert 3 < len(places) <= 6
    assert {each.segments for each in places[3:]} == {deeper.segments}
    assert search.full is search.found[deeper]


@pytest.mark.core
@pytest.mark.parametrize("budget", [None, 1300], ids=["frontier", "budget"])
@pytest.mark.parametrize("needs", [995, 1005, 1100, None])
def test_where_it_takes_no_less_the_chosen_number_goes_on_alone(
    deeper: jm.StepPolicy, needs: int | None, budget: int | None
) -> None:
    """It computes more again, and so would all above it; what else is estimated without fusions is not asked for either."""
    places, search = asked(compiler_for(budget), deeper, needs)
    assert places[:3] == [jm.StepPolicy(), FULL, deeper]
    assert 3 < len(places) <= 6
    assert {each.segments for each in places[3:]} == {None}
    assert search.full is search.found[FULL]


@pytest.mark.core
def test_without_a_compile_left_it_is_not_asked_for(deeper: jm.StepPolicy) -> None:
    assert deeper not in asked(compiler_for(None), deeper, 900, left=2)[0]


@pytest.mark.core
@pytest.mark.parametrize("first", [True, False], ids=["loop", "work before a loop"])
def test_a_loop_over_layers_is_no_net_of_few_blocks(first: bool) -> None:
    """Its few segments are the loop, whose steps have checkpoints, and what lies around it."""

    def loss(weights: Any, x: Any) -> Any:
        x = x if first else jnp.tanh(x @ weights[0]) @ weights[1]
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)
        return jnp.square(x).mean()

    def step(weights: Any, x: Any) -> Any:
        return jm.value_and_grad(loss)(weights, x)

    found = candidates_for(compiler_for(None, step=step, args=(shape(12, 64, 64), shape(512, 64))), FULL)
    assert found.deeper is None


@pytest.mark.core
def test_a_tpus_compiler_is_not_asked(deeper: jm.StepPolicy) -> None:
    assert deeper not in asked(compiler_for(None, "tpu"), deeper, 900)[0]


@pytest.mark.core
def test_a_number_that_is_given_is_taken_as_it_is() -> None:
    given = candidates_for(compiler_for(None), replace(FULL, segments=3))
    assert given.deeper is None
    assert {each.policy.segments for each in given.between} == {3}
