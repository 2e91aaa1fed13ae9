"""A million steps under the monitor: memory stays flat, files stay small, lost stamps are counted.

Writes results/million_steps_jax_<version>.json.

    python -m benchmarks.million_steps [--steps 1000000]

Real jitted steps in a row, as fast as they go, with everything on: a run of a minute. What a million slower steps leave is
counted apart, with the monitor's own windows and spans of pictures on a clock that jumps, and multiplied by the bytes of a window
with every figure that there is, and of a picture in a run that draws all the time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import psutil

import jaxmem_callbacks as jm
from benchmarks.sources import write_result
from jaxmem_callbacks.analysis.figures import DERIVED, FIGURES, Spread, Window, Windows
from jaxmem_callbacks.analysis.timeseries import PICTURES, RateLimiter
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import Dropped
from jaxmem_callbacks.writers.protocol import Picture, Record, Writer
from jaxmem_callbacks.writers.tensorboard import TensorBoardWriter

GOAL_BYTES = 50 * 10**6
FLAT_BYTES = 8 * 2**20  # what resident memory may grow by, from a fifth of the run to its end
PACES_S = (0.005, 0.1, 1.0)
ARRAYS = 1000


class Counting(Writer):
    """Counts windows, pictures and the stamps that were lost."""

    takes_pictures = True

    def __init__(self) -> None:
        self.windows = self.pictures = self.lost = 0

    def write(self, record: Record) -> None:
        if isinstance(record, Window):
            self.windows += 1
        elif isinstance(record, Picture):
            self.pictures += 1
        elif isinstance(record, Dropped):
            self.lost = record.stamps


def run(steps: int) -> dict[str, Any]:
    """The real run."""
    process, resident, counting = psutil.Process(), [], Counting()
    train_step = jm.jit_step(lambda state: (state + 1, {"loss": state.sum()}), donate_argnames=())
    state = jnp.zeros(8)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        with jm.MemoryMonitor(logdir=folder, writer=counting) as monitor:
            for step in range(steps):
                state, metrics = train_step(state)
                monitor(step, metrics)
                if step % (steps // 10) == steps // 10 - 1:
                    jax.block_until_ready(state)
                    resident.append(process.memory_info().rss)
        seconds = time.monotonic() - began
        sizes = {path.name.split(".")[0]: path.stat().st_size for path in Path(folder).iterdir()}
    return {
        "steps": steps,
        "seconds": round(seconds, 1),
        "resident_mib_at_each_tenth": [round(each / 2**20, 1) for each in resident],
        "resident_growth_bytes": resident[-1] - resident[1],
        "file_bytes": sizes,
        "windows": counting.windows,
        "dropped_stamps": counting.lost,
    }


def bytes_of_a_window(count: int = 1000) -> int:
    """Bytes of the event file for a window with every figure that there is, each with a range, and one metric."""
    tags = [*(figure.tag for figure in (*FIGURES, *DERIVED)), "train/loss"]
    spread = Spread(low=1.0, mean=2.0, high=3.0, count=10)
    with tempfile.TemporaryDirectory() as folder:
        writer = TensorBoardWriter(Path(folder), "long")
        before = _event_bytes(folder, writer)
        for step in range(count):
            spreads = dict.fromkeys(tags, spread)
            writer.write(Window(step=step, time_s=float(step), spreads=spreads, ranged=frozenset(tags)))
        size = _event_bytes(folder, writer) - before
        writer.close()
    return round(size / count)


def bytes_of_a_picture(seconds: float = 20.0) -> int:
    """Bytes of the event file for a picture with the table beside it, in a short run that draws all the time."""
    settings, counting = MonitorSettings(heap_map_s=0.01, figure_s=0.01), Counting()
    train_step = jax.jit(lambda state: (state + 1, {"loss": state.sum()}))
    state, held = jnp.zeros(8), [jnp.zeros(number + 1) for number in range(ARRAYS)]
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        with jm.MemoryMonitor(settings, logdir=folder, writer=counting) as monitor:
            step = 0
            while time.monotonic() - began < seconds:
                state, metrics = train_step(state)
                monitor(step, metrics)
                held[step % ARRAYS] = jnp.zeros(step % 4096 + 1)  # so that the heap map is full
                step += 1
                time.sleep(0.002)
        (events,) = Path(folder).glob("events.*")
        return round(events.stat().st_size / counting.pictures)


def _event_bytes(folder: str, writer: Writer) -> int:
    writer.flush()
    return sum(path.stat().st_size for path in Path(folder).glob("events.*"))


def left_by(steps: int, pace_s: float) -> tuple[int, int]:
    """How many windows and pictures a run of slower steps leaves, at the default spans."""
    settings = MonitorSettings()
    windows, pictures, counts = (
        Windows(settings.window_s),
        RateLimiter(settings.figure_s, PICTURES),
        [0, 2],
    )  # two at the end
    pictures.begin(0.0)
    for step in range(steps):
        now = step * pace_s
        windows.add({"memory/host_gib": 1.0})
        counts[0] += windows.close(step, now) is not None
        if pictures.is_over(now):
            pictures.begin(now)
            counts[1] += 2  # memory over time and the heap map, whose spans are the same
    return counts[0], counts[1]


def main() -> int:
    """Measure, print, write the result file; 1 when a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    real = run(options.steps)
    each_takes = {"window": bytes_of_a_window(), "picture": bytes_of_a_picture()}
    slower = {}
    for pace_s in PACES_S:
        windows, pictures = left_by(options.steps, pace_s)
        size = windows * each_takes["window"] + pictures * each_takes["picture"]
        slower[f"{pace_s} s"] = {"windows": windows, "pictures": pictures, "event_file_bytes": size}
    met = {
        "resident memory is flat": real["resident_growth_bytes"] <= FLAT_BYTES,
        "event files under 50 MB": max(
            real["file_bytes"]["events"], *(each["event_file_bytes"] for each in slower.values())
        )
        < GOAL_BYTES,
    }
    figures = {"real": real, "bytes_of_each": each_takes, "steps_of": slower}
    write_result("million_steps", options=f"--steps {options.steps}", met=met, **figures)
    print(real, each_takes, slower, met, sep="\n")
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
