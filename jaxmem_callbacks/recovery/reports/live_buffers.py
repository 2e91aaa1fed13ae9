"""What holds device memory after a failure: live arrays by name, kind and line."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from jaxmem_callbacks._compat.arrays import creation_site, live_arrays
from jaxmem_callbacks.probes.protocol import device_label
from jaxmem_callbacks.programs.steps.leaves import Leaf
from jaxmem_callbacks.records.oom import Holder, ModuleHolder
from jaxmem_callbacks.records.source_files import Owner, owner_of
from jaxmem_callbacks.recovery.failure import frames_of
from jaxmem_callbacks.transforms.arg_roles import OPTIMIZER, PARAMETERS, kind_of_argument

_Parts = tuple[str, ...]
_PART = re.compile(r"^(\w+)|\.(\w+)|\[(\d+)\]|\['((?:[^'\\]|\\.)*)'\]|\[\"((?:[^\"\\]|\\.)*)\"\]")
_STATISTICS = "batch_stats"
_COLLECTIONS = ("params", _STATISTICS)  # of Flax Linen: between the variables and the outermost module
_BOXES = ("value", "raw_value")  # what holds an array with its partitioning or as an NNX variable, and is no module
_NUMBER = re.compile(r"\d+")


def modules_of(leaves: Iterable[Leaf]) -> dict[str, str]:
    """Path of an array -> its module, such as ``Block_3/Dense_0``; paths without one are left out."""
    inside: dict[str, _Parts] = {}
    others: dict[str, _Parts] = {}
    for leaf in leaves:
        parts = _parts(leaf.path)
        if leaf.kind == OPTIMIZER:
            others[leaf.path] = parts
        elif (start := _start(parts, leaf.kind)) is not None:
            inside[leaf.path] = parts[start:]
    known = set(inside.values())
    for path, parts in others.items():
        found = next((parts[at:] for at in range(1, len(parts)) if parts[at:] in known), ())
        inside[path] = found
    return {path: "/".join(parts[:-1]) for path, parts in inside.items() if len(parts) > 1}


def same_form(modules: Sequence[str]) -> str:
    """What stands for several modules that differ in numbers alone, ``Block_*/Dense_0``; an empty text for others."""
    if len(set(modules)) <= 1:
        return next(iter(modules), "")
    rows = [module.split("/") for module in modules]
    if len({len(row) for row in rows}) > 1:
        return ""
    columns = [set(column) for column in zip(*rows, strict=True)]
    forms = [{_NUMBER.sub("*", part) for part in column} for column in columns]
    if any(len(form) > 1 for form in forms):
        return ""
    return "/".join(
        column.pop() if len(column) == 1 else form.pop() for column, form in zip(columns, forms, strict=True)
    )


def family_of(modules: Iterable[str]) -> Callable[[str], tuple[str, str]]:
    """A function from a module to the repeated module around it, and its family.

    Args:
        modules: Every module of the model.

    Returns:
        ``Block_3/Dense_0`` -> ``("Block_3", "Block_*")`` where there are more of ``Block_*``; else the module itself, twice.
    """
    numbered: dict[_Parts, set[str]] = {}
    for module in modules:
        parts = tuple(module.split("/"))
        for at, part in enumerate(parts):
            numbered.setdefault((*parts[:at], _NUMBER.sub("*", part)), set()).add(part)

    @cache
    def family(module: str) -> tuple[str, str]:
        parts = tuple(module.split("/"))
        for at, part in enumerate(parts):
            form = (*parts[:at], _NUMBER.sub("*", part))
            if len(numbered.get(form, ())) > 1:
                return "/".join(parts[: at + 1]), "/".join(form)
        return module, module

    return family


def _parts(path: str) -> _Parts:
    """``state.params['Block_0']['kernel']`` -> state, params, Block_0, kernel."""
    parts = tuple(next(filter(None, found.groups()), "") for found in _PART.finditer(path))
    return parts[:-1] if parts[-1:] and parts[-1] in _BOXES else parts


def _start(parts: _Parts, kind: str) -> int | None:
    """Where the outermost module stands on a path, or None where it leads through none."""
    at = next((i for i, part in enumerate(parts[:-1]) if part == _STATISTICS or _is_of_parameters(part)), None)
    if at is not None:
        at += 1
        while parts[at : at + 1] and parts[at] in _COLLECTIONS:
            at += 1
        return at
    if kind != PARAMETERS:
        return None
    # Parameters by their class, as of Flax NNX, in whatever the user calls it: a tuple of model and optimizer has numbers.
    return next((i for i, part in enumerate(parts) if i and not part.isdecimal()), None)


def _is_of_parameters(part: str) -> bool:
    return kind_of_argument(part) == PARAMETERS


_MOST = 100_000  # entries of one variable, and of all: looking at them must not take long


def array_variables(error: BaseException) -> dict[int, str]:
    """``id(array)`` -> the variable that holds it, such as ``losses`` of ``train.py``; innermost functions first."""
    found: dict[int, str] = {}
    left = _MOST
    for where, names in _scopes(error):
        for name, value in list(names.items()):
            if name.startswith("_") or left <= 0:
                continue
            arrays, words = _arrays(value), f"{name} ({where})"
            left -= len(arrays)
            for leaf in arrays:
                found.setdefault(id(leaf), words)
    return found


def users_frames(error: BaseException) -> list[FrameType]:
    """The frames of the user's own code, outermost first."""
    return [frame for frame in frames_of(error) if owner_of(frame.f_code.co_filename) is Owner.USER]


