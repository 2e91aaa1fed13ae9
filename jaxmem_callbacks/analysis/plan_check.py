"""Plan check: what a plan foretold against what is really compiled. Tells once when the plan is stale or its bytes are off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import final

from jaxmem_callbacks.analysis.observation import Compiled, Observation
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.programs import Compilation, Conditions
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.units import format_bytes

# A plan of the same program by the same compiler is off by nothing; another machine's autotuning may cost a few percent.
_OFF = 0.05
_SHOWN = 3
_PLATFORMS = {"cuda": "gpu"}


@final
class PlanDetector:
    """Looks at the first compile of the planned step.

    Args:
        plan: What was foretold.
        versions: Package -> version of this process, of those that the plan names.
    """

    def __init__(self, plan: PlanRecord, versions: Mapping[str, str]) -> None:
        self._plan = plan
        self._versions = versions
        self._done = False

    def detect(self, observation: Observation) -> Sequence[MemoryEvent]:
        """One event at most in a run: stale before off, since a stale plan's bytes mean nothing."""
        for compiled in observation.compilations:
            compilation = compiled.compilation
            registered = compilation.program == self._plan.step and compilation.signature
            if not self._done and registered and compilation.memory is not None:
                self._done = True
                stale = self._stale(compilation)
                return [_stale_event(self._plan, compiled, stale)] if stale else _off_events(self._plan, compiled)
        return ()

    def _stale(self, compilation: Compilation) -> list[str]:
        """Why the plan is about something else."""
        assert compilation.memory is not None
        plan, platform = self._plan, _PLATFORMS.get(self._plan.platform, self._plan.platform)
        found: list[str] = []
        if compilation.memory.platform != platform:
            found.append(f"planned for {plan.target}, running on {compilation.memory.platform}")
        planned, now = dict(plan.signature), {path: text.split(" ")[0] for path, text in compilation.signature}
        changed = [path for path in planned if path in now and planned[path] != now[path]]
        found += [f"{path}: {planned[path]} -> {now[path]}" for path in changed[:_SHOWN]]
        if len(changed) > _SHOWN:
            found.append(f"{len(changed) - _SHOWN} more arguments of another shape or dtype")
        if planned.keys() != now.keys() and not changed and planned:
            found.append(f"{len(planned.keys() ^ now.keys())} arguments are new or gone")
        found += [
            f"{name} {version} -> {self._versions[name]}"
            for name, version in plan.versions.items()
            if name in self._versions and self._versions[name] != version
        ]
        found += self._other_conditions(compilation.conditions, compilation.memory.platform == platform)
        operations = plan.candidates[plan.chosen].operations
        if not found and operations and compilation.conditions.operations not in ("", operations):
            found.append(
                "the step has other operations than the planned one under its policy, so it or its policy changed"
            )
        return found

    def _other_conditions(self, now: Conditions, same_platform: bool) -> Iterator[str]:  # noqa: FBT001 - one fact
        """Devices, mesh and flags that differ; what is unknown on either side is not compared."""
        plan = self._plan
        if same_platform and plan.device_kind and now.device_kind and not _alike(plan.device_kind, now.device_kind):
            yield f"planned for {plan.device_kind}, running on {now.device_kind}"
        if now.device_count is not None and now.device_count != plan.device_count:
            yield f"devices {plan.device_count} -> {now.device_count}"
        planned, mesh = _wide(plan.mesh), _wide(now.mesh)
        if planned and mesh and planned != mesh:
            yield f"mesh {_text(planned)} -> {_text(mesh)}"
        before, flags = plan.process_flags, now.flags
        if before is not None and flags is not None and same_platform:
            names = [name for name in dict.fromkeys((*before, *flags)) if before.get(name) != flags.get(name)]
            yield from (f"{name} {before.get(name, 'unset')} -> {flags.get(name, 'unset')}" for name in names[:_SHOWN])


def _alike(kind: str, other: str) -> bool:
    """Whether two names are of one device: JAX may say less of it than the table of targets does."""
    return f"{kind} ".startswith(f"{other} ") or f"{other} ".startswith(f"{kind} ")


def _wide(mesh: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in mesh.items() if size > 1}


def _text(mesh: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.items())


def plan_row(plan: PlanRecord, compiled_bytes: int | None, measured_bytes: int | None) -> tuple[str, str]:
    """Predicted beside compiled and measured, for a table: the sizes, and by how much they differ.

    Args:
        plan: What was foretold.
        compiled_bytes: What the compiler says of the step that runs; None before, and where it does not.
        measured_bytes: The highest peak of the devices' allocators so far; None where they tell none.
    """
    predicted = plan.candidates[plan.chosen].step_bytes
    if compiled_bytes is None or predicted is None:
        return f"{format_bytes(predicted)} predicted", "the step was not compiled yet, or its bytes are unknown here"
    sizes = f"{format_bytes(predicted)} predicted, {format_bytes(compiled_bytes)} compiled"
    text = f"{compiled_bytes / predicted - 1:+.1%}"
    if measured_bytes is None:
        return sizes, text
    measured = f"{measured_bytes / predicted - 1:+.1%} measured: the allocator's peak since the process began, whatever made it"
    return f"{sizes}, {format_bytes(measured_bytes)} measured", f"{text} compiled, {measured}"


def _stale_event(plan: PlanRecord, compiled: Compiled, stale: Sequence[str]) -> MemoryEvent:
    return MemoryEvent(
        kind="plan_stale",
        step=compiled.step,
        time_s=compiled.compilation.time_s,
        device=plan.step,
        message=f"The plan of {plan.step} for {plan.target} is stale: {'; '.join(stale)}. Noticed at step {compiled.step}.",
        action=f"Plan {plan.step} again, with these arguments and versions.",
        figures={"changed": "; ".join(stale), **_sizes(plan, compiled)},
    )


def _off_events(plan: PlanRecord, compiled: Compiled) -> list[MemoryEvent]:
    sizes = _sizes(plan, compiled)
    if "predicted_bytes" not in sizes or abs(sizes["compiled_bytes"] / sizes["predicted_bytes"] - 1) <= _OFF:
        return []
    off = sizes["compiled_bytes"] / sizes["predicted_bytes"] - 1
    message = (
        f"{plan.step} needs {format_bytes(sizes['compiled_bytes'])}, where its plan foretold "
        f"{format_bytes(sizes['predicted_bytes'])} ({off:+.1%}), since step {compiled.step}."
    )
    action = f"Plan {plan.step} again on this machine, without target, or keep a larger margin in the budget."
    return [
        MemoryEvent(
            kind="prediction_off",
            step=compiled.step,
            time_s=compiled.compilation.time_s,
            device=plan.step,
            message=message,
            action=action,
            figures=sizes,
        )
    ]


def _sizes(plan: PlanRecord, compiled: Compiled) -> dict[str, int]:
    predicted, memory = plan.candidates[plan.chosen].step_bytes, compiled.compilation.memory
    if not predicted or memory is None:
        return {}
    return {"predicted_bytes": predicted, "compiled_bytes": memory.step_bytes}
