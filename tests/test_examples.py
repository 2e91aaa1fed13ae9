"""The examples as their users run them: a process of their own, a loss that falls, memory in TensorBoard, the same result as
without the policy.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.targets.compilers import compiler_versions
from tests import forked
from tests.processes import EMITTED_QUICKLY
from tests.target_step import needs_compiler

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
STEPS = {
    "sharded_transformer": 5,  # makes devices, so it is the first of its process
    "nnx_transformer": 5,
    "linen_transformer": 5,
    "digits_batchnorm": 120,
    "equinox_digits": 200,
    "lora": 60,
    "mixed_precision": 40,
}
ON_CPU = {**os.environ, **EMITTED_QUICKLY, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}

# Each example as `python example.py` runs it, one after the other: JAX and Flax are imported once.
# digits_batchnorm trains twice more, as users compile, with its presets and with none: all that training moves is compared.
# Not the transformers: the gradient of an attention key's bias is zero but for rounding, and Adam scales that up.
TRAIN = """
import contextlib, io, json, runpy, sys
sys.path.insert(0, EXAMPLES)
printed = {}
for name, steps in STEPS.items():
    sys.argv = [f"{EXAMPLES}/{name}.py", "--steps", str(steps), "--logdir", f"{FOLDER}/{name}"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(sys.argv[0], run_name="__main__")
    printed[name] = out.getvalue()

import jax, numpy as np
import digits_batchnorm as example
jax.config.update("jax_disable_most_optimizations", False)

def final(*presets):
    sys.argv = ["digits_batchnorm.py", "--steps", "12", "--logdir", f"{FOLDER}/{presets[-1]}", "--presets", *presets]
    with contextlib.redirect_stdout(io.StringIO()):
        state = example.main()
    moved = (state.params, state.batch_stats, state.opt_state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(moved)}

with_policy, without = final("donate", "full_remat"), final("monitor_only")
assert with_policy.keys() == without.keys()
worst = max(float(np.abs(with_policy[k] - without[k]).max() / max(np.abs(without[k]).max(), 1e-30)) for k in without)
print(json.dumps({"printed": printed, "compared": [len(without), worst]}))
"""


def run_python(*arguments: str, **variables: str) -> str:
    """Run this interpreter as a user would; what it printed."""
    answer = forked.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=ON_CPU | variables, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


# Of JAX and Flax these three use what differs between the lines; the others train as they do.
ON_BOTH_LINES = {"nnx_transformer", "linen_transformer", "sharded_transformer"}
RUNS = [pytest.param(name, marks=[pytest.mark.core] if name in ON_BOTH_LINES else []) for name in sorted(STEPS)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What the examples printed and how far the compared parameters are apart; the folder of their runs."""
    folder = tmp_path_factory.mktemp("examples")
    script = folder / "train.py"
    script.write_text(f"EXAMPLES, FOLDER, STEPS = {str(EXAMPLES)!r}, {str(folder)!r}, {STEPS!r}\n{TRAIN}")
    return json.loads(run_python(str(script)).splitlines()[-1]), folder


@pytest.fixture(params=RUNS)
def ran(request: pytest.FixtureRequest, trained: tuple[dict[str, Any], Path]) -> tuple[str, str, Path]:
    """One example, run: its name, what it printed, and its folder."""
    name: str = request.param
    return name, trained[0]["printed"][name], trained[1] / name


def test_the_loss_falls(ran: tuple[str, str, Path]):
    name, printed, _ = ran
    losses = [float(loss) for loss in re.findall(r"loss +([\d.]+)", printed)]
    assert losses[-1] < 0.8 * losses[0], printed
    assert f"step {STEPS[name] - 1:4d}" in printed


@pytest.mark.parametrize("ran", ["digits_batchnorm", "equinox_digits"], indirect=True)
def test_digits_are_recognised(ran: tuple[str, str, Path]):
    """By the running statistics of BatchNorm, on images that were not trained on."""
    accuracy = re.search(r"test accuracy ([\d.]+)", ran[1])
    assert accuracy, ran[1]
    assert float(accuracy[1]) > 0.95


@pytest.mark.parametrize("ran", ["lora"], indirect=True)
def test_frozen_weights_cost_neither_state_nor_donation(ran: tuple[str, str, Path]):
    """The new digits are learned, as images show that nobody trained on; the table says whose memory is used again."""
    right = [float(share) for share in re.findall(r"unseen images right ([\d.]+)%", ran[1])]
    assert right[0] < 60
    assert right[-1] > 85
    rows = {row[:2]: row[2:] for row in re.findall(r"^  (\w+) +(\w+(?: \w+)?) {2,}(\d+) +(.*)$", ran[1], re.MULTILINE)}
    assert rows["frozen", "parameters"][1].split()[-4:] == ["0", "B", "0", "B"], ran[1]
    for kind in ("parameters", "optimizer state"):
        size, donated, reused = re.findall(r"[\d.]+ [KM]iB", rows["state", kind][1])
        assert size == donated == reused


@pytest.mark.parametrize("ran", ["mixed_precision"], indirect=True)
def test_both_precisions_are_told_with_one_float32_state(ran: tuple[str, str, Path]):
    """Weights and moments are float32 either way, so the state that is taken over is as large."""
    states = re.findall(r"^in (\w+): [\d.]+ MiB, state ([\d.]+) MiB$", ran[1], re.MULTILINE)
    assert [name for name, _ in states] == ["float32", "bfloat16"]
    assert states[0][1] == states[1][1]


@pytest.mark.parametrize("ran", ["sharded_transformer"], indirect=True)
def test_each_device_keeps_its_share(ran: tuple[str, str, Path]):
    """Four devices share the state, from its birth to the end, but for what is small."""
    shares = re.findall(r"takes ([\d.]+) of ([\d.]+) MiB on each device", ran[1])
    assert len(shares) == 2, ran[1]
    assert shares[0] == shares[1]
    assert float(shares[0][0]) < 1.1 * float(shares[0][1]) / 4


def test_memory_is_in_one_event_file(ran: tuple[str, str, Path]):
    name, _, logdir = ran
    (file,) = logdir.glob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    scalars = set(events.Tags()["scalars"])
    assert {"memory/live_arrays_mib", "memory/host_mib", "memory/program_mib/train_step", "train/loss"} <= scalars
    points = events.Scalars("memory/live_arrays_mib")
    assert all(point.value > 0 for point in points)
    assert points[-1].step == STEPS[name] - 1
    assert (logdir / "memory.jsonl").stat().st_size > 0


@pytest.mark.core
def test_the_notebook_plans_trains_sees_an_event_and_reads_the_report(tmp_path: Path):
    """Its cells in order, in one process, as a kernel runs them; kept without outputs, so that none can be out of date."""
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code")
    script = tmp_path / "cells.py"
    script.write_text(
        f"world = {{}}\nfor n, cell in enumerate({cells!r}):\n    exec(compile(cell, f'cell {{n}}', 'exec'), world)\n"
    )
    command = [sys.executable, "-W", "error", str(script)]
    done = forked.run(command, cwd=tmp_path, capture_output=True, text=True, env=ON_CPU, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^  ->  none .*no budget", done.stdout, re.MULTILINE)
    assert "StepPolicy(remat='full'" in done.stdout, "the budget is less than the plain step needs"
    first, last = re.findall(r"loss ([\d.]+) at first, ([\d.]+) at last", done.stdout)[0]
    assert float(last) < 0.5 * float(first)
    assert re.search(r"^recompilation\n  what: .* at step 59\. Changed: batch\['x'\]", done.stdout, re.MULTILINE)
    assert (tmp_path / "runs" / "notebook" / "report.html").read_text().count("recompilation") > 0
    assert list((tmp_path / "runs" / "notebook").glob("events.out.tfevents.*"))


@pytest.mark.core
def test_a_failure_is_explained(tmp_path: Path):
    command = [
        sys.executable,
        str(EXAMPLES / "out_of_memory.py"),
        "--outdir",
        str(tmp_path / "oom"),
        "--plan-seconds",
        "0",
    ]
    done = forked.run(command, capture_output=True, text=True, env=ON_CPU, check=False)
    assert done.returncode == 1
    assert re.search(r"^256 rows: loss [\d.]+$", done.stdout)
    (folder,) = (tmp_path / "oom").iterdir()
    assert f"jaxmem: out of memory, explained in {folder}/report.md" in done.stderr
    assert (folder / "report.md").read_text().startswith("# Probably the program train_step asked for ")


def test_an_example_that_runs_out_of_memory_finishes_with_recovery():
    script = str(EXAMPLES / "recover.py")
    without = forked.run([sys.executable, script, "--without"], capture_output=True, text=True, env=ON_CPU, check=False)
    assert without.returncode == 1
    assert "RESOURCE_EXHAUSTED: Out of memory" in without.stderr
    before = without.stdout.splitlines()
    assert len(before) == 12
    printed = run_python(script).splitlines()
    assert printed[:12] == before
    assert len(printed) == 21
    assert re.fullmatch(r"finished under: none, \d microbatches, donating", printed[-1])


def test_examples_are_short_enough_to_copy():
    names = (*STEPS, "plan_a_pod", "out_of_memory", "recover")
    lengths = {name: len((EXAMPLES / f"{name}.py").read_text().splitlines()) for name in names}
    assert max(lengths.values()) < 100, lengths


@pytest.mark.targets
@pytest.mark.timeout(300)
def test_a_pod_is_planned_on_a_laptop(tmp_path: Path):
    """A model that is too large for replicas and for whole parameters there, so that only `fsdp` is compiled, and fits plain."""
    needs_compiler("h100_sxm:8")
    out = tmp_path / "plan.json"
    options = (
        "--target",
        "h100_sxm:8",
        "--model",
        "16384",
        "4",
        "--rows",
        "1",
        "--budget",
        "59GiB",
        "--json",
        str(out),
        "--logdir",
        str(tmp_path),
    )
    cache = os.environ["JAXMEM_CACHE_DIR"]
    printed = run_python(str(EXAMPLES / "plan_a_pod.py"), *options, JAXMEM_CACHE_DIR=cache)
    assert "14.20 billion parameters, 8 rows of 2048 tokens, 8 devices" in printed
    assert "zero1 was not compiled: its arguments alone are" in printed
    plan = json.loads(out.read_text())
    chosen = plan["candidates"][plan["chosen"]]
    assert (chosen["fits"], chosen["policy"]["sharding"]) == (True, "fsdp")
    assert chosen["argument_bytes"] < chosen["step_bytes"] < plan["budget_bytes"]
    preset = tmp_path / "plan.yaml"
    preset.write_text(printed.partition("As a preset:\n\n")[2].partition("\n\n")[0])
    assert jm.load_preset(preset).policy.sharding == "fsdp"
    assert f"tensorboard --logdir {tmp_path}" in printed
    assert len(list(tmp_path.glob("events.out.tfevents.*.plan"))) == 1


def test_a_pod_without_its_compiler_says_what_to_install(tmp_path: Path):
    """Compilers beside JAX cannot be hidden from it: there it is the name that is wrong."""
    beside = any(compiler_versions("tpu", sys.path).values())
    target, words = ("v5pp:4x4", "Did you mean `v5p`?") if beside else ("v5p:4x4x4", "pip install")
    command = [sys.executable, str(EXAMPLES / "plan_a_pod.py"), "--target", target]
    variables = ON_CPU | {"JAXMEM_TARGET_PATH": str(tmp_path)}
    answer = forked.run(command, capture_output=True, text=True, env=variables, check=False)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert words in answer.stderr
    assert "Traceback" not in answer.stderr


def test_every_example_is_described():
    described = (EXAMPLES / "README.md").read_text()
    for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")):
        assert f"({path.name})" in described, path.name
    for name in re.findall(r"`([\w.]+\.py)`|python examples/([\w.]+\.py)", described):
        assert (EXAMPLES / "".join(name)).exists(), name


def test_the_policy_changes_no_parameter(trained: tuple[dict[str, Any], Path]):
    """Twelve steps: parameters, running statistics and Adam's moments are those of the plain step."""
    arrays, apart = trained[0]["compared"]
    assert arrays >= 40
    assert apart <= 1e-6
