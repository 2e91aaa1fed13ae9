"""Figures in documents are those of the result files, and pictures are drawn from them."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace

import pytest

import jaxmem_callbacks as jm
from benchmarks.frameworks import FRAMEWORKS, OTHERS, why
from benchmarks.plan_picture import PICTURE, plan_of
from benchmarks.simulator_picture import CASE
from benchmarks.simulator_picture import PICTURE as SIMULATED
from benchmarks.sources import COMMANDS, RESULTS, ROOT, SOURCES, benchmark_of, command
from jaxmem_callbacks.api.simulation import device_bytes_of, simulate_ways, trace_of
from jaxmem_callbacks.records.documents import as_text
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.policies import policy_words
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.writers.simulation import simulation_document

MIB = 2**20


def row(page: str, *cells: str) -> str:
    """A line of a table, as ``docs/<page>`` has it."""
    line = f"| {' | '.join(cells)} |"
    assert line in (ROOT / "docs" / page).read_text("utf-8").splitlines(), line
    return line


def result(benchmark: str) -> dict:
    (path,) = (path for path in RESULTS.glob("*.json") if benchmark_of(path) == benchmark)
    return json.loads(path.read_text())


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
    row("accumulation.md", "whole", whole)
    row("accumulation.md", "4 microbatches", four)
    row("accumulation.md", "16 microbatches", sixteen)
    row("accumulation.md", "4 microbatches and `remat: full`", rematted)
    masked, contrastive = (f"{100 * share:.0f} %" for share in content["mean_is_off_by"].values())
    assert f"masked mean over 32 rows comes out {masked} wrong and an in-batch contrastive loss {contrastive}" in text


def test_every_extra_was_installed_from_the_wheel_on_both_jax_lines():
    rows = result("check_wheel")["rows"]
    wanted = {None, *tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]}
    lines = {".".join(row["versions"]["jax"].split(".")[:2]) for row in rows}
    assert lines == {"0.10", "0.12"}
    for line in lines:
        assert {row["extra"] for row in rows if row["versions"]["jax"].startswith(f"{line}.")} == wanted
    assert {row["versions"]["jaxmem_callbacks"] for row in rows} == {jm.__version__}
    assert len({row["python"].rpartition(".")[0] for row in rows}) == 3
    row("benchmarks.md", "the wheel, alone and with each extra", "three Pythons, both JAX lines")


def test_the_sdist_was_installed_by_pip_on_every_python_and_does_what_the_wheel_does():
    rows = result("check_wheel")["rows"]
    wheels = {row["python"]: row["found"] for row in rows if (row["installed"], row["extra"]) == ("wheel", None)}
    assert {row["python"]: row["found"] for row in rows if row["installed"] == "sdist"} == wheels
    assert len(wheels) == 3
    same = "the same three Pythons; it does the same, and builds the same wheel, byte by byte"
    row("benchmarks.md", "the sdist, by pip", same)


def test_the_time_of_plans_is_that_of_the_result():
    found = result("plan_time")
    for each in found["rows"]:
        row(
            "benchmarks.md",
            f"`{each['model']}`",
            *(f"{each[side]['seconds']:.0f} s, {each[side]['compiles']} compiles" for side in ("before", "now")),
            f"{each['ratio']:.2f}",
        )
    assert f"The median is {found['median_ratio']:.2f}" in (ROOT / "docs" / "benchmarks.md").read_text()


def test_figures_of_plans_for_pods_are_those_of_the_file():
    rows = {(row["target"], row["budget"]): row for row in result("plan_scale")["rows"]}

    pods = ("h100_sxm:64", "h100_sxm:1024"), ("v5p:4x4x4", "v5p:8x8x16")
    assert all(each["fits"] and each["seconds"] < 300 for each in rows.values())
    most = max(each["largest_resident_bytes"] for each in rows.values()) / 2**30
    assert most < 12
    for names, words in zip(pods, ("H100", "v5p"), strict=True):
        for name, count in zip(names, ("64", "1,024"), strict=True):
            row(
                "benchmarks.md",
                f"{count} {words}",
                *(f"{rows[name, budget]['seconds']:.0f} s" for budget in (1.0, None)),
            )
    row("benchmarks.md", "goal", "300 s", "300 s")
    assert f"The largest of these took {most:.1f} GiB" in (ROOT / "docs" / "benchmarks.md").read_text()
    least = f"{rows[pods[0][1], 1.0]['seconds']:.0f} s"
    assert (
        f"| a plan of a GPT-3-sized step for 1,024 H100, on two cores | {least} |" in (ROOT / "README.md").read_text()
    )
    few = [
        f"{rows[name, 1.0]['seconds']:.0f} s for 64 {kind}"
        for name, kind in (("h100_sxm:64", "H100"), ("v5p:4x4x4", "v5p"))
    ]
    assert f"a GPT-3-sized step in {few[0]} and {few[1]}" in (ROOT / "docs" / "tasks" / "plan_a_pod.md").read_text()


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
    content = result("hook_cost")
    kinds = content["by_devices"]

    def told(words: str, name: str, goal: str = "none", *, of: str = "monitor, everything on") -> None:
        digits, unit = (3, "") if name.endswith("ratio") else (1, " µs")
        cells = [f"{kinds[count][of][name]:.{digits}f}{unit}" for count in ("1", "8")]
        row("benchmarks.md", words, *cells, goal)

    told("the hook, median", "hook_median_us")
    bare = "the hook less what the bare loop's clock and empty function take, median"
    told(bare, "hook_above_bare_median_us", "10 µs")
    told("an object that does nothing, median", "hook_median_us", of="an object that does nothing")
    told("whole steps over the bare loop, mean", "whole_step_mean_ratio", "1.01")
    told("whole steps over the bare loop, p99", "whole_step_p99_ratio", "1.05")
    beside = "whole steps with stormlog's tracker over the bare loop, mean"
    told(beside, "whole_step_mean_ratio", of="stormlog tracker")
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert f"without a step between, the hook takes {content['hook_in_a_row_us']} µs" in text
    median = kinds["1"]["monitor, everything on"]["hook_median_us"]
    assert (
        f"| the monitor's hook in a loop of 5 ms steps, median | {median:.1f} µs |" in (ROOT / "README.md").read_text()
    )


def test_the_loggers_that_were_tried_are_those_of_the_file():
    text = " ".join((ROOT / "docs" / "figures.md").read_text().split())
    loggers = result("adapters")["loggers"]
    assert {each["outcome"] for each in loggers.values()} == {"passed"}
    names = {"flax.metrics.tensorboard": "Flax", "wandb": "Weights & Biases"}
    for name, each in loggers.items():
        assert f"{names.get(name, name)} {each['version']}" in text


FRAMEWORK_NAMES = {
    "flax": "Flax NNX and Linen: your own loop",
    "equinox": "Equinox: your own loop",
    "optax": "optax: your own loop",
    "keras": "Keras 3 on JAX",
    "grain": "Grain, or any iterator",
}


def framework_cell(tried: dict[str, str | int], jax: str) -> str:
    """How docs/frameworks.md tells of one framework with one Python, in a column of one JAX."""
    if tried["outcome"] == "passed":
        other = "" if tried.get("jax", jax) == jax else f" on jax {tried['jax']}"
        return f"{tried['version']}{other}, {tried['passed']} test{'s' * (tried['passed'] != 1)}"
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
    for name in FRAMEWORKS:
        tried = [content["frameworks"][name] for content in contents]
        cells = " | ".join(map(framework_cell, tried, (content["versions"]["jax"] for content in contents)))
        assert re.search(
            rf"^\| {FRAMEWORK_NAMES.get(name, name.capitalize())} \|.*\| {re.escape(cells)} \|$",
            text,
            re.MULTILINE | re.IGNORECASE,
        ), name
        reasons = [str(each["outcome"]) for each in tried if each["outcome"] != "passed"]
        assert all(each.startswith("not installable: ") for each in reasons), name
        assert all(each.removeprefix("not installable: ") in text for each in reasons), name


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
    assert {"keras", "kauldron", "tunix"} == files & set(OTHERS)
    assert all((ROOT / each.suite).is_file() for each in FRAMEWORKS.values())


def test_figures_of_the_simulator_are_those_of_the_file():
    content = result("simulator")
    pool, replay = (
        min(row["median_a_second"] for row in content[part].values()) // 1000 * 1000
        for part in ("pool_alone", "replay")
    )
    assert min(pool, replay) >= 100_000
    few, many, most = (each["median_us"] / 1000 for each in content["recording_a_call"])
    row("benchmarks.md", "XLA's pool alone", f"at least {pool:,} allocations a second")
    row("benchmarks.md", "a whole replay", f"at least {replay:,} allocations a second")
    row("benchmarks.md", "recording a trace, a call at 100 live arrays", f"{few:.1f} ms")
    row("benchmarks.md", "the same at 1,000", f"{many:.1f} ms")
    row("benchmarks.md", "the same at 5,000", f"{most:.1f} ms")
    text = " ".join((ROOT / "docs" / "simulate.md").read_text().split())
    assert f"at least {pool:,} allocations a second of processor time, a whole replay {replay:,}" in text
    assert (
        f"takes {few:.1f} ms of processor time at 100 live arrays, {many:.1f} at 1,000 and {most:.1f} at 5,000" in text
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
    sizes = [f"{each['state_bytes'] // MIB} MiB" for each in (rows[-1], rows[0])]
    row("recovery.md", "a step of `jm.jit_step` whose result is waited for", f"{idle:.2f}")
    apart = f"steps that are not waited for, where the host needs {steps['host_ms']:.0f} ms between two steps"
    row("recovery.md", f"{apart}, since those hide one behind the other", f"{busy:.2f}")
    row("recovery.md", "over NumPy's copy of the same bytes in memory", *sizes)
    for words, both in zip(
        ("a host copy", "a checkpoint on disk", "the way back from the host"),
        zip(large, small, strict=True),
        strict=True,
    ):
        row("recovery.md", words, *map(str, both))
    row("benchmarks.md", "a step by `jm.Recovery` over one that is waited for", f"{idle:.2f}")
    row("benchmarks.md", f"a host copy of a state of {sizes[0]} over a copy of its bytes by NumPy", f"{large[0]}")
    row("benchmarks.md", "a checkpoint on disk over the same", f"{large[1]}")


def test_the_time_of_a_report_is_that_of_the_file():
    content = result("oom_report")
    rows = content["reports"]
    most = max(row["most_seconds"] for row in rows)
    assert most < 2
    few, few_dump, many, many_dump = (f"{row['seconds']:.2f}" for row in rows)
    assert [row["live_arrays"] for row in rows] == [1_000, 1_000, 100_000, 100_000]
    text = " ".join((ROOT / "docs" / "oom.md").read_text().split())
    assert f"on a machine of {content['cores']} cores that had other work: {few} s with 1,000 live arrays" in text
    dumps = f"{few_dump} and {many_dump} s where the error's text is an allocator's dump"
    assert f"and {many} s with 100,000; {dumps}" in text
    assert f"dump of {rows[1]['text_bytes'] / 1e6:.0f} MB; at most {most:.2f} s" in text


def test_the_picture_of_the_simulator_is_drawn_from_a_case_of_the_package():
    text = (ROOT / "docs" / "simulate.md").read_text()
    assert SIMULATED.read_bytes()[:4] == b"\x89PNG"
    assert f"images/{SIMULATED.name})" in text
    trace = trace_of(CASE)
    found = simulate_ways(trace, device_bytes_of(None, trace))
    told = as_text(simulation_document(found)).splitlines()
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


def test_figures_of_the_cut_against_remat_by_hand_are_those_of_the_file():
    rows = result("remat_by_hand")["rows"]
    targets = ("h100_sxm", "v5e:2x2", "cpu")
    by_target = {target: [each for each in rows if each["target"] == target] for target in targets}
    words = ("Llama-like Linen model, unrolled", "NNX transformer, scanned", "U-Net")
    work = {tuple(round(each["flops_over_hand"], 2) for each in some) for some in by_target.values()}
    assert len(work) == 1
    for number, (model, flops) in enumerate(zip(words, work.pop(), strict=True)):
        sizes = [f"{by_target[target][number]['bytes_over_hand']:.2f}" for target in targets]
        row("benchmarks.md", model, *sizes, f"{flops:.2f}")


def test_figures_of_the_analytic_part_are_those_of_the_file():
    both = result("analytic")["rows"]
    assert all(each["equations"] >= 10_000 and each["analytic_s"] < 5 for each in both)
    again = "besides: JAX traces the gradients of the cut loss, once for each policy that is compiled"
    for words, name in (
        ("the analytic part", "analytic_s"),
        ("besides: JAX traces the gradients", "jax_traces_the_gradients_s"),
        (again, "gradients_of_the_cut_loss_traced_s"),
    ):
        row("benchmarks.md", words, *(f"{each[name]:.1f}" for each in both))


def test_a_million_steps_and_the_lowering_are_those_of_the_files():
    content = result("million_steps")
    real = content["real"]
    pace = round(real["steps"] / real["seconds"], -3)
    row("benchmarks.md", "growth of resident memory", f"{real['resident_growth_bytes'] / MIB:.1f} MiB")
    row("benchmarks.md", "event file", f"{real['file_bytes']['events'] / 1e3:.0f} kB")
    lost = f"{real['dropped_stamps']:,}, at {pace:,.0f} steps a second"
    row("benchmarks.md", "stamps that the ring lost, all counted", lost)
    slow = content["steps_of"]["1.0 s"]["event_file_bytes"] / 1e6
    row("benchmarks.md", "event files of a million steps of one second each, pictures included", f"{slow:.0f} MB")
    loop, llama = (each["cut_over_plain"] for each in result("lowering")["rows"])
    row("benchmarks.md", "layers in a Python loop", f"{loop:.2f}")
    row("benchmarks.md", "unrolled Flax model", f"{llama:.2f}")


def test_figures_of_compiler_options_are_those_of_the_file():
    """Of eight devices with layers written out: at most 0.70 of the same policy's bytes in the mean, and none above."""
    found = result("compiler_options")["summaries"]["h100_sxm:8"]
    parts, mean = found["parts"].values(), found["geometric_mean"]
    assert len(parts) == 6
    assert max(parts) <= 1
    assert mean <= 0.7
    assert found["compiles"] <= 4
    text = " ".join((ROOT / "docs" / "plan_search.md").read_text().split())
    assert f"need {min(parts):.2f} to {max(parts):.2f} of the bytes with other options, {mean:.2f} in the" in text


