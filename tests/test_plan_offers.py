"""Which policies of a frontier are compiled: against every choice of them, by the distance to what is between."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.choice import choose, pareto
from jaxmem_callbacks.planning.search import CandidatePolicy, sparse, spread
from jaxmem_callbacks.records.plans import Candidate
from tests.sample_plans import candidate

LEAST, PLAIN, CLOSE = 300, 1500, 1.01


@st.composite
def frontiers(draw: st.DrawFn) -> list[CandidatePolicy]:
    count = draw(st.integers(2, 9))
    kept = sorted(draw(st.sets(st.integers(1, 1000), min_size=count - 1, max_size=count - 1)))
    again = sorted(draw(st.sets(st.integers(0, 500), min_size=count, max_size=count)), reverse=True)
    pairs = enumerate(zip([0, *kept], again, strict=True))
    return [
        CandidatePolicy(jm.StepPolicy(remat="full", keep=place / 10), kept, flops, flops)
        for place, (kept, flops) in pairs
    ]


def needs_of(offered: Sequence[CandidatePolicy]) -> np.ndarray:
    return np.array([LEAST + 2 * each.bytes for each in offered], np.float64)


def farthest(offered: Sequence[CandidatePolicy], places: Sequence[int]) -> float:
    """The greatest factor by which something between two places is away from both of them."""
    needs = needs_of(offered)
    work = [PLAIN + each.flops for each in offered]
    return max(
        (
            min(needs[end] / needs[between], work[start] / work[between])
            for start, end in itertools.pairwise(places)
            for between in range(start + 1, end)
        ),
        default=1.0,
    )


@settings(max_examples=200, deadline=None)
@given(frontiers(), st.integers(1, 4), st.sets(st.integers(1, 9), max_size=2))
def test_no_other_choice_of_so_many_is_nearer_to_all(
    offered: list[CandidatePolicy], count: int, compiled: set[int]
) -> None:
    last = len(offered) - 1
    known = {0, *(place for place in compiled if place <= last)}
    chosen = spread(offered, count, needs=needs_of(offered), flops=PLAIN, known=known)
    found = {offered.index(each) for each in chosen}
    assert len(found) <= count
    assert not found & known
    assert last in found | known
    free = [place for place in range(1, last) if place not in known]
    others = itertools.chain.from_iterable(itertools.combinations(free, some) for some in range(count + 1))
    rest = [{*some, *known, last} for some in others]
    best = min(farthest(offered, sorted(each)) for each in rest if len(each - known) <= count)
    assert farthest(offered, sorted(found | known)) <= max(best, CLOSE) + 1e-3


@settings(max_examples=200, deadline=None)
@given(frontiers(), st.integers(1, 200))
def test_some_offers_stand_for_all(offered: list[CandidatePolicy], worth: int) -> None:
    """Each other one does at most so much less work than one that keeps no more; of these, next ones differ by half of it."""
    chosen = sparse(offered, worth)
    assert chosen == [each for each in offered if each in chosen]
    assert (chosen[0], chosen[-1]) == (offered[0], offered[-1])
    for each in offered:
        assert min(one.work for one in chosen if one.bytes <= each.bytes) <= each.work + worth
    assert all(one.work - other.work >= worth / 2 for one, other in itertools.pairwise(chosen[:-1]))


@pytest.mark.core
def test_small_results_that_save_little_are_left_to_the_products() -> None:
    """Of four products, each may be kept alone or with a small result besides, which saves less by byte."""
    kept, work = np.cumsum([0, *[8, 2] * 4]), 400 - np.cumsum([0, *[80, 4] * 4])
    offered = [
        CandidatePolicy(jm.StepPolicy(remat="full", keep=place / 8), int(bytes_), int(again), int(again))
        for place, (bytes_, again) in enumerate(zip(kept - kept // 10 * 2 * (np.arange(9) % 2), work, strict=True))
    ]
    chosen = [each.policy.keep * 8 for each in sparse(offered, 20)]
    assert chosen == [0, 1, 3, 5, 7, 8]


@pytest.mark.core
def test_nothing_is_asked_for_without_compiles_or_without_a_range() -> None:
    only = CandidatePolicy(jm.StepPolicy(remat="full"), 0, 10, 10)
    more = CandidatePolicy(jm.StepPolicy(remat="full", keep=1.0), 10, 0, 0)
    assert spread([only], 4, needs=needs_of([only]), flops=10) == []
    assert spread([only, more], 0, needs=needs_of([only, more]), flops=10) == []
    assert spread([only, more], 4, needs=needs_of([only, more]), flops=10, known={0, 1}) == []


def test_of_candidates_that_cost_the_same_the_plain_step_is_chosen_whatever_is_done_first():
    full, plain, dots = (candidate(4, 0, remat=remat) for remat in ("full", "none", "dots"))
    for found in itertools.permutations([full, plain, dots]):
        assert found[choose(found)[0]] is plain
    assert [found[choose(found)[0]] for found in itertools.permutations([full, dots])] == [dots, dots]


def test_where_operations_are_the_same_time_decides_and_is_shown():
    def one(size: int, extra: int, seconds: float | None) -> Candidate:
        return replace(candidate(size, extra, remat="full"), plain_flops=1000, flops=1000 + extra, modelled_s=seconds)

    slow, fast, dear = one(5, 100, 2.0), one(6, 104, 1.0), one(4, 120, 0.5)
    for found in itertools.permutations([slow, fast, dear]):
        assert found[choose(found)[0]] is fast, "collectives cost no operation"
    assert pareto([slow, fast, one(7, 110, 0.995), one(7, 100, 0.99)]) == (slow, fast, one(7, 100, 0.99))
    assert pareto([slow, one(7, 100, 1.99)]) == (slow,), "hardly any faster"
    unknown = [replace(each, modelled_s=None) for each in (slow, fast, dear)]
    assert unknown[choose(unknown)[0]] is unknown[0]
    assert pareto(unknown) == (unknown[0], unknown[2])
