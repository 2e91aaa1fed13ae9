"""The arguments of a step's call: their arrays by path and role, their abstract form, and how the user wrote them."""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.source_files import Owner, owner_of
from jaxmem_callbacks.transforms.arg_roles import (
    BATCH,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    STATE,
    NodeKind,
    Role,
    dataflow_of,
    is_named,
    kind_of_argument,
    kind_of_node,
)
from jaxmem_callbacks.transforms.frameworks import framework_of
from jaxmem_callbacks.transforms.tracing import argument_names, open_jaxpr, traced_dtype

_STEP = re.compile(r"\[[^\]]*\]|\.\w+")


class _Leaf(Protocol):
    """What is asked of one array; as `Leaf`."""

    @property
    def path(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def by_class(self) -> bool: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


def places_with_moments(leaves: Sequence[_Leaf]) -> set[int]:
    """Places of the leaves of no kind by class or name of which an optimizer keeps moments.

    Optax keeps trees of the parameters' structure under a name of its own, such as ``state[1][0].mu['w']`` for ``state[0]['w']``:
    below that name path and shape are those of the parameter.
    """
    mirrored = {
        (below, leaf.shape)
        for leaf in leaves
        if leaf.kind == OPTIMIZER and jnp.issubdtype(leaf.dtype, jnp.inexact)
        for below in _below_names(leaf.path)
        if below or leaf.shape  # a number of the optimizer's own is no moment of another number
    }

    def has_moments(leaf: _Leaf) -> bool:
        if leaf.by_class or leaf.kind not in (OTHER, STATE) or is_named(leaf.path):
            return False
        steps = _STEP.findall(leaf.path)
        return jnp.issubdtype(leaf.dtype, jnp.inexact) and any(
            (tuple(steps[start:]), leaf.shape) in mirrored for start in range(len(steps) + 1)
        )

    return {place for place, leaf in enumerate(leaves) if mirrored and has_moments(leaf)}


def _below_names(path: str) -> list[tuple[str, ...]]:
    """What follows each name on a path."""
    steps = _STEP.findall(path)
    return [tuple(steps[place + 1 :]) for place, step in enumerate(steps) if step.startswith(".")]


# How JAX writes an input: the parameter, and what follows it.
_INPUT = re.compile(r"(?P<name>\w+)(?:\[(?:(?P<place>\d+)|'(?P<key>\w+)')\])?")

_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One array of a call.

    Attributes:
        argument: The name of the argument that holds it.
        path: Where it is, as the user would write it: ``state.params['Dense_0']['kernel']``.
        kind: What it holds, in the words of `ArgumentMemory.kind`.
        shape: Its global shape.
        dtype: Its dtype.
        value: The array, `jax.ShapeDtypeStruct` or Python number itself, or None where it is unknown.
        donated: Whether JAX was asked to donate it.
        passing: Whether it is donated although the step returns no update of its argument: a batch, and no state.
        by_class: Whether its kind follows from its class, and not from a name.
        updated: Whether the step is known to return it updated.
        differentiated: Whether the step is known to return its gradient as it is, and no update.
        accumulates: Whether gradients are added to it from step to step.
        no_update: Numbers of the step's results that are known to be no later value of it: gradients.
    """

    argument: str
    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: Any
    value: Any = None
    donated: bool = False
    passing: bool = False
    by_class: bool = False
    updated: bool = False
    differentiated: bool = False
    accumulates: bool = False
    no_update: frozenset[int] = frozenset()

    @property
    def type_text(self) -> str:
        """``float32[8,128]``."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    def bytes_under(self, sharding: Any) -> int:
        """Bytes of it on one device under a sharding, by its shape: what is deleted has no size of its own."""
        shape = self.shape if sharding is None else sharding.shard_shape(self.shape)
        return math.prod(shape) * getattr(self.dtype, "itemsize", 0)

    @property
    def bytes_here(self) -> int:
        """Bytes of it on one device, where it is."""
        return self.bytes_under(getattr(self.value, "sharding", None))


def named_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Each argument with its name in the user's function, in the order in which jit flattens them."""
    names = parameter_names(function)
    positional = [(names[i] if i < len(names) else f"args[{i}]", value) for i, value in enumerate(args)]
    return positional + sorted(kwargs.items())


def require_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], call: str) -> None:
    """Refuse arguments that a function cannot be called with, before anything is traced.

    Args:
        function: The user's step.
        args: What it is to be called with.
        kwargs: Likewise.
        call: What was called with it, such as ``jm.plan``.

    Raises:
        TypeError: with the call as it is to be written.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        needed = [
            each for each in signature.parameters.values() if each.default is each.empty and each.kind not in _MANY
        ]
        words = [f"{each.name}={each.name}" if each.kind is each.KEYWORD_ONLY else each.name for each in needed]
        step = getattr(function, "__name__", "train_step")
        line = advise("call.arguments", call=call, step=step, arguments=", ".join(words))
        msg = (
            f"{call} was given other arguments than {step} takes: {error}. Pass those of a call of {step}, as arrays or "
            f"jax.ShapeDtypeStruct:\n    {line}"
        )
        raise TypeError(msg) from None


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters that can be given by position; empty where Python does not know."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [parameter.name for parameter in parameters if parameter.kind in by_position]


def state_arguments(leaves: Iterable[Leaf], undonated: Iterable[str]) -> set[str]:
    """Names of the arguments that a step returns updated: what is donated, batches apart, and what is updated without it."""
    updated = {leaf.argument for leaf in leaves if leaf.updated or (leaf.donated and not leaf.passing)}
    return updated | set(undonated)


def user_leaves(name: str, value: Any) -> list[Leaf]:
    """The arrays of one argument, by path and kind; a variable shared by two places is listed once."""
    framework = framework_of(value)
    # Its jit may take the arrays in another order than the fields of the objects have.
    order = {} if framework is None else {id(array): place for place, array in enumerate(framework.apart(value)[0])}
    if framework is not None and _is_opaque(value):
        value = framework.arrays(value)
    found: list[Leaf] = []
    seen: set[int] = set()
    for path, node, kind in _nodes(value):
        if kind is not None and kind.shared_by_identity:
            if id(node) in seen:
                continue
            seen.add(id(node))
        found += [_leaf(name, path, leaf, kind) for leaf in jax.tree.leaves(node)]
    are_known = all(id(leaf.value) in order for leaf in found)
    return sorted(found, key=lambda leaf: order[id(leaf.value)]) if are_known else found


def _nodes(
    value: Any, root: tuple[Any, ...] = (), around: NodeKind | None = None
) -> Iterator[tuple[tuple[Any, ...], Any, NodeKind | None]]:
    """The leaves and variables of a tree with path and kind; what is inside an Optax state is optimizer state."""
    if around is None and (around := kind_of_node(value)) is not None and around.shared_by_identity:
        yield root, value, around
        return

    def stops(node: Any) -> bool:
        return node is not value and kind_of_node(node) is not None

    for path, node in jax.tree_util.tree_flatten_with_path(value, is_leaf=stops)[0]:
        kind = kind_of_node(node)
        if kind is not None and not kind.shared_by_identity and node is not value:
            yield from _nodes(node, (*root, *path), kind)
        elif kind is not None and around is not None:
            yield (*root, *path), node, replace(kind, name=around.name)
        else:
            yield (*root, *path), node, kind or around


def call_leaves(
    arguments: Sequence[tuple[str, Any]], positional: int, lowered: jax.stages.Lowered, jaxpr: Any = None
) -> list[Leaf]:
    """The leaves of a lowered call in the program's own order, named after the user's arguments.

    Args:
        arguments: All arguments with names, static ones included, as `named_arguments` gives them.
        positional: How many of them were given by position.
        lowered: What JAX made of the call: static arguments are gone, donation is marked.
        jaxpr: What was traced, where the jit has it: it shows which arguments are static and what each array is in the step.
    """
    infos = lowered.in_tree.flatten_up_to(lowered.args_info)
    aligned = _named_by_jax(arguments, jaxpr) or _dynamic_arguments(arguments, positional, lowered.in_tree, infos)
    if aligned is None:
        every = [leaf for name, value in arguments for leaf in user_leaves(name, value) if is_dynamic(leaf.value)]
        leaves = _named("argument", every, infos)
    else:
        leaves = []
        for name, value, count in aligned:
            part = infos[len(leaves) : len(leaves) + count]
            leaves += _named(name, user_leaves(name, value), part)
    return _parameters_known(_with_roles(leaves, jaxpr))


def _named_by_jax(arguments: Sequence[tuple[str, Any]], jaxpr: Any) -> list[tuple[str, Any, int]] | None:
    """(name, value, leaves) of the arguments that the program sees, by the names that JAX gives its inputs."""
    inputs = None if jaxpr is None else argument_names(jaxpr)
    if inputs is None:
        return None
    names = [name for name, _ in arguments]
    counts = Counter(_argument_of(each, names) for each in inputs)
    aligned = [(name, value, counts.pop(name)) for name, value in arguments if name in counts]
    return aligned if not counts and all(_is_taken_whole(value, count) for _, value, count in aligned) else None


def _argument_of(written: str, names: Sequence[str]) -> str | None:
    """Which argument an input is of: JAX writes ``state['w']``, ``rest[0]`` for ``*rest``, ``options['x']`` for ``**options``."""
    found = _INPUT.match(written)
    if found is None or found["name"] in names:
        return found and found["name"]
    if found["key"]:
        return found["key"] if found["key"] in names else None
    unnamed = [name for name in names if name.startswith("args[")]
    return unnamed[int(found["place"])] if found["place"] and int(found["place"]) < len(unnamed) else None


def _with_roles(leaves: list[Leaf], jaxpr: Any) -> list[Leaf]:
    """The leaves by what the step does with them, but for those whose class or own name is more certain."""
    if jaxpr is None or len(open_jaxpr(jaxpr).invars) != len(leaves):
        return leaves
    flow = dataflow_of(jaxpr)
    found = [
        replace(leaf, no_update=results, **({} if role is None else _role(leaf, role)))
        for leaf, role, results in zip(leaves, flow.roles, flow.no_update, strict=True)
    ]
    trained: dict[str, set[str]] = {}
    for leaf in found:
        if leaf.updated and leaf.kind in (PARAMETERS, OPTIMIZER):
            trained.setdefault(leaf.argument, set()).add(leaf.kind)
    return [_as_its_like(leaf, trained.get(leaf.argument, set())) for leaf in found]


def _as_its_like(leaf: Leaf, kinds: Collection[str]) -> Leaf:
    """What is updated from itself alone, as a weight that the loss does not use, is what the rest of its argument is."""
    return replace(leaf, kind=next(iter(kinds))) if leaf.updated and leaf.kind == OTHER and len(kinds) == 1 else leaf


def _role(leaf: Leaf, role: Role) -> dict[str, Any]:
    """What a leaf's role in the step makes of it. A name below the argument's own stays where it is of the same sort."""
    is_trained = role.updated and role.kind in (PARAMETERS, OPTIMIZER)
    if leaf.kind == BATCH and not is_trained:  # given back changed, or differentiated for its own sake
        return {}
    is_certain = leaf.by_class or (leaf.kind in (PARAMETERS, OPTIMIZER) and is_named(leaf.path))
    differentiated = role.kind == PARAMETERS and not role.updated
    return {
        "updated": role.updated,
        "accumulates": role.accumulates,
        "differentiated": differentiated,
        "kind": leaf.kind if is_certain or role.kind is None else role.kind,
    }


def _parameters_known(leaves: list[Leaf]) -> list[Leaf]:
    known = places_with_moments(leaves)
    return [replace(leaf, kind=PARAMETERS) if place in known else leaf for place, leaf in enumerate(leaves)]


def _dynamic_arguments(
    arguments: Sequence[tuple[str, Any]], positional: int, in_tree: Any, infos: Sequence[Any]
) -> list[tuple[str, Any, int]] | None:
    """(name, value, leaves) of the arguments that the program sees, or None where the call has another form."""
    by_position, by_name = in_tree.children()
    given = list(arguments[:positional])
    defs = by_position.children()
    if len(defs) > len(given):
        return None
    aligned: list[tuple[str, Any, int]] = []
    for i, (name, value) in enumerate(given):
        rest_defs = len(defs) - len(aligned)
        shapes = [tuple(info.shape) for info in infos[sum(count for _, _, count in aligned) :]]
        if rest_defs and (len(given) - i == rest_defs or _fits(value, defs[len(aligned)], shapes)):
            aligned.append((name, value, defs[len(aligned)].num_leaves))
    if len(aligned) != len(defs) or not all(_is_taken_whole(value, count) for _, value, count in aligned):
        return None
    keys = (by_name.node_data() or (dict, ()))[1]
    named = dict(arguments[positional:])
    return aligned + [(k, named[k], d.num_leaves) for k, d in zip(keys, by_name.children(), strict=True)]


def _is_taken_whole(value: Any, count: int) -> bool:
    """Whether a program that takes ``count`` arrays at a value's place can take all of it (Equinox splits arguments)."""
    return framework_of(value) is not None or len(jax.tree.leaves(value)) == count


