"""``jaxmem plan SCRIPT``: the cheapest way to make a training script's step fit."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmem_callbacks.cli.exit_codes import DOES_NOT_FIT, FAILED, OK, exit_of, signal_of
from jaxmem_callbacks.cli.frames import called_as
from jaxmem_callbacks.cli.script import (
    Reached,
    ScriptFailedError,
    add_script_arguments,
    at_step,
    reach_program,
    require_program,
    show_start,
)
from jaxmem_callbacks.cli.source import source_of
from jaxmem_callbacks.cli.trace_log import TraceLog
from jaxmem_callbacks.cli.train_lines import WHOLE, lines_to_train
from jaxmem_callbacks.cli.typed import place
from jaxmem_callbacks.planning.interrupts import interruption_here
from jaxmem_callbacks.planning.request import SHARDINGS, parse_budget, parse_search, size_meant
from jaxmem_callbacks.programs.targets.target import Target, resolve_target
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.documents import Code, Document, put_document
from jaxmem_callbacks.records.errors import PlanError, PolicyError, did_you_mean
from jaxmem_callbacks.records.files import replacing, require_place, write_file
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.terminal import OutputError, flush, put
from jaxmem_callbacks.records.units import parse_bytes
from jaxmem_callbacks.transforms.sharding.axes import fitting_axes, parse_axes
from jaxmem_callbacks.writers.plan_table import plan_document

if TYPE_CHECKING:
    from jaxmem_callbacks.api.plan import Plan


# Key -> the values that a shell's option takes, and an example.
EXPECTED = {
    "remat": ("yes or no", "remat=no"),
    "own_checkpoints": ("the key alone, yes or no", "own_checkpoints"),
    "offload": ("the key alone, yes or no", "offload"),
    "chunks": ("the key alone, yes or no", "chunks"),
    "microbatches": (
        "whole numbers of at least 1 with commas between, or the key alone for every power of two that divides the rows",
        "microbatches=2,4",
    ),
    "donate": ("the key alone, yes or no", "donate"),
    "sharding": (
        f"some of {', '.join(SHARDINGS)} with commas between, or the key alone for all",
        "sharding=zero1,fsdp",
    ),
    "batch": (
        "batch=largest, or batch.multiple_of and batch.at_most as whole numbers of at least 1, or batch.argnames as names",
        "batch.at_most=512",
    ),
    "compiler_options": (
        "the key alone, or an option of XLA's with its values: compiler_options.xla_...=yes,no",
        "compiler_options",
    ),
    "state_offload": ("the key alone, yes or no", "state_offload"),
}
_WORDS = {"yes": True, "true": True, "no": False, "false": False}


def add_search_argument(parser: argparse.ArgumentParser) -> None:
    """The option, which may be given several times."""
    parser.add_argument(
        "--search",
        metavar="KEY[=VALUE]",
        action="append",
        default=[],
        help="what else may be varied: microbatches=2,4  sharding=zero1,fsdp  donate  offload  chunks  own_checkpoints  "
        "batch=largest  batch.multiple_of=8  batch.at_most=512  remat=no  compiler_options  compiler_options.xla_...=yes,no  "
        "state_offload; "
        "a key alone means all of it; may be given several times",
    )


def search_of(texts: Sequence[str]) -> dict[str, Any] | None:
    """The search that the options make together; None where there are none.

    Args:
        texts: Such as ``["microbatches=1,2,4", "donate", "batch.at_most=512"]``.

    Raises:
        PlanError: a key or a value that `jm.plan` would refuse, in a shell's words.
    """
    for text in texts:
        _require_meant(text)
    found = _read(texts)
    if found.get("offload") is True and found.get("remat") is False:
        msg = (
            "Offload without remat: what is moved into host memory is what remat stores, so there is nothing to move. Take "
            "remat=no out of what is searched."
        )
        raise PlanError(msg)
    batch = found.get("batch")
    least = batch.get("multiple_of", 1) if isinstance(batch, dict) else 1
    if isinstance(batch, dict) and "at_most" in batch and batch["at_most"] < least:
        msg = (
            f"batch.at_most={batch['at_most']} is below batch.multiple_of={least}, so no batch is left. Type "
            f"{advise('option.typed', option='search', value=f'batch.at_most={least}')}, or more."
        )
        raise PlanError(msg)
    return found or None


def _require_meant(text: str) -> None:
    """Refuse one option that means nothing.

    Raises:
        PlanError: with what was expected there, and what to type.
    """
    try:
        parse_search(_read([text]))
    except PlanError:
        key, typed = text.partition("=")[0].partition(".")[0].strip(), "--search " + text
        if key in EXPECTED:
            expected, example = EXPECTED[key]
            words = text.partition("=")[2].split(",") if key == "sharding" else []
            near = did_you_mean(next((word for word in words if word not in SHARDINGS), ""), SHARDINGS)
            msg = f"{typed}: expected {expected}.{near} Type {advise('option.typed', option='search', value=example)}."
        else:
            msg = (
                f"{typed}: there is no key {key!r}.{did_you_mean(key, EXPECTED)} Expected one of: "
                f"{', '.join(EXPECTED)}. Type for example "
                f"{advise('option.typed', option='search', value='batch.at_most=512')}."
            )
        raise PlanError(msg) from None


def _read(texts: Sequence[str]) -> dict[str, Any]:
    """The mapping that options make together; nothing is judged here."""
    found: dict[str, Any] = {}
    for text in texts:
        key, _, value = text.partition("=")
        outer, _, inner = key.strip().partition(".")
        if inner:
            before = found.get(outer)
            found[outer] = (before if isinstance(before, dict) else {}) | {inner: _value(value)}
        elif not isinstance(found.get(outer), dict):
            found[outer] = _value(value) if value else True
    return found


def _value(text: str) -> Any:
    """One value, or several with commas between: numbers and switches as such."""
    parts = [part.strip() for part in text.split(",")]
    values = [int(part) if re.fullmatch(r"-?[0-9]+", part) else _WORDS.get(part.lower(), part) for part in parts]
    return values[0] if len(values) == 1 else values


_MESH = advise("option.typed", option="mesh", value="data=2,fsdp=-1")
_SAVE, _OF_A_PLAN = advise("option.typed", option="save", value="plan.json"), "plan='plan.json'"
_FOR_THE_MONITOR = (
    f"The whole plan, for the run's monitor: {_SAVE} here, {advise('monitor.call', arguments=_OF_A_PLAN)} there. It shows what "
    "was planned beside what is measured, and reports where the run is not what was planned."
)
_SAVED, _PICTURES = (".yaml", ".yml", WHOLE), (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--target", metavar="T", help="hardware that is not here, such as h100_sxm or v5e:2x2")
    parser.add_argument(
        "--budget", metavar="B", help="72GiB, or a share of what is usable such as 0.9; else the frontier"
    )
    parser.add_argument("--resident", metavar="SIZE", action="append", default=[], help="what else stays there, 2GiB")
    parser.add_argument(
        "--beside",
        metavar="FILE.py:name",
        action="append",
        default=[],
        help="another program that must fit, such as evaluation: name() returns (function, args); may be given several times",
    )
    add_search_argument(parser)
    parser.add_argument(
        "--mesh",
        metavar="AXES",
        help="axes to divide a step over, data=2,fsdp=-1; else chosen by the number of devices",
    )
    parser.add_argument(
        "--save",
        metavar="FILE",
        type=place,
        help="write the plan: FILE.yaml, the chosen policy as a preset for jm.load_preset, or FILE.json, the whole of it for "
        "jm.load_plan and jm.MemoryMonitor(plan=...), which then reports where the run is not what was planned",
    )
    parser.add_argument("--figure", metavar="FILE", type=place, help="write the frontier as a picture, FILE.png")
    parser.add_argument("--logdir", metavar="DIR", help="write the plan for TensorBoard, as a run of its own")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    add_script_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Reach the step, plan it, print.

    Returns:
        0; 1 where the script itself failed; 3 where nothing fits; 130 at Ctrl-C and 143 at SIGTERM, with the best of what was
        compiled until then.

    Raises:
        JaxmemError: as `at_step` and `jm.plan`; the command line turns it into exit code 2.
    """
    # All that can be checked before the script runs, which may load data for minutes.
    _require_places(args)
    for program in args.beside:
        require_program(program)
    # Wherever the script goes, in which folder its step is traced: these are where they were typed.
    args.beside = [str(Path(program).absolute()) for program in args.beside]
    places = _Places.of(args)
    target = None if args.target is None else resolve_target(args.target, require_installed=False)
    search = search_of(args.search)
    sharding = (search or {}).get("sharding")
    if sharding:
        _require_several("--search sharding", target)
    mesh = None if args.mesh is None else _mesh(args.mesh, target, attached=bool(sharding))
    budget = None if args.budget is None else _budget(args.budget)
    _require_sizes(args.resident)
    source_of(args.script, "plan")
    if args.target is not None:
        resolve_target(args.target)
    show_start(args.script)
    from jaxmem_callbacks.cli.jit_hook import as_written  # which imports JAX: mistakes are reported before

    try:
        with as_written(args.script, step=args.step, target=target) as seen:
            return _run(args, places, search, budget, mesh, seen)
    except ScriptFailedError as error:
        put(f"jaxmem: {error}\n", sys.stderr)
        return FAILED
    except KeyboardInterrupt as error:  # later ones leave a plan of what was compiled until then
        how = signal_of(type(error))
        put(f"jaxmem: stopped by {how} before the first compile ended, so there is no plan.\n", sys.stderr)
        return exit_of(type(error))


