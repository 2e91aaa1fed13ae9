"""`jm.plan`: a `Plan` of a train step for hardware and a budget, to read, to look at and to train with."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from jaxmem_callbacks.config.presets import preset_to_yaml
from jaxmem_callbacks.environment.process import FRACTION
from jaxmem_callbacks.planning.choice import pareto
from jaxmem_callbacks.planning.compiles import Progress
from jaxmem_callbacks.planning.plan import make_plan
from jaxmem_callbacks.planning.request import PlanRequest
from jaxmem_callbacks.planning.verdict import unfit_reason
from jaxmem_callbacks.readers.decoding import read_plan
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arguments import require, require_path
from jaxmem_callbacks.records.documents import Section, as_text
from jaxmem_callbacks.records.errors import PlanError
from jaxmem_callbacks.records.files import write_file
from jaxmem_callbacks.records.page import framed, page_html
from jaxmem_callbacks.records.peaks import Peak
from jaxmem_callbacks.records.plans import Candidate, PlanRecord
from jaxmem_callbacks.records.policies import StepPolicy, UnfitPolicy, policy_words
from jaxmem_callbacks.records.presets import EnvironmentSettings, Preset
from jaxmem_callbacks.records.secrets import scrubbed
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.writers.page_model import plan_page_model
from jaxmem_callbacks.writers.plan_figure import plan_figure
from jaxmem_callbacks.writers.plan_page import write_plan_run
from jaxmem_callbacks.writers.plan_progress import in_notebook, plan_progress
from jaxmem_callbacks.writers.plan_table import plan_document, plan_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plan(  # noqa: PLR0913 - what users ask of a plan, by name
    train_step: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    budget: str | float | None = None,
    mesh: Any = None,
    resident: Any = (),
    search: Mapping[str, Any] | None = None,
    beside: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]] = (),
    progress: Progress | bool | None = None,
    **kwargs: Any,
) -> Plan:
    """Find the cheapest policy under which a train step fits into memory, by compiling it.

        plan = jm.plan(train_step, state, batch, target="h100_sxm", budget="72GiB")
        step = jm.jit_step(train_step, plan.policy)

    The step is traced and compiled under at most 8 policies, 16 where more than remat is searched, and never run; no device
    memory is taken. With ``search={"microbatches": ...}`` and real arrays, the gradient over a few rows is computed and
    compared, as `jm.jit_step` does.

    Args:
        train_step: The user's own step, which takes its gradient by ``jm.value_and_grad``, ``jm.grad`` or
            ``jm.nnx.value_and_grad``; plain or jitted by the user.
        *args: Its arguments: arrays, `jax.ShapeDtypeStruct`, results of `jax.eval_shape`, NNX modules and optimizers,
            abstract ones too.
        target: Name of the hardware, attached or not, such as ``h100_sxm`` or ``v5e:2x2``; None for the attached devices.
        budget: Bytes as an int or ``"72GiB"``, or a share in (0, 1] of what is usable there. None: the whole frontier is
            compiled, and the choice is made against the target's own limit.
        mesh: For a target of several devices and arguments without shardings: its axes, as ``{"fsdp": 8}``; None for one axis
            over all, from 128 devices on for copies of 64 along a second one. The state is then tried whole, with its
            optimizer part divided (``zero1``) and divided (``fsdp``), the batch divided over the devices; at most 16 compiles.
            Arguments with shardings stay where they are.
        resident: What else stays in memory: bytes, ``"2GiB"``, a tree of arrays such as an EMA copy, or a list of such.
        search: What may be varied in addition, at most 16 compiles in all: ``{"remat": True, "offload": True,
            "chunks": True, "microbatches": [2, 4], "donate": True, "sharding": ["zero1", "fsdp"], "batch": {"multiple_of":
            8, "at_most": 512}}``, of which any part may be left out and most may be True; docs/plan_search.md has the words. The
            batch is changed only by ``"batch"``.
        beside: Other programs that must fit too, as pairs of a function and its arguments:
            ``[(eval_step, (state, batch))]``. Each is compiled once for every way to place the state, in addition to the
            compiles that are counted above, and the largest program sets the need.
        progress: Called with what is compiled, as ``progress(what, done, at_most)``. True shows it, as a bar on a terminal, a
            line under a notebook's cell, and lines on stderr elsewhere; None on terminals and in notebooks only, False never.
        **kwargs: The step's keyword arguments.

    Returns:
        The plan; ``print`` it.

    Raises:
        PlanError: no budget or search that makes sense; a step that is under a policy already, or cannot be traced.
        TargetError: the target is unknown, or its compiler is not installed.
        CompileError: the program cannot be exported, or the compiler failed, crashed or took too long.
        PolicyError, LossRefusedError: only where even the plain step cannot be traced.
    """
    if not callable(progress):
        require(
            "jm.plan",
            "progress",
            progress,
            (bool, type(None)),
            "a function progress(what, done, at_most), True, False or None",
        )
    request = PlanRequest(target=target, budget=budget, resident=resident, mesh=mesh, search=search, beside=beside)
    with _progress_shown(progress) as shown:
        return Plan(make_plan(train_step, args, kwargs, request, shown))


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan that ``jaxmem plan SCRIPT --save plan.json`` or ``plan.to_json()`` wrote, in this process or another.

        plan = jm.load_plan("plan.json")
        step = jm.jit_step(train_step, plan.policy)
        with jm.MemoryMonitor(logdir="runs/a", plan=plan) as monitor:
            ...

    Args:
        path: A file of one plan as JSON.

    Returns:
        The plan, as `jm.plan` gave it.

    Raises:
        RunFileError: nothing there, or no plan, such as a preset.
    """
    return Plan(read_plan(require_path("jm.load_plan", "path", path, "plan.json")))


