"""A step compiled for an absent target, and its compiler's refusals."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec

import jax

from jaxmem_callbacks.programs.reading.buffer_assignment import (
    dump_options,
    figures_of_module,
    program_memory,
    user_dump_folder,
)
from jaxmem_callbacks.programs.reading.buffers import (
    Argument,
    Arguments,
    options_without_run,
    past_the_cache,
    read_peak,
)
from jaxmem_callbacks.programs.reading.hlo import Module, parse_module
from jaxmem_callbacks.programs.targets.cache import cache_entry
from jaxmem_callbacks.programs.targets.compilers import (
    compiler_versions,
    options_without_device,
    other_than_pinned,
    target_folders,
)
from jaxmem_callbacks.programs.targets.exporting import FlatProgram, PortableProgram, export_program, flatten_program
from jaxmem_callbacks.programs.targets.target import Target, of_so_many, resolve_target
from jaxmem_callbacks.programs.targets.worker import run_worker, time_limit_s, worker_environment
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import CompileError, TargetError, did_you_mean
from jaxmem_callbacks.records.peaks import UNPLACED, Buffer, Peak, with_total
from jaxmem_callbacks.records.programs import ProgramMemory
from jaxmem_callbacks.transforms.arg_roles import kind_of_path

_SIZE = r"([\d.]+)\s*([KMGT]?)i?B?"
_OUT_OF_MEMORY = (
    re.compile(rf"total memory required[^(]*\({_SIZE}\) exceeds available[^(]*\({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm", re.IGNORECASE),
)
_TEXT_LIMIT = 3000
_PLACED = re.compile(r"argument (?P<argument>\S+) of .+? device ids \[(?P<devices>[^\]]*)\]")
_NO_OPTION = re.compile(r"No such compile option: '([^']+)'")
_NEAR = 0.7
# Options on which memory depends, for the name that was meant.
_OPTIONS = (
    "xla_backend_optimization_level",
    "xla_cpu_enable_concurrency_optimized_scheduler",
    "xla_cpu_enable_fast_math",
    "xla_cpu_use_thunk_runtime",
    "xla_disable_hlo_passes",
    "xla_dump_to",
    "xla_gpu_autotune_level",
    "xla_gpu_enable_latency_hiding_scheduler",
    "xla_gpu_enable_triton_gemm",
    "xla_gpu_memory_limit_slop_factor",
    "xla_gpu_temp_buffer_use_separate_color",
    "xla_tpu_enable_latency_hiding_scheduler",
    "xla_tpu_scoped_vmem_limit_kib",
)


def refuse_unknown_option(title: str, words: str) -> None:
    """Refuse a compiler option that the compiler does not know.

    Args:
        title: What was compiled for which devices.
        words: The compiler's own.

    Raises:
        CompileError: names the option, and the nearest one that is known.
    """
    if (match := _NO_OPTION.search(words)) is None:
        return
    name = match[1]
    family = next((each for each in ("xla_cpu_", "xla_gpu_", "xla_tpu_") if name.startswith(each)), "xla_")
    # The names of a family are alike by their beginning, which does not show what is meant.
    known = [each.removeprefix(family) for each in _OPTIONS if each.startswith(family)]
    alike = did_you_mean(name.removeprefix(family), known, cutoff=_NEAR).replace("`", f"`{family}", 1)
    msg = (
        f"{title}: its compiler has no option {name!r}.{alike} It comes from the compiler_options of your "
        "jit. Expected an option of this compiler's version, without the dashes."
    )
    raise CompileError(msg)


def refuse_devices_apart(name: str, words: str) -> None:
    """Refuse a call whose arguments are on different devices.

    Args:
        name: The step.
        words: JAX's own.

    Raises:
        CompileError: which argument is where, and what to write.
    """
    if "incompatible devices" not in words:
        return
    found = list(_PLACED.finditer(words))
    placed = words.partition(" Got ")[2] or words
    msg = f"{name}: expected all arguments on the same devices, got {placed.rstrip('.')}. "
    fewest, most = (pick(found, key=_device_count, default=None) for pick in (min, max))
    if fewest and most and fewest["argument"].isidentifier() and _device_count(most) > 1:
        line = advise("devices.apart", argument=fewest["argument"], other=most["argument"])
        msg += f"Before the call, place {fewest['argument']} on all of them:\n    {line}"
    else:
        msg += "Can they be placed on one mesh, by jax.device_put, before the call?"
    raise CompileError(msg)


def _device_count(placed: re.Match[str]) -> int:
    return placed["devices"].count(",") + 1


def refused_for_memory(title: str, error: str, remark: str = "") -> tuple[int | None, int | None]:
    """Bytes that the program needs and that there are, where a compiler refused it for its memory.

    Args:
        title: What was compiled for which target.
        error: The compiler's own words.
        remark: What may be wrong with the compiler itself, for an error of another kind.

    Returns:
        Needed and available bytes; None for what is not in the text.

    Raises:
        CompileError: it is an error of another kind.
    """
    refuse_unknown_option(title, error)
    if "RESOURCE_EXHAUSTED" not in error:
        advice = (
            "Expected operations and options that it takes without a device. Find in its words below which one it does not, and "
            "leave it out or replace it: docs/targets.md, 'What cannot be compiled for an absent device', shows how."
        )
        msg = f"{title}: the compiler refused the program. {remark}{'. ' if remark else ''}{advice}\n{error[:_TEXT_LIMIT]}"
        raise CompileError(msg)
    for pattern in _OUT_OF_MEMORY:
        if match := pattern.search(error):
            return _bytes(match[1], match[2]), _bytes(match[3], match[4])
    return None, None


def _bytes(number: str, letter: str) -> int:
    return round(float(number) * 1024 ** " KMGT".index(letter.upper() or " "))


# Settings of the caller's JAX that are not the compiler's: devices and processes, what is cached, shown, checked or refused, and
# the types, which are settled in the traced program. How far machine code is optimised changes no bytes.
_NOT_THE_COMPILERS = re.compile(
    r"device|platform|backend|topology|client|cpu|cuda|rocm|oneapi|mock|distributed|host|transport|preemption|recover|share_binary"
    r"|cache|pgle|log|dump|traceback|explain|pprint|source|debug|check|guard|error|infs|nans|tracing|execution|disable_jit"
    r"|x64|prng_key|promotion|export|thread|proxy|serialization|mtls|captured|disable_most"
)
_DUMP = "dump"  # of a compile's folder
_Options = ParamSpec("_Options")


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetCompilation:
    """The answer of a target's compiler for one program.

    Attributes:
        target: The hardware.
        memory: Bytes on one device; None where the compiler refused the program for its memory (TPU).
        fits: Whether it fits into one device's memory: False where a TPU compiler refused it; on a GPU, whose compiler never
            refuses, the comparison of ``memory.step_bytes`` with the whole device memory. None where that is unknown.
        needed_bytes: What the program needs, by the refusal or by ``memory``.
        limit_bytes: What there is, by the refusal or the target.
        host_temp_bytes: Host memory that the program uses for offloaded values.
        module: The optimised program, or None where it was not asked for or not compiled.
        compile_seconds: Time in the compiler, lowering included, when it was really asked; None where it refused.
        compiler_options: Options the program was compiled with.
        compiler: Package -> version of the compiler.
        paths: Path of each array argument, such as ``params['w']``.
        kept: Which of them the program takes, in the order of its parameters; arguments that are never read are dropped.
            None for the attached CPU, where JAX does not show it.
        peak: What makes the peak, or None where it was not asked for or the compiler refused the program.
        left_out: What only reports to Python, such as `jax.debug.print`, and is not in the program that was compiled.
        warnings: What JAX warned of while lowering, such as donations that are not usable.
        refusal: The compiler's own words where it refused the program for its memory.
        cached: Whether the answer comes from the disk cache: nothing was compiled. Where the same program was compiled
            from other source lines before, or on behalf of other callers, ``hlo_text`` and ``refusal`` then hold no
            source lines; those of ``peak`` hold, or are missing where that was allowed.
    """

    target: Target
    memory: ProgramMemory | None
    fits: bool | None
    needed_bytes: int | None
    limit_bytes: int | None
    host_temp_bytes: int = 0
    module: Module | None = field(default=None, repr=False)
    compile_seconds: float | None = None
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    compiler: Mapping[str, str] = field(default_factory=dict)
    paths: tuple[str, ...] = ()
    kept: tuple[int, ...] | None = None
    peak: Peak | None = field(default=None, repr=False)
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    refusal: str | None = None
    cached: bool = False

    @property
    def hlo_text(self) -> str | None:
        """The text of the optimised program, without what `jax.export` adds to its names; None without ``module``."""
        return None if self.module is None else self.module.text

    @property
    def note_of_reports(self) -> tuple[str, ...]:
        """A sentence on what was left out; empty where nothing was."""
        if not self.left_out:
            return ()
        names = ", ".join(self.left_out)
        why = "because they only report to Python"
        return (f"Left out for {self.target.name}, {why}: {names}. What is computed for them alone is not counted.",)

    @property
    def buffers(self) -> tuple[Buffer, ...] | None:
        """The buffers of the peak, largest first, or None where it is not known."""
        return None if self.peak is None else self.peak.buffers


Compiling = Callable[[], TargetCompilation]
_Lowered = Callable[[pathlib.Path], TargetCompilation]  # given a folder for its files


def lower_for_target(  # noqa: PLR0913 - jax.jit's own options, and the target's
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str | Target,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    out_shardings: Any = None,
    compiler_options: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    want_buffers: bool = False,
    need_lines: bool = True,
    arguments: Sequence[Argument] | None = None,
    keep_hlo: bool = True,
    cache: bool = True,
) -> Compiling:
    """Lower a function for hardware that need not be there: all that is JAX's, which obeys settings of the calling thread.

    Args:
        function: Any function of pytrees, jitted or not. It is traced in this process and never run.
        args: Its arguments: arrays, NumPy arrays, numbers or ``jax.ShapeDtypeStruct``, whose ``NamedSharding`` (over any
            mesh of the right size, an ``AbstractMesh`` too) is kept. Leaves of other types are taken as constants.
        kwargs: Its keyword arguments, traced alike.
        target: A name for `resolve_target`, or what it gave.
        donate_argnums: Positions of donated arguments, as in ``jax.jit``; a jitted function's own donation does not count.
        donate_argnames: Names of donated arguments.
        static_argnums: Positions of arguments that are taken as they are.
        static_argnames: Names of such arguments.
        out_shardings: As in ``jax.jit``: a tree of shardings, a prefix of the result's tree, None where unstated.
        compiler_options: Further XLA options of this one compile.
        timeout_s: Seconds after which the compiler is ended; None for ``JAXMEM_COMPILE_TIMEOUT_S``, else 600.
        want_buffers: Also find what makes the peak; the same compile writes it.
        need_lines: Whether a peak from the disk cache that lost its source lines is no use, so that it is compiled again.
        arguments: What each array argument holds, in order; by default judged by its path.
        keep_hlo: Keep the optimised program, which can be large.
        cache: Take the answer from the disk cache where the same program was compiled before in the same way by the same
            versions, and keep it there otherwise. ``JAXMEM_CACHE_DIR`` is the folder, and ``off`` there switches it off. Not
            for the attached CPU, nor where your flags ask XLA for dumps.

    Returns:
        The compile that is left to do, in any thread; it gives the compiler's answer. A program too large for a TPU is an
        answer (``fits=False``), not an error. It raises CompileError where the compiler failed, crashed or took too long.

    Raises:
        TargetError: an unknown target, one whose compiler is not installed, or one with fewer devices than the shardings.
        CompileError: the program cannot leave this process.
    """
    where = resolve_target(target) if isinstance(target, str) else target
    flat = flatten_program(
        function,
        args,
        kwargs or {},
        donate_argnums=_several(donate_argnums),
        donate_argnames=_several(donate_argnames),
        static_argnums=_several(static_argnums),
        static_argnames=_several(static_argnames),
        out_shardings=out_shardings,
    )
    job = _Job(
        flat=flat,
        target=where,
        options=options_without_device(where.platform) | dict(compiler_options or {}),
        arguments=tuple(_described(flat) if arguments is None else arguments),
        want_buffers=want_buffers,
        need_lines=need_lines,
        keep_hlo=keep_hlo,
        cache=cache,
    )
    here = where.platform == "cpu" and not where.apart
    lowered = _lowered_here(job) if here else _lowered_there(job, timeout_s or time_limit_s())

    def compiled() -> TargetCompilation:
        with tempfile.TemporaryDirectory(prefix="jaxmem-") as place:
            try:
                return lowered(pathlib.Path(place))
            finally:
                _hand_over(pathlib.Path(place) / _DUMP, job.options)

    return compiled


def _hand_over(dump: pathlib.Path, options: Mapping[str, Any]) -> None:
    """Give the user the dumps that flags or options ask for, which the compile wrote where this library reads them."""
    folder = user_dump_folder(options)
    if folder is None or not dump.exists():
        return
    try:
        shutil.copytree(dump, folder, dirs_exist_ok=True)
    except OSError as error:
        warnings.warn(f"XLA's dumps could not be put into {str(folder)!r}: {error}", stacklevel=3)


def _at_once(lower: Callable[_Options, Compiling]) -> Callable[_Options, TargetCompilation]:
    @functools.wraps(lower)
    def compiled(*args: _Options.args, **kwargs: _Options.kwargs) -> TargetCompilation:
        return lower(*args, **kwargs)()

    return compiled


compile_for_target = _at_once(lower_for_target)
"""The same, compiled at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """One compile: what, for which hardware, and how."""

    flat: FlatProgram
    target: Target
    options: dict[str, Any]
    arguments: tuple[Argument, ...]
    want_buffers: bool
    need_lines: bool
    keep_hlo: bool
    cache: bool

    def all_options(self, folder: pathlib.Path) -> dict[str, Any]:
        """Its options, with those that have the compiler write into a folder, where a TPU's has its temporaries too."""
        writes = self.want_buffers or self.target.platform == "tpu"
        return self.options | (dump_options(folder / _DUMP) if writes else {})

    def peak(self, folder: pathlib.Path, memory: ProgramMemory, arguments: Arguments) -> Peak | None:
        """What makes the peak, where it was asked for: of as many bytes as the step needs."""
        if not self.want_buffers:
            return None
        return with_total(read_peak(folder / _DUMP, memory.platform, arguments), memory.step_bytes, UNPLACED)


