"""A plan that another process made: read from its file, compared by the monitor, and with the share of a GPU that it needs."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.train_lines import lines_to_train
from jaxmem_callbacks.config.presets import parse_preset
from jaxmem_callbacks.planning.request import budget_for
from jaxmem_callbacks.programs.targets.target import Target
from jaxmem_callbacks.records.errors import PlanError, RunFileError
from jaxmem_callbacks.records.presets import EnvironmentSettings
from tests import forked
from tests import sample_plans as samples
from tests.processes import UNOPTIMISED
from tests.sample_plans import GIB

ROOT = Path(__file__).resolve().parents[1]
# Planned as it is; a training where there is a plan. Its arguments: rows of the batch, the activation, the plan's file.
TRAIN = """
import json, sys
import jax, jax.numpy as jnp
import jaxmem_callbacks as jm
from jaxmem_callbacks.writers.protocol import LoggedTable

rows, act, file = int(sys.argv[1]), getattr(jnp, sys.argv[2]), sys.argv[3]

def loss(params, batch):
    layer = lambda x, w: (act(act(x @ w) @ w), None)
    return jnp.square(jax.lax.scan(layer, batch, params)[0]).mean()

def train_step(params, batch):
    value, grads = jm.value_and_grad(loss)(params, batch)
    return params - 0.1 * grads, {"loss": value}

params, batch = jnp.ones((8, 32, 32)) / 32, jnp.ones((rows, 32))
if file == "none":
    jm.jit_step(train_step)(params, batch)
step, writer = jm.jit_step(train_step, jm.load_plan(file).policy), jm.CollectingWriter()
with jm.MemoryMonitor(plan=file, writer=writer) as monitor:
    for i in range(3):
        params, metrics = step(params, batch)
        monitor(i, metrics)
