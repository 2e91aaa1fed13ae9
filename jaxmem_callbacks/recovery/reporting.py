"""Reports of out-of-memory failures: when one is written, what is in it, and into which folder."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, final

import jax

import jaxmem_callbacks
from jaxmem_callbacks._compat.backends import backend_exists
from jaxmem_callbacks.analysis.heap_map import HOLE, layout_of
from jaxmem_callbacks.environment.process import reported_environment
from jaxmem_callbacks.probes.device_memory import AllocatorProbe, DriverProbe
from jaxmem_callbacks.probes.live_arrays import HeapProbe
from jaxmem_callbacks.probes.protocol import device_label
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arrays import HeapMap
from jaxmem_callbacks.records.errors import in_a_line, printable
from jaxmem_callbacks.records.files import PRIVATE_FOLDER, write_file
from jaxmem_callbacks.records.oom import FailedProgram, Hole, MemoryLimit, OnTheCard, OomCause, OomReport, Remedy
from jaxmem_callbacks.records.page import page_html
from jaxmem_callbacks.records.runs import MemoryEvent, Reading, Unavailable
from jaxmem_callbacks.records.secrets import scrubbed, without_secrets
from jaxmem_callbacks.records.terminal import print_line
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.recovery.failure import (
    ADDRESS_SPACE,
    DATA,
    GROUP,
    FailingProgram,
    OomFailure,
    device_limits,
    oom_failure,
)
from jaxmem_callbacks.recovery.monitor_snapshot import CallCounts, Monitored, MonitorSnapshot
from jaxmem_callbacks.recovery.reports.live_buffers import (
    LiveBuffers,
    array_variables,
    deleted_arguments,
    find_live_buffers,
    users_frames,
)
from jaxmem_callbacks.recovery.reports.remedies import Forecasts, forecast, remedies
from jaxmem_callbacks.recovery.texts.explain import (
    AvailableMemory,
    available_memory,
    cause_of,
    free_words,
    is_too_large,
)
from jaxmem_callbacks.writers.oom_report import oom_markdown, oom_model

_Result = TypeVar("_Result")


@final
class ReportParts:
    """Makes the parts of a report, each by itself. Keeps only texts of what failed: an exception would keep arrays alive."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def attempt(
        self, part: str, action: Callable[..., _Result], *args: Any, default: _Result, **kwargs: Any
    ) -> _Result:
        """Make one part, or take ``default`` and remember why."""
        try:
            return action(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever fails here, the user's exception goes on
            self.failures.append(f"{part}: {in_a_line(error)}")
            return default


_FRAMEWORKS = ("torch", "tensorflow", "cupy", "paddle", "mxnet", "numba.cuda", "cudf", "rmm", "warp", "taichi")


def on_the_cards(allocator: Sequence[Reading], probe: DriverProbe | None = None) -> tuple[OnTheCard, ...]:
    """The memory in use on each device that the driver knows.

    Args:
        allocator: Readings of the allocators; their pools are JAX's part.
        probe: Reads from the driver; by default for the local devices.
    """
    probe = probe or DriverProbe()
    pools = {each.device: each.pool_bytes for each in allocator}
    used = [each for each in probe.read(-1) if isinstance(each, Reading) and each.device_used_bytes is not None]
    processes = probe.processes() if used else {}
    frameworks = tuple(name for name in _FRAMEWORKS if name in sys.modules)
    return tuple(
        OnTheCard(
            device=each.device,
            used_bytes=each.device_used_bytes or 0,
            pool_bytes=pools.get(each.device),
            own_bytes=dict(processes.get(each.device, ())).get(os.getpid()),
            others=tuple((pid, size) for pid, size in processes.get(each.device, ()) if pid != os.getpid()),
            frameworks=frameworks,
        )
        for each in used
    )


_LISTED = 8
_FAR = 2**38  # a GPU's pools are farther apart than any GPU is large
_NO_POOL = {
    "": "no device is known",
    "cpu": "a CPU's arrays are among the rest of the process's memory, so what is between them is no hole to fill",
    "tpu": "a TPU reports no addresses",
}


def holes_now(platform: str) -> tuple[tuple[Hole, ...], str]:
    """The largest holes of this process's devices, and why there are none."""
    if platform != "gpu":
        return (), _NO_POOL.get(platform, f"nothing is known of the addresses of {platform}")
    return largest_holes(HeapProbe().read(-1))


def largest_holes(seen: Sequence[HeapMap | Unavailable]) -> tuple[tuple[Hole, ...], str]:
    """The largest holes, the largest first; and why there are none, or an empty text.

    Args:
        seen: A map a device, or why there is none.
    """
    found = sorted((hole for each in seen if isinstance(each, HeapMap) for hole in _holes(each)), key=_size)
    if found:
        return tuple(found[:_LISTED]), ""
    reasons = [each.reason for each in seen if isinstance(each, Unavailable)]
    return (), reasons[0] if reasons else "live arrays are side by side"


def _holes(heap: HeapMap) -> Iterator[Hole]:
    layout = layout_of(heap.buffers, most_groups=len(heap.buffers), apart_bytes=_FAR)
    for region in layout.regions:
        for (before, hole), (_, behind) in pairwise(pairwise(region)):
            if hole.group == HOLE:
                yield Hole(
                    device=heap.device,
                    bytes=hole.end - hole.begin,
                    below=layout.groups[before.group].label,
                    above=layout.groups[behind.group].label,
                )


def _size(hole: Hole) -> int:
    return -hole.bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A failure in a sentence.

    Attributes:
        sentence: The request, the free memory, and why it did not fit.
        cause: Why it did not fit.
        lacking_bytes: What was lacking at least, or None.
    """

    sentence: str
    cause: OomCause
    lacking_bytes: int | None


def summarize(failure: OomFailure, devices: Sequence[MemoryLimit]) -> Summary:
    """The summary of a failure.

    Args:
        failure: The failure.
        devices: The limits of the devices' allocators now.
    """
    requested, what = _request(failure)
    available, text = _room(failure, devices)
    cause, why = cause_of(requested, failure.facts, available)
    facts = failure.facts
    when = " while it was compiled" if facts.phase == "compile" else ""
    sentence = f"{_subject(failure)} {what}{when}; {text}: {why}."
    return Summary(sentence=sentence, cause=cause, lacking_bytes=_lacking(requested, cause, available))


def _lacking(requested: int | None, cause: OomCause, available: AvailableMemory) -> int | None:
    """What was lacking at least. Unknown for a device that something else holds."""
    free, growth = available.free_bytes, available.growth_bytes
    there = {
        "fragmentation": available.largest_bytes,
        "growth": max(free or 0, growth or 0),
        "refused": None,
    }.get(cause, available.left_bytes)
    return requested - there if requested is not None and there is not None and requested > there else None


def _subject(failure: OomFailure) -> str:
    if failure.program is not None:
        return f"{'The' if failure.program.proved else 'Probably the'} program {failure.program.name}"
    return "An allocation outside of any program that is known"


def _request(failure: OomFailure) -> tuple[int | None, str]:
    """What was asked for: by the text, else what the program takes besides its arguments."""
    facts, program = failure.facts, failure.program
    if facts.requested_bytes is not None:
        return facts.requested_bytes, f"asked for {format_bytes(facts.requested_bytes)}"
    if facts.used_bytes is not None and is_too_large(facts):
        return facts.used_bytes, f"needs {format_bytes(facts.used_bytes)}"
    own = None if program is None else program.own_bytes
    if own is not None:
        source = "in temporaries of its kernel library" if program and program.library_bytes else "by its compiler"
        return own, f"takes {format_bytes(own)} besides its arguments, {source}"
    return None, "asked for more memory than it got (how much is unknown, because the exception does not state it)"


def _room(failure: OomFailure, devices: Sequence[MemoryLimit]) -> tuple[AvailableMemory, str]:
    """What was there for the request, by the text, else as it is now; and the words for it."""
    facts = failure.facts
    if facts.limit_bytes is not None and is_too_large(facts):
        return AvailableMemory(left_bytes=facts.limit_bytes), f"there are {format_bytes(facts.limit_bytes)}"
    stated = available_memory(facts)
    free = stated.free_bytes if stated.free_bytes is not None else facts.free_bytes
    if free is not None:
        return stated, free_words(free, facts.largest_free_bytes, facts)
    if facts.largest_free_bytes is not None:
        return stated, f"{format_bytes(facts.largest_free_bytes)} were free in one piece"
    if failure.limits and (facts.platform in ("cpu", "host") or (facts.platform is None and not devices)):
        return _of_host(failure.limits)
    if devices:
        tight = min(devices, key=lambda limit: limit.left_bytes)
        text = f"{format_bytes(tight.left_bytes)} of {format_bytes(tight.limit_bytes)} are free on {tight.name} now"
        return _of_device(tight, pooled=facts.platform == "gpu" or tight.name.startswith("gpu")), text
    return stated, "what was free is unknown, because neither the exception nor the allocator states it"


def _of_device(limit: MemoryLimit, *, pooled: bool) -> AvailableMemory:
    """What an allocator has now. A GPU's pool whose size is unknown may still grow, or not."""
    left, pool = limit.left_bytes, limit.pool_bytes
    if pool is None:
        whole = None if pooled else left
        growth = None if pooled else 0
    else:
        whole, growth = max(pool - limit.used_bytes, 0), max(limit.limit_bytes - pool, 0)
    return AvailableMemory(
        free_bytes=whole, largest_bytes=limit.largest_free_bytes, growth_bytes=growth, left_bytes=left, later=True
    )


def _of_host(limits: Sequence[MemoryLimit]) -> tuple[AvailableMemory, str]:
    """The bound with least left; of the process's own ones that is what refused."""
    own = [limit for limit in limits if limit.name in (ADDRESS_SPACE, DATA, GROUP)]
    tight = (own or limits)[0]
    name = tight.name if tight.name.startswith("the ") else f"the {tight.name}"
    text = f"{format_bytes(tight.left_bytes)} of the {format_bytes(tight.limit_bytes)} of {name} are left now"
    return AvailableMemory(left_bytes=tight.left_bytes, later=True), text


_PACKAGES = (
    "jaxmem_callbacks",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "numpy",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
)
_TEXT = 6000  # of the exception's; a dump of an allocator can be megabytes
_FRAMES = 8
_NO_SUMMARY = Summary(
    sentence="Memory ran out; how much was asked for is unknown, see below.", cause="unknown", lacking_bytes=None
)


def gather(
    failure: OomFailure, raised: BaseException, snapshot: MonitorSnapshot | None, seconds: float, parts: ReportParts
) -> OomReport:
    """The whole report.

    Args:
        failure: The failure.
        raised: The exception that goes on: the failure itself, or one that was raised from it.
        snapshot: What a monitor saw, or None where there is none.
        seconds: How long may be compiled for predictions.
        parts: Collects what fails.
    """
    began_s = time.time()
    program = failure.program
    # Before any backend was started there are no devices and no arrays, and asking for them would start one.
    started = backend_exists()
    allocator, silent = parts.attempt("the allocators", _allocators, default=((), ())) if started else ((), ())
    platform = parts.attempt("the platform", _platform, default="") if started else ""
    holes, unmapped = parts.attempt("the addresses", holes_now, platform, default=((), "asking failed, see below"))
    devices = device_limits(allocator)
    summary = parts.attempt("the sentence", summarize, failure, devices, default=_NO_SUMMARY)
    buffers = parts.attempt("the holders", _live_buffers, failure, default=None) if started else LiveBuffers()
    no_forecasts = Forecasts(how="Predicting failed, see below.")
    left = _bytes_left(failure.limits)
    print_line(f"out of memory: {summary.sentence}")  # at once: what follows may take a minute
    forecasts = parts.attempt(
        "the predictions", forecast, program, seconds, left, lacking_bytes=summary.lacking_bytes, default=no_forecasts
    )
    best = parts.attempt(
        "the remedies",
        remedies,
        program,
        forecasts,
        buffers.holders if buffers else (),
        cause=summary.cause,
        lacking_bytes=summary.lacking_bytes,
        platform=platform,
        facts=failure.facts,
        device_count=parts.attempt("the devices", jax.local_device_count, default=1) if started else 1,
        default=(),
    )
    known = _known_at_once(failure, raised, snapshot, summary, parts)
    report = replace(
        known,
        time_s=began_s,
        limits=(*devices, *failure.limits),
        program=parts.attempt("the program", _program, program, forecasts, default=None),
        holders=buffers.holders if buffers else (),
        modules=buffers.modules if buffers else (),
        live_bytes=buffers.bytes if buffers else None,
        live_count=buffers.count if buffers else None,
        left_out_count=buffers.left_out_count if buffers else 0,
        left_out_bytes=buffers.left_out_bytes if buffers else 0,
        failed_bytes=buffers.failed_bytes if buffers else 0,
        on_the_cards=parts.attempt("the driver", on_the_cards, allocator, default=()) if platform == "gpu" else (),
        allocator=allocator,
        no_allocator=silent,
        holes=holes,
        unmapped=unmapped,
        devices=parts.attempt("the devices", _devices, default={}) if started else {},
        remedies=best,
        planning=forecasts.how,
    )
    return scrubbed(report)


def _known_at_once(
    failure: OomFailure, raised: BaseException, snapshot: MonitorSnapshot | None, summary: Summary, parts: ReportParts
) -> OomReport:
    """What takes no look at devices: the exception, the monitor's words and the surroundings."""
    error, seen = failure.error, snapshot or MonitorSnapshot()
    return OomReport(
        sentence=summary.sentence,
        cause=summary.cause,
        lacking_bytes=summary.lacking_bytes,
        evidence=failure.evidence,
        time_s=0.0,
        process=parts.attempt("the process", process_words, default=f"pid {os.getpid()}"),
        error_type=_type_of(error) if raised is error else f"{_type_of(raised)} from {_type_of(error)}",
        error_text=_shortened(without_secrets(str(error))),
        where=parts.attempt("the lines of code", _where, error, default=()),
        facts=failure.facts,
        step=seen.step,
        readings=tuple(seen.readings),
        events=tuple(seen.events),
        unwatched="" if snapshot else f"no monitor was given; write {advise('guard.call', arguments='monitor')}",
        versions=parts.attempt("the versions", _versions, default={}),
        environment=parts.attempt("the environment", reported_environment, os.environ, default={}),
    )


def process_index() -> int:
    """This process's number in the run; 0 where no backend has started, which asking would start."""
    return jax.process_index() if backend_exists() else 0


def process_words() -> str:
    """``process 0 of 4, pid 4242``."""
    count = jax.process_count() if backend_exists() else 1
    return f"process {process_index()} of {count}, pid {os.getpid()}"


def _live_buffers(failure: OomFailure) -> LiveBuffers:
    program = failure.program
    variables = array_variables(failure.error)
    return find_live_buffers(
        program.leaves if program else (), variables, are_the_calls=bool(program and program.is_call)
    )


def _program(program: FailingProgram | None, forecasts: Forecasts) -> FailedProgram | None:
    if program is None:
        return None
    paths, size, fate = deleted_arguments(
        program.leaves, program.step.donated if program.step else (), are_the_calls=program.is_call
    )
    peak = forecasts.plain.peak if forecasts.plain is not None else None
    return FailedProgram(
        name=program.name,
        known_by=program.known_by,
        memory=program.memory,
        unavailable=program.unavailable,
        peak=peak,
        no_peak=None if peak else f"it takes a compile of its own. {forecasts.how.rstrip('.')}",
        gone=paths,
        gone_bytes=size,
        fate=fate if program.step is not None else "",
    )


def _allocators() -> tuple[tuple[Reading, ...], tuple[Unavailable, ...]]:
    seen = AllocatorProbe().read(-1)
    return (
        tuple(each for each in seen if isinstance(each, Reading)),
        tuple(each for each in seen if isinstance(each, Unavailable)),
    )


def _bytes_left(limits: Sequence[MemoryLimit]) -> int | None:
    """What the process's own bounds leave it."""
    return min((limit.left_bytes for limit in limits if limit.name in (ADDRESS_SPACE, DATA)), default=None)


def _platform() -> str:
    return jax.local_devices()[0].platform


def _devices() -> dict[str, str | int]:
    first = jax.local_devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "local": jax.local_device_count(),
        "all": jax.device_count(),
    }


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _where(error: BaseException) -> tuple[str, ...]:
    """The lines of the user's code, outermost first: file, line and function, no source text."""
    lines: dict[str, None] = {}
    trace = error.__traceback__
    own = {id(frame) for frame in users_frames(error)}
    while trace is not None:
        code = trace.tb_frame.f_code
        if id(trace.tb_frame) in own:
            lines[f"{Path(code.co_filename).name}:{trace.tb_lineno} ({code.co_name})"] = None
        trace = trace.tb_next
    return tuple(lines)[-_FRAMES:]


