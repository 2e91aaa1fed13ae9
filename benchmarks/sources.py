"""Result files and the code that they rest on.

    python -m benchmarks.sources

Every benchmark writes a hash of code into its result file: of its own, and of what it reaches in the rooms whose change may
change what it measures. A new name, place or comment leaves the hash as it is (benchmarks/code_hash.py). A file is stale where
the code does something else since: its figures are then those of an older library, until the benchmark has run again. Where a
file has rows, each has its own hash.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.code_hash import PACKAGE, Code, Definition, code_hash

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
# Benchmark -> rooms whose change may change what it measures, and files that it runs without importing them.
SOURCES: dict[str, tuple[str, ...]] = {
    "accumulation": ("_compat", "transforms", "programs/steps"),
    "analytic": ("_compat", "transforms", "planning"),
    "adapters": ("callbacks", "writers"),
    "chunked_head": ("_compat", "transforms", "programs"),
    "frameworks": (
        *(f"jaxmem_callbacks/integrations/{name}.py" for name in ("keras", "kauldron", "tunix")),
        "jaxmem_callbacks/transforms/prefetch.py",
        *(
            f"tests/test_adapters_{name}.py"
            for name in ("clu", "docs", "grain", "kauldron", "keras", "levanter", "tunix")
        ),
    ),
    "state_offload": ("_compat", "transforms", "programs", "jaxmem_callbacks/planning/step_time.py"),
    "vmapped_programs": ("_compat", "transforms", "jaxmem_callbacks/planning/chunk_candidates.py"),
    "hook_cost": ("analysis", "callbacks", "probes", "records", "writers"),
    "million_steps": ("analysis", "callbacks", "probes", "records", "writers"),
    "lowering": ("_compat", "transforms"),
    "oom_report": ("recovery",),
    "compiler_options": ("_compat", "programs", "transforms", "jaxmem_callbacks/planning/step_time.py"),
    "padding": ("programs",),
    "peers": ("recovery",),
    "plan_examples": (
        "_compat",
        "integrations",
        "planning",
        "programs",
        "transforms",
        "examples/nnx_transformer.py",
        "examples/plan_a_pod.py",
    ),
    "plan_time": ("_compat", "planning", "programs", "transforms"),
    "plan_scale": ("_compat", "planning", "programs", "transforms"),
    "recovery_cost": (
        "recovery/ladder",
        "jaxmem_callbacks/integrations/orbax.py",
        "jaxmem_callbacks/recovery/recovery.py",
        "jaxmem_callbacks/recovery/snapshots.py",
    ),
    "simulator": (
        "simulator",
        "jaxmem_callbacks/callbacks/sampler.py",
        "jaxmem_callbacks/probes/allocations.py",
        "jaxmem_callbacks/records/traces.py",
        "jaxmem_callbacks/records/traces.py",
    ),
    "remat_by_hand": ("_compat", "integrations", "transforms"),
}
# Result files with names of their own -> the benchmark that writes them.
NAMED = {"plan_nnx_transformer_h100_sxm": "plan_examples", "plan_pod_h100_sxm_64": "plan_examples"}
# Benchmark or check -> its command, where that is not `make bench-` and its name.
COMMANDS = {
    "check_wheel": "check-wheel",
    "chunked_head": "bench-chunks",
    "compiler_options": "bench-options",
    "estimator": "bench-estimator",
    "frameworks": "test-adapters",
    "gallery": "gallery",
    "memory_viewer": "bench-viewer",
    "oom_report": "bench-recovery",
    "plan_time": "bench-plan-time",
    "remat_policies": "bench-policies",
    "state_offload": "bench-state",
    "two_hosts": "bench-hosts",
    "vmapped_programs": "bench-vmaps",
}
# Checks that write a result file -> files that they rest on. What they check is the package as it was then, all of it, so that
# these show only whether the same was asked.
CHECKS: dict[str, tuple[str, ...]] = {
    "memory_viewer": ("benchmarks/gallery/memory_viewer.py", "benchmarks/gallery/viewed.py"),
    "remat_policies": ("benchmarks/gallery/remat_policies.py",),
    "estimator": ("benchmarks/gallery/estimator.py",),
    "two_hosts": ("benchmarks/gallery/host.py", "benchmarks/gallery/two_hosts.py"),
    "check_wheel": ("pyproject.toml", "tools/check_wheel.py", "tools/wheel_use.py"),
    "gallery": ("benchmarks/gallery/outcome.py", "benchmarks/gallery/pasting.py"),
}
_WRITERS = ("benchmarks.sources", "benchmarks.code_hash")  # of results: no figure rests on them
# The benchmark whose rows name the file of their model, and rooms whose change may change a plan.
ROWS_BENCHMARK, PLANNING_ROOMS = "plan_bench", ("_compat", "integrations", "planning", "transforms")
# What a row compiles of the library: the policies that a plan finds, or one that is given. Any other row compiles nothing of it.
SEARCHED, GIVEN = f"benchmarks/{ROWS_BENCHMARK}.py", "jaxmem_callbacks/planning/compiles.py"


def source_hash(benchmark: str, root: Path = ROOT) -> str:
    """Of the code that a benchmark of `SOURCES` rests on."""
    return code_hash(*source_definitions(benchmark, root))


def check_hash(check: str, root: Path = ROOT) -> str:
    """Of every file that a check of `CHECKS` rests on, by contents."""
    paths = (root / name for name in CHECKS[check])
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths if path.exists())).hexdigest()[:16]


def source_definitions(benchmark: str, root: Path = ROOT) -> tuple[set[Definition], list[Definition]]:
    """What a benchmark of `SOURCES` reaches; and, of that, what its figures rest on: its own, what it runs, and its rooms."""
    run = [source for source in SOURCES[benchmark] if source.endswith(".py")]
    rooms = [source for source in SOURCES[benchmark] if not source.endswith(".py")]
    reached = _code(root).reached([root / "benchmarks" / f"{benchmark}.py", *(root / source for source in run)])
    places = ("benchmarks.", *(source.removesuffix(".py").replace("/", ".") for source in run))
    counted = [each for each in reached if each.module.startswith(places) or _is_in(each, rooms)]
    return reached, [each for each in counted if each.module not in _WRITERS]


def _is_in(definition: Definition, rooms: Iterable[str]) -> bool:
    return definition.module.startswith(tuple(f"{PACKAGE}.{room.replace('/', '.')}." for room in rooms))


def _code(root: Path) -> Code:
    """As its files are now; what did not change is not read again."""
    tests = [root / source for sources in SOURCES.values() for source in sources if source.startswith("tests/")]
    return _code_of(
        root, tuple((path, path.stat().st_mtime_ns) for path in [*Code.files(root), *tests] if path.is_file())
    )


@functools.lru_cache(maxsize=2)
def _code_of(root: Path, files: tuple[tuple[Path, int], ...]) -> Code:
    return Code(root, [path for path, _ in files])


def row_hashes(model: str, policy: str, *, root: Path = ROOT) -> dict[str, str]:
    """What a row of plan_bench rests on: its model's file and those beside it that this imports; of ours, the library too.

    A plan rests on how policies are searched; "ours as" a policy by hand only on what makes the step of a given one.
    """
    code = _code(root)
    own = code.reached([_file_of(root, model)])
    hashes = {"source": code_hash(own, [each for each in own if each.module.startswith("benchmarks.plan_models.")])}
    if policy.startswith("ours"):
        reached = code.reached([root / (GIVEN if policy.startswith("ours as") else SEARCHED)])
        hashes["library"] = code_hash(reached, [each for each in reached if _is_in(each, PLANNING_ROOMS)])
    return hashes


def _file_of(root: Path, model: str) -> Path:
    """The file that makes a model; one may make several."""
    files = sorted((root / "benchmarks" / "plan_models").glob("*.py"))
    return next(file for file in files if f"\ndef {model}(" in file.read_text("utf-8"))


def planned_segments(ours: Mapping[str, Any]) -> int | str | None:
    """The segments into which a plan cut a step between the ends of its frontier; None for those that the library chooses."""
    kept = [candidate["segments"] for candidate in ours.get("candidates", []) if candidate["keep"]]
    return statistics.mode(kept) if kept else None


def is_cut_otherwise(row: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a row that is matched to a policy by hand has another number of segments than the plan beside it has now."""
    place = {"model": row["model"], "target": row.get("target"), "policy": "ours"}
    ours = next((each for each in rows if place.items() <= each.items()), {})
    return row["policy"].startswith("ours as") and "segments" in row and row["segments"] != planned_segments(ours)


