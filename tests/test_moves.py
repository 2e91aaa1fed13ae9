"""Plans of moves: nothing overlaps, extra memory stays in its bound, free memory grows, and a plan of a plan is empty."""

from __future__ import annotations

import dataclasses
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem_callbacks.records.defragment import MovePlan, PlacedBuffer
from jaxmem_callbacks.recovery.moving.compaction import FIXED, IN_PLACE, TOO_LARGE, plan_moves
from jaxmem_callbacks.simulator.allocators import MIN_BYTES, rounded

MIB = 2**20
BASE = 0x7F00_0000_0000


def laid_out(parts: list[tuple[int, int, bool]]) -> list[PlacedBuffer]:
    """Buffers in a row from (hole before, bytes, movable), in units of the pool's alignment less a little."""
    address, found = BASE, []
    for key, (hole, size, movable) in enumerate(parts):
        address += hole * MIN_BYTES
        count = max(1, size * MIN_BYTES - key % 7)
        found.append(PlacedBuffer(key=key, address=address, bytes=count, movable=movable))
        address += rounded(count)
    return found


def carried_out(buffers: list[PlacedBuffer], plan: MovePlan) -> list[PlacedBuffer]:
    """The buffers after a plan, by nothing but its own words; a step's new places may only be in what is free then."""
    now = {each.key: each for each in buffers}
    for step in plan.steps:
        moved = [now[key] for key in step.keys]
        staying = [each for each in now.values() if step.kind == "device" or each.key not in step.keys]
        placed: list[PlacedBuffer] = []
        for each, place in zip(moved, step.to, strict=True):
            new = dataclasses.replace(each, address=place)
            assert not any(overlap(new, other) for other in (*staying, *placed))
            placed.append(new)
        now |= {each.key: each for each in placed}
    return list(now.values())


def overlap(one: PlacedBuffer, other: PlacedBuffer) -> bool:
    return (
        one.bytes > 0
        and other.bytes > 0
        and one.address < other.address + rounded(other.bytes)
        and other.address < one.address + rounded(one.bytes)
    )


def holes(buffers: list[PlacedBuffer], end: int) -> list[int]:
    found, low = [], min(each.address for each in buffers)
    for each in sorted(buffers, key=lambda buffer: buffer.address):
        if each.address > low:
            found.append(each.address - low)
        low = max(low, each.address + rounded(each.bytes))
    return sorted([*found, *([end - low] if end > low else [])], reverse=True)


ROWS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 20), st.booleans()), min_size=1, max_size=24)


@settings(max_examples=300, deadline=None)
@given(ROWS, st.integers(0, 30), st.integers(0, 60))
def test_a_plan_moves_into_free_memory_only_and_makes_it_larger_in_one_piece(parts, tail, extra):
    buffers = laid_out(parts)
    fixed = {each.key: each.address for each in buffers if not each.movable}
    plan = plan_moves(buffers, extra_bytes=extra * MIN_BYTES, tail_bytes=tail * MIN_BYTES)
    after = carried_out(buffers, plan)
    assert plan.extra_bytes <= extra * MIN_BYTES
    assert {each.key: each.address for each in after if each.key in fixed} == fixed
    assert plan.largest_after >= plan.largest_before
    end = max(each.address + rounded(each.bytes) for each in buffers) + tail * MIN_BYTES
    # Holes are at least what the plan says: a pool that takes a hole whole leaves its rest to nobody.
    assert (holes([*after], end) or [0])[0] >= plan.largest_after
    assert (holes(buffers, end) or [0])[0] == plan.largest_before
    told = {key for step in plan.steps for key in step.keys} | set(plan.stays)
    assert told == {each.key for each in buffers}
    assert all(kind in ("device", "host") for kind in {step.kind for step in plan.steps})


def test_a_full_size_split_is_made_as_the_pool_makes_it():
    """A hole of less than twice the size and 128 MiB more is taken whole, so that what is left of it is nobody's."""
    buffers = [
        PlacedBuffer(key=0, address=BASE, bytes=MIB, movable=False),
        PlacedBuffer(key=1, address=BASE + 20 * MIB, bytes=MIB, movable=False),
        PlacedBuffer(key=2, address=BASE + 21 * MIB, bytes=15 * MIB),
    ]
    plan = plan_moves(buffers, extra_bytes=2**30, tail_bytes=40 * MIB)
    assert [(step.kind, step.keys, step.to) for step in plan.steps] == [("device", (2,), (BASE + MIB,))]
    assert plan.largest_after == 55 * MIB


