"""A plan and a folder enter; an event file of its own leaves, which TensorBoard shows as a run: figure, tables, scalars."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from jaxmem_callbacks.analysis.timeseries import Spread, Window
from jaxmem_callbacks.records.errors import PlanError
from jaxmem_callbacks.records.plans import Candidate, PlanRecord
from jaxmem_callbacks.writers.plan_figure import plan_picture
from jaxmem_callbacks.writers.plan_page import plan_page, plan_scalars
from jaxmem_callbacks.writers.tensorboard import TensorBoardWriter

_SUFFIX = "plan"


def write_plan_run(record: PlanRecord, frontier: Collection[Candidate], logdir: str | os.PathLike[str]) -> Path:
    """Write the plan's page into a folder; a page that was written there before is replaced.

    Returns:
        The folder.

    Raises:
        PlanError: as `require_own_folder`.
    """
    folder = require_own_folder(logdir)
    folder.mkdir(parents=True, exist_ok=True)
    for before in folder.glob(f"events.out.tfevents.*.{_SUFFIX}"):
        before.unlink()
    now = time.time()
    writer = TensorBoardWriter(folder, _SUFFIX)
    try:
        for each in plan_page(record, frontier, step=0, time_s=now):
            writer.write(each)
        writer.write(plan_picture(record, frontier, step=0, time_s=now))
        spreads = {tag: Spread(low=gib, mean=gib, high=gib, count=1) for tag, gib in plan_scalars(record).items()}
        writer.write(Window(step=0, time_s=now, spreads=spreads))
    finally:
        writer.close()
    return folder


def require_own_folder(logdir: str | os.PathLike[str]) -> Path:
    """The folder that a plan's page may be written into; nothing is left there.

    Raises:
        PlanError: no local folder, one that cannot be written, or one that holds a run.
    """
    logdir = os.fspath(logdir)
    if "://" in logdir:
        msg = (
            f"to_tensorboard(logdir={logdir!r}): expected a local folder. Write the page to one and copy it there, or hand "
            "the plan to a run with your own logger, whose monitor takes plan=plan."
        )
        raise PlanError(msg)
    folder = Path(logdir)
    runs = [path.name for path in folder.glob("events.out.tfevents.*") if path.suffix != f".{_SUFFIX}"]
    if runs:
        msg = (
            f"to_tensorboard(logdir={logdir!r}): the folder holds a run ({runs[0]}), and TensorBoard goes over to the newest "
            "file of a folder, so it would show no more of that run. Expected a folder of the plan's own: "
            f"plan.to_tensorboard({logdir + '_plan'!r}). Or let the run show the plan, whose monitor takes plan=plan."
        )
        raise PlanError(msg)
    _try_writing(folder)
    return folder


def _try_writing(folder: Path) -> None:
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        msg = (
            f"to_tensorboard(logdir={str(folder)!r}): expected a folder that can be written: {error.strerror}. "
            "Type another one, such as plan.to_tensorboard('runs/plan')."
        )
        raise PlanError(msg) from error
    finally:
        for each in missing:
            with contextlib.suppress(OSError):  # it was never made
                each.rmdir()
