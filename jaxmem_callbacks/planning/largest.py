"""A step whose batch may grow enters; the largest number of rows that fits is found by compiling, and compiled itself.

Bytes are a straight line in the rows only where the compiler recomputes nothing by itself. So a line through two compiled
points is a guess of where to ask next, and never an answer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, final

import jax

from jaxmem_callbacks.planning.boundary import last_that_fits
from jaxmem_callbacks.planning.candidates import Compiler
from jaxmem_callbacks.planning.explore import explore, offload
from jaxmem_callbacks.planning.ledger import Ledger
from jaxmem_callbacks.planning.offloading import MOST_POLICIES, cuts_moved
from jaxmem_callbacks.planning.own_step import traced_with_rows
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.rows import Rows, with_rows
from jaxmem_callbacks.planning.search import RematSearch
from jaxmem_callbacks.planning.space import BatchSizes, Space
from jaxmem_callbacks.programs.steps.leaves import named_arguments
from jaxmem_callbacks.records.errors import PlanError
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.policies import StepPolicy, policy_words


@final
class LargestBatch:
    """Searches the rows of one problem.

    Args:
        problem: The step, its state placed.
        rows: Its batch.
        sizes: Which numbers of rows to look among.
        counts: Microbatches that may be used besides 1, ascending.
        ledger: Where compiles are counted and kept.

    Raises:
        PlanError: there is no limit to fit into, or no number of rows is left.
    """

    def __init__(self, problem: Problem, rows: Rows, sizes: BatchSizes, counts: Sequence[int], ledger: Ledger) -> None:
        if problem.budget.bytes is None:
            msg = (
                f'search["batch"] asks for the largest batch that fits, and there is no limit to fit into: '
                f"{problem.budget.reason} Give bytes on one device: budget='12GiB'."
            )
            raise PlanError(msg)
        self._problem, self._rows, self._counts, self._ledger = problem, rows, counts, ledger
        self._unit = math.lcm(sizes.multiple_of, _parts(problem, rows) * max(counts, default=1))
        self._most = None if sizes.at_most is None else sizes.at_most // self._unit
        if self._most == 0:
            msg = (
                f'search["batch"]: no batch of at most {sizes.at_most} rows is a multiple of {self._unit}, which the devices, '
                f"microbatches and multiple_of={sizes.multiple_of} need. Expected at_most of at least {self._unit}. Type "
                f'search={{"batch": {{"at_most": {self._unit}}}}}.'
            )
            raise PlanError(msg)
        self._compilers: dict[int, Compiler] = {}
        self._found: dict[tuple[int, StepPolicy], Candidate] = {}

    def foreseen(self, space: Space) -> int:
        """Rows that may fit, by two sizes under what needs few bytes or, failing that, the step as it is; 0 where both fail."""
        for policy in dict.fromkeys((self._roomy(space), self._problem.base)):
            asked = self._two_sizes(policy)
            if asked is not None:
                return self._unit * min(max(self._guess(policy, *asked), asked[0]), self._most or sys.maxsize)
        return 0

    def _roomy(self, space: Space) -> StepPolicy:
        """The first policy of those that need few bytes."""
        remat = "full" if space.remat else "none"
        return replace(self._problem.base, remat=remat, microbatches=max(self._counts, default=1))

    def run(self, space: Space) -> None:
        """The largest batch under what needs few bytes, then under what may need fewer; the cheapest step on so many rows.

        A row more may take many bytes, so that beside the most rows there is room for values that are kept: that is the answer,
        and comes before the largest batch of the step as it is, which only shows what it buys.
        """
        plain, roomy = self._problem.base, self._roomy(space)
        further = [replace(roomy, levels=2)] if space.remat else []
        further += [cuts_moved(roomy)] if space.offload else []
        with self._share(1 if roomy == plain else 2):
            reached = self._largest(roomy)
        for index, policy in enumerate(further):
            if reached is not None and reached != self._most:
                with self._share(len(further) - index + 1):
                    reached = self._beyond(policy, reached)
        if roomy == plain:
            return
        if reached is not None and reached == self._most:
            compiler = self._compiler(reached)
            with self._ledger.within(self._ledger.left - (MOST_POLICIES if space.offload else 0)):
                explore(compiler, self._counts, self._ledger, remat=space.remat, frontier=False)
            offload([compiler] if space.offload else (), self._ledger)
            return
        if space.remat and reached:
            with self._share(2):
                self._keep_more(roomy, reached)
        self._largest(plain)

    def _keep_more(self, roomy: StepPolicy, reached: int) -> None:
        """Of the most rows, the step that computes least again; nothing to compile where the roomy one does not fit."""
        found = self._found.get((reached, roomy))
        if found is None or not found.fits:
            return
        search = RematSearch(self._compiler(reached), self._ledger, replace(roomy, remat="none"))
        if search.ends(plain=False):
            search.close_in()

    def _share(self, parts: int) -> AbstractContextManager[None]:
        """One part of the compiles that are left."""
        return self._ledger.within(-(-self._ledger.left // parts))

    def _beyond(self, policy: StepPolicy, reached: int) -> int:
        """The largest batch under a policy that is used only where it reaches further; one compile where it does not."""
        fits = self._ask(policy, [reached + 1]).get(reached + 1)
        if fits is False:
            self._ledger.note(f"Under {policy_words(policy)} {(reached + 1) * self._unit} rows do not fit either.")
        if not fits:
            return reached
        return self._between(policy, reached + 1, None if self._most is None else self._most + 1)

    def _largest(self, policy: StepPolicy) -> int | None:
        """The largest batch that fits under a policy, in units; None where nothing could be compiled."""
        asked = self._two_sizes(policy)
        return None if asked is None else self._between(policy, *asked)

    def _two_sizes(self, policy: StepPolicy) -> tuple[int, int | None] | None:
        """The batch as it is and half or twice of it: what fits of them, and what does not; None where none was compiled."""
        start = max(self._rows.count // self._unit, 1)
        start = start if self._most is None else min(start, self._most)
        first = self._ask(policy, [start])
        if not first:
            return None
        second = (
            max(start // 2, 1)
            if not first.get(start)
            else 2 * start
            if self._most is None
            else min(2 * start, self._most)
        )
        answers = first | (self._ask(policy, [second]) if second != start else {})
        low = max((place for place, fits in answers.items() if fits), default=0)
        end = None if self._most is None else self._most + 1
        return low, min((place for place, fits in answers.items() if not fits), default=end)

    def _between(self, policy: StepPolicy, low: int, high: int | None) -> int:
        low, high = last_that_fits(
            low, high, lambda low, high: self._guess(policy, low, high), lambda places: self._ask(policy, places)
        )
        self._tell(policy, low, high)
        return low

    def _ask(self, policy: StepPolicy, places: Sequence[int]) -> dict[int, bool]:
        answers = self._ledger.compile([(self._compiler(place), policy) for place in places])
        known = {place: each for place, each in zip(places, answers, strict=True) if each is not None}
        self._found |= {(place, policy): each for place, each in known.items()}
        return {place: each.fits is True for place, each in known.items()}

    def _compiler(self, place: int) -> Compiler:
        if place not in self._compilers:
            count = place * self._unit
            with traced_with_rows(f"{self._problem.name} with {count} rows"):
                self._compilers[place] = Compiler(with_rows(self._problem, self._rows, count))
        return self._compilers[place]

    def _guess(self, policy: StepPolicy, low: int, high: int | None) -> int:
        """Where the line through what fits and what does not meets the limit; halfway where there is no such line.

        Bytes may be flat in few rows and grow in many, so two points of one side say little of the other.
        """
        room = (self._problem.budget.bytes or 0) - self._problem.resident_bytes
        points = sorted(
            (place, each.step_bytes)
            for (place, of), each in self._found.items()
            if of == policy and each.step_bytes is not None and not each.compiler_remat
        )
        under, over = [point for point in points if point[0] <= low], [point for point in points if point[0] > low]
        (x, y), (x2, y2) = (
            (*under[-1:], *over[:1]) if under and over else (points[1:] and points[-2:]) or ((0, 0), (0, 0))
        )
        if y2 <= y:
            return 2 * low if high is None else (low + high) // 2
        return math.floor(x + (room - y) * (x2 - x) / (y2 - y))

    def _tell(self, policy: StepPolicy, low: int, high: int | None) -> None:
        words, unit = policy_words(policy), self._unit
        why = "others could not be compiled" if self._ledger.left else "no compile was left to close in"
        if low == 0:
            rows = (high or 1) * unit
            self._ledger.note(f"Under {words} not even {rows} rows fit" + ("." if high == 1 else f"; of fewer, {why}."))
        elif self._most is not None and low == self._most:
            self._ledger.note(f"Under {words} all {low * unit} rows fit that were allowed.")
        elif high == low + 1:
            self._ledger.note(f"Under {words} {low * unit} rows fit and {(low + 1) * unit} do not, both compiled.")
        else:
            bound = "unknown" if high is None else f"below {high * unit}"
            self._ledger.note(f"Under {words} {low * unit} rows fit; the largest batch is {bound}: {why}.")


def _parts(problem: Problem, rows: Rows) -> int:
    """Into how many the devices divide the batch's rows."""
    parts = 1
    for name, value in named_arguments(problem.train_step, problem.args, dict(problem.kwargs)):
        for leaf in jax.tree.leaves(value) if name in rows.arguments else ():
            parts = max(parts, _parts_of(leaf))
    return parts


def _parts_of(leaf: Any) -> int:
    place, shape = getattr(leaf, "sharding", None), tuple(getattr(leaf, "shape", ()))
    return 1 if place is None or not shape else shape[0] // place.shard_shape(shape)[0]
