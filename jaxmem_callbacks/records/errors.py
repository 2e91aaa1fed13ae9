"""Every error the library raises. Each message states what was given, what was expected, where, and what to type next.

    JaxmemError
    |-- LossRefusedError      (ValueError)    the loss cannot be rematerialised as asked
    |-- PolicyError           (ValueError)    a policy that does not exist, contradicts itself or would do nothing
    |-- PatternError          (ValueError)    a path pattern that matches no module
    |-- DonationError         (ValueError)    a donation that was asked for and is not happening
    |-- PresetError           (ValueError)    YAML that is not a preset
    |-- EnvironmentSettingError (ValueError)  a setting of XLA's client that is wrong, contradicted, too late or read by nothing
    |-- PlanError             (ValueError)    what a plan was asked for makes no sense, or nothing fits and it is to run
    |-- SimulationError       (ValueError)    a trace of allocations that contradicts itself, or an allocator that is no one's
    |-- ScriptError           (RuntimeError)  a script that never calls a step
    |-- TargetError           (RuntimeError)  a compile target that is unknown or not installed
    |-- CompileError          (RuntimeError)  a program that cannot be compiled, or a compiler that crashed or took too long
    |   `-- CompileTimeoutError               a compiler that took too long
    |-- DefragmentError       (RuntimeError)  arrays that cannot be moved together, or could not all be; it holds the tree
    `-- RecoveryError         (RuntimeError)  a step that recovery cannot repeat, a checkpoint that is another state's,
                                              or a run that ends because of another process

``DonationWarning`` is the warning used where donation was inferred, not asked for, or is lost after a restore;
``RecoveryWarning`` the one for a checkpoint that was written under other conditions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# What shows nothing: controls, changes of direction, ends of lines of Unicode, halves and tags.
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_LINES = (0x2028, 0x2029)
_CONTROLS = (*range(0x09), 0x0B, 0x0C, *range(0x0D, 0x20), *range(0x7F, 0xA0))
_INVISIBLE = (*_CONTROLS, *_DIRECTIONS, *_LINES, *range(0xD800, 0xE000), *range(0xE0000, 0xE0080))


def _escape_of(code: int) -> str:
    if code < 0x100:  # noqa: PLR2004 - as Python writes them
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"  # noqa: PLR2004


_SHOWN = {code: _escape_of(code) for code in _INVISIBLE}


def printable(text: str) -> str:
    r"""The text with each character that shows nothing written out; ends of lines and tabs stay."""
    return text if text.isascii() and text.isprintable() else text.replace("\r\n", "\n").translate(_SHOWN)


class JaxmemError(Exception):
    """Base of the library's own errors. Control characters in text that a message quotes are escaped."""

    def __str__(self) -> str:
        return printable(super().__str__())


class LossRefusedError(JaxmemError, ValueError):
    """The loss has something that a recomputation would repeat or lose."""


class PolicyError(JaxmemError, ValueError):
    """A policy that does not exist, contradicts itself, or would silently do nothing."""


class PatternError(JaxmemError, ValueError):
    """A path pattern that matches no module; the message lists what it could have matched."""


class DonationError(JaxmemError, ValueError):
    """A donation that was asked for and that the compiled program does not make."""


class PresetError(JaxmemError, ValueError):
    """YAML that is not a preset; the message gives file, line, column and the nearest valid name."""


class EnvironmentSettingError(JaxmemError, ValueError):
    """A setting of XLA's client that is wrong, contradicts another, comes too late, or that nothing reads."""


class PlanError(JaxmemError, ValueError):
    """A plan that cannot be made as asked, or one in which nothing fits and that is to run all the same."""


class ScriptError(JaxmemError, RuntimeError):
    """A script that never reaches a step; the message shows the line to add."""


class TargetError(JaxmemError, RuntimeError):
    """A compile target that is unknown or whose compiler is not installed."""


class CompileError(JaxmemError, RuntimeError):
    """A program that its devices' compiler does not take, or a compiler that crashed or ran out of time."""


class CompileTimeoutError(CompileError):
    """A compiler that was ended when its time was up, with no answer."""


class RecoveryError(JaxmemError, RuntimeError):
    """A step that recovery cannot repeat, a checkpoint of another state, or a run that ends because of another process."""


class RecoveryWarning(UserWarning):
    """Something that makes a recovery or a restore differ from what was asked for; the message lists what."""


class DefragmentError(JaxmemError, RuntimeError):
    """Arrays that cannot be moved together, or a move that failed in the middle.

    Args:
        message: What could not be done, and why.
        tree: What was given, with every array where it is now: moved, not moved, or as a NumPy array where it could not be
            put back. None where nothing was begun. Kept as the attribute of the same name.
    """

    def __init__(self, message: str, tree: object = None) -> None:
        super().__init__(message)
        self.tree = tree


class RunFileError(JaxmemError, ValueError):
    """A run, plan, log or saved step memory that cannot be read; the message gives the file, and the line of one with lines."""


class ComparisonError(JaxmemError, ValueError):
    """Two things whose bytes cannot be compared, such as steps for different hardware."""


class SimulationError(JaxmemError, ValueError):
    """A trace of allocations that cannot be read or contradicts itself, or an allocator that cannot be simulated."""


class DonationWarning(UserWarning):
    """An inferred donation that the compiled program does not make."""


def did_you_mean(given: str, allowed: Iterable[str], *, cutoff: float = 0.5) -> str:
    """`` Did you mean `x`?`` when a name in ``allowed`` is near ``given``, else an empty string.

    Args:
        given: The name that is none.
        allowed: Those that there are.
        cutoff: How near one must be, from 0 to 1.
    """
    near = difflib.get_close_matches(given, list(allowed), n=1, cutoff=cutoff)
    return f" Did you mean `{near[0]}`?" if near else ""


def in_a_line(error: BaseException) -> str:
    """What an error is, and the first line of its text: ``TypeError: unsupported operand``."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['without a word'])[0]}"
