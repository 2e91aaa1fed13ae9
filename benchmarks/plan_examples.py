"""The plans of two examples. Writes results/plan_nnx_transformer_h100_sxm_jax_<version>.json, and plan_pod_h100_sxm_64 likewise.

    python -m benchmarks.plan_examples

Each is what the example's own command prints or writes; places in files count from the repository's root.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.sources import ROOT, write_result

NNX = ("-m", "jaxmem_callbacks.cli.main", "plan", "examples/nnx_transformer.py", "--target", "h100_sxm", "--json")
POD = ("examples/plan_a_pod.py", "--target", "h100_sxm:64", "--json")


def without_machine(text: str, root: Path = ROOT) -> str:
    """JSON text in which files of this repository and of installed packages have no folder of this machine."""
    return re.sub(r'"[^"\n]*/site-packages/', '"', text.replace(f"{root}/", ""))


def run(*words: str) -> str:
    """What a command in the repository's root prints."""
    return subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603 - our own examples


def main() -> None:
    """Make both plans and write their files."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "plan.json"
        run(*POD, str(place))
        plans = {"plan_nnx_transformer_h100_sxm": run(*NNX), "plan_pod_h100_sxm_64": place.read_text("utf-8")}
    for name, text in plans.items():
        figures: dict[str, Any] = json.loads(without_machine(text))
        write_result("plan_examples", name=name, **figures)


if __name__ == "__main__":
    main()
