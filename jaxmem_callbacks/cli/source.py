"""What is typed as a script: the file and text of a file, a notebook, a module, or a function of one. Nothing runs.

Imports no JAX: a script that is not there is answered at once.
"""

from __future__ import annotations

import ast
import functools
import json
import pathlib
import re
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any, cast

from jaxmem_callbacks.records.errors import ScriptError

_AS_MODULE = "-m "
_NOTEBOOK = ".ipynb"
# Lines of a notebook's cell that are IPython's and no Python's: %magic, !command, name = !command, help?
_OF_IPYTHON = re.compile(r"\s*(?:[%!?]|[\w., ]+=\s*[%!][\w(]).*|\s*[\w.]+\?{1,2}\s*")
_NO_PACKAGE = "no known parent package"  # Python's words where a file that it runs by its path imports relatively
_RELATIVE = re.compile(r"\s*from\s+(\.+)")  # each point is a package around the module
_OTHER_CELL = re.compile(r"\s*%%(?!time\b|timeit\b|capture\b)")  # in another language, or for a file
# What makes a step of this library.
_OWN_STEP = "jit_step"
_PACKAGE = "jaxmem_callbacks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A script that is there.

    Attributes:
        path: Its file.
        function: The function of it that returns ``(train_step, args)``; None where it is run.
        module: Its name as a module, such as ``package.train``; None for a file.
    """

    path: pathlib.Path
    function: str | None
    module: str | None


def source_of(typed: str, command: str = "inspect") -> Source:
    """The script that a text stands for.

    Args:
        typed: ``train.py``, ``-m package.train``, or either with ``:function`` behind it.
        command: What ``jaxmem`` was asked for.

    Raises:
        ScriptError: no such file or module; with what to type.
    """
    file, colon, name = typed.rpartition(":")
    file, function = (file, name) if colon and name.isidentifier() else (typed, None)
    if file.startswith(_AS_MODULE):
        spec = _spec_of(file.removeprefix(_AS_MODULE).strip(), command)
        return Source(path=pathlib.Path(str(spec.origin)), function=function, module=spec.name)
    path = pathlib.Path(file)
    if not path.is_file():
        msg = (
            f"No such script: {path}. Expected a Python file, as in: jaxmem {command} train.py (or train.py:make_step, or "
            "-m package.train)."
        )
        raise ScriptError(msg)
    return Source(path=path, function=function, module=None)


def as_module(path: pathlib.Path, error: BaseException | None, line: str) -> tuple[str, pathlib.Path] | None:
    """The module that a file is, and the folder from which it is found, where it failed to import for want of its package.

    Args:
        path: The file, which was run by its path.
        error: What it failed with.
        line: The line of code that failed.

    Returns:
        Such as ``package.train`` and the folder around ``package``; None where another import failed.
    """
    folder = path.resolve().parent
    around = [folder, *folder.parents]
    if isinstance(error, ModuleNotFoundError) and error.name:  # `from package.model import loss`
        within = pathlib.Path(*error.name.split("."))
        places = [place.parent for place in around if place.name == within.parts[0]]
        root = next(
            (each for each in places if (each / within).is_dir() or (each / within).with_suffix(".py").is_file()), None
        )
    elif _NO_PACKAGE in str(error) and (relative := _RELATIVE.match(line)):  # `from ..model import loss`
        outside = around[len(relative[1]) :]
        root = next((each for each in outside if not (each / "__init__.py").is_file()), None)
    else:
        root = None
    if root is None:
        return None
    parts = (*folder.relative_to(root).parts, path.stem)
    return (".".join(parts), root) if all(map(str.isidentifier, parts)) else None


def _spec_of(name: str, command: str) -> ModuleSpec:
    """Where Python would find a module that it runs, without the import of the packages around it, which are the script's.

    Raises:
        ScriptError: it would not.
    """
    sys.path.insert(0, str(pathlib.Path.cwd()))
    try:
        spec = _found(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _found(f"{name}.__main__")
            if spec is None:
                msg = f"-m {name} is a package without __main__. Name a module in it, as in: jaxmem {command} -m {name}.train."
                raise ScriptError(msg)
    finally:
        sys.path.pop(0)
    if spec is None or not spec.origin or not pathlib.Path(spec.origin).is_file():
        as_file = f" A file is typed without -m: jaxmem {command} {name}." if name.endswith((".py", _NOTEBOOK)) else ""
        msg = (
            f"No module named {name}, looked for from {pathlib.Path.cwd()} as `python -m {name}` does.{as_file} Expected one as "
            f"in: jaxmem {command} -m package.train."
        )
        raise ScriptError(msg)
    return spec


def _found(name: str) -> ModuleSpec | None:
    """A module by its full name, package by package."""
    folders: list[str] | None = None
    spec, known = None, ""
    for part in name.split("."):
        if not part.isidentifier() or (known and folders is None):
            return None
        known = f"{known}.{part}" if known else part
        spec = _found_in(folders, known)
        if spec is None:
            return None
        if spec.origin is None:  # a package without __init__, whose own list asks for the import of the one around it
            places = (pathlib.Path(each or ".") / part for each in folders or sys.path)
            folders = [str(place) for place in places if place.is_dir()]
        else:
            folders = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    return spec


def _found_in(folders: list[str] | None, name: str) -> ModuleSpec | None:
    finders: list[Any] = [each for each in sys.meta_path if hasattr(each, "find_spec")]
    try:
        return next((found for each in finders if (found := each.find_spec(name, folders)) is not None), None)
    except KeyError:  # as Python looks for one without __init__ in a package that is not imported
        return ModuleSpec(name, None, is_package=True)


def source_text(path: pathlib.Path) -> bytes:
    """The Python text of a script; of a notebook that of its code cells, without what only IPython understands.

    Raises:
        OSError: it cannot be read.
        ValueError: a notebook that is none.
    """
    if path.suffix != _NOTEBOOK:
        return path.read_bytes()
    lines: list[str] = []
    for cell in _cells(path):
        source = cell.get("source", "")
        text = source if isinstance(source, str) else "".join(cast("list[str]", source))
        if not _OTHER_CELL.match(text):
            lines += [_as_python(line) for line in text.split("\n")]
        lines.append("")
    return "\n".join(lines).encode()


def _as_python(line: str) -> str:
    """A line of a cell; one of IPython's does nothing, in its place."""
    if not _OF_IPYTHON.fullmatch(line):
        return line
    return f"{line[: len(line) - len(line.lstrip())]}pass  # {line.strip()}"


