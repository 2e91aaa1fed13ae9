"""Steps whose arguments hold Equinox modules: arrays apart from everything else."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
from jax.core import Tracer

from jaxmem_callbacks.programs.steps.leaves import arrays_of, is_array, is_dynamic, named_arguments
from jaxmem_callbacks.programs.steps.user_jit import Jitted, already_jitted
from jaxmem_callbacks.transforms.frameworks import is_equinox_module

_ARRAY = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayCall:
    """A call of arrays alone.

    Attributes:
        function: The user's function; where an argument has anything but arrays it takes None.
        args: Its arguments, trees of the same form.
        kwargs: Its keyword arguments.
    """

    function: OfArrays
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@final
class OfArrays:
    """A function that is given the arrays of its arguments, and gives those of its result.

    Args:
        function: The user's own.
        args: What it was called with: all but the arrays is kept.
        kwargs: Likewise.
        jit: The user's own jit of it.
        donated: Names of the arguments that it donates.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        jit: Jitted,
        donated: tuple[str, ...],
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self.jit, self.donated = jit, donated
        rest = self._bound(args, kwargs).arguments  # by name: the same call may be made by position or by keyword
        self._rest = jax.tree.map(lambda leaf: _ARRAY if is_array(leaf) else leaf, rest)

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        return inspect.signature(self._function).bind(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The arrays of the user's result."""
        call = self._bound(args, kwargs)
        given = {name: call.arguments[name] for name in self._rest}
        call.arguments = jax.tree.map(lambda own, new: new if own is _ARRAY else own, self._rest, given)
        return arrays_of(self._function(*call.args, **call.kwargs))


def arrays_apart(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> ArrayCall | None:
    """The call by arrays alone; None for a step that Equinox did not jit.

    Args:
        step: Any step, plain, jitted, or a `functools.partial` of a jitted one.
        args: Its arguments: arrays, `jax.ShapeDtypeStruct`, and whatever else Equinox takes.
        kwargs: Its keyword arguments.
    """
    own = already_jitted(step)
    if own is None or not own.is_equinox:
        return None
    full_args, full_kwargs = own.full(args, dict(kwargs))
    function = own.lowering.__wrapped__
    donated = _donated(own.lowering, function, full_args, full_kwargs)
    if any(map(is_array, jax.tree.leaves(function))):  # a module: its arrays are arguments too, and not the first
        function, full_args = _unbound(function), (function, *full_args)
        donated = ("self", *donated) if own.lowering.donate_rest else donated
    return ArrayCall(
        function=OfArrays(function, full_args, full_kwargs, jit=own, donated=donated),
        args=arrays_of(full_args),
        kwargs=arrays_of(full_kwargs),
    )


def _unbound(module: Any) -> Callable[..., Any]:
    """A callable module's own function, which takes the module too; named as the module is."""
    call = type(module).__call__

    @functools.wraps(call)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, *args, **kwargs)

    called.__name__ = type(module).__name__
    return called


def own_donation(step: Callable[..., Any]) -> tuple[str, ...] | None:
    """What another jit than JAX's donates: its own word, and no part of a policy. None for every other step."""
    return step.donated if isinstance(step, OfArrays) else None


def _donated(jit: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Names of what the jit donates: its first argument, all others, both or none."""
    names = [name for name, value in named_arguments(function, args, kwargs) if jax.tree.leaves(arrays_of(value))]
    first = next(iter(inspect.signature(function).parameters), None)
    donates_first, donates_rest = bool(jit.donate_first), bool(jit.donate_rest)
    return tuple(name for name in names if (donates_first if name == first else donates_rest))


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
