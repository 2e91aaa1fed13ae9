"""Processor seconds of a plan by this library and by an earlier commit of it, of public models, in one run.

Writes results/plan_time_jax_<version>.json.

    python -m benchmarks.plan_time [--against COMMIT] [--models nanodo ...] [--target cpu]

Each plan runs in a process of its own with an empty cache: the earlier commit's package from an archive of git, the models from
here. What importing and describing the model takes is left out; what compilers in further processes take is counted. The two run
at the same time, so that other work on the machine slows both.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.sources import ROOT, write_result

#: The commit before plans had blocks, chunks, moved state and options to try.
AGAINST = "bcae614"
#: Those written after public programs.
MODELS = (
    "nanodo", "gpt_512_words", "gpt_50k_words", "gpt_131k_words", "maxtext_decoder", "big_vision_vit", "ppo", "haiku_transformer",
    "equinox_vit", "lm1b", "dit",
)  # fmt: skip
# The package comes from the first folder; the models, and what they import of their own, from the second.
_PLAN = """
import json, os, resource, sys
package, models, name, target = sys.argv[1:]
sys.path.insert(0, package)
import jaxmem_callbacks as jm
assert jm.__file__.startswith(package), jm.__file__
sys.path.insert(0, models)
from benchmarks.plan_models import FAMILIES
case = FAMILIES[name]()
arguments = case.arguments
begun = resource.getrusage(resource.RUSAGE_SELF)
plan = jm.plan(case.plain, *arguments, target=target, progress=False)
print(json.dumps({"before_s": begun.ru_utime + begun.ru_stime, "compiles": plan.compiles}))
"""


def planned(package: Path, model: str, target: str) -> dict[str, Any]:
    """Processor seconds of one plan, with those of its processes, and its compiles."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAXMEM_CACHE_DIR": cache, "XDG_CACHE_HOME": cache}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        command = [sys.executable, "-c", _PLAN, str(package), str(ROOT), model, target]
        process = subprocess.Popen(  # noqa: S603 - this file's own program
            command, env=environment, cwd=cache, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        if status:
            msg = f"The plan of {model} by {package} failed; its message is above."
            raise SystemExit(msg)
    found = json.loads(printed.splitlines()[-1])
    return {"seconds": round(used.ru_utime + used.ru_stime - found["before_s"], 1), "compiles": found["compiles"]}


def archived(commit: str, folder: Path) -> Path:
    """The package of an earlier commit, unpacked."""
    command = ["git", "archive", commit, "jaxmem_callbacks"]
    packed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)  # noqa: S603 - a commit that its user names
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def compared(earlier: Path, model: str, target: str) -> dict[str, Any]:
    """One row: both plans, at the same time."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        before, now = pool.map(lambda package: planned(package, model, target), (earlier, ROOT))
    ratio = round(now["seconds"] / before["seconds"], 3)
    return {"model": model, "target": target, "before": before, "now": now, "ratio": ratio}


def main() -> None:
    """Plan every model with both and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default=AGAINST, help="the earlier commit")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--target", default="cpu")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        earlier = archived(options.against, Path(folder))
        for model in options.models:
            rows.append(compared(earlier, model, options.target))
            print(rows[-1], flush=True)
            median = round(statistics.median(row["ratio"] for row in rows), 3)
            shown = f"--target {options.target}"
            write_result("plan_time", options=shown, against=options.against, median_ratio=median, rows=rows)


if __name__ == "__main__":
    main()
