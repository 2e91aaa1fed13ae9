"""The dimensions of an array to shard, by its shape."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxmem_callbacks.records.policies import MeshAxes
from jaxmem_callbacks.transforms.sharding.axes import axis_names
from jaxmem_callbacks.transforms.sharding.leaves import StateLeaf, Words

SMALL_BYTES = 64 * 2**10
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
        devices: That it lies on.
    """
    itemsize = size_bytes // max(math.prod(shape), 1)
    leaf = StateLeaf(path="", words=(), shape=shape, itemsize=itemsize, is_optimizer=False, annotation=None)
    rule = ShapeRule(state=("devices", devices), tensor=None, small=SMALL_BYTES, width=0)
    (layers,) = layer_dimensions([leaf])
    return any(axes is not None for axes in rule.axes(leaf, layers))
