"""`jm.value_and_grad`, `jm.grad` and `jm.apply_policy`: gradients under the active policy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem_callbacks._compat.gradient_calls import TakenGradient, handled_by
from jaxmem_callbacks.config.named import Name, policy_of
from jaxmem_callbacks.records.arguments import name_of, require_function, require_wholes
from jaxmem_callbacks.records.errors import LossRefusedError, PolicyError
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.presets import Preset
from jaxmem_callbacks.transforms.accumulation.accumulate import GradientCall, in_parts, of_whole_batch
from jaxmem_callbacks.transforms.accumulation.batch import BatchChoice, find_batch, split_call
from jaxmem_callbacks.transforms.accumulation.microbatch import (
    accumulated,
    refuse_second_accumulation,
    state_after,
    unseen,
)
from jaxmem_callbacks.transforms.frameworks import (
    LossWithState,
    framework_of,
    is_equinox_module,
    loss_with_state,
    refuse_framework_objects,
)
from jaxmem_callbacks.transforms.policy import (
    ALL,
    ActivePolicy,
    Gradients,
    activate,
    active_policy,
    policy_of_plain_gradients,
    require_used,
    taking,
)
from jaxmem_callbacks.transforms.remat import rematerialised

_NUMBERS = (jax.Array, np.ndarray, np.generic, complex, float, int)


def value_and_grad(
    loss: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,  # noqa: FBT001, FBT002 - jax's signature
    *,
    batch_argnames: str | Sequence[str] | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """`jax.value_and_grad`, which also obeys the policy of the step that calls it.

    Without a policy this is `jax.value_and_grad` itself. Where a differentiated argument has leaves that JAX refuses (an Equinox
    module with its functions, its switches or whole numbers), its inexact arrays are differentiated and the gradient has None
    elsewhere, as Equinox does it.

    Args:
        loss: A function to a scalar or to `jm.weighted`, or to one of these and anything with ``has_aux``.
        argnums: Which positional arguments to differentiate.
        has_aux: Whether the loss returns ``(value, aux)``.
        batch_argnames: Under a policy with microbatches: names of the loss's arguments that are the batch. None: those
            named like one, else all whose arrays have one leading dimension in common.
        batch_argnums: The same by position.
        **options: The other options of `jax.value_and_grad`.

    Returns:
        A function to ``(value, gradients)``, or ``((value, aux), gradients)``.

    Raises:
        LossRefusedError, PolicyError: when called under a policy that cannot be kept; see `jm.remat`.
    """
    require_function(loss, "jm.value_and_grad")
    require_wholes("jm.value_and_grad", "argnums", argnums)
    batch = BatchChoice(argnames=batch_argnames, argnums=batch_argnums)
    return gradient_function(loss, argnums, batch, options, has_aux=has_aux)


def gradient_function(  # noqa: PLR0913 - a loss and how it is differentiated
    loss: Callable[..., Any],
    argnums: int | Sequence[int],
    batch: BatchChoice,
    options: Mapping[str, Any],
    *,
    has_aux: bool,
    inexact_only: bool = False,
) -> Callable[..., Any]:
    """What `value_and_grad` returns.

    Args:
        loss: As there.
        argnums: As there.
        batch: The user's choice of the batch.
        options: The other options of `jax.value_and_grad`.
        has_aux: As there.
        inexact_only: Whether all that is no inexact array is left out of every tree, as Equinox does it; else of modules only.
    """

    @functools.wraps(loss)
    def value_and_gradients(*args: Any, **kwargs: Any) -> Any:
        active = active_policy()
        if active is not None:
            active.used = True
            if active.policy.changes_gradients:
                refuse_framework_objects(args, kwargs)
        count = 1 if active is None else active.policy.microbatches

        def differentiated(inner_args: tuple[Any, ...]) -> list[Any]:
            return [inner_args[at] for at in _places(argnums) if -len(inner_args) <= at < len(inner_args)]

        plain = loss if count == 1 else unseen(loss)
        chosen = in_parts(
            plain if active is None else rematerialised(plain, active.policy, differentiated), has_aux=has_aux
        )

        def differentiate(inner_args: Any, inner_kwargs: Any) -> Any:
            def gradients_of(function: Callable[..., Any]) -> Any:
                return _differentiated(function, argnums, options, inner_args, inner_kwargs, inexact_only=inexact_only)

            with taking(active):
                try:
                    return gradients_of(chosen)
                except LossRefusedError:
                    _let_jax_refuse(lambda: gradients_of(in_parts(plain, has_aux=has_aux)))
                    raise

        def evaluate(inner_args: Any, inner_kwargs: Any) -> Any:
            return in_parts(plain, has_aux=has_aux)(*inner_args, **inner_kwargs), None

        if count == 1:
            value, aux, gradients = of_whole_batch(*differentiate(args, kwargs))
        else:
            assert isinstance(active, ActivePolicy)
            places = {place % len(args) for place in _places(argnums) if -len(args) <= place < len(args)}
            found = find_batch(loss, args, kwargs, differentiated=places, choice=batch, count=count)
            call = GradientCall(name=name_of(loss), differentiate=differentiate, evaluate=evaluate)
            value, aux, gradients = accumulated(active, call, args, kwargs, found)
        return ((value, aux) if has_aux else value), gradients

    return value_and_gradients


def _let_jax_refuse(gradients: Callable[[], Any]) -> None:
    """A loss that JAX refuses too, such as one that is no scalar, fails in JAX's own words."""
    try:
        jax.eval_shape(gradients)
    except Exception as error:
        raise error from None


