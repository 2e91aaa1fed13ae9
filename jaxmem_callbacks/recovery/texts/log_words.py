"""A failure that a log tells, in words: its sentence, why it did not fit, and what can be tried. A record enters, text leaves."""

from __future__ import annotations

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.oom import OomCause, OomFacts, OomLog, PoolDump
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.recovery.texts.causes import cause_of, free_words, is_too_large, room_of

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
    return f"{who} {_asked(facts)}{where.get(facts.platform or '', '')}{when}; {_free(facts, log.pool)}: {why(log)[1]}."


def why(log: OomLog) -> tuple[OomCause, str]:
    """The cause, and the words for it."""
    return cause_of(log.facts.requested_bytes, log.facts, room_of(log.facts, log.pool))


def _asked(facts: OomFacts) -> str:
    if facts.requested_bytes is not None:
        return f"asked for {format_bytes(facts.requested_bytes)}"
    if is_too_large(facts):
        return f"needs {format_bytes(facts.used_bytes)}"
    return "asked for more memory than it got"


def _free(facts: OomFacts, pool: PoolDump | None) -> str:
    room = room_of(facts, pool)
    if room.free_bytes is not None and not is_too_large(facts):
        return free_words(room.free_bytes, room.largest_bytes, facts)
    if room.left_bytes is not None and facts.phase != "compile":
        return f"{format_bytes(room.left_bytes)} were {'left of the limit' if facts.used_bytes else 'free'}"
    if facts.limit_bytes is not None:
        return f"there are {format_bytes(facts.limit_bytes)} in all"
    return "what was free is unknown, because the log does not say"


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
            advise("step.made", arguments=f"{name}, {advise('train.policy', said=_FULL)}"),
        ),
        (
            "The same batch in two microbatches",
            advise("step.made", arguments=f"{name}, {advise('train.policy', said='microbatches=2')}"),
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
        f"{advise('memory.environment', preset='gpu_preallocate')}  # before JAX starts; jaxmem doctor tells what holds",
    )
    less = (
        "Leave more of the device to CUDA, NCCL and kernels, whose memory lies outside JAX's pool",
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
