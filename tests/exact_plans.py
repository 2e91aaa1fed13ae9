"""Small chains, every plan that is possible for them, and what each costs: a model from first principles, for comparisons.

It knows nothing of the library. A chain is a list of steps, each making one value; a plan is where it is cut and what is kept.
What is alive is followed through the forward pass, the recomputations and the backward pass, step by step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final


@dataclass(frozen=True, slots=True)
class Made:
    """One step of a chain.

    Attributes:
        bytes: Of the value it makes.
        flops: Of making it once.
        takes: Earlier values that it uses; the chain's own argument and the weights are there anyway and are left out.
        needs: Values, its own included, that its derivative uses. In a checkpoint its own is made again, whatever is kept: JAX's
            derivative is of what the step makes and not of what was kept of it.
        in_place: Elementwise, so that its value takes the place of what it takes, and its gradient gives it back. The gradient
            takes the place of the value, which is needed no more by then.
        is_sum: Hands one number to all elements of what it takes, so that this gradient is nowhere before it is used.
    """

    bytes: int
    flops: int
    takes: tuple[int, ...]
    needs: tuple[int, ...]
    in_place: bool = False
    is_sum: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Cut places, and the values kept as a set of bits."""

    cuts: tuple[int, ...]
    kept: int = 0


class _Bytes(dict[int, int]):
    """Bytes of sets of values, each added up once."""

    def __init__(self, steps: list[Made]) -> None:
        super().__init__({0: 0})
        self._steps = steps

    def __missing__(self, bits: int) -> int:
        low = bits & -bits
        self[bits] = found = self[bits ^ low] + self._steps[low.bit_length() - 1].bytes
        return found


@final
class Chain:
    """Costs of plans. Sets of values are whole numbers, one bit a value.

    Args:
        steps: In order; the last one's value is the loss.
    """

    def __init__(self, steps: list[Made]) -> None:
        self.steps = steps
        self._takes = [sum(1 << v for v in step.takes) for step in steps]
        self._needs = [sum(1 << v for v in step.needs) for step in steps]
        self._bytes = _Bytes(steps)
        count = len(steps)
        users = [[i for i in range(count) if self._takes[i] >> v & 1] for v in range(count)]
        # Alive while step i runs: what it or a later step takes, and what it makes.
        self.ahead = [sum(1 << v for v in range(i) if users[v] and users[v][-1] >= i) | 1 << i for i in range(count)]
        for i, step in enumerate(steps):
            ending = [v for v in step.takes if users[v][-1] == i]
            if step.in_place and ending:  # it makes its value in the place of one that nobody else takes
                self.ahead[i] ^= 1 << ending[0]
        # The gradient of a value is alive from its last user's derivative until its own maker's.
        # An elementwise step turns its gradient into that of what it takes, in place.
        filled = [[i for i in by if not steps[i].is_sum] for by in users]
        self.gradients = [
            sum(1 << v for v in range(i) if filled[v] and filled[v][-1] >= i) | (0 if steps[i].in_place else 1 << i)
            for i in range(count)
        ]

    def plans(self) -> Iterator[Plan]:
        """Every choice of cuts with every choice of kept values; what is in the last segment is always there."""
        inner = range(1, len(self.steps))
        for cuts in itertools.chain.from_iterable(itertools.combinations(inner, k) for k in range(len(self.steps))):
            for kept in range(1 << (cuts[-1] if cuts else 0)):
                yield Plan(cuts, kept)

    def cost(self, plan: Plan) -> tuple[int, int]:
        """Most bytes alive at once, and operations computed again."""
        parts = list(itertools.pairwise([0, *plan.cuts, len(self.steps)]))
        stored, again = zip(*(self._part(part, plan) for part in parts), strict=True)
        waiting = 0
        most = 0
        behind = [0] * len(parts)  # stored values that this part or an earlier one waits for
        for place, own in enumerate(stored):
            behind[place] = waiting = waiting | own
        for i, ahead in enumerate(self.ahead):
            most = max(most, self._bytes[ahead | (waiting & ((1 << i) - 1))])
        for place, (start, end) in enumerate(parts):
            earlier = behind[place - 1] if place else 0
            most = max(most, self._backward(start, end, again[place], earlier, stored[place]))
        return most, sum(self.steps[i].flops for part in again for i in range(len(self.steps)) if part >> i & 1)

    def _part(self, part: tuple[int, int], plan: Plan) -> tuple[int, int]:
        """What a part stores between the two passes, and which of its values it computes again."""
        start, end = part
        own = (1 << end) - (1 << start)
        wanted = 0
        for i in range(start, end):
            wanted |= self._needs[i]
        if end == len(self.steps):
            return wanted, 0
        there = plan.kept | ~own
        by_result = sum(1 << i for i in range(start, end) if i in self.steps[i].needs)
        again, pending = 0, wanted & ~there | by_result
        stored = wanted & there
        while pending:
            again |= pending
            takes = 0
            for i in range(start, end):
                if pending >> i & 1:
                    takes |= self._takes[i]
            stored |= takes & there
            pending = takes & ~there & ~again
        return stored, again

    def _backward(self, start: int, end: int, again: int, earlier: int, stored: int) -> int:
        """Most bytes alive while one part is computed again and differentiated."""
        most = made = 0
        coming = 0  # gradients that later parts left for this one and those before
        if end < len(self.steps):
            coming = self.gradients[end] & ~(1 << end)
        needs = [0] * (end - start + 1)  # what the derivatives of steps before the i-th use
        for i in range(start, end):
            needs[i - start + 1] = needs[i - start] | self._needs[i]
        todo = [0] * (end - start + 1)  # what recomputations from the i-th on take
        for i in reversed(range(start, end)):
            todo[i - start] = todo[i - start + 1] | (self._takes[i] if again >> i & 1 else 0)
        for i in range(start, end):
            if again >> i & 1:
                made |= 1 << i
                used = needs[-1] | todo[i - start] | 1 << i
                most = max(most, self._bytes[earlier | ((stored | made) & used)] + self._bytes[coming])
        for i in reversed(range(start, end)):
            held = earlier | ((stored | made) & needs[i - start + 1])
            if (
                self.steps[i].in_place and self._needs[i] & ~earlier & 1 << i
            ):  # the gradient takes the place of its own value
                held &= ~(1 << i)
            most = max(most, self._bytes[held] + self._bytes[self.gradients[i]])
        return most

    def best(self) -> list[tuple[int, int]]:
        """Bytes and operations of the plans that no other beats in both."""
        found: list[tuple[int, int]] = []
        for bytes_, flops in sorted({self.cost(plan) for plan in self.plans()}):
            if not found or flops < found[-1][1]:
                found.append((bytes_, flops))
        return found
