"""What the planner offers for stretches of real models, against the optimum of a programme that shares no code with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import jaxmem_callbacks as jm
from benchmarks.plan_models.case import PlanCase
from benchmarks.plan_models.equinox_transformer import equinox_transformer
from benchmarks.plan_models.gpt import gpt_512_words
from benchmarks.plan_models.haiku_transformer import haiku_transformer
from benchmarks.plan_models.lstm import lstm
from benchmarks.plan_models.unet import unet
from benchmarks.plan_models.vit import vit
from jaxmem_callbacks.transforms import remat
from jaxmem_callbacks.transforms.policy import ActivePolicy, activate
from jaxmem_callbacks.transforms.tracing import Equations, flatten
from tests.exact_graphs import Graph, graph_of, stretch
from tests.exact_plans import Plan
from tests.exact_solver import Programme
from tests.test_exact_plans import Reference
from tests.test_exact_solver import SAME_WORK, SHARES

SECONDS = 60.0
PRODUCTS = {"conv_general_dilated", "dot_general"}
# From one matrix product of a loss to another, each counted from 0, with their real shapes.
STRETCHES: dict[str, tuple[Callable[[], PlanCase], int, int]] = {
    "GPT, attention": (gpt_512_words, 0, 3),
    "GPT, MLP": (gpt_512_words, 4, 5),
    "haiku, attention": (haiku_transformer, 0, 5),
    "haiku, MLP": (haiku_transformer, 5, 7),
    "Equinox, attention to MLP": (equinox_transformer, 2, 6),
    "ViT, attention": (vit, 1, 6),
    "U-Net, a norm between two convolutions": (unet, 2, 3),
    "U-Net, with the time's embedding": (unet, 3, 5),
}
LSTM = "LSTM, a step"
MOST = 60  # equations
# The bytes that are offered over the optimum's: the median of a stretch's points, and the farthest.
MEDIAN, FARTHEST = 1.001, 1.01
# The same where both are compiled for the CPU, over the points of all stretches.
COMPILED_MEDIAN = 1.01


def losses_of(case: PlanCase) -> list[Equations]:
    """The losses that a step takes gradients of, as the library cuts them."""
    found: list[Equations] = []
    cut = remat.cut_equations

    def seen(flat: Equations, *args: Any) -> Any:
        found.append(flat)
        return cut(flat, *args)

    with mock.patch.object(remat, "cut_equations", seen), activate(ActivePolicy(jm.StepPolicy(remat="full"))):
        jax.make_jaxpr(case.plain)(*case.arguments)
    return found


def best_of(loss: Any, args: Any) -> tuple[Graph, list[tuple[float, tuple[int, Any], Plan]]]:
    """For some amounts of work the fewest bytes that are offered over the fewest possible, what has them, and the best plan."""
    graph = graph_of(flatten(jax.make_jaxpr(loss)(*args)))
    assert len(graph.flat.eqns) <= MOST
    reference = Reference(loss, args, graph.model, graph.plan_in)
    offered = [(reference.cost(policy), policy) for policy in (jm.StepPolicy(), *reference.policies())]
    operations = sum(step.flops for step in graph.model.steps)
    programme, rows = Programme(graph.model), []
    for share in SHARES:
        work = (share + SAME_WORK) * operations
        ours, policy = min(((cost[0], policy) for cost, policy in offered if cost[1] <= work), key=lambda each: each[0])
        plan, proved = programme.least(work, SECONDS, ours * (1 + 1e-6))
        assert plan is not None
        least = graph.model.cost(plan)[0]
        assert proved >= 0.995 * least, "not solved"
        rows.append((ours / least, (ours, policy), plan))
    return graph, rows


@functools.cache
def solved(name: str) -> tuple[list[float], list[float]]:
    """For some amounts of work the bytes of what is offered over those of the best plan: in the model, and compiled.

    A point where nothing is recomputed is not compiled: both are the loss as it is written.
    """
    if name == LSTM:
        flat = losses_of(lstm())[0]
        body = flatten(next(eqn for eqn in flat.eqns if eqn.primitive.name == "scan").params["jaxpr"])
        loss, args = stretch(body, 0, len(body.eqns))
    else:
        make, first, last = STRETCHES[name]
        flat = losses_of(make())[0]
        places = [place for place, eqn in enumerate(flat.eqns) if eqn.primitive.name in PRODUCTS]
        loss, args = stretch(flat, places[first], places[last] + 1)
    graph, rows = best_of(loss, args)
    compiled = [
        temporary(remat.rematerialised(loss, policy), args) / temporary(graph.made_of(plan), args)
        for _, (_, policy), plan in rows
        if policy.remat != "none"
    ]
    return [ratio for ratio, _, _ in rows], compiled


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*STRETCHES, LSTM])
def test_in_the_model(name: str) -> None:
    ratios, _ = solved(name)
    assert np.median(ratios) <= MEDIAN, ratios
    assert max(ratios) <= FARTHEST, ratios


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_compiled() -> None:
    """No point has a bound: XLA chooses what to fuse, so that of two plans alike in the model one may take a third more."""
    ratios = [ratio for name in STRETCHES for ratio in solved(name)[1]]
    assert len(ratios) >= 3 * len(STRETCHES)
    assert np.median(ratios) <= COMPILED_MEDIAN, ratios


def temporary(loss: Any, args: Any) -> int:
    """Bytes that a compiled gradient takes besides its arguments and results."""
    return jax.jit(jax.value_and_grad(loss)).lower(*args).compile().memory_analysis().temp_size_in_bytes
