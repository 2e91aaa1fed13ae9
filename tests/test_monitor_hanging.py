"""A writer that hangs holds up nobody; forks wait for looks; a folder that goes is told. In this process, and quick."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.callbacks import background
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.writers.protocol import Record, Writer
from tests.processes import until
from tests.watching import told

FAST = MonitorSettings(window_s=0.01, scan_s=0.01)


class Hanging(Writer):
    """Does not come back until it is let go."""

    def __init__(self) -> None:
        self.entered, self.go, self.left = threading.Event(), threading.Event(), False

    def write(self, record: Record) -> None:
        del record
        self.entered.set()
        self.go.wait(200)
        self.left = True


@pytest.mark.core
def test_flush_sample_and_close_return_and_say_what_hangs(monkeypatch: pytest.MonkeyPatch, capfd):
    monkeypatch.setattr(background, "PATIENCE_S", 0.3)
    monkeypatch.setattr(background, "SHORT_S", 0.1)
    writer = Hanging()
    monitor = jm.MemoryMonitor(FAST, writer=writer)
    monitor(0)
    assert writer.entered.wait(60)
    monitor.flush()
    monitor.sample(1)
    monitor.close()
    assert not writer.left, "nobody waited for it"
    (line,) = told(capfd)
    assert line == "jaxmem: writer 1 (Hanging) hangs and is left behind: what it did not take is not written."
    writer.go.set()


def test_the_last_action_runs_wherever_the_thread_stands(monkeypatch: pytest.MonkeyPatch):
    """The thread takes a millisecond a line, and is stopped at each of them."""
    monkeypatch.setattr(background, "PATIENCE_S", 0.3)

    class Looked:
        def look(self) -> None:
            """Nothing: the thread is at its own lines."""

    def slowly(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != background.__file__:
            return None  # at once: what a collection of garbage runs on this thread may be thousands of calls
        if event == "line":
            time.sleep(0.001)
        return slowly

    own = background.Ticker._run

    def traced(ticking: background.Ticker) -> None:
        sys.settrace(slowly)  # from here on: Python 3.11 may never leave the frame of a thread that starts to be traced
        own(ticking)

    monkeypatch.setattr(background.Ticker, "_run", traced)
    looked, ran = Looked(), []
    for each in range(60):
        ticking = background.Ticker(0.0, weakref.WeakMethod(looked.look))
        ticking.start()
        time.sleep(0.0005 * each)
        assert ticking.stop(partial(ran.append, each)), each
    assert ran == list(range(60))


def test_the_training_thread_goes_on_between_two_parts_of_a_look():
    """The interpreter is told to interrupt nobody, so that a thread goes on only where another lets it."""
    faults = background.Faults("warn")

    class Looked:
        def __init__(self) -> None:
            self.ended = threading.Event()

        def look(self) -> None:
            for _ in range(40):
                faults.attempt("a part", self.work, default=None)
            self.ended.set()

        def work(self) -> None:
            end_s = time.perf_counter() + 0.002
            while time.perf_counter() < end_s:
                pass

    looked, turns, usual_s = Looked(), 0, sys.getswitchinterval()
    ticking = background.Ticker(60.0, weakref.WeakMethod(looked.look))
    sys.setswitchinterval(30)
    try:
        ticking.start()
        while not looked.ended.is_set():
            time.sleep(0.0005)
            turns += 1
    finally:
        sys.setswitchinterval(usual_s)
    assert ticking.stop(lambda: None)
    assert turns > 10, turns


def test_one_that_still_computes_is_waited_for(monkeypatch: pytest.MonkeyPatch, capfd):
    """A busy machine makes the last look long, which is no reason to lose it. For ever is not waited either."""
    monkeypatch.setattr(background, "PATIENCE_S", 0.2)
    monkeypatch.setattr(background, "_MOST", 12)  # here too the machine may be busy

    class Working(Writer):
        def __init__(self, work_s: float) -> None:
            self.work_s, self.done = work_s, False

        def write(self, record: Record) -> None:
            del record
            end_s = time.thread_time() + self.work_s
            while not self.done and time.thread_time() < end_s:
                sum(range(1_000))
            self.done = True

    slow, endless = Working(0.45), Working(60)
    done = []
    try:
        for writer in (slow, endless):
            monitor = jm.MemoryMonitor(FAST, writer=writer)
            monitor(0)
            monitor.close()
            done.append(writer.done)
    finally:
        endless.done = True  # else it computes on, next to the tests that follow
    assert done == [True, False]
    lines = told(capfd)
    assert len(lines) == 1, lines
    line = lines[0]
    assert line.startswith("jaxmem: writer 1 (Working) hangs and is left behind")


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_waits_for_the_look_that_runs():
    class Slow(Writer):
        busy = False

        def write(self, record: Record) -> None:
            del record
            self.busy = True
            time.sleep(0.004)
            self.busy = False

    def leave() -> None:
        os._exit(int(writer.busy))

    writer = Slow()
    with jm.MemoryMonitor(FAST, writer=writer) as monitor:
        for step in range(8):
            monitor(step)
            child = multiprocessing.get_context("fork").Process(target=leave)
            child.start()
            child.join()
            assert child.exitcode == 0, "the child began in the middle of a look"
            time.sleep(0.007)


def test_a_folder_that_is_removed_is_told(tmp_path: Path, capfd):
    with jm.MemoryMonitor(FAST, logdir=tmp_path / "run") as monitor:
        monitor(0)
        monitor.flush()
        shutil.rmtree(tmp_path / "run")
        monitor(1)
        monitor.flush()
    (line,) = told(capfd)
    assert "FileNotFoundError: the folder was removed or replaced while the run went on" in line


def test_a_monitor_that_nobody_holds_is_closed():
    double = jm.CollectingWriter()
    monitor = jm.MemoryMonitor(FAST, writer=double)
    monitor(0)
    monitor.flush()
    del monitor
    until(lambda: double.closed)
    assert "jaxmem-monitor" not in [thread.name for thread in threading.enumerate() if not thread.is_alive()]
