"""Files that the library writes: whole or as before, their owner's alone, never through a link; text with odd characters."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.readers.traces import read_trace
from jaxmem_callbacks.records.files import append_to, replacing, write_file
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.simulator.cases import CASES
from jaxmem_callbacks.writers.jsonl import JsonlWriter, write_trace
from tests.pages import Page
from tests.sample_runs import write_run

FAST = MonitorSettings(window_s=0.01, scan_s=0.01)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_there_whole_or_as_it_was(tmp_path):
    path = tmp_path / "report.html"
    write_file(path, "first \ud800", private=True)
    assert path.read_text("utf-8") == "first \\ud800"
    assert mode(path) == 0o600
    with pytest.raises(TypeError, match="bytes-like"), replacing(path) as file:
        file.writelines([b"second", "no bytes"])
    assert path.read_text("utf-8").startswith("first")
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("write", [write_file, lambda path, text: os.close(append_to(path)) or text])
def test_nothing_is_written_through_a_link(write, tmp_path):
    (tmp_path / "theirs").write_text("kept")
    for name, leads_to in (("link", "theirs"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(tmp_path / leads_to)
        with pytest.raises(
            OSError, match="symbolic link, and nothing is written through one; remove it, or name the file"
        ):
            write(tmp_path / name, "new")
    with pytest.raises(IsADirectoryError):
        write(tmp_path, "new")
    assert (tmp_path / "theirs").read_text() == "kept"
    assert not (tmp_path / "nowhere").exists()


def test_a_whole_file_takes_the_place_of_no_pipe_and_lines_go_into_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a device or a pipe, expected a file"):
        write_file(tmp_path / "pipe", "new")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)
    number = append_to(tmp_path / "pipe")
    os.write(number, b"a line")
    assert os.read(reader, 100) == b"a line"
    for each in (number, reader):
        os.close(each)


def test_a_link_that_comes_in_between_is_not_followed(tmp_path):
    """As between the look and the writing: the name is replaced, what it leads to is not touched."""
    (tmp_path / "theirs").write_text("kept")
    with replacing(tmp_path / "plan.json") as file:
        file.write(b"{}")
        (tmp_path / "plan.json").symlink_to(tmp_path / "theirs")
    assert (tmp_path / "theirs").read_text() == "kept"
    assert (tmp_path / "plan.json").read_text() == "{}"
    assert not (tmp_path / "plan.json").is_symlink()


def test_a_run_and_its_report_are_their_owners_alone(tmp_path):
    with jm.MemoryMonitor(FAST, logdir=tmp_path / "run") as monitor:
        monitor(0, {"loss": 1.0})
        monitor.flush()
    assert main(["report", str(tmp_path / "run")]) == 0
    assert mode(tmp_path / "run" / "memory.jsonl") == 0o600
    assert mode(tmp_path / "run" / "report.html") == 0o600


def test_reports_of_memory_that_ran_out_are_their_owners_alone(tmp_path):
    error = MemoryError("RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes.")
    with pytest.raises(MemoryError), jm.oom_guard(outdir=tmp_path / "oom", plan_seconds=0):
        raise error
    (folder,) = (tmp_path / "oom").iterdir()
    assert mode(tmp_path / "oom") == mode(folder) == 0o700
    assert {mode(each) for each in folder.iterdir()} == {0o600}
    assert len(list(folder.iterdir())) == 3


def test_a_run_does_not_write_through_a_link_and_goes_on(tmp_path, capfd):
    (tmp_path / "theirs").write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "memory.jsonl").symlink_to(tmp_path / "theirs")
    with jm.MemoryMonitor(FAST, logdir=tmp_path / "run") as monitor:
        monitor(0, {"loss": 1.0})
        monitor.flush()
    assert (tmp_path / "theirs").read_text() == "kept"
    assert "JSONL in" in (said := capfd.readouterr().err)
    assert "symbolic link" in said
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))


def test_a_report_is_not_written_through_a_link(tmp_path, capsys):
    write_run(tmp_path / "run")
    (tmp_path / "theirs").write_text("kept")
    (tmp_path / "run" / "report.html").symlink_to(tmp_path / "theirs")
    assert main(["report", str(tmp_path / "run")]) == 2
    assert "report.html cannot be written: it is a symbolic link" in capsys.readouterr().err
    assert (tmp_path / "theirs").read_text() == "kept"


@pytest.mark.parametrize("option", ["--save=link.json", "--figure=link.png"])
def test_a_plan_is_refused_a_link_before_anything_is_compiled(option, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('ran')\n")
    (tmp_path / "theirs").write_text("kept")
    (tmp_path / option.partition("=")[2]).symlink_to("theirs")
    assert main(["plan", "train.py", option]) == 2
    assert "expected a file that can be written: it is a symbolic link" in capsys.readouterr().err


def test_a_trace_and_a_figure_are_not_written_through_a_link(tmp_path, capsys):
    trace = CASES[next(iter(CASES))]()
    (tmp_path / "theirs").write_text("kept")
    (tmp_path / "trace.jsonl").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="symbolic link"):
        write_trace(trace, tmp_path / "trace.jsonl")
    (tmp_path / "blocks.png").symlink_to(tmp_path / "theirs")
    arguments = [next(iter(CASES)), "--device-memory", "80GiB", "--figure", str(tmp_path / "blocks.png")]
    assert main(["simulate", *arguments]) == 2
    assert "symbolic link" in capsys.readouterr().err
    write_trace(trace, tmp_path / "other.jsonl")
    assert read_trace(tmp_path / "other.jsonl") == trace
    assert mode(tmp_path / "other.jsonl") == 0o600
    assert (tmp_path / "theirs").read_text() == "kept"


ODD = {
    "half of a pair": "loss \ud800",
    "no text": "\x00",
    "a control sequence": "\x1b[2J\x1b]0;title\x07",
    "turned around": "abc\u202edef",
    "lines": "a\nb\r\nc",
    "bytes that are no UTF-8": b"caf\xe9".decode("utf-8", "surrogateescape"),
    "long": "x" * 100_000,
    "markup": "<script>alert(1)</script>\"'&|\\](javascript:x)",
    "a path": "a/b/../../../etc/passwd",
    "empty": "",
}


@pytest.mark.core
def test_no_name_switches_a_writer_off_and_the_report_shows_each(tmp_path, capfd):
    run, seen = tmp_path / "run", []
    with jm.MemoryMonitor(FAST, logdir=run, writer=lambda step, scalars: seen.append(dict(scalars))) as monitor:
        for step in range(5):
            monitor(step, {name: float(number) for number, name in enumerate(ODD.values())})
            monitor.flush()
    assert "switched off" not in capfd.readouterr().err
    names = {name for scalars in seen for name in scalars}
    assert {f"train/{name}" for name in ("loss \\ud800", "\\x00", "caf\\udce9", "abc\\u202edef")} <= names
    assert len({name for name in names if name.startswith("train/")}) == len(ODD)
    (events,) = run.glob("events.out.tfevents.*")
    assert b"train/loss \\ud800" in events.read_bytes()
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text("utf-8")
    assert "<script>alert" not in page
    assert "\x1b" not in page


def test_a_report_that_cannot_be_made_leaves_the_old_one(tmp_path, capsys):
    """A line of an older version, with half of a pair in every text."""
    write_run(tmp_path / "run", text="half \ud800")
    (tmp_path / "run" / "report.html").write_text("old")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "half \\ud800" in Page(tmp_path / "run" / "report.html").text
    capsys.readouterr()
    (tmp_path / "run" / "report.html").write_text("old")
    (tmp_path / "run" / "memory.jsonl").write_text("no line\n{}\n")
    assert main(["report", str(tmp_path / "run")]) == 2
    assert (tmp_path / "run" / "report.html").read_text("utf-8") == "old"


def test_a_writer_of_lines_continues_its_own_file(tmp_path):
    for _ in range(2):
        JsonlWriter(tmp_path / "memory.jsonl", "one").close()
    assert len((tmp_path / "memory.jsonl").read_text().splitlines()) == 4


def test_a_name_that_is_no_text_of_its_terminal_is_printed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxmem_callbacks.cli.main", "report", b"caf\xe9 \xff\x1b[2J"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert b"\x1b" not in done.stderr
    assert b"caf\\udce9 \\udcff\\x1b[2J does not exist" in done.stderr
