"""Flax NNX: gradients that keep a module's state right under a policy, and remat by module path without editing the model.

`jm.nnx` is this module. What the rooms above need of NNX (`transforms.frameworks.Framework` and `Annotator`) is here too.
For remat, a matched module's class is exchanged for a subclass of the same name whose ``__call__`` runs under `nnx.remat`.
State, paths, ``repr`` and ``isinstance`` stay; `Undo` gives the classes back.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, cast

import jax
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from flax.nnx.transforms.general import merge_inputs, split_inputs
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem_callbacks._compat.checkpoints import is_checkpointed
from jaxmem_callbacks.integrations.module_remat import (
    CallSplitter,
    Pattern,
    Rule,
    is_rematerialising,
    nothing_matched,
    refuse_second_checkpoint,
    rematerialising,
    rule_for,
    rules,
)
from jaxmem_callbacks.records.arguments import name_of, require_function, require_wholes
from jaxmem_callbacks.records.errors import PatternError, PolicyError
from jaxmem_callbacks.transforms.accumulation.accumulate import GradientCall, in_parts, of_whole_batch
from jaxmem_callbacks.transforms.accumulation.batch import BatchChoice, BatchPlaces, find_batch, split_call
from jaxmem_callbacks.transforms.accumulation.microbatch import accumulated, state_after, unseen
from jaxmem_callbacks.transforms.checkpoints import named_policy
from jaxmem_callbacks.transforms.frameworks import Annotation, LossWithState, rule_pairs
from jaxmem_callbacks.transforms.policy import ActivePolicy, active_policy, taking
from jaxmem_callbacks.transforms.remat import rematerialised

__all__ = ["remat", "value_and_grad"]

NAME = "Flax NNX"
VALUE_AND_GRAD = "jm.nnx.value_and_grad"
_CONTEXT = "jaxmem_callbacks"
_ACCUMULATION = "jaxmem_accumulation"
_MARK = "_jaxmem_policy"
_SPLITTER = CallSplitter(lambda value: isinstance(value, (nnx.Pytree, nnx.Variable)))


def is_object(value: Any) -> bool:
    """Whether a value is an NNX module, optimizer, metric or Rngs, whose variables change in place."""
    return isinstance(value, nnx.Pytree)


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`nnx.jit`, which carries changes of the modules' state out of the compiled program."""
    return nnx.jit(function, **options)


def pinned(value: Any, shardings: Any) -> Any:
    """The shardings by path, which is how `nnx.jit` takes them for a module; it holds the module's new state there too."""
    if not is_object(value) or not is_object(shardings):
        return shardings
    return nnx.StateSharding(nnx.state(shardings))


def arrays(value: Any) -> Any:
    """A module's arrays as nested dicts by path; anything else unchanged."""
    return nnx.to_pure_dict(nnx.state(value)) if is_object(value) else value


