"""Settings of a process that are wrong, alone or together, each with what to set instead."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmem_callbacks.environment.process import (
    ALLOCATOR,
    ALLOCATORS,
    COLLECTIVE_POOL,
    DEFAULT_FRACTION,
    FRACTION,
    HOST_LIMIT,
    HOST_PREALLOCATE,
    OLD_FRACTION,
    OPTIONS,
    PLATFORM_WAS_BFC,
    PREALLOCATE,
    SWITCHES,
    TENSORFLOW_ALLOCATOR,
    UNIFIED,
    as_fraction,
    as_preallocate,
    as_switch,
    as_whole,
    fraction_given,
    nearest,
    version_numbers,
)
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.environment import Finding, ProcessFacts
from jaxmem_callbacks.records.errors import did_you_mean
from jaxmem_callbacks.records.presets import CUDA_ALLOCATORS

_MOST = 0.95
"""Above this share the pool leaves too little of any GPU to the CUDA context, cuBLAS, cuDNN, NCCL and CUDA graphs."""
_OPTION = "jax_pjrt_client_create_options"
_CREATED = ("default", "bfc", "cuda_async")
_HIDDEN = {"cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")}
_NONE_VISIBLE = ("", "-1")


@dataclass(frozen=True, slots=True)
class Effective:
    """The settings that a GPU's client gets in the end; None for one that JAX cannot read.

    Attributes:
        allocator: Its name, in lower case; ``bfc`` for one that silently runs the default pool.
        preallocate: Whether the pool is taken at the first allocation.
        fraction: The share of the GPU's memory.
        collective_bytes: The pool for collectives; 0 for none.
        sources: Key of `OPTIONS` to what sets it, such as ``XLA_PYTHON_CLIENT_ALLOCATOR=bfc``; without what nothing sets.
    """

    allocator: str
    preallocate: bool
    fraction: float | None
    collective_bytes: int | None
    sources: dict[str, str]


def effective(seen: ProcessFacts) -> Effective:
    """What JAX makes of all that is set."""
    variables, options = seen.variables, {} if seen.options_are_text else seen.options
    name, text = fraction_given(variables) or (FRACTION, "")
    texts = {key: (variable, variables.get(variable, "")) for key, variable in OPTIONS.items()}
    texts["memory_fraction"] = (name, text)
    sources = {key: f"{variable}={value}" for key, (variable, value) in texts.items() if value}
    sources |= {key: f"{_OPTION}[{key!r}]={value!r}" for key, value in seen.options.items()}
    allocator = str(seen.options.get("allocator") or variables.get(ALLOCATOR) or "default").lower()
    if allocator == "platform" and version_numbers(seen.jaxlib or "")[:3] in PLATFORM_WAS_BFC:
        allocator = "bfc"
    preallocate = options.get("preallocate", as_preallocate(variables.get(PREALLOCATE, "")))
    pool = variables.get(COLLECTIVE_POOL, "")
    return Effective(
        allocator=allocator,
        preallocate=bool(preallocate),
        fraction=_number(options.get("memory_fraction", as_fraction(text) if text else DEFAULT_FRACTION)),
        collective_bytes=options.get("collective_memory_size", (as_whole(pool) or 0) * 2**20 if pool else 0),
        sources=sources,
    )


def combination_findings(seen: ProcessFacts) -> tuple[Finding, ...]:
    """What is wrong with settings that are each right alone; nothing where JAX stops at two fractions and looks no further."""
    if seen.variables.get(FRACTION) and seen.variables.get(OLD_FRACTION):
        return ()
    now = effective(seen)
    return (*_whole_device(now, seen), *_without_a_pool(now), *_oversubscribed(now, seen))


def hidden_findings(seen: ProcessFacts) -> tuple[Finding, ...]:
    """GPUs that are hidden although a setting names them."""
    return tuple(_hidden(seen))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_unified(seen: ProcessFacts) -> bool:
    return bool(as_switch(seen.variables.get(UNIFIED, "")))


def _name_of(now: Effective, key: str, variable: str) -> str:
    """The variable as one types it: of the fraction the one that was used."""
    source = now.sources.get(key, "").partition("=")[0]
    return variable if not source or source.startswith(_OPTION) else source


def _whole_device(now: Effective, seen: ProcessFacts) -> Iterator[Finding]:
    """A pool that leaves nothing to what takes its memory outside of it."""
    share = now.fraction
    if share is None or not _MOST < share <= 1 or _is_unified(seen):
        return
    if not now.preallocate or now.allocator not in _CREATED:
        return
    how = now.sources.get("preallocate", "preallocation, JAX's default")
    where, name = now.sources["memory_fraction"], _name_of(now, "memory_fraction", FRACTION)
    in_options = where.startswith(_OPTION)
    yield Finding(
        kind="nothing left for CUDA",
        given=f"{where} with {how}.",
        why=(
            "The pool takes all of the GPU at the first allocation. The CUDA context, cuBLAS, cuDNN, NCCL and CUDA graphs take "
            "their memory outside of it and then fail, or the pool comes out smaller than was asked for."
        ),
        type_next=advise("environment.option", options={"memory_fraction": 0.9})
        if in_options
        else advise("environment.set", name=name, value="0.9"),
    )


def _without_a_pool(now: Effective) -> Iterator[Finding]:
    """Settings of a pool beside an allocator that has none."""
    if now.allocator != "platform":
        return
    useless = [
        (key, variable)
        for key, variable, is_set in (
            ("preallocate", PREALLOCATE, now.preallocate),
            ("memory_fraction", FRACTION, True),
            ("collective_memory_size", COLLECTIVE_POOL, bool(now.collective_bytes)),
        )
        if key in now.sources and is_set
    ]
    if not useless:
        return
    given = ", ".join(now.sources[key] for key, _ in useless)
    variables = [_name_of(now, key, variable) for key, variable in useless if not now.sources[key].startswith(_OPTION)]
    options = [key for key, _ in useless if now.sources[key].startswith(_OPTION)]
    lines = [advise("environment.unset", name=name) for name in variables]
    lines += [f"leave {', '.join(options)} out of {_OPTION}"] if options else []
    yield Finding(
        kind="no pool",
        given=f"{now.sources['allocator']} beside {given}.",
        why=(
            "The platform allocator takes every buffer from the driver. It has no pool, so that these settings change nothing; "
            "without it there is one."
        ),
        type_next="; ".join(lines),
    )


def _oversubscribed(now: Effective, seen: ProcessFacts) -> Iterator[Finding]:
    """More than the GPU's memory, which only a pool of unified memory can give."""
    share = now.fraction
    if share is None or share <= 1 or not _is_unified(seen) or now.allocator in ("default", "bfc"):
        return
    yield Finding(
        kind="no unified memory",
        given=f"{now.sources['memory_fraction']} with {UNIFIED}={seen.variables[UNIFIED]} beside {now.sources['allocator']}.",
        why="Only the default pool (BFC) is made of unified memory: this allocator cannot give more than the GPU has.",
        type_next=advise("environment.set", name=ALLOCATOR, value="bfc"),
    )