def _scopes(error: BaseException) -> Iterator[tuple[str, Mapping[str, Any]]]:
    running = next(iter(frames_of(error)), None)
    seen: set[int] = set()
    for frame in reversed(users_frames(error)):
        where = Path(frame.f_code.co_filename).name
        if frame is not running and frame.f_code.co_name != "<module>":
            yield f"{where}, {frame.f_code.co_name}", frame.f_locals
        if id(frame.f_globals) not in seen:
            seen.add(id(frame.f_globals))
            yield where, frame.f_globals


def _arrays(value: Any) -> list[jax.Array]:
    if isinstance(value, jax.Array):
        return [value]
    if isinstance(value, list | tuple | dict) and len(value) > _MOST:  # type: ignore[arg-type]
        return []
    try:
        leaves = jax.tree.leaves(value)
    except (TypeError, ValueError):  # a dictionary whose keys have no order
        return []
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]


_LISTED, _MODULES = 24, 8
_SECONDS = 0.75  # for sizes and names; a report takes no more than two
_AT_ONCE = 256
_ASKED = 8  # arrays of one holder that are asked where they were made
ITSELF, VARIABLE, SHAPE, FAILED = "the call's own array", "variable", "shape", "its error"

_Form = tuple[tuple[int, ...], str]  # shape and dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveBuffers:
    """All live arrays, by what holds them.

    Attributes:
        holders: The largest.
        modules: The families of modules that hold most, of all that are named.
        bytes: On the fullest device.
        count: All of them.
        left_out_count: Those of holders that are not listed, and those that there was no time to name.
        left_out_bytes: Their bytes.
        failed_bytes: Of all that were named, results of a call that failed.
    """

    holders: tuple[Holder, ...] = ()
    modules: tuple[ModuleHolder, ...] = ()
    bytes: int = 0
    count: int = 0
    left_out_count: int = 0
    left_out_bytes: int = 0
    failed_bytes: int = 0


@dataclass(slots=True)
class _Seen:
    """Types and devices of arrays as text, each made once."""

    types: dict[Any, str] = field(default_factory=dict[Any, str])
    devices: dict[Any, tuple[str, ...]] = field(default_factory=dict[Any, tuple[str, ...]])

    def type_text(self, array: Any) -> str:
        key = array.dtype, array.shape
        if key not in self.types:
            self.types[key] = f"{array.dtype}[{','.join(map(str, array.shape))}]"
        return self.types[key]

    def labels(self, array: Any) -> tuple[str, ...]:
        sharding = array.sharding
        if sharding not in self.devices:
            self.devices[sharding] = tuple(sorted(map(device_label, sharding.addressable_devices)))
        return self.devices[sharding]


@dataclass(frozen=True, slots=True)
class _Name:
    """What an array is called, how that was found, and what it is to the step; the modules that it may belong to."""

    text: str = ""
    known_by: str = ""
    kind: str = ""
    modules: tuple[str, ...] = ()


@dataclass(slots=True)
class _Group:
    name: _Name
    type_text: str
    devices: tuple[str, ...]
    count: int = 0
    bytes: int = 0
    sites: Counter[str] = field(default_factory=Counter[str])


