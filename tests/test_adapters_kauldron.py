"""The real Kauldron: a Trainer is trained to its end, under its transfer guard, with the monitor in its profiler's place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.watching import NotingMonitor, assert_written, tensors

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]


def weights_after(run: Any) -> list[np.ndarray]:
    state, _ = run.train()
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]


def test_a_training_with_the_monitor_in_the_profilers_place_is_the_same(tmp_path: Path) -> None:
    from jaxmem_callbacks.integrations.kauldron import MemoryProfiler
    from tests.kauldron_run import STEPS, trainer

    plain = weights_after(trainer(tmp_path / "plain", None))
    with NotingMonitor(tmp_path / "monitor") as monitor:
        watched = weights_after(trainer(tmp_path / "watched", MemoryProfiler(monitor=monitor, profiler=None)))
    assert all(map(np.array_equal, plain, watched))
    assert tensors(tmp_path / "plain" / "train", "losses/total") == tensors(
        tmp_path / "watched" / "train", "losses/total"
    )
    assert [step for step, _ in tensors(tmp_path / "watched" / "train", "losses/total")] == list(range(0, STEPS, 2))
    assert_written(monitor, range(STEPS))


def test_it_makes_its_monitor_by_the_name_of_a_preset_in_the_folder_of_the_run(tmp_path: Path) -> None:
    from jaxmem_callbacks.integrations.kauldron import MemoryProfiler
    from tests.kauldron_run import CALLED, STEPS, OwnProfiler, trainer

    run = trainer(tmp_path, MemoryProfiler(preset="monitor_only", profiler=OwnProfiler()))
    run.train()
    run.profiler.watching.close()
    lines = [json.loads(line) for line in (tmp_path / "memory" / "memory.jsonl").read_text().splitlines()]
    assert lines[-1]["kind"] == "end"
    assert max(line.get("step", -1) for line in lines if line["kind"] == "reading") == STEPS - 1
    assert list(range(STEPS)) == CALLED, "the place's own profiler goes on"


def test_a_run_on_a_bucket_is_watched_without_curves_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    from jaxmem_callbacks.integrations.kauldron import MemoryProfiler

    profiler = MemoryProfiler(workdir="gs://bucket/run", profiler=None)
    for step in range(3):
        profiler(step)
    sampled = profiler.watching.sample(3)
    profiler.watching.close()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("jaxmem:")]
    assert line.startswith("jaxmem: no memory curves are written, since workdir='gs://bucket/run' is no local folder")
    assert sampled["memory/host_gib"] > 0
