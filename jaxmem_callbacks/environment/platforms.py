"""The platforms that JAX is told to use, and the plugins and hardware here, enter; what cannot start leaves as findings."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.environment import Finding, Surroundings

_INSTALL = {
    "cuda": ("an NVIDIA GPU", "jax[cuda12]"),
    "rocm": ("an AMD GPU", "jax[rocm7-local]"),
    "tpu": ("a TPU", "jax[tpu]"),
}
_VARIABLE, _OLD = "JAX_PLATFORMS", "JAX_PLATFORM_NAME"
_GPUS = ("cuda", "rocm", "oneapi")  # what JAX takes `gpu` for
_KNOWN = ("cpu", "gpu", *_INSTALL)
_KNOWN_TO_JAX = ("oneapi", "METAL", "proxy")  # and nothing else is known of them here
_ALIKE = 0.6
_AT_FIRST_USE = "JAX fails at its first use."


def platform_findings(seen: Surroundings) -> tuple[Finding, ...]:
    """What is wrong with the platforms: hardware without a plugin, and names that cannot start."""
    if seen.jax is None:
        return ()
    return (*_missing_plugin(seen), *_platforms(seen), *_old_name(seen))


def _missing_plugin(seen: Surroundings) -> Iterator[Finding]:
    for platform in seen.hardware:
        if not seen.platforms and platform in _INSTALL and platform not in seen.plugins:
            what, extra = _INSTALL[platform]
            why = "JAX has no plugin for it and runs on the CPU."
            yield Finding(kind="no plugin", given=f"This machine has {what}.", why=why, type_next=_asked(extra))


def _asked(extra: str) -> str:
    """What may be missing, as a question: which packages a machine can take is not known here."""
    return f"Are the packages of JAX's extra installed, {extra}?"


def _platforms(seen: Surroundings) -> Iterator[Finding]:
    said = seen.platforms_text or ",".join(seen.platforms)
    for name in said.split(",") if said else ():
        given = f"{_VARIABLE}={said}, and JAX has no plugin for {name} here."
        if name in _INSTALL and name not in seen.plugins:
            silent = name == "cuda" and "cuda" not in seen.hardware
            yield Finding(
                kind="no plugin",
                given=given,
                why="JAX sees no NVIDIA GPU and goes on without a word." if silent else _AT_FIRST_USE,
                type_next=f"{_asked(_INSTALL[name][1])} Or is {name} one name too many?",
            )
        elif name == "gpu" and (missing := _missing_gpus(seen)):
            yield Finding(
                kind="no plugin",
                given=f"{_VARIABLE}={said}, and JAX has no plugin for {' or '.join(missing)} here.",
                why=f"JAX takes gpu for each of {', '.join(_GPUS)}, and wants them all. {_AT_FIRST_USE}",
                type_next=advise("environment.set", name=_VARIABLE, value=_without_gpu(said, seen)),
            )
        elif _is_unknown(name, seen):
            yield Finding(
                kind="unknown platform",
                given=f"{_VARIABLE}={said}, and there is no platform {name!r}.",
                why=f"{_why_unknown(name)} {_AT_FIRST_USE}",
                type_next=advise(
                    "environment.set", name=_VARIABLE, value=_replaced(said, name, _nearest(name, _KNOWN))
                ),
            )


def _missing_gpus(seen: Surroundings) -> list[str]:
    """What ``gpu`` stands for and has no plugin here; JAX passes over cuda where it sees no NVIDIA GPU and finds another."""
    # The plugin for oneapi is one of those whose platform is known after a start only.
    missing = [each for each in _GPUS if each not in seen.plugins and not (each == "oneapi" and seen.other_plugins)]
    return [] if missing == ["cuda"] and "cuda" not in seen.hardware else missing


def _old_name(seen: Surroundings) -> Iterator[Finding]:
    """``JAX_PLATFORM_NAME``, which JAX reads in lower case, and of which it wants the one platform that it names."""
    name = seen.platform_name.lower()
    here = [each for each in _GPUS if each in seen.plugins]
    if name == "gpu" and not here:
        why = f"There is no plugin for {' or '.join(_GPUS)} here. {_AT_FIRST_USE}"
    elif name in _INSTALL and name not in seen.plugins:
        why = f"There is no plugin for it here. {_AT_FIRST_USE}"
    elif name and _is_unknown(name, seen):
        why = f"{_why_unknown(name)} {_AT_FIRST_USE}"
    else:
        return
    near = _nearest(name, here or ["cpu"])
    new = advise("environment.set", name=_VARIABLE, value=near or (here[0] if here else "cpu"))
    yield Finding(
        kind="no plugin" if name in _KNOWN else "unknown platform",
        given=f"{_OLD}={seen.platform_name}.",
        why=why,
        type_next=f"{advise('environment.unset', name=_OLD)}; {new}   # the new name",
    )


def _is_unknown(name: str, seen: Surroundings) -> bool:
    """Whether nothing here can bring it: what the plugins of others call their platforms is known after a start only."""
    if name.strip() != name or not name:
        return True
    return name not in (*_KNOWN, *_KNOWN_TO_JAX) and not seen.other_plugins


def _why_unknown(name: str) -> str:
    if name.strip() != name or not name:
        return "JAX takes every character between two commas for the name, blanks too."
    near = _nearest(name, _KNOWN)
    meant = f" Did you mean `{near}`?" if near else ""
    return f"None of JAX's own and no plugin here has this name.{meant}"


def _nearest(name: str, known: Sequence[str]) -> str:
    """The name that was probably meant, or an empty one."""
    near = difflib.get_close_matches(name.strip().lower(), known, n=1, cutoff=_ALIKE)
    return near[0] if near else ""


def _replaced(said: str, name: str, near: str) -> str:
    """The list with the name that was meant, or without it; every name once."""
    parts = [(near if part == name else part).strip() for part in said.split(",")]
    return ",".join(dict.fromkeys(part for part in parts if part)) or '""   # lets JAX choose'


def _without_gpu(said: str, seen: Surroundings) -> str:
    here = next((each for each in _GPUS if each in seen.plugins), None)
    return _replaced(said, "gpu", here or "") if here or said != "gpu" else "cpu"
