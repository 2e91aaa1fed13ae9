"""Folders of reports: a place and a process enter; one new folder leaves, and the oldest of the same process go.

Only what this library wrote is ever removed: a folder of its naming with its files in it and nothing else.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

from jaxmem_callbacks.records.files import PRIVATE_FOLDER

REPORT_FILES = ("report.md", "report.html", "facts.json")
_NAME = re.compile(r"oom-\d{8}-\d{6}-process(\d+)-pid\d+(?:-(\d+))?")
_TRIES = 1000


def new_folder(outdir: Path, *, process: int, pid: int, time_s: float) -> Path:
    """Make a folder that nobody has, named by time and process.

    Args:
        outdir: Made when it is not there.
        process: Index of this process in the run.
        pid: Its number on this machine.
        time_s: Seconds since the epoch.

    Raises:
        OSError: it cannot be made.
    """
    outdir.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(time_s))
    name = f"oom-{stamp}-process{process}-pid{pid}"
    for number in range(1, _TRIES):
        folder = outdir / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(PRIVATE_FOLDER)
            return folder
    msg = f"{outdir} holds {_TRIES} reports of one second"
    raise FileExistsError(msg)


def forget_oldest(outdir: Path, *, process: int, keep: int) -> tuple[Path, ...]:
    """Remove the oldest reports of a process until no more than ``keep`` are there.

    Args:
        outdir: Where they lie.
        process: Only reports of this index are counted and removed, so that no process removes another's.
        keep: How many stay.

    Returns:
        What was removed.
    """
    own = sorted(
        (folder for folder in outdir.iterdir() if _is_own(folder, process)),
        key=lambda folder: (folder.stat().st_mtime_ns, folder.name),
    )
    removed: list[Path] = []
    for folder in own[: max(len(own) - keep, 0)]:
        for name in REPORT_FILES:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
        removed.append(folder)
    return tuple(removed)


def _is_own(folder: Path, process: int) -> bool:
    match = _NAME.fullmatch(folder.name)
    if match is None or int(match[1]) != process or folder.is_symlink() or not folder.is_dir():
        return False
    inside = [each.name for each in folder.iterdir()]
    return bool(inside) and set(inside) <= set(REPORT_FILES)