def find_live_buffers(leaves: Sequence[Leaf], variables: Mapping[int, str], *, are_the_calls: bool) -> LiveBuffers:
    """Every live array under the best name that there is for it.

    Args:
        leaves: Arrays of the failing step's arguments, or their shapes.
        variables: ``id(array)`` -> variable.
        are_the_calls: Whether ``leaves`` are the very arrays of the call that failed.
    """
    modules = modules_of(leaves)
    own = {id(leaf.value): leaf for leaf in leaves} if are_the_calls else {}
    alike = {} if are_the_calls else _by_shape(leaves, modules)
    groups: dict[tuple[str, str, str], _Group] = {}
    seen, ends = _Seen(), time.monotonic() + _SECONDS
    arrays, sizes, totals = _sized(seen)
    order, named = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True), 0
    failed: set[int] = set()
    for place in order:
        if named % _AT_ONCE == 0:
            if named and time.monotonic() >= ends:
                break
            failed = _failed([arrays[each] for each in order[named : named + _AT_ONCE]])
        named += 1
        size, array = sizes[place], arrays[place]
        type_text, devices = seen.type_text(array), seen.labels(array)
        # What a failed call made in place of its arguments has their shapes, and is none of them.
        lost = (
            _Name(variables.get(id(array), ""), FAILED, "results of the failed call") if id(array) in failed else None
        )
        name = lost or _named(array, own, variables, alike, modules)
        apart = "" if name.known_by in (VARIABLE, FAILED) else f"{type_text} {devices}"
        group = groups.setdefault((name.text, name.known_by, apart), _Group(name, type_text, devices))
        if group.count < _ASKED:
            group.sites[creation_site(array)] += 1
        if group.type_text != type_text:
            group.type_text = "several"
        group.count += 1
        group.bytes += size
    ordered = sorted(groups.values(), key=lambda group: -group.bytes)
    return _summed(ordered, _by_module(ordered, modules), totals, [sizes[place] for place in order[named:]])


def _sized(seen: _Seen) -> tuple[list[Any], list[int], Counter[str]]:
    """Every live array, its bytes on one device, and the bytes of each device."""
    arrays: list[Any] = []
    sizes: list[int] = []
    by_devices: Counter[tuple[str, ...]] = Counter()
    for array in live_arrays():
        try:
            size = array.on_device_size_in_bytes() // len(array.sharding.device_set)
        except RuntimeError:  # deleted or donated meanwhile
            continue
        arrays.append(array)
        sizes.append(size)
        by_devices[seen.labels(array)] += size
    totals: Counter[str] = Counter()
    for devices, size in by_devices.items():
        totals.update(dict.fromkeys(devices, size))
    return arrays, sizes, totals


def _by_shape(leaves: Iterable[Leaf], modules: Mapping[str, str]) -> dict[_Form, _Name]:
    """What an array of a shape and dtype may be, made once for all arrays of it: a deep model has thousands."""
    alike: dict[_Form, list[Leaf]] = {}
    for leaf in leaves:
        if leaf.shape:
            alike.setdefault((leaf.shape, str(leaf.dtype)), []).append(leaf)
    return {
        form: _Name(
            same[0].path + (f" or {len(same) - 1} more of its shape" if len(same) > 1 else ""),
            SHAPE,
            " or ".join(dict.fromkeys(leaf.kind for leaf in same)),
            tuple(modules.get(leaf.path, "") for leaf in same),
        )
        for form, same in alike.items()
    }


def _named(
    array: Any,
    own: Mapping[int, Leaf],
    variables: Mapping[int, str],
    alike: Mapping[_Form, _Name],
    modules: Mapping[str, str],
) -> _Name:
    """The best name that there is for an array that can be read."""
    if (leaf := own.get(id(array))) is not None:
        return _Name(leaf.path, ITSELF, leaf.kind, (modules.get(leaf.path, ""),))
    same = alike.get((tuple(array.shape), str(array.dtype))) if alike else None
    variable = variables.get(id(array))
    if same is not None:
        return same if variable is None else replace(same, text=f"{same.text}, held by {variable}")
    return _Name() if variable is None else _Name(variable, VARIABLE)