def _print(made: Plan, args: argparse.Namespace, places: _Places, seen: TraceLog) -> int:
    """Print the plan, and write what was asked for."""
    unfit = made.chosen.fits is False
    lost: OutputError | BrokenPipeError | None = None
    try:
        if args.json:
            put(f"{made.to_json()}\n", as_json=True)
        else:
            put_document(*_documents(made, args.save, seen))
        flush()
    except (OutputError, BrokenPipeError) as error:  # the compiles are done, and what was to be saved is saved
        lost = error
    try:
        _write(made, places, unfit=unfit)
    except OSError as error:  # it could be written when the command began
        put(
            f"jaxmem: could not write {error.filename or 'the plan'}: {error.strerror}. The plan itself is above.\n",
            sys.stderr,
        )
        return FAILED
    if lost is not None:
        raise lost
    if (interrupt := interruption_here()) is not None:
        return exit_of(interrupt)
    return DOES_NOT_FIT if unfit else OK


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Places:
    """Where a plan is written, whatever folder it is made in."""

    save: Path | None
    figure: Path | None
    logdir: Path | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> _Places:
        """As typed, from the folder in which it was typed."""
        found = {name: getattr(args, name) for name in ("save", "figure", "logdir")}
        return cls(**{name: None if place is None else Path(place).absolute() for name, place in found.items()})


