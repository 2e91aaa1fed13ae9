"""The cause of an out-of-memory failure as a sentence, and suggestions to try."""

from __future__ import annotations

from dataclasses import dataclass

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.oom import OomCause, OomFacts, OomLog, PoolDump
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.recovery.texts.parsing import free_in_pool


@dataclass(frozen=True, kw_only=True, slots=True)
class AvailableMemory:
    """The memory that was available to a request.

    Attributes:
        free_bytes: Free in the pool, or in a memory without one; None where unknown.
        largest_bytes: The largest piece of it.
        growth_bytes: How much the pool could still have grown; 0 where it cannot grow, None where unknown.
        left_bytes: Limit less use: in the pool or not.
        later: Whether this was seen after the failure, when more may be free than was then.
    """

    free_bytes: int | None = None
    largest_bytes: int | None = None
    growth_bytes: int | None = None
    left_bytes: int | None = None
    later: bool = False


def available_memory(facts: OomFacts, pool: PoolDump | None = None) -> AvailableMemory:
    """The available memory by a text and the pool's dump beside it."""
    limit, used = facts.limit_bytes, facts.used_bytes
    whole = facts.compacted_bytes if facts.compacted_bytes is not None else facts.free_bytes
    left = limit - used if limit is not None and used is not None and limit >= used else None
    if pool is not None:
        growth = max(limit - pool.pool_bytes, 0) if limit is not None else None
        return AvailableMemory(
            free_bytes=pool.free_bytes, largest_bytes=pool.largest_free_bytes, growth_bytes=growth, left_bytes=left
        )
    if facts.pool_bytes is not None:
        growth = max(limit - facts.pool_bytes, 0) if limit is not None else None
        return AvailableMemory(
            free_bytes=free_in_pool(facts), largest_bytes=facts.largest_free_bytes, growth_bytes=growth, left_bytes=left
        )
    if (
        facts.platform == "gpu"
    ):  # what a driver counts as free is no pool's; a limit alone does not show what the pool holds
        return AvailableMemory(left_bytes=left if left is not None else facts.free_bytes)
    return AvailableMemory(
        free_bytes=whole,
        largest_bytes=facts.largest_free_bytes,
        growth_bytes=0,
        left_bytes=left if left is not None else whole,
    )


def free_words(free: int, largest: int | None, facts: OomFacts) -> str:
    """What was free, and the largest piece of it."""
    piece = "" if largest is None else f", {format_bytes(largest)} in one piece"
    return f"{format_bytes(free)} were {_free(facts)}{piece}"


def _free(facts: OomFacts) -> str:
    return "free" if facts.compacted_bytes is None else "free and not reserved"


def is_too_large(facts: OomFacts) -> bool:
    """Whether a whole program needs more than there is; as printed both may be the same, such as 1.00M of 1.00M."""
    used, limit = facts.used_bytes, facts.limit_bytes
    return used is not None and limit is not None and (used > limit or (used == limit and facts.phase != "run"))


def cause_of(requested: int | None, facts: OomFacts, available: AvailableMemory) -> tuple[OomCause, str]:
    """The cause, and the rest of a sentence about it.

    Args:
        requested: Bytes of the one request.
        facts: What the failure states.
        available: The memory that was available to it.
    """
    if facts.fragmentation or (requested is not None and _is_in_pieces(requested, available)):
        return "fragmentation", "it did not fit because of fragmentation, since there was enough, but not in one piece"
    too_small = _limit_was_too_small(requested, facts, available)
    if too_small:
        return "capacity", f"it did not fit for lack of capacity, since {too_small}"
    stopped = None if requested is None else _growing_stopped(requested, available)
    if stopped is not None:
        return stopped
    if facts.driver_refused:
        return "refused", "it did not fit because the GPU's driver refused more, so that the device itself was full"
    if requested is None:
        return "unknown", "why it did not fit is unknown, because the size of the request is not stated"
    if available.later and available.left_bytes is not None:
        why = "more is free now, after the failure, than was asked for"
    elif available.free_bytes is not None and available.growth_bytes is None:
        why = "whether the pool could still grow is not stated"
    else:
        why = f"what {'was free' if available.left_bytes is None else 'the pool itself had free'} is not stated"
    return "unknown", f"why it did not fit is unknown, because {why}"


