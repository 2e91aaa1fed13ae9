"""The compiles of a plan: their budget, the queue that makes two at a time, and what they gave."""

from __future__ import annotations

import concurrent.futures
import math
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias, final

from jaxmem_callbacks.planning.compile_candidate import Compiler
from jaxmem_callbacks.planning.interrupts import Terminated
from jaxmem_callbacks.programs.targets.worker import end_workers
from jaxmem_callbacks.records.errors import CompileError, CompileTimeoutError, LossRefusedError, PolicyError
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.policies import StepPolicy

# Of remat alone, for one placement of the state; and of everything else that may be searched, such as three shardings with both
# their ends.
MOST_OF_REMAT, MOST = 8, 16
_AT_ONCE = 2
_SHOWN = 4  # policies that share a failure and are named
_POLL_S = 0.25
_MOST_S = 5.0  # that a scheduler's SIGTERM waits for a compile that nothing can end: SIGKILL comes next
Progress = Callable[[str, int, int], None]
Asked: TypeAlias = tuple[Compiler, StepPolicy]
_Compile = concurrent.futures.Future[Candidate]


@dataclass(frozen=True, slots=True)
class Entry:
    """A candidate and what compiled it."""

    compiler: Compiler
    candidate: Candidate


@final
class CompileBudget:
    """How many compiles a plan may make. Searches get parts of it: what a part uses, the whole has used.

    Args:
        limit: Compiles at most.
        whole: The budget that this is a part of; None for a plan's own.

    Attributes:
        used: Compiles so far, those that the disk cache answered included.
        skipped: What was to be compiled when no compile remained.
    """

    def __init__(self, limit: int, whole: CompileBudget | None = None) -> None:
        self.limit, self.used, self._whole = limit, 0, whole
        self.skipped: dict[Asked, None] = {} if whole is None else whole.skipped

    @property
    def whole(self) -> CompileBudget:
        """The plan's own budget."""
        return self if self._whole is None else self._whole.whole

    @property
    def remaining(self) -> int:
        """Compiles that may still come."""
        own = max(self.limit - self.used, 0)
        return own if self._whole is None else min(own, self._whole.remaining)

    def part(self, compiles: int) -> CompileBudget:
        """A part of what remains, of one compile at least."""
        return CompileBudget(max(compiles, 1), self)

    def use(self, compiles: int) -> None:
        """Count compiles; a negative number gives some back."""
        self.used += compiles
        if self._whole is not None:
            self._whole.use(compiles)


