"""`StepPolicy.state_offload`: the optimizer's state in host memory between steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.config.presets import parse_preset, preset_to_yaml
from jaxmem_callbacks.planning.step_time import host_bytes
from jaxmem_callbacks.programs.reading.hlo import parse_module
from jaxmem_callbacks.programs.reading.host_copies import HostCopies, host_copies
from jaxmem_callbacks.programs.steps.donation import is_on_host
from jaxmem_callbacks.programs.steps.host_state import unsaved
from jaxmem_callbacks.programs.steps.program import step_bytes_of
from jaxmem_callbacks.records.presets import Preset
from jaxmem_callbacks.records.units import format_bytes
from tests.pasting import pasted, run

ROOT = Path(__file__).resolve().parent.parent
WIDTH, LAYERS, STEPS = 32, 3, 5
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
POLICY = jm.StepPolicy(state_offload="optimizer")


@pytest.fixture(scope="module")
def mesh():
    return jm.make_mesh("fsdp=8")


def loss_of(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.square(x - 0.3).mean()


def train_step(params, opt_state, x):
    loss, grads = jm.value_and_grad(loss_of)(params, x)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def start():
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = {f"w{i}": jax.random.normal(keys[i], (WIDTH, WIDTH)) / 6 for i in range(LAYERS)}
    return params, OPTIMIZER.init(params), jax.random.normal(keys[-1], (8, WIDTH))


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def trained(policy, *, place):
    params, opt_state, x = start()
    step = jm.jit_step(train_step, policy)
    if place:
        params, opt_state, x = jm.place_state(step, params, opt_state, x)
    losses = []
    for _ in range(STEPS):
        params, opt_state, loss = step(params, opt_state, x)
        losses.append(float(loss))
    return losses, params, opt_state


@pytest.mark.core
@pytest.mark.parametrize("more", [{}, {"remat": "full"}, {"microbatches": 2}])
def test_training_with_the_state_on_the_host_has_the_same_numbers(more):
    expected, params, state = trained(jm.StepPolicy(**more), place=False)
    losses, moved_params, moved = trained(jm.StepPolicy(state_offload="optimizer", **more), place=True)
    assert losses == expected
    assert losses[-1] < losses[0]
    assert kinds(moved) == {"pinned_host"}
    assert kinds(moved_params) == kinds(params)
    for a, b in zip(jax.tree.leaves((params, state)), jax.tree.leaves((moved_params, moved)), strict=True):
        np.testing.assert_array_equal(a, b)


def step_of_one_state(state, x):
    params, opt_state, loss = train_step(*state, x)
    return (params, opt_state), loss


def momentum_step(w, velocity, x):
    velocity = 0.9 * velocity + jax.grad(lambda w: jnp.square(x @ w).mean())(w)
    return w - 0.1 * velocity, velocity


@pytest.mark.core
@pytest.mark.parametrize("kind", ["arguments", "one state", "by hand"])
def test_a_state_on_the_device_is_moved_by_the_line_that_is_shown(kind):
    params, opt_state, x = start()
    function, has = {
        "arguments": (train_step, {"params": params, "opt_state": opt_state, "x": x}),
        "one state": (step_of_one_state, {"state": (params, opt_state), "x": x}),
        "by hand": (momentum_step, {"w": params["w0"], "velocity": jnp.zeros_like(params["w0"]), "x": x}),
    }[kind]
    step = jm.jit_step(function, POLICY)
    with pytest.raises(jm.PolicyError, match=r"pinned_host.* as state_offload='optimizer' requires") as caught:
        step(*has.values())
    line = pasted("state_offload.place", caught.value)
    moved = run(line, jm=jm, **{function.__name__: function}, **has)
    results = step(*(moved[name] for name in has))
    assert "pinned_host" in kinds(results)


@pytest.mark.core
def test_an_optimizer_written_by_hand_is_found_by_what_the_step_does_with_it():
    w, x = jnp.ones((WIDTH, WIDTH)), jnp.ones((4, WIDTH))
    w, velocity, x = jm.place_state(momentum_step, w, jnp.zeros_like(w), x)
    assert (kinds(w), kinds(velocity)) == (kinds(x), {"pinned_host"})
    step = jm.jit_step(momentum_step, POLICY)
    w, velocity = step(w, velocity, x)
    assert kinds(velocity) == {"pinned_host"}


def test_the_state_comes_back_to_the_host_after_a_call_with_one_on_the_device():
    params, opt_state, x = start()
    step = jm.jit_step(train_step, POLICY)
    placed = jm.place_state(step, params, opt_state, x)
    params, _, _ = step(*placed)
    with pytest.raises(jm.PolicyError, match="Move it once, before the loop"):
        step(params, OPTIMIZER.init(params), x)


@pytest.mark.core
def test_a_checkpoint_comes_back_with_its_memory(tmp_path):
    """Orbax restores a state where its shapes say, so training goes on without moving it again."""
    step, (params, opt_state, x) = jm.jit_step(train_step, POLICY), start()
    params, opt_state, x = jm.place_state(step, params, opt_state, x)
    params, opt_state, _ = step(params, opt_state, x)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (params, opt_state))
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), (params, opt_state)
        )
        restored, state = checkpointer.restore(tmp_path / "state", shapes)
    assert kinds(state) == {"pinned_host"}
    expected = step(params, opt_state, x)
    again = step(restored, state, x)
    assert kinds(again[1]) == {"pinned_host"}
    np.testing.assert_array_equal(expected[2], again[2])


def test_a_step_without_optimizer_state_is_refused():
    def forward(params, x):
        return loss_of(params, x)

    params, _, x = start()
    with pytest.raises(jm.PolicyError, match="would do nothing: no argument that forward returns updated"):
        jm.jit_step(forward, POLICY)(params, x)
    with pytest.raises(jm.PolicyError, match="would do nothing"):
        jm.place_state(forward, params, x)


class Trained(NamedTuple):
    params: Any
    opt_state: Any


@pytest.mark.parametrize(
    ("hidden", "plain"),
    [
        (Trained, lambda params, opt_state: (params, opt_state)),
        (lambda params, opt_state: {"a": [[params, opt_state]]}, lambda params, opt_state: {"a": [params, opt_state]}),
        (lambda params, opt_state: ((Trained(params, opt_state),),), lambda params, opt_state: (params, opt_state)),
    ],
)
def test_a_state_that_is_returned_out_of_sight_is_found_where_the_error_asks_for_it(hidden, plain):
    params, opt_state, x = start()

    def steps(into):
        return lambda params, opt_state, x: into(*train_step(params, opt_state, x)[:2])

    with pytest.raises(jm.PolicyError, match=r"in a plain tuple, list or dictionary, at most two deep\."):
        jm.place_state(steps(hidden), params, opt_state, x)
    step = jm.jit_step(steps(plain), POLICY)
    results = step(*jm.place_state(step, params, opt_state, x))
    assert kinds(results) == {"pinned_host", params["w0"].sharding.memory_kind}


def test_what_is_no_outermost_jit_of_the_library_is_refused():
    params, opt_state, x = start()
    with pytest.raises(jm.PolicyError, match="already jitted"):
        jm.jit_step(jax.jit(train_step), POLICY)
    with pytest.raises(jm.PolicyError, match=r"Use jm.jit_step in its place, around train_step"):
        jm.apply_policy(train_step, POLICY)
    step = jm.jit_step(train_step, POLICY)
    with pytest.raises(jm.PolicyError, match="inside another jit"):
        jax.jit(step)(params, opt_state, x)


def test_presets_carry_it_and_their_schema_has_it():
    text = preset_to_yaml(Preset(name="on_host", policy=POLICY))
    assert "state_offload: optimizer" in text
    assert parse_preset(text).policy == POLICY
    assert '"state_offload"' in (ROOT / "configs" / "preset.schema.json").read_text()
    with pytest.raises(jm.PresetError, match="state_offload"):
        parse_preset(text.replace("optimizer", "optimiser"))


def test_another_word_is_refused():
    with pytest.raises(jm.PolicyError, match=r"state_offload='optimiser'. Did you mean `optimizer`\?"):
        jm.StepPolicy(state_offload="optimiser")


def chain(width, layers):
    """A chain of layers whose moments are most of what its step needs, as shapes."""
    params = {f"w{i}": jax.ShapeDtypeStruct((width, width), jnp.float32) for i in range(layers)}
    x = jax.ShapeDtypeStruct((64, width), jnp.float32)
    return params, jax.eval_shape(OPTIMIZER_ALONE.init, params), x


OPTIMIZER_ALONE = optax.adam(1e-3)


def long_step(params, opt_state, x):
    loss, grads = jm.value_and_grad(loss_of)(params, x)
    updates, opt_state = OPTIMIZER_ALONE.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


ONE_BY_ONE = {
    "platform": "tpu",
    "jax": ".".join(jax.__version__.split(".")[:2]),
    "xla_tpu_enable_latency_hiding_scheduler": False,
}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "options"), [("h100_sxm", None), ("v5e", ONE_BY_ONE)])
def test_the_step_needs_fewer_bytes_on_hardware_with_a_host(target, options):
    args = chain(1024, 64)
    moved = sum(2 * leaf.size * leaf.dtype.itemsize for leaf in args[0].values())
    step = jm.jit_step(long_step, jm.StepPolicy(state_offload="optimizer", compiler_options=options))
    placed = jm.place_state(step, *args)
    before = jm.step_memory(jm.jit_step(long_step), *args, target=target).step_bytes
    after = jm.step_memory(step, *placed, target=target).step_bytes
    assert moved > before / 2
    assert before - after >= 0.95 * moved
    assert host_bytes(step.traced(placed, {}).jaxpr) == 2 * moved


@pytest.mark.core
def test_a_divided_state_keeps_its_sharding(mesh):
    losses = []
    for policy in (jm.StepPolicy(sharding="fsdp"), jm.StepPolicy(sharding="fsdp", state_offload="optimizer")):
        params, opt_state, x = start()
        step = jm.jit_step(train_step, policy)
        with jax.set_mesh(mesh):
            params, opt_state = jax.device_put(
                (params, opt_state), jm.infer_shardings((params, opt_state), mesh, policy)
            )
            if policy.state_offload is not None:
                params, opt_state, x = jm.place_state(step, params, opt_state, x)
            for _ in range(STEPS):
                params, opt_state, loss = step(params, opt_state, x)
        losses.append(float(loss))
        moments = [leaf for leaf in jax.tree.leaves(opt_state) if leaf.ndim]
        assert {leaf.sharding.spec for leaf in moments} == {P("fsdp")}
    assert losses[0] == losses[1]
    assert kinds(opt_state) == {"pinned_host"}


@pytest.mark.targets
@pytest.mark.parametrize("function", [train_step, momentum_step])
def test_a_state_on_the_host_is_named_and_no_sum_is_doubted(function):
    params, opt_state, x = start()
    given = (params, opt_state, x) if function is train_step else (params["w0"], jnp.zeros_like(params["w0"]), x)
    step = jm.jit_step(function, POLICY)
    memory = jm.step_memory(step, *jm.place_state(step, *given), target="h100_sxm")
    name = "opt_state" if function is train_step else "velocity"
    size = format_bytes(sum(leaf.nbytes for leaf in jax.tree.leaves(given[1]) if leaf.ndim))
    assert memory.warnings[:1] == (f"{size} of {name} wait in host memory. The step's bytes are without them.",)
    assert len(memory.warnings) == 2  # and what the schedule has of them on the device at once


HEAD = "HloModule step, is_scheduled=true\n\nENTRY main {\n"
STATE = "  {0} = f32[1024,1024]{{1,0:S(5)}} parameter({1})\n"
COMES = "  {0}.in = (f32[1024,1024]{{1,0}}, f32[1024,1024]{{1,0:S(5)}}, u32[]) copy-start({0})\n"
IS_HERE = "  {0}.here = f32[1024,1024]{{1,0}} copy-done({0}.in)\n  {0}.new = f32[1024,1024]{{1,0}} negate({0}.here)\n"
GOES = "  {0}.out = (f32[1024,1024]{{1,0:S(5)}}, f32[1024,1024]{{1,0}}, u32[]) copy-start({0}.new)\n"
GONE = "  {0}.gone = f32[1024,1024]{{1,0:S(5)}} copy-done({0}.out)\n"


@pytest.mark.parametrize(
    ("order", "at_once"),
    [
        ("a0 b0 a1 b1 a2 a3 a4 b2 b3 b4", 2),
        ("a0 b0 a1 a2 a3 a4 b1 b2 b3 b4", 1),
        ("a0 b0", 0),
    ],
    ids=["all at the beginning", "one by one", "never"],
)
def test_the_schedule_shows_how_much_of_the_state_is_on_the_device_at_once(order, at_once):
    lines = [
        (STATE, COMES, IS_HERE, GOES, GONE)[int(word[1])].format(word[0], "ab".index(word[0])) for word in order.split()
    ]
    found = host_copies(parse_module(HEAD + "".join(lines) + "}\n"))
    size = 1024 * 1024 * 4
    assert (found.waiting_bytes, found.arrays) == (2 * size, 2)
    assert (found.at_once_bytes, found.at_once) == (at_once * size, at_once)
    assert (f"has {format_bytes(at_once * size)} of them" in found.words) == bool(at_once)


def test_a_program_without_the_host_has_no_such_schedule():
    assert host_copies(parse_module(HEAD + "  p = f32[8]{0} parameter(0)\n}\n")) is None


@pytest.mark.slow
@pytest.mark.targets
def test_a_state_whose_schedule_saves_nothing_is_shown_with_both_figures():
    """On a v5e the scheduler brings the whole state at once; what it saves without that scheduler is in the file of results."""
    args = chain(2048, 8)
    step = jm.jit_step(long_step, POLICY)
    placed = jm.place_state(step, *args)
    before = jm.step_memory(jm.jit_step(long_step), *args, target="v5e").step_bytes
    memory = jm.step_memory(step, *placed, target="v5e")
    assert memory.step_bytes >= before
    figures = f"{format_bytes(memory.step_bytes)} with the state on the host and {format_bytes(before)} without"
    assert any(f"does not make the step smaller: {figures}, both compiled." in each for each in memory.warnings)


@pytest.mark.parametrize(("at_once", "was", "asked"), [(4, 10, True), (4, 12, True), (1, 10, False)])
def test_a_step_is_compiled_without_its_moved_state_only_where_half_of_it_comes_at_once(at_once, was, asked):
    schedule = HostCopies(waiting_bytes=4, arrays=4, at_once_bytes=at_once, at_once=at_once, moment=1, length=9)
    calls = []
    words = unsaved(schedule, 10, lambda: calls.append(was) or was)
    assert calls == [was] * asked
    assert bool(words) == (asked and was == 10)


@pytest.mark.core
def test_a_moved_state_is_held_against_the_same_step_with_its_state_on_the_device():
    params, opt_state, x = start()
    step = jm.jit_step(train_step, POLICY)
    placed = jm.place_state(step, params, opt_state, x)
    other, (args, kwargs) = step.with_state_here(placed, {})
    assert not any(is_on_host(getattr(each, "sharding", None)) for each in jax.tree.leaves(args))
    expected = jm.step_memory(jm.jit_step(train_step), params, opt_state, x).step_bytes
    assert step_bytes_of("step", other.lower(*args, **kwargs)) == expected
