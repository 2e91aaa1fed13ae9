"""Checkpoint saves: heard from the real Orbax, told in the run's files and on TensorBoard, and said of what fell into one."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import jaxmem_callbacks as jm
from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.analysis.run_summary import DURING, Saves
from jaxmem_callbacks.callbacks.recorder import SAVES_SHOWN, saves_table
from jaxmem_callbacks.probes.jax_events import SavesProbe
from jaxmem_callbacks.readers.runs import stories_of
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import CheckpointSave, Reading, SaveSpan
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.writers.figures import draw_over_time
from jaxmem_callbacks.writers.protocol import LoggedTable
from jaxmem_callbacks.writers.report import story_model
from tests.sample_records import points
from tests.watching import NotingMonitor, assert_written

pytestmark = pytest.mark.core

MIB = 2**20
# Kept in NumPy: Orbax copies it before it goes on in the background, since a user may overwrite it. So large that it is still
# being written when the copy is read, and that what other tests of this process let go of meanwhile does not hide it.
BUFFER, LET_GO = 128 * MIB, 32 * MIB
STEPS, SAVED = 12, (3, 7, 11)
SETTINGS = MonitorSettings(window_s=0.02, scan_s=0.02, host_s=0.005, on_error="raise")
STARTED, ENDED = "/jax/orbax/write/start", "/jax/orbax/write/total_duration_secs"


class Run(NamedTuple):
    folder: Path
    double: jm.CollectingWriter
    restored: list[bool]


def let_go() -> None:
    """Give the system back what other tests of this process no longer hold, so that it does not happen during the save."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A training that saves by both interfaces of Orbax, one waiting for it and two in the background, one of a large buffer."""
    folder, double = tmp_path_factory.mktemp("run"), jm.CollectingWriter()
    state = {"w": jnp.ones((512, 512))}
    replayed = np.random.default_rng(0).random(BUFFER // 8)
    manager = ocp.CheckpointManager(
        folder / "old", options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    )
    later = ocp.CheckpointManager(folder / "later")
    with jm.MemoryMonitor(SETTINGS, logdir=folder / "run", writer=double) as monitor:
        for step in range(30):
            monitor(step)
            if step == 9:
                manager.save(step, args=ocp.args.StandardSave(state))
            if step == 19:
                monitor.flush()  # the save before is told
                let_go()
                monitor.flush()  # what is held before this one is read
                later.save(step, args=ocp.args.StandardSave({**state, "replayed": replayed}))
                monitor.flush()  # the copy is held until it is written
                later.wait_until_finished()
            if step == 24:
                v1.save_async(folder / "v1", state).result()
        monitor.flush()
        found = [manager.restore(9, args=ocp.args.StandardRestore(state)), v1.load(folder / "v1", state)]
    return Run(folder / "run", double, [bool((each["w"] == state["w"]).all()) for each in found])


def test_every_save_of_the_real_orbax_is_a_record(run: Run) -> None:
    saves = run.double.of(CheckpointSave)
    assert [(save.first_step, save.background) for save in saves] == [(9, False), (19, True), (24, True)]
    assert all(0 < save.time_s - save.began_s < 60 for save in saves)
    assert all(save.step >= save.first_step for save in saves)
    assert run.restored == [True, True], "and the checkpoints are whole"


def test_saves_are_in_the_files_of_the_run(run: Run) -> None:
    lines = [json.loads(line) for line in (run.folder / "memory.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["kind"] == "checkpoint_save"]
    assert [line["first_step"] for line in kept] == [9, 19, 24]
    (story,) = stories_of(run.folder)
    assert list(story.saves) == list(run.double.of(CheckpointSave))
    page = EventAccumulator(str(run.folder), size_guidance={"tensors": 0}).Reload()
    (*_, last) = page.Tensors("memory/checkpoint_saves/text_summary")
    text = last.tensor_proto.string_val[0].decode()
    assert text.startswith(f"| {DURING} | seconds |")
    assert "| after step 9 to " in text
    assert text.index("after step 24") < text.index("after step 9"), "newest first"


def test_the_peak_of_a_save_is_what_each_file_of_the_run_shows(run: Run) -> None:
    """Orbax's own copy of a buffer is the spike: in the record, the line, TensorBoard's table and chart, and the report."""
    save = run.double.of(CheckpointSave)[1]
    high, before = save.highs["resident_bytes"], save.before["resident_bytes"]
    assert high - before >= BUFFER - LET_GO
    lines = [json.loads(line) for line in (run.folder / "memory.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["kind"] == "checkpoint_save" and line["first_step"] == 19]
    assert (line["highs"]["resident_bytes"], line["before"]["resident_bytes"]) == (high, before)
    page = EventAccumulator(str(run.folder), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    text = page.Tensors("memory/checkpoint_saves/text_summary")[-1].tensor_proto.string_val[0].decode()
    header, (row,) = text.splitlines()[0], [row for row in text.splitlines() if row.startswith("| after step 19 to ")]
    assert dict(zip(header.split(" | "), row.split(" | "), strict=True))["host, highest |"] == (
        f"{format_bytes(high)} ({format_bytes(before)} before) |"
    )
    # A window has a maximum beside its mean only where its values differ.
    tags = {"memory/host_mib", "window/memory/host_mib/max"} & set(page.Tags()["scalars"])
    shown = max(point.value for tag in tags for point in page.Scalars(tag) if point.step >= 19)
    assert round(shown * MIB) >= high * (1 - 1e-6)
    (story,) = stories_of(run.folder)
    shown = [each for each in story_model(story)["saves"] if each["steps"][0] == 19]
    assert [(each["to"] - each["from"], each["highs"]) for each in shown] == [(save.time_s - save.began_s, save.highs)]


def trained(folder: Path, hook: Any) -> list[np.ndarray]:
    """Losses, checkpoints as they are restored, and the last weights of a training that saves in the background."""
    step = jax.jit(lambda w, batch: (w - 0.1 * jnp.tanh(batch @ w), {"loss": (w**2).mean()}))
    manager, w, losses = ocp.CheckpointManager(folder), jnp.full((16, 16), 0.5), []
    for number, batch in enumerate(jax.random.normal(jax.random.key(0), (STEPS, 16, 16))):
        w, metrics = step(w, batch)
        hook(number, metrics)
        losses.append(metrics["loss"])
        if number in SAVED:
            manager.save(number, args=ocp.args.StandardSave({"w": w}))
    manager.wait_until_finished()
    restored = [manager.restore(number, args=ocp.args.StandardRestore({"w": w}))["w"] for number in SAVED]
    return [np.asarray(each) for each in (*losses, *restored, w)]


def test_a_training_that_saves_is_the_same_and_every_step_is_told_once(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", lambda number, metrics: None)
    with NotingMonitor(tmp_path / "run") as monitor:
        watched = trained(tmp_path / "watched", monitor)
    assert [np.array_equal(one, other) for one, other in zip(plain, watched, strict=True)] == [True] * len(plain)
    assert not np.array_equal(plain[0], plain[STEPS - 1]), "it trained"
    assert_written(monitor, range(STEPS), "loss")
    (story,) = stories_of(tmp_path / "run")
    assert [(save.first_step, save.background) for save in story.saves] == [(number, True) for number in SAVED]


class Held:
    """A device that holds what a test says."""

    def __init__(self) -> None:
        self.bytes = 100

    def read(self, step: int) -> Sequence[Reading]:
        return [
            Reading(source="live_arrays", device="gpu:0", step=step, time_s=time.time(), live_array_bytes=self.bytes)
        ]


@pytest.mark.parametrize("saving", [True, False])
def test_a_device_that_is_nearly_full_while_a_checkpoint_is_saved_is_told_so(saving: bool) -> None:
    double, device = jm.CollectingWriter(), Held()
    rare = MonitorSettings(window_s=3600.0, scan_s=3600.0, limit_bytes=1000, on_error="raise")
    with jm.MemoryMonitor(rare, writer=double, probes=[device]) as monitor:
        monitor(3)
        monitor.flush()
        if saving:
            jax.monitoring.record_event(STARTED)
        device.bytes = 980
        monitor.flush()
        device.bytes = 120
        if saving:
            jax.monitoring.record_event_duration_secs(ENDED, 0.01)
        monitor.flush()
    (event,) = monitor.events
    assert event.kind == "near_oom"
    assert event.message.endswith(f"It was {DURING}.") == saving
    assert event.figures.get("when") == (DURING if saving else None)
    saves = double.of(CheckpointSave)
    assert [(save.before, save.highs) for save in saves] == [
        ({"live_array_bytes": 100}, {"live_array_bytes": 980})
    ] * saving
    tables = [table for table in double.of(LoggedTable) if table.tag == "memory/checkpoint_saves"]
    assert [table.rows[0][3] for table in tables] == ["980 B (100 B before)"] * saving


def heard(*calls: tuple[str, float | None]) -> SavesProbe:
    probe = SavesProbe()
    probe.start()
    try:
        for event, seconds in calls:
            if seconds is None:
                jax.monitoring.record_event(event)
            else:
                jax.monitoring.record_event_duration_secs(event, seconds)
    finally:
        probe.stop()
    jax.monitoring.record_event(STARTED)
    probe.stop()  # twice is harmless
    return probe


def test_what_is_heard_is_begin_and_end_until_the_probe_stops() -> None:
    probe = heard((STARTED, None), ("/jax/orbax/read/start", None))
    assert probe.running
    assert [(ended_s, background) for _, ended_s, background in probe.drain()] == [(None, False)]
    assert len(heard((STARTED, None), (ENDED, 0.0)).drain()) == 1
    assert heard((ENDED, 1.0)).drain() == [], "one that began before the monitor"


def test_a_closed_monitor_listens_no_longer() -> None:
    with jm.MemoryMonitor(SETTINGS) as monitor:
        monitor(0)
        assert monitor._sampler._saves.running is False
    jax.monitoring.record_event(STARTED)
    assert monitor._sampler._saves.running is False


def test_a_save_that_failed_counts_as_running_until_the_next_one_ends() -> None:
    probe = SavesProbe()
    probe.start()
    jax.monitoring.record_event("/jax/orbax/write/async/start")  # fails, and never tells its end
    time.sleep(0.02)
    jax.monitoring.record_event(STARTED)
    jax.monitoring.record_event_duration_secs(ENDED, 0.0)
    probe.stop()
    assert not probe.running
    ((began_s, ended_s, background),) = probe.drain()
    assert not background
    assert ended_s is not None
    assert ended_s >= began_s


def test_two_saves_at_once_end_in_their_order() -> None:
    probe = SavesProbe()
    probe.start()
    began_s = time.time()
    jax.monitoring.record_event("/jax/orbax/write/async/start")
    time.sleep(0.02)
    jax.monitoring.record_event("/jax/orbax/write/async/start")
    jax.monitoring.record_event_duration_secs("/jax/orbax/write/async/total_duration_secs", time.time() - began_s)
    first, second = probe.drain()
    probe.stop()
    assert (first[1] is None, second[1] is None) == (False, True)
    assert first[0] < second[0]


def reading(time_s: float, **values: Any) -> Reading:
    return Reading(source="allocator", device="gpu:0", step=1, time_s=time_s, **values)


def test_highs_are_those_of_readings_within_the_save() -> None:
    saves = Saves()
    span = SaveSpan(began_s=10.0, ended_s=None, first_step=4, background=True)
    assert saves.learn(Observation(step=4, time_s=9, readings=[reading(9.0, in_use_bytes=5)])) == []
    seen = [reading(9.5, in_use_bytes=6), reading(10.5, in_use_bytes=50)]
    assert saves.learn(Observation(step=5, time_s=11, readings=seen, saves=[span])) == []
    ended = SaveSpan(began_s=10.0, ended_s=12.0, first_step=4, background=True)
    seen = [reading(11.5, in_use_bytes=40, resident_bytes=7), reading(12.5, in_use_bytes=99)]
    (save,) = saves.learn(Observation(step=6, time_s=13, readings=seen, saves=[ended]))
    assert (save.before, save.highs) == ({"in_use_bytes": 6}, {"in_use_bytes": 50, "resident_bytes": 7})
    assert (save.first_step, save.step, save.time_s) == (4, 6, 12.0)


def save_at(step: int, **values: Any) -> CheckpointSave:
    return CheckpointSave(step=step + 1, time_s=2.5, first_step=step, began_s=1.0, background=False, **values)


def test_the_table_says_what_was_not_read() -> None:
    table = saves_table([save_at(step, highs={"resident_bytes": MIB}) for step in range(SAVES_SHOWN + 5)])
    assert len(table.rows) == SAVES_SHOWN
    unknown = "unknown, because nothing was read meanwhile"
    assert table.rows[0] == ("after step 24 to 25, while the training waited", "1.50", unknown, unknown, "1.0 MiB")


def test_saves_are_shaded_in_the_drawing() -> None:
    """In the page too: see tests/test_memory_tab.py."""
    assert draw_over_time(points(), [], saves=[save_at(3)]) != draw_over_time(points(), [])
