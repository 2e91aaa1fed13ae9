"""`jm.step_memory`: figures of one compile, shared with the first call, by argument and kind; no device memory is touched."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.memory import known_memory
from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.programs.steps.leaves import call_leaves
from jaxmem_callbacks.programs.steps.program import read_program
from jaxmem_callbacks.programs.targets.step_on_target import compile_step_for
from jaxmem_callbacks.records.errors import CompileError, TargetError
from jaxmem_callbacks.records.programs import Compilation, ProgramMemory
from jaxmem_callbacks.transforms.arg_roles import is_batch_name, kind_of_argument
from tests.pasting import pasted, value
from tests.sample_plans import sentences
from tests.target_step import needs_compiler

TARGETS = ("h100_sxm", "v5e")

OPTIMIZER = optax.adam(1e-2)
LAYERS, WIDTH, ROWS = 6, 32, 64


def loss_fn(params, batch):
    hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], params["layers"])
    return ((hidden @ params["head"] - 1.0) ** 2).mean()


def train_step(params, opt_state, batch):
    loss, grads = jm.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def data():
    params = {"layers": jnp.ones((LAYERS, WIDTH, WIDTH)), "head": jnp.ones((WIDTH, 1))}
    return params, OPTIMIZER.init(params), {"x": jnp.ones((ROWS, WIDTH))}


PARAMETER_BYTES = (LAYERS * WIDTH * WIDTH + WIDTH) * 4


@pytest.fixture(scope="module")
def shapes():
    return jax.eval_shape(data)


@pytest.fixture(scope="module")
def memory(shapes):
    return jm.step_memory(jm.jit_step(train_step), *shapes)


@pytest.mark.core
def test_one_compile_shared_with_the_first_call_and_no_device_memory(shapes):
    names = []

    def listen(event, _duration, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(details.get("fun_name"))

    step = jm.jit_step(train_step)
    arguments = data()
    cursor = registry.since(0)[1]
    jax.monitoring.register_event_duration_secs_listener(listen)
    live = len(jax.live_arrays())
    abstract = jm.step_memory(step, *shapes)
    assert len(jax.live_arrays()) == live
    real = jm.step_memory(step, *arguments)
    step(*arguments)
    jax.monitoring.unregister_event_duration_listener(listen)
    assert names == ["jit(train_step)"]
    assert real.program == abstract.program
    assert len(registry.since(cursor)[0]) == 1


@pytest.mark.core
def test_figures_are_the_compilers(memory, shapes):
    compiled = jax.jit(train_step, donate_argnums=(0, 1)).lower(*shapes).compile().memory_analysis()
    assert memory.argument_bytes == compiled.argument_size_in_bytes
    assert memory.output_bytes == compiled.output_size_in_bytes
    assert memory.alias_bytes == compiled.alias_size_in_bytes
    assert memory.temp_bytes == compiled.temp_size_in_bytes
    parts = memory.argument_bytes + memory.output_bytes - memory.alias_bytes + memory.temp_bytes + memory.constant_bytes
    assert memory.step_bytes == (getattr(compiled, "total_allocation_bytes", None) or parts)
    assert memory.step_bytes == parts
    assert memory.donated_bytes == memory.alias_bytes
    assert memory.compiler_remat == 0
    assert memory.warnings == ()


@pytest.mark.core
def test_rows_by_argument_and_kind(memory):
    rows = {row.name: row for row in memory.arguments}
    assert {name: row.kind for name, row in rows.items()} == {
        "params": "parameters",
        "opt_state": "optimizer state",
        "batch": "batch",
    }
    assert (rows["params"].bytes, rows["params"].leaves) == (PARAMETER_BYTES, 2)
    assert rows["opt_state"].bytes == 2 * PARAMETER_BYTES + 4
    assert rows["params"].alias_bytes == rows["params"].donated_bytes == PARAMETER_BYTES
    assert (rows["batch"].donated_bytes, rows["batch"].alias_bytes) == (0, 0)
    assert sum(row.bytes for row in memory.arguments) == memory.argument_bytes


@pytest.mark.core
def test_remat_shows_in_the_temporaries(memory, shapes):
    cheaper = jm.step_memory(jm.jit_step(train_step, jm.StepPolicy(remat="full")), *shapes)
    assert cheaper.temp_bytes < memory.temp_bytes
    assert cheaper.alias_bytes == memory.alias_bytes


@pytest.mark.core
def test_a_jitted_step_is_told_what_it_does_not_donate(shapes):
    plain = jm.step_memory(jax.jit(train_step), *shapes)
    assert (plain.alias_bytes, plain.donated_bytes) == (0, 0)
    assert plain.warnings[0].startswith(
        "params, opt_state: returned updated and not donated, so 72.4 KiB are held twice."
    )
    assert "donate_argnames=('params', 'opt_state')" in plain.warnings[0]


class Averaging:
    """A step as a method, which is nothing that a jit may take as data."""

    @functools.partial(jax.jit, static_argnums=0)
    def average(self, mean, x):
        return 0.9 * mean + 0.1 * x.mean(0)


def with_rate(*args, rate):
    state, x = args
    return state - rate * x.mean(0), x.sum()


def two(first, second, x):
    return first + x.mean(0), second - x.mean(0)


@pytest.mark.core
@pytest.mark.parametrize(
    ("step", "jitted_again", "donates"),
    [
        (
            jax.jit(with_rate, static_argnames="rate"),
            lambda **options: jax.jit(with_rate, static_argnames="rate", **options),
            ["args[0]"],
        ),
        (jax.jit(two, donate_argnums=0), lambda **options: jax.jit(two, **options), [0, 1]),
        (jax.jit(two, donate_argnames="second"), lambda **options: jax.jit(two, **options), [0, 1]),
        (
            Averaging().average,
            lambda **options: functools.partial(
                jax.jit(Averaging.average.__wrapped__, static_argnums=0, **options), Averaging()
            ),
            [0],
        ),
    ],
    ids=["positions and a static name", "donates a position", "donates a name", "a method with a static self"],
)
def test_the_option_that_donates_keeps_those_that_the_jit_has(step, jitted_again, donates):
    keywords = {"rate": 0.1} if donates == ["args[0]"] else {}
    state = [jnp.ones(8) for _ in range(len(donates))]
    (warning,) = (w for w in jm.step_memory(step, *state, jnp.ones((4, 8)), **keywords).warnings if "Write" in w)
    written, instead = re.search(
        r"Write (.*) in the jax\.jit of \w+(, in place of what it donates now|)\.$", warning
    ).groups()
    assert bool(instead) == (donates == [0, 1])
    options = eval(f"dict({written})")  # noqa: S307 - pasted as printed
    expected = step(*jax.tree.map(jnp.copy, state), jnp.ones((4, 8)), **keywords)
    got = jitted_again(**options)(*state, jnp.ones((4, 8)), **keywords)
    assert all(each.is_deleted() for each in state)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.core
def test_a_plain_step_is_taken_as_jit_step_would(memory, shapes):
    assert jm.step_memory(train_step, *shapes).program == memory.program


@pytest.mark.core
def test_what_is_lost_unused_or_shared_is_a_warning_not_an_error():
    def lossy(state, extra, batch):  # noqa: ARG001 - that is the case
        return state.astype(jnp.bfloat16), batch.sum()

    step = jm.jit_step(lossy, donate_argnames="state")
    told = jm.step_memory(step, jnp.ones(8), jnp.ones(4), jnp.ones(2)).warnings
    assert told[0].startswith("state is donated in vain: it comes as float32 and is returned as bfloat16.")
    assert told[1] == "extra is never used by lossy: JAX drops it from the program."
    params, opt_state, batch = data()
    tied = {"layers": params["layers"], "head": params["head"], "ema": params["layers"]}
    step = jm.jit_step(lambda state, batch: jax.tree.map(lambda w: w * batch["x"].sum(), state))
    assert (
        "state['ema'] and state['layers'] of <lambda> are one and the same buffer"
        in jm.step_memory(step, tied, batch).warnings[0]
    )
    with jax.debug_nans(True):
        told = jm.step_memory(jm.jit_step(train_step), params, opt_state, batch).warnings
    assert told[-1] == "jax_debug_nans is on: JAX donates nothing while it is."


@pytest.mark.core
def test_train_state_with_batch_statistics_is_told_apart():
    class State(TrainState):
        batch_stats: dict

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(1)(linen.BatchNorm(use_running_average=False)(linen.Dense(8)(x)))

    def init():
        variables = Model().init(jax.random.key(0), jnp.ones((2, 4)))
        return State.create(
            apply_fn=None, params=variables["params"], tx=OPTIMIZER, batch_stats=variables["batch_stats"]
        ).replace(step=jnp.int32(0))

    def step(state, x):
        def loss(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            y, new = Model().apply(variables, x, mutable=["batch_stats"])
            return (y**2).mean(), new["batch_stats"]

        (value, stats), grads = jm.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=stats), value

    state = jax.eval_shape(init)
    rows = jm.step_memory(jm.jit_step(step), state, jax.ShapeDtypeStruct((2, 4), jnp.float32)).arguments
    assert [(row.name, row.kind) for row in rows] == [
        ("state", "state"),
        ("state", "parameters"),
        ("state", "optimizer state"),
        ("x", "batch"),
    ]
    assert rows[0].bytes == 4 + 2 * 8 * 4  # the step counter, mean and variance
    assert all(row.alias_bytes == row.donated_bytes == row.bytes for row in rows[:3])


@pytest.mark.core
def test_abstract_nnx_objects_are_told_apart_by_variable():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(4, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.dense(x))

    def step(model, optimizer, batch):
        loss, grads = jm.nnx.value_and_grad(lambda m: (m(batch) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(Model(nnx.Rngs(0)), OPTIMIZER, wrt=nnx.Param))
    live = len(jax.live_arrays())
    memory = jm.step_memory(jm.jit_step(step), model, optimizer, jax.ShapeDtypeStruct((2, 4), jnp.float32))
    assert len(jax.live_arrays()) == live
    rows = {(row.name, row.kind): row for row in memory.arguments}
    weights = (4 * 8 + 8 + 8 + 8) * 4
    assert rows["model", "parameters"].bytes == weights
    assert rows["model", "state"].bytes == 2 * 8 * 4
    assert rows["optimizer", "optimizer state"].bytes == 2 * weights + 4 + 4
    assert rows["batch", "batch"].bytes == 2 * 4 * 4
    assert memory.alias_bytes == memory.donated_bytes


@pytest.mark.core
def test_bytes_are_those_of_one_device():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    state = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=where)
    batch = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=where)
    memory = jm.step_memory(jm.jit_step(lambda state, batch: (state + batch.sum(), 0.0)), state, batch)
    assert [(row.name, row.kind, row.bytes) for row in memory.arguments] == [
        ("state", "state", 64 * 16 * 4 // 8),
        ("batch", "batch", 4),
    ]
    assert memory.alias_bytes == memory.donated_bytes == 64 * 16 * 4 // 8
    assert memory.warnings == ()


@pytest.mark.core
def test_the_peaks_buffers_come_with_source_and_shape(memory):
    (largest, *rest) = memory.top_buffers(5)
    assert len(rest) == 4
    assert largest.bytes >= rest[0].bytes
    assert any(b.source and re.search(r"test_step_memory\.py:\d+$", b.source) for b in memory.top_buffers())


def test_the_table_has_units_meaning_and_source(memory):
    lines = str(memory).splitlines()
    assert (
        lines[0] == "What one step of train_step needs, in bytes on one device (source: the compiler for attached cpu)"
    )
    assert any(re.fullmatch(r"  arguments +80\.\d KiB  what the step is given and uses", line) for line in lines)
    assert any(re.fullmatch(r"  params     parameters +2  24\.1 KiB  24\.1 KiB +24\.1 KiB", line) for line in lines)
    columns = [line.index("arrays") + len("arrays") for line in lines if "really reused" in line]
    rows = lines[-3:]
    assert all(row[columns[0] - 1].isdigit() for row in rows)


@pytest.mark.parametrize(
    "target",
    [pytest.param(None, marks=pytest.mark.core), *(pytest.param(t, marks=pytest.mark.targets) for t in TARGETS)],
)
def test_arrays_that_a_step_closes_over_are_counted_and_told(target):
    """By a runtime's total or without one: what is part of the program takes the device's memory too."""
    if target is not None:
        needs_compiler(target)
    data, scale = np.arange(512 * 1024, dtype=np.float32).reshape(512, 1024), np.float32(0.5)

    def train_step(weights):
        value, gradient = jm.value_and_grad(lambda w: (jnp.sort(jnp.asarray(data) @ w)[:, :3] ** 2).mean() * scale)(
            weights
        )
        return weights - gradient, value

    memory = jm.step_memory(train_step, jax.ShapeDtypeStruct((1024, 32), jnp.float32), target=target)
    bits = 16 if target == "v5e" else 32  # a TPU's compiler keeps it in bfloat16
    assert data.size * bits // 8 <= memory.constant_bytes < 1.01 * data.size * bits // 8
    assert memory.constant_bytes == sum(each.bytes for each in memory.top_buffers() if each.kind == "constant")
    parts = memory.argument_bytes + memory.output_bytes - memory.alias_bytes + memory.temp_bytes + memory.constant_bytes
    # A TPU's compiler counts a little of its own among the temporaries.
    assert memory.step_bytes == pytest.approx(parts, rel=0.02 if target == "v5e" else 0)
    assert memory.peak().bytes == memory.step_bytes
    assert any("of constants: train_step closes over arrays" in warning for warning in memory.warnings)
    assert re.search(r"constants +[12]\.\d MiB  arrays in the program", str(memory))


@pytest.mark.targets
def test_a_target_that_is_not_here_answers_by_argument(shapes):
    needs_compiler("v5e:2x2")
    memory = jm.step_memory(jm.jit_step(train_step), *shapes, target="v5e:2x2")
    assert (memory.program.platform, memory.program.target) == ("tpu", "v5e:2x2")
    assert {row.name: row.kind for row in memory.arguments}["opt_state"] == "optimizer state"
    assert all(row.alias_bytes == row.donated_bytes for row in memory.arguments)
    assert any(b.operation == "params['layers']" for b in memory.top_buffers())
    by_totals, placed = memory.known_peak, memory.peak()
    assert by_totals.bytes == memory.step_bytes, (
        "the first compile shows what each argument takes, and the rest in sums"
    )
    for group in ("parameters", "optimizer state", "batch"):
        assert by_totals.bytes_of(group) + by_totals.bytes_of("unknown") >= placed.bytes_of(group) > 0
        assert 0 < by_totals.bytes_of(group) <= placed.bytes_of(group), "without tiles"
    assert "peak() has them" in memory._repr_html_()
    huge = jax.eval_shape(lambda: {"w": jnp.ones((2**17, 2**15)), "v": jnp.ones((2**17, 2**15))})
    step = jm.jit_step(lambda state, batch: jax.tree.map(lambda w: w * batch.sum(), state))
    with pytest.raises(CompileError, match=r"does not fit into one device of v5e:2x2: its compiler needs 32\.0 GiB"):
        jm.step_memory(step, huge, jax.ShapeDtypeStruct((4,), jnp.float32), target="v5e:2x2")
    traced = step.traced((huge, jax.ShapeDtypeStruct((4,), jnp.float32)), {})
    refused, *_ = compile_step_for(traced, step.name, "v5e:2x2")
    assert refused.peak is not None  # as far as its arguments tell
    assert refused.peak.bytes == max(refused.needed_bytes, 2**35 + 16)
    assert refused.peak.bytes_of("state") == 2**35
    assert "the compiler refused the program before it placed its buffers" in sentences(refused.peak)


@pytest.mark.core
def test_a_targets_program_is_told_by_argument_whatever_it_drops():
    def step(state, extra, batch):
        return {"w": jnp.tanh(state["w"]) * batch.sum(), "b": state["b"].astype(jnp.bfloat16)}, extra["size"].shape[0]

    state = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32), "b": jax.ShapeDtypeStruct((8,), jnp.float32)}
    extra = {"size": jax.ShapeDtypeStruct((5,), jnp.float32)}
    jitted = jm.jit_step(step, donate_argnames=("state", "extra"))
    memory = jm.step_memory(jitted, state, extra, jax.ShapeDtypeStruct((3,), jnp.float32), target="cpu")
    rows = {row.name: row for row in memory.arguments}
    assert (rows["state"].donated_bytes, rows["state"].alias_bytes) == (64 * 64 * 4 + 32, 64 * 64 * 4)
    assert memory.alias_bytes == 64 * 64 * 4
    assert memory.warnings == (
        "state['b'] is donated in vain: this target's compiler reuses it for no result.",
        "extra['size'] is donated in vain: the step never uses it.",
        "extra is never used by step: JAX drops it from the program.",
    )


class WithoutFigures:
    """A compiled program of a platform that reports no memory figures; all else is the real one's."""

    def __init__(self, compiled):
        self.compiled = compiled

    def __getattr__(self, name):
        return getattr(self.compiled, name)

    def memory_analysis(self):
        return None


