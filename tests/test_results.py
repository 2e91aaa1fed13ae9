"""Committed result files: each says which sources it rests on, a change of these makes it stale, and documents quote it truly."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import jaxmem_callbacks as jm
from benchmarks.frameworks import FRAMEWORKS, why
from benchmarks.plan_bench import closest
from benchmarks.plan_examples import without_machine
from benchmarks.plan_picture import PICTURE, plan_of
from benchmarks.simulator_picture import CASE
from benchmarks.simulator_picture import PICTURE as SIMULATED
from benchmarks.sources import (
    CHECKS,
    COMMANDS,
    NAMED,
    RESULTS,
    ROOT,
    ROWS_BENCHMARK,
    SOURCES,
    benchmark_of,
    check_hash,
    command,
    row_hashes,
    source_files,
    source_hash,
    stale,
    told,
    write_result,
)
from jaxmem_callbacks.answers.simulation import device_bytes_of, simulate_ways, trace_of
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.policies import policy_words
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.writers.simulation_text import simulation_text

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
    """A file with one more comment, for a while."""
    before = path.read_bytes()
    path.write_bytes(before + b"\n# another comment")
    yield
    path.write_bytes(before)


@pytest.mark.parametrize("benchmark", SOURCES)
def test_a_result_is_stale_once_any_of_its_sources_changes(benchmark, tree, tmp_path):
    written = written_for(benchmark, tree, tmp_path)
    assert source_hash(benchmark, tree) == source_hash(benchmark)
    assert told(tmp_path, tree) == [f"{written.name}: fresh"]
    files = source_files(benchmark, tree)
    for source in (*SOURCES[benchmark], f"benchmarks/{benchmark}.py"):
        room = tree / source if source.endswith(".py") else tree / "jaxmem_callbacks" / source
        path = next(path for path in files if path.is_relative_to(room))
        with changed(path):
            assert stale(written, tree), path
    written.write_text(json.dumps({"rows": [{"sources": source_hash(benchmark, tree)}, {"sources": "of long ago"}]}))
    assert told(tmp_path, tree) == [
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
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    written = tmp_path / f"{check}.json"
    written.write_text(json.dumps({"sources": check_hash(check, tmp_path)}))
    assert told(tmp_path, tmp_path) == [f"{check}.json: fresh"]
    for name in CHECKS[check]:
        with changed(tmp_path / name):
            (line,) = told(tmp_path, tmp_path)
            assert line == f"{check}.json: stale, its sources have changed; make {command(check)}"


def test_what_a_benchmark_does_not_reach_makes_no_result_stale(tree, tmp_path):
    written = written_for("remat_by_hand", tree, tmp_path)
    package = tree / "jaxmem_callbacks"
    for name in ("transforms/prefetch.py", "integrations/pytest.py", "writers/report_page.py"):
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
    assert writers - {ROWS_BENCHMARK} == set(SOURCES)


def test_a_row_is_stale_once_its_model_or_for_a_plan_the_library_changes(tree, tmp_path):
    policies = ("none", "ours", "ours as dots")
    rows = [
        {"model": "vit", "policy": each, **row_hashes("vit", planned=each != "none", root=tree)} for each in policies
    ]
    written = tmp_path / f"{ROWS_BENCHMARK}_jax_1.2.json"
    written.write_text(json.dumps({"rows": rows}))
    assert told(tmp_path, tree) == [f"{written.name}: fresh"]
    with changed(tree / "jaxmem_callbacks/planning/search.py"):
        assert told(tmp_path, tree)[0].startswith(f"{written.name}: stale in 2 of 3 rows, ")
        with changed(tree / "benchmarks/plan_models/vit.py"):
            assert told(tmp_path, tree)[0].startswith(f"{written.name}: stale in 3 of 3 rows, ")


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


NAMES = {
    "linen_transformer": "Linen transformer, unrolled",
    "nnx_transformer": "NNX transformer, scanned",
    "dropout_transformer": "dropout, tied embeddings, bf16 casts",
    "mixture": "mixture of experts",
    "vit": "ViT",
    "resnet": "ResNet with BatchNorm",
    "unet": "U-Net",
    "lstm": "LSTM over time",
    "equinox_transformer": "Equinox transformer",
    "mixer": "MLP-mixer, plain JAX",
    "encoder_decoder": "encoder-decoder",
}


def test_every_extra_was_installed_from_the_wheel_on_both_jax_lines():
    rows = result("check_wheel")["rows"]
    wanted = {None, *tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]}
    lines = {".".join(row["versions"]["jax"].split(".")[:2]) for row in rows}
    assert lines == {"0.10", "0.12"}
    for line in lines:
        assert {row["extra"] for row in rows if row["versions"]["jax"].startswith(f"{line}.")} == wanted
    assert {row["versions"]["jaxmem_callbacks"] for row in rows} == {jm.__version__}
    assert len({row["python"].rpartition(".")[0] for row in rows}) == 3
    assert "in clean environments: three Pythons, both JAX lines, each extra" in (ROOT / "README.md").read_text()


def nearest_points(target: str) -> dict[tuple[str, str], tuple[float, float]]:
    """Model and policy by hand -> bytes and operations of the frontier's nearest point, over those of the hand."""
    rows = [row for row in result(ROWS_BENCHMARK)["rows"] if row["target"] == target]
    ours = {row["model"]: row["candidates"] for row in rows if row["policy"] == "ours"}
    by_hand = [row for row in rows if row["policy"] != "none" and not row["policy"].startswith("ours")]
    return {
        (row["model"], row["policy"]): closest(ours[row["model"]], row)
        for row in by_hand
        if row["model"] in ours and row.get("step_bytes")
    }


