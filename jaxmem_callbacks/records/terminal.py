"""A terminal: how wide it is, and what may be written to it."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Generator
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


def put(text: str, stream: TextIO | None = None, *, as_json: bool = False) -> None:
    """Write a text to a terminal's stream, whatever its encoding holds.

    Args:
        text: Lines with their ends.
        stream: None for stdout.
        as_json: The text is one JSON value, which stays one.

    Raises:
        OutputError: the stream does not take it, such as a file on a full disk; never of stderr.
        BrokenPipeError: its reader went away.
    """
    where = sys.stdout if stream is None else stream
    encoding = getattr(where, "encoding", None) or "utf-8"
    clean = _json_shown(text) if as_json else shown(text)
    with _written(where):
        where.write(clean.encode(encoding, "backslashreplace").decode(encoding))


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


def print_line(message: str) -> None:
    """One line of the library's own on stderr; a closed stderr is no reason to disturb a run."""
    if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison] - None where it was closed before Python began
        put(f"jaxmem: {' '.join(message.split())}\n", sys.stderr)
