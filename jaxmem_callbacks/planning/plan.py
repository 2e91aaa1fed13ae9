"""`make_plan`: a train step, its arguments, a target and a budget; a `PlanRecord` with its verdict."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxmem_callbacks.planning.choice import chosen
from jaxmem_callbacks.planning.compiles import (
    MOST,
    MOST_OF_REMAT,
    CompileBudget,
    CompileQueue,
    CompileResults,
    Entry,
    Progress,
)
from jaxmem_callbacks.planning.interrupts import interrupts_heard
from jaxmem_callbacks.planning.option_candidates import most_of_options
from jaxmem_callbacks.planning.orchestrate import compile_as_written, run_search
from jaxmem_callbacks.planning.problem import (
    ParsedRequest,
    Problem,
    Rows,
    donation_of,
    find_rows,
    mesh_sizes,
    own_step,
    parse_beside,
    parse_resident,
    traced_plainly,
    traced_with_rows,
    without_own_checkpoints,
    worth_a_word,
)
from jaxmem_callbacks.planning.request import PlanRequest, Space, budget_for, parse_search
from jaxmem_callbacks.planning.sharding_candidates import is_divided, with_donation
from jaxmem_callbacks.planning.verdict import needed_share, note_choice, note_donation, remedies, searches
from jaxmem_callbacks.programs.steps.leaves import Leaf
from jaxmem_callbacks.programs.steps.program import flags_now, kind_here, unguarded
from jaxmem_callbacks.programs.targets.compile import TargetCompilation
from jaxmem_callbacks.programs.targets.target import Target, resolve_target
from jaxmem_callbacks.records.errors import CompileError, CompileTimeoutError, PlanError, PolicyError
from jaxmem_callbacks.records.plans import Candidate, PlanRecord
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.transforms.accumulation.microbatch import accumulates_already
from jaxmem_callbacks.transforms.arg_roles import OPTIMIZER, OTHER, PARAMETERS, STATE

_MARGINS = {
    "cuda": (
        "left out without the GPU: the CUDA context and libraries (some hundred MiB), workspaces that cuDNN and cuBLAS choose on "
        "the device, NCCL buffers, and fragmentation"
    ),
    "tpu": (
        "left out without the TPU: the program's own code, arrays that are no arguments of the step, a second step in flight, "
        "and fragmentation of what other programs leave behind"
    ),
    "cpu": "left out: the host's own memory outside XLA",
}
# Tuned: of more, each is a sixty-fourth of the activations or less, and parameters and their gradients are most of the peak.
_MOST_MICROBATCHES = 64
_SHOWN = 4  # buffers of each group that a record keeps
_UNCHECKED = (
    "Whether the loss may be accumulated was not checked: that takes a batch, and these are shapes only. jm.jit_step compares at "
    "its first call, and refuses a loss whose gradient would be another one; jm.weighted needs no check."
)


@unguarded()
def make_plan(
    train_step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    request: PlanRequest,
    progress: Progress | None = None,
) -> PlanRecord:
    """Compile a step under the policies worth trying, and choose; `jm.plan` has the words.

    Raises:
        PlanError, TargetError, CompileError, PolicyError: see `jm.plan`.
    """
    results, compared, donation = CompileResults(), False, ""
    parsed = _parsed(train_step, args, kwargs, request, results)
    space, replaces = parsed.space, parsed.problem.base.own_checkpoints == "replace"
    undonated = worth_a_word(parsed.traced)
    queue = CompileQueue(results=results, budget=CompileBudget(MOST), progress=progress)
    try:
        with interrupts_heard() as check:
            counts = _counts(parsed, results)
            compared = _compared(parsed, counts, results)
            counts = () if compared is None else counts
            if not (parsed.is_divided or counts or space.offload or space.chunks or space.batch is not None):
                queue = replace(queue, budget=CompileBudget(MOST_OF_REMAT + replaces + most_of_options(space)))
            queue = replace(queue, check=check)
            run_search(parsed, counts, queue.at_most(queue.budget.limit - bool(undonated) - replaces))
            if not results.entries:
                raise next(
                    (each for each in results.failed if isinstance(each, CompileTimeoutError)), results.failed[0]
                )
            if replaces:
                compile_as_written(chosen(results.entries)[0].compiler, queue)
            donation = note_donation(queue, chosen(results.entries)[0], parsed.donation, undonated)
    except KeyboardInterrupt:
        results.note("Interrupted: this is the best of what was compiled so far.")
        if not results.entries:
            raise
    if not compared and any(entry.compiler.unchecked for entry in results.entries):
        results.note(_UNCHECKED)
    best, reason = chosen(results.entries)
    best = _placed_elsewhere(queue, best)
    note_choice(results, best, parsed.traced)
    record = _record(queue, best, reason, _state_bytes(best.compiler.leaves, _rows_if_known(parsed)))
    if best.candidate.fits is not False:
        return record
    obstacles = tuple(dict.fromkeys((*results.obstacles, *best.compiler.obstacles)))
    return replace(record, obstacles=obstacles, remedies=remedies(best, donation), searches=searches(parsed, results))


def _parsed(
    train_step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    request: PlanRequest,
    results: CompileResults,
) -> ParsedRequest:
    """The request as it is understood: the problem, its plain step traced, and what may be varied of it."""
    space = parse_search(request.search)
    own = own_step(train_step, args, kwargs)
    own.require_agreement(space)
    hardware = None if request.target is None else resolve_target(request.target)
    if hardware is not None and hardware.platform == "cpu" and jax.default_backend() == "cpu":
        hardware = None
    resident = parse_resident(request.resident)
    first = Problem(
        train_step=own.function,
        args=own.args,
        kwargs=own.kwargs,
        target=hardware,
        budget=budget_for(request.budget, hardware),
        resident_bytes=resident.bytes,
        base=StepPolicy(donate=own.donation, compiler_options=own.compiler_options),
        state_shardings=own.state_shardings,
        gradients=own.gradients,
        weighs_overlap=bool(space.compiler_options),
    )
    first = replace(first, plain=first.step(first.base))
    traced = traced_plainly(first)
    problem = with_donation(first, donation_of(first, own.donation, space))
    problem = replace(problem, device_count=max((_devices_of(leaf) for leaf in traced.leaves), default=1))
    divided = is_divided(problem, traced, space, request.mesh)
    problem, space = own.kept(problem, traced, space, divided=divided)
    if space.own_checkpoints:
        problem = without_own_checkpoints(problem, results.note)
    return ParsedRequest(
        problem=problem,
        traced=traced,
        space=_of_use(space, problem, results),
        resident=resident,
        programs=parse_beside(request.beside),
        mesh=request.mesh,
        donation=own.donation,
        is_divided=divided,
        is_open=request.budget is None,
    )


def _of_use(space: Space, problem: Problem, results: CompileResults) -> Space:
    """What is asked for, without what moves nothing on this platform: it would take compiles from what may help."""
    if not space.offload or problem.platform != "cpu":
        return space
    results.note("Offload was not tried: a CPU's device memory is its host's.")
    return replace(space, offload=False)


def _placed_elsewhere(queue: CompileQueue, best: Entry) -> Entry:
    """Of what a TPU's compiler refused and did not place, what makes the peak where there is room for it; one more compile."""
    if not best.candidate.refusal or best.compiler.problem.platform != "tpu" or not queue.remaining:
        return best
    try:
        with interrupts_heard() as check:
            replace(queue, check=check).report(
                f"{best.compiler.title(best.candidate.policy)} where there is room for it"
            )
            peak, name, cached = best.compiler.placed_elsewhere(best.candidate.policy)
    except CompileError as error:
        queue.results.note(f"What makes the peak where there is room for it is unknown: {error}")
        return best
    except KeyboardInterrupt:  # all else is known
        queue.results.note("Interrupted: what makes the peak where there is room for it was not asked.")
        return best
    if peak is None:
        return best
    queue.budget.use(1)
    queue.results.uncached += not cached
    return queue.results.replace(best, replace(best.candidate, placed_elsewhere=peak, placed_by=name))


