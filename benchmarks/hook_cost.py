"""What watching a run costs it. Writes results/hook_cost.json.

    python -m benchmarks.hook_cost [--rounds 6] [--steps 300] [--devices 1 8]

One real jitted step, padded to 5 ms as in training, beside 1000 live arrays. The loop runs in blocks, a bare one between each two
of: an empty hook, the monitor with everything on at its default cadence, stormlog's tracker, tensorboardX called in the loop. So
all that is compared comes from one run on one machine, and ratios hold where times do not. Two bare blocks differ by some
percent, more than the goals, so the monitor has a block before each other one, and its ratios are medians of many. `make
bench-hook` installs stormlog; without it the benchmark refuses to start.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import psutil
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tensorboardX import SummaryWriter

import jaxmem_callbacks as jm
from benchmarks.sources import RESULTS, source_hash

STEP_S = 0.005
LIVE = 1000  # arrays: as many as a model with its optimizer has
SETTLING = 40  # steps at the start of a block that are not counted: windows open, first samples are written
GOALS = {"hook_above_bare_median_us": 10.0, "whole_step_mean_ratio": 1.01, "whole_step_p99_ratio": 1.05}
JUDGED, STORMLOG = "monitor, everything on", "stormlog tracker"
Hook = Callable[[int, Any], object]
Way = Callable[[Path], contextlib.AbstractContextManager[Hook]]


def nothing(step: int, metrics: Any) -> None:
    """No hook."""


@contextlib.contextmanager
def bare(folder: Path) -> Iterator[Hook]:
    """The loop alone; its "hook" is an empty function, so that both clocks of the measurement are in every way alike."""
    del folder
    yield nothing


@contextlib.contextmanager
def empty_object(folder: Path) -> Iterator[Hook]:
    """The floor: an object that is called and does nothing, where the caches hold what a step leaves behind."""
    del folder

    class Nothing:
        def __call__(self, step: int, metrics: Any = None) -> None:
            pass

    yield Nothing()


@contextlib.contextmanager
def monitored(folder: Path) -> Iterator[Hook]:
    """jm.MemoryMonitor with its default preset, writing TensorBoard and JSON lines."""
    with jm.MemoryMonitor(logdir=folder) as monitor:
        yield monitor


@contextlib.contextmanager
def stormlog(folder: Path) -> Iterator[Hook]:
    """Stormlog's tracker at its default second, writing its telemetry; it has no hook and knows no steps or metrics."""
    from stormlog.jax import MemoryTracker  # pyright: ignore[reportMissingImports]
    from stormlog.telemetry_sink import TelemetrySinkConfig  # pyright: ignore[reportMissingImports]

    tracker = MemoryTracker(enable_logging=False, telemetry_sink_config=TelemetrySinkConfig(root_dir=folder))
    tracker.start_tracking()
    try:
        yield nothing
    finally:
        tracker.stop_tracking()


def inline(every_s: float) -> Way:
    """TensorBoardX in the loop, writing what the monitor shows here: loss, bytes of live arrays, host memory."""

    @contextlib.contextmanager
    def way(folder: Path) -> Iterator[Hook]:
        with SummaryWriter(str(folder)) as writer:
            process, next_s = psutil.Process(), 0.0

            def hook(step: int, metrics: Any) -> None:
                nonlocal next_s
                if time.monotonic() < next_s:
                    return
                next_s = time.monotonic() + every_s
                writer.add_scalar("train/loss", float(metrics["loss"]), step)
                held = sum(array.nbytes for array in jax.live_arrays())
                writer.add_scalar("memory/live_arrays_gib", held / 2**30, step)
                writer.add_scalar("memory/host_gib", process.memory_info().rss / 2**30, step)

            yield hook

    return way


def ways() -> dict[str, Way]:
    """What is compared."""
    return {
        "an object that does nothing": empty_object,
        JUDGED: monitored,
        STORMLOG: stormlog,
        "tensorboardX in the loop, every second": inline(1.0),
        "tensorboardX in the loop, every step": inline(0.0),
    }


