"""What XLA's CPU client, pinned memory, NumPy, Python and the system print when a host's memory runs out: a table of wordings."""

from __future__ import annotations

from jaxmem_callbacks.recovery.texts.rule import Rule, rule

CPU: tuple[Rule, ...] = (
    # cpu_device_memory.cc: every buffer and every temporary of the CPU client.
    rule("CPU client", r"\bOut of memory allocating <requested>", phase="run", platform="cpu"),
    rule(
        "tensor",
        r"OOM when allocating tensor with shape.{0,400}?device:CPU.{0,60}?by allocator (?P<allocator>[\w.-]{1,80})",
        phase="run",
        platform="cpu",
    ),
    rule("CPU memory", r"[Ff]ailed to allocate <requested> of aligned host memory", phase="run", platform="cpu"),
)

HOST: tuple[Rule, ...] = (
    # cuda_executor.cc HostAllocate: pinned memory beside the GPU.
    rule("pinned memory", r"failed to alloc(?:ate)? <requested> (?:bytes )?(?:on|of) host\b", platform="host"),
    # Also where it is bound to the memory beside one processor.
    rule(
        "pinned memory",
        r"[Ff]ailed to allocate <requested> \(<requested_exact>\) of"
        r" (?:pinned host memory|host memory(?: pinned to NUMA node -?\d{1,5})?|unified memory)",
        platform="host",
    ),
    # stream_executor_allocator.cc, which left a word out in 2024.
    rule(
        "pinned memory",
        r"[Cc]ould not allocate pinned host(?: memory)? of size: <requested>",
        platform="host",
        strength="log",
    ),
    # The GPU client's staging buffers for transfers.
    rule(
        "staging buffer",
        r"[Ff]ailed to allocate a (?P<requested>\d{1,19})-byte"
        r" (?:pinned host staging (?:buffer|chunk)|buffer from the custom host)",
        phase="run",
        platform="host",
    ),
    rule(
        "transfer buffer",
        r"[Ff]ailed to allocate <requested> for host offloading transfer buffer",
        phase="run",
        platform="host",
    ),
    rule(
        "transfer buffer",
        r"(?:[Ff]ailed to allocate host memory for transfer buffer|OOM in pinned host allocator)",
        phase="run",
        platform="host",
    ),
    # common_pjrt_client.cc, transfers of arrays and literals; libtpu's transfer buffers.
    rule("staging buffer", r"[Ff]ailed to allocate staging buffer of size <requested>", phase="run", platform="host"),
    rule("transfer buffer", r"[Ff]ailed to allocate transfer buffer: ", phase="run", platform="host"),
    rule("literal", r"[Ff]ailed to allocate buffer for Literal\b", platform="host"),
    # NCCL's alloc.h, pinned and plain.
    rule("collective", r"Failed to (?:CUDA host alloc|malloc) <requested>", platform="host"),
    # NumPy's _ArrayMemoryError, which had no size until 1.19, and Python's own.
    rule("NumPy array", r"[Uu]nable to allocate (?:<requested> for an )?array with shape", platform="host"),
    rule("C++ allocation", r"\bstd::bad_alloc\b", platform="host", vague=True),
    rule("Python object", r"(?:^|(?<=\n))(?:\w{1,40}\.){0,5}MemoryError(?=:|\s|$)", platform="host", vague=True),
    # c10's CPU allocator, and its files mapped to memory.
    rule(
        "PyTorch",
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate <requested>",
        platform="host",
    ),
    rule("PyTorch", r"unable to mmap <requested> from file [^\n]{0,400}?: Cannot allocate memory", platform="host"),
    # TensorFlow's kernels, where the rest was cut off, and its eager operations: neither names the memory.
    rule("tensor", r"OOM when allocating (?:temporary )?tensor\b", phase="run"),
    rule("tensor", r"failed to allocate memory \[Op:", phase="run"),
    # ENOMEM, as Python words it; and LLVM, which then ends the process, or fails to compile for the CPU.
    rule("system call", r"\[Errno 12\] (?:Cannot allocate memory|Not enough space)", platform="host"),
    rule("compiler", r"LLVM ERROR: (?:out of memory|Unable to allocate section memory)", platform="host"),
    rule(
        "compiler",
        r"Failed to materialize symbols: .{0,600}?Cannot allocate memory",
        phase="compile",
        platform="host",
    ),
    rule("OpenBLAS", r"\bOpenBLAS error: Memory allocation still failed after", platform="host"),
    rule("Go", r"\bruntime: out of memory\b", platform="host"),
    rule("oneAPI", r"\b(?:UR_RESULT|ZE_RESULT|PI)_ERROR_OUT_OF_HOST_MEMORY\b", platform="host", strength="log"),
    # Other libraries of a data pipeline: Arrow's pools, Rust's allocator (polars, tokenizers), and pandas' reader.
    rule("Arrow", r"\b(?:m|re)alloc of size <requested> failed", platform="host"),
    rule("Rust", r"\bmemory allocation of <requested> failed", platform="host"),
    rule("pandas", r"Error tokenizing data\. C error: out of memory", platform="host"),
    # A Java heap has a bound of its own; its other wording is about threads.
    rule(
        "Java",
        r"\bjava\.lang\.OutOfMemoryError(?=: |\s|$)",
        platform="host",
        strength="log",
        unless=r": unable to create (?:new )?native thread",
        vague=True,
    ),
    # tcmalloc, Google's and gperftools'; a large allocation that is printed with an address succeeded.
    rule("tcmalloc", r"tcmalloc: large alloc <requested> == (?:\(nil\)|0x0+\b)", platform="host", strength="log"),
    rule("tcmalloc", r"tcmalloc: allocation failed <requested>", platform="host", strength="log"),
    rule(
        "tcmalloc", r"tcmalloc\w{0,20}\.cc:\d{1,6}\] (?:\(\d{1,6}\) )?Unable to allocate <requested>", platform="host"
    ),
    rule("tcmalloc", r"Out of memory trying to allocate internal tcmalloc data", platform="host"),
    # cuDNN's host memory.
    rule("library handle", r"_HOST_ALLOCATION_FAILED\b", platform="host", strength="log"),
    # Batch systems: PBS and Torque, Grid Engine, LSF, YARN. Of what they bound by name only memory is meant here.
    rule(
        "killed",
        # OpenPBS writes kb, Torque bytes without a unit.
        r"\bjob killed: p?v?mem (?:job total )?(?P<used>\d{1,19}(?:\s{0,40}[kKMG])?)[bB]? exceeded limit"
        r" (?P<limit>\d{1,19}(?:\s{0,40}[kKMG](?=[bB]))?)",
        platform="host",
    ),
    rule(
        "killed",
        r"[Ee]xceed(?:s|ed) job (?:\w{1,12} )?hard limit \"[hs]_(?:vmem|rss|data)\" of queue \"[^\"\s]{1,200}\""
        r" \((?P<used>\d{1,20})(?:\.\d{1,9})? > limit:(?P<limit>\d{1,20})(?:\.\d{1,9})?\)",
        platform="host",
    ),
    rule("killed", r"\bTERM_(?:MEMLIMIT|SWAP): job killed after reaching", platform="host"),
    rule("killed", r"\b[Cc]group (?:mem|memory|memsw) limit exceeded: Killed process \d{1,10}", platform="host"),
    rule(
        "killed",
        r"(?:running beyond physical memory limits\. Current usage:|killed by YARN for exceeding(?: physical)? memory limits\.)"
        r" <used> of <limit> physical memory used",
        platform="host",
    ),
    # The kernel's killer, and those of Slurm, Kubernetes, Docker and Ray.
    rule("killed", r"Out of memory: Kill(?:ed)? process \d{1,10}", platform="host"),
    rule(
        "killed",
        r"(?:[Dd]etected [1-9]\d{0,5} oom[-_]kill event|oom_reaper: reaped process"
        r"|oom-kill:constraint=|Memory cgroup out of memory|\binvoked oom-killer:"
        r"|[Rr]eason\W{1,40}OOMKilled|OOMKilled\W{1,40}true|\d/\d{1,3}\s{1,40}OOMKilled|\b(?:Job)?State(?:: |=)OUT_OF_MEMORY"
        r"|[Ee]xceeded (?:step|job) memory limit(?!\s{1,40}of\b)"  # of a quality of service: the job never began
        r"|exceeded memory limit \(\d{1,19} > \d{1,19}\), being killed"
        r"|node running low on memory|\b[1-9]\d{0,5} Workers?(?: \([^()]{1,60}\))? killed due to memory pressure \(OOM\))",
        platform="host",
    ),
    # The same in a sentence.
    rule(
        "killed",
        r"(?<!\b[Nn]o\s)\b(?:[Cc]ontainer|[Pp]od|[Tt]ask|[Pp]rocess)\b[^.;?]{0,120}?\s(?:was|were|has been|have been|got)"
        r" (?:OOM(?:-| )?[Kk]illed\b|killed by the (?:kernel )?(?:OOM|oom)(?:-| )[Kk]iller)",
        platform="host",
    ),
    rule("evicted", r"\b[Tt]he node was low on resource: memory\b", platform="host"),
    rule("killed", r"\bFailed with result 'oom-kill'", platform="host"),
    rule("killed", r"\bcontainer oom [0-9a-f]{12,64}\b", platform="host"),  # of `docker events`
    # Slurm's srun and its tables, where states are cut to a column's width.
    rule("killed", r"srun: error: [^\s:]{1,200}: tasks? [\d,\[\]-]{1,80}: Out Of Memory", platform="host"),
    rule(
        "killed",
        r"(?:\bOUT_OF_ME\+|\bOUT_OF_MEMORY \d{1,3}:\d{1,3}\b"
        r"|\b\d{1,12}(?:_\d{1,9})?\.(?:batch|extern|\d{1,6}) (?:[\w.-]{1,40} ){0,5}?OUT_OF_MEMORY\b)",
        platform="host",
    ),
    # The kernel's line after the one with the reason, and systemd's own killer.
    rule("killed", r"\bKilled process \d{1,10} \([^()\n]{1,80}\),? (?:UID \d{1,10},? )?total-vm:", platform="host"),
    rule("killed", r"\bKilled [^\s]{1,300} due to memory (?:pressure for|used)\b", platform="host"),
)

FALLBACKS: tuple[Rule, ...] = (
    # ENOMEM beside whatever asked: `fork: Cannot allocate memory`, NCCL's `Call to mmap failed : Cannot allocate memory`.
    rule("system call", r"(?::\s{0,40}|\bcode 12 \()Cannot allocate memory\b", platform="host", vague=True),
    # A status that states no more than this. A resource other than memory does not read like it.
    rule(
        "status",
        r"(?:RESOURCE_EXHAUSTED|[Rr]esource exhausted):[^\n]{0,300}?"
        r"\b(?:[Oo]ut of (?:host |device )?memory\b(?!\s+quota)|OOM\b(?!\s(?:score|killer)))",
        unless=r".{0,200}?[Cc]ontinuing with (?:the )?(?:next|other|remaining) ",
        vague=True,
    ),
)
