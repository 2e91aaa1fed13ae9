"""Users pay for the cut at start-up: at 10,000 equations it costs at most one and a half times the plain lowering."""

from __future__ import annotations

import pytest

from benchmarks.lowering import equations, loop_of_layers, lowering_ratio, unrolled_llama

LIMIT = 1.5


@pytest.mark.timeout(600)
@pytest.mark.parametrize("problem", [loop_of_layers(640), unrolled_llama(72)], ids=["loop", "llama"])
def test_lowering_a_cut_loss_costs_at_most_half_more(problem) -> None:
    assert equations(problem) >= 10_000
    # Noise of a busy machine only adds to either side, so the best of a few tries is the nearest to the truth.
    tries: list[float] = []
    while min(tries, default=LIMIT + 1) > LIMIT and len(tries) < 4:
        tries.append(lowering_ratio(problem, 2))
    assert min(tries) <= LIMIT, tries