tables = [each for each in writer.records if isinstance(each, LoggedTable)]
told = [list(row) for table in tables for row in table.rows if row[0].startswith("plan of")]
print(json.dumps({"told": told[-1], "events": [[each.kind, each.message] for each in monitor.events]}))
"""


@pytest.fixture(scope="module")
def run_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "train.py").write_text(TRAIN)
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    variables = {**kept, **UNOPTIMISED, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}

    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return forked.run(command, cwd=folder, env=variables | more, capture_output=True, text=True, check=False)

    return run


@pytest.fixture(scope="module")
def planned(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> str:
    """What the command printed; plan.json is beside the script."""
    words = ("plan", "train.py", "--budget", "260KiB", "--save", "plan.json", "--args", "64", "tanh", "none")
    done = run_python("-m", "jaxmem_callbacks.cli.main", *words)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_a_plan_of_another_process_is_shown_beside_what_is_measured(
    planned: str, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    assert "-> full, keep " in planned, "a policy that the run has to repeat"
    assert 'plan = jm.load_plan("plan.json")\n    step = jm.jit_step(train_step, plan.policy)\n' in planned
    assert "--save plan.json here" not in planned
    done = run_python("train.py", "64", "tanh", "plan.json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["events"] == []
    assert "predicted, " in said["told"][1]
    assert said["told"][3].startswith("+0.0%")


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize(
    ("rows", "activation", "words"),
    [
        ("48", "tanh", "is stale: batch: float32[64,32] -> float32[48,32]."),
        ("64", "sin", "is stale: the step has other operations than the planned one under its policy"),
    ],
)
def test_another_step_than_the_one_planned_elsewhere_is_told_once(
    rows: str, activation: str, words: str, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run_python("train.py", rows, activation, "plan.json")
    assert done.returncode == 0, done.stderr
    ((kind, message),) = json.loads(done.stdout)["events"]
    assert kind == "plan_stale"
    assert words in message


@pytest.mark.core
@pytest.mark.parametrize(
    "record",
    [
        samples.six(fraction=0.85, signature=(("batch['x']", "float32[8,128]"),), process_flags={"xla_a": "1"}),
        samples.fifteen(),
        samples.without_limit(),
        samples.unfit(),
        dataclasses.replace(
            samples.six(),
            candidates=(samples.candidate(5, 0, remat="full", save=("a",), sharding=(("embed", "fsdp"),)),),
            chosen=0,
        ),
    ],
)
def test_what_a_plan_writes_is_the_plan(record: Any, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(jm.Plan(record).to_json())
    for path in (tmp_path / "plan.json", str(tmp_path / "plan.json")):
        read = jm.load_plan(path)
        assert read.record == record
        assert read.policy == jm.Plan(record).policy
        jm.MemoryMonitor(plan=path).close()


@pytest.mark.core
def test_a_plan_that_was_compiled_is_read_with_its_peak(tmp_path: Path) -> None:
    def train_step(params: Any, batch: Any) -> Any:
        value, grads = jm.value_and_grad(lambda p, x: (jnp.tanh(x @ p) ** 2).mean())(params, batch)
        return params - grads, value

    plan = jm.plan(train_step, jnp.ones((4, 4)), jnp.ones((8, 4)), budget="1GiB")
    (tmp_path / "plan.json").write_text(plan.to_json())
    read = jm.load_plan(tmp_path / "plan.json")
    assert read.record == plan.record
    assert (str(read), str(read.peak)) == (str(plan), str(plan.peak))


@pytest.mark.core
def test_a_loaded_plan_in_which_nothing_fits_is_still_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(jm.Plan(samples.unfit()).to_json())
    with pytest.raises(PlanError, match="Nothing fits: train_step"):
        jm.jit_step(lambda state: state, jm.load_plan(tmp_path / "plan.json").policy)


def changed(**fields: Any) -> str:
    figures = json.loads(jm.Plan(samples.six()).to_json())
    return json.dumps({name: value for name, value in {**figures, **fields}.items() if value is not ...})


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "missing.json",
            None,
            "missing.json cannot be read: No such file or directory. Expected a whole plan, as jaxmem plan",
        ),
        (
            "plan.yaml",
            jm.Plan(samples.six()).to_yaml(),
            "plan.yaml is a preset, for jm.load_preset: it has the policy of a",
        ),
        ("plan.json", "policy: {remat: full}", "plan.json is no JSON: Expecting value: line 1 column 1"),
        ("plan.json", "[" * 100_000, "plan.json is no JSON: "),
        ("plan.json", "[1]", "plan.json is no plan: [1] is not an object."),
        (
            "step.json",
            '{"account": {}, "a": 1, "b": 2, "c": 3}',
            "step.json is no plan: it has no `candidates`, but `account`, `a`, `b` and more. Expected a whole plan",
        ),
        ("plan.json", changed(limit_bytes=...), "plan.json is no plan: `limit_bytes` is missing."),
        ("plan.json", changed(chosen=6), "`chosen` is 6, expected the place of one of 6 candidates"),
        ("plan.json", changed(budget_bytes="72GiB"), "`budget_bytes` is '72GiB', expected a whole number."),
        ("plan.json", changed(step=1), "of another version of jaxmem_callbacks again with this one."),
    ],
)
def test_what_holds_no_plan_is_told_with_what_to_type(name: str, text: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    for ask in (jm.load_plan, lambda plan: jm.MemoryMonitor(plan=plan)):
        with pytest.raises(RunFileError) as caught:
            ask(path)
        assert words in str(caught.value)
        assert "jaxmem plan saves it in a file that ends in .json, or the text of plan.to_json()" in str(caught.value)


@pytest.mark.core
def test_the_text_of_a_plan_in_the_place_of_its_file_is_told(tmp_path: Path) -> None:
    text = jm.Plan(samples.six()).to_json()
    for ask in (jm.load_plan, lambda plan: jm.MemoryMonitor(plan=plan)):
        with pytest.raises(
            RunFileError, match=r"A plan is read by the path of its file, and this is a text\."
        ) as caught:
            ask(text)
        assert len(str(caught.value)) < 400
    (tmp_path / "plan.json").write_text(text)
    assert jm.load_plan(tmp_path / "plan.json").record == samples.six()


@pytest.mark.core
def test_what_a_newer_version_added_to_a_plan_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(changed(a_later_field={"a": 1}))
    assert jm.load_plan(tmp_path / "plan.json").record == samples.six()


H100 = Target(name="h100_sxm", platform="cuda", device_count=1, memory_bytes=80 * GIB)


@pytest.mark.core
@pytest.mark.parametrize(
    ("said", "budget", "need", "share"),
    [
        (None, "72GiB", 60, None),  # three quarters of 80
        (None, "72GiB", 61, 0.77),
        (None, None, 60, None),
        ("0.9", "72GiB", 61, 0.9),  # as it is said here, or the two would contradict
        ("0.9", None, 61, 0.9),
        ("0.9", 1.0, 61, 0.9),
        ("0.9", 1.0, 60, None),
        ("0.9", "79GiB", 76, 0.95),
        ("0.5", "72GiB", 45, 0.57),
    ],
)
def test_the_share_is_what_a_jax_that_is_told_nothing_must_be_told(
    said: str | None, budget: Any, need: int, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    if said is not None:
        monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", said)
    assert budget_for(budget, H100).share_for(need * GIB) == share


@pytest.mark.core
def test_a_plan_that_needs_a_larger_share_says_so_in_its_preset_and_no_other_does() -> None:
    plain, larger = jm.Plan(samples.six()), jm.Plan(samples.six(fraction=0.85))
    assert "environment" not in plain.to_yaml()
    preset = parse_preset(larger.to_yaml())
    assert preset.environment == EnvironmentSettings(fraction=0.85)
    assert preset.policy == larger.policy
    assert "It needs XLA_CLIENT_MEM_FRACTION=0.85 or more, which jm.apply_environment sets." in preset.description


ASKS = """
import sys
import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import EnvironmentSettingError
preset = jm.load_preset(sys.argv[2])
if sys.argv[1] == "first":
    print(jm.apply_environment(preset))
