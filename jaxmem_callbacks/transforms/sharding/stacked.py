"""A state's arrays enter; which of their dimensions are layers leaves: a scanned axis is never sharded.

Splitting the axis that a scan runs over makes every iteration fetch its layer from one device. What is taken for such an axis:

1. by the author's word: a dimension named like layers (`LAYER_NAMES`), as ``nn.scan(metadata_params=...)`` and
   ``nnx.vmap(transform_metadata=...)`` write it, wherever it stands;
2. by shape: the leading dimension L <= 1024 of an array with three dimensions or more, where L is smaller than the product of the
   others. Every array of the state with the leading length L then counts as stacked, its biases and scales too;
3. by shape, where stacks have no matrices: the leading dimension that all arrays of a subtree share, where it is smaller than
   all their other dimensions.

The limits: a scanned axis that is not the leading one is seen only by its name. What is taken for layers by mistake (experts,
attention heads, a convolution's height) is sharded along another dimension, or not at all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from jaxmem_callbacks.transforms.sharding.leaves import StateLeaf, Words

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
