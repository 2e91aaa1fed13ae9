"""A train step, its arguments, a target and a budget enter; a `PlanRecord` leaves: what was compiled and which policy to use."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem_callbacks.planning.budget import budget_for
from jaxmem_callbacks.planning.candidates import Compiler, Problem
from jaxmem_callbacks.planning.search import MOST_SHARDED_COMPILES, Progress, RematSearch, choose
from jaxmem_callbacks.planning.spread import SHARDINGS, argument_bytes, carries_shardings, default_axes, spread
from jaxmem_callbacks.programs.steps.aliases import leaf_bytes
from jaxmem_callbacks.programs.steps.leaves import Leaf
from jaxmem_callbacks.programs.steps.step import JitStep, Traced
from jaxmem_callbacks.programs.targets.target import Target, resolve_target
from jaxmem_callbacks.records.errors import PlanError
from jaxmem_callbacks.records.plans import Candidate, PlanRecord
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.units import format_bytes, parse_bytes
from jaxmem_callbacks.transforms.kinds import OPTIMIZER, PARAMETERS
from jaxmem_callbacks.transforms.residuals import array_bytes

_MARGINS = {
    "cuda": (
        "left out without the GPU: the CUDA context and libraries (some hundred MiB), cuDNN and cuBLAS workspaces, NCCL buffers, "
        "and fragmentation"
    ),
    "tpu": "left out without the TPU: fragmentation of what other programs leave behind",
    "cpu": "left out: the host's own memory outside XLA",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What a plan is asked for, as `jm.plan` takes it.

    Attributes:
        target: Name of hardware that need not be there, or None.
        budget: Bytes, text, a share, or None.
        resident: What else stays in memory.
        mesh: Axes of the target's devices, where the arguments carry no shardings; None for one axis, ``fsdp``.
    """

    target: str | None = None
    budget: str | float | None = None
    resident: Iterable[Any] = ()
    mesh: Any = None


def make_plan(
    train_step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    ask: Ask,
    progress: Progress | None = None,
) -> PlanRecord:
    """Compile a step under the policies worth trying, and choose; `jm.plan` has the words.

    Raises:
        PlanError, TargetError, CompileError, PolicyError: see `jm.plan`.
    """
    if isinstance(train_step, JitStep):
        if train_step.policy.changes_gradients:
            policy = train_step.policy
            what = f"microbatches={policy.microbatches}" if policy.remat == "none" else f"remat={policy.remat!r}"
            msg = (
                f"The step is already under {what}. Plan the function that you wrote: "
                f"jm.plan({train_step.name}, ...), not what jm.jit_step returned."
            )
            raise PlanError(msg)
        train_step = train_step.__wrapped__
    hardware = None if ask.target is None else resolve_target(ask.target)
    if hardware is not None and hardware.platform == "cpu" and jax.default_backend() == "cpu":
        hardware = None
    limits = budget_for(ask.budget, hardware)
    traced = JitStep(train_step, StepPolicy()).traced(args, dict(kwargs))
    devices = max((_devices_of(leaf) for leaf in traced.leaves), default=1)
    problem = Problem(
        train_step=train_step,
        args=args,
        kwargs=kwargs,
        target=hardware,
        budget=limits,
        resident_bytes=sum(map(_resident_bytes, ask.resident)),
        device_count=devices,
    )
    if hardware is not None and hardware.device_count > 1 and not carries_shardings(traced):
        return _sharded(problem, traced, ask, progress)
    if ask.mesh is not None:
        msg = (
            f"mesh={ask.mesh!r} says how to divide a step for a target of several devices. Name one, such as "
            "target='h100_sxm:8', or leave mesh out: arguments that carry shardings say themselves where they lie."
        )
        raise PlanError(msg)
    compiler = Compiler(problem)
    search = RematSearch(compiler, progress)
    return _record(compiler, search.run(frontier=ask.budget is None), traced.leaves, tuple(search.notes))


