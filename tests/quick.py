"""Which tests are quick: none that starts a process, opens a browser, needs a compiler of absent hardware, or is slow.

The first is read off the functions: a test, its fixtures, and what they call in these folders.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

OURS = ("tests", "benchmarks")
NOT_QUICK = ("slow", "targets", "browser", "adapters")  # marks
STARTING = {"subprocess", "multiprocessing", "Popen", "fork", "forkpty", "posix_spawn"}  # names in code
# What Python reports when a process starts; see sys.addaudithook.
STARTED = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec"}
# Most processor seconds of a file's quick tests. One of four is listed as slow; a busy machine may take three times as many.
MOST_S = 12.0


@functools.cache
def slow_files() -> dict[str, int]:
    """Files of four processor seconds and more, and how many they were at least, with the processes that they start."""
    rows = (line.split() for line in Path(__file__).with_name("slow_files.txt").read_text().splitlines())
    return {name: int(seconds) for seconds, name in rows}


def is_quick(item: Any) -> bool:
    """Whether a collected test belongs to `make quick`."""
    fixtures = [each.func for found in item._fixtureinfo.name2fixturedefs.values() for each in found]
    marked = any(item.get_closest_marker(name) for name in NOT_QUICK) or "pytester" in item.fixturenames
    return not marked and not any(starts_processes(function) for function in (item.obj, *fixtures))


@functools.cache
def starts_processes(function: Any) -> bool:
    """Whether a function, or anything of ours that it reaches, names what starts processes."""
    seen, waiting = set[int](), [function]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict | list | tuple):
            waiting += value.values() if isinstance(value, dict) else value
        elif _room_of(value) in STARTING:
            return True
        elif isinstance(value, type) and _room_of(value) in OURS:
            waiting += vars(value).values()
        elif (written := _as_written(value)) is not None:
            for code in _codes(written.__code__):
                if STARTING & set(code.co_names):
                    return True
                waiting += _reached(written, code)
    return False


def _as_written(value: Any) -> FunctionType | None:
    """The function of ours below decorators, fixtures, examples, partials and methods."""
    below = [
        inspect.getattr_static(value, name, None) for name in ("__wrapped__", "_fixture_function", "func", "__func__")
    ]
    handle = inspect.getattr_static(value, "hypothesis", None)
    inner = next(
        (each for each in (getattr(handle, "inner_test", None), *below) if isinstance(each, FunctionType)), None
    )
    if inner is not None:
        return _as_written(inner)
    return value if isinstance(value, FunctionType) and _room_of(value) in OURS else None


def _room_of(value: Any) -> str:
    """The first word of the module that a function or class is defined in."""
    module = getattr(value, "__module__", None) if isinstance(value, FunctionType | type) else None
    return module.partition(".")[0] if isinstance(module, str) else ""


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _reached(function: FunctionType, code: CodeType) -> Iterator[Any]:
    """Values of ours that a function names: globals of its file, and names of other files of ours."""
    for name in code.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and value.__name__.startswith(OURS):
            yield from (vars(value).get(inner) for inner in code.co_names)
        elif not isinstance(value, ModuleType):
            yield value
    yield from (cell.cell_contents for cell in function.__closure__ or ())
