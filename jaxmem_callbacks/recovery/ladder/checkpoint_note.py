"""What travels beside a checkpoint: policy, plan, versions, devices and the state's types; and what is different at restore."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import jax

from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.policies import StepPolicy, policy_words

FORM = 1
SAVE = "save"  # its number among the saves of the folder, from 1: a clock may be set back between two of them
_SHOWN = 8


def note_of(state: Any, *, step: int, policy: StepPolicy, asked: StepPolicy, plan: PlanRecord | None) -> dict[str, Any]:
    """The note for a checkpoint.

    Args:
        state: The state that is saved, or its shapes; where arrays lie is told too.
        step: The step that it stands before.
        policy: What a run that goes on from it should run under.
        asked: The policy that the user had asked for.
        plan: What was foretold, or None.
    """
    return {
        "form": FORM,
        "step": step,
        "policy": dataclasses.asdict(policy),
        "asked_policy": dataclasses.asdict(asked),
        "plan": _plan_words(plan),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "orbax-checkpoint")},
        "devices": _devices(),
        "mesh": _mesh(state),
        "state": [[path, _type(leaf)] for path, leaf in _leaves(state)],
    }


def require_readable(note: Any) -> dict[str, Any]:
    """A note of which every part can be read.

    Raises:
        ValueError: one that was damaged, or that another version wrote.
    """
    try:
        saved = dict(note)
        for key in ("policy", "asked_policy"):
            policy_in(saved, key)
        _state_in(saved)
        for key in ("versions", "devices", "mesh", "plan"):
            dict(saved.get(key) or {})
    except (TypeError, ValueError, AttributeError) as error:
        msg = f"it is none of this version's: {error}"
        raise ValueError(msg) from error
    number = saved.get(SAVE, 1)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        msg = f"`{SAVE}` is {number!r:.40}, expected a whole number from 1 on"
        raise ValueError(msg)
    return saved


def policy_in(note: Mapping[str, Any], key: str = "policy") -> StepPolicy | None:
    """The policy that a note says; None where it says none."""
    said = note.get(key)
    return StepPolicy(**{name: _tuples(value) for name, value in said.items()}) if isinstance(said, Mapping) else None


def state_differences(note: Mapping[str, Any], state: Any) -> list[str]:
    """Where the saved state is another one than this: a restore would fail or give other numbers."""
    saved = _state_in(note)
    here = {path: _type(leaf) for path, leaf in _leaves(state)}
    found = [
        f"{path}: saved {saved.get(path, 'nothing')}, here {here.get(path, 'nothing')}"
        for path in dict.fromkeys((*saved, *here))
        if saved.get(path) != here.get(path)
    ]
    return [*found[:_SHOWN], *([f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])] if saved else []


def differences(note: Mapping[str, Any], state: Any, policy: StepPolicy, plan: PlanRecord | None) -> list[str]:
    """What is not as it was when the checkpoint was written, a clause each; the state's own types are told apart.

    Args:
        note: What was saved.
        state: The state here.
        policy: What this run asks for.
        plan: What was foretold of this run, or None.
    """
    if not note:
        return ["it has no note of jaxmem beside it, so policy, plan, mesh and versions are unknown"]
    now = note_of(state, step=0, policy=policy, asked=policy, plan=plan)
    saved = policy_in(note, "asked_policy")
    found = [] if saved in (None, policy) else [f"policy: saved {policy_words(saved)}, here {policy_words(policy)}"]  # pyright: ignore[reportArgumentType] - None was asked for
    for key in ("versions", "devices", "mesh", "plan"):
        before, after = note.get(key) or {}, now[key] or {}
        found += [
            f"{key} {name}: saved {before.get(name, 'nothing')}, here {after.get(name, 'nothing')}"
            for name in dict.fromkeys((*before, *after))
            if before.get(name) != after.get(name)
        ]
    return found


def _state_in(note: Mapping[str, Any]) -> dict[str, str]:
    return {str(path): str(kind) for path, kind in note.get("state", ())}


def _plan_words(plan: PlanRecord | None) -> dict[str, Any] | None:
    """What of a plan is compared: for which step and hardware it was, and what it promised."""
    if plan is None:
        return None
    chosen = plan.candidates[plan.chosen]
    return {
        "target": plan.target,
        "policy": policy_words(chosen.policy),
        "step_bytes": chosen.step_bytes,
        "budget_bytes": plan.budget_bytes,
        "program": plan.fingerprint,
    }


def _devices() -> dict[str, Any]:
    first = jax.local_devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": jax.device_count(),
        "processes": jax.process_count(),
    }


def _mesh(state: Any) -> dict[str, int]:
    for _, leaf in _leaves(state):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if mesh is not None:
            return {str(name): int(size) for name, size in mesh.shape.items()}
    return {}


def _leaves(state: Any) -> list[tuple[str, Any]]:
    return [("state" + jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(state)]


def _type(leaf: Any) -> str:
    if isinstance(leaf, (bool, int, float)):  # a counter that begins as a number of Python's is an array after a step
        return f"{jax.dtypes.result_type(leaf)}[]"
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" if hasattr(leaf, "dtype") else type(leaf).__name__


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
