"""The examples as their users run them: a process of their own, a loss that falls, memory in TensorBoard, the same result as
without the policy.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
STEPS = {"nnx_transformer": 12, "linen_transformer": 12, "digits_batchnorm": 120, "sharded_transformer": 12}
ON_CPU = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}

# Trains twice in one process, with the example's presets and with none, and compares everything that training moves.
# Not for the transformers: the gradient of an attention key's bias is zero but for rounding, and Adam scales that up.
COMPARE = """
import sys
sys.path.insert(0, EXAMPLES)
import jax, numpy as np
import digits_batchnorm as example

def final(*presets):
    sys.argv = ["digits_batchnorm.py", "--steps", "12", "--logdir", f"{FOLDER}/{presets[-1]}", "--presets", *presets]
    state = example.main()
    moved = (state.params, state.batch_stats, state.opt_state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(moved)}

with_policy, without = final("donate", "full_remat"), final("monitor_only")
assert with_policy.keys() == without.keys()
worst = max(float(np.abs(with_policy[k] - without[k]).max() / max(np.abs(without[k]).max(), 1e-30)) for k in without)
print(f"{len(without)} arrays, apart by {worst:.1e}")
"""


def run_python(*arguments: str) -> str:
    """Run this interpreter as a user would; what it printed."""
    answer = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=ON_CPU, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.fixture(scope="module", params=sorted(STEPS))
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """One example, run: its name, what it printed, and its folder."""
    name: str = request.param
    logdir = tmp_path_factory.mktemp(name)
    printed = run_python(str(EXAMPLES / f"{name}.py"), "--steps", str(STEPS[name]), "--logdir", str(logdir))
    return name, printed, logdir


@pytest.mark.core
def test_the_loss_falls(ran: tuple[str, str, Path]):
    name, printed, _ = ran
    losses = [float(loss) for loss in re.findall(r"loss +([\d.]+)", printed)]
    assert losses[-1] < 0.8 * losses[0], printed
    assert f"step {STEPS[name] - 1:4d}" in printed


@pytest.mark.parametrize("ran", ["digits_batchnorm"], indirect=True)
def test_digits_are_recognised(ran: tuple[str, str, Path]):
    """By the running statistics of BatchNorm, on images that were not trained on."""
    accuracy = re.search(r"test accuracy ([\d.]+)", ran[1])
    assert accuracy, ran[1]
    assert float(accuracy[1]) > 0.95


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
    assert {"memory/live_arrays_gib", "memory/host_gib", "memory/program_gib/train_step", "train/loss"} <= scalars
    points = events.Scalars("memory/live_arrays_gib")
    assert all(point.value > 0 for point in points)
    assert points[-1].step == STEPS[name] - 1
    assert (logdir / "memory.jsonl").stat().st_size > 0


def test_examples_are_short_enough_to_copy():
    lengths = {name: len((EXAMPLES / f"{name}.py").read_text().splitlines()) for name in STEPS}
    assert max(lengths.values()) < 100, lengths


@pytest.mark.core
def test_the_policy_changes_no_parameter(tmp_path: Path):
    """Twelve steps: parameters, running statistics and Adam's moments are those of the plain step."""
    script = tmp_path / "compare.py"
    script.write_text(f"EXAMPLES, FOLDER = {str(EXAMPLES)!r}, {str(tmp_path)!r}\n{COMPARE}")
    printed = run_python(str(script))
    found = re.search(r"(\d+) arrays, apart by (\S+)", printed)
    assert found, printed
    assert int(found[1]) >= 40
    assert float(found[2]) <= 1e-6
