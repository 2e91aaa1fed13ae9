"""Recorded runs: no healthy one raises an event, each faulty one raises its own, once, now and when it was recorded."""

from __future__ import annotations

from typing import get_args

import pytest

from jaxmem_callbacks.records.events import EventKind
from tests.replay import Recording, names, recording

# Runs with one fault, and the kind of the one event.
FAULTY = {
    "near_oom": "near_oom",
    "near_oom_by_growth": "near_oom",
    "near_oom_by_block": "near_oom",
    "fragmentation": "fragmentation",
    "growth": "growth",
    "growth_in_many_shapes": "growth",
    "donation_lost": "donation_lost",
    "recompilation": "recompilation",
    "recompilation_of_a_plain_jit": "recompilation",
    "replication": "replication",
    "replication_against_the_policy": "replication",
    "imbalance": "imbalance",
    "plan_stale": "plan_stale",
    "prediction_off": "prediction_off",
}
HEALTHY = [name for name in names() if name not in FAULTY]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_no_false_alarm(name: str):
    found = recording(name)
    assert found.told == []
    assert [event.message for event in found.replay()] == []


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_run_raises_its_event_once(name: str):
    found = recording(name)
    assert [event["event"] for event in found.told] == [FAULTY[name]], "told while it was recorded"
    (event,) = found.replay()
    assert event.kind == FAULTY[name]
    assert f"step {event.step}" in event.message or "since step" in event.message or event.kind.startswith("plan")
    assert event.action
    assert event.figures


def test_enough_is_recorded_of_each_kind():
    real = [name for name in HEALTHY if recording(name).head["of"] == "healthy"]
    assert len(real) >= 12, "real trainings, with nothing scripted"
    assert set(FAULTY) <= set(names())
    assert set(FAULTY.values()) == set(get_args(EventKind))


def test_recordings_say_what_is_real():
    for name in names():
        head = recording(name).head
        assert head["command"] == f"python tools/record_runs.py {name}"
        scripted = any(line.get("source") == "allocator" for line in recording(name).lines)
        assert head["allocator"] == ("scripted" if scripted else "none on this platform")


def larger_than(found: Recording, kind: str) -> list[str]:
    """Messages of one kind under thresholds that nothing passes."""
    return [
        event.message for event in found.replay(growth_min_bytes=2**60, growth_min_arrays=2**60) if event.kind == kind
    ]


def test_the_replay_can_fail():
    assert larger_than(recording("growth"), "growth") == []
    moved = recording("losses_freed_each_epoch").replay(growth_steps=10, growth_min_arrays=5)
    assert [event.kind for event in moved] == ["growth"], "shorter than an epoch, the kept losses would be an alarm"
