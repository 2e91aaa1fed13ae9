"""Offloading what loops store: the same numbers, what crosses the host's link, what compilers say, and when it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.budget import Budget
from jaxmem_callbacks.planning.candidates import Compiler
from jaxmem_callbacks.planning.explore import offload
from jaxmem_callbacks.planning.ledger import Ledger
from jaxmem_callbacks.planning.modelled import host_bytes, modelled_seconds
from jaxmem_callbacks.planning.offers import offers
from jaxmem_callbacks.planning.offloading import MOST_POLICIES, offloading_policies, with_offload
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.speeds import Speed
from jaxmem_callbacks.programs.targets.target import resolve_target
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.plans import Candidate
from tests.comparisons import assert_close, stored_bytes
from tests.target_step import needs_compiler

LAYERS, ROWS, WIDTH = 8, 256, 16
CARRY = ROWS * WIDTH * 4


def layer(x: Any, w: Any) -> tuple[Any, Any]:
    hidden = jnp.tanh(x @ w[0])
    mean = hidden.mean()
    for _ in range(3):
        hidden = jnp.tanh(hidden @ w[1])
    return x + hidden @ w[2], mean


def looped(weights: Any, x: Any) -> Any:
    count = jnp.zeros((), jnp.int32)  # carried too, and not worth a transfer

    def step(carry: Any, w: Any) -> tuple[Any, Any]:
        x, mean = layer(carry[0], w)
        return (x, carry[1] + 1), mean

    (x, count), means = jax.lax.scan(step, (x, count), weights)
    return (x**2).mean() + means.sum() * count


def recurrent(weights: Any, x: Any) -> Any:
    """Carries outweigh what a step keeps of itself: several steps share a checkpoint."""
    return (jax.lax.scan(lambda c, w: (c + jnp.sin(c[0, 0] * w[0, 0] @ w[1, 0]), None), x, weights)[0] ** 2).mean()


def unrolled(weights: Any, x: Any) -> Any:
    for index in range(LAYERS):
        x, _ = layer(x, weights[index])
    return (x**2).mean()


def arguments() -> tuple[Any, Any]:
    draw = np.random.default_rng(0).standard_normal
    return jnp.asarray(draw((LAYERS, 3, WIDTH, WIDTH)) / 4, "float32"), jnp.asarray(draw((ROWS, WIDTH)), "float32")


def crossing(loss: Any) -> int:
    return host_bytes(jax.make_jaxpr(jax.value_and_grad(loss))(*arguments()))


@pytest.mark.core
@pytest.mark.parametrize(("options", "values"), [
    ({"offload": ("cuts",)}, LAYERS), ({"keep": 1.0, "offload": ("kept",)}, 4 * LAYERS),
    ({"keep": 1.0, "offload": ("cuts", "kept")}, 5 * LAYERS), ({"levels": 2, "offload": ("cuts",)}, 4),
], ids=str)  # fmt: skip
def test_the_numbers_stay_and_exactly_what_is_stored_crosses_the_link_twice(
    options: dict[str, Any], values: int
) -> None:
    args = arguments()
    cheaper = jm.remat(looped, **options)
    ours, theirs = (jax.jit(jax.value_and_grad(loss, (0, 1)))(*args) for loss in (cheaper, looped))
    assert_close(ours, theirs)
    assert crossing(cheaper) == 2 * values * CARRY
    assert crossing(jm.remat(looped, **options | {"offload": ()})) == 0
    there = stored_bytes(cheaper, *args)
    assert there == stored_bytes(jm.remat(looped, **options | {"offload": ()}), *args)  # the same values, elsewhere


def test_several_steps_under_one_checkpoint_hand_on_through_the_host() -> None:
    args = arguments()
    cheaper = jm.remat(recurrent, offload=("cuts",))
    assert crossing(cheaper) == 2 * 2 * CARRY
    assert_close(jax.grad(cheaper)(*args), jax.grad(recurrent)(*args))


def nested(weights: Any, x: Any) -> Any:
    """A loop in each step; XLA for GPUs fails at one that stacks host memory in a loop."""

    def step(x: Any, w: Any) -> tuple[Any, Any]:
        inner = jax.lax.scan(lambda h, w: (jnp.sin(h @ w) @ w, None), x, w)[0]
        return x + jnp.tanh(inner @ w[0]) @ w[1], None

    return (jax.lax.scan(step, x, weights)[0] ** 2).mean()


def test_what_an_inner_loop_makes_is_kept_on_the_device_alone() -> None:
    args = arguments()

    def of_each_inner_step(**options: Any) -> int:
        left = jax.eval_shape(lambda *each: jax.vjp(jm.remat(nested, **options), *each)[1], *args)
        return [leaf.shape for leaf in jax.tree.leaves(left)].count((LAYERS, 3, ROWS, WIDTH))

    assert of_each_inner_step(keep=1.0) == 2
    assert of_each_inner_step(keep=1.0, offload=("kept",)) == 0
    assert crossing(jm.remat(nested, keep=1.0, offload=("kept",))) == 2 * 2 * LAYERS * CARRY


def test_on_eight_devices_the_numbers_stay() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        weights, x = arguments()
        args = jax.device_put(weights, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, P("data")))
        ours, theirs = (
            jax.jit(jax.value_and_grad(loss))(*args) for loss in (jm.remat(looped, offload=("cuts",)), looped)
        )
    assert_close(ours, theirs)


@pytest.mark.core
def test_what_would_move_nothing_is_refused() -> None:
    args = arguments()
    words = r"'cuts' moves what a loop over layers hands .* no loop .* an H100 and a v5e .* Write the layers as one jax.lax.scan"
    with pytest.raises(PolicyError, match=words):
        jax.grad(jm.remat(unrolled, offload=("cuts",)))(*args)
    with pytest.raises(PolicyError, match=r"'kept' moves what keep keeps of each step"):
        jax.grad(jm.remat(unrolled, keep=1.0, offload=("kept",)))(*args)
    for options in ({}, {"keep": 0.5, "levels": 2}):
        with pytest.raises(
            PolicyError, match=r"offload=\('kept',\) moves .* it would do nothing. Use keep=1.0 and levels=1"
        ):
            jm.remat(looped, offload=("kept",), **options)
    with pytest.raises(PolicyError, match=r"'cuts' means what the library stores of loops.*another name"):
        jax.grad(jm.remat(lambda w, x: looped(w, checkpoint_name(x, "cuts")), offload=("cuts",)))(*args)


def train_step(weights: Any, x: Any) -> tuple[Any, Any]:
    loss, gradients = jm.value_and_grad(looped)(weights, x)
    return weights - gradients, loss


def test_a_cpu_says_that_it_moves_nothing() -> None:
    step = jm.jit_step(train_step, jm.StepPolicy(remat="full", offload=("cuts",)))
    told = [line for line in jm.step_memory(step, *arguments()).warnings if "offload" in line]
    assert len(told) == 1
    assert (
        "nothing waits in host memory here: a CPU's device memory is the host's. Leave offload out, or name" in told[0]
    )


@pytest.mark.targets
@pytest.mark.timeout(300)
def test_a_gpus_compiler_needs_fewer_bytes_by_what_is_offloaded() -> None:
    needs_compiler("h100_sxm")
    rows, width = 8192, 128
    args = jax.ShapeDtypeStruct((LAYERS, 3, width, width), "float32"), jax.ShapeDtypeStruct((rows, width), "float32")
    carries = LAYERS * rows * width * 4
    there, kept_there = (
        jm.step_memory(jm.jit_step(train_step, jm.StepPolicy(remat="full", **options)), *args, target="h100_sxm")
        for options in ({"offload": ("cuts",)}, {"keep": 1.0, "offload": ("cuts", "kept")})
    )
    here = jm.step_memory(jm.jit_step(train_step, jm.StepPolicy(remat="full")), *args, target="h100_sxm")
    assert (here.program.host_temp_bytes, there.program.host_temp_bytes) == (0, carries)
    assert here.step_bytes - there.step_bytes >= 0.8 * carries
    # Nothing dear is computed again, and yet the device holds less than under full remat.
    assert kept_there.program.host_temp_bytes == 5 * carries
    assert kept_there.step_bytes < here.step_bytes
    assert "on the host" in str(there)
    assert "on the host" not in str(here)
    assert not [line for line in there.warnings if "offload" in line]
    plan = jm.plan(
        train_step, *args, target="h100_sxm", budget=there.step_bytes + 2**20, search={"offload": True}, progress=False
    )
    assert plan.chosen.fits
    moved = {each.policy.offload: each.host_bytes for each in plan.candidates if each.policy.keep == 0}
    assert moved[("cuts",)] == carries
    batch = {"multiple_of": rows, "at_most": 2 * rows}
    grown = jm.plan(
        train_step, *args, target="h100_sxm", budget=there.step_bytes + 2**20, progress=False,
        search={"offload": True, "batch": batch},
    )  # fmt: skip
    assert (grown.chosen.fits, grown.chosen.batch_rows, grown.policy.offload) == (True, rows, ("cuts",))
    assert grown.compiles <= 6
    assert f"Under full, 2 levels {rows} rows do not fit either." in str(grown)
    assert plan.chosen.policy.offload == ("cuts",) or (plan.chosen.modelled_s or 0) <= min(
        each.modelled_s or 0 for each in plan.candidates if each.fits and each.host_bytes
    )
    bounded = jm.plan(
        train_step, *args, target="h100_sxm", budget=here.step_bytes + 2**20, progress=False,
        search={"offload": True, "batch": {"multiple_of": rows, "at_most": rows}},
    )  # fmt: skip
    assert {each.batch_rows for each in bounded.candidates} == {bounded.chosen.batch_rows} == {rows}
    assert sum(each.host_bytes > 0 for each in bounded.candidates) == MOST_POLICIES, "tried at the most rows too"


@pytest.mark.targets
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

    failing, other, ledger = compiler(48), compiler(128), Ledger(None, MOST_POLICIES + 1)

    def placements() -> Iterator[Compiler]:
        with monkeypatch.context() as patch:
            patch.setenv("JAXMEM_COMPILE_TIMEOUT_S", "0.01")
            yield failing
        yield other

    offload(placements(), ledger)
    assert sum("was ended after 0.01 s" in str(error) for error in ledger.failed) == MOST_POLICIES
    assert [(each.compiler is other, each.candidate.policy.keep) for each in ledger.entries] == [(True, 0)]


@pytest.mark.core
def test_what_one_placement_refuses_is_not_asked_of_the_others() -> None:
    def step(weights: Any, x: Any) -> Any:
        return weights - jm.grad(unrolled)(weights, x)

    (first, _), (other, _) = tried_on(step, "cpu", *arguments()), tried_on(step, "cpu", *arguments())
    ledger, asked = Ledger(None, 16), list[Compiler]()

    def placements() -> Iterator[Compiler]:
        for each in (first, other):
            asked.append(each)
            yield each

    offload(placements(), ledger)
    assert asked == [first]
    assert ledger.left == 16


@pytest.mark.targets
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


def test_time_counts_the_way_to_the_host_and_back() -> None:
    jaxprs = [
        jax.make_jaxpr(jax.value_and_grad(jm.remat(looped, offload=words)))(*arguments()) for words in ((), ("cuts",))
    ]
    fast, silent = (Speed(1e12, 1e12, 1e12, 1.0, host) for host in (1e9, None))
    here, there = (modelled_seconds(jaxpr, fast, 2) for jaxpr in jaxprs)
    assert here is not None
    assert there is not None
    assert there - here == pytest.approx(2 * LAYERS * CARRY / 1e9 / 2, rel=1e-2)
    assert modelled_seconds(jaxprs[0], silent) is not None
    assert modelled_seconds(jaxprs[1], silent) is None


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

    others = [offer.policy.keep for offer in offers(compiler, jm.StepPolicy(remat="full")).alone]
    assert len(others) > 10
    assert seconds(share) == min(map(seconds, others))
    memory = jm.StepPolicy(remat="full", keep=share, offload=("kept",))
    traced = host_bytes(compiler.facts(memory).traced.jaxpr)
    assert 0 < traced < 0.1 * host_bytes(compiler.facts(replace(memory, keep=1.0)).traced.jaxpr), (
        "the contexts, hardly more"
    )
    # An H100 computes a product of 64 columns again long before it is back; and of a tpu7x nobody says how long it takes.
    # And where another loss would keep nothing of it, the policy is refused; no larger share is worth its way.
    for target, other in (("h100_sxm", train_step), ("tpu7x", attending), ("t4", attending_once)):
        compiler, tried = tried_on(other, target, *shapes)
        assert {each.keep for each in tried} == {0.0, 1.0}
        assert all(compiler.facts(each).flops for each in tried), "none of them is refused"
