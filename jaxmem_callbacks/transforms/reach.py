"""A step under a policy, and which gradients of it obey.

With ``gradients="all"`` a gradient that JAX's own functions take, in whatever package, obeys the policy as one by
`jm.value_and_grad` does. A gradient inside a loss that obeys is part of that loss and stays JAX's own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import jax

from jaxmem_callbacks._compat.gradient_calls import TakenGradient, handled_by
from jaxmem_callbacks.config.named import Name, policy_of
from jaxmem_callbacks.records.errors import LossRefusedError, PolicyError, require_function
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.presets import Preset
from jaxmem_callbacks.transforms.accumulation.accumulate import GradientCall, take_apart
from jaxmem_callbacks.transforms.accumulation.batch import Said, find_batch
from jaxmem_callbacks.transforms.accumulation.multi_steps import refuse_second_accumulation
from jaxmem_callbacks.transforms.accumulation.obey import accumulated, state_after, unseen
from jaxmem_callbacks.transforms.accumulation.weighted import in_parts
from jaxmem_callbacks.transforms.frameworks import LossWithState, framework_of, loss_with_state
from jaxmem_callbacks.transforms.gradients import value_and_grad
from jaxmem_callbacks.transforms.policy import (
    ActivePolicy,
    Gradients,
    activate,
    active_policy,
    policy_of_plain_gradients,
    require_used,
    taking,
)
from jaxmem_callbacks.transforms.remat import rematerialised


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
            Of steps inside each other, the innermost says which of its gradients obey, and what.

    Returns:
        A function with the same arguments and results.

    Raises:
        PolicyError: at once, for another word than these. At the first call, when the policy should act on gradients and
            the step asked for none that it reaches; the message names the line to change.
    """
    require_function(train_step, "jm.apply_policy")
    active = ActivePolicy(policy_of(policy), gradients=gradients)

    @functools.wraps(train_step)
    def step_under_policy(*args: Any, **kwargs: Any) -> Any:
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
        active.refused = active.refused or copy.copy(error)  # whose frames hold the call's arrays
        name = getattr(call.loss, "__name__", type(call.loss).__name__)
        active.notes.setdefault(f"The gradient of {name} stays as JAX takes it: {error}")
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
    found = find_batch(call.loss, args, call.kwargs, differentiated={*numbers, *modules}, said=Said(), count=count)
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

    name = getattr(call.loss, "__name__", type(call.loss).__name__)
    taken = GradientCall(name=name, differentiate=differentiate, evaluate=evaluate)
    state = state_after(taken, take_apart(args, call.kwargs, found), count)
    value, aux, gradients = accumulated(active, taken, args, call.kwargs, found)
    return value, carried.joined(aux, state), gradients[0] if isinstance(call.argnums, int) else gradients


def _one_on(places: Iterable[int | str]) -> frozenset[int | str]:
    """Places of arguments behind another one."""
    return frozenset(place + 1 if isinstance(place, int) else place for place in places)


def _closed(opened: tuple[list[Any], Any] | None, gradient: Any) -> Any:
    """A gradient in the form of the argument that it is of."""
    return gradient if opened is None else jax.tree.unflatten(opened[1], gradient)
