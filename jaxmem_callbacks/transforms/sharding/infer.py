"""`jm.infer_shardings`: a `NamedSharding` for each array of a state, by its author's axis names or by its shape."""

from __future__ import annotations

import difflib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxmem_callbacks.config.named import Name, policy_of
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arguments import refuse
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.policies import MeshAxes, ShardingRules, StepPolicy, mesh_words
from jaxmem_callbacks.records.presets import Preset
from jaxmem_callbacks.transforms.arg_roles import OPTIMIZER, kind_of_argument, kind_of_node
from jaxmem_callbacks.transforms.frameworks import Annotation, annotator_of
from jaxmem_callbacks.transforms.sharding.axes import MeshRoles, axis_names, mesh_roles, require_axes, shipped_rules

Words = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLeaf:
    """One array of a state.

    Attributes:
        path: Where it is, as the user would write it behind the state's name: ``.params['dense']['kernel']``.
        words: The same as names and indices, without the wrapper's own ``value``.
        shape: Its global shape.
        itemsize: Bytes of an element; None for PRNG keys, which are never sharded.
        is_optimizer: Whether it is optimizer state.
        annotation: What its author wrote about its axes, or None.
    """

    path: str
    words: Words
    shape: tuple[int, ...]
    itemsize: int | None
    is_optimizer: bool
    annotation: Annotation | None


def state_leaves(state: Any) -> list[StateLeaf | None]:
    """One entry for each leaf of `jax.tree.flatten`, in its order; None for what is no array and no number."""
    return [
        _leaf(path, words, value, is_optimizer=is_optimizer, annotation=annotation)
        for path, words, value, is_optimizer, annotation in _walk(state, (), (), False, None)
    ]


_Found = tuple[tuple[Any, ...], Words, Any, bool, Annotation | None]


def _walk(
    node: Any,
    path: tuple[Any, ...],
    words: Words,
    is_optimizer: bool,  # noqa: FBT001 - handed down
    annotation: Annotation | None,
) -> Iterator[_Found]:
    """Leaves under a node; stops at nodes whose class has a meaning, and goes on inside them."""
    annotator = annotator_of(node)
    if annotator is not None:
        annotation = annotator.annotation(node) or annotation
    kind = kind_of_node(node)
    is_optimizer = is_optimizer or (kind is not None and kind.name == OPTIMIZER)

    def has_meaning(inner: Any) -> bool:
        return inner is not node and (annotator_of(inner) is not None or kind_of_node(inner) is not None)

    for step, inner in jax.tree_util.tree_flatten_with_path(node, is_leaf=has_meaning)[0]:
        deeper = (*path, *step)
        # The wrapper's own field is no name of the user's.
        named = words if annotator is not None else (*words, *map(_word, step))
        if has_meaning(inner):
            yield from _walk(inner, deeper, named, is_optimizer, annotation)
        else:
            by_name = kind_of_argument("", deeper) == OPTIMIZER
            yield deeper, named, inner, is_optimizer or by_name, annotation


def _word(key: Any) -> str | int:
    for field in ("name", "key", "idx"):
        if hasattr(key, field):
            return getattr(key, field)
    return str(key)


def _leaf(
    path: tuple[Any, ...], words: Words, value: Any, *, is_optimizer: bool, annotation: Annotation | None
) -> StateLeaf | None:
    shape = getattr(value, "shape", None)
    if shape is None and not isinstance(value, bool | int | float | complex):
        return None
    return StateLeaf(
        path=jax.tree_util.keystr(path),
        words=words,
        shape=tuple(shape or ()),
        itemsize=_itemsize(getattr(value, "dtype", None)),
        is_optimizer=is_optimizer,
        annotation=annotation,
    )


def _itemsize(dtype: Any) -> int | None:
    if dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return None
    return jax.numpy.dtype(dtype).itemsize


