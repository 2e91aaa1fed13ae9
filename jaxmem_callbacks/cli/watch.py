"""``jaxmem watch RUN``: a run in a terminal while it goes on, wherever its folder is written from; lines without a terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import final

from jaxmem_callbacks.cli.exit_codes import OK
from jaxmem_callbacks.cli.typed import run_place, whole
from jaxmem_callbacks.readers.following import FollowedFolder, log_folders
from jaxmem_callbacks.readers.stores import RemoteRuns, is_address
from jaxmem_callbacks.records.errors import RunFileError
from jaxmem_callbacks.records.terminal import flush, put, shown
from jaxmem_callbacks.records.units import format_bytes

_SILENT_S = 60.0  # a window is seconds long, and a run that compiles writes nothing for some time
_EVENTS = 5
_CURVES = {
    "in_use_bytes": "in use",
    "live_array_bytes": "live arrays",
    "device_used_bytes": "whole card",
    "resident_bytes": "host",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "place",
        metavar="RUN",
        type=run_place,
        help="a monitor's logdir, or a folder of them, here or at an address such as gs://bucket/runs: the newest run",
    )
    parser.add_argument(
        "--every",
        type=whole("seconds"),
        metavar="S",
        help="seconds between two looks (1; 10 where stdout is no terminal, and at an address)",
    )


def run(args: argparse.Namespace) -> int:
    """Follow the newest run of a folder until it ends.

    Returns:
        0, at Ctrl-C too.

    Raises:
        RunFileError: no folder, or an address that cannot be read.
    """
    is_remote = is_address(args.place)
    if not is_remote and not Path(args.place).is_dir():
        msg = f"{args.place} is no folder. Expected the folder that a monitor writes to: jaxmem watch runs/a."
        raise RunFileError(msg)
    on_terminal = sys.stdout.isatty() and not args.quiet
    every_s = float(max(args.every or (1 if on_terminal and not is_remote else 10), 1))
    with tempfile.TemporaryDirectory(prefix="jaxmem-") if is_remote else contextlib.nullcontext("") as copied:
        watched = Watched(args.place, RemoteRuns(args.place, Path(copied)) if is_remote else None)
        try:
            if on_terminal:
                _draw(watched, every_s)
            else:
                _print(watched, every_s)
        except KeyboardInterrupt:
            if on_terminal:
                put("\n")
    return OK


@final
class Watched:
    """The newest run below a folder, as far as it was read.

    Args:
        place: The folder, or its address.
        remote: What copies the lines of that address; None for a folder.
    """

    def __init__(self, place: str, remote: RemoteRuns | None = None) -> None:
        self._place, self._remote = place, remote
        self._root = Path(place) if remote is None else remote.folder
        self._folder: FollowedFolder | None = None
        self._name, self._version = "", ""
        self._new_s = time.monotonic()
        self._events = 0
        self.ended = False

    def look(self) -> None:
        """Read what was written since the last look."""
        if self._remote is not None:
            self._remote.refresh()
        if self._folder is None:
            newest = next(iter(log_folders(self._root)), None)
            if newest is None:
                return
            self._folder = FollowedFolder(newest.path)
            self._name = str(newest.path) if self._remote is None else f"{self._place.rstrip('/')}/{newest.name}"
        self._folder.advance(0.5)
        while self._folder.share < 1:
            self._folder.advance(0.5)
        if self._folder.version != self._version:
            self._version, self._new_s = self._folder.version, time.monotonic()
        runs = self._folder.runs()
        self.ended = bool(runs) and runs[-1].ended

    def head(self) -> str:
        """The folder, the latest step, and how long nothing came."""
        runs = [] if self._folder is None else self._folder.runs()
        if not runs:
            return f"waiting for a run in {self._place}"
        step, silent_s = runs[-1].span.last_step, time.monotonic() - self._new_s
        words = f"{self._name}: " + ("no step yet" if step is None else f"step {step:,}")
        if self.ended:
            return f"{words}, ended"
        return (
            words if silent_s < _SILENT_S else f"{words}; no new line for {silent_s:.0f} s: killed, or still in a step?"
        )

    def figures(self) -> Iterator[tuple[str, int, int | None]]:
        """What a device holds, in words, its latest bytes, and its limit where one is known."""
        runs = [] if self._folder is None else self._folder.runs()
        curves = runs[-1].timeline.curves if runs else ()
        limits = {each.device: int(each.stretches[-1].high) for each in curves if each.figure == "limit_bytes"}
        for each in curves:
            if each.figure in _CURVES and each.stretches:
                limit = limits.get(each.device) if each.figure == "in_use_bytes" else None
                name = _CURVES[each.figure]
                words = name if each.device == "host" else f"{each.device} {name}"
                yield words, int(each.stretches[-1].high), limit

    def events(self) -> list[str]:
        """Every event so far, a line each."""
        from jaxmem_callbacks.writers.events import event_title

        runs = [] if self._folder is None else self._folder.runs()
        return [
            f"step {each.step}: {event_title(each.kind)} ({each.device}): {each.message}"
            for each in (runs[-1].events if runs else ())
        ]

    def new_events(self) -> list[str]:
        """Those since the last call."""
        found = self.events()
        new, self._events = found[self._events :], len(found)
        return new

    def last_words(self) -> str:
        """One sentence on the run, at its end."""
        from jaxmem_callbacks.writers.report import happened

        runs = [] if self._folder is None else self._folder.runs()
        return happened(runs[-1]) if runs else ""


def _print(watched: Watched, every_s: float) -> None:
    """A line at every look, and one for each event."""
    while True:
        watched.look()
        sizes = [
            f"{words} {format_bytes(size)}" + ("" if limit is None else f" of {format_bytes(limit)}")
            for words, size, limit in watched.figures()
        ]
        put("; ".join([watched.head(), *sizes]) + "\n")
        put("".join(f"  {each}\n" for each in watched.new_events()))
        if watched.ended:
            put(f"{watched.last_words()}\n")
            return
        flush()
        time.sleep(every_s)


def _draw(watched: Watched, every_s: float) -> None:
    """One picture that is drawn again at every look."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def picture() -> Group:
        table = Table.grid(padding=(0, 2))
        for words, size, limit in watched.figures():
            share = "" if limit is None else f"{size / limit:.1%} of {format_bytes(limit)}"
            bar = "" if limit is None else ProgressBar(total=limit, completed=min(size, limit), width=24)
            table.add_row(Text(shown(words)), Text(format_bytes(size), justify="right"), bar, Text(share))
        events = watched.events()
        told = [Text(shown(each), style="yellow", overflow="fold") for each in events[-_EVENTS:]]
        count = Text(f"{len(events)} event{'' if len(events) == 1 else 's'}", style="bold")
        return Group(Text(shown(watched.head()), style="bold"), table, count, *told)

    with Live(console=Console(), auto_refresh=False) as live:
        while not watched.ended:
            watched.look()
            live.update(picture(), refresh=True)
            if not watched.ended:
                time.sleep(every_s)
    put(f"{watched.last_words()}\n")
