"""Detectors of compiles: which argument changed, a donation that was lost, a plan that is stale or off."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import final

from jaxmem_callbacks.analysis.observation import Compiled, Observation
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.plans import OFF_SHARE, PlanRecord
from jaxmem_callbacks.records.policies import mesh_words
from jaxmem_callbacks.records.programs import Compilation, Conditions
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.units import format_bytes

_SHOWN_ARGUMENTS = 3
# Of a run that was recorded before remedies were.
_ASKED = "Is each array returned in the shape, dtype and sharding in which it comes?"


@final
class LostDonations:
    """What each program has lost so far; the same arrays are news once."""

    def __init__(self) -> None:
        self._lost: dict[str, frozenset[str]] = {}

    def news(self, compilation: Compilation) -> tuple[str, ...]:
        """The arrays that this compile loses and the one before did not."""
        if compilation.memory is None and not compilation.lost:
            return ()  # not known what it does with its arguments
        paths = {_path(text): text for text in compilation.lost}
        before = self._lost.get(compilation.program, frozenset())
        self._lost[compilation.program] = frozenset(paths) | (before if compilation.has_run else frozenset())
        return tuple(text for path, text in paths.items() if path not in before)


@final
class DonationDetector:
    """One event when a program begins to lose donations; a compile that makes them again ends the episode.

    Args:
        since_s: Compiles before this moment (seconds since the epoch) are history.
    """

    def __init__(self, since_s: float = 0.0) -> None:
        self._since_s = since_s
        self._lost = LostDonations()

    def detect(self, observation: Observation) -> Sequence[MemoryEvent]:
        """One event a compile that loses what was not lost before."""
        found = [(compiled, self._lost.news(compiled.compilation)) for compiled in observation.compilations]
        return [
            _donation_event(each, news) for each, news in found if news and each.compilation.time_s >= self._since_s
        ]


def _path(text: str) -> str:
    return text.split(": ", 1)[0]


def _donation_event(compiled: Compiled, news: Sequence[str]) -> MemoryEvent:
    compilation = compiled.compilation
    name = compilation.program
    more = f"; and {len(news) - _SHOWN_ARGUMENTS} more" if len(news) > _SHOWN_ARGUMENTS else ""
    changed = (
        f" Changed in this compile: {'; '.join(compilation.changed[:_SHOWN_ARGUMENTS])}." if compilation.changed else ""
    )
    return MemoryEvent(
        kind="donation_lost",
        step=compiled.step,
        time_s=compilation.time_s,
        device=name,
        message=(
            f"{name} does not reuse the memory of {len(news)} donated arrays since step {compiled.step}, so old and new "
            f"value are held at once, {format_bytes(compilation.lost_bytes)} more on a device: "
            f"{'; '.join(news[:_SHOWN_ARGUMENTS])}{more}.{changed}"
        ),
        action=compilation.remedy or _ASKED,
        figures={"lost_bytes": compilation.lost_bytes, "lost": "; ".join(compilation.lost)},
    )


_QUIET_STEPS = 100  # an episode ends after so many steps without another compile for the same arguments
_ANEW = 3  # steps of training that compile for the same arguments: a step that is made again in the loop
_MADE_AGAIN = "made again"
_SHOWN_CHANGES = 4  # changed arguments spelled out in one message


@final
class RecompilationDetector:
    """One event for each program and set of changed arguments; the first compile of a program is none.

    A registered step that is compiled for the same arguments at several steps of the training is made again in the loop; several
    of one name that are compiled together, or for two policies, are not. Nor is a compile that loses a donation reported here:
    the donation's own event names what changed.

    Args:
        since_s: Compiles before this moment (seconds since the epoch) are history: they count as first compiles only.
    """

    def __init__(self, since_s: float = 0.0) -> None:
        self._since_s = since_s
        self._compiles: dict[str, int] = {}
        self._first_step: dict[str, int] = {}
        self._lost = LostDonations()
        self._last_step: dict[tuple[str, frozenset[str]], int] = {}
        self._alike: dict[tuple[str, int], set[int]] = {}  # of a program and signature, the steps that compiled it

    def detect(self, observation: Observation) -> Sequence[MemoryEvent]:
        """One event for each compile that begins an episode."""
        return [
            _recompilation_event(compiled, self._compiles[compiled.compilation.program], anew=anew)
            for compiled in observation.compilations
            for anew in [self._is_made_anew(compiled.compilation, compiled.step)]
            if self._begins(compiled.compilation, compiled.step, anew=anew)
        ]

    def _is_made_anew(self, compilation: Compilation, step: int) -> bool:
        if compilation.has_run or compilation.changed or not compilation.signature:
            return False
        steps = self._alike.setdefault((compilation.program, hash(compilation.signature)), set())
        if len(steps) < _ANEW:
            steps.add(step)
        return len(steps) >= _ANEW

    def _begins(self, compilation: Compilation, step: int, *, anew: bool) -> bool:
        if compilation.has_run:
            return False
        count = self._compiles.get(compilation.program, 0) + 1
        self._compiles[compilation.program] = count
        # Another step of the same name may be compiled for the first time; a registered step names itself what changed. What is
        # not registered is compiled for all that one step does with it: for two shapes, or on two groups of devices.
        first = self._first_step.setdefault(compilation.program, step)
        again = anew or (bool(compilation.changed) if compilation.signature else step > first)
        loses_donation = bool(self._lost.news(compilation))
        if compilation.time_s < self._since_s or not again or loses_donation:
            return False
        changed = frozenset(change.split(":", 1)[0] for change in compilation.changed)
        key = (compilation.program, frozenset((_MADE_AGAIN,)) if anew else changed)
        last = self._last_step.get(key)
        self._last_step[key] = step
        return last is None or step - last > _QUIET_STEPS


_STATIC = "static "
_RANDOM_KEY = "key<"


def _kept_alike(changed: Sequence[str]) -> str:
    """How the arguments that changed stay as they were, by the first of them whose change can be avoided.

    Args:
        changed: A sentence each, as `Compilation.changed` has them.
    """
    parted = [(path, *types.partition(" -> ")[::2]) for path, _, types in (each.partition(": ") for each in changed)]
    known = [(path, old, new) for path, old, new in parted if old and new]
    static = [(path, old, new) for path, old, new in known if old.startswith(_STATIC)]
    arrays = [(path, old.split()[0], new.split()[0]) for path, old, new in known if not old.startswith(_STATIC)]
    shapes = [(path, max(old, new, key=_elements)) for path, old, new in arrays if _shape(old) != _shape(new)]
    dtypes = [
        (path, old)
        for path, old, new in arrays
        if _shape(old) == _shape(new) and old != new and not old.startswith(_RANDOM_KEY)
    ]
    if shapes:
        return advise(
            "recompilation.rows", arrays=" and ".join(f"{path} at {old}" for path, old in shapes[:_SHOWN_CHANGES])
        )
    if dtypes:
        path, old = dtypes[0]
        return f"Pass {path} in one dtype: {advise('recompilation.dtype', argument=path, dtype=old.partition('[')[0])}."
    if static:
        path, old, new = static[0]
        is_number = all(_is_number(each.removeprefix(_STATIC)) for each in (old, new))
        if is_number:
            return advise("recompilation.static", argument=path)
        return f"A step is compiled for each value of a static argument. Must {path} change from step to step?"
    if known:
        return f"Is {known[0][0]} elsewhere than before, as what is restored may? Place it as it was."
    return "Does the tree of the arguments change from step to step, or the jit or the policy around them?"


def _shape(type_text: str) -> str:
    return type_text.partition("[")[2]


def _elements(type_text: str) -> int:
    """What is shorter can be padded to what is longer, and not the other way."""
    return math.prod(int(size) for size in _shape(type_text).rstrip("]").split(",") if size.isdecimal())


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _recompilation_event(compiled: Compiled, count: int, *, anew: bool) -> MemoryEvent:
    compilation = compiled.compilation
    name = compilation.program
    if compilation.changed:
        why = "; ".join(compilation.changed[:_SHOWN_CHANGES])
        more = len(compilation.changed) - _SHOWN_CHANGES
        why += f"; and {more} more" if more > 0 else ""
        action = _kept_alike(compilation.changed)
    elif anew:
        why = "no argument; jm.jit_step makes another step each time, inside the loop"
        action = advise("recompilation.jit_once")
    else:
        why = compilation.unavailable or "unknown"
        action = (
            f"Is it jitted inside the loop, or made by a function that the loop calls? {advise('recompilation.jit_once')} Is it "
            f"jitted once, and do its arguments change? {advise('recompilation.learn')}"
        )
    return MemoryEvent(
        kind="recompilation",
        step=compiled.step,
        time_s=compilation.time_s,
        device=name,
        message=f"{name} was compiled again (compile {count}) at step {compiled.step}. Changed: {why}.",
        action=action,
        figures={"compiles": count, "changed": "; ".join(compilation.changed) or why},
    )


_SHOWN_DIFFERENCES = 3
_PLATFORMS = {"cuda": "gpu"}


@final
class PlanDetector:
    """Looks at the first compile of the planned step.

    Args:
        plan: What was planned.
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
            found.append(f"planned for {plan.hardware}, running on {compilation.memory.platform}")
        arrays = [(path, text) for path, text in compilation.signature if not text.startswith(_STATIC)]
        planned, now = dict(plan.signature), {path: text.split(" ")[0] for path, text in arrays}
        changed = [path for path in planned if path in now and planned[path] != now[path]]
        found += [f"{path}: {planned[path]} -> {now[path]}" for path in changed[:_SHOWN_DIFFERENCES]]
        if len(changed) > _SHOWN_DIFFERENCES:
            found.append(f"{len(changed) - _SHOWN_DIFFERENCES} more arguments of another shape or dtype")
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
            yield f"mesh {mesh_words(planned)} -> {mesh_words(mesh)}"
        before, flags = plan.process_flags, now.flags
        if before is not None and flags is not None and same_platform:
            names = [name for name in dict.fromkeys((*before, *flags)) if before.get(name) != flags.get(name)]
            yield from (
                f"{name} {before.get(name, 'unset')} -> {flags.get(name, 'unset')}"
                for name in names[:_SHOWN_DIFFERENCES]
            )


