"""The problem: a user's step as it is planned, its arguments and their batch, what stays beside it, a target and a budget."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import numbers
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, cast

import jax
from jax.sharding import Mesh, NamedSharding

from jaxmem_callbacks.planning.request import Budget, Space
from jaxmem_callbacks.planning.step_time import Speed, speed_of, speed_of_device
from jaxmem_callbacks.programs.steps.donation import worth_donating
from jaxmem_callbacks.programs.steps.leaves import named_arguments, require_arguments, state_arguments
from jaxmem_callbacks.programs.steps.placement import ambient_mesh, mesh_of
from jaxmem_callbacks.programs.steps.program import kind_here
from jaxmem_callbacks.programs.steps.step import JitStep, Traced
from jaxmem_callbacks.programs.steps.user_jit import Jitted, OfArrays, already_jitted, arrays_apart, own_donation
from jaxmem_callbacks.programs.targets.exporting import refusing_cudnn
from jaxmem_callbacks.programs.targets.target import Target
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arguments import name_of
from jaxmem_callbacks.records.errors import (
    JaxmemError,
    LossRefusedError,
    PlanError,
    PolicyError,
    did_you_mean,
    in_a_line,
)
from jaxmem_callbacks.records.plans import BesideProgram
from jaxmem_callbacks.records.policies import CompilerOptions, ShardingRules, StepPolicy, gradient_words
from jaxmem_callbacks.records.source_files import Owner, owner_of
from jaxmem_callbacks.records.units import is_whole, parse_bytes
from jaxmem_callbacks.transforms.arg_roles import BATCH, OTHER, is_raw_key, kind_of_argument
from jaxmem_callbacks.transforms.costs import array_bytes
from jaxmem_callbacks.transforms.frameworks import framework_of
from jaxmem_callbacks.transforms.policy import Gradients
from jaxmem_callbacks.transforms.tracing import traced_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The batch of a step.

    Attributes:
        arguments: The step's arguments that hold it.
        count: Its rows.
    """

    arguments: tuple[str, ...]
    count: int


def find_rows(problem: Problem, traced: Traced, argnames: Sequence[str] = ()) -> Rows:
    """The batch of a step's call.

    Args:
        problem: The step and its arguments.
        traced: The plain step.
        argnames: Names of the arguments that hold it, as the user gave them; empty to find them.

    Raises:
        PlanError: no such argument, or arguments without one leading dimension in common.
    """
    state = state_arguments(traced.leaves, traced.undonated)
    arguments = dict(named_arguments(problem.train_step, problem.args, dict(problem.kwargs)))
    free = {
        name: value
        for name, value in arguments.items()
        if name not in state and framework_of(value) is None and value is not None
    }
    named = [name for name in free if kind_of_argument(name) == BATCH]
    chosen = (
        list(argnames) or named or [name for name in free if kind_of_argument(name) == OTHER and _sizes(free[name])]
    )
    missing = [name for name in chosen if name not in free]
    sizes = [size for name in chosen if name in free for size in _sizes(free[name])]
    if missing or not sizes or len(set(sizes)) > 1:
        described = "; ".join(f"{name}: {_describe_rows(value)}" for name, value in free.items()) or "none"
        msg = (
            f"Which rows the batch of {problem.name} has is not clear. Expected arguments that are not updated and whose arrays "
            f"share one leading dimension; those that are not updated: {described}"
            + (f"; {', '.join(missing)} is none of them" if missing else "")
            + '. Name those that hold the batch: search={"batch": {"argnames": ["images", "labels"]}}.'
        )
        raise PlanError(msg)
    return Rows(arguments=tuple(chosen), count=sizes[0])


def with_rows(problem: Problem, rows: Rows, count: int) -> Problem:
    """The problem with a batch of other size; its arrays become shapes, which are where they did."""

    def resized(leaf: Any) -> Any:
        shape = getattr(leaf, "shape", ())
        if not shape or shape[0] != rows.count or not hasattr(leaf, "dtype"):
            return leaf
        place = getattr(leaf, "sharding", None)
        return jax.ShapeDtypeStruct(
            (count, *shape[1:]), traced_dtype(leaf), sharding=place if isinstance(place, NamedSharding) else None
        )

    names = [name for name, _ in named_arguments(problem.train_step, problem.args, dict(problem.kwargs))]
    args = tuple(
        jax.tree.map(resized, value) if name in rows.arguments else value
        for name, value in zip(names, problem.args, strict=False)
    )
    kwargs: Mapping[str, Any] = {
        name: jax.tree.map(resized, value) if name in rows.arguments else value
        for name, value in problem.kwargs.items()
    }
    return dataclasses.replace(problem, args=args, kwargs=kwargs, batch_rows=count, plain=None)


