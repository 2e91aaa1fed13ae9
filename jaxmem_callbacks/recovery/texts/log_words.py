"""A failure that a log tells, in words: its sentence, why it did not fit, and what can be tried. A record enters, text leaves."""

from __future__ import annotations

from jaxmem_callbacks.records.oom import OomFacts
from jaxmem_callbacks.records.oom_log import OomCause, OomLog, PoolDump
from jaxmem_callbacks.records.units import format_bytes

_KERNEL_BYTES = 128 * 2**20
"""A TPU core's VMEM is no larger, and every HBM is."""


def sentence(log: OomLog) -> str:
    """What asked for how much, what was free, and why it did not fit."""
    facts = log.facts
    who = f"The program {facts.program}" if facts.program else "An allocation of a program that the log does not name"
    where = {"gpu": " on the GPU", "tpu": " on the TPU", "cpu": " on the CPU", "host": " in the host's memory"}
    when = " while it was compiled" if facts.phase == "compile" else ""
    return f"{who} {_asked(facts)}{where.get(facts.platform or '', '')}{when}; {_free(facts, log.pool)}: {why(log)[1]}."


def why(log: OomLog) -> tuple[OomCause, str]:
    """Capacity or fragmentation, and by what; or unknown, because."""
    facts, pool = log.facts, log.pool
    asked, free = facts.requested_bytes, _free_bytes(facts, pool)
    if facts.fragmentation or (asked is not None and pool is not None and _holes_would_do(asked, pool)):
        return "fragmentation", "it did not fit because of fragmentation, since there was enough, but not in one piece"
    if asked is not None and free is not None and asked > free:
        return "capacity", "it did not fit for lack of capacity, since more was asked for than was free"
    if asked is not None and facts.limit_bytes is not None and asked > facts.limit_bytes:
        return "capacity", "it did not fit for lack of capacity, since it alone is larger than the limit"
    if facts.used_bytes is not None and facts.limit_bytes is not None and facts.used_bytes >= facts.limit_bytes:
        return "capacity", "it did not fit for lack of capacity, since the whole program is larger than the limit"
    if asked is None:
        return "unknown", "why it did not fit is unknown, because the log does not say how much was asked for"
    return "unknown", "capacity or fragmentation is unknown, because the log does not say what was free"


def _holes_would_do(asked: int, pool: PoolDump) -> bool:
    return pool.largest_free_bytes < asked <= pool.free_bytes


def _asked(facts: OomFacts) -> str:
    if facts.requested_bytes is not None:
        return f"asked for {format_bytes(facts.requested_bytes)}"
    if facts.used_bytes is not None and facts.limit_bytes is not None and facts.used_bytes >= facts.limit_bytes:
        return f"needs {format_bytes(facts.used_bytes)}"
    return "asked for more memory than it got"


def _free_bytes(facts: OomFacts, pool: PoolDump | None) -> int | None:
    if facts.free_bytes is not None:
        return facts.free_bytes
    if pool is not None:
        return pool.free_bytes
    if facts.limit_bytes is not None and facts.used_bytes is not None and facts.phase != "compile":
        left = facts.limit_bytes - facts.used_bytes
        return left if left >= 0 else None  # of a batch system, which ends what took more
    return None


def _free(facts: OomFacts, pool: PoolDump | None) -> str:
    free = _free_bytes(facts, pool)
    largest = facts.largest_free_bytes
    if largest is None and pool is not None:
        largest = pool.largest_free_bytes
    if free is not None:
        return f"{format_bytes(free)} were free" + (
            f", {format_bytes(largest)} in one piece" if largest is not None else ""
        )
    if facts.limit_bytes is not None:
        return f"there are {format_bytes(facts.limit_bytes)} in all"
    return "what was free is unknown, because the log does not say"


def tries(log: OomLog) -> list[tuple[str, str]]:
    """What can be tried, the likeliest first: words, and a line to paste. None of them is compiled."""
    facts = log.facts
    cause = why(log)[0]
    if facts.platform == "tpu" and facts.limit_bytes is not None and facts.limit_bytes <= _KERNEL_BYTES:
        return [
            (
                "Let the kernel hold less at once: smaller blocks",
                "pl.BlockSpec((128, 512), ...)  # in place of its blocks",
            ),
            (
                "Or give it more of the core's memory",
                "compiler_params=pltpu.CompilerParams(vmem_limit_bytes=64 * 2**20)",
            ),
        ]
    if facts.platform == "host":
        return host_tries(facts)
    found = [*(_fragmented(facts) if cause == "fragmentation" else []), *(_tuning(facts)), *_step(facts)]
    if facts.platform == "gpu":
        found += _settings(cause, pool=bool(facts.requested_bytes))
    return found


def _step(facts: OomFacts) -> list[tuple[str, str]]:
    name = facts.program.removeprefix("jit_") if facts.program and facts.program.startswith("jit_") else "train_step"
    name = name if name.isidentifier() and not name.startswith("_") else "train_step"
    target = {"tpu": "v5e:2x2", "gpu": "h100_sxm"}.get(facts.platform or "", "cpu")
    return [
        (
            "Ask the compiler which policy fits, without the hardware",
            f'print(jm.plan({name}, state, batch, target="{target}"))',
        ),
        (
            "Keep fewer activations: compute them again",
            f'step = jm.jit_step({name}, jm.StepPolicy(remat="full"))',
        ),
        ("The same batch in two microbatches", f"step = jm.jit_step({name}, jm.StepPolicy(microbatches=2))"),
        (
            "See what the step holds, and what is not donated",
            f"print(jm.step_memory(jm.jit_step({name}), state, batch).peak())",
        ),
    ]


def _fragmented(facts: OomFacts) -> list[tuple[str, str]]:
    if facts.platform != "gpu":
        return []  # a TPU's runtime moves buffers by itself
    return [
        ("Move what lives long together, between steps", "state, report = jm.defragment(state)"),
        ("CUDA's own pool maps free pieces together", 'jm.apply_environment("gpu_async")  # before JAX starts'),
    ]


def _tuning(facts: OomFacts) -> list[tuple[str, str]]:
    if facts.platform != "gpu" or facts.phase != "compile":
        return []
    return [
        (
            "Choosing the fastest kernel takes memory of its own: choose without measuring",
            "export XLA_FLAGS=--xla_gpu_autotune_level=0",
        )
    ]


def _settings(cause: OomCause, *, pool: bool) -> list[tuple[str, str]]:
    more = (
        "Nine tenths of the device for JAX, in one piece from the start",
        'jm.apply_environment("gpu_preallocate")  # before JAX starts; jaxmem doctor tells what holds',
    )
    less = (
        "Leave more of the device to CUDA, NCCL and kernels, whose memory lies outside JAX's pool",
        "export XLA_CLIENT_MEM_FRACTION=0.6",
    )
    return [more] if pool else [less] if cause != "fragmentation" else [less, more]


def host_tries(facts: OomFacts) -> list[tuple[str, str]]:
    """What can be tried where the host's memory ran out: words, and a line to paste."""
    found = [("Hold fewer batches on the host", "batches = jm.prefetch(batches, batches=1)")]
    if facts.phase == "run":
        found.append(
            (
                "Allow more pinned memory, which offloaded arrays lie in (64 GiB unless told otherwise)",
                "export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=128",
            )
        )
    return found