def _hidden(seen: ProcessFacts) -> Iterator[Finding]:
    """No GPU is visible, and yet a platform or a setting of its memory is named."""
    about = [name for name in (ALLOCATOR, PREALLOCATE, FRACTION, COLLECTIVE_POOL) if seen.variables.get(name)]
    for platform, names in _HIDDEN.items():
        named = [f"the platform {platform} in JAX_PLATFORMS"] if platform in seen.platforms else []
        wanted = named or (about if platform in seen.plugins and not seen.platforms else [])
        for name in names:
            if wanted and seen.variables.get(name) in _NONE_VISIBLE:
                yield Finding(
                    kind="GPU hidden",
                    given=f"{name}={seen.variables[name]} hides every GPU, beside {wanted[0]}.",
                    why="JAX then finds none: it fails where the platform is named, and else runs on the CPU without a word.",
                    type_next=advise("environment.unset", name=name),
                )


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


def platform_findings(seen: ProcessFacts) -> tuple[Finding, ...]:
    """What is wrong with the platforms: hardware without a plugin, and names that cannot start."""
    if seen.jax is None:
        return ()
    return (*_missing_plugin(seen), *_platforms(seen), *_old_name(seen))


def _missing_plugin(seen: ProcessFacts) -> Iterator[Finding]:
    for platform in seen.hardware:
        if not seen.platforms and platform in _INSTALL and platform not in seen.plugins:
            what, extra = _INSTALL[platform]
            why = "JAX has no plugin for it and runs on the CPU."
            yield Finding(kind="no plugin", given=f"This machine has {what}.", why=why, type_next=_asked(extra))