@final
class CompileResults:
    """What the compiles of one plan gave.

    Attributes:
        entries: The candidates, in the order of their compiles.
        failed: Why others are none.
        refused: What a policy or a loss refused, so that no compiler was asked.
        obstacles: Those of the notes that explain why nothing can be saved.
        uncached: Compiles of the step that the disk cache did not know.
        coresident: Compiles of programs beside the step.
        coresident_uncached: Those of them, and of the step with other donation, that the disk cache did not know.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.failed: list[Exception] = []
        self.refused: set[Asked] = set()
        self.obstacles: list[str] = []
        self.uncached = self.coresident = self.coresident_uncached = 0
        self.known: dict[Asked, Candidate | None] = {}
        self._timeouts = 0
        self._notes: dict[str, list[str]] = {}

    @property
    def hangs(self) -> bool:
        """Whether the compiler had no answer in its time to the first policies: others would have none either."""
        return not self.entries and self._timeouts >= _AT_ONCE

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks, each once, in their order; a failure that several policies share is one."""
        return tuple(
            f"{_titles(titles)} not compiled: {text}" if titles else text for text, titles in self._notes.items()
        )

    def note(self, text: str) -> None:
        """Add a remark."""
        self._notes[text] = []

    def note_obstacle(self, text: str) -> None:
        """Add a remark that explains why nothing can be saved."""
        self.obstacles.append(text)
        self.note(text)

    def add(self, compiler: Compiler, policy: StepPolicy, candidate: Candidate) -> None:
        """Add what a compiler answered."""
        self.entries.append(Entry(compiler, candidate))
        self.known[compiler, policy] = candidate
        self.uncached += not candidate.cached

    def add_failure(self, compiler: Compiler, policy: StepPolicy, error: Exception) -> None:
        """Add a policy that failed, and why."""
        self.known[compiler, policy] = None
        self.failed.append(error)
        if isinstance(error, CompileError):
            self.uncached += 1
            self._timeouts += isinstance(error, CompileTimeoutError)
        else:
            self.refused.add((compiler, policy))
        self._notes.setdefault(str(error), []).append(compiler.title(policy))

    def replace(self, entry: Entry, candidate: Candidate) -> Entry:
        """Replace a candidate by one of which more is known."""
        known = Entry(entry.compiler, candidate)
        self.entries[self.entries.index(entry)] = known
        return known


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileQueue:
    """Compiles candidates within a budget.

    Attributes:
        budget: What these compiles are counted in: the plan's own, or the part of one search.
        results: Where candidates, failures and notes are added.
        progress: Called with what is being compiled, how many are done and how many may come.
        check: Raises what would end the plan.
    """

    budget: CompileBudget
    results: CompileResults = field(default_factory=CompileResults)
    progress: Progress | None = None
    check: Callable[[], None] = lambda: None

    @property
    def remaining(self) -> int:
        """Compiles that may still come."""
        return 0 if self.results.hangs else self.budget.remaining

    def at_most(self, compiles: int) -> CompileQueue:
        """The queue for a search that may use no more than so many of the compiles that remain."""
        return replace(self, budget=self.budget.part(compiles))

    def note_skipped(self) -> None:
        """Note what was not compiled because none remained, where none remains to make up for it."""
        left = [one for one in self.budget.skipped if one not in self.results.known]
        if left and not self.remaining:
            skipped = "; ".join(compiler.title(policy) for compiler, policy in left)
            most = self.budget.whole.limit
            self.results.note(f"Not compiled, since {most} compiles are the most that one plan takes: {skipped}.")

    def report(self, what: str) -> None:
        """Report what is being compiled, or was last."""
        self.check()
        if self.progress is not None:
            self.progress(what, len(self.results.entries), self.budget.whole.limit)

    def compile(self, asked: Sequence[Asked]) -> list[Candidate | None]:
        """Compile policies, no more of them than remain; what was compiled before is not compiled again.

        Returns:
            A candidate for each that was asked, None where its compiler failed or no compile remained.
        """
        results = self.results
        unknown = [one for one in dict.fromkeys(asked) if one not in results.known]
        new = unknown[: self.remaining]
        self.budget.use(len(new))
        self.budget.skipped.update(dict.fromkeys(unknown[len(new) :]))
        pool = concurrent.futures.ThreadPoolExecutor(_AT_ONCE)
        waiting: dict[_Compile, Asked] = {}
        try:
            if new:
                self.report(" and ".join(compiler.title(policy) for compiler, policy in new))
            for (
                compiler,
                policy,
            ) in new:  # lowered in this thread, whose settings JAX obeys; only compilers run in others
                with self._failures_recorded(compiler, policy):
                    waiting[pool.submit(compiler.lowered(policy))] = compiler, policy
            for done in self._completed(waiting):
                compiler, policy = waiting[done]
                with self._failures_recorded(compiler, policy):
                    results.add(compiler, policy, done.result())
                if results.hangs:
                    break
                running = [compiler.title(policy) for each, (compiler, policy) in waiting.items() if each.running()]
                self.report(" and ".join(running) or compiler.title(policy))
        finally:  # also at Ctrl-C, and where one of them failed: no compiler goes on for an answer that nobody waits for
            pool.shutdown(wait=False, cancel_futures=True)
            try:
                end = time.monotonic() + (_MOST_S if isinstance(sys.exception(), Terminated) else math.inf)
                while not all(each.done() for each in waiting) and time.monotonic() < end:
                    end_workers()
                    time.sleep(0.05)
                # On an interrupt, keep the compiles that have ended meanwhile.
                for done, one in waiting.items():
                    is_answer = done.done() and not done.cancelled() and done.exception() is None
                    if one not in results.known and is_answer:
                        results.add(*one, done.result())
            finally:
                self.budget.use(-sum(one not in results.known for one in new))  # interrupted
        return [results.known.get(one) for one in asked]

    def _completed(self, waiting: Collection[_Compile]) -> Iterator[_Compile]:
        """Compiles as they end. A signal may have come to another thread than this, which wakes nobody."""
        left = set(waiting)
        while left:
            done, left = concurrent.futures.wait(left, _POLL_S, concurrent.futures.FIRST_COMPLETED)
            self.check()
            yield from done

    @contextmanager
    def _failures_recorded(self, compiler: Compiler, policy: StepPolicy) -> Generator[None]:
        """Record a policy that fails, and go on with the others."""
        try:
            yield
        except (CompileError, PolicyError, LossRefusedError) as error:
            self.check()  # a compile that a signal ended has not failed
            self.results.add_failure(compiler, policy, error)
            if not isinstance(error, CompileError):
                self.budget.use(-1)


def _titles(titles: Sequence[str]) -> str:
    """The policies that share a failure, and the verb."""
    several = dict.fromkeys(titles)
    shown = "; ".join(list(several)[:_SHOWN])
    more = f" and {len(several) - _SHOWN} more" if len(several) > _SHOWN else ""
    return f"{shown}{more} {'were' if len(several) > 1 else 'was'}"
