"""What the monitor's hook costs a step. Writes results/hook_cost.json.

    python -m benchmarks.hook_cost [--blocks 8] [--steps 100]

One real jitted step, padded to 5 ms as in training, in blocks that alternate between no hook and the monitor with its default
preset, so that all compared figures come from one run on one machine. Medians over steps; microseconds on the training thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem_callbacks as jm
from benchmarks.sources import RESULTS, source_hash

STEP_S = 0.005
GOAL_US = 10.0
Hook = Callable[[int, Any], object]


def nothing(step: int, metrics: Any) -> None:
    """The bare loop."""


def block(train_step: Any, hook: Hook, steps: int) -> tuple[list[float], list[float]]:
    """Seconds in the hook and seconds of the whole step, one entry a step."""
    hooks: list[float] = []
    wholes: list[float] = []
    state = jnp.zeros(8)
    for step in range(steps):
        began = time.perf_counter()
        time.sleep(STEP_S)  # a loop waits for its data or for the device here; the hook follows the dispatch at once
        state, metrics = train_step(state)
        before = time.perf_counter()
        hook(step, metrics)
        ended = time.perf_counter()
        hooks.append(ended - before)
        wholes.append(ended - began)
    return hooks, wholes


def hot_us(hook: Hook, calls: int = 20_000) -> float:
    """Microseconds of one call among many in a row: its own work, without the cold caches that a step leaves behind."""
    began = time.perf_counter()
    for step in range(calls):
        hook(step, None)
    return (time.perf_counter() - began) / calls * 1e6


def measure(blocks: int, steps: int) -> dict[str, dict[str, float]]:
    """Figures of each way to run the loop, from alternating blocks."""
    train_step = jax.jit(lambda state: (state + 1, {"loss": state.sum()}))
    jax.block_until_ready(train_step(jnp.zeros(8)))
    arrays = [jnp.zeros(8) + index for index in range(1000)]  # as many as a model with its optimizer has
    with (
        tempfile.TemporaryDirectory() as folder,
        jm.MemoryMonitor() as plain,
        jm.MemoryMonitor(logdir=folder) as written,
    ):
        ways: dict[str, Hook] = {
            "no hook": nothing,
            "monitor(step)": lambda step, _: plain(step),
            "monitor(step, metrics)": plain,
            "monitor(step, metrics), logdir": written,
        }
        seen: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
        for index in range(blocks + 1):
            for name, hook in ways.items():
                hooks, wholes = block(train_step, hook, steps)
                if index:  # the first round warms up
                    seen[name][0].extend(hooks)
                    seen[name][1].extend(wholes)
        hot = {name: hot_us(hook) for name, hook in ways.items()}
    del arrays
    bare = statistics.mean(seen["no hook"][1])
    return {
        name: {
            "hook_median_us": round(statistics.median(hooks) * 1e6, 2),
            "hook_hot_us": round(hot[name], 2),
            "hook_p99_us": round(statistics.quantiles(hooks, n=100)[98] * 1e6, 2),
            "whole_step_mean_ratio": round(statistics.mean(wholes) / bare, 4),
        }
        for name, (hooks, wholes) in seen.items()
    }


def main() -> int:
    """Measure, print, write the result file; 1 when the goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULTS / "hook_cost.json")
    options = parser.parse_args()
    ways = measure(options.blocks, options.steps)
    worst = max(figures["hook_median_us"] for figures in ways.values())
    result = {
        "command": f"python -m benchmarks.hook_cost --blocks {options.blocks} --steps {options.steps}",
        "sources": source_hash("hook_cost"),
        "what": "5 ms steps, 1000 live arrays, default preset; microseconds on the training thread; ratios to the bare loop",
        "goal": {"hook_median_us": GOAL_US, "met": worst <= GOAL_US},
        "ways": ways,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": jax.default_backend(),
        "devices": jax.local_device_count(),
        "cpus": os.cpu_count(),
        "load_average_1_min": round(os.getloadavg()[0], 1),
        "steps_per_way": options.blocks * options.steps,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    for name, figures in ways.items():
        print(
            f"{name:32} {figures['hook_median_us']:8.2f} us median {figures['hook_hot_us']:7.2f} us in a row"
            f" {figures['hook_p99_us']:9.2f} us p99"
            f" {figures['whole_step_mean_ratio']:8.4f} of the bare step"
        )
    print(f"goal {GOAL_US} us median: {'met' if worst <= GOAL_US else 'missed'}; written to {options.out}")
    return 0 if worst <= GOAL_US else 1


if __name__ == "__main__":
    sys.exit(main())