@dataclasses.dataclass(frozen=True)
class Block:
    """Seconds in the hook and seconds of the whole step, one entry a step."""

    hooks: list[float]
    wholes: list[float]

    def joined(self, other: Block) -> Block:
        return Block(self.hooks + other.hooks, self.wholes + other.wholes)


def block(train_step: Any, state: Any, hook: Hook, steps: int) -> Block:
    """One stretch of the loop."""
    hooks: list[float] = []
    wholes: list[float] = []
    for step in range(steps + SETTLING):
        began = time.perf_counter()
        time.sleep(STEP_S)  # a loop waits for its data or for the device here; the hook follows the dispatch at once
        state, metrics = train_step(state)
        before = time.perf_counter()
        hook(step, metrics)
        ended = time.perf_counter()
        hooks.append(ended - before)
        wholes.append(ended - began)
    return Block(hooks[SETTLING:], wholes[SETTLING:])


def hot_us(calls: int = 20_000, batches: int = 5) -> float:
    """Microseconds of one call of the monitor among many in a row: its work without the cold caches that a step leaves behind.

    Of several batches the least: in the first one the monitor's own thread imports what its first look needs.
    """

    def batch() -> float:
        began = time.perf_counter()
        for step in range(calls):
            hook(step)
        return (time.perf_counter() - began) / calls * 1e6

    with jm.MemoryMonitor() as hook:
        hook(0)
        return min(batch() for _ in range(batches))


