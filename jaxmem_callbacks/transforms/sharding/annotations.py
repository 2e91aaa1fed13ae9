"""What a model's author wrote about an array's axes, and what reads it.

Frameworks wrap annotated arrays (an NNX ``Variable``, a Linen ``Partitioned`` box); `transforms.frameworks.annotator_of` finds
who can read a wrapper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from jaxmem_callbacks.records.policies import ShardingRules


@dataclass(frozen=True, kw_only=True, slots=True)
class Annotation:
    """The author's words on one array.

    Attributes:
        names: One logical or mesh axis name (or several mesh axes, or None) for each dimension, outermost first.
        rules: The author's own rules from logical names to mesh axes, those of the context included; the first match counts.
    """

    names: tuple[str | tuple[str, ...] | None, ...]
    rules: ShardingRules = ()


class Annotator(Protocol):
    """One framework's way to annotate. Implemented by a module of ``integrations``."""

    def is_annotated(self, node: Any) -> bool:
        """Whether a node wraps one array and may say something about its axes."""
        ...

    def annotation(self, node: Any) -> Annotation | None:
        """What it says; None where nothing was said."""
        ...
