"""The cut against remat written by hand: bytes by the compiler, FLOPs by count.

Writes results/remat_by_hand_jax_<version>.json.

    python -m benchmarks.remat_by_hand [--targets cpu h100_sxm v5e:2x2]

Every row is one whole AdamW step, compiled three times: plain, with remat written into the model, and cut by `jm.remat`
with no hint. A target whose compiler is not installed is left out and named in the file.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import time
from typing import Any

import jax

import jaxmem_callbacks as jm
from benchmarks.models import CASES, OPTIMIZER, Case, Loss, train_step
from benchmarks.sources import write_result
from jaxmem_callbacks.programs.targets.compile import TargetCompilation, compile_for_target
from jaxmem_callbacks.records.errors import TargetError
from jaxmem_callbacks.transforms.costs import jaxpr_flops

# Where remat is undone by the compiler there is nothing to compare: jax 0.10.2's CPU compiler keeps it in scans only.
SCANNED_ONLY = jax.__version_info__ < (0, 11)


def measure(case: Case, target: str, *, with_plain: bool = True) -> dict[str, dict[str, int]]:
    """Bytes, temporaries, FLOPs and the compiler's own recomputation of one case's steps on one target.

    Two are compiled at a time: the compilers of absent hardware run in processes of their own.
    """
    losses = {"by_hand": case.by_hand, "ours": jm.remat(case.plain)} | ({"none": case.plain} if with_plain else {})
    with concurrent.futures.ThreadPoolExecutor(1 if target == "cpu" else 2) as pool:
        rows = {name: pool.submit(_step, case, loss, target) for name, loss in losses.items()}
    return {name: row.result() for name, row in rows.items()}


def _step(case: Case, loss: Loss, target: str) -> dict[str, int]:
    params, batch = case.arguments
    args = (params, jax.eval_shape(OPTIMIZER.init, params), batch)
    step = train_step(jax.value_and_grad, loss)
    compiled: TargetCompilation = compile_for_target(step, args, target=target, donate_argnums=(0, 1), keep_hlo=False)
    if compiled.memory is None:
        return {"step_bytes": compiled.needed_bytes or 0, "fits": 0}
    return {
        "step_bytes": compiled.memory.step_bytes,
        "temp_bytes": compiled.memory.temp_bytes,
        "flops": jaxpr_flops(jax.make_jaxpr(step)(*args)),
        "compiler_remat": compiled.memory.compiler_remat,
    }


def ratios(row: dict[str, dict[str, int]]) -> tuple[float, float]:
    """Our bytes and FLOPs over those of remat by hand."""
    ours, hand = row["ours"], row["by_hand"]
    return ours["step_bytes"] / hand["step_bytes"], ours["flops"] / hand["flops"]


def main() -> None:
    """Measure every case on every target and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["cpu", "h100_sxm", "v5e:2x2"])
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    targets: list[str] = parser.parse_args().targets
    for target in targets:
        for case in (make() for make in CASES):
            if target == "cpu" and SCANNED_ONLY and "scanned" not in case.name:
                continue
            begun = time.perf_counter()
            try:
                row = measure(case, target)
            except TargetError as error:
                missing[target] = str(error)
                break
            memory, work = ratios(row)
            print(f"{target:10s} {case.name:28s} bytes x{memory:.3f}  FLOPs x{work:.3f}", flush=True)
            seconds = round(time.perf_counter() - begun, 1)
            rows.append({
                "target": target, "model": case.name, "bytes_over_hand": round(memory, 4),
                "flops_over_hand": round(work, 4), "seconds": seconds, **row,
            })  # fmt: skip
    write_result("remat_by_hand", options="--targets " + " ".join(targets), not_measured=missing, rows=rows)


if __name__ == "__main__":
    main()
