"""Plans followed in pools that hold more than the planner sees: what comes otherwise is taken back or planned around."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem_callbacks.records.defragment import MoveStep, PlacedBuffer
from jaxmem_callbacks.recovery.moving.compaction import PlannedPool, compact, keep_copy
from jaxmem_callbacks.simulator.allocators import MIN_BYTES, Bfc, rounded

BASE = 0x7F00_0000_0000
MIB = 2**20
END = 3000


class SecretPool:
    """A pool with buffers that nobody names, and blocks that were taken whole; the planner sees addresses and sizes of some."""

    def __init__(self, actions: list[tuple[int, int]], *, reports: bool = True) -> None:
        self.pool = PlannedPool([PlacedBuffer(key=0, address=BASE, bytes=1)], (END - 1) * MIN_BYTES)
        self.sizes = {0: 1}
        self.moved: list[str] = []
        self.reports = reports
        for number, (size, victim) in enumerate(actions, start=1):
            if size:
                self.sizes[number] = size * MIN_BYTES - number % 5
                if self.pool.put(number, self.sizes[number]) is None:
                    del self.sizes[number]
            else:
                living = [key for key in self.sizes if key]
                if living:
                    key = living[victim % len(living)]
                    self.pool.remove(key)
                    del self.sizes[key]

    def buffers(self) -> list[PlacedBuffer]:
        return [
            PlacedBuffer(key=key, address=self.pool.place_of[key], bytes=size, movable=key % 4 != 1)
            for key, size in self.sizes.items()
            if key % 7 != 3 and key  # these are in the pool, and nobody names them
        ]

    def free_bytes(self) -> int | None:
        return sum(size for _, size in self.pool.holes()) if self.reports else None

    def largest_free_bytes(self) -> int | None:
        return self.pool.largest_hole if self.reports else None

    def copy_to(self, key: int, address: int) -> bool:
        before = self.largest_free_bytes()
        new = self.pool.put(-1, self.sizes[key])
        if new is None:
            return False
        old, now = self.pool.place_of[key], self.largest_free_bytes()
        if not keep_copy(new=new, old=old, expected=address, before=before, now=now):
            self.pool.remove(-1)
            return False
        self.pool.remove(key)
        self.pool.rename(-1, key)
        self.moved.append("device")
        return True

    def stage(self, step: MoveStep) -> None:
        for key in step.keys:
            self.pool.remove(key)
        for key in step.keys:
            assert self.pool.put(key, self.sizes[key]) is not None
        self.moved.append("host")


ACTIONS = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 1, 2, 3, 8, 20, 100]), st.integers(0, 99)), min_size=10, max_size=70
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.integers(1, 400), st.booleans())
def test_free_memory_in_one_piece_is_never_less_and_nothing_is_lost(actions, extra, reports):
    mover = SecretPool(actions, reports=reports)
    before, held, free = mover.pool.largest_hole, dict(mover.sizes), sum(size for _, size in mover.pool.holes())
    secret = {key: mover.pool.place_of[key] for key in held if key % 7 == 3 or key % 4 == 1 or not key}
    stays, most = compact(mover, extra_bytes=extra * MIN_BYTES)
    # A way through the host cannot be taken back: it may cost what it moved, and is the last then.
    lost = mover.moved.count("host") * extra * MIN_BYTES if not reports else extra * MIN_BYTES
    assert mover.pool.largest_hole >= before - (lost if "host" in mover.moved else 0)
    assert mover.sizes == held
    assert set(mover.pool.place_of) == set(held)
    assert {key: mover.pool.place_of[key] for key in secret} == secret
    assert most <= extra * MIN_BYTES
    assert set(stays) <= {each.key for each in mover.buffers()} | {key for key in stays if key < 0}
    assert sum(size for _, size in mover.pool.holes()) >= free - sum(map(rounded, held.values()))


def test_losses_between_programs_come_together_although_others_lie_between():
    """Thirteen small ones between large holes, of which every seventh is nobody's that the planner knows."""
    actions = [(1, 0) if number % 2 else (100, 0) for number in range(26)]
    mover = SecretPool(actions)
    for key in [key for key, size in mover.sizes.items() if size > 90 * MIN_BYTES]:
        mover.pool.remove(key)
        del mover.sizes[key]
    before = mover.pool.largest_hole
    compact(mover, extra_bytes=MIN_BYTES)
    assert mover.moved
    assert set(mover.moved) == {"device"}
    assert mover.pool.largest_hole > before