def _cells(path: pathlib.Path) -> list[dict[str, Any]]:
    try:
        read: Any = json.loads(path.read_bytes())
        return [cell for cell in read["cells"] if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        msg = f"{path} is no notebook of Jupyter's form 4: {type(error).__name__}: {error}"
        raise ValueError(msg) from None


@functools.lru_cache(maxsize=8)
def _parsed(text: bytes) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def syntax_of(path: pathlib.Path) -> ast.Module | None:
    """The syntax tree of a script; None where it cannot be read, which running it shows."""
    try:
        return _parsed(source_text(path))
    except (OSError, ValueError):
        return None


def is_unedited(path: pathlib.Path) -> bool:
    """Whether a script makes no step of this library itself: nothing in it stands for the library's own ``jit_step``.

    Words in comments and texts count for nothing, nor does a function, a method or another module's name that is called so.
    A function under `jm.apply_policy` is jitted by the user or by a package, and found there.
    """
    tree = syntax_of(path)
    return tree is not None and not _makes_own_step(tree)


def _makes_own_step(tree: ast.Module) -> bool:
    modules = _modules_of(tree)
    return any(_is_own_step(node, modules) for node in ast.walk(tree))


def _modules_of(tree: ast.Module) -> set[str]:
    """The names that stand for this library's package, or for a module of it, in a script."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            own = (each for each in node.names if _is_ours(each.name))
            names |= {each.asname or each.name.partition(".")[0] for each in own}
        elif isinstance(node, ast.ImportFrom) and _is_ours(node.module or ""):
            names |= {each.asname or each.name for each in node.names}
    return names


def _is_own_step(node: ast.AST, modules: set[str]) -> bool:
    """Whether a piece of code is the library's function by a name of the package, or brings it in by its own name."""
    if isinstance(node, ast.ImportFrom):
        return _is_ours(node.module or "") and any(each.name in {"*", _OWN_STEP} for each in node.names)
    if not isinstance(node, ast.Attribute) or node.attr != _OWN_STEP:
        return False
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in modules


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == _PACKAGE