def test_a_platform_without_figures_is_said_to_be_one():
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    compiled = WithoutFigures(lowered.compile())
    leaves = call_leaves([("x", jnp.ones(3))], 1, lowered)
    program = read_program("f", leaves, lowered, compiled, static={})
    assert program.memory is None
    assert program.signature == (("x", "float32[3]"),)
    with pytest.raises(
        CompileError, match=r"What f needs is unknown here: The compiler of this platform reports no memory"
    ):
        known_memory(program, "f")


def test_a_target_that_does_not_exist_is_refused(shapes):
    with pytest.raises(TargetError, match="v5x"):
        jm.step_memory(jm.jit_step(train_step), *shapes, target="v5x")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("params", "parameters"),
        ("opt_state", "optimizer state"),
        ("x", "batch"),
        ("train_batch", "batch"),
        ("batch_stats", "state"),
        ("state", "state"),
        ("key", "other"),
    ],
)
def test_arguments_are_known_by_name(name, kind):
    assert kind_of_argument(name) == kind
    assert is_batch_name(name) == (kind == "batch")


def compilation(number):
    memory = ProgramMemory(
        name="f", platform="cpu", target="attached", argument_bytes=1, output_bytes=1, alias_bytes=0, temp_bytes=0
    )
    return Compilation(program=f"p{number}", time_s=float(number), signature=(), memory=memory)


