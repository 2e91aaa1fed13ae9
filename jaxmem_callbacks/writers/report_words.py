"""A run's story enters, the sentences of its report leave, in plain text."""

from __future__ import annotations

from jaxmem_callbacks.analysis.story import High, Story
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.writers.markdown import event_title

# Of these the first that the platform reports is what the run is judged by.
_JUDGED = (
    ("in_use_bytes", "in use"),
    ("live_array_bytes", "of live arrays (no temporaries)"),
    ("resident_bytes", "resident on the host"),
)
_NAMED = 3
_MINUTE, _HOUR = 60, 3600


def happened(story: Story) -> str:
    """One sentence: how long, on what, how much memory, which events, and whether it was closed."""
    parts = [
        f"{_steps(story)}{_duration(story)}{_place(story)}",
        _memory(story),
        _events(story),
        _elsewhere(story),
        _said(story),
    ]
    if not story.ended:
        parts.append("the run has no closing line, so it was killed or is still running")
    return "; ".join(part for part in parts if part) + "."


def _steps(story: Story) -> str:
    first, last = story.span.first_step, story.span.last_step
    if first is None or last is None:
        return "No step was seen"
    if first == last:
        return f"Step {last} was seen"
    return f"Steps {first:,} to {last:,} ran"


def _duration(story: Story) -> str:
    first, last = story.span.first_s, story.span.last_s
    return "" if first is None or last is None else f" in {duration_words(last - first)}"


def duration_words(seconds: float) -> str:
    """``1.5 s``, ``12 min 3 s`` or ``2 h 5 min``."""
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"


def _place(story: Story) -> str:
    devices = story.start.devices if story.start is not None else {}
    if "kind" not in devices:
        return ""
    count = devices.get("count", 1)
    return f" on {count} x {devices['kind']}" if count != 1 else f" on one {devices['kind']}"


def judged(story: Story) -> tuple[str, High] | None:
    """The figure that a run is judged by, in words, and its highest value; None where no memory was read."""
    return next(((words, story.highs[name]) for name, words in _JUDGED if name in story.highs), None)


def _memory(story: Story) -> str:
    found = judged(story)
    if found is None:
        return "no memory was read"
    words, high = found
    limit = story.limit_bytes
    share = f", {high.bytes / limit:.0%} of the limit of {format_bytes(limit)}" if limit and "host" not in words else ""
    when = f"after step {high.step:,}" if high.step >= 0 else "before the first step"
    return f"memory was highest {when} with {format_bytes(high.bytes)} {words}{share}"


def _events(story: Story) -> str:
    if not story.events:
        return "no event was told"
    few = len(story.events) <= _NAMED + 1  # "and 1 more" says no less by saying it
    told = story.events if few else story.events[:_NAMED]
    shown = [f"{event_title(each.kind).lower()} at step {each.step:,}" for each in told]
    more = len(story.events) - len(shown)
    count = "one event was told" if len(story.events) == 1 else f"{len(story.events)} events were told"
    return f"{count}: {', '.join([*shown, *([f'and {more} more'] if more else [])])}"


def _elsewhere(story: Story) -> str:
    told = story.elsewhere.told
    shown = [f"{event_title(each.event.kind).lower()} at step {each.event.step:,} ({each.where})" for each in told]
    more = [f"and {len(told) - _NAMED} more"] if len(told) > _NAMED else []
    return f"other processes told {', '.join([*shown[:_NAMED], *more])}" if told else ""


def _said(story: Story) -> str:
    if not story.said:
        return ""
    first, *others = story.said
    return f"the monitor said of itself: {first.rstrip('.')}" + (f", and {len(others)} more" if others else "")
