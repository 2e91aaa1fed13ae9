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
from jaxmem_callbacks.planning.budget import Budget
from jaxmem_callbacks.planning.candidates import Compiler
from jaxmem_callbacks.planning.offers import offers
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.search import RematSearch
from jaxmem_callbacks.programs.targets.compile import compile_for_target
from jaxmem_callbacks.programs.targets.target import resolve_target
from jaxmem_callbacks.transforms.flops import jaxpr_flops
from tests.said import Said
from tests.target_step import needs_compiler, shape

FULL = jm.StepPolicy(remat="full")
BLOCKS, ROWS, WIDTH, RANK = 4, 4096, 256, 8
OPTIMIZER = optax.sgd(1e-3)  # of AdamW a GPU's compiler has five times as many loops to make
DONATED = ("params", "opt_state")


def residual(p: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ p["w"] + p["b"] + (x @ p["down"]) @ p["up"])


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
WIDE = wide, arguments(**{"in": (WIDTH, 4 * WIDTH), "out": (4 * WIDTH, WIDTH)})


@pytest.mark.parametrize("target", ["h100_sxm", "cpu"])
@pytest.mark.parametrize("net", [RESIDUAL, WIDE], ids=["residual", "wide"])
def test_remat_by_hand_around_each_block_is_not_beaten_by_the_hand(net: tuple[Any, Any], target: str) -> None:
    """A checkpoint around each block, the last one too: the plan has a point within 1.05 of its bytes and its operations."""
    needs_compiler(target)
    if target == "cpu" and jax.__version_info__ < (0, 12):
        pytest.skip("a CPU's compiler keeps the remat of layers written out since jax 0.12")
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


def compiler_for(budget: int | None, platform: str = "cpu") -> Compiler:
    given = Budget(bytes=budget, limit_bytes=budget, reason="asked for")
    there = replace(resolve_target("cpu"), platform=platform)
    block, args = RESIDUAL
    step = step_of(jm.value_and_grad, block)
    return Compiler(Problem(train_step=step, args=args, kwargs={}, target=there, budget=given))


def asked(compiler: Compiler, deeper: int | None, *, left: int = 6) -> tuple[list[jm.StepPolicy], RematSearch]:
    """What is asked of a compiler that needs 1,000 bytes for the library's own cuts and so many for deeper ones, and the search.

    What a step keeps besides takes up to as much again. Refused without a figure are deeper cuts that need None.
    """
    found = offers(compiler, FULL).deeper

    def bytes_of(policy: jm.StepPolicy) -> int | None:
        is_deeper = found is not None and policy.segments == found.policy.segments
        needs = 4000 if policy.remat == "none" else deeper if is_deeper else 1000
        return None if needs is None else needs + int(policy.keep * 1000)

    ledger = Said(bytes_of)
    ledger.left = left
    search = RematSearch(compiler, ledger)
    search.run(frontier=compiler.problem.budget.bytes is None)
    return ledger.asked, search


@pytest.fixture(scope="module")
def deeper() -> jm.StepPolicy:
    found = offers(compiler_for(None), FULL)
    assert found.segments <= 4
    assert found.deeper is not None
    assert found.deeper.offered.peak <= 0.95 * found.peak
    return found.deeper.policy


@pytest.mark.core
@pytest.mark.parametrize("needs", [900, 1005])
@pytest.mark.parametrize("budget", [None, 1300], ids=["frontier", "budget"])
def test_it_goes_on_where_it_takes_no_more(deeper: jm.StepPolicy, budget: int | None, needs: int) -> None:
    places, search = asked(compiler_for(budget), needs)
    assert places[:3] == [jm.StepPolicy(), FULL, deeper]
    assert 3 < len(places) <= 6
    assert {each.segments for each in places[3:]} == {deeper.segments}
    assert search.full is search.found[deeper]


@pytest.mark.core
@pytest.mark.parametrize(("needs", "budget"), [(1020, None), (1005, 1003), (None, 1300), (None, 900)])
def test_what_takes_more_or_no_longer_fits_changes_nothing(
    deeper: jm.StepPolicy, needs: int | None, budget: int | None
) -> None:
    places, search = asked(compiler_for(budget), needs)
    assert places[:3] == [jm.StepPolicy(), FULL, deeper]
    assert search.full is search.found[FULL]
    assert all(each.levels == 1 for each in places) or search.full.fits is False


@pytest.mark.core
def test_without_a_compile_left_it_is_not_asked_for(deeper: jm.StepPolicy) -> None:
    assert deeper not in asked(compiler_for(None), 900, left=2)[0]


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

    given = Budget(bytes=None, limit_bytes=None, reason="asked for")
    args = shape(12, 64, 64), shape(512, 64)
    found = offers(Compiler(Problem(train_step=step, args=args, kwargs={}, target=None, budget=given)), FULL)
    assert found.deeper is None


@pytest.mark.core
def test_a_tpus_compiler_is_not_asked(deeper: jm.StepPolicy) -> None:
    assert deeper not in asked(compiler_for(None, "tpu"), 900)[0]


@pytest.mark.core
def test_a_number_that_is_given_is_taken_as_it_is() -> None:
    given = offers(compiler_for(None), replace(FULL, segments=3))
    assert given.deeper is None
    assert {each.policy.segments for each in given.between} == {3}