def test_the_registry_can_be_followed_from_anywhere_and_forgets_the_oldest():
    _, cursor = registry.since(0)
    for number in range(registry.KEPT + 5):
        registry.record(compilation(number))
    told, after = registry.since(cursor)
    assert len(told) == registry.KEPT
    assert (told[0].program, told[-1].program) == ("p5", f"p{registry.KEPT + 4}")
    assert after == cursor + registry.KEPT + 5
    assert registry.since(after) == ((), after)
    registry.record(compilation(0))
    assert [c.program for c in registry.since(after)[0]] == ["p0"]
    assert len(registry.since(0)[0]) == registry.KEPT


def rate_of(weights, x):
    return (jnp.tanh(x @ weights["w"] + weights["b"]) ** 2).mean()


class Losses:
    def of(self, weights, x):
        return rate_of(weights, x), x.mean()


@pytest.mark.core
@pytest.mark.parametrize(
    "gradients",
    [
        jax.jit(jax.grad(rate_of)),
        jax.jit(jax.value_and_grad(Losses().of, has_aux=True)),
        jax.jit(lambda weights, x: optax.clip_by_global_norm(1.0).update(jax.grad(rate_of)(weights, x), ())[0]),
        jax.jit(lambda weights, x: jax.tree.map(lambda g: g / 2, jax.grad(rate_of)(weights, x))),
    ],
    ids=["a function", "a method with more results", "clipped", "scaled"],
)
def test_what_a_step_returns_the_gradient_of_is_not_to_be_donated(gradients):
    """The optimizer's update, which is jitted apart or not at all, needs the parameters after this."""
    weights = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
    assert not [each for each in jm.step_memory(gradients, weights, jnp.ones((4, 8))).warnings if "donate" in each]


