"""The end of a run that does not recover: its snapshot enters and is saved with the policy to go on with; where it is leaves."""

from __future__ import annotations

from pathlib import Path

from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.recovery.ladder.agreement import Agreement
from jaxmem_callbacks.recovery.ladder.keeping import Keeper
from jaxmem_callbacks.recovery.ladder.saving import Saving
from jaxmem_callbacks.recovery.ladder.turns import first_line
from jaxmem_callbacks.recovery.snapshots import HostSnapshot


def saved_last(
    saving: Saving, keeper: Keeper, agreement: Agreement, *, policy: StepPolicy, stuck: tuple[int, ...]
) -> tuple[Path | None, str]:
    """Save the snapshot with the policy to go on with; where it is, or why not.

    Args:
        saving: Where to.
        keeper: Has the snapshot.
        agreement: With the other processes; all of them say how it went.
        policy: What the next run should run under.
        stuck: Processes that wait in a collective for one that failed: their devices answer nobody.
    """
    snapshot = keeper.snapshot
    where, why = None, ""
    try:
        if saving.folder is None:
            why = "no folder was given, as checkpoints='runs/a/checkpoints' of jm.Recovery would"
        elif snapshot is None:
            why = "no snapshot was taken"
        elif not stuck and agreement.count > 1:
            where = saving.save(snapshot.step, snapshot.restore(), policy)
        elif not isinstance(snapshot, HostSnapshot):
            where = saving.save(snapshot.step, snapshot.restore(), policy) if not stuck else None
            why = "" if where else f"the snapshot of step {snapshot.step} on disk stays as it is"
        elif agreement.own == 0:  # the one whose NumPy arrays Orbax writes; its devices are asked for nothing
            if snapshot.is_whole:
                where = saving.save_alone(snapshot, policy)
            else:
                why = "process 0 has not the whole state; snapshots on disk (`recovery: {snapshots: orbax}`) would be complete"
    except Exception as error:  # noqa: BLE001 - the failure that ends the run must not be hidden by another one
        why = f"it could not be written: {first_line(error)}"
    heard = agreement.exchange({"where": None if where is None else str(where), "why": why})
    place = next((words["where"] for words in heard if words["where"]), None)
    return (Path(place), "") if place else (None, next((words["why"] for words in heard if words["why"]), ""))