def _fits(value: Any, treedef: Any, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a value can be what the program takes at this place (so it is not static)."""
    if framework_of(value) is not None:
        return True
    leaves, own = jax.tree.flatten(value)
    are_alike = all(getattr(leaf, "shape", ()) == shape for leaf, shape in zip(leaves, shapes, strict=False))
    return own == treedef and are_alike and all(is_dynamic(leaf) for leaf in leaves)


def is_array(leaf: Any) -> bool:
    """Whether Equinox traces a leaf: a Python number it does not; what has a shape stands for an array."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def arrays_of(tree: Any) -> Any:
    """The tree with None for all that is no array."""
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, tree)


def is_dynamic(leaf: Any) -> bool:
    """Whether jit can trace a leaf: an array, something shaped like one, or a number (a bool is a switch, not a number)."""
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or (
        isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)
    )


def _named(name: str, own: list[Leaf], infos: Iterable[Any]) -> list[Leaf]:
    """Program leaves under the user's names: by order where shapes agree, else the first unused of that shape."""
    infos = list(infos)
    if [leaf.shape for leaf in own] == [tuple(info.shape) for info in infos]:
        return [_from_info(leaf, info) for leaf, info in zip(own, infos, strict=True)]
    waiting: dict[Any, list[Leaf]] = {}
    for leaf in reversed(own):
        waiting.setdefault((leaf.shape, str(leaf.dtype)), []).append(leaf)
    result: list[Leaf] = []
    for index, info in enumerate(infos):
        same = waiting.get((tuple(info.shape), str(info.dtype)))
        unknown = Leaf(argument=name, path=f"{name} (array {index})", kind="other", shape=(), dtype=None)
        result.append(_from_info(same.pop() if same else unknown, info))
    return result


