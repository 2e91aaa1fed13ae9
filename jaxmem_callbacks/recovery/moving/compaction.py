"""A plan of moves that brings free memory together, and its execution."""

from __future__ import annotations

import bisect
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from jaxmem_callbacks.records.defragment import MovePlan, MoveStep, PlacedBuffer

ALIGNMENT = 256
LEFT_OVER = 128 * 2**20


def rounded(count: int) -> int:
    """Bytes that the pool gives for so many."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class PoolModel:
    """Blocks in a row between the lowest buffer and the end of what lies behind the highest.

    Args:
        buffers: What lies there. They do not overlap.
        tail_bytes: Free memory behind the highest buffer.
    """

    def __init__(self, buffers: Iterable[PlacedBuffer], tail_bytes: int = 0) -> None:
        placed = sorted(buffers, key=lambda each: each.address)
        self._starts: list[int] = []
        self._rooms: dict[int, int] = {}
        self._keys: dict[int, int] = {}
        self.place_of: dict[int, int] = {}
        self._holes: list[tuple[int, int]] = []
        self._hole_at: dict[int, int] = {}
        self._hole_ending: dict[int, int] = {}
        self.changes: Counter[int] = Counter()
        end = placed[0].address if placed else 0
        for each in placed:
            if each.address > end:
                self._open(end, each.address - end)
            room = max(each.room, rounded(each.bytes))
            self._take(each.key, each.address, room)
            end = max(end, each.address + room)
        if tail_bytes:
            self._open(end, tail_bytes)
        self.changes.clear()

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest hole."""
        return self._holes[-1][0] if self._holes else 0

    def holes(self) -> list[tuple[int, int]]:
        """Address and bytes of each hole, in the order of addresses."""
        return sorted((start, size) for size, start in self._holes)

    def after(self, start: int) -> Iterable[int]:
        """The keys of the buffers above an address, in their order."""
        for place in self._starts[bisect.bisect_left(self._starts, start) :]:
            yield self._keys[place]

    def best_fit(self, count: int) -> int | None:
        """Where a new buffer would go, or None where no hole holds it."""
        index = bisect.bisect_left(self._holes, (rounded(count), -1))
        return self._holes[index][1] if index < len(self._holes) else None

    def put(self, key: int, count: int) -> int | None:
        """Put a new buffer in. Its address, or None where no hole holds it."""
        start = self.best_fit(count)
        if start is None:
            return None
        size, wanted = self._hole_at[start], rounded(count)
        split = size >= 2 * wanted or size - wanted >= LEFT_OVER
        self.put_back(key, start, wanted if split else size)
        return start

    def put_back(self, key: int, start: int, room: int) -> None:
        """Put a buffer at the low end of a hole, or at a place inside one that it was taken from."""
        hole = start if start in self._hole_at else max(low for low in self._hole_at if low <= start)
        size = self._hole_at[hole]
        self._close(hole)
        if start > hole:
            self._open(hole, start - hole)
        if start + room < hole + size:
            self._open(start + room, hole + size - start - room)
        self._take(key, start, room)

    def let_go(self, key: int) -> tuple[int, int]:
        """Take a buffer out; its hole joins its neighbours. Its address and room."""
        start = self.place_of.pop(key)
        room = self._rooms.pop(start)
        del self._keys[start]
        del self._starts[bisect.bisect_left(self._starts, start)]
        low, high = start, start + room
        if start in self._hole_ending:
            low = self._hole_ending[start]
            self._close(low)
        if high in self._hole_at:
            size = self._hole_at[high]
            self._close(high)
            high += size
        self._open(low, high - low)
        return start, room

    def improved(self) -> bool:
        """Whether the changes since `settle` made the largest of the holes that differ larger."""
        differ = [size for size, count in self.changes.items() if count]
        return bool(differ) and self.changes[max(differ)] > 0

    def settle(self) -> None:
        """What was done is the new state."""
        self.changes.clear()

    def _take(self, key: int, start: int, room: int) -> None:
        bisect.insort(self._starts, start)
        self._rooms[start], self._keys[start], self.place_of[key] = room, key, start

    def _open(self, start: int, size: int) -> None:
        bisect.insort(self._holes, (size, start))
        self._hole_at[start], self._hole_ending[start + size] = size, start
        self.changes[size] += 1

    def _close(self, start: int) -> None:
        size = self._hole_at.pop(start)
        del self._hole_ending[start + size]
        del self._holes[bisect.bisect_left(self._holes, (size, start))]
        self.changes[size] -= 1