def _asked(extra: str) -> str:
    """What may be missing, as a question: which packages a machine can take is not known here."""
    return f"Are the packages of JAX's extra installed, {extra}?"


def _platforms(seen: ProcessFacts) -> Iterator[Finding]:
    listed = seen.platforms_text or ",".join(seen.platforms)
    for name in listed.split(",") if listed else ():
        given = f"{_VARIABLE}={listed}, and JAX has no plugin for {name} here."
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
                given=f"{_VARIABLE}={listed}, and JAX has no plugin for {' or '.join(missing)} here.",
                why=f"JAX takes gpu for each of {', '.join(_GPUS)}, and wants them all. {_AT_FIRST_USE}",
                type_next=advise("environment.set", name=_VARIABLE, value=_without_gpu(listed, seen)),
            )
        elif _is_unknown(name, seen):
            yield Finding(
                kind="unknown platform",
                given=f"{_VARIABLE}={listed}, and there is no platform {name!r}.",
                why=f"{_why_unknown(name)} {_AT_FIRST_USE}",
                type_next=advise(
                    "environment.set", name=_VARIABLE, value=_replaced(listed, name, _nearest(name, _KNOWN))
                ),
            )


def _missing_gpus(seen: ProcessFacts) -> list[str]:
    """What ``gpu`` stands for and has no plugin here; JAX passes over cuda where it sees no NVIDIA GPU and finds another."""
    # The plugin for oneapi is one of those whose platform is known after a start only.
    missing = [each for each in _GPUS if each not in seen.plugins and not (each == "oneapi" and seen.other_plugins)]
    return [] if missing == ["cuda"] and "cuda" not in seen.hardware else missing


def _old_name(seen: ProcessFacts) -> Iterator[Finding]:
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


def _is_unknown(name: str, seen: ProcessFacts) -> bool:
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


def _replaced(listed: str, name: str, near: str) -> str:
    """The list with the name that was meant, or without it; every name once."""
    parts = [(near if part == name else part).strip() for part in listed.split(",")]
    return ",".join(dict.fromkeys(part for part in parts if part)) or '""   # lets JAX choose'


def _without_gpu(listed: str, seen: ProcessFacts) -> str:
    here = next((each for each in _GPUS if each in seen.plugins), None)
    return _replaced(listed, "gpu", here or "") if here or listed != "gpu" else "cpu"


_ON_THE_CPU = "JAX then logs an error, loses the GPU plugin and runs on the CPU, unless JAX_PLATFORMS names the GPU."
_MEANT_FALSE = {"false", "no", "off", "n", "f", "none", "disable", "disabled", "0.0"}
_UPDATE_MODE = "xla_gpu_command_buffer_update_mode="
_PERCENT = 100
_OPTIONS_AS_VALUES = {"memory_fraction": 0.9, "preallocate": False}
_EXAMPLE = advise("environment.set", name="JAX_PJRT_CLIENT_CREATE_OPTIONS", value='"allocator:bfc"')


def settings_findings(seen: ProcessFacts) -> tuple[Finding, ...]:
    """What is wrong with the settings themselves, whatever the machine has."""
    return tuple(finding for check in _CHECKS for finding in check(seen))


def findings(seen: ProcessFacts) -> tuple[Finding, ...]:
    """What is wrong with the settings, alone and together, and with how they meet this machine."""
    machine = (*platform_findings(seen), *hidden_findings(seen), *_other_version(seen))
    return (*settings_findings(seen), *combination_findings(seen), *machine)


