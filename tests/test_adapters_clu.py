"""The real clu: a loop with its periodic actions and its writer, with and without the monitor among the hooks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import jaxmem_callbacks as jm
from tests.watching import SETTINGS, NotingMonitor, assert_written, tensors

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("default")]

STEPS = 20


def trained(writer: Any, hooks: list[Any]) -> list[np.ndarray]:
    """As the examples of Flax are written: dispatch, call each hook with the step, write the metrics now and then."""
    state = jnp.full((16, 16), 0.5)
    step = jax.jit(lambda state, batch: (state - 0.1 * jnp.tanh(batch @ state), {"loss": (state**2).mean()}))
    losses = []
    for number, batch in enumerate(jax.random.normal(jax.random.key(0), (STEPS, 16, 16)), start=1):
        state, metrics = step(state, batch)
        for hook in hooks:
            hook(number)
        losses.append(np.asarray(metrics["loss"]))
        if number % 5 == 0:
            writer.write_scalars(number, {"own_loss": losses[-1]})
    writer.flush()
    return [*losses, np.asarray(state)]


def hooks_of(writer: Any, beats: list[int]) -> list[Any]:
    """What comes with clu: progress, and an action that clu itself refuses to have called out of turn."""
    from clu import periodic_actions

    progress = periodic_actions.ReportProgress(num_train_steps=STEPS, every_steps=5, writer=writer)
    return [progress, periodic_actions.PeriodicCallback(every_steps=4, callback_fn=lambda step, t: beats.append(step))]


def test_the_monitor_is_one_hook_among_periodic_actions(tmp_path: Path) -> None:
    from clu import metric_writers

    seen = []
    for name in ("plain", "watched"):
        writer, beats = metric_writers.create_default_writer(str(tmp_path / name)), []
        hooks = hooks_of(writer, beats)
        if name == "plain":
            found = trained(writer, hooks)
        else:
            with NotingMonitor(tmp_path / "monitor") as monitor:
                hooks.append(monitor)
                found = trained(writer, hooks)
            assert_written(monitor, range(1, STEPS + 1))
        writer.close()
        seen.append((found, beats, tensors(tmp_path / name, "own_loss")))
    (plain, beats, written), (watched, watched_beats, watched_written) = seen
    assert all(map(np.array_equal, plain, watched))
    assert beats == watched_beats == [4, 8, 12, 16, 20]
    assert written == watched_written
    assert [step for step, _ in written] == [5, 10, 15, 20]


def test_it_writes_into_the_loops_own_writer(tmp_path: Path) -> None:
    from clu import metric_writers

    writer = metric_writers.create_default_writer(str(tmp_path))
    with jm.MemoryMonitor(SETTINGS, writer=writer) as monitor:
        trained(writer, [*hooks_of(writer, []), monitor])
    writer.close()
    tags = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload().Tags()["tensors"]
    assert {"own_loss", "memory/host_mib"} <= set(tags)


def test_the_package_never_imports_clu() -> None:
    sources = Path(jm.__file__).parent.rglob("*.py")
    assert not [path for path in sources if re.search(r"^\s*(import|from) clu\b", path.read_text(), re.MULTILINE)]
