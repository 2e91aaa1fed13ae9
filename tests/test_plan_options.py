"""Compiler options that a plan searches: what is tried, what it costs, which is chosen, and the limit for which XLA plans."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.train_lines import lines_to_train
from jaxmem_callbacks.config.presets import parse_preset
from jaxmem_callbacks.planning.choice import with_options
from jaxmem_callbacks.planning.compiles import Compiler, CompileResults, Entry
from jaxmem_callbacks.planning.option_candidates import SLOP, note_limit, slop_for_budget
from jaxmem_callbacks.planning.plan import make_plan
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.request import Budget, PlanRequest, parse_search
from jaxmem_callbacks.planning.step_time import Speed, waiting_seconds
from jaxmem_callbacks.programs.reading.hlo import parse_module
from jaxmem_callbacks.programs.targets.target import resolve_target
from jaxmem_callbacks.records.errors import PlanError
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.units import format_bytes
from tests.pasting import run
from tests.sample_plans import MIB, candidate, sentences

LINE = ".".join(jax.__version__.split(".")[:2])
ORDER = "xla_cpu_scheduler_type"
LEAST = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
OPTIONS = {"platform": "cpu", "jax": LINE, ORDER: LEAST}
ALL = {"remat": False, "compiler_options": True}


def train_step(weights, batch):
    """Twelve products that XLA's CPU compiler prepares side by side and its memory scheduler one after the other."""
    total = 0.0
    for scale in range(12):
        rows = batch * jnp.float32(scale + 1)
        total += jnp.sin(rows @ weights).T @ jnp.cos(rows)
    return weights + 1e-3 * total


ARGS = (jax.ShapeDtypeStruct((256, 256), jnp.float32),) * 2


@pytest.mark.core
def test_options_are_chosen_where_nothing_fits_without_them():
    plan = jm.plan(train_step, *ARGS, budget="5MiB", search=ALL)
    plain, chosen = plan.candidates[0], plan.chosen
    assert (plain.fits, chosen.fits, plan.compiles) == (False, True, 2)
    assert plan.policy == dataclasses.replace(plain.policy, compiler_options=OPTIONS)
    assert chosen.step_bytes == jm.step_memory(jm.jit_step(train_step, plan.policy), *ARGS).step_bytes
    assert plan.record.reason == "it fits by options of the compiler, and nothing else fits"
    shown = sentences(plan)
    assert "none, options 1: it fits by options" in shown
    assert f"options 1, for cpu and jax {LINE}: {ORDER}={LEAST}" in shown
    given = tuple(jnp.ones(arg.shape) / 256 for arg in ARGS)
    (line,) = lines_to_train(plan, None)
    assert "compiler_options=" in line
    step = run(line, jm=jm, train_step=train_step)["step"]
    assert step.policy == plan.policy
    assert jnp.allclose(step(given[0].copy(), given[1]), train_step(*given), rtol=1e-6)
    expected = train_step(*given)
    assert jnp.allclose(jm.jit_step(train_step, parse_preset(plan.to_yaml()).policy)(*given), expected, rtol=1e-6)


@pytest.mark.core
def test_they_are_not_tried_where_the_plain_step_fits():
    plan = jm.plan(train_step, *ARGS, budget="1GiB", search=ALL)
    assert [each.policy.options for each in plan.candidates] == [None]


@pytest.mark.core
def test_without_a_budget_the_least_step_is_shown_under_each():
    lists = {ORDER: [LEAST], "xla_cpu_copy_insertion_use_region_analysis": [True, False]}
    plan = jm.plan(train_step, *ARGS, search={"remat": False, "compiler_options": lists})
    assert plan.policy.options is None
    assert plan.compiles == 3
    tried = {each.policy.options.by_name["xla_cpu_copy_insertion_use_region_analysis"] for each in plan.candidates[1:]}
    assert tried == {True, False}
    assert len({each.policy.options for each in plan.candidates}) == 3


def test_options_that_make_a_step_no_smaller_are_no_candidate():
    """One layer: each buffer needs the one before it, so that no order of them is smaller than another."""

    def one_layer(w, batch):
        value, gradient = jm.value_and_grad(lambda w: jnp.square(batch + jnp.tanh(jnp.tanh(batch @ w) @ w.T)).mean())(w)
        return w - gradient, value

    args = jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    plan = jm.plan(one_layer, *args, search={"compiler_options": True}, progress=False)
    assert {each.policy.options for each in plan.candidates} == {None}
    least = min(plan.candidates, key=lambda each: each.step_bytes)
    with_it = dataclasses.replace(least.policy, compiler_options=OPTIONS)
    larger = jm.step_memory(jm.jit_step(one_layer, with_it), *args).step_bytes
    assert larger >= least.step_bytes
    assert f"smaller: {format_bytes(larger)} with it and {format_bytes(least.step_bytes)} without" in sentences(plan)


