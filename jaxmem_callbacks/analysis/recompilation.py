"""Compiles of a step that is known: which argument changed, and donation that was lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from jaxmem_callbacks.analysis.observation import Compiled, Observation
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.programs import Compilation
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.units import format_bytes

_SHOWN_ARGUMENTS = 3
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
        return [
            _donation_event(each, news) for each, news in found if news and each.compilation.time_s >= self._since_s
        ]


def _path(text: str) -> str:
    return text.split(": ", 1)[0]


def _donation_event(compiled: Compiled, news: Sequence[str]) -> MemoryEvent:
    compilation = compiled.compilation
    name = compilation.program
    more = f"; and {len(news) - _SHOWN_ARGUMENTS} more" if len(news) > _SHOWN_ARGUMENTS else ""
    changed = (
        f" Changed in this compile: {'; '.join(compilation.changed[:_SHOWN_ARGUMENTS])}." if compilation.changed else ""
    )
    return MemoryEvent(
        kind="donation_lost",
        step=compiled.step,
        time_s=compilation.time_s,
        device=name,
        message=(
            f"{name} does not reuse the memory of {len(news)} donated arrays since step {compiled.step}, so old and new "
            f"value are held at once, {format_bytes(compilation.lost_bytes)} more on a device: "
            f"{'; '.join(news[:_SHOWN_ARGUMENTS])}{more}.{changed}"
        ),
        action=_VIEWS if compilation.has_run else _AS_IT_CAME,
        figures={"lost_bytes": compilation.lost_bytes, "lost": "; ".join(compilation.lost)},
    )


_QUIET_STEPS = 100  # an episode ends after so many steps without another compile for the same arguments
_ANEW = 3  # steps of training that compile for the same arguments: a step that is made anew in the loop
_MADE_ANEW = "made anew"
_SHOWN = 4  # changed arguments spelled out in one message


@final
class RecompilationDetector:
    """Tells once a program and set of changed arguments; the first compile of a program is no event.

    A registered step that is compiled for the same arguments at several steps of the training is made anew in the loop; several
    of one name that are compiled together, or for two policies, are not. Nor is a compile that loses a donation told here: the
    donation's own event says what changed.

    Args:
        since_s: Compiles before this moment (seconds since the epoch) are history: they count as first compiles only.
    """

    def __init__(self, since_s: float = 0.0) -> None:
        self._since_s = since_s
        self._compiles: dict[str, int] = {}
        self._first_step: dict[str, int] = {}
        self._lost = LostDonations()
        self._last_step: dict[tuple[str, frozenset[str]], int] = {}
        self._alike: dict[tuple[str, int], set[int]] = {}  # of a program and signature, the steps that compiled it

    def detect(self, observation: Observation) -> Sequence[MemoryEvent]:
        """One event for each compile that begins an episode."""
        return [
            _recompilation_event(compiled, self._compiles[compiled.compilation.program], anew=anew)
            for compiled in observation.compilations
            for anew in [self._is_made_anew(compiled.compilation, compiled.step)]
            if self._begins(compiled.compilation, compiled.step, anew=anew)
        ]

    def _is_made_anew(self, compilation: Compilation, step: int) -> bool:
        if compilation.has_run or compilation.changed or not compilation.signature:
            return False
        steps = self._alike.setdefault((compilation.program, hash(compilation.signature)), set())
        if len(steps) < _ANEW:
            steps.add(step)
        return len(steps) >= _ANEW

    def _begins(self, compilation: Compilation, step: int, *, anew: bool) -> bool:
        if compilation.has_run:
            return False
        count = self._compiles.get(compilation.program, 0) + 1
        self._compiles[compilation.program] = count
        # Another step of the same name may be compiled for the first time; a registered step says itself what changed. What is
        # not registered is compiled for all that one step does with it: for two shapes, or on two groups of devices.
        first = self._first_step.setdefault(compilation.program, step)
        again = anew or (bool(compilation.changed) if compilation.signature else step > first)
        loses_donation = bool(self._lost.news(compilation))
        if compilation.time_s < self._since_s or not again or loses_donation:
            return False
        changed = frozenset(change.split(":", 1)[0] for change in compilation.changed)
        key = (compilation.program, frozenset((_MADE_ANEW,)) if anew else changed)
        last = self._last_step.get(key)
        self._last_step[key] = step
        return last is None or step - last > _QUIET_STEPS


def _recompilation_event(compiled: Compiled, count: int, *, anew: bool) -> MemoryEvent:
    compilation = compiled.compilation
    name = compilation.program
    if compilation.changed:
        why = "; ".join(compilation.changed[:_SHOWN])
        more = len(compilation.changed) - _SHOWN
        why += f"; and {more} more" if more > 0 else ""
        action = advise("recompilation.constant_shapes")
    elif anew:
        why = "no argument; jm.jit_step makes another step each time, inside the loop"
        action = advise("recompilation.jit_once")
    else:
        why = compilation.unavailable or "unknown"
        action = (
            f"Is it jitted inside the loop, or made by a function that the loop calls? {advise('recompilation.jit_once')} Is it "
            f"jitted once, and do its arguments change? {advise('recompilation.learn')}"
        )
    return MemoryEvent(
        kind="recompilation",
        step=compiled.step,
        time_s=compilation.time_s,
        device=name,
        message=f"{name} was compiled again (compile {count}) at step {compiled.step}. Changed: {why}.",
        action=action,
        figures={"compiles": count, "changed": "; ".join(compilation.changed) or why},
    )
