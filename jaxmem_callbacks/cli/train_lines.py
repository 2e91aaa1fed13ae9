"""The lines to paste into a script so that it trains as planned."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmem_callbacks.cli.trace_log import TraceLog
from jaxmem_callbacks.environment.process import FRACTION
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.policies import StepPolicy

if TYPE_CHECKING:
    from jaxmem_callbacks.api.plan import Plan

WHOLE = ".json"  # the ending of a file with a whole plan; others are presets


def lines_to_train(plan: Plan, saved: Path | None, seen: TraceLog | None = None) -> list[str]:
    """The lines to paste, after what to write instead of gradient functions in a script that does not know this library.

    Args:
        plan: What was found.
        saved: Where it was written, whole or as a preset.
        seen: What of such a script took part.
    """
    if seen is not None and seen.trainer and not _placed(plan, ""):
        return _around(plan, saved, seen.trainer)
    lines: list[str] = []
    if seen is not None and seen.edits:
        edits = [f"# {each.where}: {each.new} in place of {each.old}" for each in seen.edits]
        lines = ["import jaxmem_callbacks as jm", *edits]
    elif seen is not None and seen.step is not None:
        lines = ["import jaxmem_callbacks as jm"]
    if plan.chosen.batch_rows is not None:
        lines.append(f"# the batch has {plan.chosen.batch_rows} rows")
    step = plan.record.step if plan.record.step.isidentifier() else ""
    step = step if seen is None or seen.step is None else seen.step
    called = None if seen is None or _is_placed(plan) else seen.called
    if not step and called is None:
        return [*lines, *_without_name(plan, saved)]
    made = ("step", step) if called is None else (called.name, called.name)
    if called is not None:
        lines.append(f"# {called.where}")
    if saved is not None and saved.suffix == WHOLE:
        return [*lines, *_by_whole_plan(plan, saved, made)]
    return [*lines, *_by_policy(plan, saved, made)]


def _around(plan: Plan, saved: Path | None, trainer: str) -> list[str]:
    """Where a package jits the step: the policy goes around what the script calls."""
    rows = [] if plan.chosen.batch_rows is None else [f"# the batch has {plan.chosen.batch_rows} rows"]
    before, policy = _policy(plan, saved)
    line = advise("train.around", call=trainer, policy=policy)
    after = f"# and call trained in place of {trainer}"
    return ["import jaxmem_callbacks as jm", *_started(plan), *rows, *before, line, after]


def _without_name(plan: Plan, saved: Path | None) -> list[str]:
    """The policy alone: no line can replace what the script calls."""
    before, policy = _policy(plan, saved)
    return [
        *_started(plan),
        *before,
        advise("train.named", policy=policy),
        f"# Wrap the jit of {plan.record.step} by jm.jit_step with this policy, where it is made",
    ]


def _loaded(saved: Path) -> str:
    return advise("train.load_plan", saved=saved)


def _policy(plan: Plan, saved: Path | None) -> tuple[list[str], str]:
    """The chosen policy in code, after the line that loads it where the whole plan was saved."""
    if saved is None:
        return [], advise("train.policy", settings=_arguments(plan.policy))
    if saved.suffix == WHOLE:
        return [_loaded(saved)], "plan.policy"
    return [], advise("train.preset", saved=saved)


def _wrapped(made: tuple[str, str], policy: str) -> str:
    """The line that makes the step: around the jit that is there, which keeps its own options, or of the function."""
    return advise("train.wrap", step=made[0], of=made[1], policy=policy)


def _by_whole_plan(plan: Plan, saved: Path, made: tuple[str, str]) -> list[str]:
    return [
        *_started(plan),
        _loaded(saved),
        *_placed(plan, "plan.policy"),
        _wrapped(made, f"plan.policy{_reaching(plan)}"),
        advise("train.monitor"),
    ]


def _by_policy(plan: Plan, saved: Path | None, made: tuple[str, str]) -> list[str]:
    _, policy = _policy(plan, saved)
    before, placed = _started(plan), _placed(plan, "policy")
    if before and saved is not None:  # the preset has it
        before, placed = [], [f"{advise('environment.apply', preset='policy')}  # above the first use of JAX", *placed]
    if not placed:
        return [*before, _wrapped(made, f"{policy}{_reaching(plan)}")]
    return [*before, advise("train.named", policy=policy), *placed, _wrapped(made, f"policy{_reaching(plan)}")]


def _reaching(plan: Plan) -> str:
    """What a step needs besides its policy where gradients obeyed that JAX's own functions take."""
    return "" if plan.record.gradients == "own" else f', gradients="{plan.record.gradients}"'


def _arguments(policy: StepPolicy) -> str:
    values = {field.name: getattr(policy, field.name) for field in dataclasses.fields(StepPolicy)}
    default = StepPolicy()
    return ", ".join(f"{name}={value!r}" for name, value in values.items() if value != getattr(default, name))


def _started(plan: Plan) -> list[str]:
    """Where the choice needs more of a GPU than JAX's allocator takes by default."""
    share = plan.record.fraction
    return [] if share is None else [f"# start with {FRACTION}={share:g} or more"]


def _is_placed(plan: Plan) -> bool:
    """Whether the plan places the state, which the step of a plain function then returns as it came."""
    return bool(plan.record.mesh) and plan.policy.sharding is not None


def _placed(plan: Plan, policy: str) -> list[str]:
    if not _is_placed(plan):
        return []
    moved = advise("sharding.move", names="state", whole="state", mesh="jax.sharding.get_mesh()", policy=policy)
    return [
        advise("sharding.set_mesh", axes=dict(plan.record.mesh)),
        f"{moved}  # each that is updated",
    ]
