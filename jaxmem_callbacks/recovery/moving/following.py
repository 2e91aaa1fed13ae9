"""A plan followed step by step, with a look at what really happened after each: hands that move enter, what stays and why leaves.

Addresses do not tell all: a hole may be taken by what nobody named, or be the rest of a block that was taken whole. So a copy on
the device is kept only where it does good for certain, and what did not hold is planned around; a way through the host, which
cannot be taken back, counts on no such rest, and is the last one where it made the largest free block smaller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxmem_callbacks.records.defragment import MovePlan, MoveStep, PlacedBuffer
from jaxmem_callbacks.recovery.moving.moves import plan_moves
from jaxmem_callbacks.recovery.moving.pool_model import LEFT_OVER, rounded

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
