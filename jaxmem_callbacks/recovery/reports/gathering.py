"""An out-of-memory failure enters, its `OomReport` leaves: every part gathered by itself, every text without secrets."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxmem_callbacks._compat.backends import backend_exists
from jaxmem_callbacks.environment.variables import reported_environment
from jaxmem_callbacks.probes.allocator import AllocatorProbe
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.oom import FailedProgram, MemoryLimit, OomReport
from jaxmem_callbacks.records.readings import Reading, Unavailable
from jaxmem_callbacks.records.secrets import scrubbed, without_secrets
from jaxmem_callbacks.recovery.reports.elsewhere import on_the_cards
from jaxmem_callbacks.recovery.reports.forecasts import Forecasts, forecast
from jaxmem_callbacks.recovery.reports.holders import Held, gone, held_arrays
from jaxmem_callbacks.recovery.reports.holes import holes_now
from jaxmem_callbacks.recovery.reports.parts import Parts
from jaxmem_callbacks.recovery.reports.remedies import remedies
from jaxmem_callbacks.recovery.reports.sentence import Told, told
from jaxmem_callbacks.recovery.reports.variables import array_variables, users_frames
from jaxmem_callbacks.recovery.verdicts.failing import Failing
from jaxmem_callbacks.recovery.verdicts.judging import Verdict
from jaxmem_callbacks.recovery.verdicts.limits import ADDRESS_SPACE, DATA, device_limits
from jaxmem_callbacks.recovery.witness import Witnessed

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
