"""The queue of compiles, two at a time, and the budget of them."""

from __future__ import annotations

import concurrent.futures
import math
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from jaxmem_callbacks.planning.compile_candidate import Compiler
from jaxmem_callbacks.planning.interrupts import Terminated
from jaxmem_callbacks.programs.targets.worker import end_workers
from jaxmem_callbacks.records.errors import CompileError, CompileTimeoutError, LossRefusedError, PolicyError
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.policies import StepPolicy

# Of remat alone, for one placement of the state; and of everything else that may be searched, such as three shardings with both
# their ends.
MOST_OF_REMAT, MOST = 6, 16
_AT_ONCE = 2
_SHOWN = 4  # policies that share a failure and are named
_HEARD_S = 0.25
_MOST_S = 5.0  # that a scheduler's SIGTERM waits for a compile that nothing can end: SIGKILL comes next
Progress = Callable[[str, int, int], None]
_Compile = concurrent.futures.Future[Candidate]


@dataclass(frozen=True, slots=True)
class Entry:
    """A candidate and what compiled it."""

    compiler: Compiler
    candidate: Candidate


@final
class Ledger:
    """All compiles of one plan.

    Args:
        progress: Called with what is being compiled, how many are done and how many may come.
        most: Compiles at most.

    Attributes:
        check: Called where progress is told: raises what would end the plan.
        refused: What a policy or a loss refused, so that no compiler was asked.
        obstacles: Those of the notes that say why nothing can be saved.
    """

    def __init__(self, progress: Progress | None, most: int) -> None:
        self._progress = progress or (lambda _what, _done, _most: None)
        self.check: Callable[[], None] = lambda: None
        self.most = most
        self.asked = 0
        self._until = most
        self.compiled = 0  # of those that were asked what the cache did not know
        self.beside = self.beside_compiled = 0  # programs beside the step, and those that the cache did not know
        self.entries: list[Entry] = []
        self.failed: list[Exception] = []
        self.refused: set[tuple[Compiler, StepPolicy]] = set()
        self.obstacles: list[str] = []
        self._out_of_time = 0
        self._known: dict[tuple[Compiler, StepPolicy], Candidate | None] = {}
        self._cut: dict[tuple[Compiler, StepPolicy], None] = {}
        self._notes: dict[str, list[str]] = {}

    @property
    def left(self) -> int:
        """Compiles that may still come."""
        return 0 if self._hangs else max(self._until - self.asked, 0)

    @property
    def _hangs(self) -> bool:
        """Whether the compiler had no answer in its time to the first that were asked: others would have none either."""
        return not self.entries and self._out_of_time >= _AT_ONCE

    @contextmanager
    def within(self, share: int) -> Generator[None]:
        """Let what is inside use no more compiles than this share of what is left."""
        before, self._until = self._until, min(self._until, self.asked + max(share, 1))
        try:
            yield
        finally:
            self._until = before

    @property
    def cut(self) -> list[tuple[Compiler, StepPolicy]]:
        """What was asked for when no compile was left, and was not compiled since."""
        return [one for one in self._cut if one not in self._known]

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks, each once, in their order; a failure that several policies share is one."""
        return tuple(
            f"{_titles(titles)} not compiled: {text}" if titles else text for text, titles in self._notes.items()
        )

    def note(self, text: str) -> None:
        """Remember a remark."""
        self._notes[text] = []

    def note_obstacle(self, text: str) -> None:
        """Remember why nothing can be saved."""
        self.obstacles.append(text)
        self.note(text)

    def replace(self, entry: Entry, candidate: Candidate) -> Entry:
        """Know more of a candidate than was known when it was compiled."""
        known = Entry(entry.compiler, candidate)
        self.entries[self.entries.index(entry)] = known
        return known

    def note_cut(self) -> None:
        """Remember what the limit of all compiles cut off; what only a share of it did may be made up for."""
        cut = "; ".join(compiler.title(policy) for compiler, policy in self.cut)
        if cut and not self.left:
            self.note(f"Not compiled, since {self.most} compiles are the most that one plan takes: {cut}.")

    def allow(self, most: int) -> None:
        """Take another number of compiles as the most."""
        self.most = self._until = most

    def tell(self, what: str) -> None:
        """Say what is being compiled, or was last."""
        self.check()
        self._progress(what, len(self.entries), self.most)

    def compile(self, asked: Sequence[tuple[Compiler, StepPolicy]]) -> list[Candidate | None]:
        """Compile policies, no more of them than may still come; what was compiled before is not compiled again.

        Returns:
            A candidate for each that was asked, None where its compiler failed or none was left.
        """
        wanted = [one for one in dict.fromkeys(asked) if one not in self._known]
        new = wanted[: self.left]
        self.asked += len(new)
        self._cut |= dict.fromkeys(wanted[len(new) :])
        pool = concurrent.futures.ThreadPoolExecutor(_AT_ONCE)
        waiting: dict[_Compile, tuple[Compiler, StepPolicy]] = {}
        try:
            if new:
                self.tell(" and ".join(compiler.title(policy) for compiler, policy in new))
            for (
                compiler,
                policy,
            ) in new:  # JAX's part in this thread, whose settings it obeys; only compilers run in others
                with self._told_if_it_fails(compiler, policy):
                    waiting[pool.submit(compiler.lowered(policy))] = compiler, policy
            for done in self._completed(waiting):
                compiler, policy = waiting[done]
                with self._told_if_it_fails(compiler, policy):
                    self._keep(compiler, policy, done.result())
                if self._hangs:
                    break
                going = [compiler.title(policy) for each, (compiler, policy) in waiting.items() if each.running()]
                self.tell(" and ".join(going) or compiler.title(policy))
        finally:  # also at Ctrl-C, and where one of them failed: no compiler goes on for an answer that nobody waits for
            pool.shutdown(wait=False, cancel_futures=True)
            try:
                end = time.monotonic() + (_MOST_S if isinstance(sys.exception(), Terminated) else math.inf)
                while not all(each.done() for each in waiting) and time.monotonic() < end:
                    end_workers()
                    time.sleep(0.05)
                # An interrupt came while others were waited for: what has an answer is kept.
                for done, one in waiting.items():
                    is_answer = done.done() and not done.cancelled() and done.exception() is None
                    if one not in self._known and is_answer:
                        self._keep(*one, done.result())
            finally:
                self.asked -= sum(one not in self._known for one in new)  # interrupted
        return [self._known.get(one) for one in asked]

    def _completed(self, waiting: Collection[_Compile]) -> Iterator[_Compile]:
        """Compiles as they end. A signal may have come to another thread than this, which wakes nobody."""
        left = set(waiting)
        while left:
            done, left = concurrent.futures.wait(left, _HEARD_S, concurrent.futures.FIRST_COMPLETED)
            self.check()
            yield from done

    def _keep(self, compiler: Compiler, policy: StepPolicy, found: Candidate) -> None:
        """Know what a compiler answered."""
        self.entries.append(Entry(compiler, found))
        self._known[compiler, policy] = found
        self.compiled += not found.cached

    @contextmanager
    def _told_if_it_fails(self, compiler: Compiler, policy: StepPolicy) -> Generator[None]:
        """One policy that fails is no reason to plan nothing."""
        try:
            yield
        except (CompileError, PolicyError, LossRefusedError) as error:
            self.check()  # a compile that a signal ended has not failed
            self._known[compiler, policy] = None
            self.failed.append(error)
            if isinstance(error, CompileError):
                self.compiled += 1
                self._out_of_time += isinstance(error, CompileTimeoutError)
            else:
                self.asked -= 1
                self.refused.add((compiler, policy))
            self._notes.setdefault(str(error), []).append(compiler.title(policy))


def _titles(titles: Sequence[str]) -> str:
    """Who shares a failure, and the verb."""
    several = dict.fromkeys(titles)
    shown = "; ".join(list(several)[:_SHOWN])
    more = f" and {len(several) - _SHOWN} more" if len(several) > _SHOWN else ""
    return f"{shown}{more} {'were' if len(several) > 1 else 'was'}"
