"""`jm.eqx`: the gradient functions of Equinox's users, which obey the policy of the step that calls them.

They are written as Equinox's own are: the first argument is differentiated, by its inexact arrays, and they decorate a loss with
or without options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

from jaxmem_callbacks.records.arguments import require_function
from jaxmem_callbacks.transforms.accumulation.batch import BatchChoice
from jaxmem_callbacks.transforms.gradients import gradient_function

__all__ = ["grad", "value_and_grad"]

_Function = Callable[..., Any]


@overload
def value_and_grad(
    loss: _Function,
    *,
    has_aux: bool = False,
    batch_argnames: str | Sequence[str] | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    **options: Any,
) -> _Function: ...
@overload
def value_and_grad(
    loss: None = None,
    *,
    has_aux: bool = False,
    batch_argnames: str | Sequence[str] | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    **options: Any,
) -> Callable[[_Function], _Function]: ...
def value_and_grad(
    loss: _Function | None = None,
    *,
    has_aux: bool = False,
    batch_argnames: str | Sequence[str] | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    **options: Any,
) -> Any:
    """``eqx.filter_value_and_grad``, which also obeys the policy of the step that calls it.

        @jm.eqx.value_and_grad(has_aux=True)
        def loss(model, batch): ...

    Args:
        loss: A function of a model, or any tree, and other arguments to a scalar or to `jm.weighted`, or to one of these and
            anything with ``has_aux``. Without it a decorator is returned.
        has_aux: Whether the loss returns ``(value, aux)``.
        batch_argnames: Names of the arguments that are the batch, as in `jm.value_and_grad`.
        batch_argnums: The same by position.
        **options: The other options of `jax.value_and_grad`.

    Returns:
        A function to ``(value, gradients)``, or ``((value, aux), gradients)``. The gradients are a tree like the first argument,
        with None for each leaf that is no inexact array.

    Raises:
        LossRefusedError, PolicyError: when called under a policy that cannot be kept; see `jm.remat`.
        TypeError: ``argnums``, which Equinox's functions do not have either.
    """
    _require_no_argnums(options, "value_and_grad")
    if loss is None:
        return functools.partial(
            value_and_grad, has_aux=has_aux, batch_argnames=batch_argnames, batch_argnums=batch_argnums, **options
        )
    require_function(loss, "jm.eqx.value_and_grad")
    batch = BatchChoice(argnames=batch_argnames, argnums=batch_argnums)
    return gradient_function(loss, 0, batch, options, has_aux=has_aux, inexact_only=True)


@overload
def grad(
    loss: _Function,
    *,
    has_aux: bool = False,
    batch_argnames: str | Sequence[str] | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    **options: Any,
) -> _Function: ...
@overload
def grad(
    loss: None = None,
    *,
    has_aux: bool = False,
    batch_argnames: str | Sequence[str] | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    **options: Any,
) -> Callable[[_Function], _Function]: ...
def grad(
    loss: _Function | None = None,
    *,
    has_aux: bool = False,
    batch_argnames: str | Sequence[str] | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    **options: Any,
) -> Any:
    """``eqx.filter_grad``, which also obeys the policy of the step that calls it; see `value_and_grad`.

    Args:
        loss: As in `value_and_grad`. Without it a decorator is returned.
        has_aux: Whether the loss returns ``(value, aux)``.
        batch_argnames: Names of the arguments that are the batch.
        batch_argnums: The same by position.
        **options: The other options of `jax.value_and_grad`.

    Returns:
        A function to the gradients, or to ``(gradients, aux)`` with ``has_aux``.
    """
    _require_no_argnums(options, "grad")
    if loss is None:
        return functools.partial(
            grad, has_aux=has_aux, batch_argnames=batch_argnames, batch_argnums=batch_argnums, **options
        )
    require_function(loss, "jm.eqx.grad")
    both = value_and_grad(loss, has_aux=has_aux, batch_argnames=batch_argnames, batch_argnums=batch_argnums, **options)

    @functools.wraps(loss)
    def gradients(*args: Any, **kwargs: Any) -> Any:
        value, found = both(*args, **kwargs)
        return (found, value[1]) if has_aux else found

    return gradients


def _require_no_argnums(options: dict[str, Any], name: str) -> None:
    """Refuse what would differentiate another argument than the first.

    Raises:
        TypeError: ``argnums`` is given.
    """
    if "argnums" in options:
        msg = (
            f"jm.eqx.{name} differentiates its first argument, as eqx.filter_{name} does, and got argnums="
            f"{options['argnums']!r}. Expected a loss whose first argument is a tuple of all that is differentiated; "
            f"jm.{name} has argnums."
        )
        raise TypeError(msg)
