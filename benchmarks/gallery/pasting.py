"""Lines that `jaxmem plan` printed, pasted into a copy of a program by what they themselves say, and nothing else."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

IMPORT = "import jaxmem_callbacks as jm"
_HEADING = "To train so:"
_REPLACED = re.compile(r"# (?P<file>\S+):(?P<line>\d+): (?P<new>\S+) in place of (?P<old>\S+)")
_PLACE = re.compile(r"# (?P<side>above|below) (?P<file>\S+):(?P<line>\d+)")
_AT_END = re.compile(r"# at the end of (?P<file>\S+)")
_AROUND = re.compile(r"# and call trained in place of (?P<old>\S+)")
_WRAPPED = re.compile(r"\w+ = jm\.jit_step\((?P<function>\w+),")


class CannotPasteError(Exception):
    """The lines do not say where they go."""


class Change(NamedTuple):
    """Lines that go in above a line of a file, or what that line becomes.

    Attributes:
        file: Of which file.
        line: Above which line, from 1.
        lines: What goes in; empty where the line itself is changed.
        old: What is replaced in that line, and with `new`.
        new: What stands there instead.
    """

    file: Path
    line: int
    lines: tuple[str, ...] = ()
    old: str = ""
    new: str = ""


def printed_lines(plan: str) -> list[str]:
    """The lines below the plan's heading for them, without their margin; empty where it printed none."""
    below = plan.partition(_HEADING)[2].lstrip("\n")
    block = below.partition("\n\n")[0]
    return [line for line in textwrap.dedent(block).splitlines() if line.strip()]


def paste(lines: list[str], script: Path) -> list[str]:
    """Change the files of a program as the lines say.

    Args:
        lines: As printed.
        script: The program's file. Files that lines name are found in its folder.

    Returns:
        What was edited, in words.

    Raises:
        CannotPasteError: they do not say where they go, or name a line that does not hold what they replace.
    """
    changes = _changes(lines, script)
    for file in {change.file for change in changes}:
        text = file.read_text().splitlines()
        # From the end, so that the numbers of the lines before still hold; of one line, the change before what goes in above.
        for change in sorted(
            (each for each in changes if each.file == file), key=lambda each: (-each.line, bool(each.lines))
        ):
            _apply(change, text)
        at = _import_line(file)
        text[at:at] = [IMPORT]
        file.write_text("\n".join(text) + "\n")
    return [_words(change) for change in changes]


def _changes(lines: list[str], script: Path) -> list[Change]:
    found: list[Change] = []
    code: list[str] = []
    place: tuple[Path, int] | None = None
    for line in lines:
        if replaced := _REPLACED.fullmatch(line):
            found.append(
                Change(_file(script, replaced["file"]), int(replaced["line"]), (), replaced["old"], replaced["new"])
            )
        elif around := _AROUND.fullmatch(line):
            call = _call_of(script, around["old"])
            found.append(Change(script, call.lineno, (), around["old"], "trained"))
            place = script, call.statement
        elif named := _PLACE.fullmatch(line):
            place = _file(script, named["file"]), int(named["line"]) + (named["side"] == "below")
        elif ended := _AT_END.fullmatch(line):
            file = _file(script, ended["file"])
            place = file, len(file.read_text().splitlines()) + 1
        elif line != IMPORT and not line.startswith("#"):
            code.append(line)
    if code and place is None:
        place = script, _below_function(script, code)
    return found if place is None else [*found, Change(*place, tuple(code))]


def _file(script: Path, name: str) -> Path:
    own = script.parent / name
    if not own.is_file():
        msg = f"{name} is no file of the program"
        raise CannotPasteError(msg)
    return own


class _Call(NamedTuple):
    lineno: int
    statement: int


def _call_of(script: Path, function: str) -> _Call:
    """The first call of a function, and the outermost statement around it that is not a function's or a class's."""
    for statement in ast.parse(script.read_text()).body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
                inner = [each for each in ast.walk(statement) if isinstance(each, ast.stmt) and _holds(each, node)]
                return _Call(node.func.lineno, max(each.lineno for each in inner))
    msg = f"no call of {function} is in the program"
    raise CannotPasteError(msg)


def _holds(statement: ast.stmt, node: ast.expr) -> bool:
    return any(each is node for each in ast.walk(statement))


def _below_function(script: Path, code: list[str]) -> int:
    """Below the function that a line wraps, where nothing else is said."""
    wrapped = next((found["function"] for line in code if (found := _WRAPPED.match(line))), None)
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == wrapped:
            return (node.end_lineno or node.lineno) + 1
    msg = f"the printed lines do not say where they go: {' / '.join(code)}"
    raise CannotPasteError(msg)


def _apply(change: Change, text: list[str]) -> None:
    if change.lines:
        below = text[change.line - 1] if change.line <= len(text) else ""
        indent = below[: len(below) - len(below.lstrip())]
        text[change.line - 1 : change.line - 1] = [indent + line for line in change.lines]
        return
    pattern = rf"(?<![\w.]){re.escape(change.old)}(?!\w)"
    changed, times = re.subn(pattern, change.new, text[change.line - 1], count=1)
    if not times:
        msg = f"line {change.line} of {change.file.name} holds no {change.old}"
        raise CannotPasteError(msg)
    text[change.line - 1] = changed


def _import_line(file: Path) -> int:
    """Where an import may stand: below the docstring and `from __future__`."""
    at = 0
    for node in ast.parse(file.read_text()).body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_text and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        at = node.end_lineno or at
    return at


def _words(change: Change) -> str:
    where = f"{change.file.name}:{change.line}"
    return (
        f"{where}: {change.new} in place of {change.old}"
        if change.old
        else f"above {where}: {' / '.join(change.lines)}"
    )
