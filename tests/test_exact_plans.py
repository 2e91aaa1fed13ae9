"""Cuts and kept values together against every plan that is possible, by a model of live bytes that knows nothing of ours."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import LossRefusedError, PolicyError
from jaxmem_callbacks.transforms.equations import flatten
from jaxmem_callbacks.transforms.keeping import Share
from jaxmem_callbacks.transforms.policy import ActivePolicy, activate
from jaxmem_callbacks.transforms.remat import cut_equations
from tests.comparisons import CHECKPOINTS
from tests.exact_plans import Chain, Made, Plan

pytestmark = pytest.mark.core

ROWS, START, STEPS, CHAINS = 16, 4, 7, 24
WITHIN = 1.05
# As much of a plain step's operations is no more than elementwise work.
SAME_WORK = 0.01

Spec = list[tuple[str, int]]


def random_chain(rng: random.Random) -> Spec:
    """Products of many widths, activations and sums with earlier values, as (kind, width or earlier value)."""
    spec, widths = [], []
    for step in range(STEPS - 1):
        alike = [earlier for earlier in range(step - 1) if widths[earlier] == widths[-1]]
        kind = rng.choice(["dot", "dot", "dot", "tanh", "add"]) if step else "dot"
        if kind == "add" and alike:
            spec.append((kind, rng.choice(alike)))
        elif kind == "tanh":
            spec.append((kind, 0))
        else:
            spec.append(("dot", rng.choice([4, 8, 16, 32])))
        widths.append(spec[-1][1] if spec[-1][0] == "dot" else widths[-1])
    return [*spec, ("sum", 0)]


def loss_of(spec: Spec) -> tuple[Any, tuple[Any, ...]]:
    """The chain as its users would write it."""
    widths = [START, *(number for kind, number in spec if kind == "dot")]
    weights = [jax.ShapeDtypeStruct(pair, jnp.float32) for pair in itertools.pairwise(widths)]

    def loss(weights: Any, x: Any) -> Any:
        left, values = iter(weights), []
        for kind, number in spec:
            if kind == "dot":
                x = jax.lax.dot(x, next(left))
            elif kind == "tanh":
                x = jnp.tanh(x)
            else:
                x = x + values[number] if kind == "add" else jnp.sum(x)
            values.append(x)
        return x

    return loss, (weights, jax.ShapeDtypeStruct((ROWS, START), jnp.float32))


def model_of(spec: Spec) -> Chain:
    """The chain for the reference: float32, two operations a multiply-add, derivatives by the rules of calculus."""
    steps, width = [], START
    for place, (kind, number) in enumerate(spec):
        before = (place - 1,) if place else ()
        if kind == "dot":
            steps.append(Made(4 * ROWS * number, 2 * ROWS * width * number, before, before))
            width = number
        elif kind == "sum":
            steps.append(Made(4, ROWS * width, before, (), is_sum=True))
        else:
            takes, needs = (before, (place,)) if kind == "tanh" else (tuple(sorted({*before, number})), ())
            steps.append(Made(4 * ROWS * width, ROWS * width, takes, needs, in_place=True))
    return Chain(steps)


def plan_in(jaxpr: Any, steps: int) -> Plan:
    """What was made of the loss: equations come in their order, each checkpoint is a segment, kept values are named."""
    place, cuts, kept = 0, set[int](), 0
    for eqn in jaxpr.eqns:
        inner = eqn.params["jaxpr"].eqns if eqn.primitive.name in CHECKPOINTS else None
        if inner is not None:
            cuts.add(place)
        for one in inner or [eqn]:
            if one.primitive.name == "name":
                kept |= 1 << (place - 1)
            else:
                place += 1
        if inner is not None:
            cuts.add(place)
    assert place == steps
    return Plan(tuple(sorted(cuts - {0, steps})), kept)


def offered(spec: Spec, numbers: tuple[int | None, ...] = (None, 2, 3, 4)) -> list[Plan]:
    """The plain loss, and for every number of segments every share that the survey names."""
    loss, args = loss_of(spec)
    traced, plans = jax.make_jaxpr(loss)(*args), [Plan(())]

    def cut(policy: jm.StepPolicy, survey: Any = None) -> None:
        with activate(ActivePolicy(policy, survey)):
            plans.append(plan_in(cut_equations(flatten(traced), policy), len(spec)))

    for segments in numbers:
        told: list[list[Share]] = []
        policy = jm.StepPolicy(remat="full", segments=segments)
        try:
            cut(policy, told.append)
        except (PolicyError, LossRefusedError):  # fewer places than that, or all of it the last segment
            continue
        for share in told[0][1:]:
            cut(dataclasses.replace(policy, keep=min(math.ceil(share.share * 1e5) / 1e5, 1.0)))
    return plans


@pytest.fixture(scope="module")
def ratios() -> list[list[float]]:
    """For each chain, first the smallest bytes, then every point of the exact frontier: ours over the optimum."""
    rng, found = random.Random(5), []  # noqa: S311 - chains, not keys
    for spec in (random_chain(rng) for _ in range(CHAINS)):
        model = model_of(spec)
        ours = [model.cost(plan) for plan in offered(spec)]
        slack = SAME_WORK * 3 * sum(step.flops for step in model.steps)
        points = model.best()
        assert min(ours)[0] >= points[0][0]
        at_each = [min(b for b, flops in ours if flops <= most + slack) / bytes_ for bytes_, most in points]
        found.append([min(ours)[0] / points[0][0], *at_each])
    return found


def test_the_smallest_plan_is_within_a_twentieth_of_the_optimum(ratios) -> None:
    smallest = np.array([each[0] for each in ratios])
    assert np.mean(smallest <= WITHIN) >= 0.9, smallest
    assert smallest.max() <= 1.1, smallest
    assert smallest.mean() <= 1.01, smallest


def test_at_every_amount_of_work_the_bytes_are_near_the_optimum(ratios) -> None:
    points = np.concatenate([each[1:] for each in ratios])
    assert np.mean(points <= WITHIN) >= 0.9, np.sort(points)[-12:]
    assert points.max() <= 1.25, np.sort(points)[-12:]
    assert points.mean() <= 1.02, points.mean()


def test_the_reference_counts_a_short_chain_as_one_does_by_hand() -> None:
    x, y, z = Made(100, 7, (), ()), Made(10, 20, (0,), (0,)), Made(100, 20, (1,), (1,))
    chain = Chain([x, y, z, Made(4, 1, (2,), ())])
    # Nothing cut: at z's derivative x and y are there, and the gradients of z and y.
    assert chain.cost(Plan(())) == (100 + 10 + 100 + 10, 0)
    # Cut before y: x is stored for its derivative, so nothing is computed again and nothing is won.
    assert chain.cost(Plan((1,))) == (100 + 10 + 100 + 10, 0)
    # Cut before z: x is made again when y's derivative comes, which then also has the gradients of y and x.
    assert chain.cost(Plan((2,))) == (100 + 10 + 100, 7)
    assert chain.cost(Plan((2,), kept=1)) == (100 + 10 + 100 + 10, 0)
