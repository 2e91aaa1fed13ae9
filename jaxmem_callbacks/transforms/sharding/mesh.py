"""Meshes of devices, over slices too."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arguments import refuse, require
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.policies import mesh_words
from jaxmem_callbacks.transforms.sharding.axes import Axes, fitting_axes, parse_axes


def slice_count(devices: Sequence[Any]) -> int:
    """The number of slices by the devices' own attributes; 1 where they have none."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def slices_by_axis(
    sizes: Mapping[str, int], devices: Sequence[Any], across: str | Mapping[str, int] | None
) -> dict[str, int]:
    """How many slices each axis crosses.

    Args:
        sizes: Axis -> size, filled in.
        devices: All devices of the mesh.
        across: The user's choice: an axis, axes with counts, or None.

    Raises:
        PolicyError: axes that are none, counts that do not fit; without a choice, no axis that can cross the slices.
    """
    slices = slice_count(devices)
    parts = slices if slices > 1 else len({device.process_index for device in devices})
    what = f"{parts} slices" if slices > 1 else f"{parts} processes"
    if across is None:
        found = next((name for name, size in sizes.items() if size % slices == 0), None)
        if found is None:
            example = f'{{"data": {slices}, "fsdp": -1}}'
            msg = (
                f"Mesh: the devices are of {slices} slices, and no axis of {mesh_words(sizes)} divides by {slices}. One axis has "
                f"to cross the slices, best the batch's. Type for example {advise('mesh.make', axes=example)}."
            )
            raise PolicyError(msg)
        return {name: slices if name == found else 1 for name in sizes}
    wanted = {across: parts} if isinstance(across, str) else dict(across)
    unknown = [name for name in wanted if name not in sizes]
    if unknown:
        msg = f"Mesh: across_slices names {', '.join(map(repr, unknown))}, which is no axis. Expected of: {', '.join(sizes)}."
        raise PolicyError(msg)
    wrong = [name for name, count in wanted.items() if count < 1 or sizes[name] % count]
    if wrong or math.prod(wanted.values()) != parts:
        given = mesh_words(wanted)
        msg = (
            f"Mesh: across_slices gives {given} for the axes {mesh_words(sizes)}, and there are {what}. Expected counts whose "
            f"product is {parts}, each a divisor of its axis: across_slices={{'{next(iter(sizes))}': {parts}}}."
        )
        raise PolicyError(msg)
    return {name: wanted.get(name, 1) for name in sizes}


def hybrid_devices(sizes: Mapping[str, int], across: Mapping[str, int], devices: Sequence[Any]) -> np.ndarray[Any, Any]:
    """The devices, ordered by `mesh_utils.create_hybrid_device_mesh`.

    Raises:
        PolicyError: the slices are not of one size.
    """
    by_slice = slice_count(devices) > 1
    inside = [size // across[name] for name, size in sizes.items()]
    try:
        return mesh_utils.create_hybrid_device_mesh(
            inside, list(across.values()), list(devices), process_is_granule=not by_slice
        )
    except (ValueError, AssertionError) as error:
        msg = (
            f"Mesh: {mesh_words(sizes)} cannot be laid over the slices: {error}. Expected slices of {math.prod(inside)} devices "
            "each. Give the devices of whole slices."
        )
        raise PolicyError(msg) from error


_Fewer = tuple[str, int] | None  # axes as they were given, and how many devices they take

AxisTypes = Literal["auto", "explicit"] | AxisType | Mapping[str, Any]


def make_mesh(
    axes: Axes,
    devices: Sequence[Any] | None = None,
    *,
    axis_types: AxisTypes = "auto",
    across_slices: str | Mapping[str, int] | None = None,
) -> Mesh:
    """A mesh of named axes over all devices.

        mesh = jm.make_mesh({"data": 2, "fsdp": -1})        # on eight devices: data=2, fsdp=4

    Devices are ordered by `jax.make_mesh`, which knows how TPUs are wired. Devices of several slices are ordered so that one axis
    crosses the slow links between them and every other axis stays inside a slice.

    Args:
        axes: Axis names with sizes, outermost first, as a mapping or as text ``"data=2,fsdp=-1"``. At most one size is -1: it
            takes the devices that the others leave.
        devices: Which devices, all of them used; None for all that JAX sees.
        axis_types: ``auto`` (the compiler places intermediates; what ordinary models need) or ``explicit`` (shardings are part
            of the types, and the model declares where they change), for all axes or by name. `jax.make_mesh` takes explicit.
        across_slices: Which axis crosses slices, or axes with the number of slices along each, ``{"data": 4}``. Where the devices
            know no slices (GPUs, CPUs), a process's devices count as one. None: the first axis that the number of TPU slices
            divides; devices without slices are ordered as one.

    Returns:
        The mesh. `jax.set_mesh` makes it the one that ``jm.jit_step`` uses.

    Raises:
        PolicyError: axes that are none, or whose product is not the number of devices; with what is there and what to type.
    """
    if devices is not None:
        expected = "a list of devices, such as jax.devices()[:4]"
        require("jm.make_mesh", "devices", devices, (list, tuple, np.ndarray), expected)
        for device in devices:
            if isinstance(device, str | bytes | int | float | None):
                refuse("jm.make_mesh", "devices", device, expected)
    if across_slices is not None:
        require("jm.make_mesh", "across_slices", across_slices, (str, Mapping), "an axis, axes with counts, or None")
    there = list(jax.devices() if devices is None else devices)
    sizes = _filled(parse_axes(axes), len(there), _what(there), _call_on_fewer)
    types = _types(sizes, axis_types)
    if across_slices is None and slice_count(there) == 1:
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=there)
    across = slices_by_axis(sizes, there, across_slices)
    return Mesh(hybrid_devices(sizes, across, there), tuple(sizes), axis_types=types)


