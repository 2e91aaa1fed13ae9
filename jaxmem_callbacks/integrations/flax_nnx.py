"""Flax NNX: gradients that keep a module's state right under a policy, and remat by module path without editing the model.

`jm.nnx` is this module. What the rooms above need of NNX (`transforms.frameworks.Framework`) is here too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx
from flax.nnx.transforms.general import merge_inputs, split_inputs

from jaxmem_callbacks.integrations.nnx_modules import remat
from jaxmem_callbacks.transforms.policy import active_policy
from jaxmem_callbacks.transforms.remat import rematerialised

__all__ = ["remat", "value_and_grad"]

NAME = "Flax NNX"
VALUE_AND_GRAD = "jm.nnx.value_and_grad"
_CONTEXT = "jaxmem_callbacks"


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


def value_and_grad(
    loss: Callable[..., Any],
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,  # noqa: FBT001, FBT002 - nnx's signature
    **options: Any,
) -> Callable[..., Any]:
    """`nnx.value_and_grad`, which also obeys the policy of the step that calls it.

    The modules are split and merged inside what is cut, and their new state comes back through it: BatchNorm statistics,
    dropout counters and sown values move exactly as without a policy.

    Args:
        loss: A function of NNX modules and arrays to a scalar, or to (scalar, aux) with ``has_aux``.
        argnums: Which arguments, as in `nnx.value_and_grad`.
        has_aux: Whether the loss returns ``(value, aux)``.
        **options: The other options of `nnx.value_and_grad`.

    Returns:
        A function to ``(value, gradients)``, or ``((value, aux), gradients)``.

    Raises:
        LossRefusedError, PolicyError: when called under a policy that cannot be kept; see `jm.remat`.
    """

    @functools.wraps(loss)
    def value_and_gradients(*args: Any, **kwargs: Any) -> Any:
        active = active_policy()
        chosen = loss
        if active is not None:
            active.used = True
            if active.policy.changes_gradients:
                chosen = _cheaper(loss, active.policy)
        return nnx.value_and_grad(chosen, argnums=argnums, has_aux=has_aux, **options)(*args, **kwargs)

    return value_and_gradients


def _cheaper(loss: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    """The loss cut as a function of pure arrays, with every module's state carried in and out."""

    @functools.wraps(loss)
    def cheaper_loss(*args: Any, **kwargs: Any) -> Any:
        def on_modules(inner_args: Any, inner_kwargs: Any) -> Any:
            return loss(*inner_args, **inner_kwargs)

        pure = rematerialised(merge_inputs(on_modules, ctxtag=_CONTEXT), policy)
        return split_inputs(pure, ctxtag=_CONTEXT)(args, kwargs)

    return cheaper_loss