@final
class Plan:
    """What was compiled, and which policy to use.

    Args:
        record: The figures; all of them also in ``to_json()``.
    """

    def __init__(self, record: PlanRecord) -> None:
        require("jm.Plan", "record", record, PlanRecord, "the record of a plan; jm.plan and jm.load_plan make plans")
        self.record = scrubbed(record)

    @property
    def chosen(self) -> Candidate:
        """The candidate to use; ``fits`` is False where nothing fits and this only comes nearest."""
        return self.record.candidates[self.record.chosen]

    @property
    def policy(self) -> StepPolicy:
        """What to give to `jm.jit_step`, which refuses it where nothing fits."""
        policy = self.chosen.policy
        if self.chosen.fits is not False:
            return policy
        fields = {name: getattr(policy, name) for name in policy.__dataclass_fields__}
        return UnfitPolicy(**fields, reason=unfit_reason(self.record))

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All that was compiled, largest first."""
        return self.record.candidates

    @property
    def peak(self) -> Peak | None:
        """What makes the chosen candidate's peak; ``print`` it. Each candidate has its own.

        Of what a TPU's compiler refused, and so did not place, it is what the compiler of ``chosen.placed_by`` places. None
        only for the attached devices while JAX's own compilation cache is on: ``jm.step_memory(...).peak()`` finds it then by
        one more compile.
        """
        return self.chosen.placed_elsewhere or self.chosen.peak

    @functools.cached_property
    def frontier(self) -> tuple[Candidate, ...]:
        """Those that no other beats in both bytes and operations, largest first."""
        return pareto(self.record.candidates)

    @property
    def compiles(self) -> int:
        """How many compiles of the step this took, those from the disk cache included; those of ``beside=`` are not counted."""
        return self.record.compiles

    def figure(self) -> Figure:
        """The frontier as a matplotlib figure."""
        return plan_figure(self.record, self.frontier)

    def to_yaml(self) -> str:
        """A preset that reproduces the chosen policy: save it and ``jm.load_preset("my_plan.yaml")``.

        Where the choice needs more of a GPU than JAX's allocator takes by default, it has the share as its environment, for
        ``jm.apply_environment`` above the first use of JAX. A preset names no devices: for several its description has the mesh,
        to be set before the step is made.

        Raises:
            PlanError: nothing fits; a preset could not carry that refusal, and would be run.
        """
        chosen, record = self.chosen, self.record
        if chosen.fits is False:
            raise PlanError(unfit_reason(record))
        rows = f" at {chosen.batch_rows} rows" if chosen.batch_rows is not None else ""
        budget = f" of {format_bytes(record.budget_bytes)}" if record.budget_bytes is not None else ""
        mesh = (
            f" on the mesh {advise('mesh.make', axes=dict(record.mesh))}"
            if record.device_count > 1 and record.mesh
            else ""
        )
        text = (
            f"{policy_words(chosen.policy)} for {record.step}{rows} on {record.hardware}{mesh}: {format_bytes(chosen.step_bytes)}"
            f"{budget} ({', '.join(f'{k} {v}' for k, v in record.versions.items())}; "
            f"program {record.fingerprint})."
        )
        if record.fraction is not None:
            text += f" It needs {FRACTION}={record.fraction:g} or more, which jm.apply_environment sets."
        environment = EnvironmentSettings(fraction=record.fraction)
        return preset_to_yaml(Preset(name="plan", description=text, policy=chosen.policy, environment=environment))

    def to_json(self) -> str:
        """The whole plan, every figure, bytes as integers: save it, and `jm.load_plan` or a monitor reads it elsewhere."""
        return plan_json(self.record)

    def to_tensorboard(self, logdir: str | os.PathLike[str]) -> Path:
        """Write the plan as a run of its own for TensorBoard: figure, table, where each figure comes from, and two scalars.

        A training run shows the same page where its monitor has the plan: ``jm.MemoryMonitor(logdir=..., plan=plan)``.

        Args:
            logdir: A folder that holds no run; a plan that was written there before is replaced.

        Returns:
            The folder.

        Raises:
            PlanError: ``logdir`` is no local folder, cannot be written, or holds a run.
        """
        return write_plan_run(self.record, self.frontier, logdir)

    def __str__(self) -> str:
        return as_text(plan_document(self.record, self.frontier))

    def __repr__(self) -> str:
        return f"<Plan of {self.record.step} for {self.record.hardware}: {policy_words(self.chosen.policy)}>"

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as one self-contained page: each policy with its bytes and cost, and its preset to paste.

        Args:
            path: Such as ``plan.html``; a file that is there is replaced.

        Returns:
            The path.

        Raises:
            OSError: it cannot be written.
        """
        found = require_path("Plan.to_html", "path", path, "plan.html")
        write_file(found, page_html(self._page()), private=True)
        return found

    def _page(self) -> dict[str, Any]:
        document = plan_document(self.record, self.frontier)
        return plan_page_model(
            self.record, [Section("Every candidate, and what the figures leave out", document.blocks)]
        )

    def _repr_html_(self) -> str:
        return framed(self._page(), height=620, table=plan_document(self.record, self.frontier))


@contextmanager
def _progress_shown(asked: Progress | bool | None) -> Generator[Progress | None]:  # noqa: FBT001 - as the user gave it
    """What each compile is reported to: what the user gave, a bar or lines on stderr, or nothing."""
    if callable(asked):
        yield asked
    elif asked is False or (asked is None and not (sys.stderr.isatty() or in_notebook())):
        yield None
    else:
        with plan_progress(sys.stderr) as shown:
            yield shown
