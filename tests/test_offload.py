"""Offloading what loops store: the same numbers, what crosses the host's link, what compilers say, and when it is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.search import MOST_POLICIES
from jaxmem_callbacks.planning.step_time import Speed, host_bytes, modelled_seconds
from jaxmem_callbacks.records.errors import PolicyError
from tests.comparisons import assert_close, stored_bytes
from tests.offloaded_steps import CARRY, LAYERS, ROWS, WIDTH, arguments, looped, recurrent, train_step, unrolled
from tests.target_step import needs_compiler


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


def test_a_cpu_says_that_it_moves_nothing() -> None:
    step = jm.jit_step(train_step, jm.StepPolicy(remat="full", offload=("cuts",)))
    told = [line for line in jm.step_memory(step, *arguments()).warnings if "offload" in line]
    assert len(told) == 1
    assert (
        "nothing waits in host memory here: a CPU's device memory is the host's. Leave offload out, or name" in told[0]
    )


@pytest.mark.targets
@pytest.mark.recorded
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
    assert grown.compiles <= 8
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