def _type_of(error: Any) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _shortened(text: str) -> str:
    if len(text) <= _TEXT:
        return text
    half = _TEXT // 2
    return f"{text[:half]}\n[... {len(text) - _TEXT:,} characters left out ...]\n{text[-half:]}"


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


def remove_oldest(outdir: Path, *, process: int, keep: int) -> tuple[Path, ...]:
    """Remove the oldest reports of a process until no more than ``keep`` are there.

    Args:
        outdir: Where they are.
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
_reported_before: dict[int, weakref.ref[BaseException]] = {}
_MOST = 64
_REPORTED_MARK = "_jaxmem_reported"


def is_first(error: BaseException) -> bool:
    """Whether this is the first call for this very exception."""
    with _lock:
        try:
            mark = weakref.ref(error)
        except TypeError:
            # Python's own, such as MemoryError, of which the next one often is in the same place and has the same words.
            first = _REPORTED_MARK not in vars(error)
            vars(error)[_REPORTED_MARK] = True
            return first
        known = _reported_before.get(id(error))
        if known is not None and known() is error:
            return False
        while len(_reported_before) >= _MOST:
            del _reported_before[next(iter(_reported_before))]
        _reported_before[id(error)] = mark
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
    error: BaseException, settings: ReportSettings, monitor: Monitored | None = None, before: CallCounts | None = None
) -> Path | None:
    """Write a report of an exception, where it is an out-of-memory failure that was not reported yet.

    Args:
        error: The exception.
        settings: Where and how.
        monitor: The monitor of the run, or None.
        before: The calls of steps before the code that failed; None where nobody counted.

    Returns:
        The folder, or None where nothing was written.
    """
    if getattr(_busy, "on", False):  # a guard in code that is traced for the report
        return None
    _busy.on = True
    try:
        return _reported(error, settings, monitor, before)
    except BaseException as fault:  # noqa: BLE001 - the user's exception goes on, Ctrl-C in the middle of a report or not
        print_line(f"the out-of-memory report could not be made: {_words(fault)}")
        return None
    finally:
        _busy.on = False


def report_last(monitor: Monitored) -> Path | None:
    """At the end of the interpreter: report the exception that ended it. Nothing is compiled, since no thread can begin.

    Args:
        monitor: The monitor of a run that it has not seen the end of.
    """
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if not isinstance(error, BaseException) or hasattr(sys, "ps1"):  # a prompt goes on after its exceptions
        return None
    return report_oom(error, ReportSettings(plan_seconds=0), monitor)


def _reported(
    error: BaseException, settings: ReportSettings, monitor: Monitored | None, before: CallCounts | None
) -> Path | None:
    failure = oom_failure(error, before)
    if failure is None or not is_first(failure.error):
        return None
    parts = ReportParts()
    snapshot = (
        parts.attempt("the monitor's last words", monitor.witnessed, default=MonitorSnapshot()) if monitor else None
    )
    report = gather(failure, error, snapshot, settings.plan_seconds, parts)
    del failure
    index, outdir = process_index(), _outdir(settings, snapshot)
    folder, written = None, ""
    try:
        folder = new_folder(outdir, process=index, pid=os.getpid(), time_s=time.time())
    except OSError as fault:
        print_line(f"No report was written: {_words(fault)}")
    else:
        written = _write(folder, report, snapshot, parts)
        parts.attempt("removing old reports", remove_oldest, outdir, process=index, keep=settings.keep, default=())
        if report.remedies:
            print_line("try first ({}): {}".format(*_best_words(report.remedies[0])))
        print_line(f"out of memory, explained in {folder / written}" if written else _unwritten(folder, parts))
    there = folder if written else None
    if monitor is not None:
        parts.attempt("the monitor's event", lambda: monitor.tell(_event(report, there)), default=None)
    return there


def _event(report: OomReport, folder: Path | None) -> MemoryEvent:
    """The failure as an event of the run, which the run's page and those of other processes show.

    Args:
        report: What is known of it.
        folder: Where the report is, or None where there is none.
    """
    where = "" if folder is None else f" The report is in {folder}."
    return MemoryEvent(
        kind="out_of_memory",
        step=report.step or 0,
        time_s=report.time_s,
        device=device_label(jax.local_devices()[0]) if backend_exists() else "host",
        message=f"{report.sentence}{where}",
        action="{1} ({0})".format(*_best_words(report.remedies[0])) if report.remedies else "",
        figures={"lacking_bytes": report.lacking_bytes} if report.lacking_bytes else {},
    )


def _write(folder: Path, report: OomReport, snapshot: MonitorSnapshot | None, parts: ReportParts) -> str:
    """Write the files, each by itself; the name of the best one, or an empty text."""
    seen = snapshot or MonitorSnapshot()
    version = jaxmem_callbacks.__version__

    def page(known: OomReport) -> str:
        model = oom_model(
            known, version=version, history=seen.history, events=seen.events, limit_bytes=seen.limit_bytes
        )
        return page_html(model)

    writing: tuple[tuple[str, Callable[[OomReport], str]], ...] = (
        ("report.html", page),
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


def _outdir(settings: ReportSettings, snapshot: MonitorSnapshot | None) -> Path:
    if settings.outdir is not None:
        return settings.outdir
    if snapshot is not None and snapshot.logdir is not None:
        run = snapshot.logdir.absolute()
        return run.with_name(f"{run.name}-oom")
    return Path("oom")


def _unwritten(folder: Path, parts: ReportParts) -> str:
    why = parts.failures[-1] if parts.failures else "for an unknown reason"
    return f"No report was written to {folder}: {why}"


def _best_words(best: Remedy) -> tuple[str, str]:
    """Whether the best remedy was compiled; and the remedy in a line, with the first of its lines to paste."""
    saves = "" if best.saves_bytes is None else f", which saves {format_bytes(best.saves_bytes)}"
    how = "compiled" if best.compiled else "not compiled"
    line = f": {best.lines[0].strip()}" if best.lines else ""
    return how, f"{best.what.rstrip('.')}{saves}{line}"


def _words(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {' '.join(str(fault).split()) or 'without a word'}"