def grad(
    loss: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,  # noqa: FBT001, FBT002 - jax's signature
    *,
    batch_argnames: str | Sequence[str] | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """`jax.grad`, which also obeys the policy of the step that calls it; see `value_and_grad`.

    Args:
        loss: A function to a scalar or to `jm.weighted`, or to one of these and anything with ``has_aux``.
        argnums: Which positional arguments to differentiate.
        has_aux: Whether the loss returns ``(value, aux)``.
        batch_argnames: Names of the arguments that are the batch, as in `value_and_grad`.
        batch_argnums: The same by position.
        **options: The other options of `jax.grad`.

    Returns:
        A function to the gradients, or to ``(gradients, aux)`` with ``has_aux``.
    """
    require_function(loss, "jm.grad")
    require_wholes("jm.grad", "argnums", argnums)
    both = value_and_grad(loss, argnums, has_aux, batch_argnames=batch_argnames, batch_argnums=batch_argnums, **options)

    @functools.wraps(loss)
    def gradients(*args: Any, **kwargs: Any) -> Any:
        value, found = both(*args, **kwargs)
        return (found, value[1]) if has_aux else found

    return gradients


def _differentiated(  # noqa: PLR0913 - a call and how it is differentiated
    chosen: Callable[..., Any],
    argnums: int | Sequence[int],
    options: Mapping[str, Any],
    args: Any,
    kwargs: Any,
    *,
    inexact_only: bool,
) -> Any:
    """``((scalar, aux), gradients)`` of a loss with aux; see `value_and_grad` for leaves that are no arrays."""
    places = _places(argnums)
    given = [args[place] for place in places if -len(args) <= place < len(args)]
    if not (inexact_only or any(_is_refused_by_jax(each, options) for each in given)):
        return jax.value_and_grad(chosen, argnums, has_aux=True, **options)(*args, **kwargs)
    places = tuple(place % len(args) for place in places)
    moving = tuple(inexact_part(args[place]) for place in places)

    def of_moving(parts: Sequence[Any], *rest: Any, **inner_kwargs: Any) -> Any:
        merged = list(rest)
        for place, part in zip(places, parts, strict=True):
            merged[place] = with_part(rest[place], part)
        return chosen(*merged, **inner_kwargs)

    value, gradients = jax.value_and_grad(of_moving, 0, has_aux=True, **options)(moving, *args, **kwargs)
    return value, gradients if isinstance(argnums, Sequence) else gradients[0]


def inexact_part(tree: Any) -> Any:
    """A tree with its inexact arrays, and None in the place of all other leaves."""
    return jax.tree.map(lambda leaf: leaf if _is_inexact(leaf) else None, tree)


def with_part(tree: Any, part: Any) -> Any:
    """A tree with the leaves of ``part`` that are not None in the places of its own."""
    return jax.tree.map(lambda leaf, own: own if leaf is None else leaf, part, tree, is_leaf=lambda leaf: leaf is None)


def _places(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)


def _is_inexact(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray)) and jax.dtypes.issubdtype(leaf.dtype, np.inexact)


