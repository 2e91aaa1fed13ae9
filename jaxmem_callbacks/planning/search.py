"""Which policies to compile for a target, and which of them to use. Enters: a compiler of candidates. Leaves: candidates.

The two ends come first, in parallel: the plain step and the step that keeps only what is alive at its cuts. Between them lie
shares of what is dear to compute again, whose operations are known from a trace; only bytes have to be asked for.
"""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import final

from jaxmem_callbacks.planning.candidates import Compiler
from jaxmem_callbacks.programs.targets.worker import end_workers
from jaxmem_callbacks.records.errors import CompileError, LossRefusedError, PolicyError
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.transforms.keeping import Share

MOST_COMPILES = 6
# Of several shardings and remat together; 3 shardings with both their ends are 6.
MOST_SHARDED_COMPILES = 16
_AT_ONCE = 2
# Work of this share of the plain step is not worth another compile.
_WORTH = 0.005
_DIGITS = 10**5
Progress = Callable[[str, int, int], None]


@final
class RematSearch:
    """Finds the cheapest remat policy that fits.

    Args:
        compiler: Compiles the step under a policy.
        progress: Called with what is compiled next, how many are done and how many may come.
        most: Compiles at most.
    """

    def __init__(self, compiler: Compiler, progress: Progress | None = None, most: int = MOST_COMPILES) -> None:
        self._compiler = compiler
        self._progress = progress or (lambda _what, _done, _most: None)
        self._most = most
        self._plain = compiler.problem.base
        self._full, self._twice = (replace(self._plain, remat="full", levels=levels) for levels in (1, 2))
        self.found: dict[StepPolicy, Candidate] = {}
        self.notes: list[str] = []
        self.failed: list[CompileError] = []
        self.interrupted = False

    def run(self, *, frontier: bool) -> list[Candidate]:
        """Compile what is worth compiling.

        Args:
            frontier: Fill the whole range between the ends; else stop as soon as the answer is known.

        Returns:
            The candidates, in the order of their bytes, largest first.
        """
        try:
            shares = self._survey()
        except (PolicyError, LossRefusedError) as error:
            self.notes.append(f"Remat was not tried: {error}")
            self._compile([self._plain])
            if not self.found:
                raise self.failed[0] from error
            return self._ordered()
        try:
            self._compile([self._plain, self._full])
            if frontier:
                self._compile(list(dict.fromkeys(self._kept(share) for share in _evenly(shares, self._most - 2))))
            elif self._plain not in self.found or not _is_free(self.found[self._plain]):
                self._close_in(shares)
            if not self.found:
                raise self.failed[0]
        except KeyboardInterrupt:
            self.interrupted = True
            self.notes.append("Interrupted: this is the best of what was compiled so far.")
            if not self.found:
                raise
        return self._ordered()

    def _survey(self) -> list[Share]:
        """What the losses of the step could keep, joined by share."""
        facts = self._compiler.facts(self._full, survey=True)
        curves = [curve for curve in facts.shares if len(curve) > 1]
        return sorted(curves[0], key=lambda point: point.share) if len(curves) == 1 else _joined(curves)

    def _close_in(self, shares: Sequence[Share]) -> None:
        """Keep as much as fits: bytes are modelled between compiled points, and every compile narrows the range."""
        full = self.found.get(self._full)
        limit = self._compiler.problem.budget.bytes
        if full is None or full.fits is False:
            self._compile([self._twice])
        if full is None or limit is None or full.fits is not True or full.step_bytes is None:
            return
        room = limit - self._compiler.problem.resident_bytes - full.step_bytes
        fits, fails = 0, len(shares)  # the places between which the answer lies
        while len(self.found) < self._most and fails - fits > 1:
            if (shares[fits].flops - shares[-1].flops) <= _WORTH * self._compiler.plain.flops:
                return
            scale = self._corrected(shares, full.step_bytes)
            under = [place for place in range(fits + 1, fails) if shares[place].bytes * scale <= room]
            guess = max(under, default=fits + 1)
            tried = [place for place in (guess, guess + 1) if place < fails][: self._most - len(self.found)]
            self._compile([policy for place in tried if (policy := self._kept(shares[place])) not in self.found])
            for place in tried:
                candidate = self.found.get(self._kept(shares[place]))
                if candidate is not None and candidate.fits:
                    fits = max(fits, place)
                else:
                    fails = min(fails, place)

    def _corrected(self, shares: Sequence[Share], least: int) -> float:
        """What a modelled byte costs, by the points that were compiled."""
        modelled = {self._kept(share).keep: share.bytes for share in shares}
        ratios = [
            (candidate.step_bytes - least) / modelled[policy.keep]
            for policy, candidate in self.found.items()
            if candidate.step_bytes is not None and modelled.get(policy.keep)
        ]
        return max(max(ratios, default=1.0), 0.05)

    def _kept(self, share: Share) -> StepPolicy:
        """A share as people can write it: rounded up, so that nothing of it is left out."""
        return replace(self._full, keep=min(math.ceil(share.share * _DIGITS) / _DIGITS, 1.0))

    def _compile(self, policies: Sequence[StepPolicy]) -> None:
        pool = concurrent.futures.ThreadPoolExecutor(_AT_ONCE)
        waiting = {pool.submit(self._compiler.candidate, policy): policy for policy in policies}
        self._progress(" and ".join(map(describe, policies)), len(self.found), self._most)
        try:
            for done in concurrent.futures.as_completed(waiting):
                try:
                    self.found[waiting[done]] = done.result()
                except CompileError as error:  # one policy that a compiler cannot stand is no reason to plan nothing
                    self.failed.append(error)
                    self.notes.append(f"{describe(waiting[done])} was not compiled: {error}")
                self._progress(describe(waiting[done]), len(self.found), self._most)
        finally:  # also at Ctrl-C, and where one of them failed: no compiler goes on for an answer that nobody waits for
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(each.done() for each in waiting):
                end_workers()
                time.sleep(0.05)

    def _ordered(self) -> list[Candidate]:
        return sorted(self.found.values(), key=lambda candidate: (-(candidate.step_bytes or 0), candidate.extra_flops))