def _sizes(value: Any) -> list[int]:
    """Leading dimensions of an argument's arrays; a single random key has none."""
    return [leaf.shape[0] for leaf in jax.tree.leaves(value) if getattr(leaf, "shape", ()) and not is_raw_key(leaf)]


def _describe_rows(value: Any) -> str:
    sizes = sorted(set(_sizes(value)))
    return f"leading dimension {' and '.join(map(str, sizes))}" if sizes else "no rows"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What is to be planned.

    Attributes:
        train_step: The user's own step, not jitted by this library.
        args: Its arguments, real or abstract.
        kwargs: Its keyword arguments.
        target: Hardware that is not there, or None for the attached devices.
        budget: What a step may use.
        resident_bytes: What must fit beside it on each device.
        device_count: Devices that the program is for.
        parts: Into how many the work is divided among them; None where the arguments' own shardings decide: taken for all.
        mesh: The mesh that the policies' sharding means: abstract for absent devices; or None.
        base: The policy of the plain step: its sharding and donation, where they are given.
        beside: Other programs of the run, compiled with the state placed as here.
        batch_rows: Rows of the batch in ``args``, where batch sizes are searched.
        state_shardings: Shardings that the user pins the step's state to.
        gradients: Which of its gradients obey a policy, as in `jm.jit_step`.
        weighs_overlap: Whether it counts how long the step waits for collectives, as where compiler options are searched.
        plain: The plain step outside any mesh, where it was traced before for these arguments: JAX then traces it once.
    """

    train_step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Target | None
    budget: Budget
    resident_bytes: int = 0
    device_count: int = 1
    parts: int | None = None
    mesh: Any = None
    base: StepPolicy = field(default_factory=StepPolicy)
    beside: tuple[BesideProgram, ...] = ()
    batch_rows: int | None = None
    state_shardings: Any = None
    gradients: Gradients = "own"
    weighs_overlap: bool = False
    plain: JitStep[..., Any] | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The train step's own name."""
        return name_of(self.train_step)

    @property
    def platform(self) -> str:
        """What it is planned for: ``cpu``, ``tpu``, or a kind of GPU."""
        return jax.default_backend() if self.target is None else self.target.platform

    def lower_end(self, base: StepPolicy, segments: int | Literal["blocks"] | None = None) -> StepPolicy:
        """The policy that keeps nothing but what is alive at its cuts, chosen for the compiler that it is planned for."""
        fuses = self.platform != "cpu" or segments == "blocks"  # blocks are where they are
        return replace(base, remat="full", segments=segments, assume_fusion=fuses)

    @property
    def speed(self) -> Speed | None:
        """Peaks of one device; None where no data sheet has them."""
        return speed_of_device(self.platform, kind_here()) if self.target is None else speed_of(self.target)

    @property
    def workers(self) -> int:
        """Among how many devices the work is divided; the others do again what one of these does."""
        return self.parts or self.device_count

    @property
    def beside_alone_is_too_much(self) -> bool:
        """Whether a program beside the step does not fit, whatever the step's policy."""
        return any(program.fits is False for program in self.beside)

    def step(self, policy: StepPolicy, *, survey: bool = False) -> JitStep:
        """The step under a policy; with ``survey`` its trace finds what the losses could keep."""
        if self.plain is not None and self.mesh is None and not survey and policy == self.plain.policy:
            return self.plain
        donated = None if policy.donate == "auto" else own_donation(self.train_step)
        return JitStep(
            self.train_step,
            policy,
            survey=survey,
            donate_argnames=donated,
            state_shardings=self.state_shardings,
            gradients=self.gradients,
        )

    def in_mesh(self) -> AbstractContextManager[Any]:
        """Where the step is traced: on the mesh, where there is one."""
        if self.mesh is None:
            return contextlib.nullcontext()
        return jax.set_mesh(self.mesh) if isinstance(self.mesh, Mesh) else jax.sharding.use_abstract_mesh(self.mesh)


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Axis -> size; empty without a mesh."""
    return {} if mesh is None else {str(name): int(size) for name, size in mesh.shape.items()}


_FSDP = '{"fsdp": -1}'
# Keywords of `jm.plan` itself; all others are the step's.
OPTIONS = ("target", "budget", "mesh", "resident", "search", "beside", "progress")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnStep:
    """A call of a train step, and the words of the `jm.jit_step` around it that a plan keeps.

    Attributes:
        function: The user's own function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        donation: The arguments to donate; None where it was left open.
        sharding: Where the state is by the step's policy, or None.
        compiler_options: Those of the step's policy, which every policy of the plan has, or None.
        state_shardings: What the state is pinned to, or None.
        gradients: Which gradients obey a policy.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    donation: Any = None
    sharding: str | ShardingRules | None = None
    compiler_options: CompilerOptions | None = None
    state_shardings: Any = None
    gradients: Gradients = "own"

    def require_agreement(self, space: Space) -> None:
        """Refuse a search for shardings that the step has decided.

        Raises:
            PlanError: names both.
        """
        if self.sharding is not None and space.sharding not in (None, (self.sharding,)):
            own = f"sharding={self.sharding!r}"
            msg = (
                f"The step is already under {own}, and search asks for {list(space.sharding or ())!r}. Leave sharding out of "
                f"search to keep {own}, or plan {name_of(self.function)}, the function that you wrote, not what jm.jit_step "
                "returned."
            )
            raise PlanError(msg)

    def kept(self, problem: Problem, traced: Traced, space: Space, *, divided: bool) -> tuple[Problem, Space]:
        """The problem and what may be varied of it, under the step's own sharding.

        Args:
            problem: What is to be planned.
            traced: Its plain step.
            space: What may be varied.
            divided: Whether the plan places the state; else it is somewhere already.

        Raises:
            PlanError: the devices are unknown.
        """
        if self.sharding is None:
            return problem, space
        if divided:
            return problem, replace(space, sharding=(self.sharding,))
        mesh = mesh_of([getattr(leaf.value, "sharding", None) for leaf in traced.leaves]) or ambient_mesh()
        if mesh is None:
            msg = (
                f"The step is already under sharding={self.sharding!r}, and the plan is for one device. Name a target of "
                "several, such as target='h100_sxm:8'; set the mesh that the step runs on, "
                f"{advise('sharding.set_mesh', axes=_FSDP)}; or plan {name_of(self.function)}, the function that you wrote."
            )
            raise PlanError(msg)
        base = replace(problem.base, sharding=self.sharding)
        return replace(problem, base=base, mesh=mesh, device_count=mesh.size), space