def test_a_way_through_the_host_that_made_it_worse_is_the_last():
    """Hands whose pool grows worse by each: it is told by what the allocator says, and no second one is made."""

    unit = MIN_BYTES
    sizes = {1: 10, 2: 40, 3: 40}

    @dataclasses.dataclass
    class Worse:
        places: dict[int, int]
        largest: int | None
        staged: int = 0

        def buffers(self):
            return [
                PlacedBuffer(key=key, address=place, bytes=sizes[key] * unit, movable=key > 1)
                for key, place in self.places.items()
            ]

        def free_bytes(self):
            return 300 * unit

        def largest_free_bytes(self):
            return self.largest

        def copy_to(self, key, address):
            raise AssertionError((key, address))

        def stage(self, step):
            self.staged += len(step.keys)
            self.largest = None if self.largest is None else self.largest - unit

    places = {1: BASE, 2: BASE + 40 * unit, 3: BASE + 110 * unit}
    mover = Worse(places, largest=100 * unit)
    compact(mover, extra_bytes=40 * unit)
    assert mover.staged == 1


def test_a_copy_stays_where_it_lies_lower_and_took_no_part_of_the_largest_block():
    lower = {"new": 10, "old": 50}
    assert keep_copy(**lower, expected=20, before=100, now=100)
    assert not keep_copy(**lower, expected=10, before=100, now=90)
    assert not keep_copy(new=60, old=50, expected=60, before=100, now=100)
    assert keep_copy(**lower, expected=10, before=None, now=None)
    assert not keep_copy(**lower, expected=20, before=None, now=None)
    assert not keep_copy(new=None, old=50, expected=10, before=100, now=100)


class SimulatedPool:
    """Hands that move the blocks of XLA's allocator as the simulator knows it."""

    def __init__(self, seed: int, *, partitioned: bool) -> None:
        random = Random(seed)  # noqa: S311 - a trace, no secret
        self.pool = Bfc(2048 * MIB, partitioned=partitioned)
        self.live: dict[int, tuple[int, int]] = {}
        for key in range(300):
            if self.live and random.random() < 0.45:
                self.pool.free(self.live.pop(random.choice(list(self.live)))[0])
                continue
            size = random.choice([1, 2, 3, 5, 8, 20, 50, 100]) * MIB - random.randrange(3) * 100
            place = self.pool.allocate(size)
            if place is not None:
                self.live[key] = place, size

    def buffers(self) -> list[PlacedBuffer]:
        return [
            PlacedBuffer(key=key, address=place, bytes=size, movable=key % 8 != 0)
            for key, (place, size) in self.live.items()
        ]

    def free_bytes(self) -> int:
        return self.pool.pool_bytes - self.pool.in_use_bytes

    def largest_free_bytes(self) -> int:
        return self.pool.largest_free_bytes()

    def copy_to(self, key: int, address: int) -> bool:
        (old, size), before = self.live[key], self.largest_free_bytes()
        new = self.pool.allocate(size)
        if new is None:
            return False
        kept = keep_copy(new=new, old=old, expected=address, before=before, now=self.largest_free_bytes())
        self.pool.free(old if kept else new)
        self.live[key] = (new if kept else old), size
        return kept

    def stage(self, step: MoveStep) -> None:
        for key in step.keys:
            self.pool.free(self.live[key][0])
        for key in step.keys:
            size = self.live[key][1]
            place = self.pool.allocate(size)
            assert place is not None
            self.live[key] = place, size


@pytest.mark.core
@pytest.mark.parametrize("partitioned", [False, True])
def test_the_simulated_allocators_largest_free_block_grows(partitioned):
    """Twenty traces: where the allocator reports its largest block it grows in many, and is never less in any."""
    grew = 0
    for seed in range(20):
        mover = SimulatedPool(seed, partitioned=partitioned)
        before, sizes = mover.pool.largest_free_bytes(), {key: size for key, (_, size) in mover.live.items()}
        compact(mover, extra_bytes=200 * MIB)
        assert mover.pool.largest_free_bytes() >= before
        assert {key: size for key, (_, size) in mover.live.items()} == sizes
        grew += mover.pool.largest_free_bytes() > before
    assert grew >= 8
