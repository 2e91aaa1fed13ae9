"""Cuts moved one at a time: what is followed is what a model from first principles counts, and moves never make it worse."""

from __future__ import annotations

import random
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxmem_callbacks.transforms.cut_moves import LiveBytes, lowered
from jaxmem_callbacks.transforms.loss_profile import LiveBytesProfile, cheap_values, profile_loss
from jaxmem_callbacks.transforms.tracing import flatten
from tests.exact_plans import Chain, Plan
from tests.test_exact_plans import Spec, loss_of, model_of, random_chain

pytestmark = pytest.mark.core

# A product, a skip over three others and a sum at its end: what skips is used twice, far apart.
SKIP: Spec = [("dot", 16), ("dot", 4), ("dot", 32), ("dot", 4), ("dot", 16), ("add", 0), ("dot", 8), ("sum", 0)]


def unfused(spec: Spec) -> LiveBytesProfile:
    loss, args = loss_of(spec)
    cheap, left = cheap_values(flatten(jax.make_jaxpr(loss)(*args)))
    return profile_loss(left, cheap).live.unfused()


def random_chains(count: int) -> list[tuple[LiveBytesProfile, Chain]]:
    rng = random.Random(7)  # noqa: S311 - chains, not keys
    specs = [random_chain(rng, rng.randint(8, 30)) for _ in range(count)]
    return [(unfused(spec), model_of(spec)) for spec in specs]


def test_what_is_alive_is_what_the_reference_counts() -> None:
    rng, ratios = random.Random(3), []  # noqa: S311 - cuts, not keys
    for profile, model in random_chains(16):
        live = LiveBytes(profile)
        for _ in range(16):
            cuts = tuple(sorted(rng.sample(range(1, profile.length), rng.randint(0, 6))))
            most, again = model.cost(Plan(cuts))
            found = live.under(cuts)
            ratios.append(found[0] / most)
            assert found[1] == again
    # Elementwise work in place gives back what nobody else needs, or not, step by step; that is not followed.
    assert np.quantile(ratios, [0.1, 0.9]).tolist() == [1.0, 1.0]
    assert 0.9 <= min(ratios) <= max(ratios) <= 1.1


def test_what_skips_a_segment_waits_from_the_one_that_uses_it() -> None:
    live, model = LiveBytes(unfused(SKIP)), model_of(SKIP)
    for cuts in ((1,), (2,), (3,), (2, 4), (2, 5), (1, 3, 5)):
        assert live.under(cuts) == model.cost(Plan(cuts)), cuts


def test_moves_end_where_none_makes_it_better_and_never_above_where_they_began() -> None:
    for profile, _ in random_chains(6):
        live, places = LiveBytes(profile), list(range(1, profile.length))
        begin = tuple(places[2::4])
        cuts = lowered(profile, (begin, ()), tuple(places), fixed=False)
        least = min(live.under(begin)[0], live.under(())[0])
        assert live.under(cuts)[0] <= 1.02 * least
        for place in places:
            other = tuple(sorted({*cuts} ^ {place}))
            assert live.under(other)[0] >= live.under(cuts)[0] / 1.02


def test_forced_cuts_stay_and_so_does_a_fixed_number() -> None:
    profile, _ = random_chains(1)[0]
    places = tuple(range(1, profile.length))
    kept = lowered(replace(profile, forced=(3,)), ((3, 5),), places, fixed=False)
    assert 3 in kept
    assert len(lowered(profile, ((2, 4, 6),), places, fixed=True)) == 3
