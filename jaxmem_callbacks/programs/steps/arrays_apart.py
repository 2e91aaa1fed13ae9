"""A step that Equinox jitted and its arguments enter; the same step of their arrays alone leaves, which JAX itself can trace.

``eqx.filter_jit`` takes trees that hold functions and numbers beside arrays, and tells no trace. What is no array stays here as
it was given, as it does there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax

from jaxmem_callbacks.programs.steps.jitting import Jitted, already_jitted
from jaxmem_callbacks.programs.steps.leaves import arrays_of, is_array, named_arguments

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
