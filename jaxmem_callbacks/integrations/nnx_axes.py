"""Flax NNX: the axis names in a Variable's metadata, by ``out_sharding`` and ``sharding_rules``."""

from __future__ import annotations

from typing import Any

from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem_callbacks.transforms.frameworks import Annotation, rule_pairs


def is_annotated(node: Any) -> bool:
    """Whether a node is an NNX variable."""
    return isinstance(node, nnx.Variable)


def annotation(node: Any) -> Annotation | None:
    """The variable's axis names; an optimizer's variables carry those of their parameters."""
    metadata = node.get_metadata()
    given = metadata.get("out_sharding") or metadata.get("sharding")
    names = given.spec if isinstance(given, NamedSharding) else given
    if not isinstance(names, tuple | PartitionSpec) or not names:
        return None
    own = metadata.get("sharding_rules") or ()
    return Annotation(names=tuple(names), rules=rule_pairs((*own, *get_logical_axis_rules())))
