"""How the compiles of a plan are shared out: remat, microbatches, offload, devices, the largest batch.

Programs of a training run that share the device with the step, such as evaluation, are compiled here too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, final

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem_callbacks.planning.bisect import last_that_fits
from jaxmem_callbacks.planning.choice import chosen, rank
from jaxmem_callbacks.planning.chunk_candidates import MOST_CHUNKS, ChunkSearch
from jaxmem_callbacks.planning.compiles import MOST_OF_REMAT, CompileQueue, Compiler, Entry
from jaxmem_callbacks.planning.option_candidates import (
    most_of_options,
    note_none_known,
    policies_with_options,
    try_options,
)
from jaxmem_callbacks.planning.problem import (
    Held,
    ParsedRequest,
    Problem,
    Program,
    Resident,
    Rows,
    find_rows,
    traced_by_name,
    traced_with_rows,
    with_rows,
)
from jaxmem_callbacks.planning.request import BatchSizes, Space
from jaxmem_callbacks.planning.search import MOST_POLICIES, RematSearch, cuts_moved, offloading_policies
from jaxmem_callbacks.planning.sharding_candidates import layouts
from jaxmem_callbacks.planning.state_candidates import MOST_OF_STATE, try_state_on_host
from jaxmem_callbacks.programs.reading.buffer_assignment import program_memory
from jaxmem_callbacks.programs.steps.leaves import Leaf, named_arguments, state_arguments
from jaxmem_callbacks.programs.steps.step import JitStep, Traced
from jaxmem_callbacks.programs.steps.user_jit import already_jitted
from jaxmem_callbacks.programs.targets.step_on_target import MemoryRefusalError, compile_traced_here, lower_traced_for
from jaxmem_callbacks.records.arguments import name_of
from jaxmem_callbacks.records.errors import LossRefusedError, PlanError, PolicyError
from jaxmem_callbacks.records.plans import BesideProgram, Candidate
from jaxmem_callbacks.records.policies import StepPolicy, policy_words
from jaxmem_callbacks.transforms.arg_roles import OPTIMIZER, PARAMETERS, STATE
from jaxmem_callbacks.transforms.sharding.axes import mesh_roles


def explore(compiler: Compiler, counts: Sequence[int], queue: CompileQueue, *, remat: bool, frontier: bool) -> None:
    """Compile policies that keep all on the device, for one placement of the state and one batch.

    Args:
        compiler: Of the problem.
        counts: Microbatches to try besides 1, ascending.
        queue: Compiles them.
        remat: Whether it may be used.
        frontier: Fill the whole range; else stop where the answer is known.
    """
    bases = [replace(compiler.problem.base, microbatches=count) for count in (1, *counts)]
    if frontier:
        for index, base in enumerate(bases):
            part = queue.at_most(queue.remaining // (len(bases) - index))
            _one(RematSearch(compiler, part, base), remat=remat and part.remaining > 1)
        return
    first = RematSearch(compiler, queue)
    between = first.compile_endpoints() if remat else first.compile_plain()
    if first.plain_fits or (counts and _fewest(compiler, bases, queue)) or not between:
        return
    last = RematSearch(compiler, queue, bases[-1])
    if (
        counts
        and last.compile_endpoints(plain=False)
        and last.full is not None
        and (last.full.fits or not _fits(first.full))
    ):
        last.close_in()
    else:
        first.close_in()


def offload(compilers: Iterable[Compiler], queue: CompileQueue) -> None:
    """Compile policies under which values wait in host memory, one placement of the state after the other.

    Each over as many microbatches as the best that was compiled of it. Where no compile is left, the first stands for all. What
    is refused of one placement before any compiler sees it, such as for want of a loop, is refused of the others too.
    """
    for compiler in compilers:
        known = [entry.candidate for entry in queue.results.entries if entry.compiler is compiler]
        count = min(known, key=rank).policy.microbatches if known else 1
        base = replace(compiler.problem.base, microbatches=count)
        policies = offloading_policies(compiler, base) if queue.remaining else [cuts_moved(base)]
        asked = [(compiler, policy) for policy in policies]
        queue.compile(asked)
        if queue.results.refused.issuperset(asked):
            break


def compile_as_written(compiler: Compiler, queue: CompileQueue) -> None:
    """The step under its author's own checkpoints, to compare with what replaces them."""
    queue.compile([(compiler, replace(compiler.problem.base, own_checkpoints="keep"))])


