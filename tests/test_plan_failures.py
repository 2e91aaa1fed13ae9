"""What fails while a plan is made for the attached devices: it is told by name, and one policy takes no other with it."""

from __future__ import annotations

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.compiles import CompileBudget, CompileQueue, Compiler
from jaxmem_callbacks.planning.orchestrate import offload
from jaxmem_callbacks.planning.problem import OPTIONS, Problem
from jaxmem_callbacks.planning.request import Budget
from jaxmem_callbacks.programs.targets.step_on_target import MemoryRefusalError, compiling_here
from jaxmem_callbacks.records.errors import CompileError, CompileTimeoutError, PlanError, PolicyError
from tests.searched_steps import abstract, forward, train_step
from tests.target_step import GIB, needs_compiler

pytestmark = pytest.mark.core

REFUSAL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."
TPU_REFUSAL = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used "
    "21.5G of 15.5G hbm. Exceeded hbm capacity by 6.0G."
)


class Demanding:
    """A kernel that JAX's partitioner asks for at each compile; the first time its memory is not to be had."""

    def __init__(self) -> None:
        self.asked = 0
        self.call = custom_partitioning(lambda x: x * 1)
        self.call.def_partition(
            partition=self.partition,
            infer_sharding_from_operands=lambda _mesh, arguments, _result: arguments[0].sharding,
            sharding_rule="i j -> i j",
        )

    def partition(self, mesh: Any, arguments: Any, _result: Any) -> Any:
        self.asked += 1
        if self.asked == 1:
            raise jax.errors.JaxRuntimeError(TPU_REFUSAL)
        place = arguments[0].sharding
        return mesh, lambda x: x * 1, place, (place,)


def test_a_compile_that_runs_out_of_memory_is_a_candidate_that_does_not_fit() -> None:
    kernel = Demanding()

    def step(params: Any, batch: Any) -> Any:
        grads = jm.grad(lambda params, batch: (forward(params, batch) ** 2).mean())(params, batch)
        return jax.tree.map(jnp.subtract, params, grads), kernel.call(batch)

    mesh = jm.make_mesh({"data": 2}, devices=jax.devices()[:2])
    params, _, batch = abstract()
    split = jax.ShapeDtypeStruct(batch.shape, batch.dtype, sharding=NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh):
        plan = jm.plan(step, params, split, budget="2MiB")
    (refused,) = [each for each in plan.candidates if each.refusal]  # whichever of the threads compiled first
    assert (refused.step_bytes, refused.fits) == (round(21.5 * GIB), False)
    assert TPU_REFUSAL in (refused.refusal or "")
    assert (refused.compiler_remat, refused.modelled_s) == (None, None), "it did not tell what it would compute again"
    assert refused.peak is not None
    assert refused.peak.bytes == refused.step_bytes
    assert {"parameters", "batch"} <= {group.name for group in refused.peak.groups}
    assert plan.chosen.fits
    assert plan.chosen.flops == min(each.flops or 0 for each in plan.candidates if each.fits)


def no_kernel(x: Any) -> Any:
    return jax.ffi.ffi_call("jaxmem_no_such_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def test_what_the_attached_devices_do_not_have_is_a_compile_error_that_names_the_step() -> None:
    def kernel_step(params: Any, batch: Any) -> Any:
        grads = jm.grad(lambda params, batch: (forward(params, batch) ** 2).mean())(params, batch)
        return jax.tree.map(jnp.subtract, params, grads), no_kernel(batch)

    words = (
        r"^kernel_step for the attached cpu: the program was traced and cannot be compiled\. Expected operations that these "
        r"devices have\. .* leave it out or replace it(?s:.*)jaxmem_no_such_kernel"
    )
    with pytest.raises(CompileError, match=words) as caught:
        jm.plan(kernel_step, *abstract()[::2], search={"remat": False})
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


@pytest.mark.core
@pytest.mark.parametrize("ask", [jm.step_memory, jm.plan])
def test_arguments_that_lie_elsewhere_than_the_jit_says_are_a_compile_error(ask: Any) -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    rows, columns = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("data",), (None, "data")))

    def train_step(params: Any, batch: Any) -> Any:
        return params - jm.grad(lambda params: ((batch @ params) ** 2).mean())(params)

    step = jax.jit(train_step, in_shardings=(None, rows))
    words = (
        r"^train_step for the attached cpu: the program was traced and cannot be compiled\. Expected arguments placed as its "
        r"jit says\. .* shows the same error\.\nSharding passed to jit does not match"
    )
    with pytest.raises(CompileError, match=words):
        ask(step, jnp.eye(8), jax.device_put(jnp.ones((16, 8)), columns))