FIXED, TOO_LARGE, IN_PLACE = (
    "it is none of the tree's arrays, or cannot be moved",
    "it is larger than the extra memory that is allowed",
    "moving it would not make free memory larger in one piece",
)
_MOST_STEPS = 16  # a buffer; each step enlarges some hole, so that a plan ends long before


def plan_moves(buffers: Sequence[PlacedBuffer], *, extra_bytes: int, tail_bytes: int = 0) -> MovePlan:
    """Plan the moves of one device.

    Args:
        buffers: What lies there, movable or not; what lies between is taken for free. They do not overlap.
        extra_bytes: The most that one step may take besides: a copy on the device, or what stands on the host.
        tail_bytes: Free memory behind the highest buffer.
    """
    sizes = {each.key: each.bytes for each in buffers if each.bytes}
    movable = {each.key for each in buffers if each.movable and 0 < rounded(each.bytes) <= extra_bytes}
    stageable = {each.key for each in buffers if each.key in movable and each.stageable}
    pool = PoolModel((each for each in buffers if each.bytes), tail_bytes)
    before = pool.largest_hole
    steps: list[MoveStep] = []
    while len(steps) < _MOST_STEPS * len(buffers):
        found = next(_on_device(pool, sizes, movable), None) or next(_staged(pool, sizes, stageable, extra_bytes), None)
        if found is None:
            break
        steps.append(found)
    moved = {key for step in steps for key in step.keys}
    stays = {
        each.key: FIXED if not each.movable else IN_PLACE if each.key in movable or not each.bytes else TOO_LARGE
        for each in buffers
        if each.key not in moved
    }
    return MovePlan(
        steps=tuple(steps),
        stays=stays,
        largest_before=before,
        largest_after=pool.largest_hole,
        extra_bytes=max((sum(rounded(sizes[key]) for key in step.keys) for step in steps), default=0),
    )


def _on_device(pool: PoolModel, sizes: dict[int, int], movable: set[int]) -> Iterator[MoveStep]:
    """Copies into lower holes that enlarge another, the highest buffers first. Each that is yielded is done."""
    for key in sorted(movable, key=lambda each: -pool.place_of[each]):
        old = pool.place_of[key]
        low = pool.best_fit(sizes[key])
        if low is None or low > old:
            continue
        start, room = pool.let_go(key)
        # The copy is made while the old one is still there, so that its own place is none to copy into.
        pool.put_back(-1, start, room)
        new = pool.put(key, sizes[key])
        pool.let_go(-1)
        if new is not None and pool.improved():
            pool.settle()
            yield MoveStep(kind="device", keys=(key,), bytes=sizes[key], to=(new,))
            continue
        if new is not None:
            pool.let_go(key)
        pool.put_back(key, start, room)
        pool.settle()


def _staged(pool: PoolModel, sizes: dict[int, int], stageable: set[int], extra_bytes: int) -> Iterator[MoveStep]:
    """What lies above a hole, taken out together and put back, largest first. Each that is yielded is done."""
    for start, _ in pool.holes():
        run = _run(pool, start, sizes, stageable, extra_bytes)
        for keys in dict.fromkeys((run, run[:1])):
            if not keys:
                continue
            old = {key: pool.let_go(key) for key in keys}
            order = sorted(keys, key=lambda key: (-sizes[key], old[key][0]))
            new = [pool.put(key, sizes[key]) for key in order]
            if pool.improved() and None not in new:
                pool.settle()
                to = tuple(place for place in new if place is not None)
                yield MoveStep(kind="host", keys=tuple(order), bytes=sum(sizes[key] for key in order), to=to)
                break
            for key, place in zip(order, new, strict=True):
                if place is not None:
                    pool.let_go(key)
            for key in sorted(old, key=lambda each: old[each][0]):
                pool.put_back(key, *old[key])
            pool.settle()


def _run(pool: PoolModel, start: int, sizes: dict[int, int], stageable: set[int], extra_bytes: int) -> tuple[int, ...]:
    """The movable buffers right above a hole, as many as the extra memory holds."""
    keys: list[int] = []
    taken = 0
    for key in pool.after(start):
        taken += rounded(sizes[key])
        if key not in stageable or taken > extra_bytes:
            break
        keys.append(key)
    return tuple(keys)


_MOST_PLANS = 32
_NOBODY = -(2**40)


