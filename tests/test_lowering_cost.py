"""Users pay for the cut at start-up: at 10,000 equations it costs at most one and a half times the plain lowering."""

from __future__ import annotations

import pytest

from benchmarks.lowering import equations, loop_of_layers, lowering_ratio, unrolled_llama

LIMIT = 1.5


@pytest.mark.timeout(600)
@pytest.mark.parametrize("problem", [loop_of_layers(640), unrolled_llama(72)], ids=["loop", "llama"])
def test_lowering_a_cut_loss_costs_at_most_half_more(problem) -> None:
    assert equations(problem) >= 10_000
    # A busy machine can spoil one round of three, hardly two: noise only adds to either side.
    assert min(lowering_ratio(problem, 2), lowering_ratio(problem, 2)) <= LIMIT
