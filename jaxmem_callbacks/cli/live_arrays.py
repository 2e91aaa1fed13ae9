"""The arrays alive beside a step when a script calls it."""

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

from jaxmem_callbacks.cli.frames import is_read_from, line_above
from jaxmem_callbacks.probes.live_arrays import LiveArraysProbe
from jaxmem_callbacks.programs.steps.leaves import named_arguments
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arrays import ArrayCensus, ArrayGroup
from jaxmem_callbacks.records.source_files import Owner, owner_of, short_path
from jaxmem_callbacks.records.units import MIB, format_bytes
from jaxmem_callbacks.transforms.arg_roles import is_batch_name
from jaxmem_callbacks.transforms.frameworks import framework_of

_SHARE = 0.01  # of what the step needs: less is not worth a word
_OF_THE_PROGRAM = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.CodeType,
)  # they refer to all of it
_MOST_PARTS = 100_000  # of a value, containers and arrays
_LOOKED_AT = 8  # arrays of it: all of them are mostly held alike
_SHOWN = 2  # groups of arrays that are named


def alive_beside(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArrayCensus | None:
    """The arrays that are alive now and are no arguments of a step; None where JAX does not start on this machine."""
    framework = framework_of(args, kwargs)
    own = jax.tree.leaves((args, kwargs)) if framework is None else framework.apart((args, kwargs))[0]
    gc.collect()  # what only cycles hold is as good as gone
    try:
        return LiveArraysProbe().beside(own)
    except (RuntimeError, AssertionError):  # as JAX has no backend, so nothing is alive in one
        return None


@dataclass(frozen=True, slots=True)
class Copy:
    """As many arrays of the same shapes as an argument has, alive besides it.

    Attributes:
        argument: The argument's name in the step.
        bytes: Their size on one device.
        name: The script's variable that holds them; empty where no variable does.
        place: The line above which the variable can be deleted; empty where that may free nothing, or break the script.
    """

    argument: str
    bytes: int
    name: str
    place: str

    @property
    def words(self) -> str:
        """A sentence, and what to write where that gives the memory back."""
        size = f"as many arrays of the same shapes as {self.argument} ({format_bytes(self.bytes)})"
        first = "such as a state that was made before another was restored"
        if not self.place:
            variable = f" in {self.name}" if self.name else ""
            return f"Besides the arguments {size} are alive{variable}, {first}. Is it needed while the step runs?"
        line = advise("alive.let_go", name=self.name)
        return f"{self.name} holds {size}, {first}. If nothing reads it any more, write above {self.place}: {line}"


def copies_of_arguments(
    step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], alive: ArrayCensus | None
) -> list[Copy]:
    """The arguments of a call besides which as many arrays of the same shapes and dtypes are alive.

    Args:
        step: What is called.
        args: Its arguments.
        kwargs: Likewise.
        alive: What is alive apart from them.
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
    try:
        leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Iterator))
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not leaf.is_deleted()]
    except Exception:  # noqa: BLE001 - a variable of the script's that JAX cannot flatten, such as a dict with mixed keys
        return []


def _kinds(arrays: Sequence[jax.Array]) -> Counter[tuple[tuple[int, ...], str]]:
    return Counter((array.shape, str(array.dtype)) for array in arrays if array.size > 1)


def _variable(kinds: Counter[Any], own: set[int]) -> tuple[str, str]:
    """The variable of the script's running functions that holds arrays of these kinds and none of the call's own.

    Returns:
        Its name, empty where there is none; and the line above which the function that calls the step can delete it, empty
        where it cannot.
    """
    frames = _script_frames()
    held = [(at, name, _arrays(value)) for at, frame in enumerate(frames) for name, value in frame.f_locals.items()]
    found = next((each for each in held if _kinds(each[2]) == kinds and not own.intersection(map(id, each[2]))), None)
    if found is None:
        return "", ""
    at, name, arrays = found
    ids = set(map(id, arrays))
    holders = sum(not ids.isdisjoint(map(id, other[2])) for other in held)
    del held, found, arrays  # which would be seen to hold them
    if at or holders > 1 or not _is_own_variable(frames[0], name):
        return name, ""
    line = line_above(frames[0])
    if is_read_from(frames[0], name, line) or _is_held_elsewhere(frames[0].f_locals, name):
        return name, ""
    return name, f"{short_path(frames[0].f_code.co_filename)}:{line}"


def _is_own_variable(frame: types.FrameType, name: str) -> bool:
    """Whether a frame's function made a variable, and no function inside or around it shares it: else deleting frees nothing."""
    code = frame.f_code
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + stars]
    return name not in {*parameters, *code.co_freevars, *code.co_cellvars}


def _is_held_elsewhere(variables: dict[str, Any], name: str) -> bool:
    """Whether more than a variable refers to its value, or to an array of it."""
    inside, waiting = dict[int, Any](), [variables[name]]
    while waiting:
        value = waiting.pop()
        if id(value) not in inside and not issubclass(type(value), _OF_THE_PROGRAM):
            inside[id(value)] = value
            waiting += [] if issubclass(type(value), jax.Array) else gc.get_referents(value)
            if len(inside) > _MOST_PARTS:
                return True  # who knows
    arrays = [value for value in inside.values() if issubclass(type(value), jax.Array)]
    looked = [variables[name], *arrays[:_LOOKED_AT]]
    known = {*inside, *map(id, (variables, inside, waiting, arrays, looked))}
    holders = (other for each in looked for other in gc.get_referrers(each))
    return any(id(other) not in known and not isinstance(other, types.FrameType) for other in holders)


def _script_frames() -> list[types.FrameType]:
    """The script's running functions, the one that calls the step first; each once, as a module is its own globals."""
    frames: list[types.FrameType] = []
    frame = inspect.currentframe()
    while frame is not None:
        if owner_of(frame.f_code.co_filename) is Owner.USER:
            frames.append(frame)
        frame = frame.f_back
    return frames


def alive_words(
    alive: ArrayCensus | None, when: str, step_bytes: int | None, resident_bytes: int = 0, copies: Sequence[Copy] = ()
) -> str:
    """What else was alive, and how a plan counts it; empty where it is little, or counted.

    An array that the step closes over counts too: its program holds a copy of it.

    Args:
        alive: As the step was reached.
        when: When that was, such as "when the script called it".
        step_bytes: What the step needs.
        resident_bytes: What the plan counts beside the step.
        copies: What has a sentence of its own.
    """
    if alive is None:
        return ""
    on_device: Counter[str] = Counter()
    for group in alive.groups:
        on_device.update(dict.fromkeys(group.devices, group.bytes))
    beside = max(on_device.values(), default=0) + alive.left_out_bytes - sum(each.bytes for each in copies)
    if beside < max(MIB, _SHARE * (step_bytes or 0)) or beside <= resident_bytes:
        return ""
    return (
        f"Beside the step's arguments {format_bytes(beside)} of arrays were alive on one device {when}, the most of them "
        f"{', '.join(map(_words, alive.groups[:_SHOWN]))}. They are not counted here: what stays while the step runs, such as "
        "the state of another step, is counted by the option "
        f"{advise('option.typed', option='resident', value=f'{math.ceil(beside / MIB)}MiB')}."
    )


def _words(group: ArrayGroup) -> str:
    place = "" if group.site.startswith("unknown") else f" from {group.site}"
    return f"{group.count} of {group.type_text}{place}"
