"""Checks of public arguments. Errors name the call, the argument and what was expected.

Each check is one line where the argument is taken, before anything is traced, donated or written.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

_SHOWN = 60  # characters of what was given


def refuse(call: str, name: str, given: object, expected: str) -> NoReturn:
    """Refuse an argument of another type.

    Args:
        call: What it was given to, such as ``jm.oom_guard``.
        name: The argument.
        given: Its value.
        expected: What belongs there, with an example.

    Raises:
        TypeError: always.
    """
    msg = f"{call}: {name}={_words(given)} is {_kind(given)}. Expected {expected}."
    raise TypeError(msg)


def require(call: str, name: str, given: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Refuse what is of none of the kinds; a switch is no number.

    Raises:
        TypeError: as `refuse` words it.
    """
    if not isinstance(given, kinds) or (
        isinstance(given, bool) and bool not in (kinds if isinstance(kinds, tuple) else (kinds,))
    ):
        refuse(call, name, given, expected)


def require_callable(call: str, name: str, given: object, expected: str) -> None:
    """Refuse what cannot be called.

    Raises:
        TypeError: as `refuse` words it.
    """
    if not callable(given):
        refuse(call, name, given, expected)


def require_names(call: str, name: str, given: Any) -> tuple[str, ...] | None:
    """Names, or None: one text is one name.

    Raises:
        TypeError: something else, or something else among them.
    """
    expected = f"a name, or a tuple of names such as {name}=('state',)"
    if given is None or isinstance(given, str):
        return None if given is None else (given,)
    require(call, name, given, (list, tuple, set, frozenset), expected)
    if not all(isinstance(each, str) for each in given):
        refuse(call, name, given, expected)
    return tuple(given)


def require_wholes(call: str, name: str, given: Any) -> None:
    """Refuse what is neither a whole number nor a sequence of them.

    Raises:
        TypeError: as `refuse` words it.
    """
    for each in cast("Sequence[Any]", given) if isinstance(given, list | tuple | range) else (given,):
        require_whole(call, name, each)


def require_whole(call: str, name: str, given: Any, *, least: int | None = None) -> int:
    """A whole number, NumPy's included, as Python's own.

    Raises:
        TypeError: no whole number, or a switch.
        ValueError: one that is too small.
    """
    expected = "a whole number" if least is None else f"a whole number of at least {least}"
    try:
        number = operator.index(given)
    except TypeError:
        number = None
    if number is None or isinstance(given, bool):
        refuse(call, name, given, expected)
    if least is not None and number < least:
        msg = f"{call}: {name}={number}. Expected {expected}."
        raise ValueError(msg)
    return number


def require_path(call: str, name: str, given: Any, example: str) -> Path:
    """A path of text.

    Raises:
        TypeError: bytes, or no path.
        ValueError: nothing, or a character that no path can have.
    """
    text = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(text, str):
        refuse(call, name, given, f"a path as text or pathlib.Path, such as {name}={example!r}")
    if not text or "\0" in text:
        msg = f"{call}: {name}={text!r} is no path. Expected one such as {name}={example!r}."
        raise ValueError(msg)
    return Path(text)


def _words(given: object) -> str:
    """The value as Python writes it, cut; arrays and the like by their kind alone."""
    if not isinstance(given, str | bytes | int | float | list | tuple | dict | type(None)):
        return "..."
    text = repr(given)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _kind(given: object) -> str:
    return "None" if given is None else f"of type {type(given).__name__}"


def require_function(given: object, call: str) -> None:
    """Refuse what is no function where one belongs, such as what a function returns.

    Args:
        given: What was passed.
        call: What it was passed to first, such as ``jm.jit_step``.

    Raises:
        TypeError: it is none.
    """
    if not callable(given):
        msg = f"{call} got {type(given).__name__} first. Expected a function itself, not what it returns."
        raise TypeError(msg)


def name_of(function: Callable[..., Any]) -> str:
    """What a function is called: its name, under a `functools.partial` that of the function inside, else its class's."""
    while isinstance(function, functools.partial) and not hasattr(function, "__name__"):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)