def _write(made: Plan, places: _Places, *, unfit: bool) -> None:
    if places.save is not None and unfit:
        put(f"jaxmem: nothing fits, so {places.save} was not written.\n", sys.stderr)
    elif places.save is not None:
        write_file(places.save, f"{made.to_json()}\n" if places.save.suffix == WHOLE else made.to_yaml())
    if places.figure is not None:
        with replacing(places.figure) as file:
            made.figure().savefig(file, format=places.figure.suffix[1:], dpi=150)
    if places.logdir is not None:
        made.to_tensorboard(places.logdir)


def _require_several(option: str, target: Target | None) -> None:
    """Refuse to divide a step on one device.

    Raises:
        PlanError: naming a target of several.
    """
    # The attached devices are counted once JAX has started.
    if target is None or target.device_count > 1 or target.platform == "cpu":
        return
    several = f"{target.name.partition(':')[0]}:8" if target.platform == "cuda" else "v5e:2x2"
    msg = (
        f"{option} divides a step among several devices, and {target.name} is one. Name several, as in "
        f"{advise('option.typed', option='target', value=several)}, or leave {option} out."
    )
    raise PlanError(msg)


def _mesh(text: str, target: Target | None, *, attached: bool) -> dict[str, int]:
    """The axes of ``--mesh``.

    Args:
        text: As typed.
        target: Of ``--target``.
        attached: Whether, without a target, the attached devices are to share the step.

    Raises:
        PlanError: no axes, or axes that do not make up the target's devices; with what to type.
    """
    option = "--mesh " + text
    try:
        axes = parse_axes(text)
    except PolicyError:
        msg = f"{option}: expected axes with sizes of at least 1; one may be -1. Type {_MESH}."
        raise PlanError(msg) from None
    if target is None and not attached:
        msg = (
            f"{option} divides a step among several devices, and none are named. Name a target of several, as in "
            f"{advise('option.typed', option='target', value='h100_sxm:8')}, or add "
            f"{advise('option.typed', option='search', value='sharding')} to divide it among the attached ones."
        )
        raise PlanError(msg)
    _require_several(option, target)
    if target is None or target.platform == "cpu":
        return axes
    count, sizes = target.device_count, axes.values()
    given = math.prod(size for size in sizes if size != -1)
    if count % given or (-1 not in sizes and count != given):
        fitting = ",".join(f"{name}={size}" for name, size in fitting_axes(axes, count).items())
        typed = advise("option.typed", option="mesh", value=fitting)
        msg = f"{option} does not make up the {count} devices of {target.name}. Type {typed}."
        raise PlanError(msg)
    return axes


