"""Calls that only report to Python do not stop a compile for absent hardware: they are left out there, named, and kept here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.extend.core import jaxpr_as_fun

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.targets.exporting import export_program, flatten_program, without_reports
from tests.comparisons import assert_close

X = jnp.linspace(0.0, 1.0, 64).reshape(8, 8)


def ignore(*_: Any) -> None:
    """What a report calls."""


def by_print(x):
    jax.debug.print("x {}", x[0])


def by_ordered_print(x):
    jax.debug.print("x {}", x[0], ordered=True)


def by_callback(x):
    jax.debug.callback(ignore, jnp.sum(x**2))


def by_ordered_callback(x):
    jax.debug.callback(ignore, x, ordered=True)


def by_io_callback(x):
    io_callback(ignore, None, x)


def by_ordered_io_callback(x):
    io_callback(ignore, None, x, ordered=True)


REPORTS = [by_print, by_ordered_print, by_callback, by_ordered_callback, by_io_callback, by_ordered_io_callback]


def directly(x, report):
    report(x)
    return jnp.sin(x)


def in_a_scan(x, report):
    def body(carry, row):
        report(carry)
        return jnp.sin(carry * row), row.sum()

    return jax.lax.scan(body, x[0], x)


def in_a_branch(x, report):
    return jax.lax.cond(x[0, 0] > 0, lambda x: (report(x), jnp.sin(x))[1], jnp.cos, x)


def in_a_while(x, report):
    return jax.lax.while_loop(lambda x: x[0, 0] < 3, lambda x: (report(x), x + 1.0)[1], x)


def in_a_jit(x, report):
    inner = jax.jit(lambda x: (report(x), jnp.sin(x))[1])
    return inner(inner(x))


def under_remat(x, report):
    return jax.value_and_grad(lambda x: jnp.sum(jax.checkpoint(lambda x: (report(x), jnp.sin(jnp.sin(x)))[1])(x)))(x)


def in_a_custom_vjp(x, report):
    @jax.custom_vjp
    def function(x):
        report(x)
        return jnp.sin(x)

    function.defvjp(lambda x: (function(x), x), lambda x, g: (g * jnp.cos(x),))
    return function(x), jax.grad(lambda x: function(x).sum())(x)


def in_a_custom_jvp(x, report):
    @jax.custom_jvp
    def function(x):
        report(x)
        return jnp.sin(x)

    function.defjvp(lambda x, t: (function(*x), t[0] * jnp.cos(x[0])))
    return function(x)


def mapped(x, report):
    return jax.vmap(lambda row: (report(row), jnp.sin(row))[1])(x)


PLACES = [directly, in_a_scan, in_a_branch, in_a_while, in_a_jit, under_remat, in_a_custom_vjp, in_a_custom_jvp, mapped]


def traced(place, report):
    return jax.jit(lambda x: place(x, report)).trace(X).jaxpr


def is_possible(place, report) -> bool:
    """JAX itself refuses ordered effects in some places, and effects of input and output under a checkpoint."""
    try:
        traced(place, report)
    except (ValueError, NotImplementedError):
        return False
    return True


@pytest.mark.core
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("report", REPORTS)
def test_reports_are_taken_out_wherever_they_are(place, report):
    if not is_possible(place, report):
        pytest.skip("JAX takes no such report there")
    closed = traced(place, report)
    kept, left_out = without_reports(closed)
    assert left_out
    assert all(name.startswith(("jax.debug.print", "jax.debug.callback", "io_callback")) for name in left_out)
    if place is not mapped:  # of some of which JAX forgets the line
        assert all("test_target_reports.py:" in name for name in left_out)
    assert not kept.effects
    assert "callback" not in str(kept)
    assert "debug_print" not in str(kept)
    assert kept.out_avals == closed.out_avals
    if report is by_print:
        assert_close(jaxpr_as_fun(kept)(X), jaxpr_as_fun(traced(place, ignore))(X))


@pytest.mark.core
def test_what_gives_values_back_stays_and_what_never_reports_is_the_same_object():
    def both(x):
        by_print(x)
        return jax.pure_callback(np.sin, x, x) + io_callback(np.cos, x, x)

    kept, left_out = without_reports(jax.jit(both).trace(X).jaxpr)
    assert [name.split(" ")[0] for name in left_out] == ["jax.debug.print"]
    assert [eqn.primitive.name for eqn in kept.eqns if "callback" in eqn.primitive.name] == [
        "pure_callback",
        "io_callback",
    ]
    assert [type(effect).__name__ for effect in kept.effects] == ["IOEffect"]
    plain = jax.jit(jnp.sin).trace(X).jaxpr
    assert without_reports(plain) == (plain, ())


@pytest.mark.core
def test_a_report_within_a_shard_map():
    mesh = jax.sharding.AbstractMesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")

    def step(x):
        return jax.shard_map(lambda x: (by_print(x), jnp.sin(x))[1], mesh=mesh, in_specs=spec, out_specs=spec)(x)

    kept, left_out = without_reports(jax.jit(step).trace(X).jaxpr)
    assert len(left_out) == 1
    assert not kept.effects


@pytest.mark.targets
@pytest.mark.parametrize("place", [directly, in_a_scan, under_remat])
def test_the_rest_leaves_the_process(place):
    program = export_program(flatten_program(lambda x: place(x, by_print), (X,), {}), "cuda")
    assert len(program.left_out) == 1


def make_step(report):
    def train_step(params, unseen, batch):
        def loss(params):
            def body(x, w):
                report(x)
                return jnp.tanh(x @ w), None

            return jnp.mean(jax.lax.scan(body, batch, params)[0] ** 2)

        value, gradients = jm.value_and_grad(loss)(params)
        report(unseen)
        return params - 0.1 * gradients, value

    return train_step


@pytest.mark.targets
def test_figures_are_those_of_the_step_without_its_reports(capfd):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 128, 128), (64, 64), (512, 128))]
    reporting, silent = (jm.jit_step(make_step(report)) for report in (by_print, ignore))
    memory = jm.step_memory(reporting, *shapes, target="h100_sxm")
    plain = jm.step_memory(silent, *shapes, target="h100_sxm")
    assert memory.program == plain.program
    assert [row.alias_bytes for row in memory.arguments] == [row.alias_bytes for row in plain.arguments]
    (note,) = [
        each for each in memory.warnings if each.startswith("Left out for h100_sxm, because they only report to Python")
    ]
    assert note.count("jax.debug.print (") == 1
    assert "test_target_reports.py" in note
    plan = jm.plan(reporting, *shapes, target="h100_sxm")
    assert note in plan.record.notes
    attached = jm.step_memory(reporting, *shapes)
    assert not any(each.startswith("Left out") for each in attached.warnings)
    jax.block_until_ready(reporting(*(jnp.ones(each.shape) for each in shapes)))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("x [") == 9
