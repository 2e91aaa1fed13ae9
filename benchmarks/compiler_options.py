"""What options of XLA's compilers move. Writes results/compiler_options_jax_<version>.json.

    python -m benchmarks.compiler_options [--targets h100_sxm:8 h100_sxm v5e:2x4 cpu]

Six families of models with layers written out, under the library's `full`, compiled without options and with each set of them:
bytes of a step, instructions that the compiler recomputes by itself, and modelled time that the step waits for its collectives.
None of the targets need be there. What is known to save bytes is tried on all families, all else on one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import jaxmem_callbacks as jm
from benchmarks.sharded_families import FAMILIES, family
from benchmarks.sources import write_result
from jaxmem_callbacks.planning.option_candidates import known_options
from jaxmem_callbacks.planning.step_time import speed_of, waiting_seconds
from jaxmem_callbacks.programs.targets.step_on_target import lower_traced_for
from jaxmem_callbacks.programs.targets.target import resolve_target
from jaxmem_callbacks.records.errors import CompileError, TargetError
from jaxmem_callbacks.records.policies import jax_line, platform_word

Row = dict[str, Any]
Options = Mapping[str, Any]
_FENCING = "xla_gpu_experimental_scheduler_memory_fencing"
_LAYERS_OF_TPU = 2  # its compiler takes a minute for eight
# Target -> the family that all else is tried on, its policy, and what is tried.
SWEPT: dict[str, tuple[str, str, tuple[Options, ...]]] = {
    "h100_sxm:8": (
        "vision",
        "full",
        (
            {f"{_FENCING}_threshold_bytes": 1},
            {f"{_FENCING}_threshold_bytes": 2**20},
            {f"{_FENCING}_threshold_bytes": 2**24},
            {f"{_FENCING}_threshold_bytes": 2**20, f"{_FENCING}_slack_windows": 0},
            {"xla_gpu_memory_limit_slop_factor": 1},
        ),
    ),
    "h100_sxm": ("vision", "none", tuple({"xla_gpu_memory_limit_slop_factor": slop} for slop in (12, 10, 8, 4, 1))),
    "v5e:2x4": (
        "decoder",
        "full",
        (
            {"xla_tpu_enable_latency_hiding_scheduler": False},
            {"xla_tpu_enable_async_collective_fusion": False},
            {"xla_tpu_enable_scheduler_memory_pressure_tracking": True},
            {"xla_tpu_enable_depth_memory_pressure_reduction": True},
            {"xla_latency_hiding_scheduler_rerun": 2},
            {"xla_tpu_rwb_fusion": False},
        ),
    ),
    "cpu": (
        "decoder",
        "none",
        (
            {"xla_cpu_copy_insertion_use_region_analysis": True},
            {"xla_cpu_enable_concurrency_optimized_scheduler": True},
            {"xla_cpu_enable_concurrency_optimized_scheduler": False},
        ),
    ),
}


def measure(target: str, name: str, remat: str, tried: Sequence[Options]) -> list[Row]:
    """A row for a family without options, and for each set of them."""
    hardware = resolve_target(target)
    layers = {"layers": _LAYERS_OF_TPU} if hardware.platform == "tpu" else {}
    step, args = family(name, sharded=hardware.device_count > 1, **layers)
    rows: list[Row] = []
    for options in ({}, *tried):
        where = {"platform": platform_word(hardware.platform), "jax": jax_line(jax.__version__)}
        policy = jm.StepPolicy(remat=remat, compiler_options={**where, **options} if options else None)
        row = {"target": target, "family": name, "policy": remat, "options": dict(options)}
        try:
            compiled = lower_traced_for(jm.jit_step(step, policy).traced(args, {}), "step", hardware)()
        except CompileError as error:
            rows.append(row | {"refused": str(error).partition("\n")[0]})
            continue
        speed = speed_of(hardware)
        assert compiled.memory is not None
        row |= {"step_bytes": compiled.memory.step_bytes, "temp_bytes": compiled.memory.temp_bytes}
        row["recomputed"] = compiled.memory.compiler_remat
        if speed is not None and hardware.device_count > 1 and compiled.module is not None:
            row["waits_ms"] = round(1e3 * waiting_seconds(compiled.module, hardware.device_count, speed), 4)
        rows.append(row)
        print(
            f"{target:11s} {name:12s} {remat:5s} {row['step_bytes'] / rows[0]['step_bytes']:6.3f} {options}", flush=True
        )
    return rows


def _known(target: str) -> tuple[Options, ...]:
    hardware = resolve_target(target)
    return known_options(hardware.platform, hardware.device_count)


def summary(rows: Sequence[Row], target: str) -> dict[str, Any]:
    """Of each family the least part of its bytes that known options leave, and their geometric mean."""
    known, parts = _known(target), dict[str, float]()
    for name in FAMILIES:
        own = [
            row
            for row in rows
            if (row["target"], row["family"], row["policy"]) == (target, name, "full") and "step_bytes" in row
        ]
        tried = [row["step_bytes"] for row in own if row["options"] in map(dict, known)]
        if tried:
            (plain,) = [row["step_bytes"] for row in own if not row["options"]]
            parts[name] = round(min(tried) / plain, 4)
    mean = math.exp(sum(map(math.log, parts.values())) / len(parts)) if parts else None
    return {"parts": parts, "geometric_mean": mean and round(mean, 4), "compiles": len(known)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is asked and can be compiled for, print a table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(SWEPT))
    targets = parser.parse_args(arguments).targets
    rows: list[Row] = []
    missing: dict[str, str] = {}
    for target in targets:
        try:
            known = _known(target)
        except TargetError as error:
            missing[target] = str(error).partition("\n")[0]
            print(f"{target} is left out: {missing[target]}")
            continue
        one, remat, others = SWEPT[target]
        every = list(FAMILIES) if known else []
        for name in every:
            rows += measure(target, name, "full", (*known, *(others if (name, "full") == (one, remat) else ())))
        if remat != "full" or not every:
            rows += measure(target, one, remat, (*(known if target == "cpu" else ()), *others))
    summaries = {target: summary(rows, target) for target in targets if target not in missing and _known(target)}
    asked = "--targets " + " ".join(targets)
    write_result("compiler_options", options=asked, not_measured=missing, summaries=summaries, rows=rows)


if __name__ == "__main__":
    main()
