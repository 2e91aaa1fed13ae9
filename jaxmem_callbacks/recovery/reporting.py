"""Reports of out-of-memory failures: when one is written, and into which folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jaxmem_callbacks
from jaxmem_callbacks.records.files import PRIVATE_FOLDER, write_file
from jaxmem_callbacks.records.oom import OomReport
from jaxmem_callbacks.records.secrets import scrubbed
from jaxmem_callbacks.records.terminal import printable, say
from jaxmem_callbacks.recovery.failure import judge
from jaxmem_callbacks.recovery.reports.gathering import Parts, gather, process_index
from jaxmem_callbacks.recovery.witness import CallsBefore, Witness, Witnessed
from jaxmem_callbacks.writers.oom_report import oom_html, oom_markdown
from jaxmem_callbacks.writers.report import chart_html

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


_lock = threading.Lock()
_told: dict[int, weakref.ref[BaseException]] = {}
_MOST = 64
_MARK = "_jaxmem_told"


def is_first(error: BaseException) -> bool:
    """Whether nobody asked about this very exception before; from now on somebody has."""
    with _lock:
        try:
            mark = weakref.ref(error)
        except TypeError:
            # Python's own, such as MemoryError, of which the next one often lies in the same place and has the same words.
            first = _MARK not in vars(error)
            vars(error)[_MARK] = True
            return first
        known = _told.get(id(error))
        if known is not None and known() is error:
            return False
        while len(_told) >= _MOST:
            del _told[next(iter(_told))]
        _told[id(error)] = mark
        return True


_busy = threading.local()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportSettings:
    """How reports are written.

    Attributes:
        outdir: Where folders are made; None: beside the run's folder, else ``oom`` in the working directory.
        plan_seconds: How long may be compiled for predictions; 0 compiles nothing.
        keep: Reports of one process that stay.
    """

    outdir: Path | None = None
    plan_seconds: float = 60.0
    keep: int = 10


def report_oom(
    error: BaseException, settings: ReportSettings, witness: Witness | None = None, before: CallsBefore | None = None
) -> Path | None:
    """Write a report of an exception, where it is an out-of-memory failure that was not reported yet.

    Args:
        error: What passes.
        settings: Where and how.
        witness: Whoever watched the run.
        before: The calls of steps before the code that failed; None where nobody counted.

    Returns:
        The folder, or None where nothing was written.
    """
    if getattr(_busy, "on", False):  # a guard in code that is traced for the report
        return None
    _busy.on = True
    try:
        return _reported(error, settings, witness, before)
    except BaseException as fault:  # noqa: BLE001 - the user's exception goes on, Ctrl-C in the middle of a report or not
        say(f"the out-of-memory report could not be made: {_words(fault)}")
        return None
    finally:
        _busy.on = False


def report_last(witness: Witness) -> Path | None:
    """At the end of the interpreter: report the exception that ended it. Nothing is compiled, since no thread can begin.

    Args:
        witness: Whoever watched the run, and was not told of its end.
    """
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if not isinstance(error, BaseException) or hasattr(sys, "ps1"):  # a prompt goes on after its exceptions
        return None
    return report_oom(error, ReportSettings(plan_seconds=0), witness)


def _reported(
    error: BaseException, settings: ReportSettings, witness: Witness | None, before: CallsBefore | None
) -> Path | None:
    verdict = judge(error, before)
    if verdict is None or not is_first(verdict.error):
        return None
    parts = Parts()
    witnessed = parts.attempt("the monitor's last words", witness.witnessed, default=Witnessed()) if witness else None
    report = gather(verdict, error, witnessed, settings.plan_seconds, parts)
    del verdict
    index, outdir = process_index(), _outdir(settings, witnessed)
    try:
        folder = new_folder(outdir, process=index, pid=os.getpid(), time_s=time.time())
    except OSError as fault:
        say(f"out of memory: {report.sentence} No report was written: {_words(fault)}")
        return None
    written = _write(folder, report, witnessed, parts)
    parts.attempt("removing old reports", forget_oldest, outdir, process=index, keep=settings.keep, default=())
    say(f"out of memory, explained in {folder / written}" if written else _unwritten(folder, report, parts))
    return folder if written else None


def _write(folder: Path, report: OomReport, witnessed: Witnessed | None, parts: Parts) -> str:
    """Write the files, each by itself; the name of the best one, or an empty text."""
    seen = witnessed or Witnessed()
    chart = parts.attempt(
        "the figure", chart_html, seen.history, seen.events, limit_bytes=seen.limit_bytes, needs=seen.needs, default=""
    )
    version = jaxmem_callbacks.__version__
    writing: tuple[tuple[str, Callable[[OomReport], str]], ...] = (
        ("report.html", lambda known: oom_html(known, chart=chart, version=version)),
        ("facts.json", lambda known: json.dumps(dataclasses.asdict(known), indent=1)),
        ("report.md", lambda known: printable(oom_markdown(known))),  # the last: it names every other that failed
    )
    done: list[str] = []
    for name, render in writing:
        known = scrubbed(dataclasses.replace(report, failures=tuple(parts.failures)))
        if parts.attempt(name, _write_one, folder / name, render, known, default=False):
            done.append(name)
    if not done:
        with contextlib.suppress(OSError):
            for name, _ in writing:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()
    return next((name for name in ("report.md", "report.html", "facts.json") if name in done), "")


def _write_one(path: Path, render: Callable[[OomReport], str], report: OomReport) -> bool:
    write_file(path, render(report), private=True)
    return True


def _outdir(settings: ReportSettings, witnessed: Witnessed | None) -> Path:
    if settings.outdir is not None:
        return settings.outdir
    if witnessed is not None and witnessed.logdir is not None:
        run = witnessed.logdir.absolute()
        return run.with_name(f"{run.name}-oom")
    return Path("oom")


def _unwritten(folder: Path, report: OomReport, parts: Parts) -> str:
    why = parts.failures[-1] if parts.failures else "for a reason that nobody told"
    return f"out of memory: {report.sentence} No report was written to {folder}: {why}"


def _words(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {' '.join(str(fault).split()) or 'without a word'}"
