"""One array's shape, bytes and devices enter, without its state or its mesh; whether the shape rule would split it leaves."""

from __future__ import annotations

import math

from jaxmem_callbacks.transforms.sharding.leaves import StateLeaf
from jaxmem_callbacks.transforms.sharding.shapes import SMALL_BYTES, ShapeRule
from jaxmem_callbacks.transforms.sharding.stacked import layer_dimensions


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
