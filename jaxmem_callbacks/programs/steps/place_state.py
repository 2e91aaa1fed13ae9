"""`jm.place_state`: the optimizer's state of a step, laid into host memory before the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxmem_callbacks.programs.steps.step import JitStep
from jaxmem_callbacks.records.arguments import require_function
from jaxmem_callbacks.records.policies import StepPolicy


def place_state(train_step: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The arguments of a step, the optimizer's state among them moved into host memory.

        step = jm.jit_step(train_step, jm.StepPolicy(state_offload="optimizer"))
        params, opt_state, batch = jm.place_state(step, params, opt_state, batch)

    What is optimizer state is found by what the step does with its arguments. The step keeps it there: call this once, before
    the loop, and after a checkpoint was restored into device memory.

    Args:
        train_step: The step, as it was written or as `jm.jit_step` made it.
        *args: The arguments of a call of it, arrays or `jax.ShapeDtypeStruct`; nothing is run.
        **kwargs: Likewise.

    Returns:
        The arguments in order, then those by keyword, in the order of their names. What is not moved is the same object.

    Raises:
        PolicyError: the step returns no optimizer state updated, or it is inside a framework's object.
        TypeError: no function.
    """
    require_function(train_step, "jm.place_state")
    given = train_step if isinstance(train_step, JitStep) else JitStep(train_step, StepPolicy())
    policy = replace(given.policy, state_offload="optimizer")
    step = given.under(policy, None, None, gradients=given.gradients)
    return tuple(step.placed(args, kwargs).values())
