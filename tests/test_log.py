"""What a run prints: events as lines of logging, the two lines at its end, and bars that no line tears."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import threading
import time
from dataclasses import replace

import jax
import pytest
import tqdm
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import Progress

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import MemoryEvent, Reading
from jaxmem_callbacks.records.terminal import LOGGER, log_line, print_line
from jaxmem_callbacks.records.units import GIB
from jaxmem_callbacks.writers.log import LogWriter
from tests.processes import until

EVENT = MemoryEvent(kind="growth", step=7, time_s=0.0, device="gpu:0", message="It grows.", action="Look at a.py:3.")
LINE = "Growth at step 7 (gpu:0): It grows. What to do: Look at a.py:3."


def plain_logging(monkeypatch):
    """As in a script that never set logging up. Within a test: before one, pytest gives every logger a handler of its own."""
    monkeypatch.setattr(logging.getLogger(LOGGER), "propagate", False)


@contextlib.contextmanager
def handler(name: str, level: int = logging.NOTSET):
    """A handler of a logger; what it was given."""
    found: list[logging.LogRecord] = []
    kept = logging.Handler(level)
    kept.emit = found.append
    logging.getLogger(name).addHandler(kept)
    try:
        yield found
    finally:
        logging.getLogger(name).removeHandler(kept)


def stderr_of(capfd) -> list[str]:
    return capfd.readouterr().err.splitlines()


# Where a line goes


def test_an_event_is_one_line_on_stderr_where_no_handler_shows_it(capfd, monkeypatch):
    plain_logging(monkeypatch)
    LogWriter().write(EVENT)
    assert stderr_of(capfd) == [f"jaxmem: {LINE}"]


@pytest.mark.parametrize("name", ["", LOGGER])
def test_a_handler_of_the_user_gets_the_event_and_stderr_nothing(name, capfd):
    with handler(name) as found:
        LogWriter().write(EVENT)
    (record,) = found
    assert (record.name, record.levelno, record.getMessage()) == (LOGGER, logging.WARNING, LINE)
    assert record.memory_event is EVENT
    assert stderr_of(capfd) == []


def test_a_failure_whose_report_was_printed_is_on_stderr_once(capfd, monkeypatch):
    plain_logging(monkeypatch)
    failure = replace(EVENT, kind="out_of_memory")
    LogWriter().write(failure)
    for each in (logging.StreamHandler(), RichHandler(console=Console(stderr=True))):
        monkeypatch.setattr(logging.getLogger(LOGGER), "handlers", [each])
        LogWriter().write(failure)
    with handler(LOGGER) as found:
        LogWriter().write(failure)
    (record,) = found
    assert record.memory_event is failure
    assert record.getMessage().startswith(f"Out of memory at step {EVENT.step} ")
    assert stderr_of(capfd) == []


def test_a_handler_that_would_not_show_it_is_none(capfd, monkeypatch):
    plain_logging(monkeypatch)
    with handler(LOGGER, logging.ERROR) as found:
        LogWriter().write(EVENT)
    logging.getLogger(LOGGER).addHandler(null := logging.NullHandler())
    LogWriter().write(EVENT)
    logging.getLogger(LOGGER).removeHandler(null)
    assert found == []
    assert len(stderr_of(capfd)) == 2


def test_a_level_of_the_logger_is_obeyed(capfd, monkeypatch):
    plain_logging(monkeypatch)
    monkeypatch.setattr(logging.getLogger(LOGGER), "level", logging.ERROR)
    logging.getLogger(LOGGER).manager._clear_cache()
    LogWriter().write(EVENT)
    assert stderr_of(capfd) == []
    log_line(logging.ERROR, "seen")
    assert stderr_of(capfd) == ["jaxmem: seen"]
    monkeypatch.undo()
    logging.getLogger(LOGGER).manager._clear_cache()


# The run's end


def reading(step, **sizes):
    return Reading(source="allocator", device="gpu:0", step=step, time_s=0.0, **sizes)


def test_the_end_is_two_lines_of_peak_events_and_place(capfd, tmp_path, monkeypatch):
    plain_logging(monkeypatch)
    writer = LogWriter(tmp_path, limit_bytes=8 * GIB)
    writer.write(reading(1, in_use_bytes=GIB, peak_bytes_since_start=2 * GIB, limit_bytes=16 * GIB))
    writer.write(EVENT)
    writer.write(reading(2, in_use_bytes=GIB, peak_bytes_since_start=4 * GIB, limit_bytes=16 * GIB))
    writer.close()
    _, peak, place = stderr_of(capfd)
    assert peak == (
        "jaxmem: the run ended: the allocator held 4.0 GiB at most since the process began, 50.0% of the limit of "
        "8.0 GiB, on gpu:0; 1 event: Growth 1."
    )
    assert place == f"jaxmem: the run ended: all of it is in {tmp_path}; `jaxmem report {tmp_path}` shows it."


def test_without_steps_there_is_no_end_and_another_process_has_none(capfd):
    LogWriter().close()
    other = LogWriter(ends=False)
    other.write(reading(1, in_use_bytes=1))
    other.close()
    assert stderr_of(capfd) == []


def ends_of(capfd):
    """The last lines; a monitor among thousands of arrays of other tests may also say that it looks less often."""
    return [line for line in stderr_of(capfd) if "the run ended" in line]


@pytest.mark.core
def test_a_run_ends_with_what_its_arrays_held(capfd, tmp_path, monkeypatch):
    plain_logging(monkeypatch)
    held = jax.numpy.zeros(1024)
    with jm.MemoryMonitor(logdir=tmp_path / "a") as monitor:
        monitor(0)
        monitor.flush()
    peak, place = ends_of(capfd)
    assert "held " in peak
    assert peak.endswith("0 events.")
    assert str(tmp_path / "a") in place
    del held


def test_a_run_without_a_folder_names_the_argument(capfd, monkeypatch):
    plain_logging(monkeypatch)
    with jm.MemoryMonitor() as monitor:
        monitor(0)
        monitor.flush()
    assert "jm.MemoryMonitor(logdir='runs/a')" in ends_of(capfd)[-1]


# on_event


def told(**options):
    """A monitor with one event of somebody else's."""
    monitor = jm.MemoryMonitor(MonitorSettings(), **options)
    monitor(0)
    monitor.tell(EVENT)
    return monitor


