"""Growth among epochs: what is kept and let go of is none, however long they are; what stays behind each time is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from jaxmem_callbacks.analysis.array_detectors import GrowthDetector
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import MemoryEvent
from tests.test_analysis_arrays import census, group, run

DEFAULTS = MonitorSettings()
SHORT = MonitorSettings(growth_steps=50, growth_min_arrays=100)
COST = 2**10  # of one array, whatever its size
LEAST = DEFAULTS.growth_min_bytes // COST


def told(
    counts: Iterable[int],
    settings: MonitorSettings = DEFAULTS,
    *,
    every: int = 40,
    seen: Callable[[int], bool] = bool,
    size: int = 4,
) -> list[MemoryEvent]:
    """Events of a run that keeps so many arrays after each step and is looked at every so many steps.

    Args:
        counts: By step.
        settings: The defaults.
        every: Steps between two looks.
        seen: Of the count, whether the look finds that kind at all.
        size: Bytes of one array.
    """
    observations = [
        census(step, group((8, 8), 4), *([group((), count, bytes=size * count)] if seen(count) else []))
        for step, count in enumerate(counts)
        if step % every == 0
    ]
    return run(GrowthDetector(settings), observations)


def epochs(*lengths: int, leak: float = 0.0) -> list[int]:
    """How many arrays are kept where each epoch keeps one a step and lets go of all; with so many left behind at every step."""
    kept = [step for length in lengths for step in range(length)]
    return [count + int(step * leak) for step, count in enumerate(kept)]


@pytest.mark.parametrize("length", [1_000, 12_000, 60_000])
def test_losses_that_are_let_go_of_at_the_end_of_an_epoch_are_none_by_the_defaults(length: int):
    assert told(epochs(*[length] * 3)) == []


def test_a_scalar_a_step_is_told_once_when_its_number_costs_what_growth_must():
    (event,) = told(range(2 * LEAST))
    assert LEAST <= event.step < LEAST + DEFAULTS.growth_steps
    assert "64.4 MiB or more on the host, by their number" in event.message
    (large,) = told(range(2 * LEAST), size=4 * COST)
    assert large.step < LEAST / 3, "four KiB each: by their bytes"
    assert "on the host" not in large.message


def test_a_number_that_is_set_is_told_at_it_and_by_bytes_alone_where_none_is():
    counts = range(2_000)
    (event,) = told(counts, MonitorSettings(growth_min_arrays=1_000), every=5)
    assert 1_000 <= event.step < 1_000 + DEFAULTS.growth_steps
    assert told(counts, every=5) == []


@pytest.mark.parametrize("settings", [DEFAULTS, MonitorSettings(growth_min_arrays=10**6)], ids=["default", "number"])
def test_epochs_after_the_first_are_none_also_where_the_first_one_was_told(settings: MonitorSettings):
    length = 2 * LEAST
    (event,) = told(epochs(length, length, length), settings)
    assert event.step < length


def test_an_epoch_that_ends_as_soon_as_its_rise_is_known_is_remembered():
    """Over ten times the steps, 520 are ten stretches and the beginning of one more."""
    (event,) = told(epochs(520, 520, 520), MonitorSettings(growth_steps=50, growth_min_bytes=20 * COST), every=1)
    assert event.step < 520


def test_a_kind_that_is_gone_between_epochs_is_known_when_it_comes_again():
    (event,) = told(epochs(*[400] * 8), SHORT, every=1, seen=lambda count: count > 20)
    assert event.step < 400


def test_after_a_long_epoch_and_many_short_ones_another_long_one_is_none():
    (event,) = told(epochs(600, *[150] * 10, 900), SHORT, every=1)
    assert event.step < 600


def test_what_was_let_go_of_once_is_told_again_when_it_is_twice_as_much():
    first, second = told(epochs(300, 500, 400, 550, 1300), SHORT, every=1)
    assert first.step < 300
    assert second.step - (300 + 500 + 400 + 550) == pytest.approx(2 * 550, abs=30)


@pytest.mark.parametrize(("length", "leak"), [(200, 1.0), (1_000, 0.5), (5_000, 1.0), (20_000, 0.3)])
def test_a_leak_beneath_a_list_that_is_emptied_each_epoch_is_told_once(length: int, leak: float):
    (event,) = told(epochs(*[length] * int(1.4 * LEAST / leak / length), leak=leak))
    assert event.figures["arrays_more"] >= 0.9 * LEAST


def test_a_leak_beneath_lists_is_over_when_there_are_none_any_more_and_another_one_is_told():
    leaked = epochs(*[100] * 12, leak=0.5)
    kept = leaked + [leaked[-1] - 99] * 3_000
    others = [0] * (len(kept) - 1_000) + [*range(1_000)]
    observations = [
        census(step, group((), count, bytes=4 * count), *([group((3,), other, bytes=12 * other)] if other else []))
        for step, (count, other) in enumerate(zip(kept, others, strict=True))
    ]
    first, second = run(GrowthDetector(MonitorSettings(growth_steps=50, growth_min_bytes=400 * COST)), observations)
    assert (first.figures["what"], second.figures["what"]) == ("float32[]", "float32[3]")
    assert 400 <= second.figures["arrays_more"] < 450