def _run(  # noqa: PLR0913, PLR0917 - what was typed, as what it means
    args: argparse.Namespace,
    places: _Places,
    search: dict[str, Any] | None,
    budget: str | float | None,
    mesh: dict[str, int] | None,
    seen: TraceLog,
) -> int:
    """Run the script up to its step, and plan that where the script calls it.

    Returns:
        The exit code.

    Raises:
        ScriptFailedError, JaxmemError: as `run`.
    """

    def planned(reached: Reached) -> Callable[[], int]:
        from jaxmem_callbacks.api.plan import plan

        seen.called = called_as(reached.step)
        beside = [reach_program(program, args.script_args) for program in args.beside]
        made = plan(
            _without_gradient_policy(reached.step, places=not (search or {}).get("sharding")),
            *reached.args,
            target=args.target,
            budget=budget,
            mesh=mesh,
            resident=args.resident,
            beside=beside,
            search=search,
            progress=not args.quiet,
            **reached.kwargs,
        )
        return functools.partial(_print, _with_remarks(made, reached), args, places, seen)

    return at_step(
        args.script,
        planned,
        args.script_args,
        command="plan",
        step=args.step,
        seen=seen,
        script_to_stderr=args.json,
    )


def _with_remarks(made: Plan, reached: Reached) -> Plan:
    """The plan with remarks on the script that its step was found in."""
    from jaxmem_callbacks.cli.live_arrays import alive_words

    best, record = made.chosen, made.record
    beside = alive_words(reached.alive, reached.when, best.step_bytes, record.resident_bytes, reached.copies)
    remarks = [words for words in (reached.others, *(each.words for each in reached.copies), beside) if words]
    return type(made)(dataclasses.replace(record, notes=(*record.notes, *remarks)))


