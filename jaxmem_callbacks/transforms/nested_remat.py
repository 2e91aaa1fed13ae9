"""Checkpoints in two levels, and around several steps of a loop."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from jaxmem_callbacks._compat.jaxprs import checkpoint_template, close, derive, open_jaxpr, scan_arity
from jaxmem_callbacks.records.policies import OFFLOAD_CUTS
from jaxmem_callbacks.transforms.costs import Sunk, held_by_body, nbytes, scan_carry_bytes, scan_step_bytes
from jaxmem_callbacks.transforms.names import ON_HOST, offloading
from jaxmem_callbacks.transforms.own_checkpoints import has_own_checkpoint
from jaxmem_callbacks.transforms.segments import Loop, Policy, Segment, Sharing, results_by_segment
from jaxmem_callbacks.transforms.tracing import Equations, flatten, is_variable, variables

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


# Of fewer, a second level would save hardly anything.
_FEWEST = 4


def loop_in_steps(loop: Loop, policy: Policy, kept: frozenset[Any]) -> list[Any]:
    """A loop with a checkpoint around each step, made without tracing it anew."""
    return [loop.checkpointed(policy, kept, loop.moved)]


def loop_in_chunks(loop: Loop, policy: Policy, kept: frozenset[Any]) -> list[Any]:
    """A loop with a checkpoint around each step, or around as many steps as take least bytes together."""
    found = _loop_of_loops(loop.named(kept), loop.chunk, policy, loop.moved) if loop.chunk > 1 else None
    return found or loop_in_steps(loop, policy, kept)


def loop_in_two_levels(loop: Loop, policy: Policy, kept: frozenset[Any]) -> list[Any]:
    """A loop with checkpoints around its steps and around parts of about the root of its length."""
    once = loop.checkpointed(policy, kept)
    # What is left over is one more part, and one more copy of stacks: a divisor is better.
    part = min(sizes(loop.trips), key=lambda n: n + -(-loop.trips // n) + bool(loop.trips % n), default=0)
    deep = loop.trips >= _FEWEST and not once.effects
    outer = offloading([ON_HOST[OFFLOAD_CUTS]]) if loop.moved else None
    found = _loop_of_loops(once, part, outer, loop.moved) if deep else None
    return found or loop_in_steps(loop, policy, kept)


def _loop_of_loops(eqn: Any, inner: int, policy: Policy, moved: frozenset[int]) -> list[Any] | None:
    """A `scan` as a scan of checkpointed scans over ``inner`` steps each; None where its equation cannot be replaced.

    What is left over is a checkpointed scan of its own, which runs last.

    Args:
        eqn: The scan.
        inner: Steps of each inner loop.
        policy: What the checkpoints around these keep.
        moved: Which of the values carried from one to the next wait in host memory.
    """
    length = int(eqn.params["length"])
    consts, carry = scan_arity(eqn)
    body = core.jaxpr_as_fun(eqn.params["jaxpr"])
    # As the user wrote the loop; the outer one is this library's, and its steps are large enough.
    said = {name: eqn.params[name] for name in ("reverse", "_split_transpose") if name in eqn.params}
    unroll = min(eqn.params["unroll"], inner)

    left = length % inner

    def nested(*operands: Any) -> Any:
        fixed, start, stacked = operands[:consts], operands[consts : consts + carry], operands[consts + carry :]

        def step(state: Any, slices: Any) -> Any:
            results = body(*fixed, *state, *slices)
            return tuple(results[:carry]), tuple(results[carry:])

        @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)  # in a loop nothing merges the two passes
        def part(state: Any, slices: Any) -> Any:
            state = tuple(
                checkpoint_name(value, ON_HOST[OFFLOAD_CUTS]) if place in moved else value
                for place, value in enumerate(state)
            )
            return jax.lax.scan(step, state, slices, length=inner, unroll=unroll, **said)

        @functools.partial(jax.checkpoint, policy=policy)
        def last(state: Any, slices: Any) -> Any:
            return jax.lax.scan(step, state, slices, length=left, unroll=min(unroll, left), **said)

        # The loop ends with its first elements where it runs backwards.
        divided = [_divided(x, left, first=eqn.params["reverse"]) for x in stacked]
        parts = tuple(x.reshape(length // inner, inner, *x.shape[1:]) for x, _ in divided)
        end, made = jax.lax.scan(part, tuple(start), parts, length=length // inner, **said)
        made = [y.reshape(length - left, *y.shape[2:]) for y in made]
        if left:
            end, more = last(end, tuple(rest for _, rest in divided))
            joined = [more, made] if eqn.params["reverse"] else [made, more]
            made = [jax.lax.concatenate(pair, 0) for pair in zip(*joined, strict=True)]
        return [*end, *made]

    return _in_place_of(eqn, nested)


def _divided(stacked: Any, left: int, *, first: bool) -> tuple[Any, Any]:
    """A stack without ``left`` of its elements, its first or its last, and those."""
    place = left if first else stacked.shape[0] - left
    halves = stacked[:place], stacked[place:]
    return halves[::-1] if first else halves


def _in_place_of(eqn: Any, function: Any) -> list[Any] | None:
    """The equations of a function that computes what an equation does, with its variables; None where they cannot be had."""
    # The types whole: where they lie on an explicit mesh and along which axes of a shard_map they vary is part of them.
    flat = flatten(jax.make_jaxpr(function)(*(atom.aval for atom in eqn.invars)))
    made = {var for one in flat.eqns for var in one.outvars}
    results = variables(flat.outvars)
    if flat.consts or len(set(results)) != len(flat.outvars) or not made.issuperset(results):
        return None
    names = dict(zip(flat.invars, eqn.invars, strict=True)) | dict(zip(results, eqn.outvars, strict=True))
    return [
        _said_by(
            one.replace(
                invars=[names.get(atom, atom) if is_variable(atom) else atom for atom in one.invars],
                outvars=[names.get(var, var) for var in one.outvars],
            ),
            eqn.source_info,
            depth=2 if one.primitive.name == "scan" else 1,
        )
        for one in flat.eqns
    ]


def _said_by(one: Any, source: Any, depth: int) -> Any:
    """An equation of ours with the user's line and scope: the outer loop, the checkpoint in it or left over, the loop in that.

    What lies deeper is the user's own body, which has its lines.
    """
    params = dict(one.params)
    if depth and "jaxpr" in params:
        body = open_jaxpr(params["jaxpr"])
        plain = source.replace(name_stack=one.source_info.name_stack)
        eqns = [_said_by(inner, plain, depth - 1) for inner in body.eqns]
        derived = derive(params["jaxpr"], invars=body.invars, outvars=body.outvars, eqns=eqns)
        params["jaxpr"] = close(derived) if one.primitive.name == "scan" else derived
    return one.replace(params=params, source_info=source)


def grouped(flat: Equations, jaxpr: Any, groups: Sequence[int] = ()) -> Any:
    """A function that is cut into segments, with checkpoints around groups of them.

    Args:
        flat: The function.
        jaxpr: It, cut.
        groups: After how many of the segments each group but the last ends; about the root of their number is a group without.
    """
    eqns = list(jaxpr.eqns)
    ends = [place for place, eqn in enumerate(eqns, 1) if has_own_checkpoint(eqn)]
    if len(ends) < _FEWEST:
        return jaxpr
    # Segments hold about equal bytes already, so groups of equally many do too.
    each = math.ceil(len(ends) / round(math.sqrt(len(ends))))
    # A segment of reports alone has no checkpoint.
    after = [ends[count - 1] for count in groups if count <= len(ends)] or ends[each - 1 :: each]
    bounds = sorted({0, *after, len(eqns)})
    template, sharing, nothing = checkpoint_template(None, prevent_cse=True), Sharing(), Sunk({}, {})
    found: list[Any] = []
    for (start, end), results in zip(
        itertools.pairwise(bounds), results_by_segment(eqns, jaxpr.outvars, bounds), strict=True
    ):
        if end == len(eqns):
            found += eqns[start:end]
        else:
            found += Segment(eqns[start:end], nothing, results).checkpointed(flat, template, {}, sharing)
    return derive(flat.template, invars=jaxpr.invars, outvars=jaxpr.outvars, eqns=found)
