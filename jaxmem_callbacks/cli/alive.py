"""What else is alive when a script calls its step, and a sentence on it.

A plan counts the step's arguments and its program. A script with two steps (a GAN, an actor and its critic) holds the other one's
state meanwhile, and an EMA copy or a dataset on the device lies there too.
"""

from __future__ import annotations

import gc
import inspect
import math
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem_callbacks.probes.live_arrays import LiveArraysProbe
from jaxmem_callbacks.programs.steps.leaves import named_arguments
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arrays import ArrayCensus, ArrayGroup
from jaxmem_callbacks.records.units import MIB, format_bytes
from jaxmem_callbacks.transforms.frameworks import framework_of
from jaxmem_callbacks.transforms.kinds import is_batch_name

_NOT_THE_SCRIPT = {"jaxmem_callbacks", "jax", "contextlib", "runpy"}
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


@dataclass(frozen=True, slots=True)
class Copy:
    """As many arrays of the same shapes as an argument has, alive besides it.

    Attributes:
        argument: The argument's name in the step.
        bytes: Their size on one device.
        name: The script's variable that holds them; empty where no variable does.
        is_sole: Whether the function that calls the step made the variable, and nothing else seen holds its arrays.
    """

    argument: str
    bytes: int
    name: str
    is_sole: bool

    @property
    def words(self) -> str:
        """A sentence, and what to write where that gives the memory back."""
        size = f"as many arrays of the same shapes as {self.argument} ({format_bytes(self.bytes)})"
        first = "such as a state that was made before another was restored"
        if not self.is_sole:
            place = f" in {self.name}" if self.name else ""
            return f"Besides the arguments {size} are alive{place}, {first}. Is it needed while the step runs?"
        line = advise("alive.let_go", name=self.name)
        return f"{self.name} holds {size}, {first}. If nothing reads it any more, write above the first step: {line}"


def copies_of_arguments(
    step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], alive: ArrayCensus | None
) -> list[Copy]:
    """The arguments of a call besides which as many arrays of the same shapes and dtypes are alive.

    Args:
        step: What is called.
        args: Its arguments.
        kwargs: Likewise.
        alive: What is alive besides.
    """
    groups = alive.groups if alive else ()
    free = Counter({(each.shape, each.dtype): each.count for each in groups})
    held = {(each.shape, each.dtype): each.bytes // each.count for each in groups}
    own = {id(leaf) for leaf in jax.tree.leaves((args, kwargs))}
    copies: list[Copy] = []
    for argument, value in named_arguments(getattr(step, "__wrapped__", step), args, kwargs):
        kinds = _kinds(_arrays(value))
        size = sum(held.get(kind, 0) * count for kind, count in kinds.items())
        if size >= MIB and not is_batch_name(argument) and kinds <= free:
            free -= kinds
            copies.append(Copy(argument, size, *_variable(kinds, own)))
    return copies


def _arrays(tree: Any) -> list[jax.Array]:
    """The arrays of a tree; what can be passed through once only, such as a loader, is none."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Iterator))
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not leaf.is_deleted()]


def _kinds(arrays: Sequence[jax.Array]) -> Counter[tuple[tuple[int, ...], str]]:
    return Counter((array.shape, str(array.dtype)) for array in arrays if array.size > 1)


def _variable(kinds: Counter[Any], own: set[int]) -> tuple[str, bool]:
    """The variable of the script's running functions that holds arrays of these kinds and none of the call's own.

    Returns:
        Its name, empty where there is none; and whether the function that calls the step can let go of them by it.
    """
    frames = _script_frames()
    held = [(at, name, _arrays(value)) for at, frame in enumerate(frames) for name, value in frame.f_locals.items()]
    found = next((each for each in held if _kinds(each[2]) == kinds and not own.intersection(map(id, each[2]))), None)
    if found is None:
        return "", False
    at, name, arrays = found
    ids = set(map(id, arrays))
    holders = [other for other in held if ids.intersection(map(id, other[2]))]
    code = frames[at].f_code
    is_parameter = name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]  # the caller may hold it too
    return name, at == 0 and not is_parameter and len(holders) == 1


def _script_frames() -> list[types.FrameType]:
    """The script's running functions, the one that calls the step first; each once, as a module is its own globals."""
    frames: list[types.FrameType] = []
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_THE_SCRIPT:
            frames.append(frame)
        frame = frame.f_back
    return frames


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