def _lowered_there(job: _Job, timeout_s: float) -> _Lowered:
    """Export here; what is left compiles in a worker and reads its answer."""
    program = export_program(job.flat, job.target.platform)
    title = f"{job.flat.name} for {job.target.name}"
    if program.device_count > job.target.device_count:
        fitting = of_so_many(job.target, program.device_count)
        msg = (
            f"{title}: the arguments are sharded over {program.device_count} devices, the target has "
            f"{job.target.device_count}. Name a larger one{f', such as {fitting!r}' if fitting else ''}."
        )
        raise TargetError(msg)
    compiler = {} if job.target.platform == "cpu" else compiler_versions(job.target.platform)
    accelerator = "v5litepod-4" if job.target.platform == "tpu" else ""  # any; the topology asked for is what counts
    request = _request(program, job)
    known = (
        cache_entry(program.blob, request, compiler, worker_environment(accelerator))
        if job.cache and compiler
        else None
    )

    def compiled(folder: pathlib.Path) -> TargetCompilation:
        answer = known.load(folder, want_buffers=job.want_buffers, need_lines=job.need_lines) if known else None
        cached = answer is not None
        if answer is None:
            _write_request(program, request, job, folder)
            answer = run_worker(
                folder,
                name=title,
                accelerator_type=accelerator,
                timeout_s=timeout_s,
                remark=other_than_pinned(job.target.platform),
            )
        result = _refused(job, title, answer) if "error" in answer else _read_answer(job, answer, folder)
        if known and not cached and (result.memory or result.needed_bytes):
            known.keep(folder, want_buffers=job.want_buffers)
        return dataclasses.replace(result, compiler=compiler, cached=cached, left_out=program.left_out)

    return compiled


