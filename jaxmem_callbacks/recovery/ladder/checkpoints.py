"""Checkpoints of a run, and the note beside each."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import jax

from jaxmem_callbacks.records.errors import RecoveryError, RecoveryWarning
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.policies import StepPolicy, policy_words
from jaxmem_callbacks.records.terminal import shown
from jaxmem_callbacks.recovery.failure import first_line, oom_facts
from jaxmem_callbacks.recovery.snapshots import DiskSnapshot, HostSnapshot, refuse_objects
from jaxmem_callbacks.transforms.frameworks import Checkpoints, checkpoints_in

FORM = 1
SAVE = "save"  # its number among the saves of the folder, from 1: a clock may be set back between two of them
_SHOWN = 8


def note_of(
    state: Any, *, step: int, policy: StepPolicy, requested: StepPolicy, plan: PlanRecord | None
) -> dict[str, Any]:
    """The note for a checkpoint.

    Args:
        state: The state that is saved, or its shapes with their shardings.
        step: The step that the state is the input of.
        policy: What a run that goes on from it should run under.
        requested: The policy that the user requested.
        plan: The plan of the run, or None.
    """
    return {
        "form": FORM,
        "step": step,
        "policy": dataclasses.asdict(policy),
        "asked_policy": dataclasses.asdict(requested),
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
    """The policy in a note, or None."""
    saved = note.get(key)
    return StepPolicy(**{name: _tuples(value) for name, value in saved.items()}) if isinstance(saved, Mapping) else None


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
    """What differs from when the checkpoint was written, a clause each, apart from the state's own types.

    Args:
        note: What was saved.
        state: The state here.
        policy: What this run asks for.
        plan: The plan of this run, or None.
    """
    if not note:
        return ["it has no note of jaxmem beside it, so policy, plan, mesh and versions are unknown"]
    now = note_of(state, step=0, policy=policy, requested=policy, plan=plan)
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


_SAVED, _SNAPSHOTS, _KEPT_SNAPSHOTS = "saved", "snapshots", 2


@final
class CheckpointFolder:
    """The folder of a run's checkpoints.

    Args:
        folder: The user's, or None for no checkpoints.
        requested: The policy that the user requested.
        plan: The plan of the step, or None.
    """

    def __init__(self, folder: Path | None, requested: StepPolicy, plan: PlanRecord | None) -> None:
        self.folder, self._requested, self._plan = folder, requested, plan
        self._saved: Checkpoints | None = None
        self._saves: int | None = None

    def on_disk(self, policy: Callable[[], StepPolicy]) -> Callable[[int, Any], DiskSnapshot]:
        """What takes snapshots on disk.

        Args:
            policy: Gives the policy in force.

        Raises:
            RecoveryError: no folder was given.
        """
        store = checkpoints_in(self._needed("snapshots on disk need") / _SNAPSHOTS, keep=_KEPT_SNAPSHOTS)
        return lambda step, state: DiskSnapshot(step, state, store, self._note(step, state, policy()))

    def save(self, step: int, state: Any, policy: StepPolicy) -> Path:
        """Write a state that stands before a step, and the policy to go on with.

        Raises:
            RecoveryError: no folder was given, or objects that are updated in place.
        """
        refuse_objects(state)
        return self._store().save(step, state, self._note(step, state, policy))

    def save_alone(self, snapshot: HostSnapshot, policy: StepPolicy) -> Path:
        """Write a snapshot from this process only, since another one cannot take part; no device is used."""
        folder = self._needed("saving needs") / _SAVED
        state = snapshot.on_host()
        store = checkpoints_in(folder, alone=jax.process_count() > 1)
        return store.save(snapshot.step, state, self._note(snapshot.step, snapshot.shapes, policy, alone=True))

    def restore(self, like: Any, step: int | None) -> tuple[int, Any, StepPolicy | None]:
        """The state saved last, or that of a step, placed as ``like``; and the policy to go on with, None for the user's own.

        Raises:
            RecoveryError: there is none, or it is another state's.
        """
        refuse_objects(like)
        known = self._known()
        if not known or (step is not None and step not in known):
            msg = (
                f"No checkpoint{'' if step is None else f' of step {step}'} in {self.folder}; there are: "
                f"{', '.join(map(str, sorted(known))) or 'none'}. Begin without: recovery.latest is None there."
            )
            raise RecoveryError(msg)
        if step is not None:
            return self._restored(known[step], step, like)
        damaged: list[str] = []
        newest_first = list(reversed(known))
        for number in newest_first:
            try:
                found = self._restored(known[number], number, like)
            except _DamagedError as error:
                damaged.append(str(error))
                if jax.process_count() > 1:  # each may see another one damaged, and all have to take the same
                    break
                continue
            if damaged:
                text = f"{' '.join(damaged)} Step {number}, the newest one before it that is whole, is restored in its place."
                warnings.warn(shown(text), RecoveryWarning, stacklevel=3)
            older = newest_first[newest_first.index(number) + 1 :]
            unsure = sorted(step for step in older if step > number and _save_of(known[step], step) is None)
            if unsure:
                text = (
                    f"The note of step {', '.join(map(str, unsure))} in {self.folder} cannot be read; by the clock it is older "
                    f"than step {number}, which is restored. Is it the newest all the same? Give its step to recovery.restore."
                )
                warnings.warn(shown(text), RecoveryWarning, stacklevel=3)
            return found
        others = newest_first[1:] if jax.process_count() > 1 else []
        instead = (
            f" Restore an earlier one on every process: recovery.restore(state, step={others[0]})." if others else ""
        )
        msg = f"{' '.join(damaged)}{instead or ' No other one is whole.'}"
        raise RecoveryError(msg)

    def _restored(self, store: Checkpoints, number: int, like: Any) -> tuple[int, Any, StepPolicy | None]:
        note, unread = _note_in(store, number)
        wrong = state_differences(note, like)
        if wrong:
            msg = (
                f"The checkpoint of step {number} in {self.folder} is another state's: {'; '.join(wrong)}. Expected the tree, "
                "shapes and dtypes that were saved. Build the state as then, or restore it by Orbax and convert it."
            )
            raise RecoveryError(msg)
        try:
            state = store.restore(number, like)
        except Exception as error:
            if oom_facts(error) is not None:
                raise
            msg = f"The checkpoint of step {number} in {self.folder} cannot be read: {first_line(error)}."
            raise _DamagedError(msg) from error
        different = [unread] if unread else differences(note, like, self._requested, self._plan)
        if different:
            text = f"The checkpoint of step {number} was written under other conditions: {'; '.join(different)}."
            warnings.warn(shown(text), RecoveryWarning, stacklevel=4)
        goes_on = policy_in(note) if policy_in(note, "asked_policy") == self._requested else None
        return number, state, goes_on

    @property
    def latest(self) -> int | None:
        """The step of what was saved last, or None. After a return to an earlier step that is not the highest one."""
        known = {} if self.folder is None else self._known()
        return next(reversed(known), None)

    def _note(self, step: int, state: Any, policy: StepPolicy, *, alone: bool = False) -> dict[str, Any]:
        if self._saves is None:  # what an earlier run has saved counts on
            known = self._known(alone=alone).items()
            self._saves = max((_save_of(store, at) or 0 for at, store in known), default=0)
        self._saves += 1
        return note_of(state, step=step, policy=policy, requested=self._requested, plan=self._plan) | {
            SAVE: self._saves
        }

    def _known(self, *, alone: bool = False) -> dict[int, Checkpoints]:
        """Each step that was saved, with where, that which was saved last at the end; of one that is also a snapshot the later.

        Nothing is deleted when a run goes on from an earlier one: higher steps can be there still.
        """
        folder = self._needed("restoring needs")
        saves: list[tuple[int, Checkpoints]] = []
        for name in (_SNAPSHOTS, _SAVED):
            if (folder / name).is_dir():
                keep = _KEPT_SNAPSHOTS if name == _SNAPSHOTS else None
                shared = self._store() if name == _SAVED and not alone else None
                store = shared or checkpoints_in(folder / name, keep=keep, alone=alone and jax.process_count() > 1)
                saves += [(step, store) for step in store.steps()]
        found: dict[int, Checkpoints] = {}
        for step, store in _in_order(saves):
            found.pop(step, None)
            found[step] = store
        return found

    def _store(self) -> Checkpoints:
        if self._saved is None:
            self._saved = checkpoints_in(self._needed("saving needs") / _SAVED)
        return self._saved

    def _needed(self, what: str) -> Path:
        if self.folder is None:
            msg = f"{what} a folder, and Recovery has none. Give it one: checkpoints='runs/a/checkpoints'."
            raise RecoveryError(msg)
        return self.folder


class _DamagedError(RecoveryError):
    """A checkpoint that its own store cannot read."""


def _in_order(saves: Sequence[tuple[int, Checkpoints]]) -> list[tuple[int, Checkpoints]]:
    """Saves as they were written, by their numbers.

    One whose note has no number comes behind the last numbered one that is no younger by the clock, or of a lower step where the
    clock is not known either; several there by their steps. What it holds may be whole, so it must not sink below all others.
    """
    numbers = {save: _save_of(save[1], save[0]) for save in saves}
    if all(numbers.values()):
        return sorted(saves, key=lambda save: (numbers[save] or 0, save[0]))
    times = {save: save[1].written(save[0]) for save in saves}

    def is_before(one: tuple[int, Checkpoints], other: tuple[int, Checkpoints]) -> bool:
        first, second = times[one], times[other]
        return one[0] < other[0] if first is None or second is None else first <= second

    def place(save: tuple[int, Checkpoints]) -> tuple[int, bool, int]:
        number = numbers[save]
        behind = [known for other in saves if (known := numbers[other]) and is_before(other, save)]
        return number or max(behind, default=0), number is None, save[0]

    return sorted(saves, key=place)


def _note_in(store: Checkpoints, step: int) -> tuple[dict[str, Any], str]:
    """The note of one, and what is wrong with it: arrays may be whole beside a note that is not."""
    try:
        return require_readable(store.note(step)), ""
    except Exception as error:  # noqa: BLE001 - a store raises what it likes of a file that was cut
        return {}, f"its note cannot be read ({first_line(error)}), so policy, plan, mesh and versions are unknown"


def _save_of(store: Checkpoints, step: int) -> int | None:
    """The number of the save that wrote it; None where its note cannot be read or has none."""
    return _note_in(store, step)[0].get(SAVE)
