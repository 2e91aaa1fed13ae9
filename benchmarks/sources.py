"""Result files and the sources that they rest on. Names and figures enter; files with hashes, and which of them are stale, leave.

    python -m benchmarks.sources

Every benchmark writes the hash of its sources into its result file. A file is stale where these have changed since: its figures
are then those of an older library, until the benchmark has run again. Rows say it themselves, one by one, where a file has some.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable, Mapping
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
    "plan_examples": (
        "_compat",
        "integrations",
        "planning",
        "programs",
        "transforms",
        "examples/nnx_transformer.py",
        "examples/plan_a_pod.py",
    ),
    "plan_scale": ("_compat", "planning", "programs", "transforms"),
    "remat_by_hand": ("_compat", "integrations", "transforms", "benchmarks/models.py"),
}
# Result files with names of their own -> the benchmark that writes them.
NAMED = {"plan_nnx_transformer_h100_sxm": "plan_examples", "plan_pod_h100_sxm_64": "plan_examples"}
# The benchmark whose rows name the file of their model, and rooms whose change may change a plan.
ROWS_BENCHMARK, PLANNING_ROOMS = "plan_bench", ("_compat", "integrations", "planning", "transforms")


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


def row_hashes(model: str, *, planned: bool, root: Path = ROOT) -> dict[str, str]:
    """What a row of plan_bench rests on: its model's file and those beside it that this imports; of a plan, the library too."""
    own = root / "benchmarks" / "plan_models" / f"{model}.py"
    text = own.read_text("utf-8") if own.exists() else ""
    beside = set(re.findall(r"^from benchmarks\.plan_models\.(\w+) import", text, re.MULTILINE))
    hashes = {"source": _hash([own, *(own.with_name(f"{name}.py") for name in sorted(beside))])}
    if planned:
        rooms = [path for room in PLANNING_ROOMS for path in sorted((root / "jaxmem_callbacks" / room).rglob("*.py"))]
        hashes["library"] = _hash(rooms)
    return hashes


def _hash(paths: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths if path.exists())).hexdigest()[:16]


def write_result(benchmark: str, *, name: str = "", options: str = "", **figures: Any) -> None:
    """Write ``results/<benchmark>_jax_<version>.json`` with what made it, and say so.

    Args:
        benchmark: One of `SOURCES`.
        name: A name of its own, one of `NAMED`.
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
    place = RESULTS / f"{name or benchmark}_jax_{versions['jax']}.json"
    place.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(f"wrote {place.name}")


def benchmark_of(result: Path) -> str:
    """The benchmark that wrote a result file: its name without JAX's version, where it has none of its own."""
    name = result.stem.partition("_jax_")[0]
    return NAMED.get(name, name)


def stale(result: Path, root: Path = ROOT) -> bool:
    """Whether a result file, or a row of it, was written by other sources than are here. One that names none was."""
    return any(_old_parts(result, root))


def _old_parts(result: Path, root: Path) -> list[bool]:
    """Of each part that names its sources, whether these were others."""
    content, benchmark = json.loads(result.read_text("utf-8")), benchmark_of(result)
    parts = [content] if "sources" in content else content.get("rows") or [content]
    return [_is_old(part, benchmark, root) for part in parts]


def _is_old(part: Mapping[str, Any], benchmark: str, root: Path) -> bool:
    if benchmark != ROWS_BENCHMARK:
        return part.get("sources") != source_hash(benchmark, root)
    hashes = row_hashes(part["model"], planned=part["policy"].startswith("ours"), root=root)
    return any(part.get(name) != value for name, value in hashes.items())


def told(folder: Path = RESULTS, root: Path = ROOT) -> list[str]:
    """A line for each result file."""
    return [f"{path.name}: {_words(path, root)}" for path in sorted(folder.glob("*.json"))]


def _words(result: Path, root: Path) -> str:
    benchmark = benchmark_of(result)
    if benchmark not in {*SOURCES, ROWS_BENCHMARK}:
        return "unknown, no benchmark writes it; delete it"
    old = _old_parts(result, root)
    if not any(old):
        return "fresh"
    share = f" in {sum(old)} of {len(old)} rows" if len(old) > 1 else ""
    return f"stale{share}, its sources have changed; make bench-{command(benchmark)}"


def command(benchmark: str) -> str:
    """What the Makefile calls a benchmark: its first or its last word."""
    first, _, last = benchmark.partition("_")
    return last if first == "plan" and benchmark != ROWS_BENCHMARK else first


if __name__ == "__main__":
    print(*told(), sep="\n")
