"""How many steps of each loop one checkpoint is put around: those that make the whole function's estimated peak smallest.

Steps under one checkpoint are computed again together, and so hold their residuals together; in return only every so many
carries are stored. Either way everything is computed again once. The carries of all loops are stored at once, what steps hold
together is there for one loop at a time, and often neither is there at the peak: so the loops are judged together, in the whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from jaxmem_callbacks._compat.jaxprs import scan_arity
from jaxmem_callbacks.records.policies import OFFLOAD_CUTS
from jaxmem_callbacks.transforms.held import held_by_body
from jaxmem_callbacks.transforms.residuals import nbytes, scan_carry_bytes, scan_step_bytes

# Steps are put together where that takes at most this share of the loop's estimated bytes.
_WORTH = 0.9
# An estimated peak this little above the smallest is the same.
_SAME = 1.001


def steps_together(
    loops: Mapping[int, Any], offload: Collection[str], peak: Callable[[Mapping[int, int]], int]
) -> dict[int, int]:
    """For each loop the number of steps under one checkpoint; 1 is a checkpointed body.

    Args:
        loops: The scans, by any key.
        offload: What waits in host memory, in the policy's words.
        peak: The estimated peak of the whole function with so many steps together.
    """
    # What reports stays in a loop of its own: two loops would not change its order, but its place in the trace. What a step
    # itself sends to the host stays there too: XLA for GPUs fails at a loop in a loop that stacks host memory.
    fixed = bool(set(offload) - {OFFLOAD_CUTS})
    alone = dict.fromkeys(loops, 1)
    some = {key: eqn for key, eqn in loops.items() if not fixed and not eqn.effects and _is_worth_it(eqn)}
    tried = [alone | chosen for chosen in _choices(some)]
    if len(tried) < 2:  # noqa: PLR2004 - nothing to compare
        return tried[0] if tried else alone
    peaks = [peak(chosen) for chosen in tried]
    least = min(peaks) * _SAME
    # Of equals the one that takes least by itself: the rest of the function may be less than it is estimated to be.
    return min(
        (chosen for chosen, found in zip(tried, peaks, strict=True) if found <= least),
        key=lambda chosen: sum(_total(loops[key], steps) for key, steps in chosen.items()),
    )


def held_together(eqn: Any, steps: int) -> int:
    """Bytes that are held while so many steps of a loop are differentiated under one checkpoint."""
    if steps == 1:
        return held_by_body(eqn)
    # No fusion reaches from a loop into the next: the inner one stacks all that JAX keeps. And in parts, compilers copy what
    # the loop is given a slice of in each step: stacked weights, or a sequence's inputs.
    return steps * scan_step_bytes(eqn) + sum(map(nbytes, eqn.invars[sum(scan_arity(eqn)) :]))


def stored_between(eqn: Any, steps: int) -> int:
    """Bytes of the carries that a loop stores with so many steps under one checkpoint."""
    length = int(eqn.params["length"])
    return scan_carry_bytes(eqn) // max(length, 1) * -(-length // steps)


def _total(eqn: Any, steps: int) -> int:
    held = scan_step_bytes(eqn) if steps == 1 else held_together(eqn, steps)
    return held + stored_between(eqn, steps)


def sizes(length: int) -> list[int]:
    """How many steps may share a checkpoint, ascending: divisors, which leave nothing over, and others where those lie apart."""
    divisors = [part for part in range(1, length) if length % part == 0]
    # As many parts as of about that size, each as short as they may be: little is left over.
    between = (
        -(-length // round(length / (low << doubled)))
        for low, high in itertools.pairwise([*divisors, length])
        for doubled in range(1, math.ceil(math.log2(high / low)))
    )
    return sorted({*divisors, *(part for part in between if part < length)})


def _sizes(eqn: Any) -> list[int]:
    """What is worth trying: where steps are left over, compilers copy stacks once more, and so divisors do if they do as well."""
    length, every = int(eqn.params["length"]), sizes(int(eqn.params["length"]))
    divisors = [part for part in every if length % part == 0]
    least = min((_total(eqn, part) for part in divisors), default=0)
    return every if any(_total(eqn, part) < _WORTH * least for part in every) else divisors


def _is_worth_it(eqn: Any) -> bool:
    totals = [_total(eqn, part) for part in _sizes(eqn)]
    return bool(totals) and min(totals) < _WORTH * totals[0]


def _choices(loops: Mapping[int, Any]) -> Iterator[dict[int, int]]:
    """For each amount of memory that steps may hold together, as many in each loop as stay within it."""
    parts = {key: _sizes(eqn) for key, eqn in loops.items()}
    amounts = sorted({held_together(loops[key], part) for key, several in parts.items() for part in several[1:]})
    seen: list[dict[int, int]] = []
    for most in amounts:
        chosen = {
            key: max((part for part in several[1:] if held_together(loops[key], part) <= most), default=1)
            for key, several in parts.items()
        }
        if chosen not in seen:
            seen.append(chosen)
            yield chosen
