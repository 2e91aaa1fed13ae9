"""Which compilers of absent hardware are installed, and where: found by package metadata, never by importing them here.

They may be installed beside JAX, or in a folder of their own that only the worker process sees, so that they change
nothing about the user's JAX: ``JAXMEM_TARGET_PATH`` (folders, separated as in PATH), else ``default_folder()``.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import TargetError

# Triton's matrix products, and the search for the best kernel of each operation, a large part of a compile by JAX 0.12.
_TRITON, _AUTOTUNE, _SEARCHES = "xla_gpu_enable_triton_gemm", "xla_gpu_autotune_level", (0, 12)
_VARIABLE = "JAXMEM_TARGET_PATH"
# As people write kinds of hardware -> as JAX calls their platforms.
PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}
# As JAX's own metadata ask for a TPU's compiler: libtpu==0.0.50.*; extra == "tpu"
_PIN = re.compile(r"""libtpu\s*\(?(==[\w.]+(?:\.\*)?)\)?\s*;.*\bextra == ['"]tpu['"]""")
# As a wheel's metadata name one Python and its own binary interface: Tag: cp312-cp312-manylinux_2_27_x86_64
_TAG = re.compile(r"^Tag: (cp\d+)-\1-", re.MULTILINE)
# Per platform, the packages that belong together; the first complete set is used.
_PACKAGES = {
    "tpu": (("libtpu",),),
    "cuda": (("jax-cuda12-plugin", "jax-cuda12-pjrt"), ("jax-cuda13-plugin", "jax-cuda13-pjrt")),
}


def user_cache() -> pathlib.Path | None:
    """This library's folder among the user's caches, which need not exist; None for a user without a home folder."""
    try:
        caches = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    except RuntimeError:
        return None
    return caches / "jaxmem_callbacks"


def default_folder() -> pathlib.Path | None:
    """Where compilers are looked for besides JAX's own environment; one for each JAX and Python, because they must match."""
    python, cache = f"{sys.version_info.major}.{sys.version_info.minor}", user_cache()
    return None if cache is None else cache / "targets" / f"jax-{_version('jax', sys.path)}-python{python}"


def folder_to_fill() -> pathlib.Path:
    """Where compilers are to be installed: the first folder that is looked in, whether it exists or not.

    Raises:
        TargetError: there is none, for a user without a home folder.
    """
    searched = _searched()
    if not searched:
        named = advise("environment.set", name=_VARIABLE, value="/a/folder")
        msg = f"There is no folder for compilers, since this user has no home folder. Expected one: {named}"
        raise TargetError(msg)
    return pathlib.Path(searched[0])


def other_folders() -> tuple[pathlib.Path, ...]:
    """Folders of compilers for other versions of JAX or Python, which nothing here uses."""
    own = default_folder()
    if own is None:
        return ()
    return tuple(each for each in sorted(own.parent.glob("jax-*-python*")) if each != own)


def requirements(platform: str) -> tuple[str, ...]:
    """What to install for ``tpu`` or ``cuda``: what JAX itself pins, because it must read what they compile."""
    if platform == "cuda":
        return tuple(f"{name}=={_version('jax', sys.path)}" for name in _PACKAGES["cuda"][0])
    return (f"libtpu{_pinned_libtpu()}",)


def other_than_pinned(platform: str) -> str:
    """A sentence where the compiler that is used is not one that the installed JAX pins; else empty.

    Most of what it compiles is read all the same, so nobody is refused for it.
    """
    pinned, found = _pinned_libtpu(), compiler_versions("tpu").get("libtpu")
    if platform != "tpu" or not pinned or found is None or _is_of(found, pinned):
        return ""
    jax = _version("jax", sys.path)
    return (
        f"libtpu {found} is not the one that jax {jax} asks for (libtpu{pinned}), and that jax may be unable to read what it "
        f"compiles. Type: {_how_to_replace('tpu')}"
    )


def options_without_device(platform: str) -> dict[str, Any]:
    """Options of a compile without the device, but for those that the user's ``XLA_FLAGS`` set.

    There is nothing to tune a GPU's kernels on. Before 0.12 its own search takes no time and changes bytes, and so it is left.
    """
    if platform != "cuda":
        return {}
    line = tuple(map(int, re.findall(r"\d+", _version("jax", sys.path) or "")[:2]))
    options = {_TRITON: False, _AUTOTUNE: 0} if line >= _SEARCHES else {_TRITON: False}
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in flags}


