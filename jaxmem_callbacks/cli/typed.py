"""Types of options for argparse: places and numbers, with words of what was expected."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from jaxmem_callbacks.readers.stores import is_address


def place(text: str) -> Path:
    """A path; see `named`."""
    return Path(named(text))


def run_place(text: str) -> str:
    """A path or an address such as ``gs://bucket/runs/a``, whose slashes a path would lose; see `named`."""
    text = named(text)
    return text if is_address(text) else str(Path(text))


def named(text: str) -> str:
    """A path or a name. An empty one would mean the folder that one is in, and comes of a variable that is not set.

    Raises:
        argparse.ArgumentTypeError: neither.
    """
    if not text.strip() or "\0" in text:
        msg = f"expected the path of a file or folder, got {text!r}. Is a variable of the shell not set?"
        raise argparse.ArgumentTypeError(msg)
    return text


def whole(of: str) -> Callable[[str], int]:
    """What reads a whole number in plain digits.

    Args:
        of: What is counted.
    """

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit()):
            msg = f"expected a whole number of {of}, got {text!r}"
            raise argparse.ArgumentTypeError(msg)
        return int(text)

    return read
