"""A lowered step enters; it is compiled, and what its program needs leaves together with the fate of each donated array."""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxmem_callbacks.programs.reading.compiler_figures import program_memory
from jaxmem_callbacks.programs.steps.aliases import UNWRITTEN, LeafUse, Written, leaf_uses, lost_donations
from jaxmem_callbacks.programs.steps.conditions import conditions_of
from jaxmem_callbacks.programs.steps.leaves import Leaf
from jaxmem_callbacks.programs.steps.signature import Signature, signature_of
from jaxmem_callbacks.records.programs import Compilation, Conditions, ProgramMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One compiled signature of a step. Holds no arrays and no executable.

    Attributes:
        signature: What it was compiled for.
        memory: Its bytes, or None with the reason in ``unavailable``.
        uses: What it does with each array of the call.
        undonated: Arguments that the step returns updated and that nobody donates.
        unavailable: Why ``memory`` is None.
        conditions: On what and with what it was compiled.
    """

    signature: Signature
    memory: ProgramMemory | None
    uses: tuple[LeafUse, ...]
    undonated: tuple[str, ...] = ()
    unavailable: str | None = None
    conditions: Conditions = field(default_factory=Conditions)

    def compilation(self, name: str, changed: tuple[str, ...]) -> Compilation:
        """The record of this compile, made now.

        Args:
            name: The step's.
            changed: What differs from the compile before.
        """
        lost = [use for use in lost_donations(self.uses) if not use.passing]  # of a batch nothing is lost
        return Compilation(
            program=name,
            time_s=time.time(),
            signature=self.signature,
            changed=changed,
            memory=self.memory,
            unavailable=self.unavailable,
            conditions=self.conditions,
            lost=tuple(f"{use.path}: {use.lost}" for use in lost),
            lost_bytes=sum(use.bytes for use in lost),
        )


@contextmanager
def without_donation_warning() -> Generator[None]:
    """JAX's own warning of unusable donations names no argument; ours follows in its place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable", category=UserWarning)
        yield


def read_program(  # noqa: PLR0913 - what the call and the compile know, each once
    name: str,
    leaves: Sequence[Leaf],
    lowered: jax.stages.Lowered,
    compiled: jax.stages.Compiled,
    *,
    static: Mapping[str, Any],
    requested_names: Sequence[str] = (),
    undonated: Sequence[str] = (),
    operations: str = "",
    written: Written = UNWRITTEN,
) -> Program:
    """What the compiled step needs on one device, from the compiler's own account."""
    hlo_text = compiled.as_text() or ""
    uses = leaf_uses(leaves, lowered, compiled, hlo_text=hlo_text, requested_names=requested_names, written=written)
    try:
        platform = _platform(compiled)
        memory = program_memory(compiled, name=name, platform=platform, target="attached", hlo_text=hlo_text)
        unavailable = None
    except ValueError as error:
        memory, unavailable = None, str(error)
    return Program(
        signature=signature_of(uses, static),
        memory=memory,
        uses=uses,
        undonated=tuple(undonated),
        unavailable=unavailable,
        conditions=conditions_of(compiled, operations),
    )


def _platform(compiled: jax.stages.Compiled) -> str:
    """Where the program runs, by the devices of its results or arguments."""
    shardings = jax.tree.leaves((compiled.output_shardings, compiled.input_shardings))
    return next(iter(shardings[0].device_set)).platform if shardings else jax.default_backend()
