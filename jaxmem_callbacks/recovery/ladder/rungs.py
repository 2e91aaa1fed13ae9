"""What a rung is worth: a policy enters, the step is compiled under it and its bytes compared; a step or why not leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem_callbacks.programs.memory import step_memory
from jaxmem_callbacks.programs.steps.step import JitStep, jit_step
from jaxmem_callbacks.records.errors import CompileError, DefragmentError, LossRefusedError, PolicyError
from jaxmem_callbacks.records.policies import StepPolicy, policy_words
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.recovery.defragment import defragment
from jaxmem_callbacks.recovery.verdicts.shortage import ran_out
from jaxmem_callbacks.transforms.leaves import is_weak
from jaxmem_callbacks.transforms.policy import Gradients


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
