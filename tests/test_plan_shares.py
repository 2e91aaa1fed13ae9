"""How the compiles of one plan are divided: what one placement of the state leaves is for the others, and none is in vain."""

from __future__ import annotations

import functools
import itertools
import signal
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.compiles import CompileBudget, CompileQueue, Compiler
from jaxmem_callbacks.planning.orchestrate import explore, offload, resume
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.request import Budget
from jaxmem_callbacks.records.policies import policy_words
from tests.target_step import keeps_remat, needs_compiler

ROWS, WIDTH = 512, 64
OPTIMIZER = optax.adam(1e-3)


def unrolled(params: Any, batch: Any) -> Any:
    """Residual layers, written out."""
    x = batch["x"]
    for name in sorted(params):
        x = x + jax.nn.gelu(x @ params[name]["w"]) @ params[name]["u"]
    return ((x - batch["y"]) ** 2).mean()


def scanned(params: Any, batch: Any) -> Any:
    """The same layers as one loop, with the weight of its rows."""

    def layer(x: Any, weights: Any) -> Any:
        return x + jax.nn.gelu(x @ weights["w"]) @ weights["u"], None

    x, _ = jax.lax.scan(layer, batch["x"], params)
    return jm.weighted(((x - batch["y"]) ** 2).sum(), 1.0 * x.size)


def step_of(loss: Any) -> Any:
    def train_step(state: Any, batch: Any) -> Any:
        value, grads = jm.value_and_grad(loss)(state["params"], batch)
        updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": value}

    return train_step


def arguments(layers: int, *, stacked: bool, rows: int = ROWS) -> tuple[Any, Any]:
    """Shapes of a state and a batch."""
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    lead = (layers,) if stacked else ()
    one = {"w": of((*lead, WIDTH, 4 * WIDTH)), "u": of((*lead, 4 * WIDTH, WIDTH))}
    params = one if stacked else {f"layer_{index}": one for index in range(layers)}
    state = {"params": params, "opt": jax.eval_shape(OPTIMIZER.init, params)}
    return state, {"x": of((rows, WIDTH)), "y": of((rows, WIDTH))}


def adapt(adapters: Any, frozen: Any, batch: Any) -> Any:
    """Small adapters beside frozen weights, trained by gradient descent."""

    def loss(adapters: Any) -> Any:
        x = batch["x"]
        for small, layer in zip(adapters, frozen, strict=True):
            h = jax.nn.gelu(x @ (layer["w"] + small["a"] @ small["b"]))
            x = x + jax.nn.gelu(h @ layer["v"]) @ layer["u"]
        return ((x - batch["y"]) ** 2).mean()

    value, grads = jm.value_and_grad(loss)(adapters)
    return jax.tree.map(lambda a, g: a - 0.1 * g, adapters, grads), value


def test_a_placement_that_needs_more_than_its_share_gets_what_the_others_left() -> None:
    """Of three two are not compiled; the last is followed to remat in two levels over microbatches, seven compiles down."""
    step, given = step_of(scanned), arguments(6, stacked=True)
    search = {"microbatches": [2, 4, 8], "sharding": ["replicate", "zero1", "fsdp"]}
    plan = jm.plan(step, *given, budget="500KiB", progress=False, search=search)
    assert plan.chosen.fits is False
    assert (2, 8) in {(each.policy.levels, each.policy.microbatches) for each in plan.candidates}, str(plan)
    assert 16 // 3 < plan.compiles <= 16
    assert not any("are the most that one plan takes" in note for note in plan.record.notes)


