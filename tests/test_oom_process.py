"""Real failures under a limited address space, each in a process of its own: exit code, stderr, evidence, secrets, remedies."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import jax
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.targets.compilers import target_folders
from jaxmem_callbacks.programs.targets.worker import worker_environment
from jaxmem_callbacks.records.errors import CompileError
from tests import forked
from tests.processes import EMITTED_QUICKLY, UNOPTIMISED
from tests.target_step import needs_compiler

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "oom_script.py"
SECRETS = {
    "HF_TOKEN": "hf_QwErTyUiOpAsDfGhJkLzXcVbNm123456",
    "GITHUB_PAT": "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "DATABASE_URL": "postgres://trainer:hunter2horse@db.example.org/runs",
    "JAX_COORDINATOR_PASSWORD": "correct-horse-battery",
    "XLA_FLAGS": "--xla_dump_to=/data/hf_SecretInAPath99/x --xla_cpu_multi_thread_eigen=true",
    "JAX_COMPILATION_CACHE_DIR": "gs://bucket?sig=s3cr3tS1gnature",
    "TF_GPU_ALLOCATOR": "sk-proj-aBcDeFgHiJkLmNoPqRsT",
}
IN_TEXT = (
    "api_key=tiger-in-the-text",
    "https://user:passw0rdInUrl@example.org/x?token=zebra123",
    "--auth-token",
    "lion-on-argv",
)
PLANTED = (
    *("hf_QwErTy", "ghp_abcdef", "AKIAIOSF", "hunter2horse", "correct-horse", "SecretInAPath99", "s3cr3tS1gnature"),
    *("sk-proj", "tiger-in", "passw0rdInUrl", "zebra123", "lion-on"),
)


def run(around, outdir, what, *more, seconds=0, **variables):
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    environment = kept | UNOPTIMISED | EMITTED_QUICKLY | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | variables
    command = [sys.executable, str(SCRIPT), around, str(outdir), str(seconds), what, *more]
    return forked.run(command, env=environment, capture_output=True, text=True, check=False, cwd=outdir.parent)


def only_folder(outdir):
    (folder,) = outdir.glob("oom-*")
    return folder


def facts(folder):
    return json.loads((folder / "facts.json").read_text())


def without_own_line(stderr):
    lines = stderr.splitlines()
    own = [line for line in lines if line.startswith("jaxmem: ")]
    return own, [line for line in lines if line not in own]


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """The step's failure with time for planning, as a process, and its folder."""
    outdir = tmp_path_factory.mktemp("explained") / "reports"
    done = run("guard", outdir, "step", seconds=90)
    return done, only_folder(outdir)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The same failure with nothing around it."""
    return run("nothing", tmp_path_factory.mktemp("plain") / "reports", "step")


def test_exit_code_and_stderr_are_those_of_a_run_without_the_guard(explained, plain):
    done, folder = explained
    own, rest = without_own_line(done.stderr)
    assert done.returncode == plain.returncode == 1
    assert rest == plain.stderr.splitlines()
    assert rest[-1].startswith("jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating ") or any(
        "RESOURCE_EXHAUSTED" in line for line in rest
    )
    sentence, waits, best, place = own
    assert sentence == f"jaxmem: out of memory: {facts(folder)['sentence']}"
    assert waits == "jaxmem: compiling what may make it fit, for 90 s at most"
    first = facts(folder)["remedies"][0]
    assert best.startswith(f"jaxmem: try first (compiled): {first['what'].rstrip('.')}, which saves ")
    assert best.endswith(first["lines"][0].strip())
    assert place == f"jaxmem: out of memory, explained in {folder}/report.md"


def test_the_first_remedy_applied_needs_the_bytes_that_were_predicted(explained):
    told = facts(explained[1])
    first = told["remedies"][0]
    assert first["compiled"]
    assert first["enough"]
    assert first["saves_bytes"] >= told["lacking_bytes"] > 0
    world = {"jm": jm, "train_step": script()["train_step"]}
    exec("\n".join(first["lines"]), world)  # noqa: S102 - what the report tells users to paste
    state, batch = jax.eval_shape(script()["new_state"]), jax.eval_shape(lambda: script()["rows"](2**15))
    before = jm.step_memory(jm.jit_step(world["train_step"]), state, batch).step_bytes
    after = jm.step_memory(world["step"], state, batch).step_bytes
    assert after == pytest.approx(first["needs_bytes"], rel=0.05)
    assert before - after == pytest.approx(first["saves_bytes"], rel=0.05)


def script():
    """The functions of the script, without running what it does."""
    world: dict = {}
    text = SCRIPT.read_text().replace("sys.argv[1:5]", '("", "", "", "")').partition("\nstep = ")[0]
    exec(compile(text, str(SCRIPT), "exec"), world)  # noqa: S102 - our own
    return world


def test_every_prediction_names_its_compile_or_says_that_there_was_none(explained):
    told = facts(explained[1])
    assert re.match(r"\d+ compiles for cpu \(1 device\) in \d+ s, by worker processes", told["planning"])
    kinds = {remedy["what"].partition(":")[0] for remedy in told["remedies"] if remedy["compiled"]}
    assert {"Stronger remat", "Half the batch"} <= kinds
    for remedy in told["remedies"]:
        assert bool(remedy["lines"]) != ("?" in remedy["what"]), "what has no line to paste is a question"
        if remedy["compiled"]:
            assert re.match(r"compiled for cpu: .* in place of ", remedy["basis"])
        else:
            assert remedy["saves_bytes"] is None or remedy["basis"].startswith("counted")
    groups = {group["name"]: group["bytes"] for group in told["program"]["peak"]["groups"]}
    assert groups["saved activations"] > 0.5 * told["program"]["peak"]["bytes"]
    assert told["failures"] == []


def test_an_internal_error_is_told_by_evidence(tmp_path):
    done = run("guard", tmp_path / "reports", "library")
    assert "INTERNAL: YNNPACK operation failed" in done.stderr
    told = facts(only_folder(tmp_path / "reports"))
    assert told["facts"]["requested_bytes"] is None
    assert told["program"]["name"] == "jit_in_a_library"
    assert re.search(
        r"text is only 'INTERNAL: YNNPACK .*takes 1\.0 GiB besides its arguments.*left of the address space",
        told["evidence"],
    )


def test_no_secret_is_written(tmp_path):
    done = run("guard", tmp_path / "reports", "text", *IN_TEXT, **SECRETS)
    assert done.returncode == 1
    folder = only_folder(tmp_path / "reports")
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(texts) == {"report.md", "report.html", "facts.json"}
    assert [(name, secret) for name, text in texts.items() for secret in PLANTED if secret in text] == []
    shown = facts(folder)["environment"]
    assert shown["XLA_FLAGS"] == "--xla_dump_to=(not shown) --xla_cpu_multi_thread_eigen=true"
    assert shown["JAX_PLATFORMS"] == "cpu"
    assert shown["JAX_COORDINATOR_PASSWORD"].startswith("set; ")
    assert "HF_TOKEN" not in shown
    assert "[hidden]" in facts(folder)["error_text"]
    assert facts(folder)["devices"] == {}, "no backend was started, by the report neither"
    own, _ = without_own_line(done.stderr)
    assert not [secret for secret in PLANTED if secret in own[0]]


def test_it_works_with_nothing_left(tmp_path):
    done = run("guard", tmp_path / "reports", "nothing left", seconds=30)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "MemoryError"
    told = facts(only_folder(tmp_path / "reports"))
    assert told["error_type"] == "MemoryError"
    assert told["failures"] == []
    assert told["limits"][0]["name"] == "address space (RLIMIT_AS)"


def test_a_monitor_that_nobody_closed_reports_at_the_end(plain, tmp_path):
    done = run("unclosed", tmp_path / "reports", "step")
    own, rest = without_own_line(done.stderr)
    assert done.returncode == plain.returncode == 1
    assert rest == plain.stderr.splitlines()
    folder = only_folder(tmp_path / "reports" / "run-oom")
    assert f"jaxmem: out of memory, explained in {folder}/report.md" in own
    assert facts(folder)["program"]["name"] == "train_step"
    assert facts(folder)["step"] == 1


ON_A_TPU = """
import json, sys
sys.path.extend(json.loads(sys.argv[1]))
import jax, jax.numpy as jnp
import jaxmem_callbacks as jm
from jax.experimental import topologies
one = {"topology_name": "v5e:1x1", "chips_per_host_bounds": [1, 1, 1]}
(device,) = topologies.get_topology_desc(platform="tpu", **one).devices
x = jax.ShapeDtypeStruct((2**17, 2**16), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
with jm.oom_guard(outdir=sys.argv[2]):
    jax.jit(lambda x: jnp.sort(jnp.cumsum(x, axis=1) @ x.T, axis=0)).lower(x).compile()
"""


@pytest.mark.targets
def test_a_compile_that_does_not_fit_into_a_tpu(tmp_path):
    needs_compiler("v5e:1x1")
    variables = worker_environment("v5litepod-4")
    command = [sys.executable, "-c", ON_A_TPU, json.dumps(target_folders()), str(tmp_path / "reports")]
    done = forked.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RESOURCE_EXHAUSTED" in done.stderr
    told = facts(only_folder(tmp_path / "reports"))
    assert (told["facts"]["phase"], told["facts"]["platform"], told["cause"]) == ("compile", "tpu", "capacity")
    assert told["facts"]["limit_bytes"] == pytest.approx(15.75 * 2**30, rel=0.01)
    assert told["lacking_bytes"] > 2**30


@pytest.mark.targets
def test_a_refused_compile_for_another_device_is_an_answer(tmp_path):
    needs_compiler("v5e:1x1")
    wide = jax.ShapeDtypeStruct((2**17, 2**16), "float32")
    with pytest.raises(CompileError, match="does not fit"), jm.oom_guard(outdir=tmp_path / "reports"):
        jm.step_memory(jax.jit(lambda x: (x @ x.T).sum()), wide, target="v5e:1x1")
    assert not (tmp_path / "reports").exists()


def test_planning_ends_at_its_deadline(tmp_path):
    began = time.monotonic()
    done = run("guard", tmp_path / "reports", "step", seconds=0.3)  # no process has started and compiled by then
    took = time.monotonic() - began
    assert done.returncode == 1
    told = facts(only_folder(tmp_path / "reports"))
    assert told["planning"].startswith("Nothing was compiled: the time for planning was over; give jm.oom_guard more ")
    assert not any(remedy["compiled"] for remedy in told["remedies"])
    assert took < 10, "with the start of Python and of JAX, which takes three"