def _is_in_pieces(requested: int, available: AvailableMemory) -> bool:
    free, largest = available.free_bytes, available.largest_bytes
    return free is not None and largest is not None and largest < requested <= free


def _limit_was_too_small(requested: int | None, facts: OomFacts, available: AvailableMemory) -> str:
    """By which figures, in words; empty where it was not."""
    if is_too_large(facts):
        return "the whole program is larger than the limit"
    if requested is None:
        return ""
    if facts.limit_bytes is not None and requested > facts.limit_bytes:
        return "it alone is larger than the limit"
    left = available.left_bytes
    if available.free_bytes is not None:  # a pool whose growth nobody knows may have had enough
        left = None if available.growth_bytes is None else available.free_bytes + available.growth_bytes
    if left is None or requested <= left:
        return ""
    return f"more was asked for than was {'there' if available.later else _free(facts)}"


def _growing_stopped(requested: int, available: AvailableMemory) -> tuple[OomCause, str] | None:
    """What it was where a pool could still grow: the device gave no more, or no one piece was enough."""
    free, growth = available.free_bytes, available.growth_bytes
    if free is None or not growth or requested <= free:
        return None
    more = f"the pool could still grow by {format_bytes(growth)}"
    if requested <= growth:
        why = f"it did not fit because the device had no more to give: {more}, so that something else holds the rest"
        return "refused", why
    also = f"neither that nor the {format_bytes(free)} free in it was enough alone"
    return "growth", f"it did not fit in one piece, since {more}, and {also}"


ELSEWHERE = (
    "Does something else hold memory of the GPU: another process, or PyTorch, TensorFlow or CuPy in this one? nvidia-smi lists "
    "the processes"
)
_FULL = 'remat="full"'
_KERNEL_BYTES = 128 * 2**20
"""A TPU core's VMEM is no larger, and every HBM is."""


def sentence(log: OomLog) -> str:
    """What asked for how much, what was free, and why it did not fit."""
    facts = log.facts
    who = f"The program {facts.program}" if facts.program else "An allocation of a program that the log does not name"
    where = {"gpu": " on the GPU", "tpu": " on the TPU", "cpu": " on the CPU", "host": " in the host's memory"}
    when = " while it was compiled" if facts.phase == "compile" else ""
    return f"{who} {_asked(facts)}{where.get(facts.platform or '', '')}{when}; {_free_words(facts, log.pool)}: {why(log)[1]}."


def why(log: OomLog) -> tuple[OomCause, str]:
    """The cause, and the words for it."""
    return cause_of(log.facts.requested_bytes, log.facts, available_memory(log.facts, log.pool))


def _asked(facts: OomFacts) -> str:
    if facts.requested_bytes is not None:
        return f"asked for {format_bytes(facts.requested_bytes)}"
    if is_too_large(facts):
        return f"needs {format_bytes(facts.used_bytes)}"
    return "asked for more memory than it got"


def _free_words(facts: OomFacts, pool: PoolDump | None) -> str:
    available = available_memory(facts, pool)
    if available.free_bytes is not None and not is_too_large(facts):
        return free_words(available.free_bytes, available.largest_bytes, facts)
    if available.left_bytes is not None and facts.phase != "compile":
        return f"{format_bytes(available.left_bytes)} were {'left of the limit' if facts.used_bytes else 'free'}"
    if facts.limit_bytes is not None:
        return f"there are {format_bytes(facts.limit_bytes)} in all"
    return "what was free is unknown, because the log does not state it"