@pytest.mark.parametrize("target", ["h100_sxm", "v5e"])
def test_figures_of_plans_against_remat_by_hand_are_those_of_the_file(target):
    text = (ROOT / "docs" / "plan.md").read_text().partition("## Against remat by hand")[2]
    first, _, second = text.partition("For a v5e")
    lines = (first if target == "h100_sxm" else second).splitlines()
    points = nearest_points(target)
    for (model, policy), (memory, work) in points.items():
        (line,) = (line for line in lines if line.startswith(f"| {NAMES[model]} |"))
        cells = [cell.strip() for cell in line.split("|")[2:]]
        place = {"full": 0, "dots": 1, "dots_no_batch": 2, "names": 3, "chunked": 4}[policy]
        assert cells[place] == f"{memory:.2f} at {work:.2f}", (model, policy)
    assert sum(line.startswith("| ") and " at " in line for line in lines) == len({model for model, _ in points})
    far = sorted(max(both) for both in points.values())
    if target == "v5e":
        assert (len(far), f"{far[-1]:.3f}") == (16, "1.059")
        assert far[-2] <= 1.05
        return
    within = sum(each <= 1.02 for each in far)
    below, fewer = (sum(test(both) for both in points.values()) for test in (lambda b: max(b) < 1, lambda b: b[0] < 1))
    assert far[-1] <= 1.05
    told = f"(the farthest is {far[-1]:.3f}), {within} within 1.02, {below} one\nbelow both, and {fewer} one with fewer bytes"
    assert f"Of the {len(far)} policies by hand all have a point" in first
    assert told in first
    all_of_them = f"for all {len(far)} (the farthest {far[-1]:.3f})"
    assert (
        f"{all_of_them}, within 1.02 for {within}, below both for {below}, with fewer bytes for {fewer}"
        in (ROOT / "README.md").read_text()
    )


def test_figures_of_padding_are_those_of_the_file():
    rows = result("padding")["rows"]
    text = (ROOT / "docs" / "gpu_and_tpu.md").read_text()
    for row in rows:
        if row["target"] == "h100_sxm":
            assert row["device_bytes"] == row["own_bytes"]
            continue
        own, device = row["own_bytes"], row["device_bytes"]
        assert (
            f"| `{row['array']}` | {own:,} | {device:,} | {device / own:.2f} | `{row['layout']}` | {own:,} |" in text
        ), row
    assert len({row["array"] for row in rows}) == text.count("`{")


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
    beside = [content["by_devices"][count].get("stormlog tracker") for count in ("1", "8")]
    told = [f"{each['whole_step_mean_ratio']:.3f}" for each in beside if each]
    assert (f"stormlog's tracker {' and '.join(told)}" if told else "stormlog was not in this run") in readme


def test_the_loggers_that_were_tried_are_those_of_the_file():
    text = " ".join((ROOT / "docs" / "figures.md").read_text().split())
    loggers = result("adapters")["loggers"]
    assert {each["outcome"] for each in loggers.values()} == {"passed"}
    names = {"flax.metrics.tensorboard": "Flax", "wandb": "Weights & Biases"}
    for name, each in loggers.items():
        assert f"{names.get(name, name)} {each['version']}" in text


FRAMEWORK_NAMES = {"keras": "Keras 3 on JAX", "grain": "Grain, or any iterator"}


def framework_cell(tried: dict[str, str | int]) -> str:
    """How docs/frameworks.md tells of one framework with one Python."""
    if tried["outcome"] == "passed":
        return f"{tried['version']}, {tried['passed']} tests"
    return "not installable"


