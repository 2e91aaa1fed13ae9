"""An array's shape and mesh axes enter; the dimensions to shard leave: the rule for arrays that nobody annotated.

The state's axis splits the first dimension that divides. In JAX that is the one that a matrix product sums over, so the compiler
gathers the weight; split along what the product puts out, the weight makes it split activations, which the batch splits already
(measured on a scanned transformer for eight devices: 171 MiB of temporaries against 480 with the largest dimension). The tensor
axis splits the largest dimension, of equally large ones the last.

Arrays under 64 KiB (a layer's share of a stack counts) stay whole: gathering them costs more than they take. Where the whole
state is small, arrays under a sixteenth of its largest stay whole instead. A dimension that does not divide is never an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from jaxmem_callbacks.records.policies import MeshAxes
from jaxmem_callbacks.transforms.sharding.leaves import StateLeaf

SMALL_BYTES = 64 * 2**10
_SMALL_SHARE = 16
_MATRIX = 2


def small_bytes(leaves: Iterable[tuple[StateLeaf, frozenset[int]]]) -> int:
    """Below how many bytes an array of this state stays whole."""
    pairs = list(leaves)
    own = [pair for pair in pairs if not pair[0].is_optimizer] or pairs  # the same with and without optimizer state
    largest = max((layer_bytes(leaf, layers) for leaf, layers in own), default=0)
    return min(SMALL_BYTES, largest // _SMALL_SHARE)


def layer_bytes(leaf: StateLeaf, layers: frozenset[int]) -> int:
    """Bytes of one layer of a stack, or of the whole array; 0 for PRNG keys."""
    return math.prod(size for index, size in enumerate(leaf.shape) if index not in layers) * (leaf.itemsize or 0)


def shape_axes(
    leaf: StateLeaf,
    layers: frozenset[int],
    axes: Sequence[tuple[str, int]],
    *,
    small: int,
    taken: Sequence[MeshAxes] = (),
) -> list[MeshAxes]:
    """Mesh axes for each dimension.

    Args:
        leaf: The array.
        layers: Its dimensions that are layers; they are never sharded.
        axes: Mesh axes with sizes. The last one is the state's, those before it split matrices and need two dimensions.
        small: Arrays of fewer bytes stay whole.
        taken: What is decided already.
    """
    found = [*taken, *[None] * (len(leaf.shape) - len(taken))]
    if leaf.itemsize is None or layer_bytes(leaf, layers) < max(small, 1):
        return found
    open_dimensions = [index for index in range(len(leaf.shape)) if index not in layers]
    for order, (axis, size) in enumerate(axes):
        is_last = order == len(axes) - 1
        if size == 1 or (not is_last and len(open_dimensions) < _MATRIX):
            continue
        fitting = [i for i in open_dimensions if found[i] is None and leaf.shape[i] % size == 0]
        if fitting:
            found[fitting[0] if is_last else max(fitting, key=lambda i: (leaf.shape[i], i))] = axis
    return found
