"""The fewest bytes of any cuts with any kept values, by a mixed-integer programme: for chains too long to try every plan of.

The model is that of `Chain.cost` in `tests/exact_plans.py`, written as linear constraints; it shares no code with the planner.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from tests.exact_plans import Chain, Plan

Term = tuple[float, int]
HALF = 0.5  # what a solver takes for 1 is nearly 1


@final
class Programme:
    """The plans of a chain as points of a polytope.

    Args:
        chain: The steps.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain, self._steps, self._count = chain, chain.steps, len(chain.steps)
        self._rows: list[list[Term]] = []
        self._most: list[float] = []
        self._is_whole: list[bool] = []
        n = self._count
        self._peak = self._variable()
        self._cut = [self._variable(whole=True) for _ in range(n)]  # before a step
        self._again = [self._variable(whole=True) for _ in range(n)]
        self._at_most([(1, self._cut[0])], 0)
        #: Whether two steps are in one segment; the same step is no variable.
        self._same = {(v, i): self._variable() for v in range(n) for i in range(v + 1, n)}
        self._segments()
        self._stored = {
            (v, j): self._variable() for j, step in enumerate(self._steps) for v in {*step.needs, *step.takes}
        }
        self._values()
        self._earlier = {(v, i): self._variable() for v in range(n) for i in range(v + 1, n)}
        for (v, j), stored in self._stored.items():
            for i in range(j + 1, n):
                self._at_least(self._earlier[v, i], [(1, stored), *self._times(-1, j, i)])
        self._forward()
        for i in range(n):
            self._recomputed(i)
            self._differentiated(i)

    def least(self, work: float, seconds: float, most: float = np.inf) -> tuple[Plan | None, float]:
        """The plan of fewest bytes with so much work again at most, or the best that was found, and bytes that no plan is below.

        Args:
            work: Operations.
            seconds: When to stop.
            most: Bytes of a plan that is known, with no more work: plans that need more are left out.
        """
        self._at_most([(step.flops, self._again[i]) for i, step in enumerate(self._steps)], work)
        rows = np.repeat(np.arange(len(self._rows)), [len(row) for row in self._rows])
        flat = [term for row in self._rows for term in row]
        shape = (len(self._rows), len(self._is_whole))
        matrix = csr_array(([factor for factor, _ in flat], (rows, [column for _, column in flat])), shape=shape)
        wanted, upper = np.zeros(shape[1]), np.ones(shape[1])
        wanted[self._peak], upper[self._peak] = 1.0, most
        answer = milp(
            wanted,
            integrality=np.array(self._is_whole, np.int64),
            bounds=Bounds(np.zeros(shape[1]), upper),
            constraints=LinearConstraint(matrix, -np.inf, np.array(self._most)),
            options={"time_limit": seconds, "mip_rel_gap": 1e-3},
        )
        self._rows.pop()
        self._most.pop()
        return (None if answer.x is None else self._plan(answer.x > HALF)), float(answer.mip_dual_bound or 0.0)

    def _plan(self, chosen: np.ndarray) -> Plan:
        kept = sum(1 << v for v, again in enumerate(self._again) if not chosen[again])
        return Plan(tuple(i for i, cut in enumerate(self._cut) if chosen[cut]), kept)

    def _variable(self, *, whole: bool = False) -> int:
        self._is_whole.append(whole)
        return len(self._is_whole) - 1

    def _at_most(self, terms: Iterable[Term], most: float) -> None:
        self._rows.append(list(terms))
        self._most.append(most)

    def _at_least(self, variable: int, terms: Iterable[Term], more: float = 0.0) -> None:
        """A variable is no less than a sum and a number."""
        self._at_most([*terms, (-1, variable)], -more)

    def _times(self, factor: float, v: int, i: int) -> list[Term]:
        """Whether two steps are in one segment, times a factor; of one step nothing, since that is a number."""
        return [(factor, self._same[min(v, i), max(v, i)])] if v != i else []

    def _segments(self) -> None:
        for (v, i), same in self._same.items():
            before = self._times(1, v, i - 1)
            self._at_least(same, [*before, (-1, self._cut[i])], 0.0 if before else 1.0)
            self._at_most([(1, same), *self._times(-1, v, i - 1)], 0.0 if before else 1.0)
            self._at_most([(1, same), (1, self._cut[i])], 1)
        last = self._count - 1
        for v in range(self._count):  # the last segment does nothing again
            self._at_most([(1, self._again[v]), *self._times(1, v, last)], 1 if v < last else 0)

    def _values(self) -> None:
        """What derivatives need is stored by their segment, or made again in it; so is what that takes."""
        for j, step in enumerate(self._steps):
            if (
                j in step.needs and j < self._count - 1
            ):  # what the derivative sees is made again in each segment but the last
                self._at_least(self._again[j], self._times(-1, j, self._count - 1), 1.0)
            for v in step.needs:
                self._at_least(self._stored[v, j], self._times(-1, v, j), 1.0 if v != j else 0.0)
                self._at_least(self._stored[v, j], [(-1, self._again[v])], 1.0)
            for v in step.takes:
                self._at_least(self._stored[v, j], [(1, self._again[j]), *self._times(-1, v, j)])
                self._at_least(self._stored[v, j], [(1, self._again[j]), (-1, self._again[v])])

    def _forward(self) -> None:
        waits = [self._variable() for _ in self._steps]
        for (v, _), stored in self._stored.items():
            self._at_least(waits[v], [(1, stored)])
        for i in range(self._count):
            ahead = self._chain.ahead[i]
            there = sum(self._steps[v].bytes for v in range(self._count) if ahead >> v & 1)
            more = [(self._steps[v].bytes, waits[v]) for v in range(i) if not ahead >> v & 1]
            self._at_most([*more, (-1, self._peak)], -there)

    def _recomputed(self, i: int) -> None:
        """While a step is done again: what earlier segments stored, and what this one has and still uses."""
        held = {v: self._variable() for v in range(self._count)}
        for v in range(i):
            self._at_least(held[v], [(1, self._earlier[v, i])])
        self._at_least(held[i], [(1, self._again[i])])
        for (v, j), stored in self._stored.items():
            step = self._steps[j]
            together = 1.0 if i == j else 0.0
            if v in step.needs:
                self._at_least(held[v], [(1, stored), *self._times(1, i, j)], together - 1)
                if v < i:
                    made = [(1, self._again[v]), *self._times(1, v, i), *self._times(1, i, j)]
                    self._at_least(held[v], made, together - 2)
            if v in step.takes and j >= i:
                self._at_least(held[v], [(1, self._again[j]), (1, stored), *self._times(1, i, j)], together - 2)
                if v < i:
                    self._at_least(held[v], [(1, self._again[v]), (1, self._again[j]), *self._times(1, v, j)], -2)
        coming: list[Term] = []
        for end in range(i + 1, self._count):
            bytes_ = self._bytes(self._chain.gradients[end] & ~(1 << end))
            # The next cut is before `end`: the step before is in this segment, and that is not.
            coming += [*self._times(bytes_, i, end - 1), *self._times(-bytes_, i, end)]
        first = self._bytes(self._chain.gradients[i + 1] & ~(1 << (i + 1))) if i + 1 < self._count else 0
        most = sum(step.bytes for step in self._steps) * 2
        terms = [(self._steps[v].bytes, one) for v, one in held.items()]
        self._at_most([*terms, *coming, (most, self._again[i]), (-1, self._peak)], most - first)

    def _differentiated(self, i: int) -> None:
        """At a step's derivative: what earlier segments stored, what it and those before it in the segment need, gradients."""
        held = {v: self._variable() for v in range(i + 1)}
        for v in range(i):
            self._at_least(held[v], [(1, self._earlier[v, i])])
        for v, j in self._stored:
            if v in self._steps[j].needs and j <= i and not (self._steps[i].in_place and v == i):
                self._at_least(held[v], self._times(1, j, i), 1.0 if i == j else 0.0)
        terms = [(self._steps[v].bytes, one) for v, one in held.items()]
        self._at_most([*terms, (-1, self._peak)], -self._bytes(self._chain.gradients[i]))

    def _bytes(self, values: int) -> float:
        return float(sum(step.bytes for v, step in enumerate(self._steps) if values >> v & 1))
