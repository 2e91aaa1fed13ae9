"""``jaxmem plan SCRIPT``: a training script and hardware enter, the cheapest way to make its step fit leaves; no step runs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmem_callbacks.cli.exits import FAILED, OK, REFUSED
from jaxmem_callbacks.cli.script import ScriptFailedError, add_script_arguments, reach_step
from jaxmem_callbacks.cli.search_option import add_search_argument, search_of
from jaxmem_callbacks.programs.steps.jitting import already_jitted
from jaxmem_callbacks.programs.steps.step import JitStep
from jaxmem_callbacks.records.policies import StepPolicy

if TYPE_CHECKING:
    from jaxmem_callbacks.answers.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--target", metavar="T", help="hardware that is not here, such as h100_sxm or v5e:2x2")
    parser.add_argument(
        "--budget", metavar="B", help="72GiB, or a share of what is usable such as 0.9; else the frontier"
    )
    parser.add_argument("--resident", metavar="SIZE", action="append", default=[], help="what else stays there, 2GiB")
    add_search_argument(parser)
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the chosen policy as a preset, FILE.yaml")
    parser.add_argument("--figure", metavar="FILE", type=Path, help="write the frontier as a picture, FILE.png")
    parser.add_argument(
        "--logdir", metavar="DIR", type=Path, help="write the plan for TensorBoard, as a run of its own"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    add_script_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Reach the step, plan it, print.

    Returns:
        0; 1 where the script itself failed; 2 where nothing fits.

    Raises:
        JaxmemError: as `reach_step` and `jm.plan`; the command line turns it into exit code 2.
    """
    own_output = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
    try:
        with own_output:
            reached = reach_step(args.script, args.script_args)
    except ScriptFailedError as error:
        sys.stderr.write(f"jaxmem: {error}\n")
        return FAILED
    from jaxmem_callbacks.answers.plan import plan

    made = plan(
        _without_gradient_policy(reached.step),
        *reached.args,
        target=args.target,
        budget=_budget(args.budget),
        resident=args.resident,
        search=search_of(args.search),
        progress=True,
        **reached.kwargs,
    )
    sys.stdout.write(f"{made.to_json() if args.json else _text(made, args.save)}\n")
    if args.save is not None:
        args.save.write_text(made.to_yaml(), "utf-8")
    if args.figure is not None:
        made.figure().savefig(args.figure, dpi=150)
    if args.logdir is not None:
        made.to_tensorboard(args.logdir)
    return REFUSED if made.chosen.fits is False else OK


def _without_gradient_policy(step: Any) -> Any:
    """The step of a script without the remat and microbatches that it has now; what it says of donation stays."""
    if not isinstance(step, JitStep):
        return step
    policy = StepPolicy(donate=None if already_jitted(step.__wrapped__) is not None else step.donation)
    return JitStep(step.__wrapped__, policy)


def _budget(text: str | None) -> str | float | None:
    """A share where the text is a number in (0, 1], else a size as it is."""
    try:
        share = float(text) if text is not None else 0.0
    except ValueError:
        return text
    return share if text is not None and 0 < share <= 1 else text


def _text(plan: Plan, saved: Path | None) -> str:
    lines = [str(plan)]
    if plan.peak is not None:
        lines += ["", str(plan.peak)]
    if plan.chosen.fits is not False and plan.policy != StepPolicy():
        said = ", ".join(
            f"{field.name}={getattr(plan.policy, field.name)!r}"
            for field in dataclasses.fields(StepPolicy)
            if getattr(plan.policy, field.name) != field.default
        )
        use = f'jm.load_preset("{saved}")' if saved is not None else f"jm.StepPolicy({said})"
        lines += ["", "To train so:", f"    step = jm.jit_step(train_step, {use})"]
    return "\n".join(lines)
