"""Committed result files: each says which sources it rests on, and a change of these makes it stale."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.plan_examples import without_machine
from benchmarks.sources import (
    CHECKS,
    NAMED,
    RESULTS,
    ROOT,
    ROWS_BENCHMARK,
    SOURCES,
    benchmark_of,
    check_hash,
    command,
    row_hashes,
    source_definitions,
    source_hash,
    stale,
    stale_lines,
    write_result,
)

MIB = 2**20


def result(benchmark: str) -> dict:
    (path,) = (path for path in RESULTS.glob("*.json") if benchmark_of(path) == benchmark)
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources in a tree of their own."""
    root = tmp_path_factory.mktemp("tree")
    for folder in ("jaxmem_callbacks", "benchmarks", "examples", "tests"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def written_for(benchmark: str, tree: Path, folder: Path) -> Path:
    """A result file of a benchmark in that tree."""
    written = folder / f"{benchmark}_jax_1.2.json"
    written.write_text(json.dumps({"sources": source_hash(benchmark, tree)}))
    return written


@contextlib.contextmanager
def changed(path: Path) -> Iterator[None]:
    """A file with one more statement in each of its functions, for a while."""
    before = path.read_text()
    lines = before.splitlines(keepends=True)
    last = [each.body[-1] for each in ast.walk(ast.parse(before)) if isinstance(each, ast.FunctionDef)]
    for statement in sorted(last, key=lambda each: -each.lineno):
        lines.insert(statement.lineno - 1, f"{' ' * statement.col_offset}changed = True\n")
    path.write_text("".join(lines))
    yield
    path.write_text(before)


@pytest.mark.parametrize("benchmark", SOURCES)
def test_a_result_is_stale_once_any_of_its_sources_changes(benchmark, tree, tmp_path):
    written = written_for(benchmark, tree, tmp_path)
    assert source_hash(benchmark, tree) == source_hash(benchmark)
    assert stale_lines(tmp_path, tree) == [f"{written.name}: fresh"]
    counted = {
        tree / f"{each.module.replace('.', '/')}.py" for each in source_definitions(benchmark, tree)[1] if each.names
    }
    for source in (*SOURCES[benchmark], f"benchmarks/{benchmark}.py"):
        room = tree / source if source.endswith(".py") else tree / "jaxmem_callbacks" / source
        path = max((path for path in counted if path.is_relative_to(room)), key=lambda path: path.stat().st_size)
        with changed(path):
            assert stale(written, tree), path
    written.write_text(json.dumps({"rows": [{"sources": source_hash(benchmark, tree)}, {"sources": "of long ago"}]}))
    assert stale_lines(tmp_path, tree) == [
        f"{written.name}: stale in 1 of 2 rows, its sources have changed; make {command(benchmark)}"
    ]
    written.write_text(json.dumps({"rows": [{}]}))
    assert stale(written, tree)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_committed_result_says_its_sources_and_no_machines_paths(path):
    benchmark, content = benchmark_of(path), json.loads(path.read_text())
    assert f"\n{command(benchmark)}:" in (ROOT / "Makefile").read_text()
    names = ("source",) if benchmark == ROWS_BENCHMARK else ("sources",)
    assert benchmark in {*SOURCES, *CHECKS, ROWS_BENCHMARK}
    for part in [content] if "sources" in content else content["rows"]:
        for name in (*names, *(["library"] if part.get("policy", "")[:4] == "ours" else [])):
            assert re.fullmatch("[0-9a-f]{16}", part[name])
    assert not re.search(r'"/|site-packages', path.read_text())


@pytest.mark.parametrize("check", CHECKS)
def test_a_checks_result_is_stale_once_what_it_asks_changes(check, tmp_path):
    for name in CHECKS[check]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    written = tmp_path / f"{check}.json"
    written.write_text(json.dumps({"sources": check_hash(check, tmp_path)}))
    assert stale_lines(tmp_path, tmp_path) == [f"{check}.json: fresh"]
    for name in CHECKS[check]:
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(f"{before}\n# another comment")
        (line,) = stale_lines(tmp_path, tmp_path)
        assert line == f"{check}.json: stale, its sources have changed; make {command(check)}"
        (tmp_path / name).write_text(before)


def test_what_a_benchmark_does_not_reach_makes_no_result_stale(tree, tmp_path):
    written = written_for("remat_by_hand", tree, tmp_path)
    package = tree / "jaxmem_callbacks"
    for name in ("transforms/prefetch.py", "integrations/pytest.py", "writers/report.py"):
        with changed(package / name):
            assert not stale(written, tree), name
    for name in ("transforms/cuts.py", "transforms/accumulation/accumulate.py", "integrations/flax_nnx.py"):
        with changed(package / name):  # reached by other modules, by a public name, by a name in a string
            assert stale(written, tree), name


def test_every_benchmark_is_known_and_has_its_result():
    assert {benchmark_of(path) for path in RESULTS.glob("*.json")} == {*SOURCES, *CHECKS, ROWS_BENCHMARK}
    assert {path.stem.partition("_jax_")[0] for path in RESULTS.glob("*.json")} >= set(NAMED)
    scripts = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "sources"}
    writers = {name for name, text in scripts.items() if "write_text(" in text or f'write_result("{name}"' in text}
    # The table is of another result's rows, and held to them by tests/test_bench_tables.py.
    assert writers - {ROWS_BENCHMARK, "plan_table"} == set(SOURCES)


def test_a_row_is_stale_once_its_model_or_for_a_plan_the_library_changes(tree, tmp_path):
    policies = ("none", "ours", "ours as dots")
    rows = [{"model": "vit", "policy": each, **row_hashes("vit", each, root=tree)} for each in policies]
    written = tmp_path / f"{ROWS_BENCHMARK}_jax_1.2.json"
    written.write_text(json.dumps({"rows": rows}))
    assert stale_lines(tmp_path, tree) == [f"{written.name}: fresh"]
    with changed(
        tree / "jaxmem_callbacks/planning/search.py"
    ):  # how policies are searched, not what one makes of a step
        assert stale_lines(tmp_path, tree)[0].startswith(f"{written.name}: stale in 1 of 3 rows, ")
    with changed(tree / "jaxmem_callbacks/planning/compiles.py"):
        assert stale_lines(tmp_path, tree)[0].startswith(f"{written.name}: stale in 2 of 3 rows, ")
        with changed(tree / "benchmarks/plan_models/vit.py"):
            assert stale_lines(tmp_path, tree)[0].startswith(f"{written.name}: stale in 3 of 3 rows, ")


def test_a_file_that_no_benchmark_writes_is_told(tmp_path):
    (tmp_path / "old_jax_1.2.json").write_text("{}")
    assert stale_lines(tmp_path, tmp_path) == ["old_jax_1.2.json: unknown, no benchmark writes it; delete it"]


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
