"""A terminal: how wide it is, and what may be written to it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Generator, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TextIO, cast

from jaxmem_callbacks.records.errors import printable
from jaxmem_callbacks.records.secrets import scrubbed, without_secrets

_WIDTH = 100  # where there is no console, as in a file or a notebook
_NARROWEST = 40


def console_width() -> int:
    """Letters in a line of the terminal that stdout is, or ``COLUMNS``; 100 where neither is there."""
    return max(shutil.get_terminal_size((_WIDTH, 0)).columns, _NARROWEST)


# JSON that has nothing invisible in it: letters that show, and no escape that can stand for one that does not.
_PLAIN_JSON = re.compile(r"(?:[\t\r\n\x20-\x5b\x5d-\x7e]++|\\[^bfru])*+", re.DOTALL)


def shown(text: str) -> str:
    """What may be printed of a text of the outside: no secrets, no control sequences."""
    return printable(without_secrets(text))


class OutputError(Exception):
    """What is printed cannot be written; the message has the reason."""


def read_json(text: str) -> Any:
    """JSON of the outside, each text in it, names too, as `printable` gives it.

    Raises:
        ValueError, RecursionError: as `json.loads`.
    """
    read = json.loads(text)
    return read if _PLAIN_JSON.fullmatch(text) else _printable_in(read)


def _printable_in(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_printable_in(each) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {printable(name): _printable_in(each) for name, each in cast("dict[str, Any]", value).items()}
    return value


_quiet: ContextVar[bool] = ContextVar("jaxmem_quiet", default=False)


@contextlib.contextmanager
def quietly(on: bool) -> Generator[None]:  # noqa: FBT001 - what was typed
    """Within it nothing is put on stdout but JSON, and nothing says how far the work is."""
    before = _quiet.set(on)
    try:
        yield
    finally:
        _quiet.reset(before)


def is_quiet() -> bool:
    """Whether only errors and JSON are wanted."""
    return _quiet.get()


def has_colour(stream: Any) -> bool:
    """Whether a stream shows colours: ``NO_COLOR`` forbids them, ``FORCE_COLOR`` wants them, else a terminal does."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (os.environ.get("TERM") != "dumb" and is_terminal(stream))


def put(text: str, stream: TextIO | None = None, *, as_json: bool = False, styles: Sequence[str] = ()) -> None:
    """Write a text to a terminal's stream, whatever its encoding holds.

    Args:
        text: Lines with their ends.
        stream: None for stdout.
        as_json: The text is one JSON value, which stays one.
        styles: For each line the numbers of its style (``1`` is bold), or an empty text; used where the stream shows colours.

    Raises:
        OutputError: the stream does not take it, such as a file on a full disk; never of stderr.
        BrokenPipeError: its reader went away.
    """
    if stream is None and is_quiet() and not as_json:
        return
    where = sys.stdout if stream is None else stream
    encoding = getattr(where, "encoding", None) or "utf-8"
    clean = _json_shown(text) if as_json else shown(text)
    if styles and has_colour(where):
        clean = _coloured(clean, styles)
    with _written(where):
        where.write(clean.encode(encoding, "backslashreplace").decode(encoding))


def _coloured(text: str, styles: Sequence[str]) -> str:
    """The text with its styles; as it is where cleaning took lines of it, such as those of a private key."""
    lines = text.removesuffix("\n").split("\n")
    if len(lines) != len(styles):
        return text
    coloured = [f"\x1b[{style}m{line}\x1b[0m" if style else line for line, style in zip(lines, styles, strict=True)]
    return "\n".join(coloured) + ("\n" if text.endswith("\n") else "")


def flush() -> None:
    """Have everything that was put written to stdout.

    Raises:
        OutputError: it cannot be.
    """
    with _written(sys.stdout):
        sys.stdout.flush()


@contextlib.contextmanager
def _written(where: TextIO) -> Generator[None]:
    """Around writing: what stdout does not take is an error of its own, since it is no fault of the work; stderr's is no news."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:  # a full disk, a stream that was closed
        if where is not sys.stderr:
            raise OutputError(getattr(error, "strerror", None) or str(error)) from error


def _json_shown(text: str) -> str:
    read = json.loads(text)
    clean = scrubbed(read)
    text = text if clean == read else json.dumps(clean, indent=2) + "\n"
    return printable(text.replace("\x7f", "\\u007f"))


LOGGER = "jaxmem_callbacks"


def log_line(level: int, message: str, *, printed: bool = False, **extra: object) -> None:
    """One line of the logger ``jaxmem_callbacks``, on stderr only where no handler shows it.

    A level that the user set of this logger is obeyed: what is below it is shown nowhere.

    Args:
        level: As in `logging`.
        message: One line.
        printed: Whether stderr has it already; then only handlers that write elsewhere get it.
        **extra: Attributes of the log's record.
    """
    logger, line = logging.getLogger(LOGGER), shown(" ".join(message.split()))
    takers = list(_takers(logger, level))
    if printed:
        record = logger.makeRecord(LOGGER, level, __file__, 0, "%s", (line,), None, extra=extra)
        for each in takers:
            if logger.filter(record) and not _is_on_stderr(each):
                each.handle(record)
    elif takers:
        logger.log(level, "%s", line, extra=extra)
    elif not logger.disabled and level >= logger.level:
        print_line(line)


def _takers(logger: logging.Logger, level: int) -> Iterator[logging.Handler]:
    """The handlers that take a record of a level."""
    here = logger if logger.isEnabledFor(level) else None
    while here is not None:
        for each in here.handlers:
            if level >= each.level and not isinstance(each, logging.NullHandler):
                yield each
        here = here.parent if here.propagate else None


def _is_on_stderr(handler: logging.Handler) -> bool:
    """Whether a handler, also absl's or rich's, writes where `print_line` does."""
    inner = getattr(handler, "python_handler", handler)
    stream = getattr(inner, "stream", None) or getattr(getattr(inner, "console", None), "file", None)
    return stream in (sys.stderr, sys.__stderr__)


def print_line(message: str) -> None:
    """One line of the library's own on stderr, which tears no progress bar; a closed stderr is no reason to disturb a run."""
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison] - None where it was closed before Python began
        return
    with _bars_aside():
        put(f"jaxmem: {' '.join(message.split())}\n", sys.stderr)


_ERASE = "\r\x1b[K"


@contextlib.contextmanager
def _bars_aside() -> Generator[None]:
    """Around a line: tqdm takes its bars away meanwhile, and of Keras' the line is erased, which its next batch draws again.

    rich stands in the place of stderr while it draws, and sees to it itself.
    """
    stream, tqdm = sys.stderr, getattr(sys.modules.get("tqdm"), "tqdm", None)
    if "keras" in sys.modules and is_terminal(sys.stdout) and is_terminal(stream):
        with contextlib.suppress(OSError, ValueError):
            stream.write(_ERASE)
    if tqdm is None:
        yield
    else:
        with tqdm.external_write_mode(file=stream):
            yield


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal."""
    try:
        return bool(stream.isatty())
    except (AttributeError, OSError, ValueError):  # closed, or no stream
        return False
