"""How long a report of jm.oom_guard takes beside many live arrays. Writes results/oom_report_jax_<version>.json.

    python -m benchmarks.oom_report

By the clock, on a machine of so many cores: a report has a bound of two seconds, all but compiling for predictions.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxmem_callbacks as jm
from benchmarks.sources import write_result

REPORTS, LIVE = 5, (1_000, 100_000)
TEXTS = {"one line": 0, "an allocator's dump": 4 * 2**20}  # bytes of the dump


def reports(count: int, folder: Path) -> list[dict[str, Any]]:
    """What the guard takes for a failure beside so many live arrays, for each size of the error's text; nothing is compiled."""
    kept = [jax.device_put(np.float32(number)) for number in range(count - len(jax.live_arrays()))]
    rows: list[dict[str, Any]] = []
    for name, size in TEXTS.items():
        lines = (f"InUse at 7f{number:010x} of size 4096 next {number}\n" for number in range(size // 48))
        text = f"RESOURCE_EXHAUSTED: Out of memory allocating 137438953472 bytes.\n{''.join(lines)}"
        taken = [guarded(text, folder) for _ in range(REPORTS)]
        report = json.loads(
            max(folder.glob("oom-*"), key=lambda each: each.stat().st_mtime_ns).joinpath("facts.json").read_text()
        )
        rows.append(
            {
                "live_arrays": report["live_count"],
                "text": name,
                "text_bytes": len(text),
                "seconds": round(statistics.median(taken), 2),
                "most_seconds": round(max(taken), 2),
            }
        )
    del kept
    return rows


def guarded(text: str, folder: Path) -> float:
    """Seconds that a failure with this text takes to pass a guard, which writes its report."""
    begun = time.perf_counter()
    with (
        contextlib.suppress(jax.errors.JaxRuntimeError),
        contextlib.redirect_stderr(io.StringIO()),
        jm.oom_guard(outdir=folder, plan_seconds=0),
    ):
        raise jax.errors.JaxRuntimeError(text)
    return time.perf_counter() - begun


def main() -> None:
    """Measure and write the result file."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for count in LIVE for row in reports(count, Path(folder))]
    write_result("oom_report", cores=os.cpu_count(), reports=rows)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
