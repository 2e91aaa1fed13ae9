"""`jm.value_and_grad` and `jm.grad`: JAX's own, until a policy is active on the step that calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem_callbacks.records.arguments import require_wholes
from jaxmem_callbacks.records.errors import LossRefusedError, require_function
from jaxmem_callbacks.transforms.accumulation.accumulate import GradientCall
from jaxmem_callbacks.transforms.accumulation.batch import Said, find_batch
from jaxmem_callbacks.transforms.accumulation.obey import accumulated, unseen
from jaxmem_callbacks.transforms.accumulation.weighted import in_parts, whole
from jaxmem_callbacks.transforms.frameworks import is_equinox_module
from jaxmem_callbacks.transforms.policy import ActivePolicy, active_policy, taking
from jaxmem_callbacks.transforms.remat import refuse_framework_objects, rematerialised

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
    said = Said(argnames=batch_argnames, argnums=batch_argnums)
    return gradient_function(loss, argnums, said, options, has_aux=has_aux)


def gradient_function(  # noqa: PLR0913 - a loss and how it is differentiated
    loss: Callable[..., Any],
    argnums: int | Sequence[int],
    said: Said,
    options: Mapping[str, Any],
    *,
    has_aux: bool,
    inexact_only: bool = False,
) -> Callable[..., Any]:
    """What `value_and_grad` returns.

    Args:
        loss: As there.
        argnums: As there.
        said: What was said of the batch.
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
            value, aux, gradients = whole(*differentiate(args, kwargs))
        else:
            assert isinstance(active, ActivePolicy)
            places = {place % len(args) for place in _places(argnums) if -len(args) <= place < len(args)}
            found = find_batch(loss, args, kwargs, differentiated=places, said=said, count=count)
            call = GradientCall(name=_name(loss), differentiate=differentiate, evaluate=evaluate)
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


def _name(loss: Callable[..., Any]) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _is_inexact(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray)) and jax.dtypes.issubdtype(leaf.dtype, np.inexact)


def _is_refused_by_jax(tree: Any, options: Mapping[str, Any]) -> bool:
    """Whether a tree has leaves that are no numbers, or Equinox modules in it whole ones: a dropout's switch, a table of places.

    Whole numbers elsewhere are left for JAX to refuse, which says so in words that its users know.
    """
    if not all(isinstance(leaf, _NUMBERS) for leaf in jax.tree.leaves(tree)):
        return True
    if options.get("allow_int"):
        return False
    modules = list(filter(is_equinox_module, jax.tree.leaves(tree, is_leaf=is_equinox_module)))
    return not all(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in jax.tree.leaves(modules))
