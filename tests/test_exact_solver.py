"""What the planner offers for longer chains, against the optimum of a mixed-integer programme that shares no code with it."""

from __future__ import annotations

import random

import numpy as np
import pytest

import jaxmem_callbacks as jm
from tests.exact_solver import Programme
from tests.test_exact_plans import Reference, Spec, loss_of, model_of, random_chain, reference_of

SECONDS = 60.0
# As much of a plain step's operations is no more than elementwise work; the optimum may do as much more too.
SAME_WORK = 0.01
SHARES = (0.0, 0.1, 0.25, 1.0)
LENGTHS = (10, 12, 14, 18, 24)
# The median of these points' bytes over the optimum's, and the farthest.
MEDIAN, FARTHEST = 1.0005, 1.05


def residual_network(blocks: int, wide: int, narrow: int = 8) -> Spec:
    """Blocks of two products with an activation between, each added to what it takes, as (kind, width or earlier value)."""
    spec = [("dot", narrow)]
    for _ in range(blocks):
        spec += [("dot", wide), ("tanh", 0), ("dot", narrow), ("add", len(spec) - 1)]
    return [*spec, ("sum", 0)]


def over_the_optimum(reference: Reference) -> list[float]:
    """For some amounts of work the fewest bytes that are offered, over the fewest that any cuts and any kept values need."""
    offered = [reference.cost(jm.StepPolicy()), *reference.offered()]
    operations = sum(step.flops for step in reference.model.steps)
    programme = Programme(reference.model)
    ratios: list[float] = []
    for share in SHARES:
        work = (share + SAME_WORK) * operations
        _, least = programme.least(work, SECONDS)
        ratios.append(min(bytes_ for bytes_, again in offered if again <= work) / least)
    return ratios


@pytest.mark.core
def test_the_programme_finds_what_trying_every_plan_finds() -> None:
    rng = random.Random(5)  # noqa: S311 - chains, not keys
    for _ in range(4):
        model = model_of(random_chain(rng))
        programme = Programme(model)
        for least, work in model.best():
            plan, proved = programme.least(work, SECONDS)
            assert plan is not None
            assert model.cost(plan)[0] == pytest.approx(least, rel=2e-3)
            assert model.cost(plan)[1] <= work
            assert proved <= least * (1 + 1e-6)


@pytest.mark.slow
def test_what_is_offered_for_longer_random_chains() -> None:
    some = [random_chain(random.Random(steps + seed), steps) for steps in LENGTHS for seed in (0, 100)]  # noqa: S311 - chains
    ratios = np.concatenate([over_the_optimum(reference_of(spec)) for spec in some])
    assert ratios.min() >= 1 - 1e-6
    assert np.median(ratios) <= MEDIAN, np.sort(ratios)
    assert ratios.max() <= FARTHEST, np.sort(ratios)


@pytest.mark.slow
def test_what_is_offered_for_blocks_that_repeat_is_the_optimum() -> None:
    spec = residual_network(3, 32)
    assert len(loss_of(spec)[1][0]) == 7
    ratios = over_the_optimum(reference_of(spec))
    assert max(ratios) <= 1.002, ratios
