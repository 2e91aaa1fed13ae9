"""The parts of a report of an out-of-memory failure."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, final

import jax

from jaxmem_callbacks._compat.backends import backend_exists
from jaxmem_callbacks.analysis.heap_map import HOLE, layout_of
from jaxmem_callbacks.environment.process import reported_environment
from jaxmem_callbacks.probes.device_memory import AllocatorProbe, DriverProbe
from jaxmem_callbacks.probes.live_arrays import HeapProbe
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arrays import HeapMap
from jaxmem_callbacks.records.oom import FailedProgram, Hole, MemoryLimit, OnTheCard, OomCause, OomReport
from jaxmem_callbacks.records.readings import Reading, Unavailable
from jaxmem_callbacks.records.secrets import scrubbed, without_secrets
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.recovery.failure import ADDRESS_SPACE, DATA, GROUP, Failing, Verdict, device_limits
from jaxmem_callbacks.recovery.reports.forecasts import Forecasts, forecast
from jaxmem_callbacks.recovery.reports.holders import Held, array_variables, gone, held_arrays, users_frames
from jaxmem_callbacks.recovery.reports.remedies import remedies
from jaxmem_callbacks.recovery.texts.explain import Room, cause_of, free_words, is_too_large, room_of
from jaxmem_callbacks.recovery.witness import Witnessed

_Result = TypeVar("_Result")


@final
class Parts:
    """What failed so far. Keeps texts only: an exception would keep the failed call's arrays alive."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def attempt(
        self, part: str, action: Callable[..., _Result], *args: Any, default: _Result, **kwargs: Any
    ) -> _Result:
        """Make one part, or take ``default`` and remember why."""
        try:
            return action(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever fails here, the user's exception goes on
            words = str(error).strip().splitlines() or ["without a word"]
            self.failures.append(f"{part}: {type(error).__name__}: {words[0]}")
            return default


_FRAMEWORKS = ("torch", "tensorflow", "cupy", "paddle", "mxnet", "numba.cuda", "cudf", "rmm", "warp", "taichi")


def on_the_cards(allocator: Sequence[Reading], probe: DriverProbe | None = None) -> tuple[OnTheCard, ...]:
    """What is taken on each device that the driver knows.

    Args:
        allocator: What the allocators say; their pools are JAX's part.
        probe: Asks the driver; by default of the local devices.
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
_FAR = 2**38  # a GPU's pools lie farther apart than any GPU is large
_NO_POOL = {
    "": "no device is known",
    "cpu": "a CPU's arrays lie among the rest of the process's memory, so what is between them is no hole to fill",
    "tpu": "a TPU tells no addresses",
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
    return (), reasons[0] if reasons else "live arrays lie side by side"


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
class Told:
    """A failure in words.

    Attributes:
        sentence: What asked for how much, what was free, and why it did not fit.
        cause: Why it did not fit.
        lacking_bytes: What was lacking at least, or None.
    """

    sentence: str
    cause: OomCause
    lacking_bytes: int | None


def told(verdict: Verdict, devices: Sequence[MemoryLimit]) -> Told:
    """What happened.

    Args:
        verdict: The failure.
        devices: What the allocators of the devices say now.
    """
    asked, what = _asked(verdict)
    room, words = _room(verdict, devices)
    cause, why = cause_of(asked, verdict.facts, room)
    facts = verdict.facts
    when = " while it was compiled" if facts.phase == "compile" else ""
    sentence = f"{_who(verdict)} {what}{when}; {words}: {why}."
    return Told(sentence=sentence, cause=cause, lacking_bytes=_lacking(asked, cause, room))


def _lacking(asked: int | None, cause: OomCause, room: Room) -> int | None:
    """What was lacking at least. Of a device that something else holds nobody says what it would have given."""
    free, growth = room.free_bytes, room.growth_bytes
    there = {
        "fragmentation": room.largest_bytes,
        "growth": max(free or 0, growth or 0),
        "refused": None,
    }.get(cause, room.left_bytes)
    return asked - there if asked is not None and there is not None and asked > there else None


def _who(verdict: Verdict) -> str:
    if verdict.failing is not None:
        return f"{'The' if verdict.failing.proved else 'Probably the'} program {verdict.failing.name}"
    return "An allocation outside of any program that is known"


def _asked(verdict: Verdict) -> tuple[int | None, str]:
    """What was asked for: by the text, else what the program takes besides its arguments."""
    facts, failing = verdict.facts, verdict.failing
    if facts.requested_bytes is not None:
        return facts.requested_bytes, f"asked for {format_bytes(facts.requested_bytes)}"
    if facts.used_bytes is not None and is_too_large(facts):
        return facts.used_bytes, f"needs {format_bytes(facts.used_bytes)}"
    own = None if failing is None else failing.own_bytes
    if own is not None:
        source = "in temporaries of its kernel library" if failing and failing.library_bytes else "by its compiler"
        return own, f"takes {format_bytes(own)} besides its arguments, {source}"
    return None, "asked for more memory than it got (how much is unknown, because the exception does not say)"


def _room(verdict: Verdict, devices: Sequence[MemoryLimit]) -> tuple[Room, str]:
    """What was there for the request, by the text, else by what says so now; and the words for it."""
    facts = verdict.facts
    if facts.limit_bytes is not None and is_too_large(facts):
        return Room(left_bytes=facts.limit_bytes), f"there are {format_bytes(facts.limit_bytes)}"
    said = room_of(facts)
    free = said.free_bytes if said.free_bytes is not None else facts.free_bytes
    if free is not None:
        return said, free_words(free, facts.largest_free_bytes, facts)
    if facts.largest_free_bytes is not None:
        return said, f"{format_bytes(facts.largest_free_bytes)} were free in one piece"
    if verdict.limits and (facts.platform in ("cpu", "host") or (facts.platform is None and not devices)):
        return _of_host(verdict.limits)
    if devices:
        tight = min(devices, key=lambda limit: limit.left_bytes)
        words = f"{format_bytes(tight.left_bytes)} of {format_bytes(tight.limit_bytes)} are free on {tight.name} now"
        return _of_device(tight, pooled=facts.platform == "gpu" or tight.name.startswith("gpu")), words
    return said, "what was free is unknown, because neither the exception nor the allocator says"


def _of_device(limit: MemoryLimit, *, pooled: bool) -> Room:
    """What an allocator has now. A GPU's pool that does not say what it holds may still grow, or not."""
    left, pool = limit.left_bytes, limit.pool_bytes
    if pool is None:
        whole = None if pooled else left
        growth = None if pooled else 0
    else:
        whole, growth = max(pool - limit.used_bytes, 0), max(limit.limit_bytes - pool, 0)
    return Room(
        free_bytes=whole, largest_bytes=limit.largest_free_bytes, growth_bytes=growth, left_bytes=left, later=True
    )


def _of_host(limits: Sequence[MemoryLimit]) -> tuple[Room, str]:
    """The bound with least left; of the process's own ones that is what refused."""
    own = [limit for limit in limits if limit.name in (ADDRESS_SPACE, DATA, GROUP)]
    tight = (own or limits)[0]
    name = tight.name if tight.name.startswith("the ") else f"the {tight.name}"
    words = f"{format_bytes(tight.left_bytes)} of the {format_bytes(tight.limit_bytes)} of {name} are left now"
    return Room(left_bytes=tight.left_bytes, later=True), words


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
_UNTOLD = Told(
    sentence="Memory ran out; how much was asked for is unknown, see below.", cause="unknown", lacking_bytes=None
)


def gather(
    verdict: Verdict, raised: BaseException, witnessed: Witnessed | None, seconds: float, parts: Parts
) -> OomReport:
    """Everything that can be told.

    Args:
        verdict: The failure.
        raised: The exception that goes on: the failure itself, or one that was raised from it.
        witnessed: What a monitor saw, or None where there is none.
        seconds: How long may be compiled for predictions.
        parts: Told of what fails.
    """
    began_s = time.time()
    failing = verdict.failing
    # Before any backend was started there are no devices and no arrays, and asking for them would start one.
    started = backend_exists()
    allocator, silent = parts.attempt("the allocators", _allocators, default=((), ())) if started else ((), ())
    platform = parts.attempt("the platform", _platform, default="") if started else ""
    holes, unmapped = parts.attempt("the addresses", holes_now, platform, default=((), "asking failed, see below"))
    devices = device_limits(allocator)
    story = parts.attempt("the sentence", told, verdict, devices, default=_UNTOLD)
    held = parts.attempt("the holders", _held, verdict, default=None) if started else Held()
    untold = Forecasts(told="Predicting failed, see below.")
    left = _left(verdict.limits)
    forecasts = parts.attempt(
        "the predictions", forecast, failing, seconds, left, lacking_bytes=story.lacking_bytes, default=untold
    )
    best = parts.attempt(
        "the remedies",
        remedies,
        failing,
        forecasts,
        held.holders if held else (),
        cause=story.cause,
        lacking_bytes=story.lacking_bytes,
        platform=platform,
        facts=verdict.facts,
        device_count=parts.attempt("the devices", jax.local_device_count, default=1) if started else 1,
        default=(),
    )
    known = _known_at_once(verdict, raised, witnessed, story, parts)
    report = replace(
        known,
        time_s=began_s,
        limits=(*devices, *verdict.limits),
        program=parts.attempt("the program", _program, failing, forecasts, default=None),
        holders=held.holders if held else (),
        modules=held.modules if held else (),
        live_bytes=held.bytes if held else None,
        live_count=held.count if held else None,
        left_out_count=held.left_out_count if held else 0,
        left_out_bytes=held.left_out_bytes if held else 0,
        failed_bytes=held.failed_bytes if held else 0,
        on_the_cards=parts.attempt("the driver", on_the_cards, allocator, default=()) if platform == "gpu" else (),
        allocator=allocator,
        no_allocator=silent,
        holes=holes,
        unmapped=unmapped,
        devices=parts.attempt("the devices", _devices, default={}) if started else {},
        remedies=best,
        planning=forecasts.told,
    )
    return scrubbed(report)


def _known_at_once(
    verdict: Verdict, raised: BaseException, witnessed: Witnessed | None, story: Told, parts: Parts
) -> OomReport:
    """What takes no look at devices: the exception, the monitor's words and the surroundings."""
    error, seen = verdict.error, witnessed or Witnessed()
    return OomReport(
        sentence=story.sentence,
        cause=story.cause,
        lacking_bytes=story.lacking_bytes,
        evidence=verdict.evidence,
        time_s=0.0,
        process=parts.attempt("the process", process_words, default=f"pid {os.getpid()}"),
        error_type=_type_of(error) if raised is error else f"{_type_of(raised)} from {_type_of(error)}",
        error_text=_shortened(without_secrets(str(error))),
        where=parts.attempt("the lines of code", _where, error, default=()),
        facts=verdict.facts,
        step=seen.step,
        readings=tuple(seen.readings),
        events=tuple(seen.events),
        unwatched="" if witnessed else f"no monitor was given; write {advise('guard.call', arguments='monitor')}",
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


def _held(verdict: Verdict) -> Held:
    failing = verdict.failing
    variables = array_variables(verdict.error)
    return held_arrays(failing.leaves if failing else (), variables, are_the_calls=bool(failing and failing.is_call))


def _program(failing: Failing | None, forecasts: Forecasts) -> FailedProgram | None:
    if failing is None:
        return None
    paths, size, fate = gone(
        failing.leaves, failing.step.donated if failing.step else (), are_the_calls=failing.is_call
    )
    peak = forecasts.plain.peak if forecasts.plain is not None else None
    return FailedProgram(
        name=failing.name,
        known_by=failing.known_by,
        memory=failing.memory,
        unavailable=failing.unavailable,
        peak=peak,
        no_peak=None if peak else f"it takes a compile of its own. {forecasts.told.rstrip('.')}",
        gone=paths,
        gone_bytes=size,
        fate=fate if failing.step is not None else "",
    )


def _allocators() -> tuple[tuple[Reading, ...], tuple[Unavailable, ...]]:
    seen = AllocatorProbe().read(-1)
    return (
        tuple(each for each in seen if isinstance(each, Reading)),
        tuple(each for each in seen if isinstance(each, Unavailable)),
    )


def _left(limits: Sequence[MemoryLimit]) -> int | None:
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
