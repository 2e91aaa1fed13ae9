"""MemoryMonitor: a real run is watched, judged and written down; what it was given in error is refused by name."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import jaxmem_callbacks as jm
from jaxmem_callbacks.analysis.figures import Window
from jaxmem_callbacks.analysis.observation import Metrics
from jaxmem_callbacks.callbacks.background import Faults
from jaxmem_callbacks.callbacks.config import preset_given, split_of
from jaxmem_callbacks.callbacks.sampler import Sampler
from jaxmem_callbacks.probes.device_memory import AllocatorProbe
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import Reading
from jaxmem_callbacks.writers.protocol import LoggedTable, Picture
from tests.processes import bytes_of_others, until
from tests.sample_devices import GIB, GPU
from tests.stamping import stamp
from tests.watching import told

STEPS, SHORT_AT = 40, 30
RARE = MonitorSettings(window_s=3600.0, scan_s=3600.0, on_error="raise")


def watched_step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    loss, gradient = jm.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(weights)
    return weights - 0.1 * gradient, {"loss": loss}


class Run:
    """One short real run, its files read back."""

    def __init__(self, folder: Path) -> None:
        # Arrays that other tests of this process hold count as live: the step is as much larger as keeps them far from its limit.
        gc.collect()
        self.scale = 1 + bytes_of_others() // 65_536
        settings = MonitorSettings(window_s=0.02, scan_s=0.02, limit_bytes=300_000 * self.scale, on_error="raise")
        self.folder, self.double = folder, jm.CollectingWriter()
        step = jm.jit_step(watched_step, jm.StepPolicy())
        weights, batch = jnp.full((64, 64), 0.1), jnp.ones((512 * self.scale, 64))
        self.losses = []
        with jm.MemoryMonitor(settings, logdir=folder, writer=self.double) as monitor:
            for index in range(STEPS):
                weights, metrics = step(weights, batch if index != SHORT_AT else batch[: 100 * self.scale])
                monitor(index, metrics)
                self.losses.append(float(metrics["loss"]))
                time.sleep(0.02)
                if index % 4 == 3:  # the monitor's thread has a share of a busy machine
                    until(lambda since=index - 3: any(window.step >= since for window in self.double.of(Window)))
        self.events = monitor.events
        self.page = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
        self.page.Reload()
        self.lines = [json.loads(line) for line in (folder / "memory.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("runs") / "new" / "folder")


@pytest.mark.core
def test_a_run_has_one_event_file_and_json_lines(run: Run):
    names = sorted(path.name for path in run.folder.iterdir())
    assert len(names) == 2
    assert names[0].startswith("events.out.tfevents.")
    assert names[1] == "memory.jsonl"


@pytest.mark.core
def test_a_run_shows_memory_by_step(run: Run):
    tags = run.page.Tags()["scalars"]
    assert {"memory/live_arrays_mib", "memory/host_mib", "memory/program_mib/watched_step", "train/loss"} <= set(tags)
    points = run.page.Scalars("memory/live_arrays_mib")
    assert len(points) >= STEPS // 4
    steps = [point.step for point in points]
    assert steps[0] <= 3, "the first sample is written at once"
    assert steps[-1] == STEPS - 1, "the open window is written at close"
    assert steps == sorted(steps)
    assert all(point.value > 0 for point in points)


def test_a_runs_metrics_are_the_steps_own(run: Run):
    metrics = run.double.of(Metrics)
    assert len(metrics) > STEPS // 5
    assert all(each.values == {"loss": pytest.approx(run.losses[each.step])} for each in metrics)
    assert metrics[-1].step == STEPS - 1


@pytest.mark.core
def test_a_run_tells_each_event_once_with_its_step(run: Run):
    assert [(event.kind, event.step) for event in run.events] == [("near_oom", 0), ("recompilation", SHORT_AT)]
    near, again = run.events
    assert "watched_step alone needs" in near.message
    assert near.figures["limit_bytes"] == 300_000 * run.scale
    assert f"float32[{512 * run.scale},64]" in again.message
    assert f"float32[{100 * run.scale},64]" in again.message
    assert run.double.events == list(run.events)
    assert [line["event"] for line in run.lines if line["kind"] == "event"] == ["near_oom", "recompilation"]


def test_a_run_tells_events_in_tensorboard_as_text(run: Run):
    texts = [entry.tensor_proto.string_val[0].decode() for entry in run.page.Tensors("memory/events/text_summary")]
    assert ["Near out of memory" in texts[0], "Recompilation" in texts[1], len(texts)] == [True, True, 2]


def test_a_run_says_what_is_known_here(run: Run):
    tables = run.double.of(LoggedTable)
    rows = {row[0]: row for row in tables[0].rows}
    assert rows["memory/in_use_mib"][3] == "unknown, because JAX's CPU client keeps no allocator statistics"
    assert rows["memory/live_arrays_mib"][1] != "unknown"
    assert rows["need of watched_step"][2] == "compiler"
    known = [{row[0]: row[1] != "unknown" for row in table.rows} for table in tables[:-1]]
    assert all(before != after for before, after in itertools.pairwise(known)), "written again only when that changes"
    assert tables[-1].step == STEPS - 1, "and at the end"
    assert run.page.Tensors("memory/known_here/text_summary")


def test_a_run_ends_with_its_figure(run: Run):
    last = {picture.tag: picture for picture in run.double.of(Picture)}  # of each; a slow run may draw one earlier, too
    heap, over_time = last["memory/heap_map"], last["memory/over_time"]
    assert (over_time.tag, over_time.step, heap.tag, heap.step) == (
        "memory/over_time",
        STEPS - 1,
        "memory/heap_map",
        STEPS - 1,
    )
    for picture in (over_time, heap):
        assert run.page.Images(picture.tag)[-1].encoded_image_string == picture.png
    assert run.double.closed


def test_every_line_of_a_run_carries_its_id(run: Run):
    assert len({line["run"] for line in run.lines}) == 1
    readings = [line for line in run.lines if line["kind"] == "reading"]
    assert {line["source"] for line in readings} == {"live_arrays", "host"}
    why = [line for line in run.lines if line["kind"] == "unavailable"]
    assert sorted((line["figure"], line["device"]) for line in why) == [
        (figure, f"cpu:{index}") for figure in ("allocator", "driver") for index in range(8)
    ], "each said once"
    assert all(isinstance(line["live_array_bytes"], int) for line in readings if line["source"] == "live_arrays")


# Ways to call it


def test_a_plain_hook_writes_the_first_sample_at_once_and_the_rest_at_close():
    double = jm.CollectingWriter()
    monitor = jm.MemoryMonitor(RARE, writer=double)
    monitor(0)
    assert [window.step for window in until(lambda: double.of(Window))] == [0]
    monitor(1)
    monitor.close()
    assert [window.step for window in double.of(Window)] == [0, 1]
    written = len(double.records)
    monitor.close()
    monitor(2)
    monitor.flush()
    assert len(double.records) == written, "after close, nothing"


@pytest.mark.core
def test_sample_returns_tags_for_writers_elsewhere():
    with jm.MemoryMonitor(RARE) as monitor:
        sample = monitor.sample(0)
        assert sample["memory/host_gib"] > 0.01
        assert sample["memory/live_arrays_gib"] >= 0
        assert all(isinstance(value, float) for value in sample.values())
        assert "memory/in_use_gib" not in sample, "unknown is absent, not 0"
        assert monitor.sample(1).keys() == sample.keys()


def test_levanters_shape():
    double = jm.CollectingWriter()
    with jm.MemoryMonitor(RARE, writer=double) as monitor:
        monitor.on_step(SimpleNamespace(step=4, loss=jnp.float32(2.0)))
        monitor.on_step(
            SimpleNamespace(step=4, loss=3.0), force=True
        )  # as Levanter calls every hook once more at the end
        monitor.on_step(SimpleNamespace(step=5), force=True)
        monitor.flush()
    assert [(each.step, each.values) for each in double.of(Metrics)] == [(4, {"loss": 2.0})]
    assert double.of(Window)[-1].step == 5


def test_metrics_may_be_nested_numpy_or_plain_and_need_not_be_finite():
    double = jm.CollectingWriter()
    with jm.MemoryMonitor(RARE, writer=double) as monitor:
        monitor(0, {"a": {"b": 1.5, "c": jnp.nan}, "n": jnp.int32(3), "done": True})
        monitor.flush()
    (metrics,) = double.of(Metrics)
    assert repr(metrics.values) == "{'a/b': 1.5, 'a/c': nan, 'n': 3.0, 'done': 1.0}"


def test_a_preset_is_taken_by_value_or_by_name():
    scripted = Reading(source="host", device="host", step=0, time_s=0.0, resident_bytes=2**30)
    for preset in (None, "monitor_only", jm.load_preset("monitor_only"), MonitorSettings()):
        with jm.MemoryMonitor(preset, probes=[jm.ScriptedProbe([scripted])]) as monitor:
            assert monitor.sample(0)["memory/host_gib"] == 1.0


def test_devices_that_never_held_an_array_do_not_pull_the_mean_down():
    def on(device: str, held: int) -> Reading:
        return Reading(source="live_arrays", device=device, step=0, time_s=0.0, live_array_bytes=held * 2**30)

    script = [[on("cpu:0", 4), on("cpu:1", 0)], [on("cpu:0", 4), on("cpu:1", 2)], [on("cpu:0", 4), on("cpu:1", 0)]]
    double = jm.CollectingWriter()
    with jm.MemoryMonitor(RARE, writer=double, probes=[jm.ScriptedProbe(script)]) as monitor:
        assert monitor.sample(0)["memory/live_arrays_gib"] == 4.0
        monitor.flush()
        assert monitor.sample(1)["memory/live_arrays_gib"] == 3.0
        assert monitor.sample(1)["window/memory/live_arrays_gib/max"] == 4.0
        monitor.flush()
        assert monitor.sample(2)["memory/live_arrays_gib"] == 2.0


def test_scripted_readings_go_the_whole_way():
    full = [
        Reading(source="allocator", device="gpu:0", step=step, time_s=float(step), in_use_bytes=used, limit_bytes=1000)
        for step, used in enumerate([100, 980, 960, 100])
    ]
    with jm.MemoryMonitor(RARE, probes=[jm.ScriptedProbe(full)]) as monitor:
        monitor(0)
        for _ in full:
            monitor.flush()
    assert [(event.kind, event.step) for event in monitor.events] == [("near_oom", 1)]


def test_latest_values_are_written_again_as_often_as_the_figure():
    def tables(figure_s: float) -> int:
        double = jm.CollectingWriter()
        sizes = [Reading(source="host", device="host", step=0, time_s=0.0, resident_bytes=size) for size in range(5)]
        settings = dataclasses.replace(RARE, figure_s=figure_s)
        with jm.MemoryMonitor(settings, writer=double, probes=[jm.ScriptedProbe(sizes)]) as monitor:
            monitor(0)
            for _ in sizes:
                time.sleep(0.001)
                monitor.flush()
            return len(double.of(LoggedTable))

    assert tables(3600.0) <= 2, "at the start, and when the first map of arrays is known"
    assert tables(1e-6) >= 5


def test_without_a_folder_and_writer_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    monkeypatch.chdir(tmp_path)
    with jm.MemoryMonitor() as monitor:
        monitor(0, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []
    assert monitor.events == ()
    assert told(capfd) == []


def test_only_the_files_that_the_settings_want_are_made(tmp_path: Path):
    with jm.MemoryMonitor(MonitorSettings(tensorboard=False), logdir=tmp_path) as monitor:
        monitor(0)
    assert [path.name for path in tmp_path.iterdir()] == ["memory.jsonl"]


class Growing(NamedTuple):
    """A GPU whose memory in use follows a list, one entry a reading."""

    used: list[int]
    platform: str = "gpu"
    id: int = 0

    def memory_stats(self) -> dict[str, int]:
        return {**GPU, "bytes_in_use": self.used.pop(0)}

    def default_memory(self) -> Any:
        return None


def test_allocator_statistics_are_read_at_every_nth_call():
    settings = dataclasses.replace(RARE, every_steps=2)
    double = jm.CollectingWriter()
    device = Growing([1 * GIB, 2 * GIB, 8 * GIB, 3 * GIB, 58 * GIB, 57 * GIB])
    with jm.MemoryMonitor(settings, writer=double, probes=[AllocatorProbe([device])]) as monitor:
        monitor(0)
        monitor.flush()
        for step in range(1, 8):
            monitor(step)
        monitor.flush()
        sample = monitor.sample(8)
    assert sample["memory/in_use_gib"] == 57.0, "read now"
    assert [event.kind for event in monitor.events] == ["near_oom"]
    spread = double.of(Window)[-1].spreads["memory/in_use_gib"]
    assert (spread.low, spread.high, spread.count) == (2.0, 58.0, 4)
    readings = [(each.step, each.in_use_bytes // GIB) for each in double.of(Reading)]
    assert readings == [(0, 1), (4, 8), (6, 3), (8, 58)], "between two looks the highest and the last"
    rows = {row[0]: row[1] for row in double.of(LoggedTable)[-1].rows}
    assert rows["memory/limit_gib"] == "60.0 GiB (gpu:0)"


# What is refused


def test_a_preset_that_is_none_is_refused():
    with pytest.raises(
        TypeError, match=r"MemoryMonitor got StepPolicy as preset\. Expected a Preset.*jm\.MemoryMonitor"
    ):
        jm.MemoryMonitor(jm.StepPolicy())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"every_steps": 0}, r"every_steps=0 \(expected at least 1\)"),
        ({"scan_s": 0.0}, r"scan_s=0\.0 \(expected more than 0 seconds\)"),
        ({"window_s": -1.0, "limit_bytes": 0}, r"window_s=-1\.0 .*; limit_bytes=0"),
        ({"near_oom_headroom": 1.0}, "near_oom_headroom=1.0"),
        ({"fragmentation_share": 0.0}, "fragmentation_share=0.0"),
        ({"near_oom_steps": 0}, r"near_oom_steps=0 \(expected at least 1\)"),
        ({"near_oom_profiles": -1}, r"near_oom_profiles=-1 \(expected at least 0\)"),
        ({"growth_steps": 9}, r"growth_steps=9 \(expected at least 10\)"),
        ({"growth_min_bytes": 0}, "growth_min_bytes=0"),
        ({"growth_min_arrays": 0}, "growth_min_arrays=0"),
        ({"replication_min_bytes": 0}, "replication_min_bytes=0"),
        ({"imbalance_share": 1.5}, r"imbalance_share=1\.5 \(expected a share above 0, at most 1\)"),
        ({"fragmentation_min_bytes": -1}, r"fragmentation_min_bytes=-1 \(expected at least 0 bytes\)"),
        ({"imbalance_min_bytes": -1}, "imbalance_min_bytes=-1"),
        ({"on_error": "ignore"}, r"on_error='ignore' \(expected warn or raise\)"),
        ({"scan_s": math.nan}, r"scan_s=nan \(expected more than 0 seconds\)"),
        ({"jsonl_part_bytes": 1000}, r"jsonl_part_bytes=1000 \(expected at least 1024 bytes, or None\)"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_construction(settings: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        jm.MemoryMonitor(MonitorSettings(**settings))


def test_a_remote_folder_is_refused():
    with pytest.raises(ValueError, match=r"logdir='gs://bucket/run' is no local folder.*writer="):
        jm.MemoryMonitor(logdir="gs://bucket/run")


# The ring


def sampler(look_s: float = 0.1) -> Sampler:
    return Sampler(
        MonitorSettings(),
        probes=(),
        faults=Faults("raise"),
        look_s=look_s,
    )


def test_the_ring_is_bounded_and_what_it_loses_is_counted():
    ring = sampler()
    for step in range(4096 + 7):
        stamp(ring, step, None)
    observation = ring.collect()
    assert (observation.step, observation.dropped) == (4102, 7)
    stamp(ring, 4103, None)
    assert ring.collect().dropped == 7


def test_at_a_fast_pace_metrics_are_held_only_shortly_before_a_look():
    fast = sampler(look_s=60.0)
    for step in range(20):
        stamp(fast, step, {"loss": 1.0})
        time.sleep(0.001)
    assert [each.step for each in fast.collect().metrics] == [18, 19]
    stamp(fast, 20, {"loss": 1.0})
    assert fast.collect().metrics == [], "the next look is a minute away"


@pytest.mark.parametrize(
    ("preset", "split"),
    [
        (None, None),
        ("monitor_only", None),
        ("replicate", None),
        ("zero1", None),
        ("fsdp", "fsdp"),
        ("fsdp_tensor", "fsdp_tensor"),
        (MonitorSettings(), None),
        (jm.load_preset(policy={"sharding": {"embed": "fsdp"}}), "rules"),
    ],
)
def test_what_a_policy_splits_whole_is_known_to_the_detectors(preset, split):
    assert split_of(preset_given(preset)) == split