def test_a_search_that_was_cut_off_goes_on() -> None:
    step, (state, batch) = step_of(scanned), arguments(6, stacked=True)
    plain, full = (
        jm.step_memory(jm.jit_step(step, jm.StepPolicy(remat=remat)), state, batch).step_bytes
        for remat in ("none", "full")
    )
    budget = Budget(bytes=(plain + full) // 2, limit_bytes=None, reason="half way")
    compiler = Compiler(Problem(train_step=step, args=(state, batch), kwargs={}, target=None, budget=budget))
    queue = CompileQueue(budget=CompileBudget(6))
    explore(compiler, (), queue.at_most(2), remat=True, frontier=False)
    assert [each.candidate.fits for each in queue.results.entries if each.candidate.policy.keep] == []
    resume([compiler], (), queue, remat=True)
    assert True in [each.candidate.fits for each in queue.results.entries if each.candidate.policy.keep]
    assert len(queue.results.entries) == queue.budget.used <= 8


@pytest.mark.targets
def test_what_is_asked_besides_takes_nothing_from_what_fits() -> None:
    """Offload of layers written out is refused before any compile; what was put aside for it is used."""
    needs_compiler("h100_sxm")
    step, given = step_of(unrolled), arguments(3, stacked=False)
    search = {"sharding": ["fsdp"], "offload": True}
    plan = jm.plan(step, *given, target="h100_sxm:2", budget="6.6MiB", progress=False, search=search)
    assert plan.chosen.fits, str(plan)
    assert 0 < plan.policy.keep < 1, "the budget was closed in on"
    told = [note for note in plan.record.notes if "has no loop" in note]
    assert told
    assert len(told) == len({note.partition(" not compiled: ")[2] for note in told}), "once, with all whom it concerns"
    assert not any("are the most that one plan takes" in note for note in plan.record.notes)


@pytest.mark.core
def test_a_cpu_spends_no_compile_on_offload_and_an_absent_compile_is_told() -> None:
    """A CPU's memory is its host's. What offload would be compiled where no compile is left stands among what was cut off."""
    step, given = step_of(scanned), arguments(3, stacked=True)
    plan = jm.plan(step, *given, progress=False, search={"offload": True})
    assert "Offload was not tried: a CPU's device memory is its host's." in plan.record.notes
    assert not any(each.policy.offload for each in plan.candidates)
    queue = CompileQueue(budget=CompileBudget(2))
    budget = Budget(bytes=None, limit_bytes=None, reason="no limit")
    compiler = Compiler(Problem(train_step=step, args=given, kwargs={}, target=None, budget=budget))
    explore(compiler, (), queue, remat=True, frontier=True)
    offload([compiler], queue)
    queue.note_skipped()
    assert [note for note in queue.results.notes if "full, offload cuts" in note], queue.results.notes


@keeps_remat
def test_a_budget_is_filled_where_full_remat_is_not_the_least() -> None:
    """Bytes are foreseen on the line between what was compiled, also where that falls at first."""
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    layers = range(4)
    frozen = [{"w": of((64, 64)), "v": of((64, 256)), "u": of((256, 64))} for _ in layers]
    adapters = [{"a": of((64, 4)), "b": of((4, 64))} for _ in layers]
    plan = jm.plan(adapt, adapters, frozen, {"x": of((256, 64)), "y": of((256, 64))}, budget="2.2MiB", progress=False)
    (full,) = (each.step_bytes for each in plan.candidates if policy_words(each.policy) == "full")
    assert min(each.step_bytes for each in plan.candidates if each.policy.keep) < full, "what keeps a little needs less"
    assert plan.chosen.fits
    assert plan.compiles <= 8
    assert plan.chosen.step_bytes >= 0.9 * plan.record.budget_bytes, str(plan)


@keeps_remat
def test_what_comes_nearest_is_looked_for_where_deeper_cuts_need_no_less() -> None:
    """Of so few layers two levels take what one takes: what is most is alive elsewhere, and may be less under another policy."""

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            return jax.nn.log_softmax(functools.reduce(lambda x, w: jax.nn.relu(x @ w), weights, x)).mean()

        return jax.tree.map(lambda w, gradient: w - gradient, weights, jm.grad(loss)(weights))

    widths = (64, 128, 128, 128, 8)
    weights = [jax.ShapeDtypeStruct(pair, "float32") for pair in itertools.pairwise(widths)]
    plan = jm.plan(step, weights, jax.ShapeDtypeStruct((2048, 64), "float32"), budget="300KiB", progress=False)
    assert plan.chosen.fits is False
    assert plan.chosen.step_bytes == min(each.step_bytes for each in plan.candidates)
    assert any(each.policy.keep for each in plan.candidates), str(plan)


def test_nothing_is_compiled_that_was_compiled_under_another_name() -> None:
    """So few segments make no second level."""
    step, given = step_of(unrolled), arguments(2, stacked=False, rows=64)
    plan = jm.plan(step, *given, budget="300KiB", progress=False)
    assert plan.chosen.fits is False
    assert plan.compiles <= 8
    assert len({each.operations for each in plan.candidates}) == len(plan.candidates), str(plan)


@pytest.mark.parametrize("time", [1, 2], ids=["while others compile", "before the next ones start"])
def test_an_interrupted_plan_counts_what_was_compiled(time: int) -> None:
    """Progress is told after each compile and before each pair, in the user's own function: Ctrl-C may come in any of them."""
    told = list[int]()

    def stop(_what: str, done: int, _most: int) -> None:
        told.append(done)
        if told.count(2) == time:
            raise KeyboardInterrupt

    step, given = step_of(unrolled), arguments(4, stacked=False)
    plan = jm.plan(step, *given, progress=stop)
    assert "Interrupted: this is the best of what was compiled so far." in str(plan)
    assert len(plan.candidates) == plan.compiles == plan.record.compiled == 2
    assert "2 compiles (" in str(plan)
    assert "from the cache" not in str(plan)


def test_what_compiles_while_ctrl_c_comes_is_kept() -> None:
    """A compile in this process cannot be ended: its answer is as good as the others."""
    told = list[int]()

    def stop(_what: str, done: int, _most: int) -> None:
        told.append(done)
        if told.count(1) == 1:
            raise KeyboardInterrupt

    step, given = step_of(unrolled), arguments(4, stacked=False)
    plan = jm.plan(step, *given, progress=stop)
    assert told[-1] == 1, "nothing is told of after it"
    assert len(plan.candidates) == plan.compiles == plan.record.compiled == 2
    assert "Interrupted: this is the best of what was compiled so far." in str(plan)


class _Interrupted:
    """Whose end is when Ctrl-C is pressed: Python prints what its finalizer raises, and goes on."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_is_heard_where_python_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, told = list[type[BaseException] | None](), list[int]()
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: lost.append(unraisable.exc_type))

    def stop(_what: str, done: int, _most: int) -> None:
        told.append(done)
        if told.count(2) == 1:
            _Interrupted()

    step, given = step_of(unrolled), arguments(4, stacked=False)
    plan = jm.plan(step, *given, progress=stop)
    assert lost == [KeyboardInterrupt]
    assert "Interrupted: this is the best of what was compiled so far." in str(plan)
    assert len(plan.candidates) == plan.compiles == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.core
def test_a_shared_failure_is_one_sentence() -> None:
    """Of a loss that no policy can cut each policy is refused alike."""
    step, given = (
        step_of(lambda params, batch: (batch["x"] @ params["layer_0"]["w"]).sum()),
        arguments(1, stacked=False),
    )
    plan = jm.plan(step, *given, budget="10KiB", progress=False, search={"sharding": ["fsdp", "zero1"]})
    assert plan.chosen.fits is False
    assert len(plan.record.notes) == len({note.partition(": ")[2] for note in plan.record.notes}), plan.record.notes