@pytest.mark.core
def test_what_the_step_itself_raises_stays_as_it_is() -> None:
    def train_step(params: Any) -> Any:
        if params.ndim > 1:
            msg = "the author's own"
            raise ValueError(msg)
        return params

    with pytest.raises(ValueError, match=r"^the author's own"):
        jm.step_memory(jax.jit(train_step), jnp.eye(8))


def test_a_program_beside_the_step_that_fails_is_named() -> None:
    params, opt_state, batch = abstract()

    def eval_step(params: Any, batch: Any) -> Any:
        total = forward(params, batch).sum()
        return total if total > 0 else -total

    def show(*beside: Any) -> None:
        jm.plan(train_step, params, opt_state, batch, search={"remat": False}, beside=[beside])

    line = eval_step.__code__.co_firstlineno + 2
    words = (
        r"^eval_step, a program beside the step, could not be traced for planning: TracerBool.*"
        rf"test_plan_failures\.py:{line}\)\. Expected .*; jax\.eval_shape of eval_step shows"
    )
    with pytest.raises(PlanError, match=words) as caught:
        show(eval_step, (params, batch))
    assert isinstance(caught.value.__cause__, jax.errors.TracerBoolConversionError)
    with pytest.raises(PlanError, match=r"^eval_step, a program beside the step, .*: TypeError: .*missing 1 required"):
        show(eval_step, (params,))
    with pytest.raises(CompileError, match=r"^no_kernel for the attached cpu: (?s:.*)jaxmem_no_such_kernel"):
        show(no_kernel, (batch,))


@pytest.mark.parametrize(("text", "needed"), [(TPU_REFUSAL, round(21.5 * GIB)), (REFUSAL, None)])
def test_a_refusal_for_the_devices_memory_keeps_its_words_and_its_figure(text: str, needed: int | None) -> None:
    words = r"^step for the attached cpu: the compiler refused the program for its memory"
    with pytest.raises(MemoryRefusalError, match=words) as caught, compiling_here("step"):
        raise jax.errors.JaxRuntimeError(text)
    assert (caught.value.words, caught.value.needed_bytes) == (text, needed)


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: Ran out of memory in memory space vmem. Used 20M of 16M."
        ),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 300000"),
        ValueError("Only interpret mode is supported on CPU backend."),
        NotImplementedError("MLIR translation rule for primitive 'mine' not found for platform cpu"),
    ],
)
def test_what_another_policy_would_not_mend_is_no_refusal_for_memory(error: Exception) -> None:
    with pytest.raises(CompileError, match=re.escape(str(error))) as caught, compiling_here("step"):
        raise error
    assert type(caught.value) is CompileError
    assert caught.value.__cause__ is error


def test_this_librarys_own_errors_pass() -> None:
    error = PolicyError("mine")
    with pytest.raises(PolicyError, match=r"^mine$"), compiling_here("step"):
        raise error


def test_a_jit_that_cannot_be_traced_is_refused_with_what_to_write() -> None:
    class Jitted:  # of a framework that nobody knows here
        __name__ = "adjusted"

        def lower(self, *_: Any) -> None: ...

        def __call__(self, *_: Any) -> None: ...

    with pytest.raises(
        PlanError, match=r"^adjusted is jitted by tests, whose jit .*Plan adjusted, the function that you wrote"
    ):
        jm.plan(Jitted(), jnp.ones(3), jnp.ones(3))


def test_the_plan_knows_its_own_keywords() -> None:
    own = inspect.signature(jm.plan).parameters.values()
    assert tuple(each.name for each in own if each.kind is each.KEYWORD_ONLY) == OPTIONS


def test_a_misspelt_keyword_of_the_plan_is_none_of_the_steps() -> None:
    with pytest.raises(PlanError, match=r"no keyword 'taget', and neither has step\. Did you mean `target`\?"):
        jm.plan(step, jnp.ones(3), taget="v5e:2x2")


def step(params: Any) -> Any:
    return params - jm.grad(lambda p: jnp.sin(p).sum())(params)


