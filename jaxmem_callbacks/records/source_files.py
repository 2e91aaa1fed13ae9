"""Source files: whose they are, and their paths as people type them."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import sys
import sysconfig
from pathlib import Path

_LIBRARY = str(Path(__file__).parents[1]) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = {"site-packages", "dist-packages"}


class Owner(enum.Enum):
    """Whose file it is."""

    USER = enum.auto()
    PACKAGE = enum.auto()
    LIBRARY = enum.auto()


@functools.lru_cache(maxsize=4096)
def owner_of(file: str) -> Owner:
    """Whether a file is the user's own, of an installed package or Python's own, or of this library."""
    if file.startswith(_LIBRARY):
        return Owner.LIBRARY
    return Owner.PACKAGE if is_installed(file) or file.startswith(("<frozen", _STANDARD)) else Owner.USER


def is_installed(file: str) -> bool:
    """Whether a file is in a folder that packages are installed into."""
    return _installed_under(file) is not None


def short_path(file: str) -> str:
    """A path from the working folder, or from the package that it was installed with; whole where it is elsewhere."""
    path, installed = Path(file), _installed_under(file)
    if installed is not None:
        return str(path.relative_to(installed))
    with contextlib.suppress(FileNotFoundError):  # the working folder is gone
        return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
    return file


@functools.lru_cache(maxsize=4096)
def _installed_under(file: str) -> Path | None:
    """The folder that the package of a file was installed into; None for a file of no installed package.

    By its name, or as pip leaves it with `--target`: a folder of ``sys.path`` with the records of what it holds.
    """
    searched = {os.path.realpath(each) for each in sys.path}
    for folder in Path(file).parents:
        below = Path(file).relative_to(folder).parts[0]
        if folder.name in _INSTALLED or (os.path.realpath(folder) in searched and below in _recorded_in(str(folder))):
            return folder
    return None


@functools.lru_cache(maxsize=256)
def _recorded_in(folder: str) -> frozenset[str]:
    """Files and packages that the records of installed distributions name in a folder."""
    import importlib.metadata  # half as slow as all that the command line imports for a mistake

    return frozenset(
        each.parts[0]
        for known in importlib.metadata.distributions(path=[folder])
        for each in known.files or ()
        if each.parts
    )
