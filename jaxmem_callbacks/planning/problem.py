"""The problem: a step, its arguments and their batch, a target and a budget."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxmem_callbacks.planning.request import Budget
from jaxmem_callbacks.planning.step_time import Speed, speed_of, speed_of_device
from jaxmem_callbacks.programs.steps.leaves import named_arguments, state_arguments
from jaxmem_callbacks.programs.steps.modules import own_donation
from jaxmem_callbacks.programs.steps.program import kind_here
from jaxmem_callbacks.programs.steps.step import JitStep, Traced
from jaxmem_callbacks.programs.targets.target import Target
from jaxmem_callbacks.records.errors import PlanError
from jaxmem_callbacks.records.plans import BesideProgram
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.transforms.arg_roles import BATCH, OTHER, is_raw_key, kind_of_argument
from jaxmem_callbacks.transforms.frameworks import framework_of
from jaxmem_callbacks.transforms.leaves import traced_dtype
from jaxmem_callbacks.transforms.policy import Gradients
from jaxmem_callbacks.transforms.save_frontier import Share


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The batch of a step.

    Attributes:
        arguments: The step's arguments that hold it.
        count: Its rows.
    """

    arguments: tuple[str, ...]
    count: int


def find_rows(problem: Problem, traced: Traced, said: Sequence[str] = ()) -> Rows:
    """The batch of a step's call.

    Args:
        problem: The step and its arguments.
        traced: The plain step.
        said: Names of the arguments that hold it, as the user wrote them down; empty to tell.

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
    chosen = list(said) or named or [name for name in free if kind_of_argument(name) == OTHER and _sizes(free[name])]
    missing = [name for name in chosen if name not in free]
    sizes = [size for name in chosen if name in free for size in _sizes(free[name])]
    if missing or not sizes or len(set(sizes)) > 1:
        told = "; ".join(f"{name}: {_told(value)}" for name, value in free.items()) or "none"
        msg = (
            f"Which rows the batch of {problem.name} has is not clear. Expected arguments that are not updated and whose arrays "
            f"share one leading dimension; those that are not updated: {told}"
            + (f"; {', '.join(missing)} is none of them" if missing else "")
            + '. Name those that hold the batch: search={"batch": {"argnames": ["images", "labels"]}}.'
        )
        raise PlanError(msg)
    return Rows(arguments=tuple(chosen), count=sizes[0])


def with_rows(problem: Problem, rows: Rows, count: int) -> Problem:
    """The problem with a batch of other size; its arrays become shapes, which lie where they did."""

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


def _told(value: Any) -> str:
    sizes = sorted(set(_sizes(value)))
    return f"leading dimension {' and '.join(map(str, sizes))}" if sizes else "no rows"


Survey = Callable[[list[Share]], None]


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
        base: The policy of the plain step: its sharding and donation, where anything is said of them.
        beside: Other programs of the run, compiled with the state placed as here.
        batch_rows: Rows of the batch in ``args``, where batch sizes are searched.
        state_shardings: What the step pins its state to, where its user said so.
        gradients: Which of its gradients obey a policy, as `jm.jit_step` says.
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
    plain: JitStep[..., Any] | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The train step's own name."""
        return getattr(self.train_step, "__name__", type(self.train_step).__name__)

    @property
    def platform(self) -> str:
        """What it is planned for: ``cpu``, ``tpu``, or a kind of GPU."""
        return jax.default_backend() if self.target is None else self.target.platform

    @property
    def speed(self) -> Speed | None:
        """Peaks of one device; None where no data sheet says them."""
        return speed_of_device(self.platform, kind_here()) if self.target is None else speed_of(self.target)

    @property
    def workers(self) -> int:
        """Among how many devices the work is divided; the others do again what one of these does."""
        return self.parts or self.device_count

    @property
    def beside_alone_is_too_much(self) -> bool:
        """Whether a program beside the step does not fit, whatever the step's policy."""
        return any(program.fits is False for program in self.beside)

    def step(self, policy: StepPolicy, survey: Survey | None = None) -> JitStep:
        """The step under a policy."""
        if self.plain is not None and self.mesh is None and survey is None and policy == self.plain.policy:
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
