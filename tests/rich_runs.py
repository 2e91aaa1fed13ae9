"""A training of a language model on two GPUs, written by hand with all that the memory page shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxmem_callbacks.analysis.observation import Metrics
from jaxmem_callbacks.records.arrays import ArrayCensus, ArrayGroup, HeapMap, LiveBuffer, changed_groups
from jaxmem_callbacks.records.peaks import Buffer, Peak, peak_of
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import CheckpointSave, MemoryEvent, Reading, RunStart, Unavailable
from jaxmem_callbacks.writers.jsonl import JsonlWriter
from tests import sample_plans
from tests.sample_runs import BEGAN, MIB, close_run, compiled, event, memory

GIB = 2**30
LIMIT = 75 * GIB
STEP_S = 0.45
NEEDS = {"train_step": 58 * GIB, "eval_step": 31 * GIB, "log_metrics": 2 * GIB}


def always(step: int) -> bool:
    return step >= 0


def saving(step: int) -> bool:
    return 100 <= step <= 108 or 220 <= step <= 230


class Held(NamedTuple):
    """Arrays of one kind: GiB of all of them, and when they are there."""

    shape: tuple[int, ...]
    dtype: str
    line: str
    gib: float
    there: Callable[[int], bool] = always


HELD = (
    Held((50304, 2048), "float32", "train.py:88 (init_state)", 0.38),
    Held((24, 2048, 8192), "float32", "train.py:88 (init_state)", 4.5),
    Held((24, 8192, 2048), "float32", "train.py:88 (init_state)", 4.5),
    Held((24, 2048, 6144), "float32", "train.py:88 (init_state)", 3.4),
    Held((24, 2048, 8192), "bfloat16", "optax/_src/transform.py:273 (init_fn)", 9.0),
    Held((24, 8192, 2048), "bfloat16", "optax/_src/transform.py:273 (init_fn)", 9.0),
    Held((16, 2049), "int32", "data.py:31 (next_batch)", 0.1),
    Held((4096,), "float32", "train.py:131 (main)", 0.6, lambda step: step > 120),
    Held(
        (24, 2, 1024, 8192),
        "float32",
        "checkpoint.py:52 (save.<locals>.copy_of_all_leaves)",
        4.5,
        saving,
    ),
)

# What the step's arguments are: of the embedding it takes the parameter and one moment, of each batch the newest.
KINDS = {
    "float32[50304,2048]": {"parameters": 2, "optimizer state": 2},
    "float32[24,2048,8192]": {"parameters": 2},
    "float32[24,8192,2048]": {"parameters": 2},
    "float32[24,2048,6144]": {"parameters": 2},
    "bfloat16[24,2048,8192]": {"optimizer state": 2},
    "bfloat16[24,8192,2048]": {"optimizer state": 2},
    "int32[16,2049]": {"batch": 1},
}


def write_rich_run(
    folder: Path, *, steps: int = 320, run: str = "rich", scale: float = 1.0, events: bool = True
) -> Path:
    """Two devices, arrays by kind and line, two saves, maps of the heap, compiles, a plan and four events.

    Args:
        folder: Where it is written.
        steps: How many.
        run: Its id.
        scale: What every size is multiplied by.
        events: Whether anything goes wrong.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start = RunStart(
        time_s=BEGAN,
        versions={"jax": "0.12.0.1"},
        devices={"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "count": 2, "processes": 1},
        settings=dataclasses.asdict(MonitorSettings()),
    )
    writer = JsonlWriter(folder / "memory.jsonl", run, start=start)
    writer.write(rich_plan(scale))
    for name, need in NEEDS.items():
        size = round(need * scale)
        figures = memory(name, size // 2, argument_bytes=size // 2, output_bytes=size // 3, alias_bytes=size // 3)
        writer.write(dataclasses.replace(compiled(name), memory=figures, kinds=KINDS, step=0, time_s=BEGAN + 1))
    writer.write(Unavailable(figure="driver", device="gpu:0", reason="nvidia-ml-py is not installed"))
    before: ArrayCensus | None = None
    for step in range(steps):
        for record in readings(step, scale, grows=events):
            writer.write(record)
        now = census(step, scale)
        changed = changed_groups(before, now)
        before = now
        if changed is not None:
            writer.write(changed)
        if step in {108, 230}:
            writer.write(save_at(step, scale))
        if step % 60 == 30 or step == 228:
            writer.write(heap_at(step, scale))
        for each in events_at(step) if events else ():
            writer.write(each)
    close_run(writer, folder, BEGAN + STEP_S * steps)
    return folder


def readings(step: int, scale: float, *, grows: bool) -> Iterator[Reading | Metrics]:
    at: dict[str, Any] = {"step": step, "time_s": BEGAN + STEP_S * step}
    held = sum(each.gib for each in HELD if each.there(step)) * GIB * scale
    grown = min(step, 290) * 9 * MIB * scale if grows else 0
    for device, share in (("gpu:0", 0.96), ("gpu:1", 1.0)):
        used = round((held + (24 if step % 2 else 12) * GIB * scale + grown) * share)
        yield Reading(
            source="allocator",
            device=device,
            **at,
            in_use_bytes=used,
            peak_bytes_since_start=round((held + 25 * GIB * scale + grown) * share),
            limit_bytes=LIMIT,
            pool_bytes=round(66 * GIB * scale),
            largest_free_bytes=max(round(40 * GIB - 0.5 * used - 60 * MIB * step), GIB),
        )
        yield Reading(source="live_arrays", device=device, **at, live_array_bytes=round(held), live_array_count=180)
    yield Reading(source="host", device="host", **at, resident_bytes=host_bytes(step))
    yield Metrics(**at, values={"loss": 8.0 / (1 + step) ** 0.3})


def host_bytes(step: int) -> int:
    return round((9.5 if saving(step) else 6) * GIB)


def census(step: int, scale: float) -> ArrayCensus:
    groups = tuple(
        ArrayGroup(
            shape=each.shape,
            dtype=each.dtype,
            placement="",
            devices=("gpu:0", "gpu:1"),
            spread=1,
            replicated=False,
            count=4 if each.gib < 1 else 2,
            bytes=round(each.gib * scale * GIB),
            site=each.line,
        )
        for each in HELD
        if each.there(step)
    )
    at = BEGAN + STEP_S * step
    return ArrayCensus(step=step, time_s=at, groups=groups, left_out_count=40, left_out_bytes=200 * MIB)


def save_at(step: int, scale: float) -> CheckpointSave:
    time_s = BEGAN + STEP_S * step
    return CheckpointSave(
        step=step + 1,
        time_s=time_s,
        first_step=step - 8,
        began_s=time_s - 3.6,
        background=True,
        highs={"in_use_bytes": round(64 * GIB * scale), "resident_bytes": host_bytes(step)},
    )


def heap_at(step: int, scale: float) -> HeapMap:
    """Arrays side by side with holes that move."""
    at, buffers = 0x7F2000000000, list[LiveBuffer]()
    for number in range(240):
        each = HELD[number * 7 % len(HELD)]
        size = round((0.02 + 0.3 * (number * 37 % 11) / 11) * GIB * scale)
        if (number * 13 + step) % 17 > 3:
            label = f"{each.dtype}[{','.join(map(str, each.shape))}]"
            buffers.append(LiveBuffer(address=at, bytes=size, label=label))
        at += size
    return HeapMap(device="gpu:1", step=step, time_s=BEGAN + STEP_S * step, buffers=buffers)


def events_at(step: int) -> Iterator[MemoryEvent]:
    at: dict[str, Any] = {"step": step, "time_s": BEGAN + STEP_S * step}
    if step == 150:
        yield event(
            "train_step was compiled again: batch['tokens'] is int32[7,2049].",
            **at,
            kind="recompilation",
            device="train_step",
            action="Pad the last batch, or drop it.",
            figures={"compiles": 3},
        )
    if step in {229, 236}:
        yield event(
            f"gpu:1 holds {round(71.5 * GIB):,} B of a limit of 75.0 GiB, so 4.7% are left.",
            **at,
            action="Take the plan's next smaller candidate, or save from another device's copy.",
            figures={"limit_bytes": LIMIT, "headroom_share": 0.047},
        )
    if step == 260:
        yield event(
            "Live arrays made at train.py:131 (main) grow by 2 arrays a step, 72 MiB in 120 steps.",
            **at,
            kind="growth",
            action="Keep the losses as Python numbers: losses.append(float(loss)).",
            figures={"growth_bytes": 72 * MIB, "site": "train.py:131 (main)"},
        )


def rich_plan(scale: float) -> PlanRecord:
    def candidate(gib: float, extra: int, seconds: float, **policy: Any):
        made = sample_plans.candidate(gib * 1024, extra, fits=gib < 72, **policy)
        return dataclasses.replace(made, modelled_s=seconds)

    chosen = dataclasses.replace(candidate(57.2, 98, 0.41, remat="full", keep=0.341), peak=rich_peak(scale))
    candidates = [
        candidate(134, 0, 0.36),
        candidate(92.6, 5, 0.365, remat="full", keep=1.0),
        candidate(71.6, 53, 0.39, remat="full", keep=0.45),
        chosen,
        candidate(52, 143, 0.43, remat="full", keep=0.2),
        candidate(44, 233, 0.47, remat="full"),
    ]
    reason = "it computes least again of all that fit"
    return sample_plans.record(candidates, 3, 72 * GIB, reason=reason, limit_bytes=LIMIT)


def rich_peak(scale: float = 1.0) -> Peak:
    """What makes the peak of the step."""

    def argument(gib: float, group: str, shape: str, path: str) -> Buffer:
        return dataclasses.replace(buffer(gib, group, shape, path, "train.py:88"), kind="argument")

    def buffer(gib: float, group: str, shape: str, path: str, line: str) -> Buffer:
        size = round(gib * scale * GIB)
        return Buffer(bytes=size, shape=shape, kind="temporary", operation=path, source=line, group=group)

    back, forth = "jit(train_step)/transpose(jvp(GPT))/blocks", "jit(train_step)/jvp(GPT)/blocks"
    up, down, qkv = "f32[24,2048,8192]{2,1,0}", "f32[24,8192,2048]{2,1,0}", "f32[24,2048,6144]{2,1,0}"
    saved = (
        ("mlp/gelu", 62),
        ("attention/softmax", 48),
        ("ln_1", 40),
        ("ln_2", 58),
        ("attention/out", 51),
        ("mlp/up", 61),
    )
    buffers = [
        argument(4.5, "parameters", up, "state.params['mlp']['up']"),
        argument(4.5, "parameters", down, "state.params['mlp']['down']"),
        argument(3.4, "parameters", qkv, "state.params['attention']['qkv']"),
        argument(0.38, "parameters", "f32[50304,2048]{1,0}", "state.params['embed']"),
        argument(9.0, "optimizer state", up, "state.opt_state[0].mu['mlp']['up']"),
        argument(9.0, "optimizer state", down, "state.opt_state[0].nu['mlp']['down']"),
        argument(0.1, "batch", "s32[16,2049]{1,0}", "batch['tokens']"),
        buffer(4.5, "gradients", up, f"{back}/mlp/up/dot_general", "model.py:61"),
        buffer(4.5, "gradients", down, f"{back}/mlp/down/dot_general", "model.py:63"),
        *(
            buffer(0.75, "saved activations", "bf16[24,16,1024,2048]{3,2,1,0}", f"{forth}/{name}", f"model.py:{line}")
            for name, line in saved
        ),
        buffer(3.1, "temporaries", "f32[16,1024,50304]{2,1,0}", "jit(train_step)/jvp(GPT)/head/logits", "model.py:92"),
        buffer(1.6, "temporaries", "bf16[16,1024,50304]{2,1,0}", f"{back}/head/softmax", "model.py:94"),
        *(
            buffer(0.05, "temporaries", "bf16[16,1024,2048]{2,1,0}", f"{back}/add.{number}", "model.py:70")
            for number in range(30)
        ),
        buffer(0.9, "gaps", "memory between the buffers", "", ""),
    ]
    return peak_of(buffers, moment=f"{back}/head/dot_general (model.py:92)")