def _failed(arrays: Sequence[Any]) -> set[int]:
    """``id(array)`` of those that cannot be read, since the call that made them failed. Nothing is waited for."""
    ready = [array for array in arrays if _is_ready(array)]
    return set() if _are_sound(ready) else {id(array) for array in ready if not _are_sound([array])}


def _is_ready(array: Any) -> bool:
    """Whether it is there; a deleted one is not asked, which jaxlib 0.10.2 dies of."""
    try:
        return not array.is_deleted() and array.is_ready()
    except RuntimeError:  # deleted meanwhile
        return False


def _are_sound(arrays: Sequence[Any]) -> bool:
    try:
        jax.block_until_ready(arrays)
    except Exception:  # noqa: BLE001 - whatever their computation raised
        return False
    return True


def _by_module(groups: Sequence[_Group], modules: Mapping[str, str]) -> tuple[ModuleHolder, ...]:
    """What families of modules hold together; an array that may be of several families is of none."""
    family_of_module = family_of(set(modules.values()))
    found: dict[str, tuple[set[str], Counter[str], list[int]]] = {}
    for group in groups:
        members = [family_of_module(module) if module else ("", "") for module in group.name.modules]
        families = {family for _, family in members}
        if len(families) != 1 or families == {""}:
            continue
        names, kinds, counts = found.setdefault(families.pop(), (set(), Counter(), []))
        names.update(member for member, _ in members)
        kinds[group.name.kind] += group.bytes
        counts.append(group.count)
    held = [
        ModuleHolder(
            name=family, modules=len(names), count=sum(counts), bytes=kinds.total(), kinds=dict(kinds.most_common())
        )
        for family, (names, kinds, counts) in found.items()
    ]
    return tuple(sorted(held, key=lambda each: -each.bytes)[:_MODULES])


def _summed(
    ordered: Sequence[_Group], modules: tuple[ModuleHolder, ...], totals: Mapping[str, int], unnamed: Sequence[int]
) -> LiveBuffers:
    rest = ordered[_LISTED:]
    return LiveBuffers(
        holders=tuple(
            Holder(
                name=group.name.text,
                known_by=group.name.known_by,
                module=same_form(group.name.modules),
                kind=group.name.kind,
                type_text=group.type_text,
                count=group.count,
                bytes=group.bytes,
                devices=group.devices,
                site=group.sites.most_common(1)[0][0],
            )
            for group in ordered[:_LISTED]
        ),
        modules=modules,
        bytes=max(totals.values(), default=0),
        count=sum(group.count for group in ordered) + len(unnamed),
        left_out_count=sum(group.count for group in rest) + len(unnamed),
        left_out_bytes=sum(group.bytes for group in rest) + sum(unnamed),
        failed_bytes=sum(group.bytes for group in ordered if group.name.known_by == FAILED),
    )


def deleted_arguments(
    leaves: Sequence[Leaf], donated: Sequence[str], *, are_the_calls: bool
) -> tuple[tuple[str, ...], int, str]:
    """Arguments whose arrays are deleted, their bytes on one device, and what is known of all of them, as a sentence.

    Args:
        leaves: Arrays of the call's arguments, or their shapes.
        donated: Arguments that the step donates.
        are_the_calls: Whether ``leaves`` are the very arrays of the call that failed.
    """
    if not are_the_calls:
        given = [leaf for leaf in leaves if leaf.argument in donated]
        if given:
            fate = (
                f"{', '.join(donated)}: donated to the call, which was under way, so that those arrays are gone: go on from a "
                "copy or a checkpoint."
            )
            return tuple(leaf.path for leaf in given), sum(leaf.bytes_here for leaf in given), fate
        return (), 0, "Whether its arguments survived is unknown, because the exception did not pass through its call."
    arrays = [leaf for leaf in leaves if isinstance(leaf.value, jax.Array)]
    dead = [leaf for leaf in arrays if leaf.value.is_deleted()]
    if not dead:
        return (), 0, f"All {len(arrays)} arrays of its arguments are alive: the call can be made again."
    size = sum(leaf.bytes_here for leaf in dead)
    names = sorted({leaf.argument for leaf in dead})
    fate = (
        f"{len(dead)} of the {len(arrays)} arrays of its arguments were donated and are gone ({', '.join(names)}): "
        "go on from a copy or a checkpoint, the same call cannot be made again."
    )
    return tuple(leaf.path for leaf in dead), size, fate
