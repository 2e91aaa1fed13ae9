"""The policies to fall back to, and the check that one of them needs less."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxmem_callbacks.programs.memory import step_memory
from jaxmem_callbacks.programs.steps.step import JitStep, jit_step
from jaxmem_callbacks.records.errors import CompileError, DefragmentError, LossRefusedError, PolicyError
from jaxmem_callbacks.records.policies import StepPolicy, policy_words
from jaxmem_callbacks.records.presets import RecoverySettings, Rung
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.recovery.defragment import defragment
from jaxmem_callbacks.recovery.verdicts.judging import ran_out
from jaxmem_callbacks.transforms.policy import Gradients
from jaxmem_callbacks.transforms.tracing import is_weak

# From what keeps most to what keeps least. Everything between `none` and `full` differs by model: a plan knows better.
_REMATS = (("none", 1), ("dots_saveable", 1), ("full", 1), ("full", 2))
_MOST_DOUBLINGS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One thing to try.

    Attributes:
        rung: What it is.
        microbatches: How many there are to be.
        remat: A policy whose remat is to be taken.
        why: Why there is nothing to try on this rung, or an empty text.
    """

    rung: Rung
    microbatches: int | None = None
    remat: StepPolicy | None = None
    why: str = ""

    def on(self, policy: StepPolicy) -> StepPolicy:
        """The policy in force with this change: microbatches keep the remat chosen before, and the other way round."""
        if self.microbatches is not None:
            return replace(policy, microbatches=self.microbatches)
        if self.remat is None:
            return policy
        other = self.remat
        return replace(
            policy,
            remat=other.remat,
            segments=other.segments,
            levels=other.levels,
            keep=other.keep,
            save=other.save,
            offload=other.offload,
        )


def offers(
    settings: RecoverySettings, policy: StepPolicy, *, rows: int | None, frontier: Sequence[StepPolicy] = ()
) -> Iterator[Offer]:
    """What to try one after the other.

    Args:
        settings: Has the ladder.
        policy: The one that failed.
        rows: Of the batch, or None where it has no common leading dimension.
        frontier: Policies of a plan from most bytes to least, below the one in force; they take the place of the usual ones.
    """
    for rung in settings.ladder:
        if rung == "microbatches":
            counts = microbatch_counts(policy.microbatches, settings.max_microbatches, rows)
            yield from (Offer(rung=rung, microbatches=count) for count in counts)
            if not counts:
                yield Offer(rung=rung, why=_no_count(policy.microbatches, settings.max_microbatches, rows))
        elif rung == "remat":
            yield from (Offer(rung=rung, remat=stronger) for stronger in frontier or stronger_remats(policy))
        else:
            yield Offer(rung=rung)


def microbatch_counts(now: int, most: int, rows: int | None) -> list[int]:
    """Numbers of microbatches above ``now``, each at least twice the one before, that divide the rows."""
    counts: list[int] = []
    for _ in range(_MOST_DOUBLINGS):
        wanted = 2 * now
        if rows is not None:
            wanted = next((count for count in range(wanted, rows + 1) if rows % count == 0), most + 1)
        if wanted > most:
            break
        counts.append(wanted)
        now = wanted
    return counts