def _sharded(problem: Problem, traced: Traced, ask: Ask, progress: Progress | None) -> PlanRecord:
    """Remat under each sharding of the state, for a target of several devices."""
    candidates: list[Candidate] = []
    notes: dict[str, None] = {}
    assert problem.target is not None
    axes = default_axes(problem.target.device_count) if ask.mesh is None else ask.mesh
    compiler: Compiler | None = None
    for sharding in SHARDINGS:
        divided = spread(problem, traced, axes, sharding)
        arguments = argument_bytes(divided)
        if not _may_fit(problem, arguments) and sharding != SHARDINGS[-1]:
            notes[f"{sharding} was not compiled: its arguments alone are {format_bytes(arguments)} on each device."] = (
                None
            )
            continue
        compiler = Compiler(divided)
        search = RematSearch(compiler, progress, most=MOST_SHARDED_COMPILES // len(SHARDINGS))
        candidates += search.run(frontier=False)
        notes |= dict.fromkeys(search.notes)
        if search.interrupted:
            break
    assert compiler is not None
    candidates.sort(key=lambda each: (-(each.step_bytes or 0), each.extra_flops))
    return _record(compiler, candidates, traced.leaves, tuple(notes))


def _may_fit(problem: Problem, arguments: int) -> bool:
    limit = problem.budget.bytes
    return limit is None or arguments + problem.resident_bytes <= limit


def _record(
    compiler: Compiler, candidates: Sequence[Candidate], leaves: Sequence[Leaf], notes: tuple[str, ...]
) -> PlanRecord:
    problem = compiler.problem
    train_step, hardware, limits = problem.train_step, problem.target, problem.budget
    chosen, reason = choose(candidates)
    platform = hardware.platform if hardware is not None else jax.default_backend()
    return PlanRecord(
        step=getattr(train_step, "__name__", type(train_step).__name__),
        target="attached" if hardware is None else hardware.name,
        platform=platform,
        device_count=problem.device_count,
        candidates=tuple(candidates),
        chosen=chosen,
        reason=reason,
        limit_bytes=limits.limit_bytes,
        budget_bytes=limits.bytes,
        budget_reason=limits.reason,
        resident_bytes=problem.resident_bytes,
        least_bytes=_state_bytes(leaves),
        compiles=len(candidates),
        compiled=sum(not candidate.cached for candidate in candidates),
        margin=_MARGINS.get(platform, "") if hardware is not None else "",
        versions=_versions(compiler, hardware),
        flags={name: str(value) for answer in compiler.answers[:1] for name, value in answer.compiler_options.items()},
        mesh=_mesh_of(problem, leaves),
        signature=tuple((leaf.path, leaf.type_text) for leaf in leaves),
        fingerprint=compiler.plain.fingerprint,
        notes=tuple(dict.fromkeys((*notes, *compiler.notes))),
    )


def _resident_bytes(item: Any) -> int:
    """Bytes that stay beside the step: a size, or a tree of arrays, real or abstract."""
    if isinstance(item, (int, str)) and not isinstance(item, bool):
        return parse_bytes(item)
    leaves = [leaf for leaf in jax.tree.leaves(item) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    if not leaves:
        msg = f"resident holds {type(item).__name__}, which has no arrays. Give bytes, '2GiB', or trees of arrays."
        raise PlanError(msg)
    return sum(array_bytes(leaf.shape, leaf.dtype) for leaf in leaves)


def _state_bytes(leaves: Sequence[Leaf]) -> int:
    """What parameters and optimizer state alone take on one device."""
    state = [leaf for leaf in leaves if leaf.kind in (PARAMETERS, OPTIMIZER)]
    return sum(leaf_bytes(leaf, getattr(leaf.value, "sharding", None)) for leaf in state)


def _devices_of(leaf: Leaf) -> int:
    sharding = getattr(leaf.value, "sharding", None)
    return int(getattr(sharding, "num_devices", 1) or 1)


def _mesh_of(problem: Problem, leaves: Sequence[Leaf]) -> dict[str, int]:
    if problem.mesh is not None:
        return {str(name): int(size) for name, size in problem.mesh.shape.items()}
    for leaf in leaves:
        mesh = getattr(getattr(leaf.value, "sharding", None), "mesh", None)
        if mesh is not None:
            return {str(name): int(size) for name, size in mesh.shape.items()}
    return {}


def _versions(compiler: Compiler, hardware: Target | None) -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    if hardware is not None:
        found |= {name: version for answer in compiler.answers[:1] for name, version in answer.compiler.items()}
    return found


def unfit_reason(record: PlanRecord) -> str:
    """What did not fit and by how much, for whoever is to run the policy all the same."""
    best = record.candidates[record.chosen]
    over = (best.step_bytes or 0) + record.resident_bytes - (record.budget_bytes or 0)
    return (
        f"Nothing fits: {record.step} needs {format_bytes(best.step_bytes)} on {record.target} under the policy that came "
        f"nearest, {format_bytes(over)} more than the budget of {format_bytes(record.budget_bytes)} allows (parameters and "
        f"optimizer state alone are {format_bytes(record.least_bytes)}). Plan for more or larger devices, a larger budget or "
        "a smaller batch."
    )
