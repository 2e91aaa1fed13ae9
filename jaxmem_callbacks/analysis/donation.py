"""Donation lost: a compile in which a donated argument's memory is not taken over by a result, where it was or should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from jaxmem_callbacks.analysis.observation import Compiled, Observation
from jaxmem_callbacks.records.programs import Compilation
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.units import format_bytes

_SHOWN = 3
_AS_IT_CAME = (
    "Return each array in the shape, dtype and sharding that it comes in. Where its shardings differ, use the one that needs "
    "less memory of a device. docs/donation.md has the reasons one by one."
)
_VIEWS = "Let the views of the state go before the first step, or copy instead: np.array(x), where np.asarray(x) was written."


@final
class LostDonations:
    """What each program has lost so far; the same arrays are news once."""

    def __init__(self) -> None:
        self._lost: dict[str, frozenset[str]] = {}

    def news(self, compilation: Compilation) -> tuple[str, ...]:
        """The arrays that this compile loses and the one before did not."""
        if compilation.memory is None and not compilation.lost:
            return ()  # not known what it does with its arguments
        paths = {_path(text): text for text in compilation.lost}
        before = self._lost.get(compilation.program, frozenset())
        self._lost[compilation.program] = frozenset(paths) | (before if compilation.has_run else frozenset())
        return tuple(text for path, text in paths.items() if path not in before)


@final
class DonationDetector:
    """Tells once when a program begins to lose donations; a compile that makes them again ends the episode.

    Args:
        since_s: Compiles before this moment (seconds since the epoch) are history.
    """

    def __init__(self, since_s: float = 0.0) -> None:
        self._since_s = since_s
        self._lost = LostDonations()

    def detect(self, observation: Observation) -> Sequence[MemoryEvent]:
        """One event a compile that loses what was not lost before."""
        found = [(compiled, self._lost.news(compiled.compilation)) for compiled in observation.compilations]
        return [_event(each, news) for each, news in found if news and each.compilation.time_s >= self._since_s]


def _path(text: str) -> str:
    return text.split(": ", 1)[0]


def _event(compiled: Compiled, news: Sequence[str]) -> MemoryEvent:
    compilation = compiled.compilation
    name = compilation.program
    more = f"; and {len(news) - _SHOWN} more" if len(news) > _SHOWN else ""
    changed = f" Changed in this compile: {'; '.join(compilation.changed[:_SHOWN])}." if compilation.changed else ""
    return MemoryEvent(
        kind="donation_lost",
        step=compiled.step,
        time_s=compilation.time_s,
        device=name,
        message=(
            f"{name} does not reuse the memory of {len(news)} donated arrays since step {compiled.step}, so old and new "
            f"value are held at once, {format_bytes(compilation.lost_bytes)} more on a device: "
            f"{'; '.join(news[:_SHOWN])}{more}.{changed}"
        ),
        action=_VIEWS if compilation.has_run else _AS_IT_CAME,
        figures={"lost_bytes": compilation.lost_bytes, "lost": "; ".join(compilation.lost)},
    )