def fitting_count(rows: int, count: int, chosen_for: int | None) -> int:
    """The fewest microbatches that divide a batch of other rows, none of them larger than those that were chosen.

    Args:
        rows: Of this batch, 1 at least.
        count: How many microbatches were chosen.
        chosen_for: For how many rows; None where that is not known, and there are to be as many at least.
    """
    least = min(count, rows) if chosen_for is None else -(-rows * count // chosen_for)
    return next(number for number in range(max(least, 1), rows + 1) if rows % number == 0)


def _no_count(now: int, most: int, rows: int | None) -> str:
    if 2 * now > most:
        return f"twice the {now} in force are more than max_microbatches={most}"
    return f"no number from {2 * now} to max_microbatches={most} divides the batch's {rows} rows"


def stronger_remats(policy: StepPolicy) -> list[StepPolicy]:
    """The usual policies that keep less than this one, from most to least."""
    at = next((i for i, pair in enumerate(_REMATS) if pair == (policy.remat, policy.levels)), 1)
    if policy.remat == "full" and (policy.keep or policy.save or policy.segments is not None):
        at -= 1  # the same policy without what it keeps besides
    return [StepPolicy(remat=remat, levels=levels) for remat, levels in _REMATS[at + 1 :]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Maker:
    """How the user's step becomes a jitted one, under any policy.

    Attributes:
        train_step: The user's.
        donate_argnames: As for `jm.jit_step`.
        state_shardings: Likewise.
        gradients: Likewise.
    """

    train_step: Callable[..., Any]
    donate_argnames: str | tuple[str, ...] | None = None
    state_shardings: Any = None
    gradients: Gradients = "own"

    def make(self, policy: Any) -> JitStep:
        """The step under a policy or preset."""
        return jit_step(
            self.train_step,
            policy,
            donate_argnames=self.donate_argnames,
            state_shardings=self.state_shardings,
            gradients=self.gradients,
        )


@dataclass(frozen=True, slots=True)
class Tried:
    """An offer that was compiled.

    Attributes:
        step: What to go on with; None where it does not help.
        why: Why not, or what it needs.
        need: Bytes on one device by its compiler; None where it was not compiled.
    """

    step: JitStep | None
    why: str
    need: int | None = None


def try_policy(maker: Maker, policy: StepPolicy, args: Sequence[Any], *, had: int | None) -> Tried:
    """Compile the step under another policy, for arguments of the same shapes, and compare what it needs.

    Args:
        maker: Makes the step.
        policy: The other policy.
        args: The arguments that failed, donated or not; they are read for their shapes only.
        had: What the policy that failed needs; None where its very compile ran out of memory.
    """
    candidate, words = maker.make(policy), policy_words(policy)
    try:
        need = need_of(candidate, args)
    except (PolicyError, LossRefusedError, CompileError) as error:
        return Tried(None, f"{words} is refused: {error}")
    if need is None:
        return Tried(None, f"{words} ran out of memory in the compiler")
    if had is not None and need >= had:
        return Tried(None, f"{words} needs {format_bytes(need)}, no less than the {format_bytes(had)} before", need)
    return Tried(candidate, f"{format_bytes(need)}, {_before(had)} before", need)


def need_of(step: JitStep, args: Sequence[Any]) -> int | None:
    """Bytes on one device that a step needs for arguments like these; None where the compile itself runs out of memory."""
    try:
        return step_memory(step, *(jax.tree.map(shape_of, each) for each in args)).step_bytes
    except Exception as error:
        if ran_out(error) is None:
            raise
        return None


def _before(had: int | None) -> str:
    return "too much to compile" if had is None else format_bytes(had)


def shape_of(leaf: Any) -> Any:
    """An array as its shape, type and place, also where it was donated; what is no array of JAX as it is."""
    if not isinstance(leaf, jax.Array):
        return leaf
    placed = leaf.sharding if getattr(leaf, "committed", True) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed, weak_type=is_weak(leaf))


def rows_of(inputs: Sequence[Any]) -> int | None:
    """Rows of the batch: the leading dimension that the first input's arrays share; None where they do not."""
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(inputs[:1]) if getattr(leaf, "ndim", 0)}
    return sizes.pop() if len(sizes) == 1 else None


def defragmented(state: Any) -> tuple[Any, str]:
    """The state moved together, and why that did not help, or an empty text where it did.

    Consumes its argument, which comes back with the same values in every case.
    """
    try:
        state, report = defragment(state)
    except DefragmentError as error:
        return state if error.tree is None else error.tree, str(error).partition("\n")[0]
    if report.moved:
        return state, ""
    return state, report.reason or "there was nothing to move"


def why_not_moved() -> str:
    """Why there is no use in moving arrays on this platform; empty on GPUs."""
    platform = jax.default_backend()
    if platform == "gpu":
        return ""
    return {
        "cpu": "the CPU's memory is no pool that could be split",
        "tpu": "a TPU moves its arrays together by itself",
    }.get(platform, f"unknown, because {platform} tells nothing of its memory")
