"""``jaxmem targets``: which compilers of absent hardware are here; if asked, they are fetched.

They go into a folder that only this library's compile workers see: beside JAX, JAX itself would load them wherever it starts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

from jaxmem_callbacks.cli.exit_codes import FAILED, OK
from jaxmem_callbacks.programs.targets.compilers import (
    PLATFORMS,
    compiler_versions,
    folder_to_fill,
    other_folders,
    other_than_pinned,
    requirements,
)
from jaxmem_callbacks.programs.targets.target import target_names
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.documents import Block, Document, Table, put_document
from jaxmem_callbacks.records.errors import TargetError
from jaxmem_callbacks.records.terminal import put

_HARDWARE = {"tpu": "TPUs, such as v5e or v5p:4x4x4", "gpu": "NVIDIA GPUs, such as h100_sxm or h100_sxm:8"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--install",
        nargs="+",
        choices=sorted(PLATFORMS),
        default=[],
        metavar="KIND",
        help="fetch the compilers of tpu, of gpu, or of both, into a folder that JAX itself never loads",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Install what is asked for, then print what is here.

    Returns:
        0; 1 where pip failed, whose own words are on stderr.

    Raises:
        TargetError: there is neither pip nor uv to install with.
    """
    for kind in dict.fromkeys(args.install):
        if _install(kind):
            put(f"jaxmem: the compilers for {kind} could not be installed; why is above.\n", sys.stderr)
            return FAILED
    if args.json:
        put(json.dumps(_as_json(), indent=2) + "\n", as_json=True)
    else:
        put_document(_document())
    return OK


def _install(kind: str) -> int:
    """Fetch the compilers of one kind; what is printed goes to stderr. pip's exit code."""
    folder = folder_to_fill()
    wanted = requirements(PLATFORMS[kind])
    command = [*_installer(), "--upgrade", "--no-deps", "--target", str(folder), *wanted]
    put(f"jaxmem: installing {', '.join(wanted)} into {folder}\n", sys.stderr)
    sys.stderr.flush()
    folder.mkdir(parents=True, exist_ok=True)
    code = subprocess.run(command, stdout=sys.stderr.fileno(), check=False).returncode  # noqa: S603 - our own words
    if code == 0:
        for each in wanted:
            _forget_replaced(folder, each.partition("==")[0])
    return code


def _forget_replaced(folder: Path, package: str) -> None:
    """Remove the metadata of versions that are no longer there: into a folder of one's own, pip replaces files alone."""
    records = sorted(
        folder.glob(f"{package.replace('-', '_')}-*.dist-info/RECORD"), key=lambda each: each.stat().st_mtime_ns
    )
    for record in records[:-1]:
        shutil.rmtree(record.parent)


def _installer() -> list[str]:
    """What installs packages for this Python.

    Raises:
        TargetError: nothing does.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    msg = f"{sys.executable} has no pip, and there is no uv. Type: {sys.executable} -m ensurepip"
    raise TargetError(msg)


def _folder() -> Path | None:
    try:
        return folder_to_fill()
    except TargetError:  # a user without a home folder
        return None


def _document() -> Document:
    rows: list[tuple[str, str, str]] = []
    for kind, platform in PLATFORMS.items():
        found = ", ".join(f"{name} {version}" for name, version in compiler_versions(platform).items())
        rows.append((kind, _HARDWARE[kind], found or f"none. Type: {advise('targets.install', kind=kind)}"))
    named = advise("environment.set", name="JAXMEM_TARGET_PATH", value="/a/folder")
    place = _folder() or f"none, since this user has no home folder; {named}"
    blocks: list[Block] = [Table(("kind", "compiles for", "compiler"), rows)]
    blocks += [f"Names: {', '.join(target_names())}.", f"Their folder: {place}"]
    blocks += [warning for warning in map(other_than_pinned, PLATFORMS.values()) if warning]
    left = [str(folder) for folder in other_folders()]
    if left:
        blocks.append(f"Of other versions of JAX or Python, and of no use to this one: {', '.join(left)}")
    return Document(blocks)


def _as_json() -> dict[str, object]:
    folder = _folder()
    return {
        "compilers": {kind: compiler_versions(platform) for kind, platform in PLATFORMS.items()},
        "folder": None if folder is None else str(folder),
        "other_folders": [str(each) for each in other_folders()],
        "remarks": [remark for remark in map(other_than_pinned, PLATFORMS.values()) if remark],
        "targets": list(target_names()),
    }