def _counts(parsed: ParsedRequest, results: CompileResults) -> tuple[int, ...]:
    """Numbers of microbatches to try."""
    problem, asked = parsed.problem, parsed.space.microbatches
    if asked and accumulates_already(problem.args, dict(problem.kwargs)):
        results.note(
            "Microbatches were not tried: optax.MultiSteps accumulates already (its MultiStepsState is among the arguments), and "
            "both would accumulate twice. Pass the inner optimizer alone to have the plan choose."
        )
        return ()
    batch = _rows_if_known(parsed) if asked else None
    rows = None if batch is None else batch.count
    tried = asked if asked != "all" else tuple(2**power for power in range(1, _MOST_MICROBATCHES.bit_length()))
    if parsed.space.batch is not None or rows is None:
        return tried
    uneven = [str(count) for count in tried if rows % count]
    if asked != "all" and len(uneven) == len(tried):
        dividing = [str(count) for count in range(2, min(rows, _MOST_MICROBATCHES) + 1) if rows % count == 0]
        meant = (
            f"Expected some that do: {', '.join(dividing)}." if dividing else "Leave microbatches out of the search."
        )
        msg = f"Microbatches {', '.join(uneven)} do not divide the {rows} rows of the batch. {meant}"
        raise PlanError(msg)
    if uneven and asked != "all":
        results.note(
            f"Microbatches {', '.join(uneven)} were not tried: they do not divide the {rows} rows of the batch."
        )
    return tuple(count for count in tried if rows % count == 0)


def _rows_if_known(parsed: ParsedRequest) -> Rows | None:
    """The step's batch; None where its arguments do not show it, and only those of the losses do."""
    space = parsed.space
    try:
        return find_rows(parsed.problem, parsed.traced, space.batch.argnames if space.batch is not None else ())
    except PlanError:
        return None


