"""`jm.value_and_grad` and `jm.grad`: JAX's own, until a policy is active on the step that calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmem_callbacks.transforms.policy import active_policy
from jaxmem_callbacks.transforms.remat import refuse_framework_objects, rematerialised


def value_and_grad(
    loss: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,  # noqa: FBT001, FBT002 - jax's signature
    **options: Any,
) -> Callable[..., Any]:
    """`jax.value_and_grad`, which also obeys the policy of the step that calls it.

    Without a policy this is `jax.value_and_grad` itself. Where a differentiated argument has leaves that are no arrays
    (an Equinox module with its functions), which JAX refuses, its inexact arrays are differentiated and the gradient has
    None elsewhere, as Equinox does it.

    Args:
        loss: A function to a scalar, or to a scalar and anything with ``has_aux``.
        argnums: Which positional arguments to differentiate.
        has_aux: Whether the loss returns ``(value, aux)``.
        **options: The other options of `jax.value_and_grad`.

    Returns:
        A function to ``(value, gradients)``, or ``((value, aux), gradients)``.

    Raises:
        LossRefusedError, PolicyError: when called under a policy that cannot be kept; see `jm.remat`.
    """

    @functools.wraps(loss)
    def value_and_gradients(*args: Any, **kwargs: Any) -> Any:
        chosen = _under_policy(loss)
        if chosen is not loss:
            refuse_framework_objects(args, kwargs)
        places = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
        if not any(_has_static_leaves(args[place]) for place in places if -len(args) <= place < len(args)):
            return jax.value_and_grad(chosen, argnums, has_aux, **options)(*args, **kwargs)
        places = tuple(place % len(args) for place in places)
        moving = tuple(jax.tree.map(lambda leaf: leaf if _is_inexact(leaf) else None, args[place]) for place in places)

        def of_moving(parts: Sequence[Any], *rest: Any, **inner_kwargs: Any) -> Any:
            merged = list(rest)
            for place, part in zip(places, parts, strict=True):
                merged[place] = jax.tree.map(
                    lambda leaf, own: own if leaf is None else leaf,
                    part,
                    rest[place],
                    is_leaf=lambda leaf: leaf is None,
                )
            return chosen(*merged, **inner_kwargs)

        value, gradients = jax.value_and_grad(of_moving, 0, has_aux, **options)(moving, *args, **kwargs)
        return value, gradients if isinstance(argnums, Sequence) else gradients[0]

    return value_and_gradients


def grad(
    loss: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,  # noqa: FBT001, FBT002 - jax's signature
    **options: Any,
) -> Callable[..., Any]:
    """`jax.grad`, which also obeys the policy of the step that calls it; see `value_and_grad`.

    Args:
        loss: A function to a scalar, or to a scalar and anything with ``has_aux``.
        argnums: Which positional arguments to differentiate.
        has_aux: Whether the loss returns ``(value, aux)``.
        **options: The other options of `jax.grad`.

    Returns:
        A function to the gradients, or to ``(gradients, aux)`` with ``has_aux``.
    """
    both = value_and_grad(loss, argnums, has_aux, **options)

    @functools.wraps(loss)
    def gradients(*args: Any, **kwargs: Any) -> Any:
        value, found = both(*args, **kwargs)
        return (found, value[1]) if has_aux else found

    return gradients


def _under_policy(loss: Callable[..., Any]) -> Callable[..., Any]:
    active = active_policy()
    if active is None:
        return loss
    active.used = True
    return rematerialised(loss, active.policy)


def _is_inexact(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray)) and jax.dtypes.issubdtype(leaf.dtype, np.inexact)


def _has_static_leaves(tree: Any) -> bool:
    return any(
        not isinstance(leaf, (jax.Array, np.ndarray, np.generic, complex, float, int)) for leaf in jax.tree.leaves(tree)
    )
