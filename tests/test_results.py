"""Committed result files: each says which sources it rests on, a change of these makes it stale, and documents quote it truly."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import jaxmem_callbacks as jm
from benchmarks.plan_examples import without_machine
from benchmarks.plan_picture import PICTURE, plan_of
from benchmarks.sources import (
    NAMED,
    RESULTS,
    ROOT,
    ROWS_BENCHMARK,
    SOURCES,
    benchmark_of,
    command,
    row_hashes,
    source_hash,
    stale,
    told,
    write_result,
)
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.policies import policy_words
from jaxmem_callbacks.records.units import format_bytes

MIB = 2**20


def result(benchmark: str) -> dict:
    (path,) = (path for path in RESULTS.glob("*.json") if benchmark_of(path) == benchmark)
    return json.loads(path.read_text())


def copied(benchmark: str, tmp_path: Path) -> Path:
    """The sources of a benchmark in a tree of their own, and a result file of theirs."""
    for source in (*SOURCES[benchmark], f"benchmarks/{benchmark}.py"):
        base = ROOT if source.endswith(".py") else ROOT / "jaxmem_callbacks"
        for path in [base / source] if source.endswith(".py") else (base / source).rglob("*.py"):
            place = tmp_path / path.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
    written = tmp_path / f"{benchmark}_jax_1.2.json"
    written.write_text(json.dumps({"sources": source_hash(benchmark, tmp_path)}))
    return written


@pytest.mark.parametrize("benchmark", SOURCES)
def test_a_result_is_stale_once_any_of_its_sources_changes(benchmark, tmp_path):
    written = copied(benchmark, tmp_path)
    assert source_hash(benchmark, tmp_path) == source_hash(benchmark)
    assert not stale(written, tmp_path)
    assert told(tmp_path, tmp_path) == [f"{written.name}: fresh"]
    for source in (*SOURCES[benchmark], "benchmarks"):
        room = (
            tmp_path / source
            if source.endswith(".py") or source == "benchmarks"
            else tmp_path / "jaxmem_callbacks" / source
        )
        path = room if room.is_file() else next(room.rglob("*.py"))
        before = path.read_bytes()
        path.write_bytes(before + b"\n# another comment")
        assert stale(written, tmp_path), path
        path.write_bytes(before)
    written.write_text(
        json.dumps({"rows": [{"sources": source_hash(benchmark, tmp_path)}, {"sources": "of long ago"}]})
    )
    assert told(tmp_path, tmp_path) == [
        f"{written.name}: stale in 1 of 2 rows, its sources have changed; make bench-{command(benchmark)}"
    ]
    written.write_text(json.dumps({"rows": [{}]}))
    assert stale(written, tmp_path)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_committed_result_says_its_sources_and_no_machines_paths(path):
    benchmark, content = benchmark_of(path), json.loads(path.read_text())
    assert f"\nbench-{command(benchmark)}:" in (ROOT / "Makefile").read_text()
    names = ("sources",) if benchmark in SOURCES else ("source",)
    assert benchmark in {*SOURCES, ROWS_BENCHMARK}
    for part in [content] if "sources" in content else content["rows"]:
        for name in (*names, *(["library"] if part.get("policy", "")[:4] == "ours" else [])):
            assert re.fullmatch("[0-9a-f]{16}", part[name])
    assert not re.search(r'"/|site-packages', path.read_text())


def test_every_benchmark_is_known_and_has_its_result():
    assert {benchmark_of(path) for path in RESULTS.glob("*.json")} == {*SOURCES, ROWS_BENCHMARK}
    assert {path.stem.partition("_jax_")[0] for path in RESULTS.glob("*.json")} >= set(NAMED)
    scripts = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "sources"}
    writers = {name for name, text in scripts.items() if "write_text(" in text or f'write_result("{name}"' in text}
    assert writers - {ROWS_BENCHMARK} == set(SOURCES)


def test_a_row_is_stale_once_its_model_or_for_a_plan_the_library_changes(tmp_path):
    for path in (*(ROOT / "benchmarks/plan_models").glob("*.py"), *(ROOT / "jaxmem_callbacks/planning").glob("*.py")):
        place = tmp_path / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(path.read_bytes())
    policies = ("none", "ours", "ours as dots")
    rows = [
        {"model": "vit", "policy": each, **row_hashes("vit", planned=each != "none", root=tmp_path)}
        for each in policies
    ]
    written = tmp_path / f"{ROWS_BENCHMARK}_jax_1.2.json"
    written.write_text(json.dumps({"rows": rows}))
    assert told(tmp_path, tmp_path) == [f"{written.name}: fresh"]
    with (tmp_path / "jaxmem_callbacks/planning/search.py").open("a") as file:
        file.write("# another comment")
    assert told(tmp_path, tmp_path)[0].startswith(f"{written.name}: stale in 2 of 3 rows, ")
    with (tmp_path / "benchmarks/plan_models/vit.py").open("a") as file:
        file.write("# another comment")
    assert told(tmp_path, tmp_path)[0].startswith(f"{written.name}: stale in 3 of 3 rows, ")


def test_a_file_that_no_benchmark_writes_is_told(tmp_path):
    (tmp_path / "old_jax_1.2.json").write_text("{}")
    assert told(tmp_path, tmp_path) == ["old_jax_1.2.json: unknown, no benchmark writes it; delete it"]


def test_a_plan_is_kept_without_where_its_machine_holds_files():
    text = f'["{ROOT}/examples/a.py:7", "/any/lib/python3.12/site-packages/flax/linen/linear.py:1"]'
    assert json.loads(without_machine(text)) == ["examples/a.py:7", "flax/linen/linear.py:1"]


def test_a_result_is_written_with_what_made_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.sources.RESULTS", tmp_path)
    write_result("remat_by_hand", options="--targets cpu", rows=[1])
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    assert (benchmark_of(path), stale(path), capsys.readouterr().out) == (
        "remat_by_hand",
        False,
        f"wrote {path.name}\n",
    )
    assert (content["command"], content["rows"]) == ("python -m benchmarks.remat_by_hand --targets cpu", [1])
    assert list(content["versions"]) == ["jax", "jaxlib", "python"]


@pytest.mark.parametrize("benchmark", SOURCES)
def test_the_first_lines_of_a_benchmark_name_the_file_that_it_writes(benchmark):
    first = min(path.name for path in RESULTS.glob("*.json") if benchmark_of(path) == benchmark)
    name = re.sub(r"_jax_.*\.json", "_jax_<version>.json", first)
    assert f"Writes results/{name}" in (ROOT / "benchmarks" / f"{benchmark}.py").read_text()[:400]


def row_of(plan: jm.Plan, candidate: Candidate) -> re.Pattern[str]:
    """How docs/plan.md tells a candidate: its policy, its bytes and its extra operations."""
    policy = candidate.policy
    words = ", ".join(
        f"`{word}`" for word in (policy.sharding, policy_words(replace(policy, sharding=None, donate=None))) if word
    )
    chosen = r" \(chosen\)" if candidate is plan.chosen and len(plan.record.mesh) else ""
    share = f"+{(candidate.extra_share or 0) * 100:.1f} %" if candidate.extra_flops else "0"
    return re.compile(
        rf"^\| {re.escape(words)}{chosen} \| {format_bytes(candidate.step_bytes)}[^|]* \| {re.escape(share)}[ ,|]",
        re.MULTILINE,
    )


@pytest.mark.parametrize(("file", "quoted"), [("plan_pod_*", 5), ("plan_nnx_transformer_*", 6)])
def test_tables_of_plans_are_those_of_the_files(file, quoted):
    (path,) = RESULTS.glob(f"{file}.json")
    plan = plan_of(path)
    text = (ROOT / "docs" / "plan.md").read_text()
    told = [each for each in plan.candidates if row_of(plan, each).search(text)]
    assert len(told) == quoted
    assert plan.chosen in told


def test_the_picture_of_a_plan_is_drawn_from_the_figures_of_the_document():
    (path,) = RESULTS.glob("plan_pod_*.json")
    plan = plan_of(path)
    (axes,) = plan.figure().axes
    assert len([label for label in axes.texts if ":" in label.get_text()]) == len(plan.candidates)
    assert PICTURE.read_bytes()[:4] == b"\x89PNG"
    assert f"images/{PICTURE.name})" in (ROOT / "docs" / "plan.md").read_text()


def test_figures_of_accumulation_are_those_of_the_file():
    text = " ".join((ROOT / "docs" / "accumulation.md").read_text().split())
    content = result("accumulation")
    whole, four, sixteen, rematted = (
        f"{number / MIB:.1f} MiB" for number in content["temp_bytes"]["in_a_scan"].values()
    )
    assert (
        f"{whole} whole, {four} with 4 microbatches, {sixteen} with 16, and {rematted} with 4 and `remat: full`" in text
    )
    masked, contrastive = (f"{100 * share:.0f} %" for share in content["mean_is_off_by"].values())
    assert f"masked mean over 32 rows comes out {masked} wrong and an in-batch contrastive loss {contrastive}" in text


def test_figures_of_the_hook_are_those_of_the_file():
    readme = (ROOT / "README.md").read_text()
    content = result("hook_cost")
    one, eight = (content["by_devices"][count]["monitor, everything on"] for count in ("1", "8"))
    assert (
        f"{one['hook_median_us']:.1f} microseconds in the median on one device and {eight['hook_median_us']:.1f} on eight"
        in readme
    )
    assert f"Called in a row {content['hook_in_a_row_us']}" in readme
    above, mean, p99 = (
        f"{one[name]:.{digits}f} and {eight[name]:.{digits}f} (goal {goal})"
        for name, digits, goal in (
            ("hook_above_bare_median_us", 1, 10),
            ("whole_step_mean_ratio", 3, 1.01),
            ("whole_step_p99_ratio", 3, 1.05),
        )
    )
    assert above in readme
    assert f"mean {mean}, p99 {p99}" in readme


def test_make_bench_promises_no_more_than_it_runs():
    (line,) = re.findall(r"^bench: (.*?) ## (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    runs, promise = line
    left_out = {"bench-plan", *(f"bench-{command(each)}" for each in SOURCES)} - set(runs.split())
    assert left_out == set(re.findall(r"bench-\w+", promise.partition("; not ")[2]))


def test_documents_on_remat_give_no_bytes_that_no_file_holds():
    """Sizes of programs come from results; what is left are words, and sizes that are asked for."""
    text = (ROOT / "docs" / "remat.md").read_text()
    assert not re.findall(r"\b\d[\d.]* [KMGT]i?B\b(?!/s)", text)
