"""Recorded runs: no healthy one raises an event, each faulty one raises its own, once, now and when it was recorded."""

from __future__ import annotations

import dataclasses
import re
from typing import get_args

import pytest

from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import EventKind
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
    "donation_copied": "donation_lost",
    "recompilation": "recompilation",
    "recompilation_of_a_plain_jit": "recompilation",
    "replication": "replication",
    "replication_against_the_policy": "replication",
    "imbalance": "imbalance",
    "plan_stale": "plan_stale",
    "prediction_off": "prediction_off",
}
HEALTHY = [name for name in names() if recording(name).head["name"] not in FAULTY]
FAULTS = [name for name in names() if name not in HEALTHY]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_no_false_alarm(name: str):
    found = recording(name)
    assert found.told == []
    assert [event.message for event in found.replay()] == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_run_raises_its_event_once(name: str):
    found = recording(name)
    kind = FAULTY[found.head["name"]]
    assert [event["event"] for event in found.told] == [kind], "told while it was recorded"
    (event,) = found.replay()
    assert event.kind == kind
    assert re.search(r"(since|at) step \d+", event.message)
    assert event.action
    assert event.figures


def test_enough_is_recorded_of_each_kind():
    real = [name for name in HEALTHY if recording(name).head["of"] == "healthy"]
    assert len(real) >= 12, "real trainings, with nothing scripted"
    assert set(FAULTY) <= set(names())
    assert set(FAULTY.values()) == set(get_args(EventKind)) - {"recovery", "out_of_memory"}  # which no detector tells


def test_healthy_runs_are_recorded_by_the_defaults_too():
    """In which only the platform's limit may be named; with the number that was the default once, one would be an alarm."""
    defaults = dataclasses.asdict(MonitorSettings(tensorboard=False, on_error="raise"))
    later = {"near_oom_profiles": defaults["near_oom_profiles"]}  # a setting that there was not when they were recorded
    found = [
        name
        for name in HEALTHY
        if later | recording(name).head["settings"] | {"limit_bytes": None, "host_s": None} == defaults
    ]
    assert found == ["large_arrays_by_the_defaults", "losses_of_long_epochs_by_the_defaults"]
    largest = [
        max(group["bytes"] for line in recording(name).lines for group in line.get("groups", ())) for name in found
    ]
    assert largest[0] >= defaults["replication_min_bytes"]
    (event,) = recording(found[1]).replay(growth_min_arrays=10_000)
    assert event.kind == "growth"
    assert event.figures["arrays_more"] >= 10_000


def test_recordings_say_what_is_real():
    for name in names():
        head = recording(name).head
        assert head["command"] == f"python tools/record_runs.py {head['name']}"
        reported = any(line.get("source") == "allocator" for line in recording(name).lines)
        source = "scripted" if head["of"] == "scripted" else "real"
        assert head["allocator"] == (source if reported else "none on this platform")


def larger_than(found: Recording, kind: str) -> list[str]:
    """Messages of one kind under thresholds that nothing passes."""
    return [
        event.message for event in found.replay(growth_min_bytes=2**60, growth_min_arrays=2**60) if event.kind == kind
    ]


def test_the_replay_can_fail():
    assert larger_than(recording("growth"), "growth") == []
    moved = recording("metrics_freed_each_long_epoch").replay(growth_min_arrays=30)
    assert [event.kind for event in moved] == ["growth"], "of the 60 metrics of its first epoch, and of no other"
