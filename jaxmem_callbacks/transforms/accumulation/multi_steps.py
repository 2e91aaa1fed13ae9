"""A step's arguments enter; they leave unharmed unless `optax.MultiSteps` already accumulates in it."""

from __future__ import annotations

from typing import Any

import jax

from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.policies import StepPolicy


def refuse_second_accumulation(policy: StepPolicy, *trees: Any) -> None:
    """Refuse microbatches beside `optax.MultiSteps`, by its state among a step's arguments.

    Raises:
        PolicyError: both would accumulate.
    """
    if policy.microbatches == 1:
        return
    if accumulates_already(*trees):
        msg = (
            f"microbatches={policy.microbatches} and optax.MultiSteps (its MultiStepsState is among the step's arguments) would "
            "accumulate twice. Expected one of them: pass the inner optimizer without optax.MultiSteps, or microbatches=1."
        )
        raise PolicyError(msg)


def accumulates_already(*trees: Any) -> bool:
    """Whether a step's arguments hold the state of `optax.MultiSteps`."""
    return any(_is_multi_steps(node) for node in jax.tree.leaves(trees, is_leaf=_is_multi_steps))


def _is_multi_steps(node: Any) -> bool:
    return type(node).__name__ == "MultiStepsState" and type(node).__module__.partition(".")[0] == "optax"
