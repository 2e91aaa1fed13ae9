"""Offload in a plan: which policies are tried, over what, and when one of them is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.choice import with_offload
from jaxmem_callbacks.planning.compiles import CompileBudget, CompileQueue, Compiler
from jaxmem_callbacks.planning.orchestrate import offload
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.request import Budget
from jaxmem_callbacks.planning.search import MOST_POLICIES, candidates_for, offloading_policies
from jaxmem_callbacks.planning.step_time import host_bytes
from jaxmem_callbacks.programs.targets.target import resolve_target
from jaxmem_callbacks.records.plans import Candidate
from tests.offloaded_steps import LAYERS, arguments, looped, train_step, unrolled
from tests.target_step import needs_compiler


def attention(weights: Any, x: Any) -> Any:
    """Each layer's context is few bytes of many operations, and all else of it the contrary."""

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        out = jax.nn.softmax((x @ w[0]) @ (x @ w[1]).T) @ (x @ w[2])
        return x + jnp.tanh(jnp.tanh(out @ w[0]) @ w[1]), None

    return (jax.lax.scan(layer, x, weights)[0] ** 2).mean()


def attending(weights: Any, x: Any) -> tuple[Any, Any]:
    value, gradients = jm.value_and_grad(attention)(weights, x)
    return weights - gradients, value