def _both_fractions(seen: ProcessFacts) -> Iterator[Finding]:
    if seen.variables.get(FRACTION) and seen.variables.get(OLD_FRACTION):
        yield Finding(
            kind="both fractions",
            given=f"{FRACTION}={seen.variables[FRACTION]} and {OLD_FRACTION}={seen.variables[OLD_FRACTION]} are both set.",
            why=f"JAX takes one, and fails on two even where they agree. {_ON_THE_CPU}",
            type_next=f"{advise('environment.unset', name=OLD_FRACTION)}   # the old name",
        )


def _fraction(seen: ProcessFacts) -> Iterator[Finding]:
    given_by = fraction_given(seen.variables)
    if given_by is None:
        return
    name, text = given_by
    share = as_fraction(text)
    bare = as_fraction(text.strip().removesuffix("%"))
    example = bare / _PERCENT if bare is not None and 1 < bare <= _PERCENT else 0.9
    if share is None:
        why = f"It is read as a number, and this is none. {_ON_THE_CPU}"
        yield Finding(
            kind="no fraction",
            given=f"{name}={text}.",
            why=why,
            type_next=advise("environment.set", name=name, value=f"{example:g}"),
        )
    elif not 0 < share <= 1 and not (share > 1 and as_switch(seen.variables.get(UNIFIED, ""))):
        why = f"It is a share of the GPU's memory: above 0 and up to 1 (above 1 only with {UNIFIED}=1)."
        given = f"{name}={text} is out of range."
        yield Finding(
            kind="fraction out of range",
            given=given,
            why=why,
            type_next=advise("environment.set", name=name, value=f"{example:g}"),
        )


def _allocator(seen: ProcessFacts) -> Iterator[Finding]:
    text = seen.variables.get(ALLOCATOR, "")
    name, given = text.lower(), f"{ALLOCATOR}={text}."
    if not text:
        return
    here = version_numbers(seen.jaxlib or "")
    known = [each for each, since in ALLOCATORS.items() if not here or here >= since]
    if name not in ALLOCATORS:
        why = f"There is no such allocator.{did_you_mean(name, known)} {_ON_THE_CPU}"
        near = did_you_mean(name, known).partition("`")[2].partition("`")[0] or "default"
        yield Finding(
            kind="unknown allocator",
            given=given,
            why=why,
            type_next=advise("environment.set", name=ALLOCATOR, value=near),
        )
    elif name not in known:
        since = ".".join(map(str, ALLOCATORS[name]))
        why = f"It exists since jaxlib {since}, and this is {seen.jaxlib}; here are: {', '.join(known)}. {_ON_THE_CPU}"
        yield Finding(
            kind="allocator of a later version",
            given=given,
            why=why,
            type_next=advise("environment.unset", name=ALLOCATOR),
        )
    elif name == "platform" and here[:3] in PLATFORM_WAS_BFC:
        why = "In jaxlib 0.10.1 and 0.10.2 it silently runs the default pool (BFC); 0.11 runs it again."
        nexts = f"{advise('environment.unset', name=ALLOCATOR)}   # or take jax 0.11 or newer"
        yield Finding(kind="platform that is not", given=given, why=why, type_next=nexts)
    elif name in CUDA_ALLOCATORS and "rocm" in seen.plugins and "cuda" not in seen.plugins:
        why = "It is compiled for NVIDIA GPUs only, and the plugin here is ROCm's."
        yield Finding(
            kind="allocator of CUDA",
            given=given,
            why=why,
            type_next=advise("environment.set", name=ALLOCATOR, value="bfc"),
        )


def _preallocate(seen: ProcessFacts) -> Iterator[Finding]:
    text = seen.variables.get(PREALLOCATE, "")
    if as_preallocate(text) and text.strip().lower() in {*_MEANT_FALSE, "0"}:
        yield Finding(
            kind="false that is true",
            given=f"{PREALLOCATE}={text} counts as true.",
            why="JAX takes false, False and 0 for false and every other text for true: the GPU's pool is taken whole.",
            type_next=advise("environment.set", name=PREALLOCATE, value="false"),
        )