def test_an_nnx_module_under_jaxs_own_gradient_is_told_which_to_take() -> None:
    model = nnx.Dropout(0.1, rngs=nnx.Rngs(0))
    with pytest.raises(PlanError, match=r"differentiates Flax NNX objects, .* Use jm\.nnx\.value_and_grad there"):
        jm.plan(lambda model, x: jm.grad(lambda m: m(x).sum())(model), model, jnp.ones(3))


def test_a_loss_without_anything_to_cut_is_planned_as_it_is() -> None:
    plan = jm.plan(jm.value_and_grad(lambda w: w[0] * 2.0), jnp.ones(3))
    assert [candidate.policy for candidate in plan.candidates] == [jm.StepPolicy()]
    assert "the loss keeps nothing for its gradient" in plan.record.notes[0]


def test_what_jax_cannot_trace_under_a_policy_takes_no_other_policy_with_it() -> None:
    def loss(w: Any) -> Any:
        w = jnp.tanh(jnp.tanh(w @ w) @ w)
        if "Jaxpr" in type(w).__name__:  # a loss that looks at its tracers: remat traces it before it is differentiated
            msg = "not differentiated\nmore words"
            raise TypeError(msg)
        return w.sum()

    plan = jm.plan(jm.value_and_grad(loss), jnp.ones((8, 8)))
    assert [candidate.policy for candidate in plan.candidates] == [jm.StepPolicy()]
    words = "Remat was not tried: JAX cannot trace the step under it (TypeError: not differentiated), though it can without."
    assert words in plan.record.notes


@pytest.mark.core
def test_a_loss_without_loops_is_told_once_that_nothing_is_offloaded() -> None:
    def loss(weights: Any, x: Any) -> Any:
        for _ in range(3):
            x = jnp.tanh(x @ weights)
        return (x**2).mean()

    def step(weights: Any, x: Any) -> Any:
        return weights - jm.grad(loss)(weights, x)

    budget = Budget(bytes=1, limit_bytes=1, reason="asked for")
    queue = CompileQueue(budget=CompileBudget(16))
    args = jnp.ones((8, 8)), jnp.ones((4, 8))
    offload([Compiler(Problem(train_step=step, args=args, kwargs={}, target=None, budget=budget))], queue)
    (told,) = (note for note in queue.results.notes if "no loop that stores" in note)
    assert told.count("offload cuts") > 1
    assert queue.remaining == 16


@pytest.mark.core
def test_a_batch_size_that_is_written_into_a_loss_is_told_as_such() -> None:
    rows = 8

    def loss(weights: Any, x: Any) -> Any:
        return (jnp.tanh(jnp.tanh(x.reshape(rows, 16) @ weights) @ weights) ** 2).mean()

    def train_step(weights: Any, x: Any) -> Any:
        return weights - jm.grad(loss)(weights, x)

    arguments = jnp.ones((16, 16)), jnp.ones((rows, 4, 4))
    plan = jm.plan(train_step, *arguments, search={"microbatches": [2]})
    assert len(plan.candidates) > 1
    (told,) = plan.record.notes[:1]
    assert told.startswith("Microbatches were not tried: train_step over 2 microbatches could not be traced")
    assert "for any number of rows" in told
    with pytest.raises(PlanError, match=r"train_step with \d+ rows could not be traced .*x\.reshape\(x\.shape\[0\]"):
        jm.plan(train_step, *arguments, search={"batch": "largest"}, budget="2MiB")


@pytest.mark.targets
def test_of_a_compiler_that_hangs_no_more_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """At ten minutes each, six policies would be half an hour for one error."""
    needs_compiler("h100_sxm")
    monkeypatch.setenv("JAXMEM_COMPILE_TIMEOUT_S", "0.01")
    asked = list[str]()
    with pytest.raises(
        CompileTimeoutError, match=r"was ended after 0\.01 s\. Give it longer: export JAXMEM_COMPILE_TIMEOUT_S"
    ):
        jm.plan(
            lambda params, opt_state, batch: train_step(params, opt_state, batch * 3),  # in no cache
            *abstract(),
            target="h100_sxm",
            search={"microbatches": [2, 4]},
            progress=lambda what, _done, _most: asked.append(what),
        )
    assert asked[0] == "none and full"
    assert not {word for what in asked for word in ("keep", "2 levels", "microbatches") if word in what}