def _from_info(leaf: Leaf, info: Any) -> Leaf:
    """A leaf of the user's as the program takes it."""
    return replace(leaf, shape=tuple(info.shape), dtype=info.dtype, donated=bool(info.donated))


def _leaf(name: str, path: tuple[Any, ...], leaf: Any, kind: NodeKind | None) -> Leaf:
    shaped = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else _scalar(leaf)
    return Leaf(
        argument=name,
        path=name + jax.tree_util.keystr(path),
        kind=kind.name if kind else kind_of_argument(name, path),
        by_class=kind is not None,
        shape=tuple(shaped.shape),
        dtype=traced_dtype(shaped),
        value=leaf,
    )


def _scalar(leaf: Any) -> Any:
    """The array type of a Python number; anything else (a string, a callable) has none and is known by its class."""
    if isinstance(leaf, bool | int | float | complex):
        return jax.ShapeDtypeStruct((), jax.numpy.result_type(leaf))
    return _Untraceable(type(leaf).__name__)


@dataclass(frozen=True, slots=True)
class _Untraceable:
    dtype: str
    shape: tuple[int, ...] = ()


def _is_opaque(value: Any) -> bool:
    """Whether JAX sees the framework's object as one leaf, not as a tree of arrays."""
    return any(not hasattr(leaf, "dtype") and framework_of(leaf) is not None for leaf in jax.tree.leaves(value))


