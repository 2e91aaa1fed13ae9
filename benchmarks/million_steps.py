"""A million steps under the monitor: memory stays flat, files stay small, lost stamps are counted.

Writes results/million_steps_jax_<version>.json.

    python -m benchmarks.million_steps [--steps 1000000]

Real jitted steps in a row, as fast as they go, with everything on: a run of a minute. How many windows a million slower steps
leave is counted apart, with the monitor's own windows on a clock that jumps, and multiplied by the bytes that a window took.
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
from jaxmem_callbacks.analysis.windows import Window, Windows
from jaxmem_callbacks.records.settings import MonitorSettings
from jaxmem_callbacks.writers.protocol import Record, Table, Writer

GOAL_BYTES = 50 * 10**6
FLAT_BYTES = 8 * 2**20  # what resident memory may grow by, from a fifth of the run to its end
PACES_S = (0.005, 0.1, 1.0)


class Counting(Writer):
    """Counts windows and keeps the last table, which says how many stamps were lost."""

    def __init__(self) -> None:
        self.windows = 0
        self.rows: dict[str, str] = {}

    def write(self, record: Record) -> None:
        if isinstance(record, Window):
            self.windows += 1
        elif isinstance(record, Table):
            self.rows = {row[0]: row[1] for row in record.rows}


def run(steps: int) -> dict[str, Any]:
    """The real run."""
    process, resident, counting = psutil.Process(), [], Counting()
    train_step = jax.jit(lambda state: (state + 1, {"loss": state.sum()}))
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
        "bytes_a_window": round(sizes["events"] / counting.windows),
        "dropped_stamps": int(counting.rows["stamps dropped by the monitor"]),
    }


def windows_of(steps: int, pace_s: float) -> int:
    """How many windows a run of slower steps leaves, at the default span."""
    span_s, count = MonitorSettings().window_s, 0
    windows = Windows(span_s)
    for step in range(steps):
        windows.add({"memory/host_gib": 1.0})
        count += windows.close(step, step * pace_s) is not None
    return count


def main() -> int:
    """Measure, print, write the result file; 1 when a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    real = run(options.steps)
    slower = {
        f"{pace_s} s": {
            "windows": (count := windows_of(options.steps, pace_s)),
            "event_file_bytes": count * real["bytes_a_window"],
        }
        for pace_s in PACES_S
    }
    met = {
        "resident memory is flat": real["resident_growth_bytes"] <= FLAT_BYTES,
        "event files under 50 MB": max(
            real["file_bytes"]["events"], *(each["event_file_bytes"] for each in slower.values())
        )
        < GOAL_BYTES,
    }
    write_result("million_steps", options=f"--steps {options.steps}", met=met, real=real, steps_of=slower)
    print(real, slower, met, sep="\n")
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
