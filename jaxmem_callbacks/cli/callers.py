"""A Python frame enters; whose file called it leaves: the user's own, an installed package, or this library."""

from __future__ import annotations

import enum
import functools
import os
import pathlib
import sysconfig
import types

_LIBRARY = str(pathlib.Path(__file__).parents[1]) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = ("site-packages", "dist-packages")
# Functions of JAX that trace to tell shapes, operations or costs, and run nothing: of 0.10 to 0.12.
_ASKING = {"eval_shape", "make_jaxpr_f", "jit_trace", "jit_lower", "jit_eval_shape"}


class Caller(enum.Enum):
    """Whose file it is."""

    USER = enum.auto()
    PACKAGE = enum.auto()
    LIBRARY = enum.auto()


def caller_of(frame: types.FrameType | None) -> Caller:
    """Whose function called the function of a frame."""
    caller = None if frame is None else frame.f_back
    return Caller.PACKAGE if caller is None else _owner(caller.f_code.co_filename)


def is_asked_for_shapes(frame: types.FrameType | None) -> bool:
    """Whether a frame is inside a trace that only tells what something would give, such as `jax.eval_shape`."""
    while frame is not None:
        code = frame.f_code
        if code.co_name in _ASKING and _owner(code.co_filename) is Caller.PACKAGE:
            return True
        frame = frame.f_back
    return False


@functools.cache
def _owner(file: str) -> Caller:
    if file.startswith(_LIBRARY):
        return Caller.LIBRARY
    is_installed = any(each in pathlib.Path(file).parts for each in _INSTALLED)
    return Caller.PACKAGE if is_installed or file.startswith(("<frozen", _STANDARD)) else Caller.USER
