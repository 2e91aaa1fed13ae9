"""What a plan found: candidates with the compiler's bytes, which one was chosen and why, and what the figures rest on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.peaks import Peak
from jaxmem_callbacks.records.policies import OwnCheckpoint, StepPolicy, own_checkpoints_words
from jaxmem_callbacks.records.units import format_bytes

# A plan of the same program by the same compiler is off by nothing; another machine's autotuning may cost a few percent.
OFF_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One point of what a whole loss may keep.

    Attributes:
        share: Of what keeping everything expensive would take, from 0 to 1; `MergedFrontier.within` takes it.
        bytes: Kept besides the values at the cuts.
        flops: Operations computed again.
        peak: Estimated bytes alive at most in the backward pass, for comparisons of one number of segments with another.
        segments: How many there are.
        work: Operations computed again with those in whose time is moved what is moved again.
    """

    share: float
    bytes: int
    flops: int
    peak: int = 0
    segments: int = 0
    work: float = 0.0

    def times(self, copies: int) -> FrontierPoint:
        """The same of so many devices that each compute a part."""
        return replace(
            self,
            bytes=copies * self.bytes,
            flops=copies * self.flops,
            peak=copies * self.peak,
            work=copies * self.work,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BesideProgram:
    """Another program of the same training run, compiled for the plan's target. Bytes are per device.

    Attributes:
        name: Its function's name.
        program_bytes: What it needs by the target's own compiler, its arguments among them; None where the compiler refused
            it without a figure.
        held_bytes: What stays on the device while it runs and is none of its arguments: the rest of the step's state, and
            resident arrays.
        fits: Whether both fit into the budget; None where there is no budget.
    """

    name: str
    program_bytes: int | None
    held_bytes: int
    fits: bool | None

    @property
    def need_bytes(self) -> int | None:
        """What the device must hold while it runs."""
        return None if self.program_bytes is None else self.program_bytes + self.held_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One policy, compiled for the plan's target. Bytes are per device.

    Attributes:
        policy: What was compiled.
        step_bytes: What the step needs by the target's own compiler: a refusal's figure where it refused, or None where it
            gave none.
        fits: Whether ``need_bytes`` fits into the budget; None where there is no budget.
        flops: Operations of one step on all devices, counted from its trace, scan trips included.
        extra_flops: Operations above the same step without remat, plus an estimate of what the compiler recomputes by itself.
        plain_flops: Operations of the step that ``extra_flops`` is above: on as many rows, without remat and microbatches.
        need_bytes: Resident bytes and the largest program, where the step is one of them.
        sets_need: Name of the program beside the step that needs more than it; empty where the step itself is the largest.
        beside: The other programs, with the state placed as here.
        batch_rows: Rows of the batch where batch sizes were searched, else None.
        mesh: Axis -> size of the mesh that it was compiled for, empty without one.
        compiler_remat: Instructions that the compiler chose to recompute by itself near its memory limit; None where it refused
            the program, and so did not report it.
        modelled_s: Modelled seconds of one step on the target, or None where its speed is not known or the compiler refused the
            program. A model, not a measurement.
        argument_bytes: Arguments, donated or not.
        output_bytes: Results, those that reuse arguments included.
        alias_bytes: Results that reuse a donated argument's memory.
        temp_bytes: Temporaries.
        constant_bytes: Arrays that are part of the program, such as data that the step closes over.
        host_bytes: Host memory in which offloaded values wait, beside ``step_bytes``.
        peak: What makes its peak, with the largest buffers of each group; None for the
            attached devices while JAX's own compilation cache is on, since what comes from there is never compiled.
        placed_elsewhere: What makes the peak as the compiler for a kind of TPU with more memory places it, for the chosen
            candidate where its own compiler refused the program and placed nothing; else None.
        placed_by: That kind of TPU, such as ``v5p:1x1x1``.
        refusal: The compiler's own words where it refused the program for its memory.
        cached: Whether the answer came from the disk cache.
        seconds: Time in the compiler; None where cached or refused.
        operations: Identifies the step's operations under this policy, shapes and dtypes; a step that has others was changed.
    """

    policy: StepPolicy
    step_bytes: int | None
    fits: bool | None
    flops: int
    extra_flops: int
    plain_flops: int | None = None
    need_bytes: int | None = None
    sets_need: str = ""
    beside: tuple[BesideProgram, ...] = ()
    batch_rows: int | None = None
    mesh: Mapping[str, int] = field(default_factory=dict, hash=False)
    compiler_remat: int | None = 0
    modelled_s: float | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    alias_bytes: int | None = None
    temp_bytes: int | None = None
    constant_bytes: int | None = None
    host_bytes: int = 0
    peak: Peak | None = None
    placed_elsewhere: Peak | None = None
    placed_by: str = ""
    refusal: str | None = None
    cached: bool = False
    seconds: float | None = None
    operations: str = ""

    @property
    def extra_share(self) -> float | None:
        """Extra operations as a share of the plain step's; None where those are not known."""
        return self.extra_flops / self.plain_flops if self.plain_flops else None

    @property
    def peak_sentences(self) -> tuple[str, ...]:
        """What makes its peak, and by whose report; empty where nobody does."""
        sentences: list[str] = []
        if self.peak is not None:
            sentences.append(f"What makes its peak of {format_bytes(self.peak.bytes)}: {self.peak.words}.")
        there = self.placed_elsewhere
        if there is not None:
            sentences.append(
                f"The compiler for {self.placed_by}, which has room for it, places {format_bytes(there.bytes)}: {there.words}."
            )
        return tuple(sentences)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    """Everything a plan found.

    Attributes:
        step: Name of the train step.
        target: Canonical name of the hardware, such as ``h100_sxm`` or ``v5e:2x2``; ``attached`` for the attached devices.
        platform: ``cpu``, ``gpu``, ``cuda`` or ``tpu``.
        device_count: Devices the step was compiled for.
        candidates: In the order of their bytes, largest first.
        chosen: Index of the chosen candidate.
        reason: Why it was chosen, one sentence.
        limit_bytes: Memory of one device, or None where unknown.
        budget_bytes: What the step may use of it, or None without a limit.
        budget_reason: Where the budget comes from.
        resident_bytes: Bytes that must fit beside the step.
        least_bytes: What parameters, optimizer and other state alone take, without the batch; None where unknown.
        compiles: How many compiles of the step were asked for, cached ones included: what the limit counts.
        beside_compiles: How many of programs beside it: one each for every way in which the state was placed.
        compiled: How many of both were really run.
        margin: What the figures leave out on this target, in words.
        versions: Package -> version, of JAX and the compiler.
        flags: XLA options the programs were compiled with.
        mesh: Axis -> size, empty without a mesh.
        signature: Path of each array argument -> its dtype and shape, such as ``("batch['x']", "float32[8,128]")``.
        fingerprint: Identifies the plain step's operations, shapes and dtypes.
        device_kind: What one device is, as JAX calls it; empty where that is not known.
        process_flags: Flags of XLA's compilers in the process that planned; None where nobody looked.
        fraction: Share of an absent GPU that JAX's allocator must be set to take for the choice; None where what it takes
            untold is enough, and where nobody knows.
        own_checkpoints: Checkpoints of the loss's own that the policies left alone; empty where they were replaced.
        gradients: Which of the step's gradients obey the policy, as `jm.jit_step` takes it: ``own`` or ``all``.
        obstacles: Where nothing fits, those of the notes that explain why the policies cannot save more.
        remedies: Where nothing fits, what makes the chosen step fit as it is: compiled, or arithmetic with compiled bytes; the
            cheapest first.
        searches: Where nothing fits, options such as ``--search offload`` that were not tried and that the step can have.
        notes: Further remarks, one sentence each.
    """

    step: str
    target: str
    platform: str
    device_count: int
    candidates: tuple[Candidate, ...]
    chosen: int
    reason: str
    limit_bytes: int | None
    budget_bytes: int | None
    budget_reason: str
    resident_bytes: int = 0
    least_bytes: int | None = None
    compiles: int = 0
    beside_compiles: int = 0
    compiled: int = 0
    margin: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    signature: tuple[tuple[str, str], ...] = ()
    fingerprint: str = ""
    device_kind: str = ""
    process_flags: Mapping[str, str] | None = None
    fraction: float | None = None
    own_checkpoints: tuple[OwnCheckpoint, ...] = ()
    gradients: str = "own"
    obstacles: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    searches: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def least(self) -> tuple[str, int | None]:
        """What no policy makes smaller, in words, and its bytes: the state, or where they decide all arguments or all results."""
        chosen, state = self.candidates[self.chosen], self.least_bytes
        given, returned = chosen.argument_bytes or 0, chosen.output_bytes or 0
        most, what = max((given, "arguments"), (returned, "results"))
        # One can take the memory of the other, if it is donated. So neither is added to the other.
        decides = not state or (not self.remedies and self._has_room(state) and not self._has_room(most))
        if most and decides:
            return f"the step's {what} alone are {format_bytes(most)}", most
        return f"parameters and optimizer state alone are {format_bytes(state)}", state

    def _has_room(self, count: int) -> bool:
        """Whether so many bytes fit into the budget beside what stays."""
        return self.budget_bytes is None or count + self.resident_bytes <= self.budget_bytes

    @property
    def is_hopeless(self) -> bool:
        """Whether the budget is too small for what no remat makes smaller."""
        least = self.least[1]
        return least is not None and not self._has_room(least)

    @property
    def left_alone(self) -> str:
        """What the loss's own checkpoints keep the policies from, where they are, and what to ask for; empty without any."""
        if not self.own_checkpoints:
            return ""
        is_cut = any(each.policy.remat != "none" for each in self.candidates)
        rest = "policies act on the rest" if is_cut else "nothing else can be cut"
        asked = advise("plan.own_checkpoints")
        return f"{own_checkpoints_words(self.own_checkpoints)}: {rest}. With {asked} policies replace them."

    def is_as_written(self, candidate: Candidate) -> bool:
        """Whether a candidate has the checkpoints that the loss's author wrote, which other candidates replace."""
        replaced = any(each.policy.own_checkpoints == "replace" for each in self.candidates)
        return replaced and candidate.policy.own_checkpoints == "keep"

    @property
    def over_bytes(self) -> int | None:
        """What the chosen step needs beyond the budget, or beyond the limit where only that is too small.

        None where a compiler refused a program without a figure.
        """
        need = self.need_of(self.candidates[self.chosen])
        most = [
            each
            for each in (self.budget_bytes, self.limit_bytes)
            if each is not None and need is not None and need > each
        ]
        return None if need is None or not most else need - most[0]

    @property
    def hardware(self) -> str:
        """What the plan is for, in words."""
        return "the attached devices" if self.target == "attached" else self.target

    def need_of(self, candidate: Candidate) -> int | None:
        """What the device must hold: resident bytes and the largest program; None where its compiler reported no figure."""
        if candidate.need_bytes is not None or candidate.step_bytes is None:
            return candidate.need_bytes
        return candidate.step_bytes + self.resident_bytes
