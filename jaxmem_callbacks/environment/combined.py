"""The settings of XLA's client taken together: findings for combinations that are wrong.

Each setting is taken as JAX has it in the end: the option, else the variable, else the default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxmem_callbacks.environment.variables import (
    ALLOCATOR,
    COLLECTIVE_POOL,
    DEFAULT_FRACTION,
    FRACTION,
    OLD_FRACTION,
    OPTIONS,
    PLATFORM_WAS_BFC,
    PREALLOCATE,
    UNIFIED,
    as_fraction,
    as_preallocate,
    as_switch,
    as_whole,
    fraction_said,
    version_numbers,
)
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.environment import Finding, Surroundings

_MOST = 0.95
"""Above this share the pool leaves too little of any GPU to the CUDA context, cuBLAS, cuDNN, NCCL and CUDA graphs."""
_OPTION = "jax_pjrt_client_create_options"
_CREATED = ("default", "bfc", "cuda_async")
_HIDDEN = {"cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")}
_NONE_VISIBLE = ("", "-1")


@dataclass(frozen=True, slots=True)
class Effective:
    """The settings that a GPU's client is told in the end; None for one that JAX cannot read.

    Attributes:
        allocator: Its name, in lower case; ``bfc`` for one that silently runs the default pool.
        preallocate: Whether the pool is taken at the first allocation.
        fraction: The share of the GPU's memory.
        collective_bytes: The pool for collectives; 0 for none.
        said: Key of `OPTIONS` to what says it, such as ``XLA_PYTHON_CLIENT_ALLOCATOR=bfc``; without what nobody says.
    """

    allocator: str
    preallocate: bool
    fraction: float | None
    collective_bytes: int | None
    said: dict[str, str]


def effective(seen: Surroundings) -> Effective:
    """What JAX makes of all that was said."""
    variables, options = seen.variables, {} if seen.options_are_text else seen.options
    name, text = fraction_said(variables) or (FRACTION, "")
    texts = {key: (variable, variables.get(variable, "")) for key, variable in OPTIONS.items()}
    texts["memory_fraction"] = (name, text)
    said = {key: f"{variable}={value}" for key, (variable, value) in texts.items() if value}
    said |= {key: f"{_OPTION}[{key!r}]={value!r}" for key, value in seen.options.items()}
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
        said=said,
    )


def combination_findings(seen: Surroundings) -> tuple[Finding, ...]:
    """What is wrong with settings that are each right alone; nothing where JAX stops at two fractions and looks no further."""
    if seen.variables.get(FRACTION) and seen.variables.get(OLD_FRACTION):
        return ()
    now = effective(seen)
    return (*_whole_device(now, seen), *_without_a_pool(now), *_oversubscribed(now, seen))


def hidden_findings(seen: Surroundings) -> tuple[Finding, ...]:
    """GPUs that are hidden although something is said of them."""
    return tuple(_hidden(seen))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_unified(seen: Surroundings) -> bool:
    return bool(as_switch(seen.variables.get(UNIFIED, "")))


def _name_of(now: Effective, key: str, variable: str) -> str:
    """The variable as one types it: of the fraction the one that was used."""
    said = now.said.get(key, "").partition("=")[0]
    return variable if not said or said.startswith(_OPTION) else said


def _whole_device(now: Effective, seen: Surroundings) -> Iterator[Finding]:
    """A pool that leaves nothing to what takes its memory outside of it."""
    share = now.fraction
    if share is None or not _MOST < share <= 1 or _is_unified(seen):
        return
    if not now.preallocate or now.allocator not in _CREATED:
        return
    how = now.said.get("preallocate", "preallocation, JAX's default")
    where, name = now.said["memory_fraction"], _name_of(now, "memory_fraction", FRACTION)
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
        for key, variable, is_said in (
            ("preallocate", PREALLOCATE, now.preallocate),
            ("memory_fraction", FRACTION, True),
            ("collective_memory_size", COLLECTIVE_POOL, bool(now.collective_bytes)),
        )
        if key in now.said and is_said
    ]
    if not useless:
        return
    given = ", ".join(now.said[key] for key, _ in useless)
    variables = [_name_of(now, key, variable) for key, variable in useless if not now.said[key].startswith(_OPTION)]
    options = [key for key, _ in useless if now.said[key].startswith(_OPTION)]
    lines = [advise("environment.unset", name=name) for name in variables]
    lines += [f"leave {', '.join(options)} out of {_OPTION}"] if options else []
    yield Finding(
        kind="no pool",
        given=f"{now.said['allocator']} beside {given}.",
        why=(
            "The platform allocator takes every buffer from the driver. It has no pool, so that these settings change nothing; "
            "without it there is one."
        ),
        type_next="; ".join(lines),
    )


def _oversubscribed(now: Effective, seen: Surroundings) -> Iterator[Finding]:
    """More than the GPU's memory, which only a pool of unified memory can give."""
    share = now.fraction
    if share is None or share <= 1 or not _is_unified(seen) or now.allocator in ("default", "bfc"):
        return
    yield Finding(
        kind="no unified memory",
        given=f"{now.said['memory_fraction']} with {UNIFIED}={seen.variables[UNIFIED]} beside {now.said['allocator']}.",
        why="Only the default pool (BFC) is made of unified memory: this allocator cannot give more than the GPU has.",
        type_next=advise("environment.set", name=ALLOCATOR, value="bfc"),
    )


def _hidden(seen: Surroundings) -> Iterator[Finding]:
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
