"""Users pay for the cut at start-up: at 10,000 equations it costs at most one and a half times the plain lowering.

And for a plan before anything is compiled: the cuts and the survey take no longer than JAX needs for the gradients.
"""

from __future__ import annotations

import functools
import time

import jax
import pytest

from benchmarks.analytic import seconds_to_survey
from benchmarks.lowering import equations, loop_of_layers, lowering_ratio, unrolled_llama

LIMIT = 1.5
llama = functools.cache(functools.partial(unrolled_llama, 72))
PROBLEMS = {"loop": functools.partial(loop_of_layers, 640), "llama": llama}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PROBLEMS)
def test_lowering_a_cut_loss_costs_at_most_half_more(name) -> None:
    problem = PROBLEMS[name]()
    assert equations(problem) >= 10_000
    # The best of each side over alternating rounds, never the best ratio: a slow plain round would flatter the cut.
    assert lowering_ratio(problem, 5, enough=LIMIT) <= LIMIT


def test_cutting_and_surveying_takes_less_than_tracing_the_gradients() -> None:
    loss, args = llama()
    traced = jax.make_jaxpr(loss)(*args)
    begun = time.process_time()
    jax.make_jaxpr(jax.grad(loss))(*args)
    plain = time.process_time() - begun
    spent, shares = min(seconds_to_survey(traced) for _ in range(2))
    # Measured 0.3; each segment with a frontier of its own, instead of one for all that are alike, would be about 1.
    assert spent <= 0.7 * plain, (spent, plain)
    assert len(shares) > 100
