"""Mesh axes: their sizes, and which shard the state, split matrices or divide the batch.

Imports no JAX: the command line judges axes before it starts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.policies import MeshAxes, ShardingRules, mesh_words

Axes = Mapping[str, int] | str
EXAMPLE = 'type for example {"data": 2, "fsdp": -1} or "data=2,fsdp=-1"'
_AXIS = re.compile(r"\s*([A-Za-z_]\w*)\s*[=:]\s*(-?[0-9]+)\s*")

# Names of mesh axes by what they are for, in the order in which they are looked for.
STATE_AXES = ("fsdp", "zero", "shard", "data", "dp", "batch", "devices", "device", "replica")
TENSOR_AXES = ("tensor", "tp", "model", "mp")

# Logical axis names that models use -> what shards them, the first that divides and is free counts.
_WIDE = (
    "mlp",
    "ff",
    "ffn",
    "d_ff",
    "hidden",
    "heads",
    "q_heads",
    "qkv",
    "kv_heads",
    "joined_kv",
    "vocab",
    "vocabulary",
)
_NARROW = ("embed", "embedding", "d_model", "model_dim", "features", "emb")


def axis_names(axes: MeshAxes) -> tuple[str, ...]:
    """Mesh axes as a tuple, whatever their form."""
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshRoles:
    """What the axes of one mesh are for.

    Attributes:
        state: The axis that the state is split over, or None.
        tensor: The axis that matrices are split over, or None.
        sizes: Axis -> size.
    """

    state: str | None
    tensor: str | None
    sizes: dict[str, int]

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes that the batch is divided over: all but the tensor axis."""
        return tuple(name for name in self.sizes if name in STATE_AXES or name == self.state)

    def size(self, axes: str | tuple[str, ...]) -> int:
        """Devices along one axis or several."""
        names = (axes,) if isinstance(axes, str) else axes
        size = 1
        for name in names:
            size *= self.sizes[name]
        return size


def mesh_roles(mesh: Any) -> MeshRoles:
    """The roles of a mesh's axes, by name.

    Of several that could hold the state the first with more than one device does; the only axis of a mesh does whatever its
    name, unless it is called like one for matrices.
    """
    sizes = {str(name): int(size) for name, size in mesh.shape.items()}

    def first(names: tuple[str, ...]) -> str | None:
        there = [name for name in names if name in sizes]
        return next((name for name in there if sizes[name] > 1), there[0] if there else None)

    tensor = first(TENSOR_AXES)
    only = next(iter(sizes)) if len(sizes) == 1 and tensor is None else None
    return MeshRoles(state=first(STATE_AXES) or only, tensor=tensor, sizes=sizes)


def require_axes(roles: MeshRoles, sharding: str, to_type: str = "") -> None:
    """Refuse a mesh that has no axis for a policy.

    Args:
        roles: Of the mesh's axes.
        sharding: The policy's name.
        to_type: A mesh that would do; empty for a call on the devices that are attached.

    Raises:
        PolicyError: with the axes that are there and a mesh that would do.
    """
    needs: list[tuple[str, tuple[str, ...]]] = []
    if sharding in {"zero1", "fsdp", "fsdp_tensor"} and roles.state is None:
        needs.append(("an axis for the state", STATE_AXES))
    if sharding == "fsdp_tensor" and roles.tensor is None:
        needs.append(("an axis for matrices", TENSOR_AXES))
    if needs:
        there = mesh_words(roles.sizes) or "none"
        what = " and ".join(f"{words}, called one of {', '.join(names)}" for words, names in needs)
        example = '{"fsdp": -1, "tensor": 2}' if sharding == "fsdp_tensor" else '{"fsdp": -1}'
        typed = to_type or advise("mesh.make", axes=example)
        msg = f"sharding={sharding!r} needs {what}; the mesh has the axes {there}. Type {typed}."
        raise PolicyError(msg)


def shipped_rules(roles: MeshRoles, sharding: str) -> ShardingRules:
    """Rules from logical names for a named policy; empty where the arrays stay whole."""
    state, tensor = roles.state, roles.tensor
    if sharding == "fsdp":
        return tuple((name, state) for name in (*_NARROW, *_WIDE))
    if sharding == "fsdp_tensor":
        by_tensor = tuple((name, tensor) for name in _WIDE)
        return (*by_tensor, *((name, state) for name in (*_NARROW, *_WIDE)))
    return ()


def parse_axes(axes: Axes) -> dict[str, int]:
    """Axis -> size as the user wrote them, -1 included.

    Raises:
        PolicyError: not axes with whole sizes of at least 1; one may be -1.
    """
    found = _parsed_text(axes) if isinstance(axes, str) else _parsed_mapping(axes)
    wrong = [name for name, size in found.items() if size != -1 and size < 1]
    if wrong or not found:
        what = f"axis {wrong[0]!r} has size {found[wrong[0]]}" if wrong else "no axes were given"
        msg = f"Mesh: {what}. Expected names with sizes of at least 1; one may be -1: {EXAMPLE}."
        raise PolicyError(msg)
    free = [name for name, size in found.items() if size == -1]
    if len(free) > 1:
        msg = (
            f"Mesh: the axes {', '.join(free)} are all -1. Expected one at most, which takes the devices that the others "
            f"leave: {EXAMPLE}."
        )
        raise PolicyError(msg)
    return found


def _parsed_mapping(axes: Any) -> dict[str, int]:
    if not isinstance(axes, Mapping):
        msg = f"Mesh: axes={axes!r}. Expected a mapping of names to sizes, or a text: {EXAMPLE}."
        raise PolicyError(msg)
    given = cast("Mapping[Any, Any]", axes)
    for name, size in given.items():
        if not isinstance(name, str) or not name or isinstance(size, bool) or not isinstance(size, int):
            msg = f"Mesh: {name!r}: {size!r} is no axis. Expected a name and a whole number: {EXAMPLE}."
            raise PolicyError(msg)
    return dict(given)


def _parsed_text(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(","):
        match = _AXIS.fullmatch(part)
        if match is None or match[1] in found:
            what = "comes twice" if match else "is no axis"
            msg = f"Mesh: {part.strip()!r} in {text!r} {what}. Expected names with sizes: {EXAMPLE}."
            raise PolicyError(msg)
        found[match[1]] = int(match[2])
    return found


def fitting_axes(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Axes that make up ``count`` devices, as near as possible to those given (-1 is free).

    Each size becomes the largest divisor of what is left that it allows.
    """
    left, fitting = count, dict.fromkeys(sizes, 1)
    for name, size in sizes.items():
        if size != -1:
            fitting[name] = math.gcd(size, left)
            left //= fitting[name]
    grows = next((name for name, size in sizes.items() if size == -1), max(sizes, key=lambda name: sizes[name]))
    fitting[grows] *= left
    return fitting