def test_the_frameworks_that_were_tried_are_those_of_the_files():
    text = (ROOT / "docs" / "frameworks.md").read_text()
    files = sorted(RESULTS.glob("frameworks_jax_*.json"), reverse=True)
    contents = [json.loads(path.read_text()) for path in files]
    assert all(list(content["frameworks"]) == list(FRAMEWORKS) for content in contents)
    lines = [
        f"Python {each['versions']['python'].rpartition('.')[0]}, jax {each['versions']['jax']}" for each in contents
    ]
    assert f"| framework | what you add | {' | '.join(lines)} |" in text
    for name, framework in FRAMEWORKS.items():
        tried = [content["frameworks"][name] for content in contents]
        cells = " | ".join(map(framework_cell, tried))
        assert re.search(
            rf"^\| {FRAMEWORK_NAMES.get(name, name.capitalize())} \|.*\| {re.escape(cells)} \|$",
            text,
            re.MULTILINE | re.IGNORECASE,
        ), name
        reasons = [str(each["outcome"]) for each in tried if each["outcome"] != "passed"]
        assert all(each.startswith("not installable: ") for each in reasons), name
        assert all(each.removeprefix("not installable: ") in text for each in reasons), name
        assert framework.suite or len(reasons) == len(tried), "no suite, no adapter, no claim"


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (
            "x\nThe conflict is caused by:\n    a 1 depends on c>=2\n    b 1 depends on c<2\n\nTo fix this\nERROR: no\n",
            "a 1 depends on c>=2; b 1 depends on c<2",
        ),
        (
            "ERROR: Ignored the following versions: 1.3 Requires-Python >=3.12; 1.4 Requires-Python >=3.12\nERROR: none\n",
            "version 1.4 wants Python >=3.12",
        ),
        ("words\nERROR: No matching distribution found for a\nmore", "ERROR: No matching distribution found for a"),
        ("", "pip failed"),
    ],
)
def test_the_reason_why_a_framework_cannot_be_had_is_taken_from_pips_words(told, reason):
    assert why(told) == reason


def test_no_adapter_is_shipped_for_a_framework_without_a_suite():
    files = {path.stem for path in (ROOT / "jaxmem_callbacks" / "integrations").glob("*.py")}
    assert {"keras", "kauldron", "tunix"} == files & set(FRAMEWORKS)
    assert all((ROOT / each.suite).exists() for each in FRAMEWORKS.values() if each.suite)


def test_figures_of_the_simulator_are_those_of_the_file():
    content = result("simulator")
    pool, replay = (
        min(row["median_a_second"] for row in content[part].values()) // 1000 * 1000
        for part in ("pool_alone", "replay")
    )
    assert min(pool, replay) >= 100_000
    few, many, most = (row["median_us"] / 1000 for row in content["recording_a_call"])
    for document in ("README.md", "docs/simulate.md"):
        text = " ".join((ROOT / document).read_text().split())
        assert f"at least {pool:,} allocations a second of processor time, a whole replay {replay:,}" in text
        assert (
            f"takes {few:.1f} ms of processor time at 100 live arrays, {many:.1f} at 1,000 and {most:.1f} at 5,000"
            in text
        )


def test_costs_of_recovery_are_those_of_the_file():
    content = result("recovery_cost")
    steps, rows = content["steps"], content["snapshots"]
    idle, busy = steps["host_idle"]["recovery_over_waited"], steps["host_busy"]["recovery_over_dispatched"]
    assert all(row[kind]["bytes"] == row["state_bytes"] for row in rows for kind in ("host", "orbax"))
    large, small = (
        [round(row[kind]["over_a_memory_copy"], 1) for kind in ("host", "orbax", "back_from_host")]
        for row in (rows[-1], rows[0])
    )
    text = " ".join((ROOT / "docs" / "recovery.md").read_text().split())
    assert (
        f"`recovery.step` takes {idle:.2f} times as long as a step of `jm.jit_step` whose result is waited for" in text
    )
    between = f"Where the host needs {steps['host_ms']:.0f} ms between two steps"
    assert f"{between}, it takes {busy:.2f} times as long as steps that are not waited for" in text
    sizes = [f"{row['state_bytes'] // MIB} MiB" for row in (rows[-1], rows[0])]
    told = f"host copy of {sizes[0]} takes {large[0]} times as long, a checkpoint on disk {large[1]}, the way back from the host"
    assert f"{told} {large[2]}; of {sizes[1]} {small[0]}, {small[1]} and {small[2]}" in text
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert (
        f"a step by `jm.Recovery` over one that is waited for: {idle:.2f}; a host copy of a state of {sizes[0]}"
        in readme
    )
    assert f"over a copy of its bytes by NumPy: {large[0]}, a checkpoint on disk: {large[1]}" in readme


def test_the_picture_of_the_simulator_is_drawn_from_a_case_of_the_package():
    text = (ROOT / "docs" / "simulate.md").read_text()
    assert SIMULATED.read_bytes()[:4] == b"\x89PNG"
    assert f"images/{SIMULATED.name})" in text
    trace = trace_of(CASE)
    found = simulate_ways(trace, device_bytes_of(None, trace))
    told = simulation_text(found).splitlines()
    quoted = text.partition("```text\n")[2].partition("```")[0].splitlines()
    assert len(quoted) > 8
    assert [line for line in quoted if line not in told and line != "  ..."] == []


def test_make_bench_promises_no_more_than_it_runs():
    (line,) = re.findall(r"^bench: (.*?) ## (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    runs, promise = line
    left_out = {"bench-plan", *(command(each) for each in SOURCES)} - {*COMMANDS.values(), *runs.split()}
    assert left_out == set(re.findall(r"bench-\w+", promise.partition("; not ")[2]))


def test_documents_on_remat_give_no_bytes_that_no_file_holds():
    """Sizes of programs come from results; what is left are words, and sizes that are asked for."""
    text = (ROOT / "docs" / "remat.md").read_text()
    assert not re.findall(r"\b\d[\d.]* [KMGT]i?B\b(?!/s)", text)