def write_result(benchmark: str, *, name: str = "", options: str = "", **figures: Any) -> None:
    """Write ``results/<benchmark>_jax_<version>.json`` with what made it, and print a line.

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
    return [
        _is_old(part, benchmark, root) or (benchmark == ROWS_BENCHMARK and is_cut_otherwise(part, parts))
        for part in parts
    ]


def _is_old(part: Mapping[str, Any], benchmark: str, root: Path) -> bool:
    if benchmark in CHECKS:
        return part.get("sources") != check_hash(benchmark, root)
    if benchmark != ROWS_BENCHMARK:
        return part.get("sources") != source_hash(benchmark, root)
    hashes = row_hashes(part["model"], part["policy"], root=root)
    return any(part.get(name) != value for name, value in hashes.items())


def stale_lines(folder: Path = RESULTS, root: Path = ROOT) -> list[str]:
    """A line for each result file."""
    return [f"{path.name}: {_words(path, root)}" for path in sorted(folder.glob("*.json"))]


def _words(result: Path, root: Path) -> str:
    benchmark = benchmark_of(result)
    if benchmark not in {*SOURCES, *CHECKS, ROWS_BENCHMARK}:
        return "unknown, no benchmark writes it; delete it"
    old = _old_parts(result, root)
    if not any(old):
        return "fresh"
    share = f" in {sum(old)} of {len(old)} rows" if len(old) > 1 else ""
    return f"stale{share}, its sources have changed; make {command(benchmark)}"


def command(benchmark: str) -> str:
    """What the Makefile calls a benchmark: by its first or its last word, unless it has a name of its own."""
    first, _, last = benchmark.partition("_")
    word = last if first == "plan" and benchmark != ROWS_BENCHMARK else first
    return COMMANDS.get(benchmark, f"bench-{word}")


if __name__ == "__main__":
    print(*stale_lines(), sep="\n")