def fill_frontiers(entries: Sequence[Entry], queue: CompileQueue) -> None:
    """Compile what is between the two ends of some placements, with the compiles that are left: as many as for remat alone.

    A pod's program takes its compiler half a minute, and a frontier of so many points is what one device has too.

    Args:
        entries: One candidate of each placement; its microbatches are used.
        queue: Compiles them.
    """
    wanted = dict.fromkeys((entry.compiler, entry.candidate.policy.microbatches) for entry in entries)
    for index, (compiler, count) in enumerate(wanted):
        made = sum(
            entry.compiler is compiler and entry.candidate.policy.microbatches == count
            for entry in queue.results.entries
        )
        most = min(queue.remaining // (len(wanted) - index), MOST_OF_REMAT - made)
        if most > 0:
            part, base = queue.at_most(most), replace(compiler.problem.base, microbatches=count)
            _one(RematSearch(compiler, part, base), remat=part.remaining > 1)


def _one(search: RematSearch, *, remat: bool) -> None:
    if remat:
        search.run(frontier=True)
    else:
        search.compile_plain()


def _fits(candidate: Candidate | None) -> bool:
    return candidate is not None and candidate.fits is True


def _fewest(compiler: Compiler, bases: Sequence[StepPolicy], queue: CompileQueue) -> bool:
    """Whether the step without remat, the compiler's own included, fits over some number of microbatches; compiles the fewest."""
    ladder = bases[::-1]  # the most microbatches, and so the fewest bytes, first; the last is the whole batch
    found: dict[int, Candidate] = {}

    def guess(low: int, high: int | None) -> int:
        most = (high or len(ladder)) - 1
        points = [(1 / ladder[place].microbatches, each.step_bytes or 0) for place, each in found.items()]
        limit = compiler.problem.budget.bytes
        if len(points) < 2 or limit is None:  # noqa: PLR2004 - a line needs two
            return most - 1
        room = limit - compiler.problem.resident_bytes
        (x, y), (x2, y2) = sorted(points)[-2:]
        slope = (y2 - y) / (x2 - x)
        under = [p for p in range(low + 1, most + 1) if y + slope * (1 / ladder[p].microbatches - x) <= room]
        return max(under, default=low + 1)

    def ask(places: Sequence[int]) -> dict[int, bool]:
        asked = places[: queue.remaining]
        answers = queue.compile([(compiler, ladder[place]) for place in asked])
        found.update({place: each for place, each in zip(asked, answers, strict=True) if each is not None})
        free = {place: each for place, each in found.items() if each.fits and not each.compiler_remat}
        return {place: place in free for place in asked}

    low, _ = last_that_fits(-1, len(ladder) - 1, guess, ask)
    return low >= 0


@final
class LargestBatch:
    """Searches the rows of one problem.

    Args:
        problem: The step, its state placed.
        rows: Its batch.
        sizes: Which numbers of rows to look among.
        counts: Microbatches that may be used besides 1, ascending.

    Raises:
        PlanError: there is no limit to fit into, or no number of rows is left.
    """

    def __init__(self, problem: Problem, rows: Rows, sizes: BatchSizes, counts: Sequence[int]) -> None:
        if problem.budget.bytes is None:
            msg = (
                f'search["batch"] asks for the largest batch that fits, and there is no limit to fit into: '
                f"{problem.budget.reason} Give bytes on one device: budget='12GiB'."
            )
            raise PlanError(msg)
        self._problem, self._rows, self._counts = problem, rows, counts
        self._unit = math.lcm(sizes.multiple_of, _parts(problem, rows) * max(counts, default=1))
        self._most = None if sizes.at_most is None else sizes.at_most // self._unit
        if self._most == 0:
            msg = (
                f'search["batch"]: no batch of at most {sizes.at_most} rows is a multiple of {self._unit}, which the devices, '
                f"microbatches and multiple_of={sizes.multiple_of} need. Expected at_most of at least {self._unit}. Type "
                f'search={{"batch": {{"at_most": {self._unit}}}}}.'
            )
            raise PlanError(msg)
        self._compilers: dict[int, Compiler] = {}
        self._found: dict[tuple[int, StepPolicy], Candidate] = {}

    def foreseen(self, space: Space, queue: CompileQueue) -> int:
        """Rows that may fit, by two sizes under what needs few bytes or, failing that, the step as it is; 0 where both fail."""
        for policy in dict.fromkeys((self._roomy(space), self._problem.base)):
            asked = self._two_sizes(policy, queue)
            if asked is not None:
                return self._unit * min(max(self._guess(policy, *asked), asked[0]), self._most or sys.maxsize)
        return 0

    def _roomy(self, space: Space) -> StepPolicy:
        """The first policy of those that need few bytes."""
        base = replace(self._problem.base, microbatches=max(self._counts, default=1))
        return self._problem.lower_end(base) if space.remat else base

    def run(self, space: Space, queue: CompileQueue) -> None:
        """The largest batch under what needs few bytes, then under what may need fewer; the cheapest step on so many rows.

        A row more may take many bytes, so that beside the most rows there is room for values that are kept: that is the answer,
        and comes before the largest batch of the step as it is, which only shows what it buys.
        """
        plain, roomy = self._problem.base, self._roomy(space)
        further = [*self._around_blocks(roomy), replace(roomy, levels=2)] if space.remat else []
        further += [cuts_moved(roomy)] if space.offload else []
        reached = self._largest(roomy, _one_of(1 if roomy == plain else 2, queue))
        for index, policy in enumerate(further):
            if reached is not None and reached != self._most:
                reached = self._beyond(policy, reached, _one_of(len(further) - index + 1, queue))
        if roomy == plain:
            return
        if reached is not None and reached == self._most:
            compiler = self._compiler(reached)
            staying = queue.at_most(queue.remaining - (MOST_POLICIES if space.offload else 0))
            explore(compiler, self._counts, staying, remat=space.remat, frontier=False)
            offload([compiler] if space.offload else (), queue)
            return
        if space.remat and reached:
            self._keep_more(roomy, reached, _one_of(2, queue))
        self._largest(plain, queue)

    @property
    def rows_reached(self) -> int:
        """The most rows that were compiled and fit; 0 where none do."""
        return self._unit * max((place for (place, _), each in self._found.items() if each.fits), default=0)

    def under_options(self, space: Space, queue: CompileQueue) -> None:
        """More rows than were reached, under options of the compiler; one compile of each set that reaches no further."""
        if not self._found:
            return
        (place, _), best = min(self._found.items(), key=lambda one: rank(one[1]))
        reached = place if best.fits else 0
        for policy in policies_with_options(Entry(self._compiler(place), best), space):
            if reached != self._most:
                reached = self._beyond(policy, reached, queue)

    def _around_blocks(self, roomy: StepPolicy) -> list[StepPolicy]:
        """The roomy policy with its checkpoints around blocks that repeat; none where nothing does."""
        policy = self._problem.lower_end(roomy, "blocks")
        try:
            self._compiler(max(self._rows.count // self._unit, 1)).facts(policy)
        except (PolicyError, LossRefusedError):
            return []
        return [policy]

    def _keep_more(self, roomy: StepPolicy, reached: int, queue: CompileQueue) -> None:
        """Of the most rows, the step that computes least again; nothing to compile where no one level of checkpoints fits."""
        ends = (self._found.get((reached, policy)) for policy in (roomy, self._problem.lower_end(roomy, "blocks")))
        if not any(each is not None and each.fits for each in ends):
            return
        search = RematSearch(
            self._compiler(reached), queue, replace(self._problem.base, microbatches=roomy.microbatches)
        )
        if search.compile_endpoints(plain=False):
            search.close_in()

    def _beyond(self, policy: StepPolicy, reached: int, queue: CompileQueue) -> int:
        """The largest batch under a policy that is used only where it reaches further; one compile where it does not."""
        fits = self._ask(policy, [reached + 1], queue).get(reached + 1)
        if fits is False:
            queue.results.note(f"Under {policy_words(policy)} {(reached + 1) * self._unit} rows do not fit either.")
        if not fits:
            return reached
        return self._between(policy, (reached + 1, None if self._most is None else self._most + 1), queue)

    def _largest(self, policy: StepPolicy, queue: CompileQueue) -> int | None:
        """The largest batch that fits under a policy, in units; None where nothing could be compiled."""
        asked = self._two_sizes(policy, queue)
        return None if asked is None else self._between(policy, asked, queue)

    def _two_sizes(self, policy: StepPolicy, queue: CompileQueue) -> tuple[int, int | None] | None:
        """The batch as it is and half or twice of it: what fits of them, and what does not; None where none was compiled."""
        start = max(self._rows.count // self._unit, 1)
        start = start if self._most is None else min(start, self._most)
        first = self._ask(policy, [start], queue)
        if not first:
            return None
        second = (
            max(start // 2, 1)
            if not first.get(start)
            else 2 * start
            if self._most is None
            else min(2 * start, self._most)
        )
        answers = first | (self._ask(policy, [second], queue) if second != start else {})
        low = max((place for place, fits in answers.items() if fits), default=0)
        end = None if self._most is None else self._most + 1
        return low, min((place for place, fits in answers.items() if not fits), default=end)

    def _between(self, policy: StepPolicy, asked: tuple[int, int | None], queue: CompileQueue) -> int:
        low, high = last_that_fits(
            *asked, lambda low, high: self._guess(policy, low, high), lambda places: self._ask(policy, places, queue)
        )
        self._note(policy, low, high, queue)
        return low

    def _ask(self, policy: StepPolicy, places: Sequence[int], queue: CompileQueue) -> dict[int, bool]:
        answers = queue.compile([(self._compiler(place), policy) for place in places])
        known = {place: each for place, each in zip(places, answers, strict=True) if each is not None}
        self._found |= {(place, policy): each for place, each in known.items()}
        return {place: each.fits is True for place, each in known.items()}

    def _compiler(self, place: int) -> Compiler:
        if place not in self._compilers:
            count = place * self._unit
            with traced_with_rows(f"{self._problem.name} with {count} rows"):
                self._compilers[place] = Compiler(with_rows(self._problem, self._rows, count))
        return self._compilers[place]

    def _guess(self, policy: StepPolicy, low: int, high: int | None) -> int:
        """Where the line through what fits and what does not meets the limit; halfway where there is no such line.

        Bytes may be flat in few rows and grow in many, so two points on one side predict little on the other.
        """
        room = (self._problem.budget.bytes or 0) - self._problem.resident_bytes
        points = sorted(
            (place, each.step_bytes)
            for (place, of), each in self._found.items()
            if of == policy and each.step_bytes is not None and not each.compiler_remat
        )
        under, over = [point for point in points if point[0] <= low], [point for point in points if point[0] > low]
        (x, y), (x2, y2) = (
            (*under[-1:], *over[:1]) if under and over else (points[1:] and points[-2:]) or ((0, 0), (0, 0))
        )
        if y2 <= y:
            return 2 * low if high is None else (low + high) // 2
        return math.floor(x + (room - y) * (x2 - x) / (y2 - y))

    def _note(self, policy: StepPolicy, low: int, high: int | None, queue: CompileQueue) -> None:
        words, unit = policy_words(policy), self._unit
        why = "others could not be compiled" if queue.remaining else "no compile was left to close in"
        if low == 0:
            rows = (high or 1) * unit
            queue.results.note(
                f"Under {words} not even {rows} rows fit" + ("." if high == 1 else f"; of fewer, {why}.")
            )
        elif self._most is not None and low == self._most:
            queue.results.note(f"Under {words} all {low * unit} rows fit that were allowed.")
        elif high == low + 1:
            queue.results.note(f"Under {words} {low * unit} rows fit and {(low + 1) * unit} do not, both compiled.")
        else:
            bound = "unknown" if high is None else f"below {high * unit}"
            queue.results.note(f"Under {words} {low * unit} rows fit; the largest batch is {bound}: {why}.")


def _parts(problem: Problem, rows: Rows) -> int:
    """Into how many the devices divide the batch's rows."""
    parts = 1
    for name, value in named_arguments(problem.train_step, problem.args, dict(problem.kwargs)):
        for leaf in jax.tree.leaves(value) if name in rows.arguments else ():
            parts = max(parts, _parts_of(leaf))
    return parts


def _parts_of(leaf: Any) -> int:
    place, shape = getattr(leaf, "sharding", None), tuple(getattr(leaf, "shape", ()))
    return 1 if place is None or not shape else shape[0] // place.shard_shape(shape)[0]


def run_search(parsed: ParsedRequest, counts: Sequence[int], queue: CompileQueue) -> None:
    """Compile all candidates that are worth it, one placement of the state after the other.

    Args:
        parsed: The request.
        counts: Microbatches to try besides 1, ascending.
        queue: Compiles them.
    """
    problem, traced, space, divided = parsed.problem, parsed.traced, parsed.space, parsed.is_divided
    rows = find_rows(problem, traced, space.batch.argnames) if space.batch is not None else None
    ways = list(layouts(problem, traced, space, parsed.mesh, queue.results.note)) if divided else [problem]
    cut = list[Compiler]()
    optional = most_of_options(space) + MOST_OF_STATE * space.state_offload
    whole, queue = queue, queue.at_most(queue.remaining - optional)
    reserved = MOST_POLICIES * space.offload + MOST_CHUNKS * space.chunks if space.batch is None else 0
    staying = queue.at_most(queue.remaining - reserved)
    try:
        if space.batch is not None and rows is not None:
            placed = [_with_coresident(parsed, way, queue) for way in ways]
            sizes = [LargestBatch(way, rows, space.batch, counts) for way in placed]
            _largest_of(sizes, space, staying)
            if space.compiler_options:
                most = max(sizes, key=lambda each: each.rows_reached)
                most.under_options(space, whole.at_most(most_of_options(space)))
                note_none_known(problem, queue.results)
            ways = []
        for index, way in enumerate(ways):
            placed = _with_coresident(parsed, way, queue)
            part = staying.at_most(staying.remaining // (len(ways) - index))  # what one leaves is for those that follow
            compiler, is_whole = Compiler(placed), parsed.is_open and not divided
            explore(compiler, counts, part, remat=space.remat, frontier=is_whole)
            cut += [] if is_whole or part.remaining else [compiler]
        if space.batch is None and queue.results.entries:
            _use_the_rest(parsed, counts, queue, cut)
        if space.compiler_options and space.batch is None and queue.results.entries:
            try_options(parsed, whole)
        if space.state_offload and queue.results.entries:
            try_state_on_host(parsed, whole)
    finally:  # also of what was compiled before Ctrl-C
        whole.note_skipped()


def _largest_of(searches: Sequence[LargestBatch], space: Space, queue: CompileQueue) -> None:
    """The largest batch of some placements: two sizes of each predict which may have most rows.

    That one has the compiles that are left, and the others what it leaves: divided among several, of which each has nearly as
    many rows, they would be too few for any. Where nothing is foreseen of any, they are divided all the same.
    """
    reach = [search.foreseen(space, queue) for search in searches] if len(searches) > 1 else [0]
    ranked = sorted(zip(reach, searches, strict=True), key=lambda each: -each[0])
    for index, (_, search) in enumerate(ranked):
        search.run(space, queue if max(reach) else queue.at_most(queue.remaining // (len(ranked) - index)))


def _one_of(parts: int, queue: CompileQueue) -> CompileQueue:
    """The queue with one of so many parts of the compiles that remain."""
    return queue.at_most(-(-queue.remaining // parts))


def _use_the_rest(parsed: ParsedRequest, counts: Sequence[int], queue: CompileQueue, cut: Sequence[Compiler]) -> None:
    """Offload for the best placement, then what was cut off, then offload for the others, then the frontiers."""
    space, entries = parsed.space, queue.results.entries
    if space.chunks:
        for compiler in _best_first(queue)[:1]:
            ChunkSearch(compiler, queue).run(remat=space.remat)
    if space.offload:
        offload(_best_first(queue)[:1], queue)
    resume(cut, counts, queue, remat=space.remat)
    if space.offload and not _is_settled(queue):
        offload(_best_first(queue), queue)
    if parsed.is_divided and parsed.is_open and space.remat:
        least = min(entries, key=lambda entry: entry.candidate.step_bytes or math.inf)
        fill_frontiers([chosen(entries)[0], least], queue)


def _best_first(queue: CompileQueue) -> list[Compiler]:
    """The placements of which anything was compiled."""
    ranked = sorted(queue.results.entries, key=lambda entry: rank(entry.candidate))
    return list(dict.fromkeys(entry.compiler for entry in ranked))


def _is_settled(queue: CompileQueue) -> bool:
    """Whether what fits computes nothing again."""
    best = chosen(queue.results.entries)[0].candidate
    return best.fits is True and not best.extra_flops


def resume(cut: Sequence[Compiler], counts: Sequence[int], queue: CompileQueue, *, remat: bool) -> None:
    """Follow to their end the placements that used up their share of the compiles, the best of them first.

    What was compiled is known, so the same search goes on where it was cut off.
    """
    for compiler in _best_first(queue):
        if compiler in cut and queue.remaining and not _is_settled(queue):
            explore(compiler, counts, queue, remat=remat, frontier=False)


def _with_coresident(parsed: ParsedRequest, placed: Problem, queue: CompileQueue) -> Problem:
    """The same problem, with the programs that must fit beside it compiled."""
    if not parsed.programs:
        return placed
    with placed.in_mesh():
        traced = placed.step(placed.base).traced(placed.args, dict(placed.kwargs))
    compiled = compile_beside(placed, (parsed.traced, traced), parsed.programs, parsed.resident, queue)
    return replace(placed, beside=compiled)


_KEPT = (PARAMETERS, OPTIMIZER, STATE)


def compile_beside(
    problem: Problem,
    traced: tuple[Traced, Traced],
    programs: Sequence[Program],
    resident: Resident,
    queue: CompileQueue,
) -> tuple[BesideProgram, ...]:
    """Each program compiled once for the problem's target, the state placed as the problem places it.

    Args:
        problem: The step, its state placed.
        traced: The step with the arguments as the user gave them, and as the problem places them.
        programs: Functions and their arguments.
        resident: What stays in memory in addition.
        queue: Reports and counts what is compiled.

    Raises:
        PlanError: a program fails while it is traced, which is its cause.
        CompileError: a compiler failed.
    """
    given, placed = traced
    # By path, since a call by keyword is made one by position where its state is placed.
    by_path = {leaf.path: leaf for leaf in placed.leaves}
    pairs = [(own.value, by_path.get(own.path, own)) for own in given.leaves]
    every = [Held(value, leaf.shape, leaf.dtype, leaf.bytes_here, _place(leaf)) for value, leaf in pairs]
    updated = state_arguments(given.leaves, given.undonated)
    stays = [
        held for held, leaf in zip(every, given.leaves, strict=True) if leaf.argument in updated or leaf.kind in _KEPT
    ]
    stays += resident.arrays
    passing = [held for held in every if held not in stays]
    compiled: list[BesideProgram] = []
    for function, args in programs:
        name = name_of(function)
        queue.report(f"{name} beside the step")
        with problem.in_mesh():
            with traced_by_name(f"{name}, a program beside the step,", name):
                own = _as_it_is(function).traced(args, {})
            same = _same(own.leaves, stays, passing)
            own = own._replace(
                leaves=[_placed(leaf, held, problem) for leaf, held in zip(own.leaves, same, strict=True)]
            )
            needed = _compiled(problem, own, name, queue)
        taken = {id(held) for held in same if held is not None}
        kept = sum(held.bytes for held in stays if id(held) not in taken) + resident.sizes
        limit = problem.budget.bytes
        fits = None if limit is None else needed is not None and needed + kept <= limit
        compiled.append(BesideProgram(name=name, program_bytes=needed, held_bytes=kept, fits=fits))
    return tuple(compiled)


def _as_it_is(function: Callable[..., Any]) -> JitStep:
    """The program as the user runs it: his own jit with its donation, else one that donates nothing."""
    if isinstance(function, JitStep):
        return function
    return JitStep(function, StepPolicy(donate=None if already_jitted(function) is not None else ()))


def _same(leaves: Sequence[Leaf], stays: Sequence[Held], passing: Sequence[Held]) -> list[Held | None]:
    """For each array of a program what it is of the step: the same object, else a state of its shape that is left."""
    by_identity = {id(held.value): held for held in (*passing, *stays)}
    found = [by_identity.get(id(leaf.value)) for leaf in leaves]
    taken = {id(held) for held in found if held is not None}
    free = [held for held in stays if id(held) not in taken]
    for index, leaf in enumerate(leaves):
        like = next((held for held in free if held.shape == leaf.shape and held.dtype == leaf.dtype), None)
        if found[index] is None and like is not None and leaf.shape:
            found[index] = like
            free.remove(like)
    return found


def _place(leaf: Leaf) -> Any:
    return getattr(leaf.value, "sharding", None)


def _placed(leaf: Leaf, held: Held | None, problem: Problem) -> Leaf:
    """The leaf where the step has it; on a planned mesh what is new there is divided like a batch, where that divides."""
    place = held.sharding if held is not None else None
    if place is None and problem.mesh is not None:
        roles = mesh_roles(problem.mesh)
        divides = bool(leaf.shape) and leaf.shape[0] % roles.size(roles.batch) == 0
        place = NamedSharding(problem.mesh, PartitionSpec((roles.batch or None) if divides else None))
    if not isinstance(place, NamedSharding):
        return leaf
    return replace(leaf, value=jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place))


def _compiled(problem: Problem, traced: Traced, name: str, queue: CompileQueue) -> int | None:
    queue.results.coresident += 1
    if problem.target is None:
        queue.results.coresident_uncached += 1
        try:
            compiled = compile_traced_here(traced, name)
        except MemoryRefusalError as refusal:
            return refusal.needed_bytes
        return program_memory(compiled, name=name, platform=jax.default_backend(), target="attached").step_bytes
    answer = lower_traced_for(traced, name, problem.target.name)()
    queue.results.coresident_uncached += not answer.cached
    return answer.needed_bytes