@dataclass(frozen=True, slots=True)
class AbstractCall:
    """Arguments of a call, each array by its shape, dtype and named sharding."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def abstract_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractCall | None:
    """The call without its arrays; deleted ones still know their shapes. None where a tree cannot be made again."""
    try:
        framework = framework_of(args, kwargs)
        if framework is None:
            return AbstractCall(*jax.tree.map(abstract, (args, kwargs)))
        arrays, join = framework.apart((args, kwargs))
        return AbstractCall(*join([abstract(array) for array in arrays]))
    except Exception:  # noqa: BLE001 - what is only kept for a report must not stop a step that works
        return None


def has_real_arrays(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether every leaf of a call has a value, not only a shape: an array donated to an earlier call has none."""
    leaves = jax.tree.leaves((args, kwargs))
    if any(isinstance(each, (Tracer, jax.ShapeDtypeStruct)) or framework_of(each) is not None for each in leaves):
        return False
    return not any(isinstance(each, jax.Array) and each.is_deleted() for each in leaves)


def abstract(leaf: Any) -> Any:
    """An array by its shape, dtype and named sharding; anything else as it is."""
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    place = getattr(leaf, "sharding", None)
    named = place if isinstance(place, jax.sharding.NamedSharding) else None
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(leaf.shape, traced_dtype(leaf), sharding=named, weak_type=weak)


