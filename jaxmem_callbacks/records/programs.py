"""What a compiled program needs, as its compiler reports it. Bytes are per device, and all figures of a record of one compile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxmem_callbacks.records.peaks import (
    BY_TOTALS,
    CONSTANTS,
    RESULTS,
    TEMPORARIES,
    Peak,
    StepSchedule,
    peak_model,
    schedule_model,
)

ASSIGNED, SUMMED = "by its compiler's buffer assignment", "by its arguments and its compiler's totals"
_ALIKE = 0.01  # of a step's bytes: figures that differ by less are one figure


@dataclass(frozen=True, kw_only=True, slots=True)
class ArgumentMemory:
    """One argument of a step, or one group of its leaves.

    Attributes:
        name: The argument's name in the user's function, such as ``state``.
        kind: What it holds: ``parameters``, ``optimizer state``, ``batch``, ``state`` or ``other``.
        bytes: Bytes of its arrays on one device.
        leaves: Number of arrays.
        donated_bytes: Bytes of its arrays that were marked for donation.
        alias_bytes: Bytes of those that the compiled program really reuses for outputs; None where it does not report them.
    """

    name: str
    kind: str
    bytes: int
    leaves: int
    donated_bytes: int = 0
    alias_bytes: int | None = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramMemory:
    """Bytes that one compiled program needs on one device.

    Attributes:
        name: The function's name.
        platform: ``cpu``, ``gpu`` or ``tpu``.
        target: The hardware it was compiled for: ``attached`` or a target such as ``v5e:2x2``.
        argument_bytes: Arguments that the program keeps (unused ones are dropped by JAX).
        output_bytes: Results, including those that reuse arguments.
        alias_bytes: Results that reuse a donated argument's memory.
        temp_bytes: Temporaries: activations, residuals, workspace.
        constant_bytes: Arrays in the program, such as data that the step closes over; None where nobody read its text.
        total_bytes: The runtime's own whole-program total where it has one (jaxlib 0.12), else None. It leaves out what XLA
            keeps apart from the rest, such as temporaries under ``xla_gpu_temp_buffer_use_separate_color``.
        assigned_bytes: The sum of the compiler's buffer assignment where it gives one (CPU and GPU), else None.
        compiler_remat: Instructions that the compiler chose to recompute by itself near its memory limit.
        host_temp_bytes: Host memory in which offloaded values wait; not part of what the device needs.
    """

    name: str
    platform: str
    target: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    constant_bytes: int | None = None
    total_bytes: int | None = None
    assigned_bytes: int | None = None
    compiler_remat: int = 0
    host_temp_bytes: int = 0

    @property
    def parts_bytes(self) -> int:
        """Its parts added up: argument + output - alias + temp + constant."""
        known = self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes
        return known + (self.constant_bytes or 0)

    @property
    def step_bytes(self) -> int:
        """What one step needs on one device: its buffer assignment, else the larger of its parts and the runtime's own total."""
        if self.assigned_bytes is not None:
            return self.assigned_bytes
        return max(self.parts_bytes, self.total_bytes or 0)

    @property
    def step_source(self) -> str:
        """Where `step_bytes` comes from."""
        if self.assigned_bytes is not None:
            return "the compiler's buffer assignment"
        if (self.total_bytes or 0) > self.parts_bytes:
            return "the runtime's own total"
        return "arguments + outputs - aliased + temporaries + constants"

    @property
    def disagreements(self) -> tuple[tuple[str, int], ...]:
        """Other figures of the same bytes that differ from `step_bytes` by more than 1 %: what each is, and its bytes."""
        parts = ("arguments, outputs, temporaries and constants add up to", self.parts_bytes)
        total = ("the runtime's own total is", self.total_bytes)
        return tuple(
            (words, count)
            for words, count in (parts, total)
            if count is not None and abs(count - self.step_bytes) > _ALIKE * self.step_bytes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """Under what a program was compiled, to compare a plan with. What is empty or None is not known.

    Attributes:
        device_kind: What its devices are, as JAX calls them.
        device_count: How many they are.
        mesh: Axis -> size.
        flags: Flags of the process that XLA's compilers take; None where nobody looked.
        operations: Identifies the step's operations, shapes and dtypes.
    """

    device_kind: str = ""
    device_count: int | None = None
    mesh: Mapping[str, int] = field(default_factory=dict, hash=False)
    flags: Mapping[str, str] | None = field(default=None, hash=False)
    operations: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilation:
    """One compile of a registered step.

    Attributes:
        program: The step's name.
        time_s: When, in seconds since the epoch.
        signature: Argument path -> dtype and shape, such as ``("batch['x']", "float32[8,128]")``; sharding is added where
            it is not a single device's.
        kinds: Dtype and shape -> what arguments of it hold -> how many of them are on the device, such as
            ``{"float32[8,128]": {"parameters": 1, "optimizer state": 2}}``.
        changed: What differs from the compile before, one sentence an argument; empty for the first compile.
        memory: What the compiled program needs, or None with the reason in ``unavailable``.
        unavailable: Why ``memory`` is None.
        lost: Donated arrays whose memory no result takes over, one sentence each:
            ``state['w']: it comes as float32 and is returned as bfloat16``; single numbers are left out.
        lost_bytes: Their bytes on one device.
        remedy: What to write so that they are reused, in sentences; empty where they all are.
        has_run: Whether this is of the first run of a compile that was reported before: ``lost`` are then arrays that the
            runtime copied, though the program reuses them.
        step: The training step in which it happened, or None before a monitor has reported one.
        conditions: On what and with what it was compiled.
        peak: What makes its peak, with the largest buffers of each group; None where the step needed more before, and where
            the compiler hands over no buffer assignment.
        schedule: Its bytes over the step; None likewise.
    """

    program: str
    time_s: float
    signature: tuple[tuple[str, str], ...]
    kinds: Mapping[str, Mapping[str, int]] = field(default_factory=dict, hash=False)
    changed: tuple[str, ...] = ()
    memory: ProgramMemory | None = None
    unavailable: str | None = None
    lost: tuple[str, ...] = ()
    lost_bytes: int = 0
    remedy: str = ""
    has_run: bool = False
    step: int | None = None
    conditions: Conditions = field(default_factory=Conditions)
    peak: Peak | None = None
    schedule: StepSchedule | None = None


def program_model(
    memory: ProgramMemory, *, peak: Peak | None, source: str = ASSIGNED, schedule: StepSchedule | None = None
) -> dict[str, Any]:
    """A program's bytes, and what makes its peak.

    Args:
        memory: The compiler's figures.
        peak: Of its buffers; None where they are unknown, and the totals stand in their place.
        source: Where ``peak`` is from.
        schedule: Its bytes over the step, or None.
    """
    return {
        "name": memory.name,
        "bytes": memory.step_bytes,
        "place": f"{memory.platform}, {memory.target}",
        "parts": {
            "arguments": memory.argument_bytes,
            "outputs": memory.output_bytes,
            "aliased": memory.alias_bytes,
            "temporaries": memory.temp_bytes,
            "constants": memory.constant_bytes,
        },
        "compiler_remat": memory.compiler_remat,
        "peak": _totals_model(memory)
        if peak is None
        else peak_model(peak, SUMMED if peak.basis == BY_TOTALS else source),
        **({} if schedule is None else {"step": schedule_model(schedule)}),
    }


def _totals_model(memory: ProgramMemory) -> dict[str, Any]:
    """The compiler's totals, where the buffers behind them were not recorded."""
    results = max(memory.output_bytes - memory.alias_bytes, 0)
    parts = {
        "arguments": memory.argument_bytes,
        RESULTS: results,
        TEMPORARIES: memory.temp_bytes,
        CONSTANTS: memory.constant_bytes or 0,
    }
    rest = memory.step_bytes - sum(parts.values())
    parts |= {"not in these parts": rest} if rest > 0 else {}
    return {
        "bytes": sum(parts.values()),
        "basis": "totals by the compiler; the buffers behind them were not recorded",
        "moment": None,
        "source": "by its compiler",
        "groups": [{"name": name, "bytes": size, "padding": 0, "count": None} for name, size in parts.items() if size],
        "buffers": [],
    }
