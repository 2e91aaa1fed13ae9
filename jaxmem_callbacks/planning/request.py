"""A plan as it is asked for: its budget, and what the search may vary."""

from __future__ import annotations

import itertools
import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from jaxmem_callbacks.environment.process import DEFAULT_FRACTION, as_fraction, fraction_given
from jaxmem_callbacks.programs.targets.target import Target
from jaxmem_callbacks.records.errors import PlanError, PolicyError, did_you_mean
from jaxmem_callbacks.records.policies import (
    SHARDING_SYNONYMS,
    OptionValue,
    ShardingRules,
    canonical_sharding,
    require_option,
)
from jaxmem_callbacks.records.units import MIB, format_bytes, is_whole, parse_bytes

# Tuned: the share of a GPU that a process can have at most; CUDA's context, its libraries and NCCL take the rest.
MOST_OF_A_GPU = 0.95
# A device has less; a number above it that has no unit is of no such unit.
_MOST_GIB = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What a plan is asked for, as `jm.plan` takes it.

    Attributes:
        target: Name of hardware that need not be there, or None.
        budget: Bytes, text, a share, or None.
        resident: What else stays in memory.
        mesh: Axes of the target's devices, where the arguments carry no shardings; None for one axis, ``fsdp``.
        search: What may be varied; None for remat, and shardings where the arguments carry none.
        beside: Pairs of a function and its arguments: other programs that must fit.
    """

    target: str | None = None
    budget: str | float | None = None
    resident: Any = ()
    mesh: Any = None
    search: Any = None
    beside: Any = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How much a step may use.

    Attributes:
        bytes: On one device, at most what it has; None where there is no limit (an attached CPU).
        limit_bytes: All that a program could use there as JAX is set up, or None.
        reason: Where both come from, one sentence.
        device_bytes: All that the device has, where JAX's allocator takes a share of it that can be set; else None.
    """

    bytes: int | None
    limit_bytes: int | None
    reason: str
    device_bytes: int | None = None

    @property
    def default_bytes(self) -> int | None:
        """What JAX's allocator takes where no share is set, and as this process is set up; None where it takes all."""
        if self.device_bytes is None or self.limit_bytes is None:
            return None
        return min(self.limit_bytes, int(self.device_bytes * DEFAULT_FRACTION))

    def share_for(self, need: int) -> float | None:
        """The share of the device to set for so many bytes; None where the default is enough.

        A share that this process has set is returned where it is enough, since another one would contradict it.
        """
        if self.device_bytes is None or self.default_bytes is None or need <= self.default_bytes:
            return None
        if self.limit_bytes is not None and need <= self.limit_bytes:
            return _gpu_share()[0]
        return min(math.ceil(100 * need / self.device_bytes) / 100, 1.0)


def budget_for(asked: str | float | None, target: Target | None) -> Budget:
    """What a step may use on one device of a target.

    Args:
        asked: Bytes, ``"72GiB"``, of which no more count than the device has; a share of what is usable there as a float in
            (0, 1], or None for all of it.
        target: Hardware that is not there, or None for the attached devices.

    Raises:
        PlanError: no size, a share outside (0, 1], or a share of an unknown whole.
    """
    usable, reason = _usable(target)
    if asked is None:
        return Budget(bytes=usable, limit_bytes=usable, reason=reason, device_bytes=_whole(target))
    size = parse_budget(asked)
    if not isinstance(size, float):
        whole = _whole(target) or usable
        if whole is not None and size > whole:
            name = "the attached device" if target is None or target.platform == "cpu" else target.name
            reason = f"all that {name} has, which is less than the {format_bytes(size)} asked for"
            return Budget(bytes=whole, limit_bytes=usable, reason=reason, device_bytes=_whole(target))
        return Budget(bytes=size, limit_bytes=usable, reason="as asked for", device_bytes=_whole(target))
    if usable is None:
        msg = f"budget={asked!r} is a share, and the whole is unknown: {reason} Type bytes instead, such as '12GiB'."
        raise PlanError(msg)
    reason = f"{size:.0%} of the usable memory: {reason}"
    return Budget(bytes=int(usable * size), limit_bytes=usable, reason=reason, device_bytes=_whole(target))


def parse_budget(asked: str | float) -> int | float:
    """Bytes as an int, or a share as a float.

    Raises:
        PlanError: neither; text without a unit may mean GiB, bytes or a share, and so may a whole number below 1 MiB.
    """
    if isinstance(asked, numbers.Real) and not isinstance(asked, bool) and not is_whole(asked):
        share = float(asked)
        if not 0 < share <= 1:
            msg = f"budget={asked!r}: a float is a share of the usable memory, above 0 and up to 1. For bytes type '72GiB'."
            raise PlanError(msg)
        return share
    try:
        size = parse_bytes(asked, unit_needed=True)  # pyright: ignore[reportArgumentType] - what it is not, it refuses
    except ValueError as error:
        msg = f"budget={asked!r}: {error} A float above 0 and up to 1, such as 0.9, is a share of the usable memory."
        raise PlanError(msg) from None
    if size <= 0:
        msg = (
            f"budget={asked!r} is nothing to plan for: expected bytes above 0, such as '72GiB', or a share such as 0.9."
        )
        raise PlanError(msg)
    if is_whole(asked) and size < MIB:
        msg = (
            f"budget={asked!r}: expected a size with its unit, since {format_bytes(size)} hold no step. Type "
            f"{size_meant(size)!r}, or a share of what is usable above 0 and up to 1, such as 0.9."
        )
        raise PlanError(msg)
    return size