def apart(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The arrays of a tree with modules in it, and what makes a copy of the tree around others."""
    graph, state = nnx.split(tree)
    found, treedef = jax.tree.flatten(state)

    def join(values: Sequence[Any]) -> Any:
        return nnx.merge(graph, jax.tree.unflatten(treedef, values))

    return found, join


def loss_with_state(loss: Any) -> LossWithState | None:
    """What `nnx.grad` and `nnx.value_and_grad` hand to JAX, where ``loss`` is that."""
    if type(loss).__name__ not in {"GradFn", "SimpleGradFn"}:
        return None
    has_aux, states = bool(loss.has_aux), tuple(getattr(loss, "nondiff_states", ()))

    def call(hidden: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        # One call uses up the states that are not differentiated.
        fresh = dataclasses.replace(loss, nondiff_states=collections.deque(hidden)) if hidden else loss
        value, rest = fresh(*args, **kwargs)
        return (value, rest[1], rest[0]) if has_aux else (value, None, rest)

    def joined(aux: Any, state: Any) -> Any:
        return (state, aux) if has_aux else state

    def holds_state(argument: Any) -> bool:
        nodes = jax.tree.leaves(argument, is_leaf=_is_of_nnx)
        return any(map(_is_of_nnx, nodes))

    return LossWithState(hidden=states, call=call, joined=joined, holds_state=holds_state)


def _is_of_nnx(node: Any) -> bool:
    return type(node).__module__.startswith("flax.nnx.")


def value_and_grad(
    loss: Callable[..., Any],
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,  # noqa: FBT001, FBT002 - nnx's signature
    *,
    batch_argnames: str | Sequence[str] | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """`nnx.value_and_grad`, which also obeys the policy of the step that calls it.

    The modules are split and merged inside what is cut, and their new state comes back through it: BatchNorm statistics,
    dropout counters and sown values move exactly as without a policy.

    Args:
        loss: A function of NNX modules and arrays to a scalar or to `jm.weighted`, or to (one of them, aux) with ``has_aux``.
        argnums: Which arguments, as in `nnx.value_and_grad`.
        has_aux: Whether the loss returns ``(value, aux)``.
        batch_argnames: Names of the arguments that are the batch, as in `jm.value_and_grad`.
        batch_argnums: The same by position.
        **options: The other options of `nnx.value_and_grad`.

    Returns:
        A function to ``(value, gradients)``, or ``((value, aux), gradients)``.

    Raises:
        LossRefusedError, PolicyError: when called under a policy that cannot be kept; see `jm.remat`.
    """
    require_function(loss, VALUE_AND_GRAD)
    for each in cast("Sequence[Any]", argnums) if isinstance(argnums, list | tuple) else (argnums,):
        if not isinstance(each, nnx.DiffState):
            require_wholes(VALUE_AND_GRAD, "argnums", each)
    batch = BatchChoice(argnames=batch_argnames, argnums=batch_argnums)

    @functools.wraps(loss)
    def value_and_gradients(*args: Any, **kwargs: Any) -> Any:
        active = active_policy()
        chosen = loss
        if active is not None:
            active.used = True
            if active.policy.microbatches > 1:
                found = find_batch(
                    loss,
                    args,
                    kwargs,
                    differentiated=_places(argnums, len(args)),
                    choice=batch,
                    count=active.policy.microbatches,
                )
                value, aux, gradients = _over_microbatches(
                    loss, active, found, has_aux=has_aux, options={"argnums": argnums, **options}
                )(args, kwargs)
                return ((value, aux) if has_aux else value), gradients
            if active.policy.rewrites_loss:
                chosen = _cheaper(loss, active.policy, argnums)
        both = nnx.value_and_grad(in_parts(chosen, has_aux=has_aux), argnums=argnums, has_aux=True, **options)
        with taking(active):
            value, aux, gradients = of_whole_batch(*both(*args, **kwargs))
        return ((value, aux) if has_aux else value), gradients

    return value_and_gradients


def _places(argnums: Any, count: int) -> set[int]:
    """Positions of the differentiated arguments."""
    several = argnums if isinstance(argnums, Sequence) else (argnums,)
    numbers = [one.argnum if isinstance(one, nnx.DiffState) else one for one in several]
    return {number % count for number in numbers if -count <= number < count}


def _over_microbatches(
    loss: Callable[..., Any], active: ActivePolicy, found: BatchPlaces, *, has_aux: bool, options: dict[str, Any]
) -> Callable[..., Any]:
    """A function of ``(args, kwargs)`` to value, aux and gradients; the modules are left as one plain call leaves them."""
    plain = unseen(loss)
    chosen = _cheaper(plain, active.policy, options["argnums"]) if active.policy.rewrites_loss else plain
    both = nnx.value_and_grad(in_parts(chosen, has_aux=has_aux), has_aux=True, **options)

    def gradients_of_modules(args: Any, kwargs: Any) -> Any:
        with taking(active):
            return both(*args, **kwargs)

    def value_of_modules(args: Any, kwargs: Any) -> Any:
        return in_parts(plain, has_aux=has_aux)(*args, **kwargs)

    pure_gradients = merge_inputs(gradients_of_modules, ctxtag=_ACCUMULATION)
    pure_value = merge_inputs(value_of_modules, ctxtag=_ACCUMULATION)

    def evaluate(args: Any, kwargs: Any) -> Any:
        state, parts = pure_value(args, kwargs)
        return parts, state

    call = GradientCall(
        name=name_of(loss),
        differentiate=lambda args, kwargs: pure_gradients(args, kwargs)[1],
        evaluate=evaluate,
    )

    def on_arrays(args: Any, kwargs: Any) -> Any:
        state = state_after(call, split_call(args, kwargs, found), active.policy.microbatches)
        return state, accumulated(active, call, args, kwargs, found)

    return split_inputs(on_arrays, ctxtag=_ACCUMULATION)


def _cheaper(loss: Callable[..., Any], policy: Any, argnums: Any) -> Callable[..., Any]:
    """The loss cut as a function of pure arrays, with every module's state carried in and out."""

    @functools.wraps(loss)
    def cheaper_loss(*args: Any, **kwargs: Any) -> Any:
        def on_modules(inner_args: Any, inner_kwargs: Any) -> Any:
            return loss(*inner_args, **inner_kwargs)

        def differentiated(pure_args: tuple[Any, ...]) -> list[Any]:
            return [pure_args[0][place] for place in _places(argnums, len(args))]

        pure = rematerialised(merge_inputs(on_modules, ctxtag=_CONTEXT), policy, differentiated)
        return split_inputs(pure, ctxtag=_CONTEXT)(args, kwargs)

    return cheaper_loss


class Undo:
    """Gives modules their own classes back: call it, or leave its ``with`` block. A second call does nothing.

    Copies made in the meantime (`nnx.clone`, `nnx.merge`) keep the classes they were made with.

    Attributes:
        paths: Path of each rematerialised module to its policy.
    """

    def __init__(self, swapped: Mapping[str, tuple[nnx.Module, type, type]]) -> None:
        self.paths = {path: getattr(new, _MARK) for path, (_, _, new) in swapped.items()}
        self._swapped = dict(swapped)

    def __call__(self) -> None:
        """Restore every class.

        Raises:
            PolicyError: somebody else has exchanged a class since; nothing is restored then.
        """
        for path, (module, _, new) in self._swapped.items():
            if type(module) is not new:
                msg = f"The class of `{path}` was exchanged again after jm.nnx.remat. Undo that change first, then this one."
                raise PolicyError(msg)
        for module, own, _ in self._swapped.values():
            object.__setattr__(module, "__class__", own)
        self._swapped = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self()


def remat(model: nnx.Module, pattern: Pattern | Mapping[Any, str], policy: str = "full") -> Undo:
    r"""Rematerialise the modules of a model that a pattern means, in place, without editing the model.

        undo = jm.nnx.remat(model, r"blocks/\d+")             # before the first trace
        undo = jm.nnx.remat(model, {r"encoder/.*": "full", Decoder: "dots_saveable"})

    Only ``__call__`` changes. Where a module and one inside it are both meant, the outer one called is rematerialised and
    the inner runs as it is. A stack of layers run by `nnx.scan` is one module, and each of its iterations is rematerialised.

    Args:
        model: Any NNX module, abstract ones included.
        pattern: A regular expression that a module's whole path must match, such as ``blocks/0/attention``; or a module
            class; or a mapping from either to a policy, where the first match counts. The model itself is never meant.
        policy: What each module keeps in addition to its inputs: ``full`` (nothing), ``dots_saveable``, ... or a synonym.

    Returns:
        The function that undoes it, also a context manager.

    Raises:
        PatternError: nothing matches, or the pattern is none; lists what could have matched.
        PolicyError: no such policy; a module is rematerialised already, by this function or by its author, or its class
            refuses subclasses. At the first trace: a module is called inside a checkpoint that is already there.
    """
    if not isinstance(model, nnx.Pytree):
        msg = f"jm.nnx.remat takes an nnx.Module, not a {type(model).__name__}. For a Linen model use jm.linen.remat."
        raise PatternError(msg)
    wanted = rules(pattern, policy)
    found = _callables(model)
    chosen = _choose(wanted, found)
    _require_all(wanted, chosen.values(), found, type(model).__name__)
    swapped: dict[str, tuple[nnx.Module, type, type]] = {}
    for path, rule in chosen.items():
        module = found[path][0]
        swapped[path] = (module, type(module), _exchanged(type(module), path, rule.policy))
    for module, _, new in swapped.values():
        object.__setattr__(module, "__class__", new)
    return Undo(swapped)


def _callables(model: nnx.Module) -> dict[str, tuple[nnx.Module, list[str]]]:
    """Every module below the model that can be called, by its first path, with all of its paths."""
    first: dict[int, str] = {}
    found: dict[str, tuple[nnx.Module, list[str]]] = {}
    for path, module in _walk(model, "", ()):
        if not path or not callable(module):
            continue
        name = first.setdefault(id(module), path)
        found.setdefault(name, (module, []))[1].append(path)
    return found


def _walk(node: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, nnx.Module]]:
    """Modules with their paths, top down; a shared one at each of its paths, a ring of them once."""
    if id(node) in above:
        return
    if isinstance(node, nnx.Module):
        yield path, node
    for name, child in _children(node):
        yield from _walk(child, f"{path}/{name}" if path else str(name), (*above, id(node)))


