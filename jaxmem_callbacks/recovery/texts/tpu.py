"""What TPU's compiler and runtime (libtpu) print when memory runs out: a table of wordings."""

from __future__ import annotations

from jaxmem_callbacks.recovery.texts.rule import Rule, rule

_REFUSED = r"(?: That was not possible\.?)?"

COMPILE: tuple[Rule, ...] = (
    # The scoped form of E1001: a kernel's stack in VMEM or SMEM. Between the two sentences stands the whole instruction.
    rule(
        "scoped memory",
        r"Ran out of memory in memory space \w{2,12} while allocating on stack.{0,2600}?"
        r"Scoped allocation with size <requested> and limit <limit> exceeded scoped \w{2,12} limit",
        phase="compile",
        platform="tpu",
    ),
    rule(
        "scoped memory",
        r"Scoped allocation with size <requested> and limit <limit>(?: exceeded scoped \w{2,12} limit)?",
        phase="compile",
        platform="tpu",
    ),
    # E1000 and its forms before error codes: the whole program against one memory.
    rule(
        "program",
        r"Ran out of memory in memory space \w{2,12}\.?\s*Used <used> of <limit>",
        phase="compile",
        platform="tpu",
    ),
    # The same with its head cut off; a compiler that finds room prints the like as information.
    rule(
        "program",
        r"\b[Uu]s(?:ed|ing) <used> of <limit> (?:hbm|vmem|smem|cmem|sflag)\b",
        phase="compile",
        platform="tpu",
        over=True,
    ),
    # E1000, refused before buffers are assigned: temporaries alone, or another part of the program.
    rule(
        "temporaries",
        r"[Tt]otal memory required(?: for [^()]{2,80}?)? \(<used>\),?"
        r" exceed(?:s|ed|ing) (?:the )?available \w{2,12}(?: memory)? \(<limit>\)",
        phase="compile",
        platform="tpu",
        over=True,
    ),
    # Given up before buffers are assigned, where an estimate is far beyond the device.
    rule(
        "estimate",
        r"unlikely to have enough (?:\w{1,12} )?memory\. Requires <used>, has <limit> available",
        phase="compile",
        platform="tpu",
    ),
    # Tables of embeddings, which are laid out before the program.
    rule(
        "embedding",
        r"TPU table with HBM usage: <used> that does not fit in available space: <limit>",
        phase="compile",
        platform="tpu",
    ),
    rule(
        "embedding",
        r"embedding configuration does not fit on the TPU due to HBM space",
        phase="compile",
        platform="tpu",
    ),
    # One allocation larger than the memory that it is to be in.
    rule(
        "one allocation",
        r"Allocation \(size=<requested>\) would exceed memory \(size=<limit>\)",
        phase="compile",
        platform="tpu",
    ),
    # E1002: both kinds of core share HBM; two uses are printed, so that neither is the program's.
    rule(
        "two cores",
        r"TensorCore Hbm usage: {s}, SparseCore Hbm usage:? {s}, exceeding available bytes: <limit>".replace(
            "{s}", r"[\d.]{1,20}\s{0,40}\w{0,5}"
        ),
        phase="compile",
        platform="tpu",
    ),
    # SparseCore counts words, so that it states no bytes.
    rule(
        "SparseCore offsets",
        r"allocation offset upper bound \(\d{1,19} words\) exceeds the legitimate user allocatable offset upper bound",
        phase="compile",
        platform="tpu",
    ),
    rule(
        "SparseCore memory",
        r"Memory reservation exceeds the total memory size which is only",
        phase="compile",
        platform="tpu",
    ),
    rule(
        "SparseCore scoped memory",
        r"SparseCore async scoped VMEM allocation \(<requested>\) exceeds limit \(<limit>\)",
        phase="compile",
        platform="tpu",
    ),
    rule(
        "SparseCore row pointers",
        r"would exceed available \w{2,12} Smem \(<requested> > <limit>\)",
        phase="compile",
        platform="tpu",
    ),
    rule(
        "high-water mark",
        r"(?:TileSpmem|Spmem|Smem|Vmem) high-water mark exceeds memory capacity",
        phase="compile",
        platform="tpu",
    ),
    rule(
        "program",
        r"\b[Ee]xceeded (?:hbm|vmem|smem|cmem|sflag) capacity by [\d.]{1,20}\s{0,40}\w{0,5}",
        phase="compile",
        platform="tpu",
        vague=True,
    ),
    rule("core's memory", r"\bran out of (?:Smem|Vmem|Spmem|TileSpmem)\b", phase="compile", platform="tpu"),
    rule("core's memory", r"\bhigh-Smem usage exceeds Smem capacity", phase="compile", platform="tpu"),
    rule("core's memory", r"[\"'`] exceeds [VSC]MEM capacity\b", phase="compile", platform="tpu"),
    rule(
        "core's memory",
        r"\b(?:[Mm]ax buffer size|[Oo]perand) does not fit in (?:[Tt]ile)?[Ss]pmem",
        phase="compile",
        platform="tpu",
    ),
    # Memory space assignment: what is pinned to the core's memory is more than the core has.
    rule(
        "core's memory",
        r"requires allocation in the alternate memory, which could not be satisfied",
        phase="compile",
        platform="tpu",
    ),
    # A kernel whose numbers were cut off, or a memory that is named alone.
    rule("memory space", r"Ran out of memory in memory space \w{2,12}", phase="compile", platform="tpu", vague=True),
    rule(
        "memory",
        r"CompileTime(?:(?:Hbm|ScopedVmem|\w{2,20})Oom|SparseCoreAllocationFailure)\b",
        phase="compile",
        platform="tpu",
        vague=True,
    ),
)

RUN: tuple[Rule, ...] = (
    # E0101, ReserveBottomOfMemory: a program's own memory, before it runs.
    rule(
        "program's memory",
        rf"Attempting to reserve <requested> at the \w{{2,12}} of memory\.?{_REFUSED}"
        r"(?: There are <free> free, [\d.]{1,20}\s{0,40}\w{0,5} reserved,? and <largest> reservable)?",
        phase="run",
        platform="tpu",
    ),
    # E0100, best_fit_allocator.cc: a buffer; three wordings of the largest hole.
    rule(
        "buffer",
        r"Attempting to allocate <requested>\.?(?= (?:That was not|There (?:are|is)))"
        rf"{_REFUSED}(?: There (?:are|is) <free> free"
        r"(?:\.? (?:Due to fragmentation, the|The) largest contiguous region of free memory is <largest>)?)?",
        phase="run",
        platform="tpu",
    ),
    # The runtime before it: what could be had and what was free.
    rule(
        "buffer",
        r"Could not allocate <requested> (?:bytes )?in memory \w{3,30};"
        r" <largest> (?:bytes )?allocatable, <free> (?:bytes )?available",
        phase="run",
        platform="tpu",
    ),
    rule("embedding", r"TPU embedding: out of memory allocating <requested>", phase="run", platform="tpu"),
    # What stands before either of the two, where the rest was cut off.
    rule(
        "program's memory",
        r"RESOURCE_EXHAUSTED: Error loading program",
        phase="run",
        platform="tpu",
        vague=True,
    ),
    rule("buffer", r"RESOURCE_EXHAUSTED: Error allocating device buffer", phase="run", platform="tpu", vague=True),
    rule("memory", r"Runtime(?:Buffer|Program)AllocationFailure\b", phase="run", platform="tpu", vague=True),
)
