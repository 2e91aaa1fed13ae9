"""``jaxmem inspect SCRIPT``: what a training script's step needs, with and without its policy. No step runs."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmem_callbacks.cli.exit_codes import FAILED, OK
from jaxmem_callbacks.cli.script import Reached, ScriptFailedError, add_script_arguments, at_step, show_start
from jaxmem_callbacks.cli.source import source_of
from jaxmem_callbacks.cli.typed import place, whole
from jaxmem_callbacks.programs.targets.target import resolve_target
from jaxmem_callbacks.records.documents import Document, Table, put_document
from jaxmem_callbacks.records.errors import CompileError
from jaxmem_callbacks.records.peaks import Buffer, Peak, short_shape
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.terminal import put
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.writers.plan_progress import inspect_progress

if TYPE_CHECKING:  # which imports JAX: the command line reads this module before
    from jaxmem_callbacks.programs.memory import StepMemory

# What JAX's paths of operations have of each loop (``closed_call`` until JAX 0.10, ``eval_jaxpr`` since) and checkpoint; the
# step's own name comes before them.
_OF_EVERY_LOOP = {"while", "body", "closed_call", "eval_jaxpr", "checkpoint"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--target", metavar="T", help="compile for hardware that is not here, such as h100_sxm or v5e:2x2"
    )
    parser.add_argument(
        "--top", type=whole("buffers"), default=10, metavar="N", help="buffers of the peak to show (10; 0: none)"
    )
    parser.add_argument(
        "--perfetto",
        metavar="FILE",
        type=place,
        help="also write the bytes within the step as a trace, which ui.perfetto.dev and chrome://tracing open",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables, which jaxmem compare reads"
    )
    add_script_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Reach the step, compile it, print.

    Returns:
        0, or 1 where the script itself failed.

    Raises:
        JaxmemError: as `at_step` and `jm.step_memory`; the command line turns it into exit code 2.
    """
    # Before the script runs, which may load data for minutes.
    target = None if args.target is None else resolve_target(args.target)
    source_of(args.script, "inspect")
    show_start(args.script)
    from jaxmem_callbacks.cli.jit_hook import as_written  # which imports JAX: mistakes are reported before

    try:
        with as_written(args.script, step=args.step, target=target) as seen:
            return at_step(
                args.script,
                lambda reached: functools.partial(
                    _print, _Report.of(reached, args.target, args.top), as_json=args.json, trace=args.perfetto
                ),
                args.script_args,
                step=args.step,
                seen=seen,
                script_to_stderr=args.json,
            )
    except ScriptFailedError as error:
        put(f"jaxmem: {error}\n", sys.stderr)
        return FAILED


def _print(report: _Report, *, as_json: bool, trace: Path | None) -> int:
    if as_json:
        put(json.dumps(report.as_json(), indent=2) + "\n", as_json=True)
    else:
        put_document(*report.documents())
    if trace is not None:
        _write_trace(trace, report.memory)
        if not as_json:
            put(f"wrote {trace}\n")
    return OK