_CALL_OF_A_STEP = "JitStep.__call__"


def written_arguments(step: Callable[..., Any]) -> dict[str, str]:
    """Name of a parameter -> the code that the user's running call of a step gives for it, where that is a name or an attribute.

    Args:
        step: The user's function, whose parameters count.
    """
    call = _running_call()
    if call is None or any(isinstance(each, ast.Starred) for each in call.args):
        return {}
    given = {
        **dict(zip(parameter_names(step), call.args, strict=False)),
        **{each.arg: each.value for each in call.keywords},
    }
    return {
        name: ast.unparse(node) for name, node in given.items() if name and isinstance(node, ast.Name | ast.Attribute)
    }


def _running_call() -> ast.Call | None:
    """The call of a step that the innermost function of the user's own is in; None where it is another, or has no source."""
    inner, frame = None, inspect.currentframe()
    while frame is not None and owner_of(frame.f_code.co_filename) is not Owner.USER:
        inner, frame = frame, frame.f_back
    if frame is None or inner is None or inner.f_code.co_qualname != _CALL_OF_A_STEP:
        return None
    places = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    line, end_line, column, end_column = next(places, (None, None, None, None))
    if line is None or end_line is None or column is None or end_column is None:
        return None
    lines = [
        text.encode() for text in linecache.getlines(frame.f_code.co_filename, frame.f_globals)[line - 1 : end_line]
    ]
    if not lines:
        return None
    lines[-1] = lines[-1][:end_column]
    lines[0] = lines[0][column:]
    try:
        found = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):  # the file is another one by now
        return None
    return found if isinstance(found, ast.Call) else None
