"""Whether an exception is a failure for want of memory: the exception enters, a `Verdict` with its evidence leaves, or None.

Text decides where it says so. Kernel libraries on the CPU hide it as an INTERNAL error: then limits decide, by what the
program takes and what is left. Errors of this library are answers about other hardware or other words: no memory ran out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax

from jaxmem_callbacks.records.errors import JaxmemError
from jaxmem_callbacks.records.oom import MemoryLimit, OomFacts
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.recovery.calls import CallsBefore
from jaxmem_callbacks.recovery.texts.parsing import read_failure
from jaxmem_callbacks.recovery.verdicts.failing import Failing, failing_program, too_large
from jaxmem_callbacks.recovery.verdicts.limits import MACHINE, host_limits

_CAUSES = 10  # `raise ... from ...` again and again
# JAX's own is a RuntimeError; of other types a name in passing is no proof.
_OF_RUNTIMES = (RuntimeError, MemoryError, OSError)
# An error of the user's own function, which the runtime wraps; it says itself what it is.
_OF_A_CALLBACK = ("CpuCallback error", "Traceback (most recent call last)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """An exception that is an out-of-memory failure. Holds it, and the call that failed: not to be kept.

    Attributes:
        error: The exception itself, or the one that it was raised from.
        facts: What its text says.
        evidence: Why it is taken for one, in words.
        failing: The program, or None where nothing tells.
        limits: Bounds of host memory now.
    """

    error: BaseException
    facts: OomFacts
    evidence: str
    failing: Failing | None
    limits: tuple[MemoryLimit, ...] = ()


def judge(error: BaseException, before: CallsBefore | None = None) -> Verdict | None:
    """Whether an exception, or what it was explicitly raised from, is an out-of-memory failure.

    Args:
        error: What passes.
        before: The calls of steps before the code that failed; None where nobody counted.
    """
    if not isinstance(error, Exception):
        return None
    for each in _chain(error):
        if isinstance(each, JaxmemError) or not isinstance(each, Exception):
            return None
        found = _by_text(each, before) or _by_limits(each, before)
        if found is not None:
            return found
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, members of a group, and what it was explicitly raised from."""
    waiting, left = [error], _CAUSES
    while waiting and left:
        current, left = waiting.pop(0), left - 1
        yield current
        waiting += current.exceptions[:_CAUSES] if isinstance(current, BaseExceptionGroup) else ()
        waiting += [current.__cause__] if current.__cause__ is not None else []


def _by_text(error: Exception, before: CallsBefore | None) -> Verdict | None:
    # The text alone: an error that came while another was handled is not that one's failure.
    facts, surely = read_failure(f"{type(error).__name__}: {error}")
    evidence = "its text says so"
    if facts is not None and not surely and not _is_of_a_runtime(error):
        return None
    if facts is None and isinstance(error, MemoryError):
        facts, evidence = OomFacts(phase="run", platform="host"), "it is a MemoryError"
    if facts is None:
        return None
    found = failing_program(error, facts, before)
    if found is not None and found.compiling and facts.phase is None:
        facts = replace(facts, phase="compile")
    return Verdict(error=error, facts=facts, evidence=evidence, failing=found, limits=host_limits())


def _is_of_a_runtime(error: Exception) -> bool:
    of_a_callback = isinstance(error, jax.errors.JaxRuntimeError) and any(each in str(error) for each in _OF_A_CALLBACK)
    return isinstance(error, _OF_RUNTIMES) and not of_a_callback


def _by_limits(error: Exception, before: CallsBefore | None) -> Verdict | None:
    """An INTERNAL error on the CPU is one where the program takes more than some bound leaves."""
    text = str(error)
    if not isinstance(error, jax.errors.JaxRuntimeError) or not text.lstrip().startswith("INTERNAL"):
        return None
    if not _is_of_a_runtime(error):
        return None
    limits = host_limits()
    tightest = min(limits, key=_bound, default=None)
    if tightest is None:
        return None
    found = too_large(error, _bound(tightest), before)
    own = None if found is None else found.own_bytes
    if found is None or found.memory is None or found.memory.platform != "cpu":
        return None
    library = ""
    if found.library_bytes:
        library = (
            f", {format_bytes(found.library_bytes)} of them in a kernel library that XLA's compiler does not count"
        )
    evidence = (
        f"its text says only {text.strip().splitlines()[0]!r}, but {found.name} takes {format_bytes(own)} besides its "
        f"arguments{library}, and {format_bytes(tightest.left_bytes)} of {format_bytes(tightest.limit_bytes)} are left of the "
        f"{tightest.name.removeprefix('the ')}"
    )
    facts = OomFacts(phase="run", platform="cpu")
    return Verdict(error=error, facts=facts, evidence=evidence, failing=found, limits=limits)


def _bound(limit: MemoryLimit) -> int:
    """What an allocation must exceed to be refused: a machine lends more than is left, and refuses only more than it has."""
    return limit.limit_bytes if limit.name == MACHINE else limit.left_bytes
