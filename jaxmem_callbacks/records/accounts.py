"""Account: what a run, a plan or one step needed, in the one form in which any two of a kind are compared and saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxmem_callbacks.records.peaks import Peak
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.programs import ProgramMemory

Form = Literal["run", "plan", "step memory"]
ONE_STEP = "one step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """Bytes with what they were measured or compiled for. All bytes are of one device, or of the host where the name has it.

    Attributes:
        form: What it is an account of.
        name: The step's name, or the run's id.
        hardware: What it was compiled for or ran on.
        judged: Figure -> bytes: what must not grow.
        shown: Figure -> bytes: what explains growth, and is judged by nobody.
        batch: Path of each array of the batch -> its dtype and shape.
        conditions: What else may make a difference, such as the policy and versions.
        remarks: What is worth knowing of the figures, a sentence each.
    """

    form: Form
    name: str
    hardware: str
    judged: Mapping[str, int]
    shown: Mapping[str, int] = field(default_factory=dict)
    batch: Mapping[str, str] = field(default_factory=dict)
    conditions: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One figure of two accounts.

    Attributes:
        name: The figure.
        before: Bytes in the first account, or None where it has none.
        after: Bytes in the second, or None.
        judged: Whether it must not grow.
        too_much: Whether it grew more than was allowed.
    """

    name: str
    before: int | None
    after: int | None
    judged: bool = False
    too_much: bool = False

    @property
    def bytes(self) -> int | None:
        """By how much it grew; None where one of the two is unknown."""
        return None if self.before is None or self.after is None else self.after - self.before


def parts_of(program: ProgramMemory | Candidate, peak: Peak | None) -> dict[str, int]:
    """What a program's bytes consist of, by name: the compiler's figures that are known, and the groups of its peak."""
    figures = {
        "arguments": program.argument_bytes,
        "outputs": program.output_bytes,
        "outputs that reuse arguments": program.alias_bytes,
        "temporaries": program.temp_bytes,
        "constants": program.constant_bytes,
    }
    host = program.host_bytes if isinstance(program, Candidate) else program.host_temp_bytes
    known = {name: size for name, size in figures.items() if size is not None}
    offloaded = {"on the host, offloaded": host} if host else {}
    return {**known, **offloaded, **({f"peak: {group.name}": group.bytes for group in peak.groups} if peak else {})}
