"""What the documents show is true: each Python block runs, commands and their options exist, every preset is described."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxmem_callbacks as jm
from benchmarks.frameworks import OTHERS
from jaxmem_callbacks.analysis.figures import DERIVED, FIGURES, NAMED, PROCESSES, Window
from jaxmem_callbacks.analysis.observation import Metrics
from jaxmem_callbacks.analysis.run_summary import HEAP_MAP
from jaxmem_callbacks.analysis.timeseries import Trend
from jaxmem_callbacks.callbacks.recorder import KNOWN_TAG
from jaxmem_callbacks.callbacks.recorder import SAVES_TAG as SAVES
from jaxmem_callbacks.config.schema import short_key
from jaxmem_callbacks.records.presets import EnvironmentSettings, MonitorSettings, RecoverySettings
from jaxmem_callbacks.writers.figures import TAG as OVER_TIME
from jaxmem_callbacks.writers.plan_figure import TAG as FRONTIER
from jaxmem_callbacks.writers.plan_page import CANDIDATES_TAG, SOURCES_TAG
from jaxmem_callbacks.writers.protocol import EVENTS_TAG
from tests import forked
from tests.processes import EMITTED_QUICKLY
from tests.target_step import needs_compiler

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "tasks").glob("*.md"))]

# What a reader has: a loss, a state, batches, a step; and names that documents leave to them.
WORLD = """
import jax, jax.numpy as jnp, optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxmem_callbacks as jm

def cross_entropy(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(batch["x"] @ params["w"]) @ params["w"], batch["y"])

def loss_fn(params, batch):
    return cross_entropy(params, batch).mean()

def train_step(state, batch):
    loss, grads = jm.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads=grads), {"loss": loss}

def eval_step(state, batch):
    return {"loss": loss_fn(state.params, batch)}

def new_state():
    return TrainState.create(apply_fn=None, params={"w": jnp.eye(16)}, tx=optax.adam(1e-3))

batch = {"x": jnp.ones((64, 16)), "y": jnp.zeros(64, jnp.int32), "mask": jnp.ones(64)}
state, batches = new_state(), [batch] * 2
"""
# The documents name hardware that is not there; the tests' own CPU answers in its place, with what it can be asked.
ATTACHED = {
    'target="h100_sxm"': 'target="cpu"',
    'target="v5e"': 'target="cpu"',
    'target="h100_sxm:8", ': "",
    ', "sharding": ["zero1", "fsdp"]': "",
    "[2, 4, 8]": "[2]",
}
# What a document's text puts between its blocks: document, number of the block -> what comes before it.
SHARDED = """
import dataclasses
sharded = dataclasses.replace(plan.chosen, policy=jm.StepPolicy(remat="full", sharding="fsdp"))
plan = jm.Plan(dataclasses.replace(plan.record, candidates=(sharded,), chosen=0, mesh={"fsdp": 8}))
state, batch = new_state(), dict(batch)
"""
EQUINOX = """
import equinox as eqx

def loss_fn(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(batch["x"]), batch["y"]).mean()

model, optimizer = eqx.nn.MLP(16, 4, 32, 2, key=jax.random.key(0)), optax.adam(1e-3)
opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
"""
BETWEEN = {("plan_search.md", 2): SHARDED, ("plan_a_pod.md", 1): SHARDED, ("frameworks.md", 1): EQUINOX}
# Documents whose Python begins before JAX does: run in a process of their own.
FRESH = {"environment.md", "choose_gpu_settings.md"}
# What a reader does next with what a document defines; pytest's own part in it is `test_the_pytest_lines_of_a_gate_hold`.
AFTERWARDS = {
    "frameworks.md": """