def _refused(job: _Job, title: str, answer: dict[str, Any]) -> TargetCompilation:
    """A refusal for memory as the answer that it is."""
    needed, limit = refused_for_memory(title, answer["error"], other_than_pinned(job.target.platform))
    return TargetCompilation(
        target=job.target,
        memory=None,
        fits=False,
        needed_bytes=needed,
        limit_bytes=job.target.memory_bytes if limit is None else limit,
        compiler_options=job.options,
        warnings=tuple(answer["warnings"]),
        refusal=answer["error"],
    )


def _read_answer(job: _Job, answer: dict[str, Any], folder: pathlib.Path) -> TargetCompilation:
    """What the worker compiled."""
    module = parse_module((folder / "optimised.hlo").read_text("utf-8"))
    figures = dict(answer["figures"])
    memory = ProgramMemory(
        name=job.flat.name,
        platform="gpu" if job.target.platform == "cuda" else job.target.platform,
        target=job.target.name,
        **figures_of_module(module),
        **figures,
    )
    limit = job.target.memory_bytes
    arguments = Arguments(by_number={number: job.arguments[i] for number, i in enumerate(answer["kept"])})
    return TargetCompilation(
        target=job.target,
        memory=memory,
        fits=None if limit is None else memory.step_bytes <= limit,
        needed_bytes=memory.step_bytes,
        limit_bytes=limit,
        host_temp_bytes=memory.host_temp_bytes,
        module=module if job.keep_hlo else None,
        compile_seconds=answer["compile_seconds"],
        compiler_options=job.options,
        paths=job.flat.paths,
        kept=tuple(answer["kept"]),
        peak=job.peak(folder, memory, arguments),
        warnings=tuple(answer["warnings"]),
    )


