"""What a plan costs before any compile, for 10,000 equations. Writes results/analytic_jax_<version>.json.

    python -m benchmarks.analytic

Processor time of this process. JAX's own part, tracing the loss and its gradients, has its own row: it comes with any `jax.jit`.
A plan traces the gradients of the cut loss too, once for each policy that it compiles; that is in the row of the cuts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import jax

import jaxmem_callbacks as jm
from benchmarks.lowering import Problem, equations, loop_of_layers, unrolled_llama
from benchmarks.sources import write_result
from jaxmem_callbacks.planning.step_time import modelled_seconds, speed_of
from jaxmem_callbacks.programs.steps.program import operations_of
from jaxmem_callbacks.programs.targets.target import resolve_target
from jaxmem_callbacks.records.plans import FrontierPoint
from jaxmem_callbacks.transforms.costs import count_flops
from jaxmem_callbacks.transforms.policy import ActivePolicy, activate
from jaxmem_callbacks.transforms.remat import cut_equations
from jaxmem_callbacks.transforms.tracing import flatten

PROBLEMS: dict[str, Callable[[], Problem]] = {
    "loop of layers": lambda: loop_of_layers(770),
    "llama, Linen": lambda: unrolled_llama(72),
}
FULL = jm.StepPolicy(remat="full")


def seconds_to_survey(traced: Any) -> tuple[float, list[FrontierPoint]]:
    """Processor seconds to cut a traced loss and to find what every share of it would keep, and the shares."""
    active = ActivePolicy(FULL, survey=True)
    begun = time.process_time()
    with activate(active):
        cut_equations(flatten(traced), FULL)
    return time.process_time() - begun, list(active.frontiers[0])


def seconds_to_judge(traced: Any) -> float:
    """Processor seconds for a traced step's operations, its modelled time and its fingerprint."""
    speed = speed_of(resolve_target("h100_sxm", require_installed=False))
    assert speed is not None
    begun = time.process_time()
    count_flops(traced)
    modelled_seconds(traced, speed)
    operations_of(traced)
    return time.process_time() - begun


def measure(problem: Problem) -> dict[str, float]:
    """Equations, and processor seconds of each part."""
    loss, args = problem
    begun = time.process_time()
    traced = jax.make_jaxpr(loss)(*args)
    tracing = time.process_time() - begun
    survey, shares = seconds_to_survey(traced)
    begun = time.process_time()
    jax.make_jaxpr(jax.value_and_grad(loss))(*args)
    plain = time.process_time() - begun
    begun = time.process_time()
    step = jax.make_jaxpr(jax.value_and_grad(jm.remat(loss)))(*args)
    whole = time.process_time() - begun
    judging = seconds_to_judge(step)
    return {
        "equations": equations(problem),
        "shares": len(shares),
        "jax_traces_the_loss_s": round(tracing, 2),
        "jax_traces_the_gradients_s": round(plain, 2),
        "cuts_and_survey_s": round(survey, 2),
        "operations_time_fingerprint_s": round(judging, 2),
        "analytic_s": round(survey + judging, 2),
        "gradients_of_the_cut_loss_traced_s": round(whole, 2),
    }


def main() -> None:
    """Measure both losses and write the result file."""
    rows = [{"loss": name, **measure(make())} for name, make in PROBLEMS.items()]
    write_result("analytic", rows=rows)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