def _compared(parsed: ParsedRequest, counts: Sequence[int], results: CompileResults) -> bool | None:
    """Whether the loss was held against its accumulation on real rows; None, and a note, where it is another gradient."""
    problem, batch = parsed.problem, _rows_if_known(parsed)
    count = next((each for each in counts if batch is None or batch.count % each == 0), None)
    if count is None:
        return False
    step = problem.step(replace(problem.base, microbatches=count))
    try:
        with traced_with_rows(f"{problem.name} over {count} microbatches"), jax.debug_nans(False):
            return step.compare(problem.args, dict(problem.kwargs))
    except (PolicyError, PlanError) as error:
        results.note(f"Microbatches were not tried: {error}")
        return None


def _shortened(candidate: Candidate) -> Candidate:
    """With the largest buffers of each group alone, of what makes its peak and what makes it elsewhere."""
    peak, elsewhere = candidate.peak, candidate.placed_elsewhere
    return replace(
        candidate, peak=peak and peak.largest(_SHOWN), placed_elsewhere=elsewhere and elsewhere.largest(_SHOWN)
    )


def _record(queue: CompileQueue, best: Entry, reason: str, least_bytes: int) -> PlanRecord:
    compiler, results = best.compiler, queue.results
    problem = compiler.problem
    hardware, limits = problem.target, problem.budget
    candidates = sorted(
        (entry.candidate for entry in results.entries),
        key=lambda c: (-(c.step_bytes or 0), c.extra_flops, c.policy.remat != "none", repr(c.policy)),
    )
    platform = hardware.platform if hardware is not None else jax.default_backend()
    answers = [answer for entry in results.entries for answer in entry.compiler.answers[:1]]
    return PlanRecord(
        step=problem.name,
        target="attached" if hardware is None else hardware.name,
        platform=platform,
        device_count=problem.device_count,
        candidates=tuple(map(_shortened, candidates)),
        chosen=next(index for index, each in enumerate(candidates) if each is best.candidate),
        reason=reason,
        limit_bytes=limits.limit_bytes,
        budget_bytes=limits.bytes,
        budget_reason=limits.reason,
        resident_bytes=problem.resident_bytes,
        least_bytes=least_bytes,
        compiles=queue.budget.used,
        beside_compiles=results.coresident,
        compiled=results.uncached + results.coresident_uncached,
        margin=_MARGINS.get(platform, "") if hardware is not None else "",
        versions=_versions(answers, hardware),
        flags={name: str(value) for answer in answers[:1] for name, value in answer.compiler_options.items()},
        mesh=_mesh_of(problem, compiler.leaves),
        signature=tuple((leaf.path, leaf.type_text) for leaf in compiler.leaves),
        fingerprint=compiler.plain.operations,
        device_kind=kind_here() if hardware is None else hardware.device_kind,
        process_flags=flags_now(),
        fraction=needed_share(best),
        own_checkpoints=tuple(dict.fromkeys(each for entry in results.entries for each in entry.compiler.left_alone)),
        gradients=problem.gradients,
        notes=tuple(dict.fromkeys((*results.notes, *compiler.notes))),
    )


def _state_bytes(leaves: Sequence[Leaf], batch: Rows | None) -> int:
    """What parameters, optimizer and other state alone take on one device: what is updated or frozen, whatever it is called.

    Args:
        leaves: The step's arguments.
        batch: Which of them are the batch. What has no rows like it is frozen; where no batch is known, this is unknown.
    """
    sizes: dict[str, set[int]] = {}
    for leaf in leaves:
        sizes.setdefault(leaf.argument, set()).update(leaf.shape[:1])

    def stays(leaf: Leaf) -> bool:
        if leaf.kind in (PARAMETERS, OPTIMIZER, STATE) or leaf.updated:
            return True
        is_frozen = batch is not None and leaf.argument not in batch.arguments and sizes[leaf.argument] - {batch.count}
        return leaf.kind == OTHER and bool(is_frozen)

    return sum(leaf.bytes_here for leaf in leaves if stays(leaf))


def _devices_of(leaf: Leaf) -> int:
    sharding = getattr(leaf.value, "sharding", None)
    return int(getattr(sharding, "num_devices", 1) or 1)


def _mesh_of(problem: Problem, leaves: Sequence[Leaf]) -> dict[str, int]:
    if problem.mesh is not None:
        return mesh_sizes(problem.mesh)
    for leaf in leaves:
        mesh = getattr(getattr(leaf.value, "sharding", None), "mesh", None)
        if mesh is not None:
            return mesh_sizes(mesh)
    return {}


def _versions(answers: Sequence[TargetCompilation], hardware: Target | None) -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    if hardware is not None:
        found |= {name: version for answer in answers[:1] for name, version in answer.compiler.items()}
    return found
