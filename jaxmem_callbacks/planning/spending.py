"""A problem as it was asked enters; the ledger leaves with what was compiled: one placement of the state after the other.

Each placement has its part of the compiles that are left, and what one leaves is for those that follow. What is left in the end
goes to offload, to what was cut off, and to the frontiers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxmem_callbacks.planning.beside import Resident, compile_beside, parse_beside
from jaxmem_callbacks.planning.candidates import Compiler
from jaxmem_callbacks.planning.explore import explore, fill_frontiers, offload
from jaxmem_callbacks.planning.largest import LargestBatch
from jaxmem_callbacks.planning.layouts import layouts
from jaxmem_callbacks.planning.ledger import Entry, Ledger
from jaxmem_callbacks.planning.offloading import MOST_POLICIES, with_offload
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.rows import find_rows
from jaxmem_callbacks.planning.search import choose, rank
from jaxmem_callbacks.planning.space import Space
from jaxmem_callbacks.programs.steps.step import Traced


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What a plan is asked for, as `jm.plan` takes it.

    Attributes:
        target: Name of hardware that need not be there, or None.
        budget: Bytes, text, a share, or None.
        resident: What else stays in memory.
        mesh: Axes of the target's devices, where the arguments carry no shardings; None for one axis, ``fsdp``.
        search: What may be varied; None for remat, and shardings where the arguments carry none.
        beside: Pairs of a function and its arguments: other programs that must fit.
    """

    target: str | None = None
    budget: str | float | None = None
    resident: Any = ()
    mesh: Any = None
    search: Any = None
    beside: Any = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A problem as it was asked, and what was parsed of that."""

    problem: Problem
    traced: Traced
    space: Space
    ask: Ask
    resident: Resident


def spend(planned: Planned, counts: Sequence[int], ledger: Ledger, *, divided: bool) -> None:
    """Everything that is to be compiled, one placement of the state after the other."""
    problem, traced, space, ask = planned.problem, planned.traced, planned.space, planned.ask
    rows = find_rows(problem, traced, space.batch.argnames) if space.batch is not None else None
    ways = list(layouts(problem, traced, space, ask.mesh, ledger)) if divided else [problem]
    programs = parse_beside(ask.beside)
    cut = list[Compiler]()
    moving = MOST_POLICIES if space.offload and space.batch is None else 0
    try:
        with ledger.within(ledger.left - moving):
            if space.batch is not None and rows is not None:
                placed = (_with_beside(planned, way, programs, ledger) if programs else way for way in ways)
                _largest_of([LargestBatch(way, rows, space.batch, counts, ledger) for way in placed], space, ledger)
                ways = []
            for index, way in enumerate(ways):
                placed = _with_beside(planned, way, programs, ledger) if programs else way
                with ledger.within(ledger.left // (len(ways) - index)):  # what one leaves is for those that follow
                    compiler, is_whole = Compiler(placed), ask.budget is None and not divided
                    explore(compiler, counts, ledger, remat=space.remat, frontier=is_whole)
                    cut += [] if is_whole or ledger.left else [compiler]
        if space.batch is None and ledger.entries:
            _use_the_rest(planned, counts, ledger, cut, divided=divided)
    finally:  # also of what was compiled before Ctrl-C
        ledger.note_cut()


def _largest_of(searches: Sequence[LargestBatch], space: Space, ledger: Ledger) -> None:
    """The largest batch of some placements: two sizes of each say which may have most rows.

    That one has the compiles that are left, and the others what it leaves: divided among several, of which each has nearly as
    many rows, they would be too few for any. Where nothing is foreseen of any, they are divided all the same.
    """
    reach = [search.foreseen(space) for search in searches] if len(searches) > 1 else [0]
    ranked = sorted(zip(reach, searches, strict=True), key=lambda each: -each[0])
    for index, (_, search) in enumerate(ranked):
        with ledger.within(ledger.left if max(reach) else ledger.left // (len(ranked) - index)):
            search.run(space)


def _use_the_rest(
    planned: Planned, counts: Sequence[int], ledger: Ledger, cut: Sequence[Compiler], *, divided: bool
) -> None:
    """Offload for the best placement, then what was cut off, then offload for the others, then the frontiers."""
    space = planned.space
    if space.offload:
        offload(_best_first(ledger)[:1], ledger)
    go_on(cut, counts, ledger, remat=space.remat)
    if space.offload and not _is_settled(ledger):
        offload(_best_first(ledger), ledger)
    if divided and planned.ask.budget is None and space.remat:
        least = min(ledger.entries, key=lambda entry: entry.candidate.step_bytes or math.inf)
        fill_frontiers([chosen(ledger)[0], least], ledger)


def _best_first(ledger: Ledger) -> list[Compiler]:
    """The placements of which anything was compiled."""
    ranked = sorted(ledger.entries, key=lambda entry: rank(entry.candidate))
    return list(dict.fromkeys(entry.compiler for entry in ranked))


def _is_settled(ledger: Ledger) -> bool:
    """Whether what fits computes nothing again."""
    best = chosen(ledger)[0].candidate
    return best.fits is True and not best.extra_flops


def go_on(cut: Sequence[Compiler], counts: Sequence[int], ledger: Ledger, *, remat: bool) -> None:
    """Follow to their end the placements that used up their share of the compiles, the best of them first.

    What was compiled is known, so the same search goes on where it was cut off.
    """
    for compiler in _best_first(ledger):
        if compiler in cut and ledger.left and not _is_settled(ledger):
            explore(compiler, counts, ledger, remat=remat, frontier=False)


def _with_beside(planned: Planned, placed: Problem, programs: Any, ledger: Ledger) -> Problem:
    """The same problem, with what must fit beside it."""
    with placed.in_mesh():
        there = placed.step(placed.base).traced(placed.args, dict(placed.kwargs))
    found = compile_beside(placed, (planned.traced, there), programs, planned.resident, ledger)
    return replace(placed, beside=found)


def chosen(ledger: Ledger) -> tuple[Entry, str]:
    """What to use of all that was compiled, and why."""
    staying = [entry for entry in ledger.entries if not entry.candidate.policy.offload] or ledger.entries
    index, reason = choose([entry.candidate for entry in staying])
    best, why = with_offload(staying[index].candidate, [entry.candidate for entry in ledger.entries])
    return next(entry for entry in ledger.entries if entry.candidate is best), why or reason
