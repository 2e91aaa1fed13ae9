"""The pytest plugin in real pytest processes: baselines written, held, missed and refused, for this and for absent hardware."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from tests.processes import EMITTED_QUICKLY
from tests.target_step import needs_compiler

pytest_plugins = ["pytester"]

STEP = """
import jax, jax.numpy as jnp
import pytest
import jaxmem_callbacks as jm


def loss_fn(params, batch):
    hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, params)
    return (hidden**2).mean()


def train_step(params, batch):
    loss, grads = jm.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def step(remat="full"):
    return jm.jit_step(train_step, jm.StepPolicy(remat=remat))


def shapes(rows=2048):
    return jax.ShapeDtypeStruct((8, 64, 64), jnp.float32), jax.ShapeDtypeStruct((rows, 64), jnp.float32)
"""
TESTS = """
def test_same(assert_step_memory):
    assert assert_step_memory(step(), *shapes()).step_bytes > 0

def test_grown(assert_step_memory):
    assert_step_memory(step(REMAT), *shapes())

def test_allowed(assert_step_memory):
    assert_step_memory(step(REMAT), *shapes(), max_regress="900%")

def test_batch(assert_step_memory):
    assert_step_memory(step(), *shapes(rows=ROWS))

class TestOfAClass:
    @pytest.mark.parametrize("way", ["a/b", "a_b"])
    def test_many(self, assert_step_memory, way):
        assert_step_memory(step(), *shapes(rows=8), max_regress="0%")

def test_twice(assert_step_memory):
    for name in ("x.json", "x.json"):
        assert_step_memory(step(), *shapes(rows=8), baseline=f"own/{name}")
"""
BEFORE = "REMAT, ROWS = 'full', 2048\n" + TESTS
AFTER = f"""
REMAT, ROWS = 'none', 8
{TESTS}
def test_new(assert_step_memory):
    assert_step_memory(step(), *shapes(rows=8))
"""
THERE = """
def test_there(assert_step_memory):
    assert_step_memory(step(REMAT), *shapes(rows=8192), target=TARGET)

def test_elsewhere(assert_step_memory):
    assert_step_memory(step(), *shapes(rows=8192), target=ELSEWHERE)
"""


@pytest.fixture
def users(pytester, monkeypatch):
    """A user's project: writes its test file anew and runs it in a process of its own."""
    installed = importlib.metadata.entry_points(group="pytest11", name="jaxmem")
    plugin = () if installed else ("-p", "jaxmem_callbacks.integrations.pytest")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", EMITTED_QUICKLY["XLA_FLAGS"])

    def run(tests, *arguments):
        pytester.makepyfile(test_memory=STEP + tests)
        return pytester.runpytest_subprocess(*plugin, "-p", "no:cacheprovider", *arguments)

    return run


def baseline(pytester, name):
    return json.loads((pytester.path / "memory_baselines" / "test_memory" / f"{name}.json").read_text())["account"]


def test_a_baseline_is_written_held_and_missed(users, pytester):
    written = users(BEFORE, "--jaxmem-update")
    written.assert_outcomes(passed=6, failed=1)
    written.stdout.fnmatch_lines(
        "assert_step_memory was called twice with the baseline x.json. Expected one file a step:*"
    )
    written.stdout.fnmatch_lines("jaxmem: wrote memory_baselines/test_memory/test_same.json")
    files = sorted(path.name for path in (pytester.path / "memory_baselines" / "test_memory").iterdir())
    assert sum(name.startswith("TestOfAClass.test_many_a_b-") for name in files) == 2, "one for each parameter"
    assert (pytester.path / "own" / "x.json").exists()
    account = baseline(pytester, "test_same")
    assert account["hardware"] == "the attached cpu"
    assert account["batch"] == {"batch": "float32[2048,64]"}
    assert account["shown"]["peak: parameters"] == 8 * 64 * 64 * 4

    held = users(AFTER)
    held.assert_outcomes(passed=4, failed=4)  # same, allowed, both of the class; grown, batch, twice, new
    held.stdout.fnmatch_lines(
        [
            "Bytes of train_step on one device of the attached cpu, by its compiler",
            "  one step * MiB * +* MiB  +*%  too much",
            "  temporaries * +* MiB *",
            "  peak: saved activations * +* MiB *",
            "! policy: full -> none.",
            "Grew more than 2%: one step by * MiB (+*%).",
            "The baseline is memory_baselines/test_memory/test_grown.json. If that is meant, write the baseline again*",
            "These cannot be compared: the batches differ: batch: float32?2048,64? -> float32?8,64?. Expected the same batch*",
            "If that is meant, write the baseline again and commit it: pytest --jaxmem-update 'test_memory.py::test_batch'",
            "There is no baseline */test_new.json. Write it and commit it: pytest --jaxmem-update 'test_memory.py::test_new'",
        ]
    )
    assert "Traceback" not in held.stdout.str()


@pytest.mark.targets
def test_absent_hardware_is_a_gate_too(users, pytester):
    needs_compiler("h100_sxm")
    users("REMAT, TARGET, ELSEWHERE = 'full', 'h100_sxm', 'h100_sxm'\n" + THERE, "--jaxmem-update").assert_outcomes(
        passed=2
    )
    account = baseline(pytester, "test_there")
    assert account["hardware"] == "h100_sxm"
    assert any("cuda" in name for name in account["conditions"]), "the compiler's own version"
    after = users("REMAT, TARGET, ELSEWHERE = 'none', 'h100_sxm', 'cpu'\n" + THERE)
    after.assert_outcomes(failed=2)
    after.stdout.fnmatch_lines(
        [
            "Bytes of train_step on one device of h100_sxm, by its compiler",
            "Grew more than 2%: one step by *",
            "These cannot be compared: one is for h100_sxm, the other for the attached cpu. Expected the same hardware*",
        ]
    )
