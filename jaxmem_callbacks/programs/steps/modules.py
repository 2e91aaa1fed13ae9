"""The jit of a step whose arguments hold Equinox modules: their arrays are traced, and all else in them is static.

A module is a tree of arrays, functions, switches and numbers. Here each leaf of a module that is no array becomes a node
without leaves, which keeps the value in the tree's structure. `jax.jit` then takes the tree as it is, and compiles anew where
such a value changed, as ``eqx.filter_jit`` does. Donation, shardings and traces are JAX's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.core import Tracer

from jaxmem_callbacks.programs.steps.jitting import Jitted
from jaxmem_callbacks.programs.steps.leaves import is_array, is_dynamic
from jaxmem_callbacks.transforms.frameworks import is_equinox_module


@jax.tree_util.register_pytree_node_class
class Static:
    """A value that is part of a tree's structure: a node without leaves.

    Two are the same where value and type are: 1, 1.0 and True are equal in Python and another program each.

    Args:
        value: Hashable, as JAX wants of all that decides what is compiled.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten(self) -> tuple[tuple[()], Any]:
        """No children; the value is the structure, with its type."""
        return (), (type(self.value), self.value)

    @classmethod
    def tree_unflatten(cls, structure: Any, _: Any) -> Static:
        """The node again."""
        return cls(structure[1])

    def __repr__(self) -> str:
        return f"Static({self.value!r})"


def hold_modules(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an Equinox module is anywhere among the arguments of a call."""
    nodes = jax.tree.leaves((args, kwargs), is_leaf=is_equinox_module)
    return any(map(is_equinox_module, nodes))


def split(tree: Any, *, numbers: bool) -> Any:
    """A tree with `Static` in the place of what is no array inside its modules, and of what no program can take elsewhere.

    Args:
        tree: Any.
        numbers: Whether a program takes numbers outside of modules.
    """
    leaves, structure = jax.tree.flatten(tree)
    places = _places_in_modules(structure)
    return structure.unflatten(
        [
            leaf if _is_traced(leaf, numbers=numbers and place not in places) else Static(leaf)
            for place, leaf in enumerate(leaves)
        ]
    )


def join(tree: Any) -> Any:
    """The tree that `split` made this one of."""
    return jax.tree.map(lambda node: node.value if _is_static(node) else node, tree, is_leaf=_is_static)


def _is_static(node: Any) -> bool:
    return isinstance(node, Static)


def _is_traced(leaf: Any, *, numbers: bool) -> bool:
    """Whether a leaf is data: an array or what stands for one, and where ``numbers`` are, one of these."""
    if is_array(leaf) or isinstance(leaf, Tracer):
        return True
    return numbers and (is_dynamic(leaf) or isinstance(leaf, bool))


@functools.lru_cache(maxsize=256)
def _places_in_modules(structure: Any) -> frozenset[int]:
    """Which leaves of a structure are inside a module, by their number."""
    numbered = structure.unflatten(range(structure.num_leaves))
    modules = filter(is_equinox_module, jax.tree.leaves(numbered, is_leaf=is_equinox_module))
    return frozenset(number for module in modules for number in jax.tree.leaves(module))


def of_parts(function: Callable[..., Any], *, numbers: bool) -> Callable[..., Any]:
    """A function of whole trees as one of trees that are split; ``numbers`` as in `split`."""

    @functools.wraps(function)
    def on_parts(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = join((args, kwargs))
        return split(function(*args, **kwargs), numbers=numbers)

    return on_parts


class SplitJit:
    """A jit of split trees, called with whole ones."""

    def __init__(self, jitted: Any, *, numbers: bool) -> None:
        functools.update_wrapper(self, jitted, updated=())
        self._jitted = jitted
        self._numbers = numbers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The step's result, its modules whole."""
        args, kwargs = split((args, kwargs), numbers=self._numbers)
        return join(self._jitted(*args, **kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """JAX's own lowering, of the arrays."""
        args, kwargs = split((args, kwargs), numbers=self._numbers)
        return self._jitted.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """JAX's own trace, of the arrays."""
        args, kwargs = split((args, kwargs), numbers=self._numbers)
        return self._jitted.trace(*args, **kwargs)


def for_whole_trees(jitted: Jitted, *, numbers: bool) -> Jitted:
    """A jit of split trees as one that is called and lowered with whole ones; ``numbers`` as in `split`."""
    outer = SplitJit(jitted.call, numbers=numbers)
    return replace(jitted, call=outer, lowering=outer)
