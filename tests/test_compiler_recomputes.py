"""Where a compiler recomputes by itself near its limit: such a point is never free, and never the end of a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.compiles import Compiler, CompileResults
from jaxmem_callbacks.planning.orchestrate import explore
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.request import Budget, budget_for
from jaxmem_callbacks.programs.targets.target import resolve_target
from jaxmem_callbacks.records.plans import Candidate
from tests.target_step import needs_compiler

LAYERS, WIDTH, BUDGET = 6, 2048, 10**6


def train_step(weights: Any, batch: Any) -> Any:
    def loss(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(x @ weight) + jnp.sin(x)
        return jnp.square(x).mean()

    return jm.value_and_grad(loss)(weights, batch)


def shapes(rows: int, width: int) -> tuple[Any, Any]:
    return [jax.ShapeDtypeStruct((width, width), jnp.float32)] * LAYERS, jax.ShapeDtypeStruct(
        (rows, width), jnp.float32
    )


@pytest.mark.targets
def test_what_a_gpus_compiler_recomputes_costs_operations_and_time() -> None:
    """104 GiB of activations on 80 GB: XLA makes some of them twice by itself."""
    needs_compiler("h100_sxm")
    hardware = resolve_target("h100_sxm")
    args = shapes(2**20, WIDTH)
    problem = Problem(train_step=train_step, args=args, kwargs={}, target=hardware, budget=budget_for(None, hardware))
    compiler = Compiler(problem)
    plain = compiler.lowered(jm.StepPolicy())()
    assert plain.compiler_remat > 0
    assert plain.extra_flops > 0
    assert plain.modelled_s is not None
    assert compiler.plain.modelled_s is not None
    assert plain.modelled_s == pytest.approx(compiler.plain.modelled_s + plain.extra_flops / 989e12, rel=1e-12)
    assert plain.modelled_s > compiler.plain.modelled_s


@final
class Said:
    """Stands where compilers do, for what they say: all fits, and so many instructions are recomputed by the compiler itself.

    Args:
        recomputed: Policy -> number of instructions.
    """

    def __init__(self, recomputed: Callable[[jm.StepPolicy], int]) -> None:
        self._recomputed = recomputed
        self.remaining = 16
        self.asked = list[jm.StepPolicy]()
        self.results = CompileResults()

    def at_most(self, _compiles: int) -> Said:
        """All of it."""
        return self

    def compile(self, asked: Sequence[tuple[Compiler, jm.StepPolicy]]) -> list[Candidate | None]:
        """As the planner's queue does."""
        self.remaining -= len(asked)
        self.asked += [policy for _, policy in asked]
        return [self._candidate(compiler, policy) for compiler, policy in asked]

    def _candidate(self, compiler: Compiler, policy: jm.StepPolicy) -> Candidate:
        again, own = compiler.facts(policy).flops - compiler.plain.flops, self._recomputed(policy)
        return Candidate(
            policy=policy,
            step_bytes=BUDGET // 2,
            need_bytes=BUDGET // 2,
            temp_bytes=0,
            fits=True,
            flops=compiler.plain.flops + again,
            extra_flops=again + own,
            plain_flops=compiler.plain.flops,
            compiler_remat=own,
        )


@pytest.fixture(scope="module")
def small() -> Compiler:
    given = Budget(bytes=BUDGET, limit_bytes=BUDGET, reason="asked for")
    return Compiler(Problem(train_step=train_step, args=shapes(64, 16), kwargs={}, target=None, budget=given))


@pytest.mark.core
@pytest.mark.parametrize("own", [0, 5])
def test_a_plain_step_that_fits_ends_a_search_only_where_nothing_is_recomputed(small: Compiler, own: int) -> None:
    queue: Any = Said(lambda policy: own if policy.remat == "none" else 0)
    explore(small, (), queue, remat=True, frontier=False)
    assert [policy.remat for policy in queue.asked[:2]] == ["none", "full"]
    assert (len(queue.asked) > 2) is bool(own)


@pytest.mark.core
@pytest.mark.parametrize("own", [0, 5])
def test_fewest_microbatches_fit_only_where_nothing_is_recomputed(small: Compiler, own: int) -> None:
    """Of the whole batch the compiler recomputes some; of microbatches too, or not: then no remat is tried over them."""
    queue: Any = Said(lambda policy: 0 if policy.remat != "none" else own if policy.microbatches > 1 else 5)
    explore(small, (2, 4), queue, remat=True, frontier=False)
    over = [policy.remat for policy in queue.asked if policy.microbatches > 1]
    assert "none" in over
    assert ("full" in over) is bool(own)
