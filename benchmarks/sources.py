"""Result files and the sources that they rest on. Names and figures enter; files with hashes, and which of them are stale, leave.

    python -m benchmarks.sources

Every benchmark writes the hash of its sources into its result file. A file is stale where these have changed since: its figures
are then those of an older library, until the benchmark has run again. Rows of plan_bench say it themselves, one by one.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
# Benchmark -> rooms and files whose change may change what it measures; its own file besides.
SOURCES: dict[str, tuple[str, ...]] = {
    "accumulation": ("_compat", "transforms", "programs/steps"),
    "analytic": (
        "_compat",
        "transforms",
        "planning",
        "benchmarks/models.py",
        "benchmarks/lowering.py",
    ),
    "hook_cost": ("analysis", "callbacks", "probes", "records", "writers"),
    "million_steps": ("analysis", "callbacks", "probes", "records", "writers"),
    "lowering": ("_compat", "transforms", "benchmarks/models.py"),
    "plan_scale": ("_compat", "planning", "programs", "transforms"),
    "remat_by_hand": ("_compat", "integrations", "transforms", "benchmarks/models.py"),
}


def source_hash(benchmark: str, root: Path = ROOT) -> str:
    """Of every Python file that a benchmark of `SOURCES` rests on, by name and contents."""
    paths = [root / "benchmarks" / f"{benchmark}.py"]
    for source in SOURCES[benchmark]:
        room = root / "jaxmem_callbacks" / source
        paths += sorted(room.rglob("*.py")) if not source.endswith(".py") else [root / source]
    digest = hashlib.sha256()
    for path in filter(Path.exists, paths):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def write_result(benchmark: str, *, options: str = "", **figures: Any) -> None:
    """Write ``results/<benchmark>_jax_<version>.json`` with what made it, and say so.

    Args:
        benchmark: One of `SOURCES`.
        options: What its command was called with.
        **figures: What was measured.
    """
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    result = {
        "command": f"python -m benchmarks.{benchmark} {options}".strip(),
        "sources": source_hash(benchmark),
        "versions": {**versions, "python": platform.python_version()},
        **figures,
    }
    place = RESULTS / f"{benchmark}_jax_{versions['jax']}.json"
    place.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(f"wrote {place.name}")


def benchmark_of(result: Path) -> str:
    """The benchmark that wrote a result file: its name without JAX's version."""
    return result.stem.partition("_jax_")[0]


def stale(result: Path, root: Path = ROOT) -> bool:
    """Whether a result file, or a row of it, was written by other sources than are here. One that names none was."""
    content = json.loads(result.read_text("utf-8"))
    said = {part.get("sources") for part in ([content] if "sources" in content else content.get("rows", [content]))}
    return said != {source_hash(benchmark_of(result), root)}


def told(folder: Path = RESULTS, root: Path = ROOT) -> list[str]:
    """A line for each result file of a benchmark of `SOURCES`."""
    return [
        f"{path.name}: "
        + (
            f"stale, its sources have changed; make bench-{command(benchmark_of(path))}"
            if stale(path, root)
            else "fresh"
        )
        for path in sorted(folder.glob("*.json"))
        if benchmark_of(path) in SOURCES
    ]


def command(benchmark: str) -> str:
    """What the Makefile calls a benchmark: its first or its last word."""
    first, _, last = benchmark.partition("_")
    return last if first == "plan" else first


if __name__ == "__main__":
    print(*told(), sep="\n")