def test_figures_of_a_state_on_the_host_are_those_of_the_file():
    """The share of the moved bytes that the peak falls by; nothing on the CPU."""
    rows = result("state_offload")["rows"]
    assert {row["less_bytes"] for row in rows if row["target"] == "cpu"} == {0}
    table = [line for line in (ROOT / "docs" / "state_offload.md").read_text().splitlines() if " MiB | " in line]
    models = list(dict.fromkeys(row["model"] for row in rows))
    for line, model in zip(table, models, strict=True):
        shares = [row["share"] for row in rows if row["model"] == model and row["target"] != "cpu"]
        written = [float(cell) for cell in line.split("|")[3:-1]]
        assert written == pytest.approx(shares, abs=0.001), model


def test_figures_of_vmaps_in_chunks_are_those_of_the_file():
    """Samples in a chunk, bytes before and after, and compiles: at most six beside the plain step's."""
    rows = result("vmapped_programs")["rows"]
    text = (ROOT / "docs" / "chunks.md").read_text().partition("make bench-vmaps")[2]
    table = [line.split("|")[2:-1] for line in text.splitlines() if line.startswith("| ")][2:]
    for cells, row in zip(table, rows, strict=True):
        samples = f"{row['chunk_samples']:,}" if row["fits"] else "does not fit"
        megabytes = [f"{row[name] / 1e6:.1f}" for name in ("plain_bytes", "step_bytes")]
        written = [cell.strip() for cell in cells]
        assert written == [f"{row['samples']:,}", samples, *megabytes, str(row["compiles"])], row["program"]
        assert row["compiles"] <= 7
        assert not row["fits"] or row["step_bytes"] <= row["budget_bytes"]
