"""What the library needs of a framework whose objects are not plain pytrees of arrays, and where to find it.

The rooms above `integrations` never import a framework: they ask here, by the module name of the user's object, and the
one file that knows that framework is loaded then. Who writes checkpoints is asked for here too.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import jax

from jaxmem_callbacks.records.errors import LossRefusedError
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
        """Whether a node wraps one array and may name its axes."""
        ...

    def annotation(self, node: Any) -> Annotation | None:
        """The names it gives the axes; None where it gives none."""
        ...


class Framework(Protocol):
    """One framework with mutable objects, such as Flax NNX. Implemented by a module of ``integrations``."""

    NAME: str
    VALUE_AND_GRAD: str  # what to type instead of jm.value_and_grad

    def is_object(self, value: Any) -> bool:
        """Whether ``value`` is one of the framework's own stateful objects (a module, an optimizer)."""
        ...

    def jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """The framework's own jit, with ``donate_argnames`` and the rest of jax.jit's options; has ``.lower``."""
        ...

    def pinned(self, value: Any, shardings: Any) -> Any:
        """What the framework's jit takes in ``in_shardings`` for an argument, given one sharding for each of its arrays."""
        ...

    def arrays(self, value: Any) -> Any:
        """The object's arrays as a plain pytree of dicts, keyed by path; other values unchanged."""
        ...

    def loss_with_state(self, loss: Any) -> LossWithState | None:
        """What the framework's own gradient function made of a loss; None for any other function."""
        ...

    def apart(self, tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        """The arrays of a tree with the framework's objects, and what makes a copy of the tree around others."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LossWithState:
    """A loss as a framework's own gradient function hands it to JAX: of pure trees, its modules' new state among its aux.

    Attributes:
        hidden: State that is no argument and is not differentiated, such as random streams; a pure tree.
        call: From ``hidden`` and the arguments to the loss, the user's aux or None, and the new state; may be called any number
            of times.
        joined: The user's aux and the state as what JAX is handed as aux.
        holds_state: Whether an argument has state in it.
    """

    hidden: Any
    call: Callable[..., tuple[Any, Any, Any]]
    joined: Callable[[Any, Any], Any]
    holds_state: Callable[[Any], bool]


class Checkpoints(Protocol):
    """A folder of checkpoints by step, each a state and a small note beside it. Implemented by a module of ``integrations``."""

    def save(self, step: int, state: Any, note: Mapping[str, Any]) -> Path:
        """Write one; returns when it is complete, with where it is."""
        ...

    def steps(self) -> tuple[int, ...]:
        """Steps of the complete ones, in order."""
        ...

    def note(self, step: int) -> dict[str, Any]:
        """What stands beside one."""
        ...

    def written(self, step: int) -> int | None:
        """When one was written, by the clock of then, in nanoseconds; None where that cannot be read."""
        ...

    def restore(self, step: int, like: Any) -> Any:
        """The state of one, its arrays placed as those of ``like``, which may be shapes."""
        ...


# Root module of the user's object -> the file that knows it.
_KNOWN = (("flax.nnx", "jaxmem_callbacks.integrations.flax_nnx"),)
# Root module of what wraps annotated arrays -> the file that reads the annotation.
_ANNOTATORS = (
    ("flax.nnx.variablelib", "jaxmem_callbacks.integrations.flax_nnx"),
    ("flax.core.meta", "jaxmem_callbacks.integrations.flax_linen"),
)

_CHECKPOINTS = "jaxmem_callbacks.integrations.orbax"


def framework_of(*trees: Any) -> Framework | None:
    """The framework that owns an object anywhere in ``trees``, or None for plain pytrees of arrays."""
    nodes = jax.tree.leaves(trees, is_leaf=lambda node: _owner(node) is not None)
    return next((found for node in nodes if (found := _owner(node)) is not None), None)


def _owner(value: Any) -> Framework | None:
    """The framework of one value, judged by the modules of its classes, so that nothing is imported for plain arrays."""
    place = _place_of(type(value), _KNOWN)
    if place is None:
        return None
    framework = cast("Framework", importlib.import_module(place))
    return framework if framework.is_object(value) else None


def loss_with_state(loss: Callable[..., Any]) -> LossWithState | None:
    """A loss that a framework's own gradient function hands to JAX; None for any other."""
    place = _place_of(type(loss), _KNOWN)
    return None if place is None else cast("Framework", importlib.import_module(place)).loss_with_state(loss)


def is_equinox_module(value: Any) -> bool:
    """Whether a value is an Equinox module: a tree of arrays, functions and switches, which is never changed in place."""
    return any(each.__name__ == "Module" and each.__module__.startswith("equinox.") for each in type(value).__mro__)


def annotator_of(node: Any) -> Annotator | None:
    """The reader of a node's names for the axes of its array, or None for plain containers and arrays."""
    place = _place_of(type(node), _ANNOTATORS)
    if place is None:
        return None
    annotator = cast("Annotator", importlib.import_module(place))
    return annotator if annotator.is_annotated(node) else None


def checkpoints_in(folder: Path, *, keep: int | None = None, alone: bool = False) -> Checkpoints:
    """Orbax's checkpoints of a folder, which is made where it is missing.

    Args:
        folder: A folder of checkpoints only.
        keep: The number of newest ones that stay; None for all.
        alone: Written by this process without the others of the run.
    """
    return importlib.import_module(_CHECKPOINTS).checkpoints_in(folder, keep=keep, alone=alone)


@functools.cache
def _place_of(kind: type, known: tuple[tuple[str, str], ...]) -> str | None:
    for base in kind.__mro__:
        for root, place in known:
            if base.__module__ == root or base.__module__.startswith(root + "."):
                return place
    return None


def refuse_framework_objects(*trees: Any) -> None:
    """Refuse stateful objects, whose state a plain function would silently leave behind.

    Raises:
        LossRefusedError: which is a ValueError; names the function that keeps their state.
    """
    framework = framework_of(*trees)
    if framework is not None:
        msg = (
            f"The arguments hold {framework.NAME} objects, whose state (BatchNorm statistics, dropout counters) a plain "
            f"gradient would leave behind. Use {framework.VALUE_AND_GRAD} instead."
        )
        raise LossRefusedError(msg)


def rule_pairs(rules: Iterable[Any]) -> ShardingRules:
    """Flax's rules with lists of mesh axes as tuples."""
    return tuple((str(name), tuple(axes) if isinstance(axes, list) else axes) for name, axes in rules)