def choose(candidates: Sequence[Candidate]) -> tuple[int, str]:
    """The candidate to use: of those that fit the one with fewest extra operations, then least time, then fewest bytes.

    Where there is no limit the plain step; where nothing fits, what comes nearest.
    """
    numbered = list(enumerate(candidates))
    fitting = [(index, each) for index, each in numbered if each.fits]
    if fitting:
        index, best = min(fitting, key=lambda pair: _cost(pair[1]))
        return index, ("the plain step fits" if best.extra_flops == 0 else "of those that fit it computes least again")
    if any(each.fits is None for each in candidates):
        index, _ = min(numbered, key=lambda pair: _cost(pair[1]))
        return index, "there is no limit here, so nothing is worth computing twice"
    index, _ = min(numbered, key=lambda pair: (pair[1].step_bytes or 0, _cost(pair[1])))
    return index, "nothing fits; this comes nearest"


def _cost(candidate: Candidate) -> tuple[float, float, float]:
    return candidate.extra_flops, candidate.modelled_s or 0.0, candidate.step_bytes or 0


def _is_free(candidate: Candidate) -> bool:
    """Whether the plain step is the answer: it fits, and its compiler recomputes nothing to make it fit."""
    return candidate.fits is not False and not candidate.compiler_remat


def _evenly(shares: Sequence[Share], count: int) -> Iterator[Share]:
    """Points of a frontier evenly spaced in operations, without its first."""
    if not shares[1:]:
        return
    most, least = shares[0].flops, shares[-1].flops
    seen = {0.0}
    for place in range(1, count + 1):
        goal = most - (most - least) * place / count
        point = next(share for share in shares if share.flops <= goal + 1)
        if point.share not in seen:
            seen.add(point.share)
            yield point


def _joined(curves: Sequence[Sequence[Share]]) -> list[Share]:
    """Several losses of one step, each with its own shares, at a few common ones."""
    grid = [place / 20 for place in range(21)]
    rows = [[[point for point in curve if point.share <= share + 1e-12][-1] for curve in curves] for share in grid]
    return [
        Share(share, sum(point.bytes for point in row), sum(point.flops for point in row))
        for share, row in zip(grid, rows, strict=True)
    ]


def pareto(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates that no other beats in bytes without costing more operations, in their order."""
    known = [each for each in candidates if each.step_bytes is not None]

    def beaten(one: Candidate) -> bool:
        mine = (one.step_bytes or 0, one.extra_flops)
        return any(
            (o.step_bytes or 0) <= mine[0] and o.extra_flops <= mine[1] and (o.step_bytes, o.extra_flops) != mine
            for o in known
        )

    return tuple(each for each in known if not beaten(each))


def describe(policy: StepPolicy) -> str:
    """A policy in few words, such as ``full, keep 0.35``."""
    words = [*([str(policy.sharding)] if policy.sharding else []), policy.remat]
    if policy.levels > 1:
        words.append(f"{policy.levels} levels")
    if policy.keep:
        words.append(f"keep {policy.keep:.3g}")
    return ", ".join(words)