model, opt_state, metrics = step(model, opt_state, batch)
assert step.donated == ("model", "opt_state")
""",
    "plan.md": "state, metrics = step(state, batch)",
    "plan_search.md": "state, metrics = step(state, batch)",
    "plan_a_pod.md": "state, metrics = step(state, batch)",
    "gate.md": "test_the_step_does_not_grow(lambda step, *args, target, **_: jm.step_memory(step, *args, target=target))",
    "gate_memory_in_ci.md": "test_the_step_fits(lambda step, *args, target, **_: jm.step_memory(step, *args, target=target))",
    "accumulation.md": "assert jm.value_and_grad(loss)(state.params, batch)[0] > 0",
}
# Blocks of these are not compiled for the hardware that they name: they ask what docs/tasks/plan_a_pod.md asks, over more.
NOT_THERE = {"plan.md", "plan_peak.md", "plan_search.md"}


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language, wherever they are indented."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text, flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(body) for _, body in found]


def on_this_machine(block: str) -> str:
    for there, here in ATTACHED.items():
        block = block.replace(there, here)
    return block


def with_python() -> list[Path]:
    """All but the quickstart, whose scripts are run as files, with its commands, by tests/test_quickstart.py."""
    return [path for path in DOCUMENTS if path.name != "quickstart.md" and blocks(path.read_text(), "python")]


@pytest.mark.core
@pytest.mark.parametrize("path", with_python(), ids=lambda path: path.name)
def test_the_python_of_a_document_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if path.name in FRESH:
        code = "\n".join(blocks(path.read_text(), "python"))
        kept = {name: text for name, text in os.environ.items() if not name.startswith("XLA_")}
        variables = kept | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        done = forked.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return
    run(path, on_this_machine)


def naming_hardware() -> list[Path]:
    texts = {path: "".join(blocks(path.read_text(), "python")) for path in with_python()}
    return [path for path, text in texts.items() if on_this_machine(text) != text and path.name not in NOT_THERE]


@pytest.mark.targets
@pytest.mark.parametrize("path", naming_hardware(), ids=lambda path: path.name)
def test_the_python_of_a_document_runs_for_the_hardware_that_it_names(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "".join(blocks(path.read_text(), "python"))
    for name in sorted({name.partition(":")[0] for name in re.findall(r'target="([\w:]+)"', text)}):
        needs_compiler(name)
    run(path, lambda block: block)


def run(path: Path, where: Callable[[str], str]) -> None:
    """The blocks of a document one after the other, as ``where`` says them."""
    world: dict[str, Any] = {"__name__": "__main__"}
    exec(WORLD, world)  # noqa: S102 - what the document's reader has
    before = jax.sharding.get_mesh()
    try:
        for number, block in enumerate(blocks(path.read_text(), "python")):
            exec(BETWEEN.get((path.name, number), ""), world)  # noqa: S102 - what the text says between blocks
            exec(compile(where(block), f"{path.name}, block {number + 1}", "exec"), world)  # noqa: S102
        exec(AFTERWARDS.get(path.name, ""), world)  # noqa: S102 - what its reader does next
    finally:
        jax.set_mesh(before)


GATES = [ROOT / "docs" / "gate.md", ROOT / "docs" / "tasks" / "gate_memory_in_ci.md"]


def pytest_lines(path: Path) -> list[list[str]]:
    """Each ``pytest ...`` of a document's shell blocks, as its words."""
    lines = [line for block in blocks(path.read_text(), "sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("pytest ")]


def test_the_pytest_lines_of_a_gate_hold(tmp_path: Path) -> None:
    """In a project of the pages' own: baselines are written, held, and what grew fails by the share that the page says."""
    (writes, holds), again = (pytest_lines(path) for path in GATES)
    assert [writes, holds] == again, "both pages type the same"
    tests = [on_this_machine(blocks(path.read_text(), "python")[0]) for path in GATES]
    file = tmp_path / holds[-1]
    file.parent.mkdir()
    installed = importlib.metadata.entry_points(group="pytest11", name="jaxmem")
    plugin = () if installed else ("-p", "jaxmem_callbacks.integrations.pytest")

    def pytest_of(words: list[str]) -> subprocess.CompletedProcess[str]:
        variables = os.environ | EMITTED_QUICKLY | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", *words, *plugin]
        return forked.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)

    file.write_text("\n".join([WORLD, *tests]))
    assert pytest_of(writes).returncode == 0
    assert len(list((file.parent / "memory_baselines" / file.stem).glob("*.json"))) == len(tests)
    held = pytest_of(holds)
    assert held.returncode == 0, held.stdout
    assert f"{len(tests)} passed" in held.stdout
    file.write_text("\n".join([WORLD.replace('{"loss": loss}', '{"loss": loss, "kept": jnp.ones(4096)}'), *tests]))
    grown = pytest_of(holds)
    assert grown.returncode == 1
    for test in tests:
        (share,) = re.findall(r'max_regress="(.*?)"', test)
        assert f"Grew more than {share}: one step by" in grown.stdout


LEAK = """
import sys, time
world = {"__name__": "__main__"}
exec(sys.argv[1], world)

def until_it_is_told():
    while not world["monitor"].events:
        time.sleep(0.005)  # what a loader takes: looks come by the clock
        yield world["batch"]

world["batches"] = until_it_is_told()
exec(compile(sys.argv[2], "train.py", "exec"), world)
"""


def test_the_leak_of_the_page_is_told_as_it_says(tmp_path: Path) -> None:
    """In a process of its own, since arrays of other tests would make the looks rare."""
    text = (ROOT / "docs" / "tasks" / "find_a_leak.md").read_text()
    variables = os.environ | EMITTED_QUICKLY | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", LEAK, WORLD, blocks(text, "python")[0]]
    done = forked.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (shown,) = blocks(text, "text")
    figures = re.compile(r"[\d.]+ [KM]?i?B more|\d+ more|step \d+|\d+ now")  # of this run and of the page's
    (said, told) = (figures.sub("_", " ".join(each.split())) for each in (shown, done.stdout))
    assert said == told
    assert "made at train.py:8 (<module>)" in told


def test_a_rise_needs_as_many_looks_as_the_page_says() -> None:
    trend = Trend(100)
    looks = 0
    while trend.rise() is None:
        trend.add(1000 * looks, looks)
        looks += 1
    assert looks == 81, "the last stretch ends when the next one begins"
    assert "has read it about 80 times" in " ".join((ROOT / "docs" / "tasks" / "find_a_leak.md").read_text().split())


@pytest.mark.core
def test_a_loop_that_says_the_time_has_a_line_of_its_own() -> None:
    (line,) = re.findall(r"`(hooks\.append\(lambda .*?)`[ \n]", (ROOT / "docs" / "frameworks.md").read_text())
    double, hooks = jm.CollectingWriter(), []
    with jm.MemoryMonitor(writer=double) as monitor:
        exec(line, {"hooks": hooks, "monitor": monitor})  # noqa: S102 - what the page says
        hooks[0](0, 12.5)
        hooks[0](1)
    assert double.of(Metrics) == []
    assert double.of(Window)[-1].step == 1
    with jm.MemoryMonitor(writer=double) as monitor:
        monitor(0, 12.5)
    assert [each.values for each in double.of(Metrics)] == [{"metric": 12.5}], "the reason for that line"


def test_blocks_are_found_and_can_fail() -> None:
    text = "a\n```python\nx = 1\n```\n1. b\n   ```python\n   if x:\n       y = 2\n   ```\n```sh\nls\n```\n"
    assert blocks(text, "python") == ["x = 1\n", "if x:\n    y = 2\n"]
    assert blocks(text, "sh") == ["ls\n"]
    assert {"fit_a_bigger_model.md", "gate.md", "gate_memory_in_ci.md", "gpu_and_tpu.md", "plan_a_pod.md"} == {
        path.name for path in naming_hardware()
    }
    assert {
        "README.md",
        "accumulation.md",
        "allocation.md",
        "chunks.md",
        "choose_gpu_settings.md",
        "defragment.md",
        "environment.md",
        "events.md",
        "faults.md",
        "figures.md",
        "find_a_leak.md",
        "fit_a_bigger_model.md",
        "frameworks.md",
        "gate.md",
        "gate_memory_in_ci.md",
        "gpu_and_tpu.md",
        "oom.md",
        "plan.md",
        "plan_a_pod.md",
        "plan_peak.md",
        "plan_search.md",
        "prefetch.md",
        "presets.md",
        "recovery.md",
        "remat.md",
        "sharding.md",
        "simulate.md",
        "state_offload.md",
        "survive_fragmentation.md",
        "targets.md",
    } == {path.name for path in with_python()}
    bare = [re.sub(r"^( *)```.*?^\1```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL) for path in DOCUMENTS]
    assert not [line for text in bare for line in re.findall(r"^ {4}.*\bjm\..*", text, flags=re.MULTILINE)], (
        "code without a fence"
    )


def test_no_python_of_a_document_is_run_by_nobody() -> None:
    """Blocks for a framework that needs an environment of its own name it; test_adapters_docs.py runs these there."""
    fence = re.compile(r"^ *```python +(.*)$", re.MULTILINE)
    named = [(path.name, name) for path in DOCUMENTS for name in fence.findall(path.read_text())]
    assert sorted(named) == sorted(("frameworks.md", name) for name in OTHERS)


def test_no_framework_asks_for_more_than_three_lines() -> None:
    """Lines with a name of this library in them are those that a user adds; the others are the user's own."""
    fences = re.findall(
        r"^```python([^\n]*)\n(.*?)^```$", (ROOT / "docs" / "frameworks.md").read_text(), re.MULTILINE | re.DOTALL
    )
    ours = re.compile(r"jaxmem_callbacks|\bjm\.|\bmonitor\b|\bmemory\.")
    added = {name.strip(): sum(bool(ours.search(line)) for line in body.splitlines()) for name, body in fences}
    assert added.keys() == {"", *OTHERS}
    assert all(0 < count <= 3 for count in added.values()), added


def described(section: str) -> list[list[str]]:
    """The rows of the first table of a section of docs/presets.md, their names in the first column."""
    text = (ROOT / "docs" / "presets.md").read_text().partition(f"## {section}")[2]
    rows = [line.strip("| ").split(" | ") for line in re.findall(r"^\|.*\|$", text.partition("\n## ")[0], re.MULTILINE)]
    return rows[2:]


def test_every_preset_is_described_and_no_other() -> None:
    rows = described("The parts")
    assert sorted(row[0].strip("`") for row in rows) == list(jm.list_presets())
    assert {len(row) for row in rows} == {4}, "what it does, when to use it, its cost"


def test_every_tag_of_the_monitor_is_told_with_unit_source_window_backends_and_cost() -> None:
    text = (ROOT / "docs" / "figures.md").read_text()
    rows = [re.split(r" \| ", line.strip("| ")) for line in re.findall(r"^\| `.*\|$", text, re.MULTILINE)]
    told = {row[0].strip("`"): row for row in rows if len(row) == 7}
    units = {"GiB": "GiB", "arrays": "arrays", "share": "share"}
    for figure in (*FIGURES, *DERIVED, *NAMED):
        (row,) = [row for tag, row in told.items() if tag.partition("<")[0] == figure.tag]
        assert row[2] == units[figure.unit], figure.tag
    known = {figure.tag for figure in (*FIGURES, *DERIVED, *NAMED)} | {"train/", PROCESSES}
    assert {tag.partition("<")[0] for tag in told} == known, "no other"
    written = {EVENTS_TAG, KNOWN_TAG, SAVES, HEAP_MAP, OVER_TIME, FRONTIER, CANDIDATES_TAG, SOURCES_TAG}
    assert written == {tag for row in rows if len(row) == 3 for tag in re.findall(r"`((?:memory|plan)/\w+)`", row[0])}


def test_the_keys_of_presets_are_all_told() -> None:
    told = {row[0].strip("`"): re.findall(r"`(\w+)`", row[1]) for row in described("Overrides")}
    assert told == {
        "policy": [field.name for field in dataclasses.fields(jm.StepPolicy)],
        "monitor": [short_key(field.name) for field in dataclasses.fields(MonitorSettings)],
        "environment": [short_key(field.name) for field in dataclasses.fields(EnvironmentSettings)],
        "recovery": [short_key(field.name) for field in dataclasses.fields(RecoverySettings)],
    }