def test_nothing_is_moved_that_makes_no_hole_larger():
    """A buffer between two that stay only changes sides with the hole before it."""
    buffers = laid_out([(0, 1, False), (3, 2, True), (0, 1, False)])
    assert plan_moves(buffers, extra_bytes=2**30, tail_bytes=40 * MIN_BYTES).steps == ()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=20), st.integers(1, 9))
def test_a_plan_of_what_a_plan_leaves_is_empty(parts, size):
    """Of buffers of one size between holes of whole ones: no hole is taken whole with a rest."""
    buffers = laid_out([(hole * size, size, movable) for hole, movable in parts])
    tail = 4 * size * MIN_BYTES
    first = plan_moves(buffers, extra_bytes=2**30, tail_bytes=tail)
    after = carried_out(buffers, first)
    again = plan_moves(after, extra_bytes=2**30, tail_bytes=end_of(buffers) - end_of(after) + tail)
    assert again.steps == ()
    assert again.largest_before == first.largest_after


@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_plans_of_plans_never_lose_anything(parts):
    """Where holes were taken whole, what is left in them is seen as free the next time; it ends all the same."""
    buffers = laid_out(parts)
    end = end_of(buffers) + 50 * MIN_BYTES
    largest = 0
    for _ in range(4):
        plan = plan_moves(buffers, extra_bytes=2**30, tail_bytes=end - end_of(buffers))
        assert largest <= plan.largest_before <= plan.largest_after
        largest = plan.largest_after
        buffers = carried_out(buffers, plan)


def end_of(buffers: list[PlacedBuffer]) -> int:
    return max(each.address + rounded(each.bytes) for each in buffers)


@pytest.mark.core
def test_small_buffers_pinned_between_large_holes_are_moved_down_on_the_device():
    """Losses of a list, each left behind one program's temporaries."""
    buffers = laid_out([(0, 4, False)] + [(100, 1, True) for _ in range(8)])
    plan = plan_moves(buffers, extra_bytes=MIB, tail_bytes=0)
    assert {step.kind for step in plan.steps} == {"device"}
    assert (plan.largest_before, plan.largest_after) == (100 * MIN_BYTES, 800 * MIN_BYTES)


def test_what_no_lower_hole_holds_goes_through_the_host():
    buffers = laid_out([(0, 4, False), (3, 10, True), (3, 10, True), (3, 10, True)])
    tail = 40 * MIN_BYTES
    plan = plan_moves(buffers, extra_bytes=MIB, tail_bytes=tail)
    assert [(step.kind, len(step.keys)) for step in plan.steps] == [("host", 3)]
    assert (plan.largest_before, plan.largest_after) == (tail, tail + 9 * MIN_BYTES)
    small = plan_moves(buffers, extra_bytes=10 * MIN_BYTES, tail_bytes=tail)
    assert {len(step.keys) for step in small.steps} == {1}
    # One at a time the others are taken for holes that they nearly fill, and stay.
    assert (small.largest_after, small.extra_bytes) == (tail + 3 * MIN_BYTES, 10 * MIN_BYTES)
    none = plan_moves(buffers, extra_bytes=9 * MIN_BYTES, tail_bytes=tail)
    assert none.steps == ()
    assert none.stays == {0: FIXED, 1: TOO_LARGE, 2: TOO_LARGE, 3: TOO_LARGE}


def test_memory_in_one_piece_is_left_alone():
    buffers = laid_out([(0, 4, True), (0, 10, True), (0, 10, True)])
    plan = plan_moves(buffers, extra_bytes=MIB, tail_bytes=MIB)
    assert (plan.steps, plan.extra_bytes) == ((), 0)
    assert set(plan.stays.values()) == {IN_PLACE}
    assert plan_moves([], extra_bytes=MIB).steps == ()


def test_thousands_of_buffers_are_planned_in_seconds():
    buffers = laid_out([(key % 5 * 3, 1 + key * 7 % 19, key % 11 != 0) for key in range(1500)])
    began = time.perf_counter()
    plan = plan_moves(buffers, extra_bytes=MIB, tail_bytes=MIN_BYTES)
    assert time.perf_counter() - began < 30  # two on a quiet machine
    assert plan.largest_after > plan.largest_before
