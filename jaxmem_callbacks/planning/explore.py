"""What may be varied enters; the compiles worth making are made. Remat inside accumulation inside sharding, or the batch size.

Accumulation costs next to no operations, so of the steps that fit, the one over fewest microbatches without remat comes first;
where none of them fits, remat is searched over the most microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from jaxmem_callbacks.planning.boundary import last_that_fits
from jaxmem_callbacks.planning.candidates import Compiler
from jaxmem_callbacks.planning.ledger import MOST_OF_REMAT, Entry, Ledger
from jaxmem_callbacks.planning.offloading import cuts_moved, offloading_policies
from jaxmem_callbacks.planning.search import RematSearch, rank
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.policies import StepPolicy


def explore(compiler: Compiler, counts: Sequence[int], ledger: Ledger, *, remat: bool, frontier: bool) -> None:
    """Compile policies that keep all on the device, for one placement of the state and one batch.

    Args:
        compiler: Of the problem.
        counts: Microbatches to try besides 1, ascending.
        ledger: Where compiles are counted and kept.
        remat: Whether it may be used.
        frontier: Fill the whole range; else stop where the answer is known.
    """
    bases = [replace(compiler.problem.base, microbatches=count) for count in (1, *counts)]
    if frontier:
        for index, base in enumerate(bases):
            with ledger.within(ledger.left // (len(bases) - index)):
                _one(RematSearch(compiler, ledger, base), remat=remat and ledger.left > 1)
        return
    first = RematSearch(compiler, ledger)
    between = first.ends() if remat else first.alone()
    if first.is_done or (counts and _fewest(compiler, bases, ledger)) or not between:
        return
    last = RematSearch(compiler, ledger, bases[-1])
    if counts and last.ends(plain=False) and last.full is not None and (last.full.fits or not _fits(first.full)):
        last.close_in()
    else:
        first.close_in()


def offload(compilers: Iterable[Compiler], ledger: Ledger) -> None:
    """Compile policies under which values wait in host memory, one placement of the state after the other.

    Each over as many microbatches as the best that was compiled of it. Where no compile is left, the first stands for all. What
    is refused of one placement before any compiler sees it, such as for want of a loop, is refused of the others too.
    """
    for compiler in compilers:
        known = [entry.candidate for entry in ledger.entries if entry.compiler is compiler]
        count = min(known, key=rank).policy.microbatches if known else 1
        base = replace(compiler.problem.base, microbatches=count)
        policies = offloading_policies(compiler, base) if ledger.left else [cuts_moved(base)]
        asked = [(compiler, policy) for policy in policies]
        ledger.compile(asked)
        if ledger.refused.issuperset(asked):
            break


def compile_as_written(compiler: Compiler, ledger: Ledger) -> None:
    """The step under its author's own checkpoints, to compare with what replaces them."""
    ledger.compile([(compiler, replace(compiler.problem.base, own_checkpoints="keep"))])


def fill_frontiers(entries: Sequence[Entry], ledger: Ledger) -> None:
    """Compile what lies between the two ends of some placements, with the compiles that are left: as many as for remat alone.

    A pod's program takes its compiler half a minute, and a frontier of so many points is what one device has too.

    Args:
        entries: One candidate of each placement, which says over how many microbatches.
        ledger: Where compiles are counted and kept.
    """
    wanted = dict.fromkeys((entry.compiler, entry.candidate.policy.microbatches) for entry in entries)
    for index, (compiler, count) in enumerate(wanted):
        made = sum(
            entry.compiler is compiler and entry.candidate.policy.microbatches == count for entry in ledger.entries
        )
        most = min(ledger.left // (len(wanted) - index), MOST_OF_REMAT - made)
        if most > 0:
            with ledger.within(most):
                base = replace(compiler.problem.base, microbatches=count)
                _one(RematSearch(compiler, ledger, base), remat=ledger.left > 1)


def _one(search: RematSearch, *, remat: bool) -> None:
    if remat:
        search.run(frontier=True)
    else:
        search.alone()


def _fits(candidate: Candidate | None) -> bool:
    return candidate is not None and candidate.fits is True


def _fewest(compiler: Compiler, bases: Sequence[StepPolicy], ledger: Ledger) -> bool:
    """Whether the step without remat, the compiler's own included, fits over some number of microbatches; compiles the fewest."""
    ladder = bases[::-1]  # the most microbatches, and so the fewest bytes, first; the last is the whole batch
    found: dict[int, Candidate] = {}

    def guess(low: int, high: int | None) -> int:
        most = (high or len(ladder)) - 1
        points = [(1 / ladder[place].microbatches, each.step_bytes or 0) for place, each in found.items()]
        limit = compiler.problem.budget.bytes
        if len(points) < 2 or limit is None:  # noqa: PLR2004 - a line needs two
            return most - 1
        room = limit - compiler.problem.resident_bytes
        (x, y), (x2, y2) = sorted(points)[-2:]
        slope = (y2 - y) / (x2 - x)
        under = [p for p in range(low + 1, most + 1) if y + slope * (1 / ladder[p].microbatches - x) <= room]
        return max(under, default=low + 1)

    def ask(places: Sequence[int]) -> dict[int, bool]:
        asked = places[: ledger.left]
        answers = ledger.compile([(compiler, ladder[place]) for place in asked])
        found.update({place: each for place, each in zip(asked, answers, strict=True) if each is not None})
        free = {place: each for place, each in found.items() if each.fits and not each.compiler_remat}
        return {place: place in free for place in asked}

    low, _ = last_that_fits(-1, len(ladder) - 1, guess, ask)
    return low >= 0
