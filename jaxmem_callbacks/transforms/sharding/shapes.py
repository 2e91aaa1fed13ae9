"""An array's shape and mesh axes enter; the dimensions to shard leave: the rule for arrays that nobody annotated.

The state's axis splits the first dimension that divides. In JAX that is the one that a matrix product sums over, so the compiler
gathers the weight; split along what the product puts out, the weight makes it split activations, which the batch splits already
(measured on a scanned transformer for eight devices: 171 MiB of temporaries against 480 with the largest dimension). The tensor
axis splits the first dimension that is not the model's width, so the wide side of a layer and the heads of attention; the width
is the length that most matrices have. Where both mean one dimension they share it.

Arrays under 64 KiB (a layer's share of a stack counts) stay whole: gathering them costs more than they take. Where the whole
state is small, arrays under a sixteenth of its largest stay whole instead. A dimension that does not divide is never an error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxmem_callbacks.records.policies import MeshAxes
from jaxmem_callbacks.transforms.sharding.axes import axis_names
from jaxmem_callbacks.transforms.sharding.leaves import StateLeaf

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
