"""The project's own tools can fail: environments without an interpreter, mutants that survive, a GPU check asked on CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.processes import OPTIMISED

ROOT = Path(__file__).resolve().parent.parent


def tool(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


environments = tool("environments")
mutants = tool("mutants")
gpu_predictions = tool("gpu_predictions")
gpu_check = tool("gpu_check")


# environments


def alone(*arguments: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """tools/environments.py where no interpreter but the running one can be found."""
    variables = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, str(ROOT / "tools" / "environments.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=60, check=False)


def test_the_running_interpreter_is_found():
    minor, path = environments.probe(sys.executable)
    assert minor == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert Path(path).exists()


def test_what_does_not_run_is_no_interpreter(tmp_path):
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\necho 'python3.12: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    assert environments.probe(str(shim)) is None
    assert environments.probe(str(tmp_path / "absent")) is None


def test_a_line_without_interpreter_is_said_to_be_unproved(tmp_path):
    answer = alone("other", "project", "true", tmp_path=tmp_path)
    assert answer.returncode == 0
    other = "0.12 (Python 3.12 or 3.13)" if sys.version_info < (3, 12) else "0.10 (Python 3.11)"
    assert f"JAX line {other}: not proved, no such interpreter found" in answer.stdout


def test_an_unknown_part_is_refused(tmp_path):
    answer = alone("run", "projct", "true", tmp_path=tmp_path)
    assert answer.returncode == 1
    assert (
        "Unknown part 'projct'. Expected some of: project, demo, test, docs, targets, compared, adapters, lint."
        in answer.stderr
    )


def test_without_a_python_the_message_says_what_to_install(tmp_path):
    code = "import environments as e; e.OLDEST = e.NEWEST = (3, 99); e.default_interpreter()"
    variables = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": str(ROOT / "tools")}
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=60, check=False)
    assert "No usable Python found" in answer.stderr
    assert "apt-get install python3 python3-venv" in answer.stderr


def test_what_a_command_installs_itself_has_an_environment_of_its_own(monkeypatch):
    called = []
    monkeypatch.setattr(environments, "run_in", lambda *arguments: called.append(arguments) or 0)
    assert environments.main(["apart", "project,test", "true"]) == 0
    ((folder, minor, _, parts, command),) = called
    assert (folder.name, parts, command) == (f".venv-{minor}-apart", ["project", "test"], ["true"])


def test_the_newest_of_everything_has_no_upper_bound(monkeypatch):
    ran = []
    monkeypatch.setattr(environments, "interpreters", lambda: {"3.12": sys.executable})
    monkeypatch.setattr(environments, "environment", lambda *_: Path(sys.executable))
    monkeypatch.setattr(environments, "run_quietly", ran.append)
    monkeypatch.setattr(environments, "call", lambda folder, command: ran.append([folder.name, *command]) or 7)
    assert environments.main(["newest", "project,test", "pytest"]) == 7
    installed, called = ran
    assert {"--upgrade", "--pre", "jax>=0.10.2", "jaxlib>=0.10.2", "pytest>=8.3"} <= set(installed)
    assert not any("<" in each for each in installed)
    assert called == [".venv-3.12-newest", "pytest"]


def test_a_fresh_stamp_installs_nothing_and_a_failed_install_leaves_none(tmp_path, capsys):
    stamp = tmp_path / ".installed-test"
    wanted = environments.hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    stamp.write_text(wanted)
    environments.install(tmp_path, Path("/bin/false"), "test")
    assert stamp.exists()

    stamp.write_text("of another pyproject.toml")
    with pytest.raises(environments.SetupError, match="failed with exit code 1: /bin/false -m pip install"):
        environments.install(tmp_path, Path("/bin/false"), "test")
    assert not stamp.exists()
    assert "installing test: FAILED" in capsys.readouterr().out


# mutants


def mutant(**changes: object) -> object:
    entry = {"promise": 1, "file": "toy.py", "line": "return a + b", "tests": ("test_toy.py",), "why": "sums are wrong"}
    return mutants.Mutant(**{**entry, **changes})


def test_a_line_is_deleted_inverted_or_replaced_by_pass():
    text = "def add(a, b):\n    return a + b\n"
    assert mutants.mutate(text, mutant(replacement="return a - b")) == ("def add(a, b):\n    return a - b\n", 2)
    assert mutants.mutate(text, mutant()) == ("def add(a, b):\n    pass\n", 2)
    assert mutants.mutate("x = 1\n" + text, mutant(line="x = 1")) == (text, 1)


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("x = 1\n", {}, "found 0 lines that read `return a \\+ b`"),
        ("return a + b\nreturn a + b\n", {}, "found 2 lines"),
        ("return a + b\n", {"replacement": "return a + b"}, "is the line itself"),
        ("x = (\n    return_a,\n", {"line": "return_a,", "replacement": "("}, "the file is not Python"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(text, changes, message):
    with pytest.raises(mutants.TableError, match=message):
        mutants.mutate(text, mutant(**changes))


def test_a_table_entry_needs_its_keys(tmp_path):
    table = tmp_path / "table.toml"
    table.write_text('[[mutant]]\npromise = 1\ntests = ["a.py"]\n')
    with pytest.raises(mutants.TableError, match=r"Entry 1 of table.toml: .*Expected promise, file, line, tests, why"):
        mutants.read_table(table)
    table.write_text('[[mutant]]\npromise = 7\nfile = "a"\nline = "b"\nwhy = "c"\ntests = ["a.py"]\n')
    with pytest.raises(mutants.TableError, match="promise 7, expected one of"):
        mutants.read_table(table)


def test_dead_surviving_and_untested_mutants_are_told_apart(tmp_path):
    (tmp_path / "toy.py").write_text("def add(a, b):\n    unused = a\n    return a + b\n")
    (tmp_path / "test_toy.py").write_text("import toy\n\ndef test_add():\n    assert toy.add(2, 1) == 3\n")
    trees = queue.SimpleQueue()
    trees.put(tmp_path)

    dead, line = mutants.try_mutant(mutant(replacement="return a - b"), trees)
    assert dead
    assert "test_toy.py::test_add" in line

    dead, line = mutants.try_mutant(mutant(line="unused = a"), trees)
    assert not dead
    assert line.startswith("SURVIVED")

    dead, line = mutants.try_mutant(mutant(tests=("test_absent.py",)), trees)
    assert not dead
    assert line.startswith("NO PROOF")
    assert "return a + b" in (tmp_path / "toy.py").read_text()


def test_every_promise_has_its_mutants_and_every_line_is_there():
    table = mutants.read_table(mutants.TABLE)
    assert mutants.too_few(table) == []
    assert mutants.too_few(table[:0])[0] == "promise 1 has 0 mutants, it needs 4"
    for entry in table:
        mutants.mutate((ROOT / entry.file).read_text(), entry)
        for test in entry.tests:
            path, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text(), test


# the GPU check


def test_the_gpu_check_answers_every_question_on_cpu(tmp_path):
    out = tmp_path / "answers.json"
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--preflight", "--out", str(out)]
    variables = os.environ | OPTIMISED  # a step that takes long would be timed
    answer = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=240, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    report = json.loads(out.read_text())
    asked = gpu_check.HEADLINES.keys() - {"plan_full", *gpu_check.PRESETS[1:]}
    assert {entry["question"]: entry["state"] for entry in report["results"]} == dict.fromkeys(asked, "answered")
    answers = {entry["question"]: entry["answer"] for entry in report["results"]}
    # What is known of the CPU: it keeps no statistics, and an OOM takes the donated inputs with it.
    assert answers["statistics"]["after_a_program"] is None
    assert answers["out_of_memory"]["temporaries"]["donated_inputs_deleted"] == {"a": True, "b": True}
    assert answers["out_of_memory"]["outputs"]["run_error"]["text"].startswith("RESOURCE_EXHAUSTED: Out of memory")
    assert answers["prediction_plain"]["peak_over_need"] is None
    # A worker process compiles the same for the CPU; nothing was measured, and nothing claims to be.
    rows = {row["question"]: row for row in report["predictions"]}
    assert rows.keys() == {"plan_none", "plan_keep", *gpu_check.LEVERS}
    plain = rows["plan_none"]
    assert plain["nearest_target"] == "cpu"
    assert plain["attached_bytes"] == plain["without_the_device_bytes"] > rows["plan_keep"]["attached_bytes"]
    levers = {name: rows[name]["policy"] for name in gpu_check.LEVERS}
    assert levers["plan_chunks"] == {"chunks": 16}
    assert levers["plan_option"]["compiler_options"]["xla_cpu_scheduler_type"] == "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    assert levers["plan_state"] == {"state_offload": "optimizer"}
    for row in rows.values():
        assert row["attached_bytes"] > 0
        assert answers[row["question"]]["seen"]["loss_is_finite"]
        assert row["measured_peak_unknown"] == "the allocator reports no peak"
        unknown = ("measured_peak_bytes", "attached_difference", "without_the_device_difference")
        assert [row[name] for name in (*unknown, "measured_recompute_share", "modelled_recompute_share")] == [None] * 5
    assert "peak unknown, because the allocator reports no peak; the plan here" in answer.stdout
    assert answers["fragmentation"]["holes"]["share"] is None
    growth = answers["gpu_growth"]
    assert growth["set"] | growth["already"] == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    assert (growth["refused"], [check["outcome"] for check in growth["checks"]]) == (None, ["unknown"])
    assert growth["fill_1_mib_us"] > 0
    assert "1 of 1 runs as expected" in answer.stdout
    for case in gpu_check.CASES:
        assert answers[case]["compared"] is None
        assert answers[case]["requests_run"] == 200
    assert "200 requests ran; not compared, because the allocator reports nothing here" in answer.stdout
    assert answers["hook"]["watched_5_ms"]["steps"] == 60
    assert all(way == {"error": None, "another_buffer": True} for way in answers["moved_together"]["copies"].values())
    assert answers["moved_together"]["small_between_large_holes"]["values_intact"] is True
    assert "a CPU has no pool" in answer.stdout
    assert report["presence"]["jax"] in answer.stdout


def gpu_answer(step_bytes, peak, step_s, *, modelled=None, before=0):
    """What a `plan_...` question answers on a GPU."""
    return {
        "policy": {"remat": "full", "keep": 0.5},
        "nearest_target": "h100_sxm",
        "predicted": {
            "attached": {"step_bytes": step_bytes, "modelled_s": None},
            "without_the_device": {"step_bytes": round(0.9 * step_bytes), "modelled_s": modelled},
        },
        "seen": {"peak_bytes": peak, "peak_before_bytes": before, "step_s": step_s},
    }


def test_what_was_predicted_is_compared_with_what_a_gpu_saw():
    entries = {
        "plan_none": gpu_answer(1000, 1010, 0.1, modelled=0.08),
        "plan_full": gpu_answer(500, 500, 0.13, modelled=0.1),
        "plan_keep": gpu_answer(600, 700, 0.11, modelled=0.09, before=700),
    }
    entries["plan_full"]["predicted"]["without_the_device"] = {"error": "TargetError: no compiler\nnext line"}
    none, full, keep = gpu_predictions.predictions([{"question": name, "answer": a} for name, a in entries.items()])
    assert (none["attached_difference"], none["without_the_device_difference"]) == (-0.0099, -0.10891)
    assert (full["attached_difference"], full["without_the_device_difference"]) == (0.0, None)
    assert full["measured_recompute_share"] == 0.3
    assert full["modelled_recompute_share"] is None
    assert keep["measured_peak_unknown"] == "the peak is before the step"
    assert (keep["measured_recompute_share"], keep["modelled_recompute_share"]) == (0.1, 0.125)
    told = "time against the plain step, measured and modelled: +10.0% and +12.5%"
    assert gpu_predictions.prediction_line(keep).endswith(told)
    line = gpu_predictions.prediction_line(none)
    assert "the plan here 1,000 B (-1.0%); without it (h100_sxm) 900 B (-10.9%, beyond the goal of 2%)" in line
    assert "without the device unknown, because TargetError: no compiler; peak 500 B" in gpu_predictions.of_plan(
        entries["plan_full"]
    )
    assert gpu_predictions.predictions([{"question": "plan_none", "answer": None}]) == []
    # A device of a kind that has no target, and known peaks.
    for name, modelled in (("plan_none", 0.04), ("plan_full", 0.06)):
        entries[name]["predicted"] = {"attached": {"step_bytes": 1, "modelled_s": modelled}}
    _, here, _ = gpu_predictions.predictions([{"question": name, "answer": a} for name, a in entries.items()])
    assert (here["modelled_for"], here["modelled_recompute_share"]) == ("attached", 0.5)


def test_a_question_that_crashes_or_hangs_is_an_answer(monkeypatch, tmp_path):
    crash, hang = tmp_path / "crash.py", tmp_path / "hang.py"
    crash.write_text("import os, sys\nprint('last words', file=sys.stderr, flush=True)\nos.abort()\n")
    hang.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(gpu_check, "QUESTIONS", crash)
    crashed = gpu_check.ask("statistics", "vmm", 30, preflight=True)
    assert (crashed["state"], crashed["exit_code"], crashed["answer"]) == ("crashed", -6, None)
    assert "last words" in crashed["stderr_end"]
    assert crashed["environment"] == {"XLA_PYTHON_CLIENT_ALLOCATOR": "vmm"}
    monkeypatch.setattr(gpu_check, "QUESTIONS", hang)
    assert gpu_check.ask("statistics", "default", 1, preflight=True)["state"] == "timed out"


def test_without_a_gpu_the_check_says_so(tmp_path):
    if gpu_check.has_gpu():
        pytest.skip("this machine has a GPU")
    variables = dict(os.environ, PATH=str(tmp_path))
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py")]
    answer = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=60, check=False)
    assert answer.returncode == 0
    assert answer.stdout.startswith("No NVIDIA GPU was found here")
