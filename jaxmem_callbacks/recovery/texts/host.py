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
    rule(
        "pinned memory",
        r"[Ff]ailed to allocate <requested> \(<requested_exact>\) of (?:pinned host memory|host memory|unified memory)",
        platform="host",
    ),
    rule(
        "pinned memory", r"could not allocate pinned host memory of size: <requested>", platform="host", strength="log"
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
    # NCCL's alloc.h, pinned and plain.
    rule("collective", r"Failed to (?:CUDA host alloc|malloc) <requested>", platform="host"),
    # NumPy's _ArrayMemoryError, which told no size until 1.19, and Python's own.
    rule("NumPy array", r"[Uu]nable to allocate (?:<requested> for an )?array with shape", platform="host"),
    rule("C++ allocation", r"\bstd::bad_alloc\b", platform="host"),
    rule("Python object", r"(?:^|(?<=\n))(?:\w{1,40}\.){0,5}MemoryError(?=:|\s|$)", platform="host", vague=True),
    # ENOMEM, as Python words it; and LLVM, which then ends the process.
    rule("system call", r"\[Errno 12\] (?:Cannot allocate memory|Not enough space)", platform="host"),
    rule("compiler", r"LLVM ERROR: out of memory", platform="host"),
    # The kernel's killer, and those of Slurm, Kubernetes and Ray.
    rule("killed", r"Out of memory: Kill(?:ed)? process \d{1,10}", platform="host"),
    rule(
        "killed",
        r"(?:[Dd]etected \d{1,6} oom[-_]kill event|oom-kill:constraint=|Memory cgroup out of memory|\binvoked oom-killer:"
        r"|[Rr]eason\W{1,40}OOMKilled|OOMKilled\W{1,40}true|\d/\d{1,3}\s{1,40}OOMKilled|\bState: OUT_OF_MEMORY"
        r"|[Ee]xceeded (?:step|job) memory limit"
        r"|exceeded memory limit \(\d{1,19} > \d{1,19}\), being killed"
        r"|node running low on memory)",
        platform="host",
    ),
)

FALLBACKS: tuple[Rule, ...] = (
    # A status that says no more than this. A resource other than memory does not read like it.
    rule(
        "status",
        r"(?:RESOURCE_EXHAUSTED|[Rr]esource exhausted):[^\n]{0,300}?\b(?:[Oo]ut of (?:host |device )?memory|OOM\b)",
        vague=True,
    ),
)