def _without_gradient_policy(step: Any, *, places: bool) -> Any:
    """The step of a script without the remat and microbatches that it has now; its donation stays.

    Args:
        step: As the script made it.
        places: Whether its sharding stays too, because that is not searched.
    """
    from jaxmem_callbacks.programs.steps.step import JitStep
    from jaxmem_callbacks.programs.steps.user_jit import already_jitted

    if not isinstance(step, JitStep):
        return step
    policy = StepPolicy(
        donate=None if already_jitted(step.__wrapped__) is not None else step.donation,
        sharding=step.policy.sharding if places else None,
        compiler_options=step.policy.compiler_options,
    )
    pinned = step.state_shardings if places else None
    return JitStep(step.__wrapped__, policy, state_shardings=pinned, gradients=step.gradients)


def _require_places(args: argparse.Namespace) -> None:
    """Refuse, before anything is compiled, files that could not be written or read again afterwards.

    Raises:
        PlanError: which is the command line's exit code 2.
    """
    for option, path, endings in (("--save", args.save, _SAVED), ("--figure", args.figure, _PICTURES)):
        if path is None:
            continue
        if path.suffix not in endings:
            msg = f"{option} {path}: expected a name that ends in {' or '.join(endings)}. Type {option} {path.stem}{endings[0]}."
            raise PlanError(msg)
        if not path.parent.is_dir():
            msg = f"{option} {path}: there is no folder {path.parent}. Make it first: mkdir -p {path.parent}."
            raise PlanError(msg)
        try:
            require_place(path)
            with path.open("ab") if path.exists() else tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            msg = (
                f"{option} {path}: expected a file that can be written: {error.strerror}. Type another one, such as "
                f"{option} {tempfile.gettempdir()}/{path.name}."
            )
            raise PlanError(msg) from error
    if args.logdir is not None and not args.logdir.strip():
        typed = advise("option.typed", option="logdir", value="runs/plan")
        msg = f"--logdir '': expected a folder for the plan's page. Type {typed}."
        raise PlanError(msg)
    if args.logdir is not None:
        from jaxmem_callbacks.writers.plan_page import require_own_folder

        require_own_folder(args.logdir)


def _budget(text: str) -> str | int | float:
    """The text with its unit, a share where it is a number in (0, 1], else bytes: a number that can be nothing else.

    Raises:
        PlanError: neither.
    """
    number = None
    with contextlib.suppress(ValueError):
        number = float(text) if text.isascii() else None
    is_bytes = number is not None and 1 < number < math.inf
    given = text if number is None else int(number) if is_bytes else number
    with contextlib.suppress(PlanError):
        parse_budget(given)
        return given
    meant = size_meant(number)
    msg = (
        f"{'--budget ' + text}: expected a size with its unit, such as 72GiB, or a share of what is usable above 0 and up to 1, "
        f"such as 0.9. Type {advise('option.typed', option='budget', value=meant)}."
    )
    raise PlanError(msg)


def _require_sizes(texts: Sequence[str]) -> None:
    """Refuse a ``--resident`` that is no size.

    Raises:
        PlanError: with what to type.
    """
    for text in texts:
        try:
            parse_bytes(text, unit_needed=True)
        except ValueError:
            meant = f"{text}GiB" if text.replace(".", "", 1).isdigit() else "2GiB"
            typed = advise("option.typed", option="resident", value=meant)
            msg = f"{'--resident ' + text}: expected a size with its unit. Type {typed}."
            raise PlanError(msg) from None


def _documents(plan: Plan, saved: Path | None, seen: TraceLog) -> Iterator[Document]:
    yield plan_document(plan.record, plan.frontier)
    if plan.peak is not None:
        by = [f"By the compiler for {plan.chosen.placed_by}:"] if plan.chosen.placed_elsewhere is not None else []
        yield Document([*by, *plan.peak.document().blocks])
    if plan.chosen.fits is not False and (plan.policy != StepPolicy() or saved is not None):
        yield Document(["To train so:", Code(lines_to_train(plan, saved, seen))])
        if saved is None or saved.suffix != WHOLE:
            yield Document([_FOR_THE_MONITOR])