# Tuned: an array of less stays whole, since to gather it takes no less time than to gather so many bytes.
SMALL_BYTES = 64 * 2**10
# Tuned: in a small model an array of less than this part of the largest stays whole: all of these are a small part of it.
_SMALL_SHARE = 16
_MATRIX = 2


def small_bytes(leaves: Iterable[tuple[StateLeaf, frozenset[int]]]) -> int:
    """Below how many bytes an array of this state stays whole."""
    largest = max((layer_bytes(leaf, layers) for leaf, layers in _parameters(leaves)), default=0)
    return min(SMALL_BYTES, largest // _SMALL_SHARE)


def _parameters(leaves: Iterable[tuple[StateLeaf, frozenset[int]]]) -> list[tuple[StateLeaf, frozenset[int]]]:
    """All but optimizer state, so that a state is judged alike with and without it; all where it is nothing else."""
    pairs = list(leaves)
    return [pair for pair in pairs if not pair[0].is_optimizer] or pairs


def layer_bytes(leaf: StateLeaf, layers: frozenset[int]) -> int:
    """Bytes of one layer of a stack, or of the whole array; 0 for PRNG keys."""
    return math.prod(size for index, size in enumerate(leaf.shape) if index not in layers) * (leaf.itemsize or 0)


def model_width(leaves: Iterable[tuple[StateLeaf, frozenset[int]]]) -> int:
    """The length that most matrices have, of equally common ones the smallest; 0 without matrices."""
    counts: Counter[int] = Counter()
    for leaf, layers in _parameters(leaves):
        lengths = [size for index, size in enumerate(leaf.shape) if index not in layers]
        if len(lengths) >= _MATRIX:
            counts.update(set(lengths))
    return max(counts, key=lambda size: (counts[size], -size), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeRule:
    """The rule for one state on one mesh.

    Attributes:
        state: The mesh axis that splits the state and its size, or None.
        tensor: The mesh axis that splits matrices and its size, or None.
        small: Arrays of fewer bytes stay whole.
        width: The model's width.
    """

    state: tuple[str, int] | None
    tensor: tuple[str, int] | None
    small: int
    width: int

    def axes(self, leaf: StateLeaf, layers: frozenset[int], taken: Sequence[MeshAxes] = ()) -> list[MeshAxes]:
        """Mesh axes for each dimension of an array; its layers are never sharded, and what is taken stays."""
        found = [*taken, *[None] * (len(leaf.shape) - len(taken))]
        if leaf.itemsize is None or layer_bytes(leaf, layers) < max(self.small, 1):
            return found
        dimensions = [index for index in range(len(leaf.shape)) if index not in layers]
        if self.tensor is not None and self.tensor[1] > 1 and len(dimensions) >= _MATRIX:
            fitting = [i for i in dimensions if found[i] is None and leaf.shape[i] % self.tensor[1] == 0]
            wide = [i for i in fitting if leaf.shape[i] != self.width]
            for index in [*wide, *reversed(fitting)][:1]:
                found[index] = self.tensor[0]
        if self.state is not None and self.state[1] > 1:
            for index in [i for i in dimensions if self._divides(leaf.shape[i], found[i])][:1]:
                found[index] = (*axis_names(found[index]), self.state[0]) if found[index] else self.state[0]
        return found

    def _divides(self, size: int, taken: MeshAxes) -> bool:
        """Whether the state's axis fits into a dimension, beside the tensor axis where that is there."""
        if self.state is None or (taken is not None and (self.tensor is None or taken != self.tensor[0])):
            return False
        return size % (self.state[1] * (self.tensor[1] if taken and self.tensor else 1)) == 0


LAYER_NAMES = frozenset(
    {"layer", "layers", "block", "blocks", "scan", "stack", "stacked", "depth", "repeat", "repeats", "stage", "stages"}
    | {"layers_axis", "layer_axis", "scan_layers", "stacked_layers"}
)
# Tuned: no model has so many layers, and most have more features.
_MOST_LAYERS = 1024
_MATRIX_STACK = 3


def layer_dimensions(leaves: Sequence[StateLeaf]) -> list[frozenset[int]]:
    """For each array the dimensions that are layers."""
    lengths = {leaf.shape[0] for leaf in leaves if _is_stack_of_matrices(leaf.shape)}
    shared = _shared_in_subtrees(leaves)
    found: list[frozenset[int]] = []
    for leaf in leaves:
        names = leaf.annotation.names if leaf.annotation else ()
        dimensions = {index for index, name in enumerate(names) if name in LAYER_NAMES}
        if leaf.shape and (leaf.shape[0] in lengths or leaf.words in shared):
            dimensions.add(0)
        found.append(frozenset(dimensions))
    return found


def _is_stack_of_matrices(shape: tuple[int, ...]) -> bool:
    return len(shape) >= _MATRIX_STACK and 1 < shape[0] <= min(_MOST_LAYERS, math.prod(shape[1:]) - 1)


def _shared_in_subtrees(leaves: Sequence[StateLeaf]) -> set[Words]:
    """Arrays of subtrees whose two or more arrays all have one leading dimension, smaller than all the others."""
    by_node: dict[tuple[bool, Words], list[StateLeaf]] = defaultdict(list)
    for leaf in leaves:
        for depth in range(len(leaf.words)):
            by_node[leaf.is_optimizer, leaf.words[:depth]].append(leaf)
    return {
        leaf.words
        for (is_optimizer, _), inside in by_node.items()
        if _share_a_stack(inside) and not (is_optimizer and _are_mirrors(inside))
        for leaf in inside
    }


def _are_mirrors(leaves: Sequence[StateLeaf]) -> bool:
    """Whether two arrays may be moments of one parameter: they share a leading dimension without being a stack."""
    return len({(leaf.words[-1], leaf.shape) for leaf in leaves}) < len(leaves)


def _share_a_stack(leaves: Sequence[StateLeaf]) -> bool:
    leading = {leaf.shape[0] if leaf.shape else 0 for leaf in leaves}
    rest = [size for leaf in leaves for size in leaf.shape[1:]]
    several = len(leaves) > 1 and sum(len(leaf.shape) > 1 for leaf in leaves) > 1
    return several and len(leading) == 1 and 1 < min(leading) <= _MOST_LAYERS and min(leading) < min(rest)


def would_split(shape: tuple[int, ...], size_bytes: int, devices: int) -> bool:
    """Whether a dimension that is no stack's divides by all of the devices, so that the rule splits it on any mesh of them.

    What a state of other arrays or the author's names would change is not known here.

    Args:
        shape: Of the whole array.
        size_bytes: Of the whole array.
        devices: That it is on.
    """
    itemsize = size_bytes // max(math.prod(shape), 1)
    leaf = StateLeaf(path="", words=(), shape=shape, itemsize=itemsize, is_optimizer=False, annotation=None)
    rule = ShapeRule(state=("devices", devices), tensor=None, small=SMALL_BYTES, width=0)
    (layers,) = layer_dimensions([leaf])
    return any(axes is not None for axes in rule.axes(leaf, layers))


def require_shardings(call: str, name: str, tree: Any) -> None:
    """Refuse a tree with something in it that is no place: no sharding, device, format or memory of JAX's.

    Raises:
        TypeError: as `refuse` words it.
    """
    for leaf in jax.tree.leaves(tree):
        if not isinstance(leaf, jax.sharding.Sharding | jax.Device) and not type(leaf).__module__.startswith("jax"):
            refuse(call, name, leaf, "None, a sharding such as a jax.sharding.NamedSharding, or a tree of shardings")


# Tuned: `heads` is no misspelt `kv_heads` (0.77), and one letter of seven is wrong in a misspelt word (0.86).
_ALIKE = 0.85


def named_axes(
    leaf: StateLeaf, roles: MeshRoles, *, given: ShardingRules, shipped: ShardingRules
) -> list[MeshAxes] | None:
    """Mesh axes for each dimension of an annotated array; None where the names mean nothing on this mesh.

    Args:
        leaf: The array with its annotation.
        roles: The mesh.
        given: The user's rules of the policy; those of the annotation come before them.
        shipped: Rules that are tried where nothing else decides a dimension.

    Raises:
        PolicyError: an axis that the mesh has not, a dimension that does not divide, one axis for two dimensions. Never for
            optimizer state, whose wrappers copy the words on another array.
    """
    names = _names(leaf)
    if names is None:
        return None
    found: dict[int, MeshAxes] = {index: None for index, name in enumerate(names) if name is None}
    for name, axes in (*(leaf.annotation.rules if leaf.annotation else ()), *given):
        index = _first_free(names, name, found)
        if index is not None and (axes is None or _is_free(axes, found)):
            _put(leaf, roles, found, index, axes, f"the rule {name!r} -> {axes!r}")
    for index, name in enumerate(names):
        if index not in found and name is not None and _are_axes(name, roles):
            _put(leaf, roles, found, index, name, f"its annotation {name!r}")
    for name, axes in shipped:
        index = _first_free(names, name, found)
        if index is None or axes is None or not _is_free(axes, found):
            continue
        if leaf.shape[index] % roles.size(axes) == 0:
            found[index] = axes
    known = any(name is not None and index in found for index, name in enumerate(names))
    if not known and any(name is not None for name in names):
        return None
    return [found.get(index) for index in range(len(leaf.shape))]


def require_met(rules: ShardingRules, leaves: Sequence[StateLeaf]) -> None:
    """Refuse the user's rules where none of them names an axis of the state, or one is misspelt.

    Raises:
        PolicyError: with the names that are there.
    """
    there = {name for leaf in leaves if leaf.annotation for name in leaf.annotation.names if isinstance(name, str)}
    named = {name for name, _ in rules}
    if not named & there:
        names = (
            f"its arrays' axes are called {', '.join(sorted(there))}" if there else "none of its arrays names its axes"
        )
        msg = (
            f"The sharding rules {', '.join(sorted(named))} would do nothing: {names}. Expected rules for names that the model "
            "gives by nnx.with_partitioning, nn.with_logical_partitioning or the like; without any, use sharding='fsdp'."
        )
        raise PolicyError(msg)
    for name in sorted(named - there):
        near = [other for other in sorted(there - named) if _is_misspelt(name, other)]
        if near:
            axes = next(value for own, value in rules if own == name)
            msg = (
                f"The sharding rule {name!r} names no axis of the state. Did you mean {near[0]!r}? Its arrays' axes "
                f"are called {', '.join(sorted(there))}. Type sharding={{..., {near[0]!r}: {axes!r}}}."
            )
            raise PolicyError(msg)


def _is_misspelt(name: str, other: str) -> bool:
    """Letters swapped, or one of many wrong; ``heads`` is no misspelt ``kv_heads``."""
    return sorted(name) == sorted(other) or difflib.SequenceMatcher(None, name, other).ratio() >= _ALIKE


def _names(leaf: StateLeaf) -> list[Any] | None:
    """The names, padded to the array's dimensions; None where it has none."""
    if leaf.annotation is None:
        return None
    names = list(leaf.annotation.names)
    if len(names) > len(leaf.shape):
        if leaf.is_optimizer:
            return None
        msg = (
            f"{_where(leaf)} is annotated with {len(names)} axis names, {tuple(names)!r}, and has {len(leaf.shape)} dimensions. "
            "Expected one name (or None) a dimension: change the annotation."
        )
        raise PolicyError(msg)
    return names + [None] * (len(leaf.shape) - len(names))


def _first_free(names: Sequence[Any], name: str, found: dict[int, MeshAxes]) -> int | None:
    return next((index for index, own in enumerate(names) if own == name and index not in found), None)


def _is_free(axes: MeshAxes, found: dict[int, MeshAxes]) -> bool:
    used = {axis for value in found.values() for axis in axis_names(value)}
    return used.isdisjoint(axis_names(axes))


def _are_axes(name: Any, roles: MeshRoles) -> bool:
    return all(axis in roles.sizes for axis in axis_names(name)) if isinstance(name, str | tuple) else False


def _put(  # noqa: PLR0913, PLR0917 - what is decided, for whom, and in whose words
    leaf: StateLeaf, roles: MeshRoles, found: dict[int, MeshAxes], index: int, axes: MeshAxes, words: str
) -> None:
    """Give a dimension the user's mesh axes, or refuse it."""
    wrong = _wrong(leaf, roles, found, index, axes)
    if wrong is None:
        found[index] = axes
    elif not leaf.is_optimizer:
        msg = f"{_where(leaf)} cannot be sharded as {words} asks for dimension {index}: {wrong}"
        raise PolicyError(msg)


def _wrong(leaf: StateLeaf, roles: MeshRoles, found: dict[int, MeshAxes], index: int, axes: MeshAxes) -> str | None:
    """What is wrong with it, and what to change; None where nothing is."""
    there = mesh_words(roles.sizes)
    missing = [axis for axis in axis_names(axes) if axis not in roles.sizes]
    if missing:
        return f"the mesh has no axis {missing[0]!r}, only {there}. Name one of these, or None."
    if not _is_free(axes, found):
        return f"{axes!r} already shards another dimension. Name each mesh axis once an array."
    size = roles.size(axis_names(axes))
    if leaf.shape[index] % size:
        return (
            f"its size {leaf.shape[index]} does not divide by {size} devices (mesh {there}). Make it a multiple of {size}, "
            "change the mesh, or use None."
        )
    return None


def _where(leaf: StateLeaf) -> str:
    return f"state{leaf.path} of shape {list(leaf.shape)}"


_SHARDED = "sharding='fsdp'"


def infer_shardings(state: Any, mesh: Mesh | AbstractMesh, policy: StepPolicy | Preset | Name) -> Any:
    """Where a sharding policy places each array of a training state.

        state = jax.device_put(state, jm.infer_shardings(state, mesh, "fsdp"))

    Args:
        state: Arrays, `jax.ShapeDtypeStruct`, a Flax TrainState, NNX modules and optimizers (abstract too), Equinox modules, or
            any tree of these. Give parameters and optimizer state together, as a tuple, so that they are placed alike.
        mesh: From ``jm.make_mesh``, with or without devices.
        policy: Its ``sharding``. ``replicate``: the state is whole along the batch's axes. ``zero1``: parameters so, optimizer
            state split. ``fsdp``: both split, over the axis ``fsdp`` or else ``data``. ``fsdp_tensor``: also over ``tensor``.
            Rules: only what they name is split.

    Returns:
        The same tree with a `NamedSharding` in place of each array, None in place of what is no array.

    Raises:
        PolicyError: a policy without sharding, a mesh without the axes that it needs, an annotation or a rule that does not
            fit its array. Where only shapes decide, an array that does not divide stays whole.
    """
    sharding = _required_sharding(policy_of(policy))
    if not isinstance(mesh, Mesh | AbstractMesh) or mesh.empty:
        expected = advise("mesh.make", axes='{"fsdp": -1}')
        msg = f"infer_shardings got the mesh {mesh!r:.80}. Expected one such as {expected}."
        raise PolicyError(msg)
    leaves, structure = state_leaves(state), jax.tree.structure(state)
    arrays = [leaf for leaf in leaves if leaf is not None]
    specs = iter(_Placing(arrays, mesh_roles(mesh), sharding).specs())
    return jax.tree.unflatten(
        structure, [None if leaf is None else NamedSharding(mesh, next(specs)) for leaf in leaves]
    )


def _required_sharding(policy: StepPolicy) -> str | ShardingRules:
    if policy.sharding is None:
        msg = (
            f"The policy sets no sharding. Expected one that does: {advise('preset.load', names=repr('fsdp'))} or "
            f"{advise('train.policy', settings=_SHARDED)}."
        )
        raise PolicyError(msg)
    return policy.sharding


@dataclass(frozen=True, slots=True)
class _Decided:
    """Mesh axes of one parameter: its own, and those of its optimizer state."""

    own: list[MeshAxes]
    optimizer: list[MeshAxes]


class _Placing:
    """The rules in their order, for the arrays of one state."""

    def __init__(self, leaves: Sequence[StateLeaf], roles: MeshRoles, sharding: str | ShardingRules) -> None:
        self._leaves = leaves
        self._roles = roles
        self._name = sharding if isinstance(sharding, str) else "rules"
        self._given: ShardingRules = () if isinstance(sharding, str) else sharding
        if isinstance(sharding, str):
            require_axes(roles, sharding)
        else:
            require_met(sharding, leaves)
        self._layers = layer_dimensions(leaves)
        self._by_shape = self._shape_rule()

    def _shape_rule(self) -> ShapeRule:
        state = None if self._name == "rules" else self._roles.state
        tensor = self._roles.tensor if self._name == "fsdp_tensor" else None
        pairs = list(zip(self._leaves, self._layers, strict=True))
        return ShapeRule(
            state=None if state is None else (state, self._roles.size(state)),
            tensor=None if tensor is None else (tensor, self._roles.size(tensor)),
            small=small_bytes(pairs),
            width=model_width(pairs),
        )

    def specs(self) -> list[PartitionSpec]:
        """One partition spec an array, in order."""
        found: dict[int, list[MeshAxes]] = {}
        mirrors: dict[Words, list[tuple[StateLeaf, _Decided]]] = defaultdict(list)
        for index, leaf in enumerate(self._leaves):
            if not leaf.is_optimizer:
                decided = self._parameter(leaf, self._layers[index])
                found[index] = decided.own
                for start in range(len(leaf.words)):
                    mirrors[leaf.words[start:]].append((leaf, decided))
        for index, leaf in enumerate(self._leaves):
            if leaf.is_optimizer:
                mirrored = _mirrored(leaf, mirrors)
                alone = self._parameter(leaf, self._layers[index]) if mirrored is None else mirrored
                found[index] = alone.optimizer
        return [_spec(found[index]) for index in range(len(self._leaves))]

    def _parameter(self, leaf: StateLeaf, layers: frozenset[int]) -> _Decided:
        if self._name in {"replicate", "zero1"}:
            annotated = named_axes(leaf, self._roles, given=(), shipped=()) or [None] * len(leaf.shape)
            own = [self._without_batch(axes) for axes in annotated]
            if self._name == "replicate":
                return _Decided(own, own)
            return _Decided(own, self._by_shape.axes(leaf, layers, own))
        both = named_axes(
            leaf, self._roles, given=self._given, shipped=shipped_rules(self._roles, self._name)
        ) or self._by_shape.axes(leaf, layers)
        return _Decided(both, both)

    def _without_batch(self, axes: MeshAxes) -> MeshAxes:
        """What is left of an annotation where arrays are whole along the batch's axes."""
        left = tuple(axis for axis in axis_names(axes) if axis not in self._roles.batch)
        return (left if isinstance(axes, tuple) else left[0]) if left else None


def _mirrored(leaf: StateLeaf, parameters: dict[Words, list[tuple[StateLeaf, _Decided]]]) -> _Decided | None:
    """The parameter that ends the optimizer leaf's path and has its shape; the longest common end counts."""
    for start in range(len(leaf.words)):
        for parameter, decided in parameters.get(leaf.words[start:], ()):
            if parameter.shape == leaf.shape:
                return decided
    return None


def _spec(axes: Sequence[MeshAxes]) -> PartitionSpec:
    """Without the trailing dimensions that are whole."""
    end = len(axes)
    while end and axes[end - 1] is None:
        end -= 1
    return PartitionSpec(*axes[:end])