def own_step(train_step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OwnStep:
    """The function to plan, its arguments, and the settings of the `jm.jit_step` around it.

    Raises:
        PlanError: no function, a jit that cannot be traced, or a step that is under remat or microbatches already.
    """
    if not callable(train_step):
        given = type(train_step).__name__
        msg = f"jm.plan was given {given} as its step. Expected a function, and then the arguments of its call."
        raise PlanError(msg)
    inner = train_step.__wrapped__ if isinstance(train_step, JitStep) else train_step
    _require_known(inner, kwargs)
    own = already_jitted(inner)
    try:
        require_arguments(inner, args, kwargs, "jm.plan")
        of_arrays = arrays_apart(inner, args, kwargs)
    except TypeError as error:
        raise PlanError(str(error)) from error
    if own is not None and of_arrays is None and not hasattr(own.lowering, "trace"):
        framework = type(own.lowering).__module__.partition(".")[0]
        if inspect.isfunction(own.lowering):
            msg = (
                f"{name_of(own.function)} is under jax.pmap, and no plan is made of it: policies and shardings need jax.jit. "
                "Expected a function that jax.jit takes. Can it run under jax.shard_map inside of jax.jit? The command line "
                "shows for a script of yours what to write."
            )
            raise PlanError(msg)
        msg = (
            f"{name_of(own.function)} is jitted by {framework}, whose jit cannot be traced from outside. Plan "
            f"{name_of(own.function)}, the function that you wrote."
        )
        raise PlanError(msg)
    if not isinstance(train_step, JitStep):
        if of_arrays is None:
            return OwnStep(function=train_step, args=args, kwargs=kwargs)
        return OwnStep(function=of_arrays.function, args=of_arrays.args, kwargs=of_arrays.kwargs)
    policy = train_step.policy
    if policy.changes_gradients:
        msg = (
            f"The step is already under {gradient_words(policy)}. Plan {train_step.name}, the "
            "function that you wrote, not what jm.jit_step returned."
        )
        raise PlanError(msg)
    if policy.state_offload is not None:
        msg = (
            f"The step has state_offload={policy.state_offload!r} already, and its state is on the host. Plan "
            f"{train_step.name}, "
            'the function that you wrote, with its state on the device and search={"state_offload": True}.'
        )
        raise PlanError(msg)
    if of_arrays is not None:
        return OwnStep(
            function=of_arrays.function,
            args=of_arrays.args,
            kwargs=of_arrays.kwargs,
            sharding=policy.sharding,
            compiler_options=policy.options,
            gradients=train_step.gradients,
        )
    return OwnStep(
        function=inner,
        args=args,
        kwargs=kwargs,
        donation=train_step.donation,
        sharding=policy.sharding,
        compiler_options=policy.options,
        state_shardings=train_step.state_shardings,
        gradients=train_step.gradients,
    )


def _require_known(train_step: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a keyword that is neither the plan's nor the step's.

    Raises:
        PlanError: with the plan's keyword that is most like it.
    """
    try:
        parameters = inspect.signature(train_step).parameters
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in kwargs:
        if name not in parameters:
            meant = did_you_mean(name, [*OPTIONS, *parameters])
            msg = (
                f"jm.plan has no keyword {name!r}, and neither has {name_of(train_step)}.{meant} The plan's own: "
                f"{', '.join(OPTIONS)}."
            )
            raise PlanError(msg)


def without_own_checkpoints(problem: Problem, note: Callable[[str], None]) -> Problem:
    """The problem whose plain step has none of its author's checkpoints; as it is, and a note, where there are none."""
    base = replace(problem.base, own_checkpoints="replace")
    step = problem.step(base)
    try:
        with problem.in_mesh():
            step.traced(problem.args, dict(problem.kwargs))
    except (PolicyError, LossRefusedError) as error:
        note(f"No checkpoints were replaced: {error}")
        return problem
    return replace(problem, base=base, plain=step)


def traced_plainly(problem: Problem) -> Traced:
    """The plain step's trace, before anything is searched.

    Raises:
        JaxmemError: as `traced_by_name`.
    """
    with traced_by_name(problem.name, "train_step"), _for_absent(problem), _of_framework(problem):
        return problem.step(problem.base).traced(problem.args, dict(problem.kwargs))


@contextmanager
def _of_framework(problem: Problem) -> Generator[None]:
    """Where JAX cannot differentiate a framework's objects, name the function that can.

    Raises:
        PlanError: names it.
    """
    try:
        yield
    except TypeError as error:
        framework = framework_of(problem.args, problem.kwargs)
        if framework is None or "real- or complex-valued" not in str(error):
            raise
        msg = (
            f"{problem.name} could not be traced for planning: it differentiates {framework.NAME} objects, which hold integers "
            f"(keys, counters) too{_place(error)} Use {framework.VALUE_AND_GRAD} there, which leaves these out."
        )
        raise PlanError(msg) from error


def _for_absent(problem: Problem) -> AbstractContextManager[None]:
    """Where tracing for absent hardware fails, the error names what to write instead."""
    return nullcontext() if problem.target is None else refusing_cudnn(problem.name, problem.target.platform)


def traced_by_name(title: str, function: str) -> AbstractContextManager[None]:
    """Where a function of the user's is traced as it is.

    Args:
        title: What failed if it fails, for messages.
        function: What its user calls it.

    Raises:
        JaxmemError: as `_traced`.
    """
    instead = f"that jax.jit can trace with these arguments; jax.eval_shape of {function} shows the same error."
    return _traced(title, instead)


def traced_with_rows(title: str) -> AbstractContextManager[None]:
    """Where a step that can be traced as it is, is traced with another number of rows.

    Args:
        title: What failed if it fails, for messages.

    Raises:
        JaxmemError: as `_traced`.
    """
    return _traced(
        title, "for any number of rows: x.reshape(x.shape[0], ...) in place of a size that is written into it."
    )


@contextmanager
def _traced(title: str, instead: str) -> Generator[None]:
    """Where a function of the user's is traced.

    Args:
        title: What failed if it fails, for messages.
        instead: What a step is expected to be.

    Raises:
        JaxmemError: this library's own refusals, as they are; a PlanError where it fails by itself, with that as its cause.
    """
    try:
        yield
    except JaxmemError:
        raise
    except Exception as error:
        seen = f"{in_a_line(error).rstrip('.')}{_place(error)}"
        msg = f"{title} could not be traced for planning: {seen} Expected a step {instead}"
        raise PlanError(msg) from error


def _place(error: Exception) -> str:
    """The innermost line of the user's own that an error passed through."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if owner_of(frame.filename) is Owner.USER and not frame.filename.startswith("<")
    ]
    return f" ({frames[-1].filename}:{frames[-1].lineno})." if frames else "."


def donation_of(problem: Problem, donation: Any, space: Space) -> Any:
    """The donation of all policies: the step's own, or everything where the plan may decide."""
    own = own_jit(problem.train_step)
    is_free = isinstance(donation, tuple) if own is None else own.may_donate
    return "auto" if space.donate and is_free else donation


def worth_a_word(traced: Traced) -> tuple[str, ...]:
    """Arguments that a step returns updated and does not donate, and that are large enough to count."""
    return worth_donating(traced.undonated, [(leaf.argument, leaf.bytes_under(None)) for leaf in traced.leaves])


def own_jit(train_step: Callable[..., Any]) -> Jitted | None:
    """The jit that the user made, also of a step that was taken out of it to be planned."""
    return train_step.jit if isinstance(train_step, OfArrays) else already_jitted(train_step)


Program: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]  # that runs beside the step, and its arguments


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """An array that stays on the device between steps; ``value`` is the user's own."""

    value: Any
    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    sharding: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Resident:
    """What stays in memory beside the step: plain sizes, and arrays."""

    sizes: int = 0
    arrays: tuple[Held, ...] = ()

    @property
    def bytes(self) -> int:
        """All of it on one device."""
        return self.sizes + sum(array.bytes for array in self.arrays)


def parse_resident(resident: Any) -> Resident:
    """Sizes and arrays of ``resident=``: a size, a tree of arrays, or several of either.

    Raises:
        PlanError: something that has no bytes.
    """
    several = type(resident) in (list, tuple) or isinstance(resident, Iterator)
    items: list[Any] = list(resident) if several else [resident]
    sizes, arrays = 0, list[Held]()
    for item in items:
        if isinstance(item, str) or is_whole(item):
            sizes += _resident_bytes(item)
        else:
            arrays += _resident_arrays(item)
    return Resident(sizes=sizes, arrays=tuple(arrays))


def _resident_bytes(size: int | str) -> int:
    try:
        return parse_bytes(size, unit_needed=True)
    except ValueError as error:
        msg = f"resident={size!r}: {error}"
        raise PlanError(msg) from None


def _resident_arrays(tree: Any) -> Iterator[Held]:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    if not leaves or isinstance(tree, numbers.Number):  # one of NumPy's has a shape
        msg = f"resident holds {type(tree).__name__}, which has no arrays. Give bytes as an int, '2GiB', or trees of arrays."
        raise PlanError(msg)
    for leaf in leaves:
        place = getattr(leaf, "sharding", None)
        shape = leaf.shape if place is None else place.shard_shape(tuple(leaf.shape))
        yield Held(leaf, tuple(leaf.shape), leaf.dtype, array_bytes(shape, leaf.dtype), place)


def parse_beside(programs: Any) -> tuple[Program, ...]:
    """The programs of ``beside=``, each a function with its arguments.

    Raises:
        PlanError: something that is no such pair.
    """
    items = list(programs) if isinstance(programs, list | tuple) else [programs]
    if len(items) == 2 and callable(items[0]) and isinstance(items[1], list | tuple):  # noqa: PLR2004 - one pair alone
        items = [tuple(items)]
    for item in items:
        pair = cast("Sequence[Any]", item) if isinstance(item, list | tuple) else ()
        if len(pair) != 2 or not callable(pair[0]) or not isinstance(pair[1], list | tuple):  # noqa: PLR2004 - a pair
            msg = (
                f"beside holds {' '.join([type(item).__name__, *_named(item)])}: expected pairs of a function and a tuple of its "
                "arguments. Type beside=[(eval_step, (state, batch))]."
            )
            raise PlanError(msg)
    return tuple((function, tuple(args)) for function, args in items)


def _named(item: Any) -> list[str]:
    return [str(item.__name__)] if hasattr(item, "__name__") else []


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedRequest:
    """A plan's request as it is understood.

    Attributes:
        problem: The step, its arguments, the target and the budget.
        traced: The plain step.
        space: What may be varied.
        resident: What else stays in memory.
        programs: Other programs that must fit.
        mesh: Axes of the target's devices, as the user gave them.
        donation: What the step's own policy donates.
        is_divided: Whether the plan places the state.
        is_open: Whether no budget was given, so that the whole frontier is wanted.
    """

    problem: Problem
    traced: Traced
    space: Space
    resident: Resident
    programs: tuple[Program, ...]
    mesh: Any
    donation: Any
    is_divided: bool
    is_open: bool