def _write_trace(path: Path, memory: StepMemory) -> None:
    """The step's bytes over its schedule.

    Raises:
        CompileError: they are unknown here.
        RunFileError: the file cannot be written.
    """
    from jaxmem_callbacks.writers.perfetto import write_trace_of_steps

    if memory.schedule is None:
        why = (
            "they are read for the attached devices only"
            if memory.program.target != "attached"
            else "its compiler hands over no buffer assignment"
        )
        msg = (
            f"{path} is not written: the bytes of {memory.program.name} within the step are unknown here, since {why}."
        )
        raise CompileError(msg)
    write_trace_of_steps(path, {memory.program.name: memory.schedule})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Report:
    """What is printed: the step under its policy, the same step without, and the buffers of the peak."""

    policy: StepPolicy
    memory: Any
    plain: Any | None
    plain_refused: str | None
    peak: Peak | None
    causes: tuple[str, ...]
    top: int
    remarks: list[str]
    alive_bytes: int | None

    @classmethod
    def of(cls, reached: Reached, target: str | None, top: int) -> _Report:
        from jaxmem_callbacks.cli.live_arrays import alive_words
        from jaxmem_callbacks.programs.memory import as_step, step_memory

        step = as_step(reached.step)
        without = step.without_policy()
        plain, refused = None, None
        with inspect_progress(sys.stderr) as report:
            report(f"compiling {step.name}")
            memory = step_memory(step, *reached.args, target=target, **reached.kwargs)
            if without is not None:
                report(f"compiling {step.name} without its policy, to compare")
                try:
                    plain = step_memory(without, *reached.args, target=target, **reached.kwargs)
                except CompileError as error:  # that the plain step does not fit there is what the policy is for
                    refused = str(error)
            if top:
                report(f"compiling {step.name} once more, for what makes its peak")
            peak = memory.peak() if top else None
            causes = () if peak is None else memory.causes(peak)
        beside = alive_words(reached.alive, reached.when, memory.step_bytes, copies=reached.copies)
        return cls(
            policy=step.policy,
            memory=memory,
            plain=plain,
            plain_refused=refused,
            peak=peak,
            top=top,
            causes=causes,
            remarks=[words for words in (reached.others, *(each.words for each in reached.copies), beside) if words],
            alive_bytes=None if reached.alive is None else reached.alive.bytes,
        )

    def documents(self) -> Iterator[Document | str]:
        from jaxmem_callbacks.programs.memory import buffer_table, memory_document

        yield memory_document(self.memory.program, self.memory.arguments, self.memory.warnings)
        if self.plain is not None:
            policy = f"remat={self.policy.remat}, donated {format_bytes(self.memory.donated_bytes)}"
            head = f"Against the plain step, without remat and donation (policy: {policy})"
            table = Table(("", "plain step", "with its policy"), self._compared(), ("left", "right", "right"))
            yield Document([head, table])
        if self.plain_refused is not None:
            yield f"The plain step, without remat and donation: {self.plain_refused}"
        if self.peak is not None:
            largest = buffer_table([_short(buffer) for buffer in self.peak.buffers[: self.top]])
            yield self.peak.document()
            yield Document(self.causes)
            yield Document(["Its largest buffers", largest])
        yield Document(self.remarks)

    def _compared(self) -> list[tuple[str, str, str]]:
        words = {"step": "step_bytes", "arguments": "argument_bytes", "outputs": "output_bytes"}
        words |= {"aliased": "alias_bytes", "temporaries": "temp_bytes", "constants": "constant_bytes"}
        sizes = [
            (word, *(format_bytes(getattr(m, name)) for m in (self.plain, self.memory))) for word, name in words.items()
        ]
        return [*sizes, ("recomputed by the compiler", str(self.plain.compiler_remat), str(self.memory.compiler_remat))]  # type: ignore[union-attr]

    def as_json(self) -> dict[str, Any]:
        """Bytes as ints, under the names of the records' fields."""
        from jaxmem_callbacks.programs.memory import account_of_step

        return {
            "account": dataclasses.asdict(account_of_step(self.memory, self.policy, self.peak)),
            "policy": dataclasses.asdict(self.policy),
            "alive_beside_bytes": self.alive_bytes,
            "step": _memory_json(self.memory),
            "plain_step": None if self.plain is None else _memory_json(self.plain),
            "plain_step_refused": self.plain_refused,
            "peak": None if self.peak is None else dataclasses.asdict(dataclasses.replace(self.peak, buffers=())),
            "causes": list(self.causes),
            "top_buffers": [
                dataclasses.asdict(buffer) for buffer in (self.peak.buffers[: self.top] if self.peak else ())
            ],
        }


def _short(buffer: Buffer) -> Buffer:
    """The buffer as a table has room for it: ``--json`` has its layout and its operation whole."""
    shape = buffer.shape if "T(" in buffer.shape else short_shape(buffer.shape)  # tiles are what padding comes of
    if buffer.operation is None or not buffer.operation.startswith("jit("):
        return dataclasses.replace(buffer, shape=shape)
    parts = [part for part in buffer.operation.split("/")[1:] if part not in _OF_EVERY_LOOP]
    return dataclasses.replace(buffer, shape=shape, operation="/".join(parts) or buffer.operation)


def _memory_json(memory: Any) -> dict[str, Any]:
    return {
        "step_bytes": memory.step_bytes,
        "donated_bytes": memory.donated_bytes,
        **dataclasses.asdict(memory.program),
        "arguments": [dataclasses.asdict(row) for row in memory.arguments],
        "warnings": list(memory.warnings),
    }
