"""Compaction: a plan of moves that merges free memory, and its execution."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from jaxmem_callbacks.records.defragment import MovePlan, MoveStep, PlacedBuffer
from jaxmem_callbacks.simulator.allocators import MOST_SLACK_BYTES, Blocks, rounded


class PlannedPool:
    """The buffers of one device in a model of its pool, which reaches from the lowest of them to the end of what is free above.

    Args:
        buffers: Buffers that do not overlap.
        tail_bytes: Free memory above the highest buffer.

    Attributes:
        place_of: Address of each buffer, by its key.
    """

    def __init__(self, buffers: Iterable[PlacedBuffer], tail_bytes: int = 0) -> None:
        placed = sorted(buffers, key=lambda each: each.address)
        self._blocks = Blocks()
        self._keys: dict[int, int] = {}
        self.place_of: dict[int, int] = {}
        # How many free blocks of a size there are more, or fewer, than at the last `settle`.
        self._changes: Counter[int] = Counter()
        ends = [each.address + max(each.room, rounded(each.bytes)) for each in placed]
        low = placed[0].address if placed else 0
        high = max(ends, default=0) + tail_bytes
        if high > low:
            self._blocks.add_region(low, high - low)
        for each, end in zip(placed, ends, strict=True):
            address = max(each.address, low)  # memory of unknown owners may overlap
            if end > address:
                self.put_back(each.key, address, end - address)
                low = end
        self.settle()

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest hole."""
        return self._blocks.largest_free_bytes()

    def holes(self) -> list[tuple[int, int]]:
        """Address and bytes of each hole, by address."""
        return sorted((address, self._blocks.sizes[address]) for address in self._blocks.free)

    def above(self, address: int) -> Iterator[int]:
        """The keys of the buffers above a hole, upwards."""
        while address in self._blocks.sizes:
            if address in self._keys:
                yield self._keys[address]
            address += self._blocks.sizes[address]

    def best_fit(self, count: int) -> int | None:
        """Where a new buffer would go, or None where no hole holds it."""
        return self._blocks.best_fit(rounded(count))

    def put(self, key: int, count: int) -> int | None:
        """Put a new buffer in. Its address, or None where no hole holds it."""
        blocks = self._blocks
        address = blocks.take(rounded(count))
        if address is None:
            return None
        end = address + blocks.sizes[address]
        rest = blocks.sizes[end] if end in blocks.free else 0
        self._count((end - address + rest,), (rest,))
        self._keys[address], self.place_of[key] = key, address
        return address

    def put_back(self, key: int, address: int, room: int) -> None:
        """Put a buffer at a place inside a hole."""
        low, hole = self._blocks.take_at(address, room)
        self._count((hole,), (address - low, low + hole - address - room))
        self._keys[address], self.place_of[key] = key, address

    def remove(self, key: int) -> tuple[int, int]:
        """Take a buffer out; its hole joins its neighbours. Its address and room."""
        address = self.place_of.pop(key)
        room = self._blocks.sizes[address]
        del self._keys[address]
        low, hole = self._blocks.give_back(address)
        self._count((address - low, low + hole - address - room), (hole,))
        return address, room

    def rename(self, key: int, new: int) -> None:
        """Know a buffer by another key."""
        address = self.place_of[new] = self.place_of.pop(key)
        self._keys[address] = new

    def improved(self) -> bool:
        """Whether the changes since `settle` made the largest of the holes that differ larger."""
        differ = [size for size, count in self._changes.items() if count]
        return bool(differ) and self._changes[max(differ)] > 0

    def settle(self) -> None:
        """Take the present state for the one that `improved` compares with."""
        self._changes.clear()

    def _count(self, before: Iterable[int], after: Iterable[int]) -> None:
        for size in filter(None, before):
            self._changes[size] -= 1
        for size in filter(None, after):
            self._changes[size] += 1


FIXED, TOO_LARGE, IN_PLACE = (
    "it is none of the tree's arrays, or cannot be moved",
    "it is larger than the extra memory that is allowed",
    "moving it would not make free memory larger in one piece",
)
_COPY = -(2**41)  # key of a copy that stands beside its original
_MOST_STEPS = 16  # a buffer; each step enlarges some hole, so that a plan ends long before


def plan_moves(buffers: Sequence[PlacedBuffer], *, extra_bytes: int, tail_bytes: int = 0) -> MovePlan:
    """Plan the moves of one device.

    Args:
        buffers: What is there, movable or not; what is between is taken for free. They do not overlap.
        extra_bytes: The most that one step may take in addition: a copy on the device, or what stands on the host.
        tail_bytes: Free memory behind the highest buffer.
    """
    sizes = {each.key: each.bytes for each in buffers if each.bytes}
    movable = {each.key for each in buffers if each.movable and 0 < rounded(each.bytes) <= extra_bytes}
    stageable = {each.key for each in buffers if each.key in movable and each.stageable}
    pool = PlannedPool((each for each in buffers if each.bytes), tail_bytes)
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


def _on_device(pool: PlannedPool, sizes: dict[int, int], movable: set[int]) -> Iterator[MoveStep]:
    """Copies into lower holes that enlarge another, the highest buffers first. Each that is yielded is done."""
    for key in sorted(movable, key=lambda each: -pool.place_of[each]):
        low = pool.best_fit(sizes[key])
        if low is None or low > pool.place_of[key]:
            continue
        # The copy is made while the old one is still there, so that its own place is none to copy into.
        pool.put(_COPY, sizes[key])
        old, room = pool.remove(key)
        if pool.improved():
            pool.rename(_COPY, key)
            pool.settle()
            yield MoveStep(kind="device", keys=(key,), bytes=sizes[key], to=(low,))
            continue
        pool.put_back(key, old, room)
        pool.remove(_COPY)
        pool.settle()