def _children(node: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(node, nnx.Variable):
        return ()
    if isinstance(node, nnx.Pytree):
        return [(name, value) for name, value in vars(node).items() if not name.startswith("_pytree__")]
    if isinstance(node, Mapping):
        return node.items()
    return enumerate(node) if isinstance(node, (list, tuple)) else ()


def _choose(wanted: tuple[Rule, ...], found: Mapping[str, tuple[nnx.Module, list[str]]]) -> dict[str, Rule]:
    pairs = {path: rule_for(wanted, paths, type(module)) for path, (module, paths) in found.items()}
    return {path: rule for path, rule in pairs.items() if rule is not None}


def _require_all(
    wanted: Iterable[Rule],
    used: Iterable[Rule],
    found: Mapping[str, tuple[nnx.Module, list[str]]],
    model: str,
) -> None:
    """Refuse a rule that no module has fallen to."""
    by_path = {path: type(module).__name__ for path, (module, _) in found.items()}
    known = {id(rule) for rule in used}
    for rule in wanted:
        if id(rule) in known:
            continue
        if any(rule.matches(path, type(module)) for module, paths in found.values() for path in paths):
            msg = f"Pattern {rule} would do nothing: an earlier pattern takes every module it matches. Put it first."
            raise PatternError(msg)
        raise PatternError(nothing_matched(rule, by_path, model))


def _exchanged(own: type, path: str, policy: str) -> type:
    """The class to give a module, refusing one that is rematerialised already."""
    if hasattr(own, _MARK):
        msg = f"`{path}` ({own.__name__}) is rematerialised already, policy {getattr(own, _MARK)!r}: undo that first."
        raise PolicyError(msg)
    if is_checkpointed(getattr(own, "__call__")):  # noqa: B004, B009 - the class's function, not whether there is one
        msg = (
            f"`{path}`: {own.__name__}.__call__ is under nnx.remat or jax.checkpoint already, by its author. Leave it out "
            "of the pattern, or remove that decorator."
        )
        raise PolicyError(msg)
    return _rematerialised_class(own, policy)


@functools.cache
def _rematerialised_class(own: type, policy: str) -> type:
    """One subclass for each class and policy, so that equal models have equal graph definitions."""
    call: Callable[..., Any] = getattr(own, "__call__")  # noqa: B004, B009 - the class's function, not whether there is one
    keep = named_policy(policy)

    @functools.wraps(call)
    def rematerialised_call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        if is_rematerialising():
            return call(self, *args, **kwargs)
        refuse_second_checkpoint(f"A {own.__name__} meant by jm.nnx.remat")
        return _SPLITTER.run(functools.partial(_checkpointed, keep), self, call, args, kwargs)

    def reduce(self: nnx.Module, protocol: Any) -> Any:
        # A pickle must be readable without this process and this library: it holds the module as its author's class.
        _, _, *state = object.__reduce_ex__(self, protocol)
        return object.__new__, (own,), *state

    def shallow_copy(self: nnx.Module) -> Any:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    body = {
        "__call__": rematerialised_call,
        "__copy__": shallow_copy,
        "__reduce_ex__": reduce,
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        _MARK: policy,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # warned of already, when the class itself was made
        try:
            return type(own)(own.__name__, (own,), body, pytree=getattr(own, "_pytree__is_pytree", True))
        except Exception as error:
            msg = (
                f"jm.nnx.remat needs a subclass of {own.__name__}, and making one failed ({error}). Leave it out of the "
                "pattern, or write nnx.remat in the model."
            )
            raise PolicyError(msg) from error


def _checkpointed(keep: Callable[..., Any] | None, function: Callable[..., Any]) -> Callable[..., Any]:
    def marked(module: Any, traced: Any) -> Any:
        with rematerialising():
            return function(module, traced)

    return nnx.remat(marked, policy=keep)


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
