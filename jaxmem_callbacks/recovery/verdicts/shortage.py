"""Whether a step failed for want of memory: an exception enters, what it says of itself leaves, or None.

One door to `judging.py`, which decides by text and, where a kernel library hides it, by the limits of this process.
"""

from __future__ import annotations

from jaxmem_callbacks.records.oom import OomFacts
from jaxmem_callbacks.recovery.verdicts.judging import judge


def ran_out(error: BaseException) -> OomFacts | None:
    """What the exception says of memory, or None where it is no failure for want of it. Keeps nothing of the call."""
    verdict = judge(error)
    return None if verdict is None else verdict.facts
