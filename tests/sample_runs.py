"""Runs written by hand for tests of what reads them, each with all that a line can hold; a monitor writes real ones."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from jaxmem_callbacks.analysis.observation import Metrics
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.programs import Compilation, ProgramMemory
from jaxmem_callbacks.records.runs import MemoryEvent, Reading, RunStart, Unavailable
from jaxmem_callbacks.writers.jsonl import JsonlWriter
from tests import sample_plans

MIB = 2**20
BEGAN = 1_700_000_000.0
LIMIT = 1000 * MIB
STEPS = 40
# What a page must show as it is and never obey.
HOSTILE = '<script>window.hurt=1</script>"\'><img src=x onerror="window.hurt=2"></svg></style>&amp; \u202e'


def memory(name: str = "train_step", temp: int = 300 * MIB, **fields: object) -> ProgramMemory:
    usual = {"platform": "gpu", "target": "attached", "argument_bytes": 200 * MIB, "output_bytes": 150 * MIB}
    return ProgramMemory(**{"name": name, "alias_bytes": 150 * MIB, "temp_bytes": temp, **usual, **fields})  # pyright: ignore[reportArgumentType]


def compiled(name: str = "train_step", rows: int = 8, temp: int = 300 * MIB) -> Compilation:
    signature = (("state.params['w']", "float32[8,8]"), ("batch['x']", f"float32[{rows},128]"))
    return Compilation(program=name, time_s=BEGAN, signature=signature, memory=memory(name, temp))


def event(text: str = "gpu:1 holds 970 MiB of a limit of 1000 MiB.", **fields: object) -> MemoryEvent:
    usual = {"kind": "near_oom", "step": 30, "time_s": BEGAN + 30, "device": "gpu:1", "action": "Take a smaller batch."}
    return MemoryEvent(**{"message": text, "figures": {"limit_bytes": LIMIT, "note": "x"}, **usual, **fields})  # pyright: ignore[reportArgumentType]


def write_run(
    folder: Path,
    run: str = "one",
    text: str = "plain",
    plan: PlanRecord | None = None,
    *,
    close: bool = True,
    peak: int = 970 * MIB,
    rows: int = 8,
    temp: int = 300 * MIB,
    kind: str = "NVIDIA H100",
    part_bytes: int | None = None,
) -> Path:
    """A run of forty steps on two GPUs that grows to its peak at step 30; every text in it is ``text``."""
    folder.mkdir(parents=True, exist_ok=True)
    start = RunStart(
        time_s=BEGAN,
        versions={"jax": "0.12.0.1", text: text},
        devices={"platform": "gpu", "kind": kind, "count": 2, "processes": 1},
        settings=dataclasses.asdict(MonitorSettings()) | {text: text},
    )
    writer = JsonlWriter(folder / "memory.jsonl", run, start=start, part_bytes=part_bytes)
    if plan is not None:
        writer.write(plan)
    writer.write(Unavailable(figure="programs", device="gpu:0", reason=text))
    writer.write(compiled(rows=rows, temp=temp))
    other = dataclasses.replace(compiled(rows=5, temp=MIB), changed=(f"batch['x']: {text}",), time_s=BEGAN + 20)
    writer.write(other)
    writer.write(Compilation(program=text, time_s=BEGAN, signature=(), unavailable="unknown, because not registered"))
    for step in range(STEPS):
        time_s = BEGAN + step
        for device, share in (("gpu:0", 0.5), ("gpu:1", 1.0)):
            used = round(peak * share * min(step + 1, 31) / 31)
            sizes = {"in_use_bytes": used, "peak_bytes_since_start": used, "limit_bytes": LIMIT}
            writer.write(Reading(source="allocator", device=device, step=step, time_s=time_s, **sizes))
        writer.write(Reading(source="host", device="host", step=step, time_s=time_s, resident_bytes=500 * MIB))
        values = {"loss": math.nan if step == STEPS - 1 else 1.0 / (step + 1), text: 1.0}
        writer.write(Metrics(step=step, time_s=time_s, values=values))
        if step == 30:
            writer.write(event(text, device=text, action=text, figures={"limit_bytes": LIMIT, text: text}))
    if close:
        close_run(writer, folder, BEGAN + STEPS - 1)
    return folder


def close_run(writer: JsonlWriter, folder: Path, time_s: float) -> None:
    """The run closed when its last step was done, and not now."""
    writer.close()
    *lines, end = (folder / "memory.jsonl").read_text().splitlines()
    ended = json.dumps(json.loads(end) | {"time_s": time_s})
    (folder / "memory.jsonl").write_text("\n".join([*lines, ended]) + "\n")


def hostile_plan() -> PlanRecord:
    """A plan whose texts are all hostile."""
    plan = sample_plans.six()
    return dataclasses.replace(plan, step=HOSTILE, reason=HOSTILE, notes=(HOSTILE,), versions={HOSTILE: HOSTILE})