def tries(log: OomLog) -> list[tuple[str, str]]:
    """What can be tried, the likeliest first: words, and a line to paste, or an empty one. None of them is compiled."""
    facts = log.facts
    cause = why(log)[0]
    if facts.platform == "tpu" and facts.limit_bytes is not None and facts.limit_bytes <= _KERNEL_BYTES:
        return [
            (
                "Does the kernel hold less at once with smaller blocks?",
                "",
            ),
            (
                "Does the core have more memory than vmem_limit_bytes of pltpu.CompilerParams gives the kernel?",
                "",
            ),
        ]
    if facts.platform == "host":
        return host_tries(facts)
    found = [*(_fragmented(facts) if cause == "fragmentation" else []), *(_tuning(facts)), *_step(facts)]
    settings = _settings(cause, pool=bool(facts.requested_bytes)) if facts.platform == "gpu" else []
    # Where the pool and the device are what stands in the way, a smaller step is not what is needed first.
    return [*settings, *found] if cause in ("growth", "refused") else [*found, *settings]


def _step(facts: OomFacts) -> list[tuple[str, str]]:
    name = facts.program.removeprefix("jit_") if facts.program and facts.program.startswith("jit_") else "train_step"
    name = name if name.isidentifier() and not name.startswith("_") else "train_step"
    target = {"tpu": "v5e:2x2", "gpu": "h100_sxm"}.get(facts.platform or "", "cpu")
    return [
        (
            "Ask the compiler which policy fits, without the hardware",
            advise("oom.plan", call=f'{name}, state, batch, target="{target}"'),
        ),
        (
            "Keep fewer activations: compute them again",
            advise("step.made", arguments=f"{name}, {advise('train.policy', settings=_FULL)}"),
        ),
        (
            "The same batch in two microbatches",
            advise("step.made", arguments=f"{name}, {advise('train.policy', settings='microbatches=2')}"),
        ),
        (
            "See what the step holds, and what is not donated",
            advise("oom.look", step=name),
        ),
    ]


def _fragmented(facts: OomFacts) -> list[tuple[str, str]]:
    if facts.platform != "gpu":
        return []  # a TPU's runtime moves buffers by itself
    return [
        ("Move what lives long together, between steps", advise("memory.defragment")),
        _own_pool(),
    ]


def _own_pool() -> tuple[str, str]:
    line = f"{advise('memory.environment', preset='gpu_async')}  # before JAX starts"
    return "CUDA's own pool maps free pieces together", line


def _tuning(facts: OomFacts) -> list[tuple[str, str]]:
    if facts.platform != "gpu" or facts.phase != "compile":
        return []
    return [
        (
            "Does choosing the fastest kernel take the memory? With xla_gpu_autotune_level=0 in XLA_FLAGS nothing is measured",
            "",
        )
    ]


def _settings(cause: OomCause, *, pool: bool) -> list[tuple[str, str]]:
    more = (
        "Nine tenths of the device for JAX, in one piece from the start",
        f"{advise('memory.environment', preset='gpu_preallocate')}  # before JAX starts; jaxmem doctor shows what holds",
    )
    less = (
        "Leave more of the device to CUDA, NCCL and kernels, whose memory is outside JAX's pool",
        advise("environment.set", name="XLA_CLIENT_MEM_FRACTION", value="0.6"),
    )
    if cause == "refused":
        return [(ELSEWHERE, "")] if pool else [less, (ELSEWHERE, "")]
    if cause == "growth":
        return [more, _own_pool()]
    return [more] if pool else [less] if cause != "fragmentation" else [less, more]


def host_tries(facts: OomFacts) -> list[tuple[str, str]]:
    """What can be tried where the host's memory ran out: words, and a line to paste."""
    found = [("Does the loader hold more batches on the host than it needs?", "")]
    if facts.phase == "run":
        found.append(
            (
                "Do offloaded arrays need more than 64 GiB of pinned memory? XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB is another limit",
                "",
            )
        )
    return found
