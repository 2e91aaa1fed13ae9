"""An exception passes; where it is an out-of-memory failure, a folder with its report is written and one line says where.

Nothing here raises: what fails is told on stderr in the same one line. The exception is neither caught nor changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jaxmem_callbacks
from jaxmem_callbacks.records.files import write_file
from jaxmem_callbacks.records.oom import OomReport
from jaxmem_callbacks.records.secrets import scrubbed
from jaxmem_callbacks.records.terminal import printable, say
from jaxmem_callbacks.recovery.calls import CallsBefore
from jaxmem_callbacks.recovery.reports.folders import forget_oldest, new_folder
from jaxmem_callbacks.recovery.reports.gathering import gather, process_index
from jaxmem_callbacks.recovery.reports.parts import Parts
from jaxmem_callbacks.recovery.reports.told import is_first
from jaxmem_callbacks.recovery.verdicts.judging import judge
from jaxmem_callbacks.recovery.witness import Witness, Witnessed
from jaxmem_callbacks.writers.oom_report import oom_html, oom_markdown
from jaxmem_callbacks.writers.report import chart_html

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
