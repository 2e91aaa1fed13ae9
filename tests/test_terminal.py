"""What commands print of files: no character that moves a cursor, sets a title or turns words around, from any kind of file."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.records.errors import printable
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.terminal import put, read_json
from jaxmem_callbacks.simulator.cases import CASES
from jaxmem_callbacks.writers.jsonl import write_trace
from jaxmem_callbacks.writers.log import LogWriter
from tests import sample_plans
from tests.sample_runs import write_run

ATTACK = "\x1b]0;title\x07\x1b[2J\x1b]52;c;eA==\x07\x9b2J\u202eevil\u2066\x08\x7f\r\u2028\U000e0041"
OWN_WORDS = {"kind", "run", "source", "cause", "form", "known_by", "remat", "own_checkpoints", "sharding", "donate"}
SOURCES = Path(jm.__file__).parent


def unsafe(text: str) -> list[str]:
    """Characters that a terminal or a reader's eye obeys."""
    return [
        each for each in text if each not in "\n\t" and unicodedata.category(each) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    ]


def planted(value: object, key: str = "") -> object:
    """JSON with the attack at the end of each text that is not one of the form's own words."""
    if isinstance(value, str):
        return value if key in OWN_WORDS else value + ATTACK
    if isinstance(value, dict):
        return {name: planted(each, name) for name, each in value.items()}
    return [planted(each, key) for each in value] if isinstance(value, list) else value


def test_the_attack_is_one():
    assert len(unsafe(ATTACK)) == 13
    assert unsafe(printable(ATTACK)) == []
    assert printable("plain\ttext\n") == "plain\ttext\n"
    assert printable(f"a{ATTACK}").startswith(r"a\x1b]0;title\x07\x1b[2J")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A folder with one hostile file of each kind."""
    root = tmp_path_factory.mktemp("hostile")
    (root / "train.log").write_text(
        f"{ATTACK}E: XlaRuntimeError: RESOURCE_EXHAUSTED: Error loading program 'jit_f{ATTACK}': Attempting to reserve 13.50G at "
        f"the bottom of memory. That was not possible. There are 7.48G free, 0B reserved, and 7.48G reservable.{ATTACK}\n"
    )
    (root / "pool.log").write_text(
        f"Allocator (GPU_0_bfc{ATTACK}) ran out of memory trying to allocate 3.72GiB (rounded to 4000000000)requested by op "
        f"{ATTACK}\nRESOURCE_EXHAUSTED: Out of memory while trying to allocate 4000000000 bytes{ATTACK}.\n"
    )
    write_run(root / "run", text=ATTACK)
    write_run(root / "other", text=ATTACK, temp=1)
    plan = json.loads(jm.Plan(sample_plans.six(notes=("a note",), process_flags={"flag": "value"})).to_json())
    (root / "plan.json").write_text(json.dumps(planted(plan)))
    (root / "broken.json").write_text(json.dumps(planted({**plan, "target": [ATTACK], "chosen": ATTACK})))
    write_trace(CASES[next(iter(CASES))](), root / "trace.jsonl")
    lines = [json.loads(line) for line in (root / "trace.jsonl").read_text().splitlines()]
    (root / "trace.jsonl").write_text("\n".join(json.dumps(planted(line)) for line in lines))
    (root / "preset.yaml").write_text(f'name: "x{json.dumps(ATTACK)[1:-1]}"\npolicy:\n  rematt: full\n')
    return root


COMMANDS = {
    "oom": ["oom", "train.log"],
    "oom of a pool": ["oom", "pool.log"],
    "oom as JSON": ["oom", "train.log", "--json"],
    "oom of nothing": ["oom", f"none{ATTACK[:10]}.log"],
    "report": ["report", "run"],
    "compare runs": ["compare", "run", "other"],
    "compare as JSON": ["compare", "run", "other", "--json"],
    "compare plans": ["compare", "plan.json", "plan.json"],
    "compare a broken plan": ["compare", "broken.json", "plan.json"],
    "simulate": ["simulate", "trace.jsonl", "--device-memory", "80GiB"],
    "simulate as JSON": ["simulate", "trace.jsonl", "--device-memory", "80GiB", "--json"],
    "presets": ["presets", "preset.yaml"],
    "presets check": ["presets", "--check", "preset.yaml"],
    "plan's places": ["plan", "none.py", "--save", f"{ATTACK[:10]}.json"],
    "an unknown command": [f"oom{ATTACK}"],
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_no_command_prints_a_control_sequence_of_a_file(arguments, hostile, capsys, monkeypatch):
    monkeypatch.chdir(hostile)
    with contextlib.suppress(SystemExit):
        main(arguments)
    streams = capsys.readouterr()
    assert streams.out + streams.err
    assert unsafe(streams.out + streams.err) == []


@pytest.mark.slow
def test_doctor_prints_none_of_the_environment(capsys, monkeypatch):
    for name in (
        "XLA_PYTHON_CLIENT_ALLOCATOR",
        "XLA_FLAGS",
        "JAX_PLATFORMS",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "PJRT_NAMES_AND_LIBRARY_PATHS",
    ):
        monkeypatch.setenv(name, f"--{name.lower()}={ATTACK}")
    assert main(["doctor"]) == 1
    streams = capsys.readouterr()
    assert unsafe(streams.out + streams.err) == []


def test_no_event_moves_the_console(capfd, monkeypatch):
    monkeypatch.setattr(logging.getLogger("jaxmem_callbacks"), "propagate", False)
    LogWriter().write(
        MemoryEvent(kind="near_oom", step=1, time_s=0.0, device="cpu:0", message=f"full {ATTACK}", action="x")
    )
    said = capfd.readouterr().err
    assert "full \\x1b]0;title" in said
    assert unsafe(said) == []


def test_a_markdown_report_can_be_shown_on_a_terminal(tmp_path):
    error = MemoryError(f"RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes. {ATTACK}")
    with pytest.raises(MemoryError), jm.oom_guard(outdir=tmp_path, plan_seconds=0):
        raise error
    for path in tmp_path.rglob("report.*"):
        assert unsafe(path.read_text("utf-8")) == []


def test_what_an_encoding_cannot_hold_is_written_out():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    put("caf\u00e9 \ud800\n", stream)
    stream.flush()
    assert stream.buffer.getvalue() == b"caf\\xe9 \\ud800\n"


def test_commands_print_through_one_door():
    """A second way to a terminal would pass the escaping by; progress bars and the interpreter's own streams are none."""
    direct = re.compile(r"(?<![\w.])(?<!def )print\(|sys\.std(?:out|err)\.write\(")
    found = [
        f"{path.relative_to(SOURCES)}: {line.strip()}"
        for path in SOURCES.rglob("*.py")
        for line in path.read_text("utf-8").splitlines()
        if direct.search(re.sub(r"\"[^\"]*\"|'[^']*'", "", line)) and not line.lstrip().startswith(("#", "print(jm."))
    ]
    assert found == []