def _alike(kind: str, other: str) -> bool:
    """Whether two names are of one device: JAX's name may be shorter than that of the table of targets."""
    return f"{kind} ".startswith(f"{other} ") or f"{other} ".startswith(f"{kind} ")


def _wide(mesh: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in mesh.items() if size > 1}


def _stale_event(plan: PlanRecord, compiled: Compiled, stale: Sequence[str]) -> MemoryEvent:
    return MemoryEvent(
        kind="plan_stale",
        step=compiled.step,
        time_s=compiled.compilation.time_s,
        device=plan.step,
        message=f"The plan of {plan.step} for {plan.hardware} is stale: {'; '.join(stale)}. Noticed at step {compiled.step}.",
        action=f"Plan {plan.step} again, with these arguments and versions.",
        figures={"changed": "; ".join(stale), **_sizes(plan, compiled)},
    )


def _off_events(plan: PlanRecord, compiled: Compiled) -> list[MemoryEvent]:
    sizes = _sizes(plan, compiled)
    if "predicted_bytes" not in sizes or abs(sizes["compiled_bytes"] / sizes["predicted_bytes"] - 1) <= OFF_SHARE:
        return []
    off = sizes["compiled_bytes"] / sizes["predicted_bytes"] - 1
    message = (
        f"{plan.step} needs {format_bytes(sizes['compiled_bytes'])}, where its plan predicted "
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
