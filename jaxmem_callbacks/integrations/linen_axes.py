"""Flax Linen: the axis names of an array in a metadata box (``nn.Partitioned``, ``nn.LogicallyPartitioned``)."""

from __future__ import annotations

from typing import Any

from flax.core import meta
from flax.core.spmd import get_logical_axis_rules

from jaxmem_callbacks.transforms.frameworks import Annotation, rule_pairs


def is_annotated(node: Any) -> bool:
    """Whether a node is a box of Flax Linen."""
    return isinstance(node, meta.AxisMetadata)


def annotation(node: Any) -> Annotation | None:
    """The box's names: those that ``nn.with_partitioning`` or ``nn.with_logical_partitioning`` gave and nn.scan extended."""
    if not isinstance(node, meta.Partitioned):
        return None  # another kind of metadata, such as of weight norms: nothing about sharding
    own = getattr(node, "rules", None) or ()
    return Annotation(names=tuple(node.names), rules=rule_pairs((*own, *get_logical_axis_rules())))