def size_meant(number: float | None) -> str:
    """The size that was likely meant by a number without a unit: gibibytes as far as a device may have so many, else bytes."""
    if number is None or not 0 < number < MIB:
        return "72GiB"
    return f"{number:g}GiB" if number < _MOST_GIB else f"{number:.0f}B"


def _whole(target: Target | None) -> int | None:
    """All memory of one GPU that is not here: of what is here, and of a TPU, no more can be used than the limit."""
    return target.memory_bytes if target is not None and target.platform == "cuda" else None


def _usable(target: Target | None) -> tuple[int | None, str]:
    if target is None or target.platform == "cpu":
        return _attached()
    if target.memory_bytes is None:
        return None, f"the memory of {target.name} is not known."
    if target.platform == "tpu":
        return target.memory_bytes, f"what the compiler lets a program use on {target.name}"
    share, source = _gpu_share()
    whole = format_bytes(target.memory_bytes)
    return int(target.memory_bytes * share), f"{share:.0%} of the {whole} of {target.name}: {source}"


def _gpu_share() -> tuple[float, str]:
    """The share of a GPU that JAX's allocator takes, as this process is set up; the rest stays with CUDA, NCCL and cuDNN."""
    name, text = fraction_given(os.environ) or ("", "")
    share = as_fraction(text) or 0.0
    if 0 < share <= 1:
        return share, f"{name}={text}"
    ignored = f", and {name}={text} is no share above 0 and up to 1" if name else ""
    return DEFAULT_FRACTION, f"JAX takes as much unless set otherwise{ignored}"


def _attached() -> tuple[int | None, str]:

    import jax  # a mistyped argument is answered before JAX is loaded

    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit") or None
    if limit is None:
        return None, f"the attached {device.platform} has no limit that its runtime reports."
    return int(limit), f"bytes_limit of the attached {device.device_kind}"


# What is tried for `"sharding": True`; the last needs a second mesh axis.
SHARDINGS = tuple(SHARDING_SYNONYMS)
_KEYS = (
    "remat",
    "own_checkpoints",
    "offload",
    "microbatches",
    "chunks",
    "donate",
    "sharding",
    "batch",
    "compiler_options",
    "state_offload",
)
_BATCH_KEYS = ("multiple_of", "at_most", "argnames")
_EXAMPLE = 'search={"microbatches": [1, 2, 4], "sharding": True, "batch": {"multiple_of": 8, "at_most": 512}}'


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """Which batch sizes to look among for the largest that fits.

    Attributes:
        multiple_of: Rows come in multiples of it.
        at_most: No more rows than that; None for no bound.
        argnames: The step's arguments that hold the batch; empty to find them by name and shape.
    """

    multiple_of: int = 1
    at_most: int | None = None
    argnames: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """What a plan may vary.

    Attributes:
        remat: Whether remat is searched.
        own_checkpoints: Whether policies stand in the place of the checkpoints that the loss has already.
        offload: Whether what waits between the passes may be moved into host memory.
        chunks: Whether the head of the loss, or what a `vmap` maps, may be computed in chunks.
        microbatches: Numbers to try besides 1, ascending; ``all`` for powers of two that divide the rows.
        donate: Whether the plan may donate what the step's own word does not.
        sharding: What to try for the state, in this order; None where it was left open.
        batch: Which batch sizes to try; None leaves the batch as it is.
        compiler_options: Sets of the compiler's options to try; ``all`` for those that are known to move bytes.
        state_offload: Whether the optimizer's state may wait in host memory.
    """

    remat: bool = True
    own_checkpoints: bool = False
    offload: bool = False
    chunks: bool = False
    microbatches: tuple[int, ...] | Literal["all"] = ()
    donate: bool = False
    sharding: tuple[str | ShardingRules, ...] | None = None
    batch: BatchSizes | None = None
    compiler_options: tuple[Mapping[str, OptionValue], ...] | Literal["all"] = ()
    state_offload: bool = False


