"""`jaxmem watch`: a run that goes on, in a terminal and without one, until it ends or Ctrl-C comes."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import MemoryEvent
from tests.processes import until

SETTINGS = MonitorSettings(window_s=0.05, scan_s=0.05, tensorboard=False)
EVENT = MemoryEvent(
    kind="growth", step=1, time_s=0.0, device="gpu:0", message="It grows \x1b]0;title\x07.", action="Look."
)


def trained(folder, steps=3):
    """A closed run with one event."""
    with jm.MemoryMonitor(SETTINGS, logdir=folder) as monitor:
        for step in range(steps):
            monitor(step)
        monitor.tell(EVENT)


def watch(folder, **streams):
    command = [sys.executable, "-m", "jaxmem_callbacks.cli.main", "watch", str(folder), "--every", "1"]
    return subprocess.Popen(command, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams})


def test_a_run_that_has_ended_is_told_in_lines(tmp_path, capsys):
    trained(tmp_path / "a")
    assert main(["watch", str(tmp_path)]) == 0
    first, event, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path / 'a'}: step 2, ended; ")
    assert "host " in first
    assert event == "  step 1: Growth (gpu:0): It grows \\x1b]0;title\\x07."
    assert last.startswith("Steps 0 to 2 ran")


def test_a_place_without_a_folder_is_refused(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err


@pytest.mark.core
@pytest.mark.slow
def test_it_waits_for_the_run_follows_it_and_ends_with_it(tmp_path):
    lines: list[str] = []
    watching = watch(tmp_path)
    reader = threading.Thread(target=lambda: lines.extend(map(bytes.decode, watching.stdout)))
    reader.start()
    until(lambda: any("waiting for a run" in line for line in lines) or watching.poll() is not None)
    with jm.MemoryMonitor(SETTINGS, logdir=tmp_path / "a") as monitor:
        monitor(0)
        until(lambda: any(": step 0" in line for line in lines) or watching.poll() is not None)
        monitor(1)
    assert watching.wait(60) == 0
    reader.join()
    watching.stdout.close()
    watching.stderr.close()
    assert "Steps 0 to 1 ran" in lines[-1]


@pytest.mark.slow
@pytest.mark.parametrize("on_terminal", [True, False])
def test_ctrl_c_ends_it_cleanly(on_terminal, tmp_path):
    monitor = jm.MemoryMonitor(SETTINGS, logdir=tmp_path / "a")
    monitor(7)
    monitor.tell(EVENT)
    monitor.flush()
    ours, theirs = pty.openpty() if on_terminal else os.pipe()
    watching = watch(tmp_path, stdout=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"})
    os.close(theirs)
    seen = bytearray()

    def read():
        while b"It grows" not in seen:
            seen.extend(os.read(ours, 65536))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(60)
    watching.send_signal(signal.SIGINT)
    assert watching.wait(60) == 0
    assert watching.stderr.read() == b""
    watching.stderr.close()
    os.close(ours)
    monitor.close()
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", bytes(seen))
    assert b"step 7" in text
    assert b"\x1b]0" not in text


def test_a_silent_run_is_called_so(tmp_path, monkeypatch, capsys):
    monitor = jm.MemoryMonitor(SETTINGS, logdir=tmp_path / "a")
    monitor(7)
    monitor.flush()
    monkeypatch.setattr("jaxmem_callbacks.cli.watch._SILENT_S", 0.0)
    stop = threading.Event()

    def end(_seconds):
        if not stop.is_set():
            stop.set()
            return
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", end)
    assert main(["watch", str(tmp_path)]) == 0
    monkeypatch.undo()
    monitor.close()
    assert "no new line for 0 s: killed, or still in a step?" in capsys.readouterr().out