def abstract_mesh(axes: Axes, device_count: int, *, axis_types: AxisTypes = "auto") -> AbstractMesh:
    """A mesh of the same axes over devices that need not be there, for planning; shardings on it hold no device.

    Args:
        axes: As in `make_mesh`.
        device_count: How many devices the target has.
        axis_types: As in `make_mesh`.

    Raises:
        PolicyError: as in `make_mesh`.
    """
    sizes = _filled(parse_axes(axes), device_count, f"the target has {device_count} devices", _argument)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), _types(sizes, axis_types))


def _filled(sizes: dict[str, int], count: int, there: str, to_type: Callable[[str, _Fewer], str]) -> dict[str, int]:
    """The sizes with -1 filled in; their product is the number of devices, or an error with what to type."""
    given = math.prod(size for size in sizes.values() if size != -1)
    free = next((name for name, size in sizes.items() if size == -1), None)
    if free is not None and count % given == 0 and count >= given:
        return {name: count // given if name == free else size for name, size in sizes.items()}
    if free is None and given == count:
        return sizes
    text = mesh_words(sizes)
    wants = f"a multiple of {given}" if free is not None else str(given)
    axes = _typed(fitting_axes(sizes, count))
    fewer = (_typed(sizes), given) if given < count else None
    msg = f"Mesh: the axes {text} need {wants} devices, and {there}. {to_type(axes, fewer)}"
    raise PolicyError(msg)


def _typed(sizes: Mapping[str, int]) -> str:
    """Axes as one types them."""
    return f"{{{', '.join(f'{json.dumps(name)}: {size}' for name, size in sizes.items())}}}"


def _call_on_fewer(axes: str, fewer: _Fewer) -> str:
    """What to type where devices are attached."""
    on_fewer = "" if fewer is None else f"{fewer[0]}, devices=jax.devices()[:{fewer[1]}]"
    some = f", or on fewer devices {advise('mesh.make', axes=on_fewer)}" if fewer else ""
    return f"Type {advise('mesh.make', axes=axes)}{some}."


def _argument(axes: str, fewer: _Fewer) -> str:
    """What to type where a plan has the devices of its target."""
    some = f", or name a target of {fewer[1]} devices" if fewer else ""
    return f"Type mesh={axes}{some}."


def _what(devices: list[Any]) -> str:
    kind = devices[0].device_kind if devices else "none"
    return f"there are {len(devices)} devices ({kind})"


def _types(sizes: dict[str, int], axis_types: Any) -> tuple[AxisType, ...]:
    """One axis type an axis, from one word for all or from words by name."""
    if isinstance(axis_types, Mapping):
        by_name = cast("Mapping[str, Any]", axis_types)
        unknown = sorted(set(by_name) - set(sizes))
        if unknown:
            msg = (
                f"Mesh: axis_types names {', '.join(unknown)}, which is no axis. Expected names from: {', '.join(sizes)}. "
                f"Type for example axis_types={ {next(iter(sizes)): 'explicit'} }."
            )
            raise PolicyError(msg)
        return tuple(_type(by_name.get(name, "auto")) for name in sizes)
    return tuple(_type(axis_types) for _ in sizes)


def _type(word: Any) -> AxisType:
    known = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    found = word if isinstance(word, AxisType) else known.get(word) if isinstance(word, str) else None
    if found is None or found not in known.values():
        msg = f"Mesh: axis_types={word!r}. Expected 'auto' or 'explicit', for all axes or by name: {{'fsdp': 'auto'}}."
        raise PolicyError(msg)
    return found
