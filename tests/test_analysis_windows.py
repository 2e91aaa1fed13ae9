"""Windows, history and the table of what is known: nothing is lost between readings and what is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem_callbacks.analysis.figures import FIGURES, values_of
from jaxmem_callbacks.analysis.history import History
from jaxmem_callbacks.analysis.known import KnownHere
from jaxmem_callbacks.analysis.observation import Compiled, Observation
from jaxmem_callbacks.analysis.windows import Spread, Window, Windows
from jaxmem_callbacks.records.programs import Compilation, ProgramMemory
from jaxmem_callbacks.records.readings import Reading, Unavailable

GIB = 2**30


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_a_window_keeps_lowest_mean_and_highest(values: list[float]):
    windows = Windows(1.0)
    for value in values:
        windows.add({"tag": value})
    window = windows.close(3, 10.0)
    spread = window.spreads["tag"]
    assert (spread.low, spread.high, spread.count) == (min(values), max(values), len(values))
    assert spread.mean == pytest.approx(sum(values) / len(values))
    assert spread.low - 1e-6 <= spread.mean <= spread.high + 1e-6


def test_the_first_window_closes_at_once_the_next_after_its_span_and_a_step():
    windows = Windows(1.0)
    windows.add({"tag": 1.0})
    assert windows.close(0, 100.0).step == 0
    windows.add({"tag": 2.0})
    assert windows.close(1, 100.5) is None, "not over"
    assert windows.close(0, 102.0) is None, "no step was completed in it"
    assert windows.close(1, 102.0).spreads["tag"].mean == 2.0
    assert windows.close(2, 200.0) is None, "nothing was seen"


def test_a_clock_that_is_set_back_does_not_stop_the_windows():
    windows = Windows(1.0)
    for step, time_s in ((0, 1000.0), (1, 10.0), (2, 12.0)):
        windows.add({"tag": 1.0})
        assert windows.close(step, time_s) is not None


def test_the_open_window_is_closed_by_force():
    windows = Windows(60.0)
    windows.add({"tag": 1.0})
    windows.close(0, 0.0)
    windows.add({"tag": 5.0})
    assert windows.close(0, 0.1, force=True).spreads["tag"].mean == 5.0


def test_a_range_is_shown_only_for_what_ranged():
    windows = Windows(1.0)
    windows.keep({"limit": 8.0})
    windows.add({"still": 1.0, "moving": 1.0})
    windows.add({"still": 1.0, "moving": 3.0})
    assert windows.close(0, 0.0).scalars() == {
        "still": 1.0,
        "moving": 2.0,
        "moving/min": 1.0,
        "moving/max": 3.0,
        "limit": 8.0,
    }


def window(step: int, high: float) -> Window:
    return Window(step=step, time_s=float(step), spreads={"tag": Spread(low=0.0, mean=0.0, high=high, count=1)})


@given(highs=st.lists(st.floats(0, 100), min_size=1, max_size=300))
def test_a_bounded_history_never_loses_the_peak(highs: list[float]):
    history = History(kept=16)
    for step, high in enumerate(highs):
        history.add(window(step, high))
    points = history.points
    assert len(points) <= 16
    assert max(point.highs["tag"] for point in points) == max(highs)
    assert points[-1].step == len(highs) - 1
    assert [point.step for point in points] == sorted(point.step for point in points)


def test_every_figure_has_its_unit_in_the_tag():
    for figure in FIGURES:
        assert figure.tag.startswith("memory/")
        assert figure.tag.endswith("_gib" if figure.unit == GIB else "_count")
        assert figure.field in Reading.__slots__


def test_values_of_a_gpu_reading():
    reading = Reading(
        source="allocator",
        device="gpu:0",
        step=0,
        time_s=0.0,
        in_use_bytes=2 * GIB,
        limit_bytes=10 * GIB,
        pool_bytes=6 * GIB,
        largest_free_bytes=1 * GIB,
    )
    assert values_of(reading) == {
        "memory/in_use_gib": 2.0,
        "memory/limit_gib": 10.0,
        "memory/pool_gib": 6.0,
        "memory/largest_free_gib": 1.0,
        "memory/fragmentation_share": 0.75,
        "memory/headroom_gib": 8.0,
    }


def observed(*readings: Reading, **fields: object) -> Observation:
    return Observation(step=1, time_s=1.0, readings=readings, **fields)


def row(known: KnownHere, figure: str) -> tuple[bool, str, str]:
    return next((each.known, each.latest, each.text) for each in known.rows() if each.figure == figure)


def test_what_is_unknown_says_why():
    known = KnownHere(limit_bytes=3 * GIB)
    assert row(known, "memory/host_gib")[2] == "unknown, because nothing was read yet"
    why = Unavailable(figure="allocator", device="cpu:0", reason="this client keeps none")
    readings = [
        Reading(source="live_arrays", device=f"cpu:{index}", step=1, time_s=1.0, live_array_bytes=index * GIB)
        for index in range(3)
    ]
    before = known.shape()
    known.learn(observed(*readings, unavailable=[why], dropped=4))
    assert known.shape() != before
    assert row(known, "memory/in_use_gib") == (False, "unknown", "unknown, because this client keeps none")
    assert row(known, "memory/fragmentation_share")[2] == "unknown, because this client keeps none"
    assert row(known, "memory/live_arrays_gib")[:2] == (True, "0 B (cpu:0) to 2.0 GiB (cpu:2)")
    assert (
        row(known, "memory/live_arrays_count")[2] == "unknown, because the allocator's statistics do not have it here"
    )
    assert row(known, "limit_bytes of the preset")[1] == "3.0 GiB"
    assert row(known, "stamps dropped by the monitor")[1] == "4"


def test_programs_are_known_by_their_largest_compile_or_by_a_reason():
    def compiled(name: str, temp: int | None) -> Compiled:
        memory = None
        if temp is not None:
            memory = ProgramMemory(
                name=name,
                platform="cpu",
                target="attached",
                argument_bytes=0,
                output_bytes=0,
                alias_bytes=0,
                temp_bytes=temp,
            )
        why = None if memory else "unknown, because not registered"
        return Compiled(
            step=0, compilation=Compilation(program=name, time_s=0.0, signature=(), memory=memory, unavailable=why)
        )

    known = KnownHere()
    known.learn(observed(compilations=[compiled("step", 2 * GIB), compiled("step", GIB), compiled("other", None)]))
    assert row(known, "need of step")[1] == "2.0 GiB"
    assert row(known, "need of other") == (False, "unknown", "unknown, because not registered")


def test_fragmentation_is_shown_for_the_worst_device():
    known = KnownHere()
    known.learn(
        observed(
            *(
                Reading(
                    source="allocator",
                    device=f"gpu:{index}",
                    step=1,
                    time_s=1.0,
                    in_use_bytes=0,
                    pool_bytes=100,
                    largest_free_bytes=100 - 10 * index,
                )
                for index in range(3)
            )
        )
    )
    assert row(known, "memory/fragmentation_share")[1] == "20.0% (gpu:2)"
    assert row(known, "memory/in_use_gib")[1] == "0 B (each of 3 devices)"


def test_windows_grow_with_a_long_run_and_stay_as_they_are_in_a_short_one():
    def closed(steps: int, pace_s: float) -> int:
        windows = Windows(1.0)
        count = 0
        for step in range(steps):
            windows.add({"memory/host_gib": 1.0})
            count += windows.close(step, step * pace_s) is not None
        return count

    assert closed(1500, 1.0) == 1500
    assert closed(200_000, 10.0) < 2000 * 9
