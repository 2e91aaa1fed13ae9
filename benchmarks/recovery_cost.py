"""What jm.Recovery costs a run in which nothing fails. Writes results/recovery_cost_jax_<version>.json.

    python -m benchmarks.recovery_cost

What a report takes where memory does run out is measured beside it (`oom_report.py`).

On the CPU, by wall clock. Short blocks of steps take turns, one way of running them beside the other, and each copy of a state
stands beside a copy of the same bytes in memory. So what is compared happens within a moment on one machine, and medians of
ratios hold where times do not.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem_callbacks as jm
from benchmarks import oom_report
from benchmarks.sources import write_result
from jaxmem_callbacks.recovery.snapshots import HostSnapshot

MIB = 2**20
ROUNDS, STEPS, COPIES = 60, 5, 15
HOST_S = 0.01  # in which the host waits for something else between two steps, such as its next batch
STATES = (16, 64, 256)  # MiB
Loop = Callable[[float], None]


def train_step(state: Any, batch: Any) -> Any:
    """Some milliseconds of matrix products."""
    loss, grads = jm.value_and_grad(lambda w, batch: (jnp.tanh(jnp.tanh(batch @ w) @ w) ** 2).mean())(state["w"], batch)
    return {"w": state["w"] - 0.1 * grads, "count": state["count"] + 1}, {"loss": loss}


def new_state() -> Any:
    """Weights and a counter."""
    return {"w": 0.01 * jnp.ones((256, 256)), "count": jnp.int32(0)}


def plain(batch: Any, *, waited: bool) -> Loop:
    """Steps of `jm.jit_step`, with a wait for each result, or with one at the end."""
    step, kept = jm.jit_step(train_step, jm.load_preset("donate")), [new_state()]

    def run(host_s: float) -> None:
        for _ in range(STEPS):
            kept[0], metrics = step(kept[0], batch)
            if waited:
                jax.block_until_ready((kept[0], metrics))
            time.sleep(host_s)
        jax.block_until_ready(kept[0])

    return run


def recovering(batch: Any) -> Loop:
    """The same by `jm.Recovery`, which takes one snapshot before the first step."""
    preset = jm.load_preset("donate", "recover", recovery={"every_steps": 10**9})
    recovery, kept, at = jm.Recovery(train_step, preset, batch_at=lambda _: batch), [new_state()], [0]

    def run(host_s: float) -> None:
        for _ in range(STEPS):
            kept[0], _ = recovery.step(at[0], kept[0])
            at[0] += 1
            time.sleep(host_s)

    return run


def steps_compared() -> dict[str, Any]:
    """A step by Recovery over one that is waited for, and both over one that is not; medians of ratios within a round."""
    batch = jnp.ones((1024, 256))
    ways = {
        "dispatched": plain(batch, waited=False),
        "waited": plain(batch, waited=True),
        "recovery": recovering(batch),
    }
    found: dict[str, Any] = {"rounds": ROUNDS, "steps_a_round": STEPS, "host_ms": 1000 * HOST_S}
    for name, host_s in (("host_idle", 0.0), ("host_busy", HOST_S)):
        rounds: list[dict[str, float]] = []
        for _ in range(ROUNDS + 1):
            seconds: dict[str, float] = {}
            for way, run in ways.items():
                begun = time.perf_counter()
                run(host_s)
                seconds[way] = (time.perf_counter() - begun) / STEPS
            rounds.append(seconds)
        rounds = rounds[1:]  # the first one compiles
        found[name] = {
            "step_ms": round(1000 * statistics.median(each["dispatched"] for each in rounds), 2),
            "recovery_over_waited": _ratio(rounds, "recovery", "waited"),
            "recovery_over_dispatched": _ratio(rounds, "recovery", "dispatched"),
        }
    return found


def _ratio(rounds: list[dict[str, float]], above: str, below: str) -> float:
    return round(statistics.median(each[above] / each[below] for each in rounds), 3)


def snapshots(mebibytes: int, folder: Path) -> dict[str, Any]:
    """What copies of a state take, each beside a copy of its bytes in memory."""
    count = mebibytes * MIB // 4 // 16
    keys = jax.random.split(jax.random.key(0), 16)  # Orbax compresses, so the numbers are no pattern
    state = {"params": [jax.random.normal(key, count) for key in keys], "count": jnp.int32(0)}
    held = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(state)]
    row: dict[str, Any] = {"state_bytes": sum(each.nbytes for each in held)}
    for kind, name in (("host", "recover"), ("orbax", "recover_from_disk")):
        preset = jm.load_preset(name, recovery={"every_steps": 1})
        recovery = jm.Recovery(passed_through, preset, batch_at=lambda _: jnp.ones(8), checkpoints=folder / kind)
        taken, ratios = [], []
        kept = jax.tree.map(jnp.copy, state)
        for step in range(COPIES + 1):
            copying = seconds_of(lambda: [each.copy() for each in held])
            kept, _ = recovery.step(step, kept)
            taken.append(recovery.report.snapshots.seconds)
            ratios.append(taken[-1] / copying)
        cost = recovery.report.snapshots
        row[kind] = {"bytes": cost.bytes, "seconds": round(statistics.median(taken[1:]), 3), **spread(ratios[1:])}
    snapshot = HostSnapshot(0, state)
    back = [
        seconds_of(lambda: jax.block_until_ready(snapshot.restore()))
        / seconds_of(lambda: [each.copy() for each in held])
        for _ in range(COPIES + 1)
    ]
    return {**row, "back_from_host": spread(back[1:])}


def seconds_of(action: Callable[[], Any]) -> float:
    """How long something takes that makes new arrays, which go at once."""
    begun = time.perf_counter()
    made = action()
    took = time.perf_counter() - begun
    del made
    return took


def spread(ratios: list[float]) -> dict[str, float]:
    """The middle of ratios to a copy in memory, and the quarters beside it."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"over_a_memory_copy": round(middle, 2), "from": round(low, 2), "to": round(high, 2)}


def passed_through(state: Any, batch: Any) -> Any:
    """A step that changes next to nothing of a large state."""
    loss, grads = jm.value_and_grad(lambda w, batch: (batch * w).sum())(jnp.float32(1.0), batch)
    return {**state, "count": state["count"] + 1}, {"loss": loss + grads}


def main() -> None:
    """Measure and write the result file."""
    compared = steps_compared()
    with tempfile.TemporaryDirectory() as folder:
        rows = [snapshots(size, Path(folder) / str(size)) for size in STATES]
    write_result("recovery_cost", steps=compared, snapshots=rows)
    print(json.dumps({"steps": compared, "snapshots": rows}, indent=1))
    oom_report.main()


if __name__ == "__main__":
    main()
