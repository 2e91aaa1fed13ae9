"""Source files: whose they are, and their paths as people type them."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
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
    """Whether a file lies in a folder that packages are installed into."""
    return not _INSTALLED.isdisjoint(Path(file).parts)


def short_path(file: str) -> str:
    """A path from the working folder, or from the package that it was installed with; whole where it lies elsewhere."""
    path = Path(file)
    installed = [place for place, part in enumerate(path.parts) if part in _INSTALLED]
    if installed:
        return str(Path(*path.parts[installed[-1] + 1 :]))
    with contextlib.suppress(FileNotFoundError):  # the working folder is gone
        return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
    return file
