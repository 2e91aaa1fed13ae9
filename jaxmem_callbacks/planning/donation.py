"""What donation saves a plan's candidate, or would save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxmem_callbacks.planning.compile_queue import Entry, Ledger
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.request import Space
from jaxmem_callbacks.programs.steps.donation import leaf_bytes, worth_donating
from jaxmem_callbacks.programs.steps.modules import OfArrays
from jaxmem_callbacks.programs.steps.step import Traced
from jaxmem_callbacks.programs.steps.user_jit import Jitted, already_jitted
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import CompileError
from jaxmem_callbacks.records.units import format_bytes


def donation_of(problem: Problem, said: Any, space: Space) -> Any:
    """What the policies say of donation: the step's own word, or everything where that is for the plan to decide."""
    own = _own_jit(problem.train_step)
    is_free = isinstance(said, tuple) if own is None else own.may_donate
    return "auto" if space.donate and is_free else said


def worth_a_word(traced: Traced) -> tuple[str, ...]:
    """Arguments that a step returns updated and does not donate, and that are large enough to count."""
    return worth_donating(traced.undonated, [(leaf.argument, leaf_bytes(leaf, None)) for leaf in traced.leaves])


def _own_jit(train_step: Callable[..., Any]) -> Jitted | None:
    """The jit that the user made, also of a step that was taken out of it to be planned."""
    return train_step.jit if isinstance(train_step, OfArrays) else already_jitted(train_step)


def note_donation(ledger: Ledger, entry: Entry, said: Any, undonated: Sequence[str]) -> str:
    """Say what donation saves in the chosen step.

    Args:
        ledger: Counts the one compile that this takes.
        entry: The chosen candidate.
        said: The step's own word about donation.
        undonated: Arguments that the step, by that word, returns updated and does not donate.

    Returns:
        The sentence where donation makes a step fit that does not fit without it, else an empty text.
    """
    policy, compiled = entry.candidate.policy, entry.candidate.step_bytes
    if not undonated or compiled is None or _is_off(ledger):
        return ""
    names = ", ".join(undonated)
    try:
        if policy.donate != said:
            (other,) = ledger.compile([(entry.compiler, replace(policy, donate=said))])
            if other is not None and other.step_bytes is not None:
                saved = format_bytes(other.step_bytes - compiled)
                ledger.note(
                    f"Donating {names} saves {saved}: {format_bytes(compiled)} in place of {format_bytes(other.step_bytes)}."
                )
            return ""
        ledger.tell(f"{names} donated")
        ledger.asked += 1
        donating, cached = entry.compiler.donating(policy, undonated)
        ledger.beside_compiled += not cached
    except CompileError as error:
        ledger.note(f"What donating {names} would save is unknown: {error}")
        return ""
    if donating is None or donating >= compiled:
        ledger.note(f"{names}: returned updated and not donated; donating would save nothing here, as compiled.")
        return ""
    problem = entry.compiler.problem
    limit = problem.budget.bytes
    is_enough = entry.candidate.fits is False and limit is not None and donating + problem.resident_bytes <= limit
    words = (
        f"{names}: returned updated and not donated. Donating would save {format_bytes(compiled - donating)}: "
        f"{format_bytes(donating)} in place of {format_bytes(compiled)}, compiled{', and it fits' if is_enough else ''}. "
        f"{_line(entry, tuple(undonated))}"
    )
    if is_enough:
        return words
    ledger.note(words)
    return ""


def _is_off(ledger: Ledger) -> bool:
    """Whether JAX donates nothing, which is noted."""
    is_off = bool(jax.config.jax_debug_nans)  # pyright: ignore[reportAttributeAccessIssue] - 0.10
    if is_off:
        ledger.note("jax_debug_nans is on: JAX donates nothing while it is.")
    return is_off


def _line(entry: Entry, names: tuple[str, ...]) -> str:
    donated = [leaf.argument for leaf in entry.compiler.leaves if leaf.donated]
    step = entry.compiler.problem
    own = _own_jit(step.train_step)
    if own is None or own.may_donate:
        return f"Let the plan donate: {advise('plan.donate')}."
    return f"{own.donating(step.name, names, donated)} No search changes your own jit."