@pytest.mark.core
def test_a_callable_gets_each_event_once_on_the_monitors_thread():
    seen = []
    with told(on_event=lambda event: seen.append((event, threading.current_thread().name))) as monitor:
        until(lambda: seen)
        monitor.flush()
    assert seen == [(EVENT, "jaxmem-monitor")]


def test_a_callable_that_raises_is_reported_once_and_switched_off(capfd):
    calls = []

    def broken(event):
        calls.append(event)
        raise ValueError("no such channel")  # noqa: EM101, TRY003 - a user's own words

    with told(on_event=broken) as monitor:
        monitor.flush()
        monitor.tell(EVENT)
        monitor.flush()
        assert monitor.events == (EVENT, EVENT)
    own = [line for line in stderr_of(capfd) if "on_event" in line]
    assert own == ["jaxmem: on_event is switched off for the rest of the run: ValueError: no such channel"]
    assert calls == [EVENT]


def test_what_is_no_callable_is_refused():
    with pytest.raises(TypeError, match="on_event"):
        jm.MemoryMonitor(on_event="growth")


# Bars


class Terminal(io.StringIO):
    """A stream that looks like a terminal."""

    def isatty(self) -> bool:
        return True


def screen(written: str) -> list[str]:
    """The lines that a terminal shows of what was written: carriage returns, and lines that are erased."""
    lines, column = [""], 0
    at = 0
    while at < len(written):
        if written.startswith("\x1b[K", at):
            lines[-1], at = lines[-1][:column], at + 3
            continue
        letter = written[at]
        at += 1
        if letter == "\n":
            lines.append("")
            column = 0
        elif letter in "\r\b":
            column = 0 if letter == "\r" else max(column - 1, 0)
        else:
            lines[-1] = lines[-1][:column].ljust(column) + letter + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def test_no_line_tears_tqdms_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with tqdm.tqdm(total=4, file=terminal, mininterval=0, ascii=True, ncols=60) as bar:
        bar.update(1)
        print_line("a line")
        bar.update(1)
    shown = [line for line in screen(terminal.getvalue()) if line]
    assert shown[0] == "jaxmem: a line"
    assert len(shown) == 2
    assert "2/4" in shown[1]


def test_no_line_tears_richs_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    console = Console(file=terminal, force_terminal=True, width=80)
    with Progress(console=console, auto_refresh=False) as bar:  # it stands in the place of stderr meanwhile
        task = bar.add_task("train", total=4)
        bar.update(task, advance=1, refresh=True)
        print_line("a line")
        bar.update(task, advance=1, refresh=True)
    text = re.sub(r"\x1b\[(?!K|2K)[0-9;?]*[A-Za-z]", "", terminal.getvalue()).replace("\x1b[2K", "\r\x1b[K")
    shown = [line for line in screen(text) if line]
    assert shown[0] == "jaxmem: a line"
    assert "2/4" in shown[1] or "50%" in shown[1]


def test_no_line_tears_keras_bar(monkeypatch):
    """Keras writes its bar on stdout without an end of the line, and over it at the next batch."""
    monkeypatch.setitem(sys.modules, "keras", sys.modules[__name__])
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    first, second = "1/4 ====.... 0s 5ms/step", "2/4 ======.. 0s 5ms/step"
    terminal.write(first)
    print_line("a line")
    terminal.write("\b" * len(first) + "\r" + second)
    assert screen(terminal.getvalue()) == ["jaxmem: a line", second]


def test_lines_of_several_threads_stay_whole(capfd, monkeypatch):
    plain_logging(monkeypatch)
    threads = [threading.Thread(target=log_line, args=(logging.WARNING, f"line {n} " + "x" * 200)) for n in range(20)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    time.sleep(0)
    assert sorted(line.split()[2] for line in stderr_of(capfd)) == sorted(map(str, range(20)))
