"""What stands where compilers do, for tests of what is asked of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.compiles import Compiler, CompileResults
from jaxmem_callbacks.records.plans import Candidate


@final
class Said:
    """Says what each policy needs.

    Args:
        bytes_of: Policy -> bytes of the step, which are all temporary; None where it is refused without a figure.
    """

    def __init__(self, bytes_of: Callable[[jm.StepPolicy], int | None]) -> None:
        self._bytes_of = bytes_of
        self.remaining = 6
        self.asked = list[jm.StepPolicy]()
        self.results = CompileResults()

    def compile(self, asked: Sequence[tuple[Compiler, jm.StepPolicy]]) -> list[Candidate | None]:
        """As the planner's queue does."""
        new, self.asked = asked[: self.remaining], [*self.asked, *(policy for _, policy in asked[: self.remaining])]
        self.remaining -= len(new)
        answers = [self._candidate(compiler, policy) for compiler, policy in new]
        return [*answers, *[None] * (len(asked) - len(new))]

    def _candidate(self, compiler: Compiler, policy: jm.StepPolicy) -> Candidate:
        needs = self._bytes_of(policy)
        again = compiler.facts(policy).flops - compiler.plain.flops
        limit = compiler.problem.budget.bytes
        return Candidate(
            policy=policy,
            step_bytes=needs,
            need_bytes=needs,
            temp_bytes=needs,
            fits=False if needs is None else None if limit is None else needs <= limit,
            flops=compiler.plain.flops + again,
            extra_flops=again,
            plain_flops=compiler.plain.flops,
        )
