"""Presets: a policy, settings of the monitor, the environment and recovery."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jaxmem_callbacks.records.errors import EnvironmentSettingError
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.units import GIB

LEAST_GROWTH_STEPS = 10
CUDA_ALLOCATORS = ("cuda_async", "vmm")  # compiled for NVIDIA only


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorSettings:
    """What ``MemoryMonitor`` does.

    Attributes:
        every_steps: Allocator statistics are read at every N-th step (on the training thread; microseconds).
        window_s: Seconds that one TensorBoard point covers (minimum, mean and maximum of the readings in it).
        scan_s: Seconds between readings of live arrays, on the monitor's own thread, as all that follow but the heap map.
        host_s: Seconds between readings of the process's resident memory; null for as often as live arrays are read.
        driver_s: Seconds between questions to NVIDIA's driver.
        heap_map_s: Seconds between heap maps, read on the training thread (about 10 microseconds an array); one more at the end.
        figure_s: Seconds between drawings of memory over time and tables of the latest values; both also at the end. In a long
            run a fiftieth of it so far, where that is longer, as for heap maps.
        processes_s: Seconds between two exchanges of figures among the processes of a run, of which process 0 writes the lowest,
            mean and highest; null for none. No collective: through the store of ``jax.distributed``.
        trace_steps: Calls, from the first on, over which what is allocated and freed is recorded for ``jaxmem simulate``, on the
            training thread (a microsecond an array and ten for each new one, at every such call); 0 for none.
        limit_bytes: A limit to judge against where the platform reports none, or a tighter one than it reports; bytes.
        near_oom_headroom: Near-OOM begins when free memory falls under this share of the limit,
        near_oom_steps: or when what is held grows so that it meets the limit within so many steps.
        near_oom_profiles: Device memory profiles, at most, that a process keeps in its folder, one a near-OOM event; 0 for none.
        fragmentation_share: A fragmentation event begins when this share of the free pool is outside the largest free block.
        fragmentation_min_bytes: and when at least so many bytes of the pool are free, so that an almost full pool is no event.
        growth_steps: Growth is what goes on for so many steps at least.
        growth_min_bytes: Growth of live arrays begins when they grew by so many bytes, each array counting as a KiB at least,
        growth_min_arrays: or by so many arrays, whatever their size; null judges by bytes alone.
        replication_min_bytes: Arrays from this size on are to be split over a mesh where their like are.
        imbalance_share: An imbalance begins when a device of a mesh holds less than the fullest by this share,
        imbalance_min_bytes: and by at least so many bytes.
        tensorboard: Write TensorBoard scalars, texts and figures.
        jsonl: Write every reading and event as JSON lines.
        jsonl_part_bytes: A file of JSON lines that would grow over this size becomes a numbered part beside the next one, and
            stays; null for one file.
        on_error: ``warn`` switches a failing part of the monitor off with one line on stderr; ``raise`` is for tests.
    """

    every_steps: int = 1
    window_s: float = 1.0
    scan_s: float = 1.0
    host_s: float | None = None
    driver_s: float = 5.0
    heap_map_s: float = 600.0
    figure_s: float = 600.0
    processes_s: float | None = None
    trace_steps: int = 0
    limit_bytes: int | None = None
    near_oom_headroom: float = 0.05
    near_oom_steps: int = 1000
    near_oom_profiles: int = 0
    fragmentation_share: float = 0.5
    fragmentation_min_bytes: int = 64 * 2**20
    growth_steps: int = 400
    growth_min_bytes: int = 64 * 2**20
    growth_min_arrays: int | None = None
    replication_min_bytes: int = 64 * 2**20
    imbalance_share: float = 0.3
    imbalance_min_bytes: int = 256 * 2**20
    tensorboard: bool = True
    jsonl: bool = True
    jsonl_part_bytes: int | None = 256 * 2**20
    on_error: Literal["warn", "raise"] = "warn"


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSettings:
    """What ``jm.apply_environment`` sets before JAX's backend starts; null leaves a setting as it is.

    Attributes:
        platform: The accelerator that this is for, which is verified after the start; null for any GPU.
        allocator: The kind of GPU allocator (``XLA_PYTHON_CLIENT_ALLOCATOR``).
        preallocate: Whether a GPU's pool is taken whole at the first allocation (``XLA_PYTHON_CLIENT_PREALLOCATE``).
        fraction: The share of a GPU's memory that the pool may have (``XLA_CLIENT_MEM_FRACTION``).
        collective_pool_bytes: A pool of its own for collectives, in whole MiB
            (``XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB``).

    Raises:
        EnvironmentSettingError: settings that the platform does not have.
    """

    platform: Literal["cuda", "rocm", "tpu"] | None = None
    allocator: Literal["default", "bfc", "cuda_async", "vmm", "platform", "address"] | None = None
    preallocate: bool | None = None
    fraction: float | None = None
    collective_pool_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.platform == "tpu" and self.of_gpus():
            msg = (
                f"platform tpu with {', '.join(self.of_gpus())}: TPUs read no such setting. Leave out one of the two: a part "
                "for GPUs, or tpu_default."
            )
            raise EnvironmentSettingError(msg)
        if self.platform == "rocm" and self.allocator in CUDA_ALLOCATORS:
            msg = (
                f"platform rocm with the allocator {self.allocator}, which exists on NVIDIA GPUs only. Write `allocator: bfc`, "
                "or leave out gpu_rocm."
            )
            raise EnvironmentSettingError(msg)

    def of_gpus(self) -> tuple[str, ...]:
        """The given settings that only GPUs have."""
        names = ("allocator", "preallocate", "fraction", "collective_pool_bytes")
        return tuple(name for name in names if getattr(self, name) is not None)


Rung = Literal["defragment", "microbatches", "remat", "save_and_exit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverySettings:
    """What ``jm.Recovery`` does when memory runs out, and how it is prepared.

    Attributes:
        ladder: The rungs from top to bottom: ``defragment``, ``microbatches`` (twice as many each time), ``remat`` (the next
            stronger policy, or the next point of a plan), ``save_and_exit``. One that does not lower the compiled need is passed
            over, and reported it.
        snapshots: Where copies of the state wait: in ``host`` memory, or on disk by ``orbax``.
        every_steps: Steps from one snapshot to the next; a failure repeats so many at most.
        buffer_bytes: Host memory for the batches since the snapshot, where no ``batch_at`` is given.
        max_microbatches: No more microbatches than this.
        agree_s: Seconds in which every process must have reported how a step went.
    """

    ladder: tuple[Rung, ...] = ("defragment", "microbatches", "remat", "save_and_exit")
    snapshots: Literal["host", "orbax"] = "host"
    every_steps: int = 100
    buffer_bytes: int = GIB
    max_microbatches: int = 64
    agree_s: float = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotCost:
    """What the snapshots of a run have cost so far.

    Attributes:
        kind: ``host`` or ``orbax``.
        taken: Their number.
        bytes: Of the last one, in this process: host memory, or what its devices hold of it on disk.
        seconds: Of the last one, in which the step waited.
        total_seconds: Of all.
        buffered_bytes: Host memory that batches since the last one take now.
    """

    kind: str
    taken: int
    bytes: int
    seconds: float
    total_seconds: float
    buffered_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryMove:
    """One time that memory ran out, and what was done.

    Attributes:
        step: The step that failed.
        rung: What the run goes on with; None where the ladder was exhausted.
        policy: The policy in words, from here on.
        from_step: The step that was repeated first; the failed one where the state was still alive.
        failed_on: Processes on which memory ran out.
        passed_over: Rungs that did not help, each with why.
        seconds: From the failure to the failed step's result.
    """

    step: int
    rung: Rung | None
    policy: str
    from_step: int
    failed_on: tuple[int, ...]
    passed_over: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryReport:
    """What ``jm.Recovery`` has done so far.

    Attributes:
        policy: The policy in force, in words.
        moves: Each time that memory ran out, oldest first.
        snapshots: What the copies of the state have cost.
    """

    policy: str
    moves: tuple[RecoveryMove, ...]
    snapshots: SnapshotCost


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """What one or several composed YAML parts ask for.

    Attributes:
        name: The parts' names joined by ``+``, such as ``donate+full_remat``.
        description: What it is for, from the YAML; the parts' descriptions joined by a space.
        policy: Applied to the step, before its first trace.
        monitor: How the run is watched.
        environment: What XLA's client is given before it starts, by ``jm.apply_environment``.
        recovery: What ``jm.Recovery`` does when memory runs out.
        said: Dotted keys that the YAML spelled out (``policy.remat``); the others are defaults.
        sources: The parts as ``jm.load_preset`` was given them, names and paths; empty where it was not asked.
    """

    name: str
    description: str = ""
    policy: StepPolicy = field(default_factory=StepPolicy)
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    recovery: RecoverySettings = field(default_factory=RecoverySettings)
    said: tuple[str, ...] = ()
    sources: tuple[str, ...] = field(default=(), compare=False)
