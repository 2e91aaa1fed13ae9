"""Flax NNX: gradients that keep a module's state right under a policy, and remat by module path without editing the model.

`jm.nnx` is this module. What the rooms above need of NNX (`transforms.frameworks.Framework`) is here too.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from flax import nnx
from flax.nnx.transforms.general import merge_inputs, split_inputs

from jaxmem_callbacks.integrations.nnx_modules import remat
from jaxmem_callbacks.records.arguments import name_of, require_function, require_wholes
from jaxmem_callbacks.transforms.accumulation.accumulate import GradientCall, in_parts, of_whole_batch
from jaxmem_callbacks.transforms.accumulation.batch import BatchChoice, BatchPlaces, find_batch, split_call
from jaxmem_callbacks.transforms.accumulation.microbatch import accumulated, state_after, unseen
from jaxmem_callbacks.transforms.frameworks import LossWithState
from jaxmem_callbacks.transforms.policy import ActivePolicy, active_policy, taking
from jaxmem_callbacks.transforms.remat import rematerialised

__all__ = ["remat", "value_and_grad"]

NAME = "Flax NNX"
VALUE_AND_GRAD = "jm.nnx.value_and_grad"
_CONTEXT = "jaxmem_callbacks"
_ACCUMULATION = "jaxmem_accumulation"


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