class Trained:
    def step(self, params, batch, *, rate):
        return jax.tree.map(lambda p: p - rate, params), batch.sum()


UNCALLABLE = {
    "none at all": (train_step, ()),
    "too few": (jax.jit(train_step), ({}, {})),
    "too many": (train_step, ({}, {}, {}, {})),
    "a method": (Trained().step, ({}, {})),
    "a partial": (functools.partial(train_step, {}), ({},)),
}


@pytest.mark.parametrize("ask", [jm.plan, jm.step_memory], ids=["plan", "step_memory"])
@pytest.mark.parametrize("kind", UNCALLABLE)
def test_a_step_without_its_arguments_is_shown_the_call(kind, ask):
    function, args = UNCALLABLE[kind]
    with pytest.raises(
        (TypeError, jm.PlanError), match=rf"^jm.{ask.__name__} was given other arguments than "
    ) as caught:
        ask(function, *args)
    if kind == "a partial":
        return  # no name of its own to be called by
    params = {"layers": jnp.ones((LAYERS, WIDTH, WIDTH)), "head": jnp.ones((WIDTH, 1))}
    names = {
        "params": params,
        "opt_state": OPTIMIZER.init(params),
        "batch": {"x": jnp.ones((ROWS, WIDTH))},
        "rate": 0.1,
    }
    if kind == "a method":
        names |= {"params": jnp.ones(4), "batch": jnp.ones(4)}
    assert value(pasted("call.arguments", caught.value), jm=jm, **{function.__name__: function}, **names)


@pytest.mark.parametrize("call", ["jit_step", "value_and_grad", "grad", "remat", "Recovery", "step_memory"])
def test_what_is_no_function_is_refused_at_once(call):
    with pytest.raises(
        TypeError, match=r"^jm\.\w+ got tuple first\. Expected a function itself, not what it returns\.$"
    ):
        getattr(jm, call)((jnp.ones(3), 0.5))