class Hands(Protocol):
    """What moves the buffers of one device."""

    def buffers(self) -> Sequence[PlacedBuffer]:
        """What lies there now, with what is not to be moved."""
        ...

    def free_bytes(self) -> int | None:
        """What is free in all, or None."""
        ...

    def largest_free_bytes(self) -> int | None:
        """The largest free block, or None."""
        ...

    def copy_to(self, key: int, address: int) -> bool:
        """Copy a buffer on the device, and let go of the old one, or of the copy where `keep_copy` does not want it."""
        ...

    def stage(self, step: MoveStep) -> None:
        """Take buffers to the host and put them back."""
        ...


def keep_copy(*, new: int | None, old: int | None, foretold: int, before: int | None, now: int | None) -> bool:
    """Whether a copy is to stay and the old buffer to go: it lies lower, and took no part of the largest hole.

    Args:
        new: Where the copy lies.
        old: Where the old one does.
        foretold: Where it was expected; where the allocator does not tell its largest free block, only a copy there stays.
        before: The largest free block without the copy, or None.
        now: And with it.
    """
    if new is None or old is None or new > old:
        return False
    return new == foretold if before is None or now is None else now >= before


def follow(hands: Hands, *, extra_bytes: int) -> tuple[Mapping[int, str], int]:
    """Plan, move, look, and plan again where it came otherwise: first on the device, then through the host.

    Args:
        hands: What moves.
        extra_bytes: The most that one step may take besides.

    Returns:
        Key of a buffer that the last plan left where it was, to why; and the most that a step took besides.
    """
    taken: list[PlacedBuffer] = []
    plan, extra = plan_moves((), extra_bytes=extra_bytes), 0
    for _ in range(_MOST_PLANS):
        plan = _plan(
            hands, taken, extra_bytes, [dataclasses.replace(each, stageable=False) for each in hands.buffers()]
        )
        extra = max(extra, plan.extra_bytes)
        wrong = next((step for step in plan.steps if not hands.copy_to(step.keys[0], step.to[0])), None)
        if wrong is None:
            break
        taken.append(_gap(hands.buffers(), wrong.to[0], len(taken)))
    staged: set[int] = set()
    for _ in range(_MOST_PLANS):
        once = [
            dataclasses.replace(each, stageable=each.stageable and each.key not in staged) for each in hands.buffers()
        ]
        plan = _plan(hands, taken, extra_bytes, _with_rooms(once))
        step = next((each for each in plan.steps if each.kind == "host"), None)
        if step is None:
            break
        before = hands.largest_free_bytes()
        hands.stage(step)
        staged.update(step.keys)
        extra = max(extra, sum(rounded(each.bytes) for each in once if each.key in step.keys))
        after = hands.largest_free_bytes()
        if before is not None and after is not None and after < before:
            break
    return plan.stays, extra


def _plan(hands: Hands, taken: list[PlacedBuffer], extra_bytes: int, buffers: list[PlacedBuffer]) -> MovePlan:
    """A plan of what lies there now, around what is taken."""
    if not buffers:
        return plan_moves((), extra_bytes=extra_bytes)
    low = min(each.address for each in buffers)
    high = max(each.address + max(each.room, rounded(each.bytes)) for each in buffers)
    known = [
        each
        for each in taken
        if each.address + each.bytes <= high and not any(_overlap(each, other) for other in buffers)
    ]
    between = high - low - sum(max(each.room, rounded(each.bytes)) for each in buffers)
    tail = max(0, (hands.free_bytes() or 0) - between)
    return plan_moves([*buffers, *known], extra_bytes=extra_bytes, tail_bytes=tail)


def _with_rooms(buffers: list[PlacedBuffer]) -> list[PlacedBuffer]:
    """The buffers, with what follows each and may be the rest of a block that was taken whole, where nothing finds room."""
    ordered = sorted(buffers, key=lambda each: each.address)
    found: list[PlacedBuffer] = []
    for each, above in zip(ordered, [*ordered, None][1:], strict=True):
        size = rounded(each.bytes)
        gap = 0 if above is None else above.address - each.address - size
        rest = 0 < gap < min(size, LEFT_OVER)
        found.append(dataclasses.replace(each, room=size + gap) if rest else each)
    return found


def _gap(buffers: Sequence[PlacedBuffer], address: int, number: int) -> PlacedBuffer:
    """What lies between an address and the next buffer, as taken by nobody knows whom."""
    above = min((each.address for each in buffers if each.address > address), default=address + 256)
    return PlacedBuffer(key=_NOBODY - number, address=address, bytes=above - address, movable=False)


def _overlap(one: PlacedBuffer, other: PlacedBuffer) -> bool:
    return one.address < other.address + rounded(other.bytes) and other.address < one.address + rounded(one.bytes)
