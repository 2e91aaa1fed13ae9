"""Failures for want of memory: what their text states, what a log states, and the report of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxmem_callbacks.records.peaks import Peak
from jaxmem_callbacks.records.programs import ProgramMemory
from jaxmem_callbacks.records.runs import MemoryEvent, Reading, Unavailable

Phase = Literal["compile", "run"]
OomPlatform = Literal["gpu", "tpu", "cpu", "host"]
# Why it did not fit: the limit was too small; the pool had enough free, but in pieces; the pool could still grow, but neither by
# that nor by what it had free was there enough in one piece; the device gave no more, since something else holds the rest.
OomCause = Literal["capacity", "fragmentation", "growth", "refused", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OomFacts:
    """An out-of-memory failure, as far as its text has it; None where the text does not.

    Sizes are bytes. A size printed in units (K, KiB, M, ... T: powers of 1024) is as exact as its printed decimals.

    Attributes:
        phase: While compiling (autotuning counts), or while running (loading a program and allocating buffers count).
        platform: Whose memory; ``host`` is host memory used beside an accelerator. ROCm is ``gpu``.
        requested_bytes: The one allocation or reservation that failed.
        free_bytes: What was free.
        largest_free_bytes: The largest contiguous, or reservable, part of what was free.
        compacted_bytes: What would be free in one piece if all that can be moved were moved; the rest of what is free is
            reserved.
        limit_bytes: The capacity or limit that was exceeded.
        used_bytes: What was in use, or what the whole program needs.
        pool_bytes: What the allocator's pool held, in use and free; below ``limit_bytes`` the pool could still grow.
        fragmentation: True where the text names fragmentation as the cause and no number contradicts, or where its numbers
            prove it: memory that the pool itself had free was enough for the request. What a pool may still grow by is not
            free memory of the pool. None where the text only hints.
        driver_refused: True where the GPU's driver refused memory, so that the device itself had no more to give.
        allocator: The allocator's name, such as ``GPU_0_bfc``.
        program: The executable's name, such as ``jit_train_step``.
    """

    phase: Phase | None = None
    platform: OomPlatform | None = None
    requested_bytes: int | None = None
    free_bytes: int | None = None
    largest_free_bytes: int | None = None
    compacted_bytes: int | None = None
    limit_bytes: int | None = None
    used_bytes: int | None = None
    pool_bytes: int | None = None
    fragmentation: bool | None = None
    driver_refused: bool | None = None
    allocator: str | None = None
    program: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedBuffer:
    """A large buffer or chunk that a log lists.

    Attributes:
        bytes: Its size.
        line: The line of the log that it was read at, from 1.
        shape: Its dtype and shape as printed, padding and layout included; empty where none is known.
        operator: The operation that makes it, by the user's names, or the program that holds it; empty where none is known.
        source: File and line of the user's code; empty where none is known.
        label: The compiler's own name for it; empty where none is known.
    """

    bytes: int
    line: int
    shape: str = ""
    operator: str = ""
    source: str = ""
    label: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolDump:
    """A pool as its allocator listed it when it refused: all chunks, in use and free.

    Attributes:
        allocator: The pool's name; empty where the log has none.
        line: The line of the log that the dump begins at, from 1.
        pool_bytes: What the pool holds, the chunks together.
        in_use_bytes: Of it, in use.
        in_use_count: Chunks in use.
        free_count: Free chunks.
        largest_free_bytes: The largest free chunk, or 0 where nothing is free.
        largest: The largest chunks in use, largest first.
    """

    allocator: str
    line: int
    pool_bytes: int
    in_use_bytes: int
    in_use_count: int
    free_count: int
    largest_free_bytes: int
    largest: tuple[LoggedBuffer, ...]

    @property
    def free_bytes(self) -> int:
        """What the pool holds and nobody uses."""
        return self.pool_bytes - self.in_use_bytes

    def has_in_pieces(self, size: int) -> bool:
        """Whether so much is free, but not in one chunk."""
        return self.largest_free_bytes < size <= self.free_bytes

    @property
    def fragmentation(self) -> float | None:
        """The share of free memory that is outside the largest free chunk; None where nothing is free."""
        return (self.free_bytes - self.largest_free_bytes) / self.free_bytes if self.free_bytes else None


@dataclass(frozen=True, kw_only=True, slots=True)
class OomLog:
    """The first failure in a log.

    Attributes:
        facts: What its lines state.
        line: The line that it is at, from 1.
        said: Those words, in one line.
        where: Name of a fact to the line that it was read at.
        failures: How many failures the log has. The same figures again within 200 lines are the same failure.
        buffers: The largest buffers of the failing program, largest first.
        pool: The pool's dump, or None where the log has none.
        line_count: Lines of the log.
    """

    facts: OomFacts
    line: int
    said: str
    where: dict[str, int]
    failures: int
    buffers: tuple[LoggedBuffer, ...]
    pool: PoolDump | None
    line_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """A bound of the memory that the process may take, after the failure.

    Attributes:
        name: Which, such as ``address space (RLIMIT_AS)`` or ``gpu:0``.
        limit_bytes: The bound.
        used_bytes: What is taken of it.
        source: Where both come from.
        largest_free_bytes: The largest block that could be given out, or None where nobody reports it.
        pool_bytes: What the allocator's pool holds; below the bound it may still grow. None where there is no pool.
    """

    name: str
    limit_bytes: int
    used_bytes: int
    source: str
    largest_free_bytes: int | None = None
    pool_bytes: int | None = None

    @property
    def left_bytes(self) -> int:
        """What may still be taken."""
        return max(self.limit_bytes - self.used_bytes, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Live arrays with one name, or alike and without one.

    Attributes:
        name: Path in the step's arguments such as ``state.params['Dense_0']['kernel']``, or the variable that holds them;
            empty where nobody knows.
        known_by: How the name was found: ``the call's own arrays``, ``shape``, ``variable``, ``its error``, or empty.
        module: The module that it belongs to, such as ``Block_3/Dense_0``, or ``Block_*/Dense_0`` where it may be of several;
            empty where nobody knows.
        kind: What it is to the step, such as ``parameters``; empty outside of it.
        type_text: Dtype and shape: ``float32[8,128]``; of several kinds together, ``several``.
        count: Arrays.
        bytes: All of them, on one device.
        devices: Where they are.
        site: Where they were made, such as ``train.py:41 (train)``, or "unknown, because ...".
    """

    name: str
    known_by: str
    kind: str
    type_text: str
    count: int
    bytes: int
    devices: tuple[str, ...]
    site: str
    module: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleHolder:
    """Live arrays of one module of the model, or of all that repeat it: parameters with what the optimizer keeps for them.

    Attributes:
        name: ``Block_*`` for ``Block_0``, ``Block_1`` and so on; else the module, such as ``head``.
        modules: How many they are.
        count: Arrays.
        bytes: All of them, on one device.
        kinds: Kind such as ``parameters`` -> bytes of it, the largest first.
    """

    name: str
    modules: int
    count: int
    bytes: int
    kinds: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedProgram:
    """The program that ran out of memory, or that was being compiled.

    Attributes:
        name: Its name.
        known_by: How it was distinguished from others, in words.
        memory: What it needs by its compiler, or None with the reason in ``unavailable``.
        unavailable: Why there are no figures.
        peak: What makes its peak, or None with the reason in ``no_peak``.
        no_peak: Why nothing is known of the peak.
        gone: Paths of the arguments whose arrays were donated and are deleted: they can't be used again.
        gone_bytes: Their bytes on one device.
        fate: What is known of the arguments after the failure, a sentence.
    """

    name: str
    known_by: str
    memory: ProgramMemory | None = None
    unavailable: str | None = None
    peak: Peak | None = None
    no_peak: str | None = None
    gone: tuple[str, ...] = ()
    gone_bytes: int = 0
    fate: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """Something to do, with what it is predicted to save.

    Attributes:
        what: In words.
        lines: To paste; none where it is a question.
        compiled: Whether the bytes come from compiles, which ``basis`` names.
        basis: Where the bytes come from; else "not compiled" or "counted", and why.
        saves_bytes: On one device; None where nobody knows.
        needs_bytes: What the step then needs, where it was compiled.
        enough: Whether it saves what was lacking; None where that is unknown.
        costs: What it costs, in words.
    """

    what: str
    lines: tuple[str, ...]
    compiled: bool
    basis: str
    saves_bytes: int | None = None
    needs_bytes: int | None = None
    enough: bool | None = None
    costs: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hole:
    """Memory between two live arrays of one device: free, or a program's.

    Attributes:
        device: Stable label such as ``gpu:0``.
        bytes: From the end of one to the beginning of the other.
        below: Type of the array before it, such as ``float32[8,128]``.
        above: And of the one behind it, which keeps the hole from growing.
    """

    device: str
    bytes: int
    below: str
    above: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OnTheCard:
    """What a GPU's driver counts as taken, beside JAX's pool.

    Attributes:
        device: Stable label such as ``gpu:0``.
        used_bytes: Taken on the whole device, by everything.
        pool_bytes: JAX's pool, or None where its allocator does not report it.
        own_bytes: This process, the pool included; None where the driver does not report it.
        others: Number of each other process, and its bytes, None where the driver hides them.
        frameworks: What this process has imported that takes memory of a GPU by itself.
    """

    device: str
    used_bytes: int
    pool_bytes: int | None = None
    own_bytes: int | None = None
    others: tuple[tuple[int, int | None], ...] = ()
    frameworks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OomReport:
    """An out-of-memory failure, explained.

    Attributes:
        sentence: What asked for how much, what was free, and why it did not fit.
        cause: Why it did not fit.
        evidence: Why this is taken for a failure for want of memory.
        time_s: When, in seconds since the epoch.
        process: Which process, such as ``process 0 of 4, pid 4242``.
        error_type: The exception's class.
        error_text: Its text, without what looks like a secret.
        where: The lines of the user's code that it passed through, innermost last.
        facts: What the text has.
        lacking_bytes: How much more was needed, at least; None where that is unknown.
        limits: Bounds of memory, and what is taken of them.
        program: The program that failed, or None where nobody knows.
        holders: Who holds live arrays, largest first.
        modules: Modules of the model that hold most, alike ones together, largest first.
        live_bytes: All live arrays on the fullest device.
        live_count: All live arrays.
        left_out_count: Arrays of smaller holders that are not listed.
        left_out_bytes: Their bytes.
        failed_bytes: Of ``live_bytes``, results of a call that failed: they can't be read.
        on_the_cards: What the driver counts on each GPU.
        step: The latest step that the monitor was given, or None.
        readings: The monitor's last readings.
        events: The monitor's last events, oldest first.
        unwatched: Why there are no readings or events of a monitor, or an empty text.
        allocator: What the allocators report now.
        no_allocator: Devices whose allocators report nothing, and why.
        holes: The largest holes between live arrays by their addresses, the largest first.
        unmapped: Why there are none, or an empty text.
        versions: Package -> version.
        devices: Platform, kind and counts.
        environment: Variable -> its value, or that it is set and not shown.
        remedies: The best first.
        planning: How the predictions were made, or why there are none.
        failures: Parts of this report that failed, a sentence each.
    """

    sentence: str
    cause: OomCause
    evidence: str
    time_s: float
    process: str
    error_type: str
    error_text: str
    where: tuple[str, ...] = ()
    facts: OomFacts = field(default_factory=OomFacts)
    lacking_bytes: int | None = None
    limits: tuple[MemoryLimit, ...] = ()
    program: FailedProgram | None = None
    holders: tuple[Holder, ...] = ()
    modules: tuple[ModuleHolder, ...] = ()
    live_bytes: int | None = None
    live_count: int | None = None
    left_out_count: int = 0
    left_out_bytes: int = 0
    failed_bytes: int = 0
    on_the_cards: tuple[OnTheCard, ...] = ()
    step: int | None = None
    readings: tuple[Reading, ...] = ()
    events: tuple[MemoryEvent, ...] = ()
    unwatched: str = ""
    allocator: tuple[Reading, ...] = ()
    no_allocator: tuple[Unavailable, ...] = ()
    holes: tuple[Hole, ...] = ()
    unmapped: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, str | int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    remedies: tuple[Remedy, ...] = ()
    planning: str = ""
    failures: tuple[str, ...] = ()