def _lowered_here(job: _Job) -> _Lowered:
    """Lower for the attached CPU; what is left compiles in this process."""
    flat = job.flat
    cpu = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    spread = any(leaf.sharding is not None for leaf in flat.leaves)
    leaves = [leaf if spread else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=cpu) for leaf in flat.leaves]
    out: dict[str, Any] = {} if flat.out_shardings is None else {"out_shardings": list(flat.out_shardings)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lowered = jax.jit(flat.function, donate_argnums=flat.donated, **out).lower(*leaves)
    reported = tuple(str(warning.message) for warning in caught if warning.category is UserWarning)

    def compiled(folder: pathlib.Path) -> TargetCompilation:
        start = time.monotonic()
        options = job.all_options(folder)
        if job.want_buffers or not past_the_cache():  # else a run is to find the program in JAX's cache
            options = options_without_run("cpu") | past_the_cache() | options
        program = lowered.compile(compiler_options=options or None)
        seconds = time.monotonic() - start
        module = parse_module(program.as_text())
        memory = program_memory(program, name=flat.name, platform="cpu", target="attached", module=module)
        named = Arguments(by_name={f"leaves[{i}]": each for i, each in enumerate(job.arguments)})
        return TargetCompilation(
            target=job.target,
            memory=memory,
            fits=None,
            needed_bytes=memory.step_bytes,
            limit_bytes=None,
            host_temp_bytes=memory.host_temp_bytes,
            module=module if job.keep_hlo else None,
            compile_seconds=seconds,
            compiler_options=job.options,
            paths=flat.paths,
            peak=job.peak(folder, memory, named),
            warnings=reported,
        )

    return compiled


def _described(flat: FlatProgram) -> list[Argument]:
    """What each array argument holds, judged by its path."""
    return [
        Argument(path=path, kind=kind_of_path(path), elements=math.prod(leaf.shape))
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
    ]


def _request(program: PortableProgram, job: _Job) -> dict[str, Any]:
    """What the worker is given besides the program, less what only this one compile needs."""
    names = [name for name in jax.config.values if not _NOT_THE_COMPILERS.search(name)]
    # An attribute is the thread's own value; what can only be set for the whole process is none.
    config = {name: getattr(jax.config, name, jax.config.values[name]) for name in sorted(names)}
    if job.target.platform == "cpu":
        config["jax_num_cpu_devices"] = job.target.device_count
    return {
        "name": program.name,
        "platform": job.target.platform,
        "topology": job.target.topology,
        "topology_options": dict(job.target.topology_options),
        "target_config": job.target.target_config,
        "device_count": program.device_count,
        "shardings": program.shardings,
        "out_shardings": program.out_shardings,
        "donated": program.donated,
        "compiler_options": job.options,
        "jax_config": {name: value for name, value in config.items() if isinstance(value, (bool, int, float, str))},
    }


def _write_request(program: PortableProgram, request: dict[str, Any], job: _Job, folder: pathlib.Path) -> None:
    whole = request | {"compiler_options": job.all_options(folder), "folders": target_folders()}
    (folder / "program.bin").write_bytes(program.blob)
    (folder / "request.json").write_text(json.dumps(whole), "utf-8")


def _several(one_or_more: Any) -> tuple[Any, ...]:
    return (one_or_more,) if isinstance(one_or_more, (int, str)) else tuple(one_or_more)
