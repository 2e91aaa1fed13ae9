"""A step and its arguments in, the floating-point operations of one call out: what a policy's recomputation costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxmem_callbacks.programs.steps.user_jit import jax_traced
from jaxmem_callbacks.programs.targets.exporting import flatten_program
from jaxmem_callbacks.transforms.costs import FlopCount, count_flops
from jaxmem_callbacks.transforms.frameworks import framework_of


def step_flops(step: Callable[..., Any], *args: Any, **kwargs: Any) -> FlopCount:
    """Operations of one call of a step, traced on the shapes of its arguments; nothing is run.

    What the step changes in place (NNX modules and optimizers) counts as used, like its results.
    """
    framework = framework_of([*args, *kwargs.values()])
    traceable: Any = step if framework is None or hasattr(step, "trace") else framework.jit(step)
    if hasattr(traceable, "trace"):
        return count_flops(jax_traced(traceable.trace(*args, **kwargs)).jaxpr)
    flat = flatten_program(step, args, kwargs)
    return count_flops(jax.make_jaxpr(flat.function)(*flat.leaves))


def extra_flops(
    step_with_policy: Callable[..., Any], plain_step: Callable[..., Any], *args: Any, **kwargs: Any
) -> FlopCount:
    """What a policy adds: the operations of the step under it, less those of the same step without.

    The recomputation that the policy asks for is in it; what a compiler recomputes by itself near its memory limit is not
    (``ProgramMemory.compiler_remat`` counts those instructions).
    """
    return step_flops(step_with_policy, *args, **kwargs) - step_flops(plain_step, *args, **kwargs)