def parse_search(search: Any) -> Space:
    """What ``search=`` means.

    Args:
        search: None, or a mapping with some of the keys ``remat``, ``offload``, ``chunks``, ``microbatches``, ``donate``,
            ``sharding``, ``batch``, ``compiler_options`` and ``state_offload``.

    Raises:
        PlanError: an unknown key (with the nearest), a value that is none for its key, or offload without remat.
    """
    if search is None:
        return Space()
    given = _mapping(search, "search", _KEYS, f"Type for example {_EXAMPLE}.")
    if _switch(given, "offload", default=False) and not _switch(given, "remat", default=True):
        msg = (
            'search={"offload": True, "remat": False}: what is moved into host memory is what remat stores, so without it there '
            'is nothing to move. Type search={"offload": True}.'
        )
        raise PlanError(msg)
    return Space(
        remat=_switch(given, "remat", default=True),
        own_checkpoints=_switch(given, "own_checkpoints", default=False),
        offload=_switch(given, "offload", default=False),
        chunks=_switch(given, "chunks", default=False),
        microbatches=_microbatches(given.get("microbatches", ())),
        donate=_switch(given, "donate", default=False),
        sharding=_shardings(given.get("sharding")),
        batch=_batch(given.get("batch")),
        compiler_options=_compiler_options(given.get("compiler_options")),
        state_offload=_switch(given, "state_offload", default=False),
    )


def _mapping(value: Any, what: str, known: tuple[str, ...], example: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        msg = f"{what}={value!r}: expected a mapping with some of the keys {', '.join(known)}. {example}"
        raise PlanError(msg)
    given = cast("Mapping[Any, Any]", value)
    for key in given:
        if key not in known:
            msg = f"{what} has the key {key!r}.{did_you_mean(str(key), known)} Expected some of: {', '.join(known)}. {example}"
            raise PlanError(msg)
    return given


def _switch(given: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = given.get(key, default)
    if not isinstance(value, bool):
        msg = f'search["{key}"]={value!r}: expected True or False. Type search={{"{key}": {not default}}}, or leave it out.'
        raise PlanError(msg)
    return value


def _microbatches(value: Any) -> tuple[int, ...] | Literal["all"]:
    if value is True:
        return "all"
    if value is False:
        return ()
    numbers = [value] if isinstance(value, int) else list(value) if isinstance(value, list | tuple) else [None]
    if any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in numbers):
        msg = (
            f'search["microbatches"]={value!r}: expected whole numbers of at least 1, or True for every power of two that '
            'divides the rows. Type search={"microbatches": [1, 2, 4]}.'
        )
        raise PlanError(msg)
    return tuple(sorted({each for each in cast("list[int]", numbers) if each > 1}))


def _shardings(value: Any) -> tuple[str | ShardingRules, ...] | None:
    if value is None or value is False:
        return None
    if value is True:
        return SHARDINGS
    words = [value] if isinstance(value, str | Mapping) else value
    try:
        found = tuple(dict.fromkeys(canonical_sharding(word) for word in words))
    except (PolicyError, TypeError) as error:
        expected = str(error) if isinstance(error, PolicyError) else "expected names or rules."
        msg = f'search["sharding"]={value!r}: {expected} Or True for {", ".join(SHARDINGS)}.'
        raise PlanError(msg) from None
    return found or None


def _compiler_options(value: Any) -> tuple[dict[str, OptionValue], ...] | Literal["all"]:
    """Each choice of one value for each option."""
    if value is True:
        return "all"
    if value is None or value is False:
        return ()
    try:
        lists = {name: list(each) if isinstance(each, list | tuple) else [each] for name, each in dict(value).items()}
        for name, values in lists.items():
            for each in values:
                require_option(name, each)
    except (PolicyError, TypeError, ValueError) as error:
        words = f"{error} " if isinstance(error, PolicyError) else ""
        msg = (
            f'search["compiler_options"]={value!r}: {words}Expected lists of values by option, or True for those that are known '
            'to move bytes. Type search={"compiler_options": {"xla_gpu_enable_latency_hiding_scheduler": [False]}}.'
        )
        raise PlanError(msg) from None
    return tuple(dict(zip(lists, each, strict=True)) for each in itertools.product(*lists.values())) if lists else ()


def _batch(value: Any) -> BatchSizes | None:
    if value is None or value is False:
        return None
    if value == "largest" or value is True:
        return BatchSizes()
    example = 'Type search={"batch": "largest"}, or search={"batch": {"multiple_of": 8, "at_most": 512}}.'
    given = _mapping(value, 'search["batch"]', _BATCH_KEYS, example)
    for key in ("multiple_of", "at_most"):
        number = given.get(key, 1)
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            msg = f'search["batch"]["{key}"]={number!r}: expected a whole number of rows, at least 1. {example}'
            raise PlanError(msg)
    found = BatchSizes(
        multiple_of=given.get("multiple_of", 1),
        at_most=given.get("at_most"),
        argnames=_names(given.get("argnames", ()), example),
    )
    if found.at_most is not None and found.at_most < found.multiple_of:
        msg = (
            f'search["batch"]: at_most={found.at_most} is below multiple_of={found.multiple_of}, so no batch is left. '
            f"Expected at_most of at least {found.multiple_of}. {example}"
        )
        raise PlanError(msg)
    return found


def _names(value: Any, example: str) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in cast("list[Any]", names)):
        msg = f'search["batch"]["argnames"]={value!r}: expected names of the step\'s arguments, such as ["images"]. {example}'
        raise PlanError(msg)
    return tuple(cast("list[str]", names))