def _is_of(version: str, pinned: str) -> bool:
    """Whether a version is ``==0.0.42`` or, of ``==0.0.42.*``, one of those."""
    wanted = pinned.removeprefix("==")
    return f"{version}.".startswith(wanted[:-1]) if wanted.endswith(".*") else version == wanted


def _pinned_libtpu() -> str:
    """The versions of libtpu that the installed JAX asks for, such as ``==0.0.50.*``; empty where it asks for none."""
    jax = next(iter(importlib.metadata.distributions(name="jax", path=sys.path)), None)
    asked = (jax and jax.requires) or ()
    return next((match[1] for match in map(_PIN.match, asked) if match), "")


def target_folders() -> list[str]:
    """The folders that the worker adds to its own path: those of the variable where it is set, else the default one."""
    return [folder for folder in _searched() if pathlib.Path(folder).is_dir()]


def _searched() -> list[str]:
    """Folders that are looked in, whether they exist or not."""
    named = (os.environ.get(_VARIABLE) or "").split(os.pathsep)
    default = default_folder()
    return [folder for folder in named if folder] or ([] if default is None else [str(default)])


def compiler_versions(platform: str, path: Sequence[str] | None = None) -> dict[str, str]:
    """Package -> version of the installed compiler for ``tpu`` or ``cuda``; empty where none is installed.

    Args:
        platform: ``tpu`` or ``cuda``.
        path: Folders to look in; by default where JAX is found, then `target_folders`.
    """
    path = [*sys.path, *target_folders()] if path is None else path
    for packages in _PACKAGES[platform]:
        found = {name: version for name in packages if (version := _version(name, path)) is not None}
        if len(found) == len(packages):
            return found
    return {}


def require_compiler(platform: str, target: str, path: Sequence[str] | None = None) -> None:
    """Refuse a target whose compiler is missing, or belongs to another JAX or Python.

    Args:
        platform: ``tpu`` or ``cuda``.
        target: The target's name, for the message.
        path: As for `compiler_versions`.

    Raises:
        TargetError: in one line, with what to type.
    """
    path = [*sys.path, *target_folders()] if path is None else path
    found = compiler_versions(platform, path)
    jax = _version("jax", sys.path)
    if not found:
        libraries = "; no CUDA libraries needed" if platform == "cuda" else ""
        msg = (
            f"Target {target!r} needs a compiler that is not installed. Type: {_into_folder(platform)} (your own JAX stays as it "
            f"is{libraries}), or, beside JAX, which then loads it wherever it starts: {_beside_jax(platform)}"
        )
        raise TargetError(msg)
    wrong = {name: version for name, version in found.items() if platform == "cuda" and version != jax}
    if wrong:
        given = ", ".join(f"{name} {version}" for name, version in wrong.items())
        msg = f"Target {target!r}: {given} does not belong to jax {jax}. Type: {_how_to_replace(platform)}"
        raise TargetError(msg)
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    others = {
        name: built for name in found if platform == "cuda" and (built := _built_for(name, path)) not in ("", python)
    }
    if others:
        given = ", ".join(f"{name} is built for {built}" for name, built in others.items())
        msg = f"Target {target!r}: {given}, and this Python is {python}. Type: {_how_to_replace(platform)}"
        raise TargetError(msg)


def _how_to_replace(platform: str) -> str:
    """What is beside JAX is found first, whatever the folder holds."""
    return _beside_jax(platform) if compiler_versions(platform, sys.path) else _into_folder(platform)


def _into_folder(platform: str) -> str:
    return advise("targets.install", kind=_kind(platform))


def _beside_jax(platform: str) -> str:
    """The packages of the extra by their own name, in the version that is here."""
    extra = "tpu" if platform == "tpu" else "cuda12-local"
    return advise("targets.beside_jax", extra=extra, version=_version("jax", sys.path))


def _kind(platform: str) -> str:
    return next(kind for kind, each in PLATFORMS.items() if each == platform)


def _version(package: str, path: Sequence[str]) -> str | None:
    """Version of an installed package, by its metadata on ``path``."""
    found = next(iter(importlib.metadata.distributions(name=package, path=list(path))), None)
    return found.version if found else None


def _built_for(package: str, path: Sequence[str]) -> str:
    """The Python that an installed package holds machine code for, such as ``cp312``; empty where it runs in any."""
    found = next(iter(importlib.metadata.distributions(name=package, path=list(path))), None)
    tag = _TAG.search((found and found.read_text("WHEEL")) or "")
    return tag[1] if tag else ""
