"""The user's step, plain or jitted, with the settings of its jit."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, final

import jax
from jax.core import Tracer

from jaxmem_callbacks._compat.jit_settings import compiler_options_of, with_compiler_options
from jaxmem_callbacks.programs.steps.leaves import (
    Leaf,
    arrays_of,
    call_leaves,
    is_array,
    is_dynamic,
    named_arguments,
    parameter_names,
)
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arguments import name_of
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.policies import CompilerOptions
from jaxmem_callbacks.records.source_files import Owner, owner_of
from jaxmem_callbacks.transforms.frameworks import framework_of, is_equinox_module

# What a function has that stands for a loop of `jax.lax` without a jit: the loop as people write it, where they can.
LOOP = "loop_as_written"


@dataclass(frozen=True, kw_only=True, slots=True)
class Jitted:
    """A step that JAX compiles.

    Attributes:
        call: What to call.
        lowering: What has ``.lower`` and ``.trace`` (under a `functools.partial`, the jit inside it).
        function: The user's own function, for names and source lines.
        bound_args: Arguments that a `functools.partial` or ``nnx.cached_partial`` already holds.
        bound_kwargs: Keyword arguments that a `functools.partial` already holds.
    """

    call: Callable[..., Any]
    lowering: Any
    function: Callable[..., Any]
    bound_args: tuple[Any, ...] = ()
    bound_kwargs: dict[str, Any]

    @property
    def word(self) -> str:
        """How the user wrote the jit: by ``jax.jit`` what a step changes of its NNX modules would be lost without a word."""
        if self.is_equinox:
            return "eqx.filter_jit"
        return "nnx.jit" if type(self.lowering).__module__.startswith("flax.nnx.") else "jax.jit"

    @property
    def is_equinox(self) -> bool:
        """Whether it is Equinox's, which splits what it is given into arrays and all else, and has no ``trace``."""
        return _room(self.lowering) == "equinox"

    @property
    def may_donate(self) -> bool:
        """Whether `jm.jit_step` takes donation on itself: it is Equinox's around a plain function, and donates nothing."""
        jit = self.lowering
        if not self.is_equinox or self.call is not jit or jit.donate_first or jit.donate_rest:
            return False
        return inspect.isfunction(jit.__wrapped__)

    def donating(self, name: str, names: Sequence[str], donated: Iterable[str] = ()) -> str:
        """A sentence on how its user donates some arguments of a step, besides those that are: an option of the jit there.

        The jit may have other options, such as static arguments, and be a decorator: a line in its place would lose them. One in
        an installed package is no file of the user's: what its maker offers is asked.
        Arguments in ``*args`` have no name and go by position. Equinox's own jit can donate all arguments or all but the
        first, and what is used again with them: `jm.jit_step` picks.
        """
        file = getattr(getattr(self.function, "__code__", None), "co_filename", "")
        if owner_of(file) is Owner.PACKAGE:
            return f"{name} is jitted in an installed package, {file}: has that an option to donate {', '.join(names)}?"
        if self.is_equinox:
            return f"Write {advise('donation.equinox', step=name)}."
        donated = tuple(donated)
        every = tuple(dict.fromkeys((*donated, *names)))
        places = tuple(int(each[len("args[") : -1]) for each in every if each.startswith("args["))
        named = tuple(each for each in every if not each.startswith("args["))
        options = [advise("donation.argnums", places=repr(places)[1:-1])] if places else []
        written = ", ".join([*options, advise("donation.argnames", names=repr(named)[1:-1])] if named else options)
        loop = getattr(self.function, LOOP, None)
        if loop is not None:
            return f"Write {written} in a jax.jit of {loop or 'the loop'}."
        # JAX reads names for positions only where the jit has no positions of its own.
        instead = ", in place of what it donates now" if donated else ""
        return f"Write {written} in the {self.word} of {name}{instead}."

    def full(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the jit itself sees them."""
        return (*self.bound_args, *args), {**self.bound_kwargs, **kwargs}

    def taken(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same as its program takes them: of Equinox's the arrays alone."""
        full = self.full(args, kwargs)
        return arrays_of(full) if self.is_equinox else full

    def leaves(
        self, arguments: Sequence[tuple[str, Any]], positional: int, lowered: jax.stages.Lowered, jaxpr: Any
    ) -> list[Leaf]:
        """`call_leaves` of the arguments that it takes: Equinox's program takes what it donates before all else."""
        if not self.is_equinox:
            return call_leaves(arguments, positional, lowered, jaxpr)
        names = parameter_names(self.function)
        order = {name: place for place, name in enumerate(names)}
        if self.lowering.donate_rest and not self.lowering.donate_first:
            order |= dict.fromkeys(names[:1], len(names))
        return call_leaves(sorted(arguments, key=lambda each: order.get(each[0], len(names))), 0, lowered)

    def lower(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the step's own ``.lower`` returns for these arguments."""
        full_args, full_kwargs = self.full(args, kwargs)
        return self.lowering.lower(*full_args, **full_kwargs)

    def lowered(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[jax.stages.Lowered, Any]:
        """JAX's own lowering for these arguments, and what was traced; None for a jit that has no ``trace``."""
        if not hasattr(self.lowering, "trace"):
            return jax_lowered(self.lower(args, kwargs)), None
        full_args, full_kwargs = self.full(args, kwargs)
        traced = self.lowering.trace(*full_args, **full_kwargs)
        return jax_lowered(traced.lower()), jax_traced(traced).jaxpr


def already_jitted(step: Callable[..., Any]) -> Jitted | None:
    """The jit that the user made, through any partial of Python's or Equinox's around it; None for a plain function."""
    step = getattr(step, "watched_jit", step)  # the user's own behind one that `jaxmem inspect` watches
    if hasattr(step, "lower"):
        if isinstance(step, types.MethodType):  # the jit is the class's, and has the object as its first argument
            function = inspect.unwrap(step.__func__)
            return Jitted(
                call=step, lowering=step.__func__, function=function, bound_args=(step.__self__,), bound_kwargs={}
            )
        return Jitted(call=step, lowering=step, function=inspect.unwrap(step), bound_kwargs={})
    if isinstance(step, functools.partial) or _is_bound_by_equinox(step):
        partial = cast("functools.partial[Any]", step)
        inner = already_jitted(partial.func)
        bound = (partial.args, dict(partial.keywords))
    elif (cached := _cached_partial(step)) is not None:
        inner, bound = already_jitted(cached[0]), (cached[1], {})
    else:
        return None
    if inner is None:
        return None
    args, kwargs = inner.full(*bound)
    return Jitted(call=step, lowering=inner.lowering, function=inner.function, bound_args=args, bound_kwargs=kwargs)


def _is_bound_by_equinox(step: Any) -> bool:
    """Whether a step is Equinox's own partial, as a method under ``eqx.filter_jit`` is."""
    return _room(step) == "equinox" and all(hasattr(step, name) for name in ("func", "args", "keywords"))


def _room(value: Any) -> str:
    """The package that an object's class comes from."""
    return type(value).__module__.partition(".")[0]


def without_undonating_jit(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function under an ``eqx.filter_jit`` that donates nothing; any other step as it is.

    Equinox can donate all arguments or all but the first, and no choice of them. Its jit has no other setting; that it traces no
    number is kept by `OfEquinox`.
    """
    own = already_jitted(step)
    return step if own is None or not own.may_donate else OfEquinox(own.lowering.__wrapped__)


class OfEquinox:
    """The function under an ``eqx.filter_jit``, whose numbers are no arrays: they may be the bounds of its loops.

    Args:
        function: What was jitted.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's own result."""
        return self.__wrapped__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue] - `update_wrapper` gives it


def jit_word(step: Callable[..., Any]) -> str:
    """How to write the jit of a step, as its user did."""
    jitted = already_jitted(step)
    return "jax.jit" if jitted is None else jitted.word


def _cached_partial(step: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """The jit and the cached arguments inside ``nnx.cached_partial``, which keeps them only in its closure."""
    if not inspect.isfunction(step) or not step.__module__ or not hasattr(step, "jitted_fn"):
        return None
    inside = inspect.getclosurevars(step).nonlocals
    if "f" in inside and "cached_args" in inside:
        return cast("Callable[..., Any]", inside["f"]), tuple(inside["cached_args"])
    return None


def jit_plain(
    function: Callable[..., Any],
    arguments: Sequence[tuple[str, Any]],
    *,
    compiler_options: CompilerOptions | None = None,
    **options: Any,
) -> Any:
    """``jax.jit`` of a plain function, or the jit of the framework whose objects are among its arguments."""
    framework = framework_of([value for _, value in arguments])
    options = {name: value for name, value in options.items() if value}
    made = jax.jit(function, **options) if framework is None else framework.jit(function, **options)
    return made if compiler_options is None else _compiling_with(made, compiler_options, name_of(function))


def jitted_with(own: Jitted, options: CompilerOptions) -> Jitted:
    """The user's own jit with a policy's compiler options: its donation, static arguments and shardings stay.

    Raises:
        PolicyError: it has another value for one of them, or its settings cannot be read.
    """
    name = name_of(own.function)
    options.require_agreement(compiler_options_of(own.lowering), f"the {own.word} of {name}")
    lowering = _compiling_with(own.lowering, options, name)
    bound = own.bound_args or own.bound_kwargs
    call = functools.partial(lowering, *own.bound_args, **own.bound_kwargs) if bound else lowering
    return replace(own, lowering=lowering, call=call)


def _compiling_with(jitted: Any, options: CompilerOptions, name: str) -> Any:
    made = with_compiler_options(jitted, options.by_name)
    if made is None:
        msg = (
            f"compiler_options={options!r}: the settings of the jit of {name} cannot be read, so no other jit can have them and "
            "these. Expected a plain function, or a jax.jit without layouts. Write the options in that jit itself."
        )
        raise PolicyError(msg)
    return made


def jax_lowered(lowered: Any) -> jax.stages.Lowered:
    """JAX's own lowering inside a framework's (Flax NNX and Equinox wrap it under the public name ``lowered``)."""
    while not isinstance(lowered, jax.stages.Lowered):
        lowered = lowered.lowered
    return lowered


def jax_traced(traced: Any) -> Any:
    """JAX's own trace inside a framework's."""
    while hasattr(traced, "traced"):
        traced = traced.traced
    return traced


def static_arguments(arguments: Sequence[tuple[str, Any]], function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments that no program can take as data: switches, strings, callables, and defaults like them.

    Raises:
        TypeError: such a value sits inside a tree of arrays, or in an argument without a name.
    """
    static = [name for name, value in arguments if _is_static(value)]
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    static += [
        p.name for p in parameters if p.default is not p.empty and p.default is not None and _is_static(p.default)
    ]
    names = [*parameter_names(function), *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)]
    for name, value in arguments:
        if name in static and name not in names and name.startswith("args["):
            msg = (
                f"{name} of {name_of(function)} is {value!r}, which is no array. Expected arrays in *args: give the step a "
                f"named parameter for it, or close over it."
            )
            raise TypeError(msg)
        if name not in static:
            _require_arrays(name, value, function)
    return tuple(dict.fromkeys(static))


def _is_static(value: Any) -> bool:
    """A single value, not a tree, that is no array and no number."""
    if framework_of(value) is not None or value is None:
        return False
    return jax.tree_util.all_leaves([value]) and not is_dynamic(value)


def _require_arrays(name: str, value: Any, function: Callable[..., Any]) -> None:
    if framework_of(value) is not None:
        return
    for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
        if not is_dynamic(leaf) and not isinstance(leaf, bool):
            where = name + jax.tree_util.keystr(path)
            msg = (
                f"{where} of {name_of(function)} is a {type(leaf).__name__}, expected an array or a number. Pass it as an "
                "argument of its own, which is static then, or close over it. Of an Equinox model the arrays alone are traced."
            )
            raise TypeError(msg)


# Steps whose arguments hold Equinox modules: arrays apart from everything else.
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
    return jax.tree.map(lambda node: node.value if _is_static_node(node) else node, tree, is_leaf=_is_static_node)


def _is_static_node(node: Any) -> bool:
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