def attending_twice(weights: Any, x: Any) -> tuple[Any, Any]:
    """Two losses, each with contexts that are worth their way."""
    weights, value = attending(weights, x)
    other, gradients = jm.value_and_grad(attention)(weights, x[: len(x) // 2])
    return weights - gradients, value + other


def attending_once(weights: Any, x: Any) -> tuple[Any, Any]:
    """Two losses, of which the second keeps nothing at the share that the first one wants."""
    weights, value = attending(weights, x)
    other, gradients = jm.value_and_grad(looped)(weights, x)
    return weights - gradients, value + other


def tried_on(
    step: Any, target: str, *args: Any, policy: jm.StepPolicy | None = None
) -> tuple[Compiler, list[jm.StepPolicy]]:
    """Traced for this machine, with the speed of a target."""
    there, budget = replace(resolve_target("cpu"), name=target), Budget(bytes=None, limit_bytes=None, reason="no limit")
    problem = Problem(
        train_step=step, args=args, kwargs={}, target=there, budget=budget, base=policy or jm.StepPolicy()
    )
    compiler = Compiler(problem)
    return compiler, offloading_policies(compiler, problem.base)


@pytest.mark.targets
@pytest.mark.recorded
@pytest.mark.timeout(300)
def test_offload_goes_with_microbatches_and_what_comes_nearest_may_offload() -> None:
    needs_compiler("h100_sxm")
    rows, width = 8192, 64
    args = jax.ShapeDtypeStruct((LAYERS, 3, width, width), "float32"), jax.ShapeDtypeStruct((rows, width), "float32")
    search = {"offload": True, "microbatches": [2]}
    nothing = jm.plan(train_step, *args, target="h100_sxm", budget=2**20, search=search, progress=False)
    least = min(nothing.candidates, key=lambda each: each.step_bytes)
    assert (least.policy.microbatches, bool(least.policy.offload), least.host_bytes > 0) == (2, True, True)
    assert nothing.chosen == least, "by how much it does not fit is told of what comes nearest"
    fits = jm.plan(train_step, *args, target="h100_sxm", budget=least.step_bytes, search=search, progress=False)
    assert (fits.chosen.fits, fits.policy) == (True, least.policy)


@pytest.mark.targets
@pytest.mark.timeout(300)
def test_a_placement_whose_compiles_all_fail_keeps_no_other_from_being_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    target, none = needs_compiler("h100_sxm"), Budget(bytes=None, limit_bytes=None, reason="no limit")

    def compiler(width: int) -> Compiler:
        args = (
            jax.ShapeDtypeStruct((LAYERS, 3, width, width), "float32"),
            jax.ShapeDtypeStruct((8192, width), "float32"),
        )
        return Compiler(Problem(train_step=train_step, args=args, kwargs={}, target=target, budget=none))

    failing, other, queue = compiler(48), compiler(128), CompileQueue(budget=CompileBudget(MOST_POLICIES + 2))
    queue.compile([(other, other.problem.base)])  # or the compiler would seem to hang, and nothing more be asked

    def placements() -> Iterator[Compiler]:
        with monkeypatch.context() as patch:
            patch.setenv("JAXMEM_COMPILE_TIMEOUT_S", "0.01")
            yield failing
        yield other

    offload(placements(), queue)
    assert sum("was ended after 0.01 s" in str(error) for error in queue.results.failed) == MOST_POLICIES
    assert [each.compiler is other for each in queue.results.entries] == [True, True]


@pytest.mark.core
def test_what_one_placement_refuses_is_not_asked_of_the_others() -> None:
    def step(weights: Any, x: Any) -> Any:
        return weights - jm.grad(unrolled)(weights, x)

    (first, _), (other, _) = tried_on(step, "cpu", *arguments()), tried_on(step, "cpu", *arguments())
    queue, asked = CompileQueue(budget=CompileBudget(16)), list[Compiler]()

    def placements() -> Iterator[Compiler]:
        for each in (first, other):
            asked.append(each)
            yield each

    offload(placements(), queue)
    assert asked == [first]
    assert queue.remaining == 16


@pytest.mark.targets
@pytest.mark.recorded
@pytest.mark.timeout(300)
def test_a_compiler_moves_the_part_that_is_worth_its_way() -> None:
    needs_compiler("t4")
    rows, width, layers = 4096, 64, 4
    args = jax.ShapeDtypeStruct((layers, 3, width, width), "float32"), jax.ShapeDtypeStruct((rows, width), "float32")
    plan = jm.plan(attending, *args, target="t4", budget="1GiB", search={"offload": True}, progress=False)
    (part,) = [each for each in plan.candidates if each.policy.offload == ("kept",)]
    (full,) = [each for each in plan.candidates if each.policy == jm.StepPolicy(remat="full")]
    assert 0 < part.policy.keep < 1
    contexts = layers * rows * width * 4
    assert contexts <= part.host_bytes < 1.2 * contexts
    assert part.extra_flops < 0.6 * full.extra_flops
    assert part.modelled_s < full.modelled_s


def candidate(*, fits: bool, seconds: float | None, host: int = 0, rows: int | None = None) -> Candidate:
    words = ("cuts",) if host else ()
    policy = jm.StepPolicy(remat="full", offload=words)
    return Candidate(
        policy=policy,
        step_bytes=5,
        fits=fits,
        flops=1,
        extra_flops=0,
        modelled_s=seconds,
        host_bytes=host,
        batch_rows=rows,
    )


def test_offload_is_used_where_it_is_faster_or_all_that_fits() -> None:
    here, slower, faster = (candidate(fits=True, seconds=s, host=h) for s, h in ((2.0, 0), (3.0, 1), (1.0, 1)))
    assert with_offload(here, []) == (here, None)
    assert with_offload(here, [slower]) == (here, None)
    best, why = with_offload(here, [slower, faster])
    assert best is faster
    assert why is not None
    assert "sooner" in why
    too_much = candidate(fits=False, seconds=1.0)
    nearer = replace(candidate(fits=False, seconds=9.0, host=1), step_bytes=4)
    assert with_offload(too_much, [nearer, too_much]) == (nearer, None), "nothing fits: what comes nearest"
    best, why = with_offload(too_much, [slower, nearer])
    assert best is slower
    assert why is not None
    assert "nothing else fits" in why
    # Nobody knows the link's speed, it does not fit, or nothing was moved: no reason to use it.
    unknown, large, unmoved = (
        candidate(fits=True, seconds=None, host=1),
        candidate(fits=False, seconds=0.1, host=1),
        candidate(fits=True, seconds=0.1, host=0),
    )
    assert with_offload(here, [unknown, large, unmoved]) == (here, None)


def test_of_several_batches_the_most_rows_come_first() -> None:
    here = candidate(fits=True, seconds=2.0, rows=32)
    fewer, as_many, more, most = (
        candidate(fits=True, seconds=s, host=1, rows=rows) for s, rows in ((0.1, 16), (3.0, 32), (9.0, 48), (9.5, 64))
    )
    assert with_offload(here, [fewer, as_many]) == (here, None), "a smaller batch is no faster step"
    best, why = with_offload(here, [fewer, more, most])
    assert best is most
    assert why == "64 rows fit by what waits in host memory, and no more do otherwise than 32"
    assert with_offload(candidate(fits=False, seconds=1.0, rows=32), [fewer, more])[0] is more


def test_policies_worth_trying_say_what_they_move() -> None:
    _, tried = tried_on(train_step, "cpu", *arguments(), policy=jm.StepPolicy(microbatches=2))
    assert {(each.keep, each.offload) for each in tried} == {
        (0.0, ("cuts",)), (1.0, ("cuts",)), (1.0, ("kept",)), (1.0, ("cuts", "kept")),
    }  # fmt: skip
    assert len(tried) == MOST_POLICIES
    assert {(each.microbatches, each.remat) for each in tried} == {(2, "full")}


@pytest.mark.parametrize("step", [attending, attending_twice])
def test_as_much_is_moved_as_comes_back_sooner_than_it_is_computed_again(step: Any) -> None:
    rows, width = 4096, 64
    shapes = jax.ShapeDtypeStruct((LAYERS, 3, width, width), "float32"), jax.ShapeDtypeStruct((rows, width), "float32")
    compiler, tried = tried_on(step, "t4", *shapes)
    (share,) = {each.keep for each in tried if "kept" in each.offload}
    assert 0 < share < 1

    def seconds(keep: float) -> float:
        moved = jm.StepPolicy(remat="full", keep=keep, offload=("kept",) if keep else ())
        return compiler.facts(moved).modelled_s or np.inf

    others = [offer.policy.keep for offer in candidates_for(compiler, jm.StepPolicy(remat="full"))]
    assert len(others) > 10
    assert seconds(share) == min(map(seconds, others))
    memory = jm.StepPolicy(remat="full", keep=share, offload=("kept",))
    traced = host_bytes(compiler.facts(memory).traced.jaxpr)
    assert 0 < traced < 0.1 * host_bytes(compiler.facts(replace(memory, keep=1.0)).traced.jaxpr), (
        "the contexts, hardly more"
    )
    # An H100 computes a product of 64 columns again long before it is back; and of a tpu7x nobody says how long it takes.
    # And where another loss keeps nothing of it, that one moves nothing.
    for target, other, shares in (("h100_sxm", train_step, 0), ("tpu7x", attending, 0), ("t4", attending_once, 1)):
        compiler, tried = tried_on(other, target, *shapes)
        assert {0.0, 1.0} <= {each.keep for each in tried}
        assert len({each.keep for each in tried}) == 2 + shares
        assert all(compiler.facts(each).flops for each in tried), "none of them is refused"
