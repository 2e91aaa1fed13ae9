"""Which buffers to move so that free memory lies in larger pieces: buffers and what lies between enter, an ordered plan leaves.

Each step makes the largest of the holes that it changes larger, so that no plan makes anything worse, and a plan of what a plan
leaves is empty. Copies on the device come first, since they are quick; what has no lower hole goes through the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxmem_callbacks.records.defragment import MovePlan, MoveStep, PlacedBuffer
from jaxmem_callbacks.recovery.moving.pool_model import PoolModel, rounded

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