def _whole_numbers(seen: ProcessFacts) -> Iterator[Finding]:
    for name in (COLLECTIVE_POOL, *SWITCHES):
        text = seen.variables.get(name, "")
        number = as_whole(text) if text else 0
        if number is None:
            example, what = ("512", "a number of MiB") if name == COLLECTIVE_POOL else ("1", "0 or 1")
            why = f"It is read as a whole number, {what}. {_ON_THE_CPU}"
            yield Finding(
                kind="no whole number",
                given=f"{name}={text}.",
                why=why,
                type_next=advise("environment.set", name=name, value=example),
            )
        elif number < 0 and name == COLLECTIVE_POOL:
            why = "It is the size of a pool in MiB, and no size is negative."
            yield Finding(
                kind="negative size",
                given=f"{name}={text}.",
                why=why,
                type_next=advise("environment.set", name=name, value="512"),
            )


def _switches_of_xla(seen: ProcessFacts) -> Iterator[Finding]:
    """Variables that XLA reads itself: it logs what it cannot read and takes its default."""
    for name in (UNIFIED, HOST_PREALLOCATE):
        text = seen.variables.get(name, "")
        if text and as_switch(text) is None:
            why = "XLA reads 0, 1, true and false. It logs an error for any other text, and takes false."
            yield Finding(
                kind="no switch",
                given=f"{name}={text}.",
                why=why,
                type_next=advise("environment.set", name=name, value="1"),
            )
    text = seen.variables.get(HOST_LIMIT, "")
    if text and (as_whole(text) is None or int(text) <= 0):
        why = "It is read as a whole number of GB above 0, the most of pinned host memory. XLA takes 64 where it cannot read it."
        yield Finding(
            kind="no number of GB",
            given=f"{HOST_LIMIT}={text}.",
            why=why,
            type_next=advise("environment.set", name=HOST_LIMIT, value="64"),
        )