def _is_refused_by_jax(tree: Any, options: Mapping[str, Any]) -> bool:
    """Whether a tree has leaves that are no numbers, or Equinox modules in it whole ones: a dropout's switch, a table of places.

    Whole numbers elsewhere are left for JAX to refuse, in words that its users know.
    """
    if not all(isinstance(leaf, _NUMBERS) for leaf in jax.tree.leaves(tree)):
        return True
    if options.get("allow_int"):
        return False
    modules = list(filter(is_equinox_module, jax.tree.leaves(tree, is_leaf=is_equinox_module)))
    return not all(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in jax.tree.leaves(modules))


def apply_policy(
    train_step: Callable[..., Any], policy: StepPolicy | Preset | Name, *, gradients: Gradients = "own"
) -> Callable[..., Any]:
    """The user's step under a policy: a pure function, not jitted. Remat and microbatches; donation belongs to ``jm.jit_step``.

    Args:
        train_step: Any function that takes a gradient.
        policy: What to apply: a policy, a preset or the name of one, as in `jm.jit_step`.
        gradients: ``own``: to what the step takes by ``jm.value_and_grad``, ``jm.grad`` or ``jm.nnx.value_and_grad``. ``all``:
            to what it takes by `jax.value_and_grad`, `jax.grad` and by Flax NNX's and Equinox's functions too, in your code
            and in any package. A gradient that a policy cannot change, such as that of a single number, stays as it is.
            Of steps inside each other, the innermost decides which of its gradients obey, and what.

    Returns:
        A function with the same arguments and results.

    Raises:
        PolicyError: at once, for another word than these, and for compiler options, which belong to `jm.jit_step`. At the first
            call, when the policy should act on gradients and the step asked for none that it reaches; the message names the line
            to change.
    """
    require_function(train_step, "jm.apply_policy")
    active = ActivePolicy(policy_of(policy), gradients=gradients)
    if active.policy.options is not None:
        msg = (
            f"jm.apply_policy makes a function that is not jitted, and compiler_options {active.policy.options.words} "
            f"belong to a jit. Use jm.jit_step in its place, around {name_of(train_step)} or what calls it outermost."
        )
        raise PolicyError(msg)
    if active.policy.state_offload is not None:
        msg = (
            f"jm.apply_policy makes a function that is not jitted, and state_offload={active.policy.state_offload!r} says where "
            f"the arguments of a jit are. Use jm.jit_step in its place, around {name_of(train_step)} or what calls it outermost."
        )
        raise PolicyError(msg)

    @functools.wraps(train_step)
    def step_under_policy(*args: Any, **kwargs: Any) -> Any:
        if active.policy.microbatches > 1:
            refuse_second_accumulation(active.policy, args, kwargs)
        if (outer := active_policy()) is not None:
            outer.hidden = True
        with applied(active):
            result = train_step(*args, **kwargs)
        require_used(active, train_step)
        return result

    return step_under_policy


def applied(active: ActivePolicy | None) -> AbstractContextManager[None]:
    """The context in which a step is called or traced under its policy; ``None`` hides an outer one."""
    return activate(active) if active is None or active.gradients == "own" else _AppliedToAll(active)


class _AppliedToAll:
    """The same where the policy reaches JAX's own gradient functions. Each call of a step under it enters this."""

    __slots__ = ("_active", "_handled")

    def __init__(self, active: ActivePolicy) -> None:
        self._active, self._handled = activate(active), handled_by(_obeyed)

    def __enter__(self) -> None:
        self._handled.__enter__()
        try:
            self._active.__enter__()
        except BaseException:
            self._handled.__exit__()
            raise

    def __exit__(self, *raised: Any) -> None:  # noqa: PYI036 - handed on
        try:
            self._active.__exit__(*raised)
        finally:
            self._handled.__exit__()


def _obeyed(call: TakenGradient) -> tuple[Any, Any, Any] | None:
    """A gradient of JAX's own functions as the policy of its step wants it; None where JAX is to take it."""
    active = policy_of_plain_gradients()
    if active is None:
        return None
    used = active.used
    try:
        return _taken(active, call)
    except (LossRefusedError, PolicyError) as error:
        # Nobody may be able to edit this gradient out of the policy's way. Microbatches that cannot be kept are no detail.
        if active.policy.microbatches > 1 and not isinstance(error, LossRefusedError):
            raise
        active.used = used
        active.leave(ALL, call.loss, error)
        return None


