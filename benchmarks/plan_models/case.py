"""PlanCase: one model's whole AdamW train step, plain and with each remat a good engineer writes into it; all abstract.

Here too is what the families share: the optimizer, the remat policies by their names in tables, and the step of a loss of
(parameters, batch).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

import jaxmem_callbacks as jm

Step = Callable[..., Any]
Loss = Callable[..., Any]

OPTIMIZER = optax.adamw(3e-4)
NONE, FULL, NAMES = "none", "full", "names"
BY_HAND = (FULL, "dots", "dots_no_batch", NAMES)
_POLICIES = {
    FULL: None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@dataclass(frozen=True, kw_only=True)
class PlanCase:
    """One model's train step, in the versions to be compared.

    Attributes:
        name: Its name in tables.
        plain: The step as its users write it, with ``jm.value_and_grad`` and no hint of what to save.
        hand: Remat policy -> the same step with remat written into the model.
        initial: Random key -> real arguments of the step.
        donate_argnames: What the step returns updated.
    """

    name: str
    plain: Step
    hand: Mapping[str, Step]
    initial: Callable[[jax.Array], tuple[Any, ...]]
    donate_argnames: tuple[str, ...] = ("params", "opt_state")

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The step's arguments as ShapeDtypeStructs."""
        return jax.eval_shape(self.initial, jax.random.key(0))


def compared(
    name: str,
    step_of: Callable[[Callable[..., Any], str], Step],
    initial: Callable[[jax.Array], tuple[Any, ...]],
    *,
    rows: Sequence[str] = BY_HAND,
    gradients: tuple[Callable[..., Any], Callable[..., Any]] = (jm.value_and_grad, jax.value_and_grad),
    **options: Any,
) -> PlanCase:
    """The case of a step made for a way of taking gradients and a remat policy.

    Args:
        name: As in `PlanCase`.
        step_of: Makes the step.
        initial: As in `PlanCase`.
        rows: The remat policies written by hand.
        gradients: This library's function, which the plain step takes, and the one that those by hand take.
        **options: Other fields of `PlanCase`.
    """
    ours, theirs = gradients
    by_hand = {remat: step_of(theirs, remat) for remat in rows}
    return PlanCase(name=name, plain=step_of(ours, NONE), hand=by_hand, initial=initial, **options)


def compared_losses(
    name: str,
    loss_of: Callable[[str], Loss],
    initial: Callable[[jax.Array], tuple[Any, ...]],
    rows: Sequence[str] = BY_HAND,
) -> PlanCase:
    """The case of a loss of (parameters, batch), made for a remat policy."""
    return compared(name, lambda gradient, remat: adamw_step(gradient, loss_of(remat)), initial, rows=rows)


def policy(remat: str, names: tuple[str, ...]) -> Any:
    """What `jax.checkpoint` calls the policy of a table's row; ``names`` are those the model gives."""
    return jax.checkpoint_policies.save_only_these_names(*names) if remat == NAMES else _POLICIES[remat]


def named(x: jax.Array, name: str, remat: str) -> jax.Array:
    """``x`` under a name in the version that saves by name; elsewhere as it is, so that the plain model has no hint."""
    return checkpoint_name(x, name) if remat == NAMES else x


def adamw_step(value_and_grad: Callable[..., Any], loss: Loss) -> Step:
    """A step of (parameters, optimizer state, batch) for a loss of (parameters, batch)."""

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = value_and_grad(loss)(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def next_token_loss(logits: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of logits[B, T, V] at predicting tokens[B, T + 1]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()


def class_loss(logits: Any, labels: jax.Array) -> jax.Array:
    """Mean cross entropy of logits[B, classes] at labels[B]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def random_tokens(key: jax.Array, batch: int, length: int, vocabulary: int) -> jax.Array:
    """tokens[B, T + 1]: inputs, and targets one further."""
    return jax.random.randint(key, (batch, length + 1), 0, vocabulary)


def random_images(key: jax.Array, batch: int, size: int, classes: int) -> dict[str, jax.Array]:
    """image[B, size, size, 3] and label[B]."""
    pixels, labels = jax.random.split(key)
    return {
        "image": jax.random.normal(pixels, (batch, size, size, 3)),
        "label": jax.random.randint(labels, (batch,), 0, classes),
    }
