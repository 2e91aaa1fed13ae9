"""What others put around a message is taken off: a text or a log in pieces enters, the message's own words leave, line for line.

Terminals colour it; launchers, containers and clocks write something at the head of every line, so that a message of several
lines is broken up; a log in JSON holds its line breaks and quotes as escapes. The number of lines stays, since lines are told.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from jaxmem_callbacks.recovery.texts.heads import without_heads

_COLOUR = re.compile(r"\x1b\[[0-9;:?]{0,24}[A-Za-z]")
_BAR = re.compile(r"(?:(?<=\n)|\A)(?:[^\n\r]{0,200}\d%[^\n\r]{0,200}\r){1,200}(?!\r*\n)")
# `\n` of JSON and of Python's repr is white space that is no line of the log; `\"` and `\'` are quotes.
# Each run of backslashes is looked at once, from its beginning.
_BREAK = re.compile(r"(?<!\\)\\++[nrt]")
_QUOTE = re.compile(r"(?<!\\)\\++(?=[\"'])")
_DATE = r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(?:[.,]\d{1,9})?(?:Z|[+-]\d{2}:?\d{2})?:?"
_HEAD = re.compile(
    r"\n(?:[ \t]{0,40}(?:"
    r"\[(?:(?:rank|process|proc|worker|host|node)[ _-]?)?\d{1,6}\]:?[ \t]"  # torchrun and its like
    r"|\[\d{1,6},\d{1,6}\]<std(?:err|out)>:[ \t]?"  # Open MPI
    r"|\(\w[^()\n]{0,80}\bpid=\d{1,10}[^()\n]{0,120}\)[ \t]"  # Ray
    r"|(?:(?:rank|process|proc|worker|host|node)[_-]?)?\d{1,6}:[ \t]"  # srun --label, and launchers that name what they number
    r"|[\w.-]{1,60}[ \t]{1,20}\|[ \t]"  # docker compose
    rf"|{_DATE}[ \t](?:std(?:err|out)[ \t][FP][ \t])?"  # clocks; containerd
    r")|[ \t]{2,40}[|+][ \t]){1,4}"  # the margin of an exception group
)
_LONGEST_LINE = 2**16


def plain(text: str) -> str:
    """A text without what stands around its message; it has as many lines as before."""
    return "".join(without_heads(_lines(_without_known(text))))


def plain_pieces(pieces: Iterable[str]) -> Iterator[str]:
    """The same of a log in pieces, cut anywhere; what leaves is cut at line ends, but in a line of many thousand characters."""
    return without_heads(line for piece in _whole_lines(pieces) for line in _lines(_without_known(piece)))


def _whole_lines(pieces: Iterable[str]) -> Iterator[str]:
    rest = ""
    for piece in pieces:
        rest += piece
        end = rest.rfind("\n") + 1
        if not end and len(rest) > _LONGEST_LINE:
            end = len(rest)
        if end:
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest


def _lines(text: str) -> list[str]:
    """A text's lines with their ends; no other white space ends one."""
    lines = [f"{line}\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def _without_known(text: str) -> str:
    """A text without colours, escapes, what a progress bar overwrote, and the heads of known forms, which one line may show."""
    text = _COLOUR.sub("", text) if "\x1b" in text else text
    text = _BAR.sub("", text) if "\r" in text else text
    if "\\" in text:
        text = _QUOTE.sub("", _BREAK.sub("\v", text))
    return _HEAD.sub("\n", f"\n{text}")[1:]