def _staged(pool: PlannedPool, sizes: dict[int, int], stageable: set[int], extra_bytes: int) -> Iterator[MoveStep]:
    """What is above a hole, taken out together and put back, largest first. Each that is yielded is done."""
    for start, _ in pool.holes():
        run = _run(pool, start, sizes, stageable, extra_bytes)
        for keys in dict.fromkeys((run, run[:1])):
            if not keys:
                continue
            old = {key: pool.remove(key) for key in keys}
            order = sorted(keys, key=lambda key: (-sizes[key], old[key][0]))
            new = [pool.put(key, sizes[key]) for key in order]
            if pool.improved() and None not in new:
                pool.settle()
                to = tuple(place for place in new if place is not None)
                yield MoveStep(kind="host", keys=tuple(order), bytes=sum(sizes[key] for key in order), to=to)
                break
            for key, place in zip(order, new, strict=True):
                if place is not None:
                    pool.remove(key)
            for key in sorted(old, key=lambda each: old[each][0]):
                pool.put_back(key, *old[key])
            pool.settle()


def _run(
    pool: PlannedPool, start: int, sizes: dict[int, int], stageable: set[int], extra_bytes: int
) -> tuple[int, ...]:
    """The movable buffers right above a hole, as many as the extra memory holds."""
    keys: list[int] = []
    taken = 0
    for key in pool.above(start):
        taken += rounded(sizes[key])
        if key not in stageable or taken > extra_bytes:
            break
        keys.append(key)
    return tuple(keys)


_MOST_PLANS = 32
_UNKNOWN = -(2**40)


class BufferMover(Protocol):
    """Moves the buffers of one device."""

    def buffers(self) -> Sequence[PlacedBuffer]:
        """The buffers there now, movable or not."""
        ...

    def free_bytes(self) -> int | None:
        """Free bytes in all, or None."""
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


def keep_copy(*, new: int | None, old: int | None, expected: int, before: int | None, now: int | None) -> bool:
    """Whether a copy is to stay and the old buffer to go: it is lower, and took no part of the largest hole.

    Args:
        new: Where the copy is.
        old: Where the old one does.
        expected: Where it was expected; where the allocator does not report its largest free block, only a copy there stays.
        before: The largest free block without the copy, or None.
        now: And with it.
    """
    if new is None or old is None or new > old:
        return False
    return new == expected if before is None or now is None else now >= before


def compact(mover: BufferMover, *, extra_bytes: int) -> tuple[Mapping[int, str], int]:
    """Plan and move, and plan again where a buffer was put elsewhere: first on the device, then through the host.

    Args:
        mover: Moves the buffers.
        extra_bytes: The most that one step may take in addition.

    Returns:
        Key of a buffer that the last plan left where it was, to why; and the most that a step took in addition.
    """
    taken: list[PlacedBuffer] = []
    plan, extra = plan_moves((), extra_bytes=extra_bytes), 0
    for _ in range(_MOST_PLANS):
        plan = _plan(
            mover, taken, extra_bytes, [dataclasses.replace(each, stageable=False) for each in mover.buffers()]
        )
        extra = max(extra, plan.extra_bytes)
        wrong = next((step for step in plan.steps if not mover.copy_to(step.keys[0], step.to[0])), None)
        if wrong is None:
            break
        taken.append(_gap(mover.buffers(), wrong.to[0], len(taken)))
    staged: set[int] = set()
    for _ in range(_MOST_PLANS):
        once = [
            dataclasses.replace(each, stageable=each.stageable and each.key not in staged) for each in mover.buffers()
        ]
        plan = _plan(mover, taken, extra_bytes, _with_rooms(once))
        step = next((each for each in plan.steps if each.kind == "host"), None)
        if step is None:
            break
        before = mover.largest_free_bytes()
        mover.stage(step)
        staged.update(step.keys)
        extra = max(extra, sum(rounded(each.bytes) for each in once if each.key in step.keys))
        after = mover.largest_free_bytes()
        if before is not None and after is not None and after < before:
            break
    return plan.stays, extra


def _plan(mover: BufferMover, taken: list[PlacedBuffer], extra_bytes: int, buffers: list[PlacedBuffer]) -> MovePlan:
    """A plan of what is there now, around what is taken."""
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
    tail = max(0, (mover.free_bytes() or 0) - between)
    return plan_moves([*buffers, *known], extra_bytes=extra_bytes, tail_bytes=tail)


def _with_rooms(buffers: list[PlacedBuffer]) -> list[PlacedBuffer]:
    """The buffers, with what follows each and may be the rest of a block that was taken whole, where nothing finds room."""
    ordered = sorted(buffers, key=lambda each: each.address)
    found: list[PlacedBuffer] = []
    for each, above in zip(ordered, [*ordered, None][1:], strict=True):
        size = rounded(each.bytes)
        gap = 0 if above is None else above.address - each.address - size
        rest = 0 < gap < min(size, MOST_SLACK_BYTES)
        found.append(dataclasses.replace(each, room=size + gap) if rest else each)
    return found


def _gap(buffers: Sequence[PlacedBuffer], address: int, number: int) -> PlacedBuffer:
    """The memory between an address and the next buffer, as a buffer of an unknown owner."""
    above = min((each.address for each in buffers if each.address > address), default=address + 256)
    return PlacedBuffer(key=_UNKNOWN - number, address=address, bytes=above - address, movable=False)


def _overlap(one: PlacedBuffer, other: PlacedBuffer) -> bool:
    return one.address < other.address + rounded(other.bytes) and other.address < one.address + rounded(one.bytes)