WITHOUT_JAX = {
    "doctor": ["doctor"],
    "presets": ["presets"],
    "a preset": ["presets", "donate"],
    "oom": ["oom", "train.log"],
    "oom as JSON": ["oom", "train.log", "--json"],
    "report": ["report", "run", "-o", "page.html"],
    "compare": ["compare", "run", "run"],
    "simulate": ["simulate", "trace.jsonl", "--device-memory", "80GiB"],
    "targets": ["targets"],
    "help": ["--help"],
    "a command's help": ["plan", "--help"],
    "version": ["--version"],
    "nothing": [],
}
STREAMS = {
    "full": (">/dev/full", 2),
    "closed": (">&-", 2),
    "both closed": (">&- 2>&-", 2),
    "stderr closed": ("2>&-", None),
}


@pytest.mark.parametrize("buffering", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("command", WITHOUT_JAX)
def test_a_stream_that_takes_nothing_is_one_line_and_an_exit_code(command, streams, buffering, hostile):
    redirected, code = STREAMS[streams]
    typed = shlex.join([sys.executable, "-m", "jaxmem_callbacks", *WITHOUT_JAX[command]])
    done = subprocess.run(
        ["/bin/sh", "-c", f"{typed} {redirected}"],
        cwd=hostile,
        env={**os.environ, "PYTHONUNBUFFERED": buffering, "PYTHONPATH": str(SOURCES.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    if code is None:
        assert done.returncode in (0, 1)
        assert done.stdout
        return
    assert done.returncode == code
    said = done.stderr.splitlines()
    if "2>" in redirected:
        assert said == []
    else:
        assert len(said) == 1
        assert re.search(r"stdout.*(No space left on device|is closed).*\?", said[0])


TRAIN = """
import jax, jax.numpy as jnp
import jaxmem_callbacks as jm

def train_step(w, x):
    loss, grad = jm.value_and_grad(lambda w, x: ((x @ w) ** 2).mean())(w, x)
    return w - grad, loss

if __name__ == "__main__":
    jm.jit_step(train_step)(jnp.ones((8, 8)), jnp.ones((4, 8)))
"""


@pytest.mark.parametrize(("command", "saved"), [("plan", ["--save", "plan.json"]), ("inspect", [])])
def test_what_was_to_be_saved_is_saved_where_stdout_is_full(command, saved, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "jaxmem_callbacks", command, "train.py", *saved],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SOURCES.parent)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "could not be written to stdout: No space left on device" in done.stderr
    if saved:
        assert jm.load_plan(tmp_path / "plan.json").candidates


def test_a_text_of_a_plans_file_moves_no_console(hostile):
    plan = jm.load_plan(hostile / "plan.json")
    texts = [str(plan), repr(plan), plan._repr_html_(), str(plan.peak), str(plan.policy), *plan.record.notes]
    assert "\\x1b]0;title" in str(plan)
    assert all("\\x1b]0;title" in note for note in plan.record.notes)
    assert [unsafe(text) for text in texts] == [[]] * len(texts)


@pytest.mark.parametrize("raw", [False, True], ids=["escaped", "raw"])
def test_json_of_the_outside_has_no_text_that_moves_a_console(raw):
    def texts(value):
        if isinstance(value, dict):
            return [*value, *(text for each in value.values() for text in texts(each))]
        return [text for each in value for text in texts(each)] if isinstance(value, list) else [value]

    given = {f"name{ATTACK}": [ATTACK, {"inner": f"tab\t{ATTACK}"}], "plain \\u path": 'C:\\users "quoted" \\x1b'}
    text = json.dumps(given, ensure_ascii=not raw)
    read = read_json(text)
    assert not any(unsafe(each) for each in texts(read))
    assert read["plain \\u path"] == given["plain \\u path"]
    assert read_json(json.dumps({"a": [1, 2.5, None, True, "caf\u00e9"]})) == {"a": [1, 2.5, None, True, "caf\u00e9"]}


@pytest.mark.parametrize("name", ["plan.json", "broken.json", "trace.jsonl", "preset.yaml"])
def test_an_error_that_quotes_a_file_moves_no_console(name, hostile):
    said: list[str] = []
    for read in (jm.load_plan, jm.load_preset, lambda path: jm.simulate_allocator(path, "gpu_growth")):
        try:
            read(hostile / name)
        except jm.JaxmemError as error:
            said.append(str(error))
    assert said
    assert not any(map(unsafe, said))