def _values_of_options(seen: ProcessFacts) -> Iterator[Finding]:
    """Wrong values of the options themselves, where they came as values."""
    where = "jax_pjrt_client_create_options"
    wants: dict[str, tuple[Callable[[Any], bool], str, Any]] = {
        "allocator": (lambda value: str(value).lower() in ALLOCATORS, f"one of {', '.join(ALLOCATORS)}", "bfc"),
        "memory_fraction": (
            lambda value: _is_number(value) and (0 < value <= 1 or bool(as_switch(seen.variables.get(UNIFIED, "")))),
            "a share above 0 and up to 1",
            0.9,
        ),
        "preallocate": (lambda value: isinstance(value, bool), "True or False", False),
        "collective_memory_size": (lambda value: _is_number(value) and value == int(value) >= 0, "bytes", 2**29),
    }
    for key, value in seen.options.items():
        fits, form, example = wants[key]
        if key == "allocator" or not seen.options_are_text:
            if fits(value):
                continue
            yield Finding(
                kind="value of an option",
                given=f"{where} has {key}={value!r}.",
                why=f"The GPU plugin wants {form}. {_ON_THE_CPU}",
                type_next=f"{advise('environment.option', options={key: example})}   # before the first use",
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _tensorflow_allocator(seen: ProcessFacts) -> Iterator[Finding]:
    text = seen.variables.get(TENSORFLOW_ALLOCATOR, "")
    allocator = seen.options.get("allocator") or seen.variables.get(ALLOCATOR, "")
    if text == "cuda_malloc_async" and str(allocator).lower() != "cuda_async":
        yield Finding(
            kind="read by nothing",
            given=f"{TENSORFLOW_ALLOCATOR}={text} changes nothing.",
            why="JAX's documents and its out-of-memory texts name it, but only TensorFlow reads it.",
            type_next=(
                f"{advise('environment.set', name=ALLOCATOR, value='cuda_async')}"
                f"   # and {advise('environment.unset', name=TENSORFLOW_ALLOCATOR)}, unless TensorFlow is to obey it"
            ),
        )


def _unread(seen: ProcessFacts) -> Iterator[Finding]:
    for name in seen.unread:
        meant, quoted = nearest(name), f'"${name}"'
        yield Finding(
            kind="read by nothing",
            given=f"{name} is set.",
            why=f"Nothing in JAX reads it. Did you mean `{meant}`?",
            type_next=f"{advise('environment.set', name=meant, value=quoted)}; {advise('environment.unset', name=name)}",
        )


def _unreadable_options(seen: ProcessFacts) -> Iterator[Finding]:
    for part in seen.unreadable_options:
        halves = part.count(":") == 1
        hands = f"JAX hands the plugin an option called {part.partition(':')[0]}, which it does not know."
        yield Finding(
            kind="options that JAX cannot read",
            given=f"jax_pjrt_client_create_options has the part {part!r}.",
            why=(
                "It is read as key:value;key:value, without blanks, quotes or braces. "
                f"{hands if halves else 'JAX fails at the first use of a GPU or TPU.'}"
            ),
            type_next=_EXAMPLE,
        )


def _options(seen: ProcessFacts) -> Iterator[Finding]:
    where = "jax_pjrt_client_create_options"
    texts = sorted(key for key in seen.options if key != "allocator")
    if seen.options_are_text and texts:
        yield Finding(
            kind="options as text",
            given=f"{where} has {', '.join(texts)} as text.",
            why=f"A text's values stay texts, and the GPU plugin wants numbers and booleans: it refuses them. {_ON_THE_CPU}",
            type_next=f"{advise('environment.option', options=_OPTIONS_AS_VALUES)}   # before the first use",
        )
    judged = {key: name for key, name in OPTIONS.items() if key == "allocator" or not seen.options_are_text}
    for key, variable in judged.items():
        given_by = fraction_given(seen.variables) if variable == FRACTION else None
        name, text = given_by or (variable, seen.variables.get(variable, ""))
        if key in seen.options and text and not same(variable, text, seen.options[key]):
            yield Finding(
                kind="overridden",
                given=f"{name}={text}, and {where} has {key}={seen.options[key]!r}.",
                why="JAX hands the option over last: the variable changes nothing.",
                type_next=f"{advise('environment.unset', name=name)}   # or leave {key} out of the option",
            )


def _replaced_by_vmm(seen: ProcessFacts) -> Iterator[Finding]:
    for flag in seen.memory_flags:
        _, found, mode = flag.partition(_UPDATE_MODE)
        allocator = seen.variables.get(ALLOCATOR, "").lower()
        if found and mode.upper() != "ALWAYS_UPDATE" and allocator != "vmm":
            yield Finding(
                kind="allocator replaced",
                given=f"XLA_FLAGS has {flag}.",
                why="With it XLA takes the allocator vmm, whatever else is set; vmm reports no statistics.",
                type_next=f"{advise('environment.set', name=ALLOCATOR, value='vmm')}   # explicitly, or leave the flag out",
            )


def _other_version(seen: ProcessFacts) -> Iterator[Finding]:
    plugin = seen.plugins.get("cuda", "")  # ROCm's are released on a schedule of their own, and not compared
    if plugin and seen.jaxlib is not None and version_numbers(plugin.partition(" ")[2]) != version_numbers(seen.jaxlib):
        yield Finding(
            kind="plugin of another version",
            given=f"{plugin} beside jaxlib {seen.jaxlib}.",
            why="JAX warns once and uses none of its parts whose version is not jaxlib's.",
            type_next=f"Is the plugin of this JAX installed? Its extra is jax[cuda12]=={seen.jax}.",
        )


def same(variable: str, text: str, value: Any) -> bool:
    """Whether a variable's text means to JAX the same as the value: a name, a share, a switch, or bytes of a pool."""
    if variable == ALLOCATOR:
        return text.lower() == str(value).lower()
    if variable == PREALLOCATE:
        return as_preallocate(text) == value
    number = as_fraction(text) if variable in (FRACTION, OLD_FRACTION) else as_whole(text)
    if number is None:
        return False
    return number == value if variable in (FRACTION, OLD_FRACTION) else number * 2**20 == value


_CHECKS: tuple[Callable[[ProcessFacts], Iterator[Finding]], ...] = (
    _both_fractions,
    _fraction,
    _allocator,
    _preallocate,
    _whole_numbers,
    _switches_of_xla,
    _values_of_options,
    _tensorflow_allocator,
    _unread,
    _unreadable_options,
    _options,
    _replaced_by_vmm,
)
