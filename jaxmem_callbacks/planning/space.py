"""``search=`` as the user wrote it enters; what a plan may vary leaves, or an error that says what to type.

Every key is an axis. One that is not named stays as the step has it, but for remat, which is always searched unless told not
to, and for sharding, which is searched for several devices whose arguments lie nowhere yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from jaxmem_callbacks.records.errors import PlanError, PolicyError, did_you_mean
from jaxmem_callbacks.records.policies import SHARDING_SYNONYMS, ShardingRules, canonical_sharding

# What is tried for `"sharding": True`; the last needs a second mesh axis.
SHARDINGS = tuple(SHARDING_SYNONYMS)
_KEYS = ("remat", "own_checkpoints", "offload", "microbatches", "donate", "sharding", "batch")
_BATCH_KEYS = ("multiple_of", "at_most", "argnames")
_EXAMPLE = 'search={"microbatches": [1, 2, 4], "sharding": True, "batch": {"multiple_of": 8, "at_most": 512}}'


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """Which batch sizes to look among for the largest that fits.

    Attributes:
        multiple_of: Rows come in multiples of it.
        at_most: No more rows than that; None for no bound.
        argnames: The step's arguments that hold the batch; empty to tell them by name and shape.
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
        microbatches: Numbers to try besides 1, ascending; ``all`` for powers of two that divide the rows.
        donate: Whether the plan may donate what the step's own word does not.
        sharding: What to try for the state, in this order; None where nothing was said.
        batch: Which batch sizes to try; None leaves the batch as it is.
    """

    remat: bool = True
    own_checkpoints: bool = False
    offload: bool = False
    microbatches: tuple[int, ...] | Literal["all"] = ()
    donate: bool = False
    sharding: tuple[str | ShardingRules, ...] | None = None
    batch: BatchSizes | None = None


def parse_search(said: Any) -> Space:
    """What ``search=`` means.

    Args:
        said: None, or a mapping with some of the keys ``remat``, ``offload``, ``microbatches``, ``donate``, ``sharding``
            and ``batch``.

    Raises:
        PlanError: an unknown key (with the nearest), a value that is none for its key, or offload without remat.
    """
    if said is None:
        return Space()
    given = _mapping(said, "search", _KEYS, f"Type for example {_EXAMPLE}.")
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
        microbatches=_microbatches(given.get("microbatches", ())),
        donate=_switch(given, "donate", default=False),
        sharding=_shardings(given.get("sharding")),
        batch=_batch(given.get("batch")),
    )


def _mapping(said: Any, what: str, known: tuple[str, ...], example: str) -> Mapping[str, Any]:
    if not isinstance(said, Mapping):
        msg = f"{what}={said!r}: expected a mapping with some of the keys {', '.join(known)}. {example}"
        raise PlanError(msg)
    given = cast("Mapping[Any, Any]", said)
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
        told = str(error) if isinstance(error, PolicyError) else "expected names or rules."
        msg = f'search["sharding"]={value!r}: {told} Or True for {", ".join(SHARDINGS)}.'
        raise PlanError(msg) from None
    return found or None


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
