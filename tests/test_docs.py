"""What the documents show is true: each Python block runs, commands and their options exist, every preset is described."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxmem_callbacks as jm
from benchmarks.frameworks import OTHERS
from jaxmem_callbacks.analysis.figures import DERIVED, FIGURES, NAMED, PROCESSES
from jaxmem_callbacks.analysis.known import HEAP_MAP
from jaxmem_callbacks.callbacks.recorder import KNOWN_TAG
from jaxmem_callbacks.config.schema import short_key
from jaxmem_callbacks.records.recoveries import RecoverySettings
from jaxmem_callbacks.records.settings import EnvironmentSettings, MonitorSettings
from jaxmem_callbacks.writers.over_time import TAG as OVER_TIME
from jaxmem_callbacks.writers.plan_figure import TAG as FRONTIER
from jaxmem_callbacks.writers.plan_page import CANDIDATES_TAG, SOURCES_TAG
from jaxmem_callbacks.writers.protocol import EVENTS_TAG
from jaxmem_callbacks.writers.saves_table import TAG as SAVES

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
BETWEEN = {
    ("plan.md", 3): """
import dataclasses
sharded = dataclasses.replace(plan.chosen, policy=jm.StepPolicy(remat="full", sharding="fsdp"))
plan = jm.Plan(dataclasses.replace(plan.record, candidates=(sharded,), chosen=0, mesh={"fsdp": 8}))
state, batch = new_state(), dict(batch)
""",
}
# Documents whose Python begins before JAX does: run in a process of their own.
FRESH = {"environment.md", "choose_gpu_settings.md"}
# What a reader does next with what a document defines.
AFTERWARDS = {
    "plan.md": "state, metrics = step(state, batch)",
    "gate.md": "test_the_step_does_not_grow(lambda step, *args, **_: jm.step_memory(step, *args))",
    "gate_memory_in_ci.md": "test_the_step_fits(lambda step, *args, **_: jm.step_memory(step, *args))",
    "accumulation.md": "assert jm.value_and_grad(loss)(state.params, batch)[0] > 0",
}


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language, wherever they are indented."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text, flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(body) for _, body in found]


def on_this_machine(block: str) -> str:
    for there, here in ATTACHED.items():
        block = block.replace(there, here)
    return block


def with_python() -> list[Path]:
    return [path for path in DOCUMENTS if blocks(path.read_text(), "python")]


@pytest.mark.core
@pytest.mark.parametrize("path", with_python(), ids=lambda path: path.name)
def test_the_python_of_a_document_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if path.name in FRESH:
        code = "\n".join(blocks(path.read_text(), "python"))
        kept = {name: text for name, text in os.environ.items() if not name.startswith("XLA_")}
        variables = kept | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return
    world: dict[str, Any] = {"__name__": "__main__"}
    exec(WORLD, world)  # noqa: S102 - what the document's reader has
    before = jax.sharding.get_mesh()
    try:
        for number, block in enumerate(blocks(path.read_text(), "python")):
            exec(BETWEEN.get((path.name, number), ""), world)  # noqa: S102 - what the text says between blocks
            exec(compile(on_this_machine(block), f"{path.name}, block {number + 1}", "exec"), world)  # noqa: S102
        exec(AFTERWARDS.get(path.name, ""), world)  # noqa: S102 - what its reader does next
    finally:
        jax.set_mesh(before)


def test_blocks_are_found_and_can_fail() -> None:
    text = "a\n```python\nx = 1\n```\n1. b\n   ```python\n   if x:\n       y = 2\n   ```\n```sh\nls\n```\n"
    assert blocks(text, "python") == ["x = 1\n", "if x:\n    y = 2\n"]
    assert blocks(text, "sh") == ["ls\n"]
    assert {
        "README.md",
        "accumulation.md",
        "allocation.md",
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
        "prefetch.md",
        "presets.md",
        "recovery.md",
        "sharding.md",
        "simulate.md",
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