def measure(rounds: int, steps: int) -> dict[str, Any]:
    """Figures of each way to run the loop, on the devices of this process."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    split = NamedSharding(mesh, P("data"))
    # Each run records what makes its peak, whose largest buffers the monitor writes when it meets the program.
    train_step = jm.jit_step(lambda state: (state + 1, {"loss": state.sum()}), donate_argnames=())
    state = jax.device_put(jnp.zeros(64), split)
    arrays = [jax.device_put(jnp.zeros(64) + index, split) for index in range(LIVE)]
    jax.block_until_ready((train_step(state), arrays))

    def run(way: Way) -> Block:
        with tempfile.TemporaryDirectory() as folder, way(Path(folder)) as hook:
            return block(train_step, state, hook, steps)

    compared = ways()
    seen: dict[str, list[tuple[Block, Block]]] = {name: [] for name in compared}
    for index in range(rounds + 1):
        names = [name for name in compared if name != JUDGED]
        before = run(bare)
        for name in in_turn(names[index % len(names) :] + names[: index % len(names)]):
            measured = run(compared[name])
            after = run(bare)
            if index:  # the first round warms up
                seen[name].append((measured, before.joined(after)))
            before = after
    del arrays
    return {name: figures(pairs) for name, pairs in seen.items()}


def in_turn(others: list[str]) -> list[str]:
    """What is judged, before each of the others."""
    return [name for other in others for name in (JUDGED, other)]


def figures(pairs: list[tuple[Block, Block]]) -> dict[str, float]:
    """Of one way: its hook, and its whole steps as ratios to the bare loop right before and after."""
    hooks = [each for way, _ in pairs for each in way.hooks]
    none = statistics.median(each for _, base in pairs for each in base.hooks)
    means = [statistics.mean(way.wholes) / statistics.mean(base.wholes) for way, base in pairs]
    tails = [p99(way.wholes) / p99(base.wholes) for way, base in pairs]
    return {
        "blocks": len(pairs),
        "hook_median_us": round(statistics.median(hooks) * 1e6, 2),
        "hook_above_bare_median_us": round((statistics.median(hooks) - none) * 1e6, 2),
        "hook_p99_us": round(p99(hooks) * 1e6, 1),
        "whole_step_mean_ratio": round(statistics.median(means), 4),
        "whole_step_mean_ratio_lowest": round(min(means), 4),
        "whole_step_mean_ratio_highest": round(max(means), 4),
        "whole_step_p99_ratio": round(statistics.median(tails), 4),
        "whole_step_p99_ratio_lowest": round(min(tails), 4),
        "whole_step_p99_ratio_highest": round(max(tails), 4),
    }


def p99(values: list[float]) -> float:
    """The value that one in a hundred exceeds."""
    return statistics.quantiles(values, n=100)[98]


def met(of_device: dict[str, Any]) -> dict[str, bool]:
    """Each goal, and whether the monitor reached it."""
    return {goal: of_device[JUDGED][goal] <= limit for goal, limit in GOALS.items()}


def slow_step_is_not_serialised(step_s: float = 0.2, steps: int = 10) -> dict[str, float]:
    """Seconds of a run of slow device steps whose host work takes as long: together where the hook waits for nothing."""
    spin = jax.jit(lambda state, rounds: jax.lax.fori_loop(0, rounds, lambda _, x: jnp.tanh(x @ x) * 0.5, state))
    state = jnp.full((256, 256), 0.01)
    jax.block_until_ready(spin(state, 20))
    began = time.perf_counter()
    jax.block_until_ready(spin(state, 20))
    count = max(20, int(20 * step_s / (time.perf_counter() - began)))
    hooks: list[float] = []
    waiting = 0
    with tempfile.TemporaryDirectory() as folder, jm.MemoryMonitor(logdir=folder) as monitor:
        for step in range(steps):
            state = spin(state, count)
            metrics = {"loss": state[0, 0]}
            before = time.perf_counter()
            monitor(step, metrics)
            hooks.append(time.perf_counter() - before)
            waiting += not metrics["loss"].is_ready()
            jax.block_until_ready(state)
    return {"steps": steps, "still_running_after_the_hook": waiting, "hook_median_us": statistics.median(hooks) * 1e6}


def child(devices: int, rounds: int, steps: int) -> dict[str, Any]:
    """The measurement on so many virtual devices, which only a process of its own can have."""
    command = [sys.executable, "-m", "benchmarks.hook_cost", "--here", str(devices)]
    done = subprocess.run(  # noqa: S603 - our own module
        [*command, "--rounds", str(rounds), "--steps", str(steps)], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Measure, print, write the result file; 1 when a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", type=Path, default=RESULTS / "hook_cost.json")
    parser.add_argument("--here", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        if options.here > 1:
            jax.config.update("jax_num_cpu_devices", options.here)
        print(json.dumps(measure(options.rounds, options.steps)))
        return 0
    if not importlib.util.find_spec("stormlog"):
        sys.exit(
            "stormlog is not installed, and no result goes without it: make bench-hook, or pip install --no-deps stormlog"
        )
    load = os.getloadavg()[0]
    by_devices = {str(count): child(count, options.rounds, options.steps) for count in options.devices}
    goals = {count: met(seen) for count, seen in by_devices.items()}
    result = {
        "command": f"python -m benchmarks.hook_cost --rounds {options.rounds} --steps {options.steps}",
        "sources": source_hash("hook_cost"),
        "what": "5 ms steps, 1000 live arrays; microseconds on the training thread, with and without the bare loop's reads of a "
        "clock and its empty function; ratios to the bare loop right before and after, of the mean and of the p99: median, "
        "lowest and highest of the blocks",
        "goals": GOALS,
        "met": goals,
        "by_devices": by_devices,
        "hook_in_a_row_us": round(hot_us(), 2),
        "device_step_of_200_ms": slow_step_is_not_serialised(),
        "stormlog": importlib.metadata.version("stormlog"),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": jax.default_backend(),
        "cpus": os.cpu_count(),
        "load_average_1_min_at_start": round(load, 1),
        "steps_per_block": options.steps,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    for count, seen in by_devices.items():
        print(f"{count} devices")
        for name, each in seen.items():
            print(
                f"  {name:40} {each['hook_median_us']:8.2f} us median, above bare {each['hook_above_bare_median_us']:8.2f},"
                f" {each['hook_p99_us']:9.1f} us p99"
                f" {each['whole_step_mean_ratio']:8.4f} mean {each['whole_step_p99_ratio']:8.4f} p99 of the bare step"
            )
    missed = [f"{goal} on {count}" for count, each in goals.items() for goal, right in each.items() if not right]
    print(f"goals {GOALS}: {'missed ' + ', '.join(missed) if missed else 'all met'}; written to {options.out}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