def _taken(active: ActivePolicy, call: TakenGradient) -> tuple[Any, Any, Any]:
    """Value, aux and gradients under a policy."""
    carried = loss_with_state(call.loss)
    if carried is None:
        return _of_trees(call)
    if active.policy.microbatches > 1:
        return _of_modules_in_parts(active, call, carried)

    @functools.wraps(call.loss)
    def loss(*args: Any, **kwargs: Any) -> Any:
        value, aux, state = carried.call(carried.hidden, *args, **kwargs)
        return value, carried.joined(aux, state)

    return _of_trees(replace(call, loss=loss))


def _of_trees(call: TakenGradient) -> tuple[Any, Any, Any]:
    """The same by `jm.value_and_grad`.

    A framework's objects among the arguments are lists of their leaves meanwhile: JAX takes them for plain trees here, and what
    the loss changes of them comes back as aux, or not at all.
    """
    opened = [jax.tree.flatten(each) if framework_of(each) is not None else None for each in call.args]
    named = {name: jax.tree.flatten(each) for name, each in call.kwargs.items() if framework_of(each) is not None}

    def closed(values: Sequence[Any]) -> list[Any]:
        return [
            value if each is None else jax.tree.unflatten(each[1], value)
            for value, each in zip(values, opened, strict=True)
        ]

    @functools.wraps(call.loss)
    def loss(*args: Any, **kwargs: Any) -> Any:
        kwargs |= {name: jax.tree.unflatten(treedef, kwargs[name]) for name, (_, treedef) in named.items()}
        return call.loss(*closed(args), **kwargs)

    args = [value if each is None else each[0] for value, each in zip(call.args, opened, strict=True)]
    kwargs = call.kwargs | {name: leaves for name, (leaves, _) in named.items()}
    value, found = value_and_grad(loss, call.argnums, call.has_aux, **call.options)(*args, **kwargs)
    value, aux = value if call.has_aux else (value, None)
    if isinstance(call.argnums, int):
        return value, aux, _closed(opened[call.argnums], found)
    return value, aux, tuple(_closed(opened[at], each) for at, each in zip(call.argnums, found, strict=True))


def _of_modules_in_parts(active: ActivePolicy, call: TakenGradient, carried: LossWithState) -> tuple[Any, Any, Any]:
    """The same over microbatches; the modules are left as one plain call leaves them."""
    active.used = True
    count, args = active.policy.microbatches, call.args
    numbers = [call.argnums] if isinstance(call.argnums, int) else [*call.argnums]
    numbers = [number % len(args) for number in numbers]
    modules = {place for place, each in enumerate(args) if carried.holds_state(each)}
    found = find_batch(
        call.loss, args, call.kwargs, differentiated={*numbers, *modules}, choice=BatchChoice(), count=count
    )
    # What the loss holds besides its arguments comes first: each microbatch has random numbers of its own.
    found = replace(found, places=_one_on(found.places), keys=_one_on(found.keys))
    args, argnums = (carried.hidden, *args), tuple(number + 1 for number in numbers)

    @functools.wraps(call.loss)
    def without_state(*inner: Any, **named: Any) -> Any:
        return carried.call(*inner, **named)[:2]

    cheaper = rematerialised(unseen(without_state), active.policy, lambda inner: [inner[at] for at in argnums])
    in_pairs = in_parts(cheaper, has_aux=True)

    def differentiate(inner: Any, named: Any) -> Any:
        with taking(active):
            return jax.value_and_grad(in_pairs, argnums, has_aux=True, **call.options)(*inner, **named)

    def evaluate(inner: Any, named: Any) -> Any:
        value, aux, state = unseen(carried.call)(*inner, **named)
        return (value, (None, aux)), state

    name = name_of(call.loss)
    taken = GradientCall(name=name, differentiate=differentiate, evaluate=evaluate)
    state = state_after(taken, split_call(args, call.kwargs, found), count)
    value, aux, gradients = accumulated(active, taken, args, call.kwargs, found)
    return value, carried.joined(aux, state), gradients[0] if isinstance(call.argnums, int) else gradients


def _one_on(places: Iterable[int | str]) -> frozenset[int | str]:
    """Places of arguments behind another one."""
    return frozenset(place + 1 if isinstance(place, int) else place for place in places)


def _closed(opened: tuple[list[Any], Any] | None, gradient: Any) -> Any:
    """A gradient in the form of the argument that it is of."""
    return gradient if opened is None else jax.tree.unflatten(opened[1], gradient)