import jax
params = jax.numpy.ones((4, 4))
def train_step(params):
    return params - jm.grad(lambda p: (jax.numpy.tanh(p) ** 2).sum())(params)
for word in (lambda: jm.apply_environment(preset), lambda: jm.jit_step(train_step, preset), lambda: jm.MemoryMonitor(preset)):
    try:
        print("right", word())
    except EnvironmentSettingError as error:
        print(error)
jm.jit_step(train_step, preset.policy)(params)
print("stepped")
"""


@pytest.mark.core
def test_the_preset_of_such_a_plan_is_applied_before_jax_starts_or_refused_with_the_way_out(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(jm.Plan(samples.six(fraction=0.85)).to_yaml())
    first = run_python("-c", ASKS, "first", str(file))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("plan: set XLA_CLIENT_MEM_FRACTION=0.85; already so: nothing")
    assert first.stdout.count("\nright ") == 3
    late = run_python("-c", ASKS, "late", str(file))
    assert late.returncode == 0, late.stderr
    call = f"jm.load_preset({str(file)!r})"
    assert late.stdout.startswith("plan: too late for XLA_CLIENT_MEM_FRACTION.")
    assert late.stdout.count(f"jm.apply_environment({call})\n") == 3
    assert late.stdout.count(f"To do without it: {call}.policy for a step, .monitor for a monitor\n") == 2
    assert "right" not in late.stdout
    assert late.stdout.endswith("stepped\n")


@pytest.mark.core
def test_the_lines_to_paste_say_the_share_and_give_the_plan_to_the_monitor() -> None:
    plain, larger = jm.Plan(samples.six()), jm.Plan(samples.six(fraction=0.85))
    whole = [
        'plan = jm.load_plan("plan.json")',
        "step = jm.jit_step(train_step, plan.policy)",
        "monitor = jm.MemoryMonitor(plan=plan)  # and monitor(i, metrics) after each step",
    ]
    assert lines_to_train(plain, Path("plan.json")) == whole
    assert lines_to_train(larger, Path("plan.json")) == ["# start with XLA_CLIENT_MEM_FRACTION=0.85 or more", *whole]
    assert lines_to_train(plain, Path("plan.yaml")) == ['step = jm.jit_step(train_step, jm.load_preset("plan.yaml"))']
    assert lines_to_train(larger, Path("plan.yaml")) == [
        'policy = jm.load_preset("plan.yaml")',
        "jm.apply_environment(policy)  # above the first use of JAX",
        "step = jm.jit_step(train_step, policy)",
    ]
    assert lines_to_train(larger, None)[0] == "# start with XLA_CLIENT_MEM_FRACTION=0.85 or more"