@pytest.mark.core
@pytest.mark.parametrize("own", ["jit", "policy", "flags"])
def test_what_the_user_has_set_stays(own, monkeypatch):
    step = train_step
    if own == "jit":
        step = jax.jit(train_step, compiler_options={ORDER: "CPU_SCHEDULER_TYPE_DEFAULT"})
    elif own == "policy":
        step = jm.jit_step(train_step, jm.StepPolicy(compiler_options={**OPTIONS, ORDER: "CPU_SCHEDULER_TYPE_DEFAULT"}))
    else:
        monkeypatch.setenv("XLA_FLAGS", f"--{ORDER}=CPU_SCHEDULER_TYPE_DEFAULT")
    plan = jm.plan(step, *ARGS, budget="5MiB", search=ALL)
    assert [each.fits for each in plan.candidates] == [False]
    assert (plan.chosen.policy.options is not None) == (own == "policy")


def test_a_larger_batch_is_searched_under_them():
    search = {"remat": False, "batch": {"at_most": 2048}}
    without = jm.plan(train_step, *ARGS, budget="12MiB", search=search)
    plan = jm.plan(train_step, *ARGS, budget="12MiB", search=search | {"compiler_options": True})
    assert plan.chosen.fits
    assert plan.chosen.batch_rows > without.chosen.batch_rows
    assert plan.policy.options.by_name == {ORDER: LEAST}
    assert plan.record.reason.startswith(f"{plan.chosen.batch_rows} rows fit by options of the compiler")
    batch = jax.ShapeDtypeStruct((plan.chosen.batch_rows, 256), jnp.float32)
    assert jm.step_memory(jm.jit_step(train_step, plan.policy), ARGS[0], batch).step_bytes == plan.chosen.step_bytes


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (True, "all"),
        (False, ()),
        ({}, ()),
        ({"xla_a": [1, 2], "xla_b": True}, ({"xla_a": 1, "xla_b": True}, {"xla_a": 2, "xla_b": True})),
    ],
)
def test_a_dictionary_means_each_choice_of_its_values(asked, expected):
    assert parse_search({"compiler_options": asked}).compiler_options == expected


@pytest.mark.parametrize("asked", [{"autotune": [0]}, {"xla_a": [[]]}, "xla_a", 3])
def test_what_is_no_option_is_refused(asked):
    with pytest.raises(
        PlanError, match=r"Expected lists of values by option, or True for those that are known to move bytes"
    ):
        parse_search({"compiler_options": asked})


def timed(milliseconds: float, mebibytes: float, *, fits: bool = True, extra: int = 0, **policy: object) -> Candidate:
    return dataclasses.replace(candidate(mebibytes, extra, fits=fits, **policy), modelled_s=milliseconds / 1e3)


@pytest.mark.parametrize(
    ("best", "optioned", "expected"),
    [
        (timed(2, 100), [timed(2, 50)], 0),  # as fast
        (timed(2, 100), [timed(2.1, 50)], 0),  # slower
        (timed(2, 100, extra=50), [timed(1.9, 90)], 1),
        (timed(2, 100), [timed(1.9, 90, fits=False)], 0),
        (timed(2, 100, fits=False), [timed(3, 90), timed(2.5, 95)], 2),
        (timed(2, 100, fits=False), [timed(3, 90, fits=False)], 1),  # nearer
        (candidate(100, 50), [candidate(90, 40)], 1),  # no time is known
        (candidate(100, 50), [candidate(90, 50)], 0),
    ],
)
def test_they_are_chosen_where_they_cost_less_or_nothing_else_fits(best, optioned, expected):
    assert with_options(best, optioned)[0] is [best, *optioned][expected]


# A product of 4 ms, a gather of 3 ms: bytes through the links are 7/8 of the result's.
SPEED = Speed(flops=2 * 1024**3 / 4e-3, bandwidth=1e30, link=7 / 8 * 4 * 1024**2 / 3e-3, float32_share=1.0)
HEAD = "HloModule step, is_scheduled=true\n\nENTRY main {\n  p = f32[1024,1024]{1,0} parameter(0)\n"
HEAD += "  q = f32[128,1024]{1,0} parameter(1)\n"
PRODUCT = "  dot = f32[1024,1024]{1,0} dot(p, p), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
START = "  start = (f32[128,1024]{1,0}, f32[1024,1024]{1,0}) all-gather-start(q), dimensions={0}\n"
DONE = "  done = f32[1024,1024]{1,0} all-gather-done(start)\n"
SYNC = "  sync = f32[1024,1024]{1,0} all-gather(q), dimensions={0}\n"


@pytest.mark.parametrize(
    ("lines", "milliseconds"),
    [
        ([START, PRODUCT, DONE], 0.0),
        ([START, DONE, PRODUCT], 3.0),
        ([PRODUCT, SYNC], 3.0),
        (
            [
                START,
                START.replace("start =", "other ="),
                PRODUCT,
                DONE,
                DONE.replace("start", "other").replace("done =", "end ="),
            ],
            2.0,
        ),
        ([PRODUCT], 0.0),
    ],
    ids=["hidden", "at once", "synchronous", "two share the links", "none"],
)
def test_a_program_waits_for_what_no_work_hides(lines, milliseconds):
    module = parse_module(HEAD + "".join(lines) + "}\n")
    assert waiting_seconds(module, 8, SPEED) * 1e3 == pytest.approx(milliseconds, abs=1e-9)


