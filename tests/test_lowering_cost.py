"""Users pay for the cut at start-up: at 10,000 equations it costs at most one and a half times the plain lowering."""

from __future__ import annotations

import pytest

from benchmarks.lowering import equations, loop_of_layers, lowering_ratio, unrolled_llama

LIMIT = 1.5


@pytest.mark.timeout(600)
@pytest.mark.parametrize("problem", [loop_of_layers(640), unrolled_llama(72)], ids=["loop", "llama"])
def test_lowering_a_cut_loss_costs_at_most_half_more(problem) -> None:
    assert equations(problem) >= 10_000
    # The best of each side over alternating rounds, never the best ratio: a slow plain round would flatter the cut.
    assert lowering_ratio(problem, 5, enough=LIMIT) <= LIMIT
