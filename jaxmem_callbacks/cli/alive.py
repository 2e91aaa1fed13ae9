"""A call of a script's step enters; what else is alive then leaves, and a sentence on it.

A plan counts the step's arguments and its program. A script with two steps (a GAN, an actor and its critic) holds the other one's
state meanwhile, and an EMA copy or a dataset on the device lies there too.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from typing import Any

import jax

from jaxmem_callbacks.probes.live_arrays import LiveArraysProbe
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arrays import ArrayCensus, ArrayGroup
from jaxmem_callbacks.records.units import MIB, format_bytes
from jaxmem_callbacks.transforms.frameworks import framework_of

_SHARE = 0.01  # of what the step needs: less is not worth a word
_SHOWN = 2  # groups of arrays that are named


def alive_beside(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArrayCensus | None:
    """The arrays that are alive now and are no arguments of a step; None where JAX does not start on this machine."""
    framework = framework_of(args, kwargs)
    own = jax.tree.leaves((args, kwargs)) if framework is None else framework.apart((args, kwargs))[0]
    gc.collect()  # what only cycles hold is as good as gone
    try:
        return LiveArraysProbe().beside(own)
    except (RuntimeError, AssertionError):  # as JAX says that it has no backend, so nothing is alive in one
        return None


def alive_words(alive: ArrayCensus | None, when: str, step_bytes: int | None, resident_bytes: int = 0) -> str:
    """What else was alive, and how a plan counts it; empty where it is little, or counted.

    An array that the step closes over counts too: its program holds a copy of it.

    Args:
        alive: As the step was reached.
        when: When that was, such as "when the script called it".
        step_bytes: What the step needs.
        resident_bytes: What the plan counts beside the step.
    """
    if alive is None:
        return ""
    on_device: Counter[str] = Counter()
    for group in alive.groups:
        on_device.update(dict.fromkeys(group.devices, group.bytes))
    beside = max(on_device.values(), default=0) + alive.left_out_bytes
    if beside < max(MIB, _SHARE * (step_bytes or 0)) or beside <= resident_bytes:
        return ""
    return (
        f"Beside the step's arguments {format_bytes(beside)} of arrays were alive on one device {when}, the most of them "
        f"{', '.join(map(_told, alive.groups[:_SHOWN]))}. They are not counted here: what stays while the step runs, such as the "
        f"state of another step, is counted by the option "
        f"{advise('option.typed', option='resident', value=f'{math.ceil(beside / MIB)}MiB')}."
    )


def _told(group: ArrayGroup) -> str:
    place = "" if group.site.startswith("unknown") else f" from {group.site}"
    return f"{group.count} of {group.type_text}{place}"