def test_a_loop_waits_as_often_as_it_runs():
    body = "body {\n  q = f32[128,1024]{1,0} parameter(0)\n" + SYNC + "}\n\n"
    loop = '  loop = f32[128,1024]{1,0} while(q), condition=body, body=body, backend_config={"known_trip_count":{"n":"5"}}\n'
    module = parse_module("HloModule step\n\n" + body + HEAD.partition("\n\n")[2] + loop + "}\n")
    one = parse_module(HEAD + SYNC + "}\n")
    assert waiting_seconds(module, 8, SPEED) == pytest.approx(
        2 * 5 * waiting_seconds(one, 8, SPEED)
    )  # the condition too


def on_a_gpu(budget: int = 60_000 * MIB) -> Entry:
    """A plain step on an H100 of 80,000 MiB, of which JAX takes three quarters."""
    target = dataclasses.replace(resolve_target("h100_sxm", require_installed=False), memory_bytes=80_000 * MIB)
    limits = Budget(bytes=budget, limit_bytes=60_000 * MIB, reason="", device_bytes=80_000 * MIB)
    problem = Problem(train_step=train_step, args=ARGS, kwargs={}, target=target, budget=limits)
    return Entry(Compiler(problem), candidate(None, 0))


def with_temporaries(entry: Entry, mebibytes: int, *, own: int = 0, **policy: object) -> Entry:
    sizes = {"argument_bytes": 10_000 * MIB, "output_bytes": 10_000 * MIB, "alias_bytes": 10_000 * MIB}
    found = dataclasses.replace(
        candidate(mebibytes + 10_000, 0, own=own, **policy), temp_bytes=mebibytes * MIB, **sizes
    )
    return Entry(entry.compiler, found)


@pytest.mark.parametrize(
    ("mebibytes", "own", "others", "expected"),
    [
        (40_000, 0, (), None),
        (
            46_000,
            0,
            (),
            "stands at the limit for which XLA plans: 46.4 GiB of temporaries, 95% (the slop) of the 58.6 GiB",
        ),
        (
            46_000,
            0,
            (),
            "What avoids it, for its 44.9 GiB: XLA_CLIENT_MEM_FRACTION of 0.77 or more, or a slop of 92 or more.",
        ),
        (49_000, 0, (), "is beyond the limit"),
        (47_000, 12, (), "is beyond the limit for which XLA plans"),
        (47_000, 12, (), "a compile under a larger slop shows"),
        (47_000, 12, (49_500,), "for its 48.3 GiB: XLA_CLIENT_MEM_FRACTION of 0.82 or more, or a slop of 99 or more."),
        (47_000, 12, (79_000,), "need more than the GPU has: only fewer bytes avoid it."),
    ],
)
def test_the_limit_for_which_xla_plans_is_named_with_what_avoids_it(mebibytes, own, others, expected):
    entry, results = on_a_gpu(), CompileResults()
    options = {"platform": "gpu", "jax": LINE, SLOP: 500}
    for size in others:
        results.entries.append(with_temporaries(entry, size, compiler_options=options))
    note_limit(results, with_temporaries(entry, mebibytes, own=own))
    assert (expected or "") in " ".join(results.notes)
    assert bool(results.notes) == (expected is not None)


def test_the_slop_for_a_budget_leaves_its_temporaries_what_the_budget_has():
    entry = with_temporaries(on_a_gpu(30_000 * MIB), 50_000)
    assert slop_for_budget(entry.candidate, entry.compiler.problem) == 40  # 20,000 of 50,000 MiB
    small = with_temporaries(on_a_gpu(9_000 * MIB), 50_000)
    assert slop_for_budget(small.candidate, small.compiler.problem) is None


@pytest.mark.targets
def test_a_gpus_compiler_plans_for_the_budget_by_its_slop():
    """XLA computes again by itself, which is counted: the row fits and is no free one."""

    def deep_step(weights, batch):
        def loss(weights):
            x = batch
            for w in weights:
                x = jnp.tanh(jnp.sin(x @ w) * jnp.cos(x))
            return jnp.mean(x**2)

        value, gradients = jm.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    shapes = [jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)] * 8, jax.ShapeDtypeStruct((2**20, 512), jnp.bfloat16)
    request = PlanRequest(target="h100_sxm", budget="20GiB", search={"remat": False, "compiler_options": True})
    record = make_plan(deep_step, shapes, {}, request)
    rows = {each.policy.options is not None: each for each in record.candidates}
    assert rows[True].policy.options.by_name.keys() == {SLOP}
    assert rows[True].step_bytes < rows[False].step_bytes
    assert rows[True].compiler_remat
    assert rows[True].extra_flops > rows[False].extra_flops
