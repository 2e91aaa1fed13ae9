"""Candidate numbers of chunks: of the head of a loss, and of what a `vmap` maps over its samples."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, final

from jaxmem_callbacks.planning.choice import bytes_or_inf, rank
from jaxmem_callbacks.planning.compiles import CompileQueue, Compiler
from jaxmem_callbacks.records.errors import LossRefusedError, PolicyError
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.policies import HEAD, StepPolicy
from jaxmem_callbacks.transforms.costs import NOTABLE, SAME, nbytes
from jaxmem_callbacks.transforms.tracing import open_jaxpr, subjaxprs

#: Compiles of chunks in one plan.
MOST_CHUNKS = 6
# Tried first: a power of two, of which the head's values are so small a part that what else is alive is most of the peak.
FIRST_CHUNKS = 1 << int(math.log2(1 / NOTABLE))
# Times as many are tried where so many do not fit: halves of halves.
_MORE = 2 * 2
# Parts of a loss that are looked at, a `vmap` also where there is a head.
_PARTS = (HEAD, "vmap")


@final
class ChunkSearch:
    """Finds the fewest chunks, and so the largest, under which a step fits.

    Bytes are modelled as what does not depend on the chunks and a part that they divide, through the last two points.

    Args:
        compiler: Compiles the step under a policy.
        queue: Compiles, within this search's part of the budget.
    """

    def __init__(self, compiler: Compiler, queue: CompileQueue) -> None:
        self._compiler = compiler
        self._queue = queue.at_most(min(MOST_CHUNKS, queue.remaining))

    def run(self, *, remat: bool) -> None:
        """Compile what is worth compiling.

        Args:
            remat: Whether it may be used beside chunks.
        """
        known = [entry.candidate for entry in self._queue.results.entries if entry.compiler is self._compiler]
        best, base = min(known, key=rank), self._compiler.problem.base
        plain = next((each for each in known if each.policy == base), None)
        if plain is not None and plain.fits:
            return
        asked = [policy for part in _PARTS if (policy := self._traced(base, part)) is not None]
        made = self._compile(self._different(asked))
        if not made:
            return
        lowest = min(made, key=bytes_or_inf)
        if lowest.fits is False and remat and best.policy.remat != "none":
            lowest = min([lowest, *self._compile([replace(best.policy, chunks=lowest.policy.chunks)])], key=rank)
        self._close_in(lowest, self._alike(lowest.policy))
        self._drop_smaller_chunks(lowest.policy)

    def _traced(self, base: StepPolicy, part: str) -> StepPolicy | None:
        """A policy with chunks of a part of the loss, of as many as it has positions for; None where it is no map."""
        count, refused = FIRST_CHUNKS, ""
        while count > 1:
            policy = replace(base, chunks={part: count})
            try:
                self._compiler.facts(policy)
            except (PolicyError, LossRefusedError) as error:
                refused, count = str(error), count // 2
            else:
                return policy
        if part == HEAD:
            self._queue.results.note(f"Chunks of the head were not tried: {refused}")
        return None

    def _different(self, policies: list[StepPolicy]) -> list[StepPolicy]:
        """Those that make different programs: the head may be all that a `vmap` maps."""
        return list({self._compiler.facts(policy).operations: policy for policy in reversed(policies)}.values())[::-1]

    def _alike(self, policy: StepPolicy) -> float:
        """Bytes of the step without chunks under what else a policy has."""
        whole = replace(policy, chunks=1)
        found = (entry.candidate for entry in self._queue.results.entries if entry.compiler is self._compiler)
        return next((bytes_or_inf(each) for each in found if each.policy == whole), float("inf"))

    def _close_in(self, found: Candidate, whole: float) -> None:
        """Find the fewest chunks that fit, from one number and from the bytes of none."""
        limit = self._compiler.problem.budget.bytes
        if limit is None:
            return
        room = limit - self._compiler.problem.resident_bytes
        points = {1: whole, _number(found.policy): bytes_or_inf(found)}
        while self._queue.remaining:
            count = _next_number(points, room)
            if count is None:
                break
            (path, _), *_ = found.policy.chunked
            made = self._compile([replace(found.policy, chunks={path: count})])
            points[count] = bytes_or_inf(made[0]) if made else float("inf")
            if not made:
                break

    def _drop_smaller_chunks(self, policy: StepPolicy) -> None:
        """Leave the fewest chunks that fit: smaller ones use a device less well, which no count of operations shows."""
        entries = self._queue.results.entries
        whole = replace(policy, chunks=1)
        alike = [
            entry
            for entry in entries
            if entry.compiler is self._compiler
            and entry.candidate.policy.chunked
            and replace(entry.candidate.policy, chunks=1) == whole
            and entry.candidate.fits
        ]
        fewest = min(alike, key=lambda entry: _number(entry.candidate.policy), default=None)
        for entry in alike:
            if entry is not fewest:
                entries.remove(entry)

    def _compile(self, policies: list[StepPolicy]) -> list[Candidate]:
        answers = self._queue.compile([(self._compiler, policy) for policy in policies])
        return [each for each in answers if each is not None]


def _number(policy: StepPolicy) -> int:
    return policy.chunked[0][1]


def _next_number(points: dict[int, float], room: float) -> int | None:
    """The number of chunks to compile next; None where the fewest that fits is known, nearly.

    Args:
        points: Bytes by number; infinite where they are not known.
        room: Bytes that fit.
    """
    fitting = [count for count, need in points.items() if need <= room]
    most = max((count for count, need in points.items() if need > room), default=1)
    if not fitting:
        return most * _MORE if max(points.values()) > (1 + SAME) * points[most] else None
    fewest = min(fitting)
    if fewest <= most + 1 + most // _MORE:
        return None
    low, high = points[most], points[fewest]
    middle = math.isqrt(most * fewest)
    if low < float("inf"):
        share = (1 / most - 1 / fewest) * (room - high) / (low - high)
        middle = min(max(-int(-1 // (1 / fewest + share)), most + 1), fewest)
    return middle if middle < fewest else None


def largest_value(jaxpr: Any) -> int:
    """Bytes of the largest value that a traced program makes, in bodies too."""
    return max((_largest_of(eqn) for eqn in open_jaxpr(jaxpr).eqns), default=0)


def _largest_of(eqn: Any) -> int:
    return max(*map(nbytes, eqn.outvars), *map(largest_value, subjaxprs(eqn)), 0, 0)
