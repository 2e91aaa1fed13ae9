"""Records that several writers' tests write."""

from __future__ import annotations

from jaxmem_callbacks.analysis.figures import Point, Spread, Window
from jaxmem_callbacks.records.programs import Compilation, ProgramMemory
from jaxmem_callbacks.records.runs import MemoryEvent, Reading
from jaxmem_callbacks.writers.protocol import LoggedTable

MIB = 2**20
EVENT = MemoryEvent(
    kind="near_oom",
    step=12,
    time_s=1700000000.5,
    device="gpu:0",
    message="gpu:0 holds 97 MiB of a limit of 100 MiB.",
    action="Take a smaller batch.",
    figures={"limit_bytes": 100 * MIB, "headroom_share": 0.03, "program": "a|b"},
)
WINDOW = Window(
    step=7,
    time_s=1700000000.25,
    spreads={
        "memory/in_use_gib": Spread(low=1.0, mean=2.0, high=4.0, count=3),
        "train/loss": Spread(low=0.5, mean=0.5, high=0.5, count=1),
    },
    ranged=frozenset({"memory/in_use_gib"}),
)
TABLE = LoggedTable(
    tag="memory/known_here",
    step=3,
    time_s=1700000000.0,
    columns=("figure", "why"),
    rows=[("pool", "unknown, because | so")],
)
READING = Reading(
    source="allocator", device="gpu:1", step=4, time_s=1.5, in_use_bytes=5, limit_bytes=2**40, largest_free_bytes=3
)
MEMORY = ProgramMemory(
    name="step", platform="cpu", target="attached", argument_bytes=1, output_bytes=2, alias_bytes=0, temp_bytes=3
)
COMPILED = Compilation(program="step", time_s=2.0, signature=(("x", "float32[8]"),), memory=MEMORY)


def points() -> list[Point]:
    return [
        Point(step=step, time_s=float(step), highs={"memory/live_arrays_gib": 0.5 + step / 100, "memory/host_gib": 1.0})
        for step in range(10)
    ]
