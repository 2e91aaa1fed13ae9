"""What `search=` may say, and how the last thing that fits is found: no compile, all invariants."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.plan import search_of
from jaxmem_callbacks.planning.bisect import last_that_fits
from jaxmem_callbacks.planning.choice import choose, pareto
from jaxmem_callbacks.planning.problem import parse_beside
from jaxmem_callbacks.planning.request import SHARDINGS, BatchSizes, Space, parse_search
from jaxmem_callbacks.planning.sharding_candidates import default_axes
from jaxmem_callbacks.records.errors import PlanError
from jaxmem_callbacks.records.plans import BesideProgram, Candidate
from jaxmem_callbacks.records.policies import policy_words


@pytest.mark.core
@pytest.mark.parametrize(
    ("said", "space"),
    [
        (None, Space()),
        ({}, Space()),
        ({"remat": False, "donate": True}, Space(remat=False, donate=True)),
        ({"offload": True}, Space(offload=True)),
        ({"microbatches": [4, 1, 2, 4]}, Space(microbatches=(2, 4))),
        ({"microbatches": 8}, Space(microbatches=(8,))),
        ({"microbatches": True, "sharding": True}, Space(microbatches="all", sharding=SHARDINGS)),
        ({"microbatches": False, "sharding": False, "batch": False}, Space()),
        ({"sharding": ["zero3", "fsdp+tensor"]}, Space(sharding=("fsdp", "fsdp_tensor"))),
        ({"sharding": {"embed": "fsdp"}}, Space(sharding=((("embed", "fsdp"),),))),
        ({"batch": "largest"}, Space(batch=BatchSizes())),
        (
            {"batch": {"multiple_of": 8, "at_most": 512, "argnames": "frames"}},
            Space(batch=BatchSizes(multiple_of=8, at_most=512, argnames=("frames",))),
        ),
    ],
)
def test_what_search_means(said: Any, space: Space) -> None:
    assert parse_search(said) == space


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("remat", r"search='remat': expected a mapping with some of the keys remat, .* Type for example search="),
        (
            {"microbatch": 2},
            r"search has the key 'microbatch'. Did you mean `microbatches`\? Expected some of: remat, ",
        ),
        ({"remat": "full"}, r"search\[\"remat\"\]='full': expected True or False. Type search=\{\"remat\": False\}"),
        ({"offload": True, "remat": False}, r"without it there is nothing to move. Type search=\{\"offload\": True\}"),
        ({"donate": 1}, r"search\[\"donate\"\]=1: expected True or False"),
        ({"microbatches": 0}, r"search\[\"microbatches\"\]=0: expected whole numbers of at least 1, or True"),
        ({"microbatches": [2, True]}, r"Type search=\{\"microbatches\": \[1, 2, 4\]\}"),
        ({"sharding": "fsdpp"}, r"search\[\"sharding\"\]='fsdpp': Unknown sharding 'fsdpp'. Did you mean `fsdp`\?"),
        ({"sharding": 3}, r"search\[\"sharding\"\]=3: expected names or rules. Or True for replicate, zero1, fsdp"),
        (
            {"batch": "biggest"},
            r"search\[\"batch\"\]='biggest': expected a mapping .* Type search=\{\"batch\": \"largest\"\}",
        ),
        ({"batch": {"multiple": 8}}, r"search\[\"batch\"\] has the key 'multiple'. Did you mean `multiple_of`\?"),
        ({"batch": {"at_most": 0}}, r"search\[\"batch\"\]\[\"at_most\"\]=0: expected a whole number of rows"),
        ({"batch": {"multiple_of": 8, "at_most": 4}}, r"at_most=4 is below multiple_of=8, so no batch is left"),
        (
            {"batch": {"argnames": [1]}},
            r"search\[\"batch\"\]\[\"argnames\"\]=\[1\]: expected names of the step's arguments",
        ),
    ],
)
def test_what_search_does_not_mean(said: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_search(said)


def test_the_command_line_says_the_same() -> None:
    texts = ["microbatches=1,2,4", "donate", "sharding=zero1,fsdp", "batch=largest", "batch.multiple_of=8", "remat=no"]
    assert search_of(texts) == {
        "microbatches": [1, 2, 4],
        "donate": True,
        "sharding": ["zero1", "fsdp"],
        "batch": {"multiple_of": 8},
        "remat": False,
    }
    assert search_of([]) is None
    assert search_of(["batch.at_most=64", "batch=largest"]) == {"batch": {"at_most": 64}}
    with pytest.raises(PlanError, match="Did you mean `sharding`"):
        parse_search(search_of(["shard=fsdp"]))


@pytest.mark.core
@pytest.mark.parametrize("said", [[3], [(len,)], [(len, 1)], [("eval_step", ())], len])
def test_programs_beside_are_pairs(said: Any) -> None:
    with pytest.raises(
        PlanError, match=r"expected pairs of a function and a tuple .* Type beside=\[\(eval_step, \(state"
    ):
        parse_beside(said)
    assert parse_beside((len, ("text",))) == parse_beside([(len, ("text",))]) == parse_beside([[len, ["text"]]])


def test_a_second_axis_where_matrices_are_split_too() -> None:
    assert default_axes(8) == {"fsdp": 8}
    assert default_axes(8, "fsdp_tensor") == {"fsdp": 4, "tensor": 2}
    assert default_axes(64, "fsdp_tensor") == {"fsdp": 8, "tensor": 8}
    assert default_axes(1024, "fsdp_tensor") == {"data": 2, "fsdp": 64, "tensor": 8}
    assert default_axes(6, "fsdp_tensor") == {"fsdp": 3, "tensor": 2}
    assert default_axes(9, "fsdp_tensor") == {"fsdp": 9, "tensor": 1}


@given(
    st.integers(0, 4000),
    st.integers(1, 4000),
    st.booleans(),
    st.floats(0.2, 3.0),
    st.integers(1, 30),
    st.integers(1, 30),
)
def test_the_last_that_fits_was_asked_and_so_was_the_next(  # noqa: PLR0917 - a search and its conditions
    answer: int, beyond: int, bounded: bool, error: float, start: int, budget: int
) -> None:
    """However wrong the guesses are: within a generous number of asks the answer is exact, and never one that was not asked."""
    fitting: set[int] = set()
    failing: set[int] = set()

    def ask(places: Any) -> dict[int, bool]:
        if len(fitting) + len(failing) >= budget:
            return {}
        found = {place: place <= answer for place in places}
        fitting.update(place for place, fits in found.items() if fits)
        failing.update(place for place, fits in found.items() if not fits)
        return found

    end = answer + beyond if bounded else None
    low, high = last_that_fits(min(start, answer), end, lambda low, _high: low + int((answer - low) * error), ask)
    assert low in fitting | {min(start, answer)}
    assert high in failing | {end}
    if high is not None:
        assert low <= answer < high
        if len(fitting) + len(failing) < budget:
            assert (low, high) == (answer, answer + 1)


@pytest.mark.parametrize("step", [lambda low: low + 1, lambda low: low + 10, lambda low: low + low // 20])
def test_guesses_a_little_above_what_fits_end_too(step: Any) -> None:
    """Where bytes rise in steps, a line through two neighbours leads nowhere."""
    asked: list[int] = []

    def ask(places: Any) -> dict[int, bool]:
        asked.extend(places)
        return {place: place <= 10**6 for place in places}

    assert last_that_fits(1, None, lambda low, _high: step(low), ask) == (10**6, 10**6 + 1)
    assert len(asked) < 120


def test_a_good_guess_needs_two_asks_near_what_fits_and_four_far_from_it() -> None:
    asked: list[int] = []

    def ask(places: Any) -> dict[int, bool]:
        asked.extend(places)
        return {place: place <= 700 for place in places}

    assert last_that_fits(600, None, lambda _low, _high: 700, ask) == (700, 701)
    assert asked == [700, 701]
    asked.clear()
    # Far from all that is known the way to it is asked as well: a guess too far would leave nothing.
    assert last_that_fits(16, None, lambda _low, _high: 700, ask) == (700, 701)
    assert asked == [105, 700, 701, 702]
    asked.clear()
    guesses = iter([90_000, 705])
    assert last_that_fits(16, None, lambda _low, _high: next(guesses, 700), ask) == (700, 701)
    assert asked == [1200, 90_000, 691, 705, 700, 701]


@given(
    st.integers(1, 10**5),
    st.floats(0.1, 10),
    st.floats(0, 0.01),
    st.floats(1.02, 50),
    st.integers(1, 256),
    st.booleans(),
)
def test_bytes_flat_in_few_rows_are_no_trap(  # noqa: PLR0917 - a curve and a limit
    flat: int, slope: float, rise: float, room: float, start: int, one_sided: bool
) -> None:
    """A line through the flat part leads far beyond what fits, a chord short of it: both end within a few doublings."""
    found: dict[int, float] = {}
    asks = 0

    def ask(places: Any) -> dict[int, bool]:
        nonlocal asks
        asks += 1
        found.update({place: max(flat + rise * slope * place, slope * place) for place in places})
        return {place: found[place] <= room * flat for place in places}

    def guess(low: int, high: int | None) -> int:
        x, x2 = sorted(place for place in found if place <= low)[-2:] if high is None or one_sided else (low, high)
        y, y2 = found[x], found[x2]
        return 2 * low if y2 <= y else int(x + (room * flat - y) * (x2 - x) / (y2 - y))

    assume(all(ask([start, 2 * start]).values()))
    low, high = last_that_fits(2 * start, None, guess, ask)
    assert found[low] <= room * flat
    assert high == low + 1
    assert found[high] > room * flat
    assert asks <= 2 * math.log2(low) + 8


candidates = st.builds(
    lambda size, extra, rows, fits: Candidate(
        policy=jm.StepPolicy(),
        step_bytes=size,
        fits=fits,
        flops=100 * rows + extra,
        extra_flops=extra * rows,
        plain_flops=100 * rows,
        batch_rows=rows,
    ),
    *(st.integers(1, 5), st.integers(0, 5), st.integers(1, 4), st.booleans()),
)


@given(st.lists(candidates, min_size=1, max_size=6))
def test_the_most_rows_that_fit_come_first_and_none_beyond_them_is_lost(found: list[Candidate]) -> None:
    index, reason = choose(found)
    fitting = [each for each in found if each.fits]
    if fitting:
        most = max(each.batch_rows for each in fitting)
        assert found[index].batch_rows == most
        assert found[index].extra_flops == min(each.extra_flops for each in fitting if each.batch_rows == most)
        assert f"{most} rows" in reason
    most_rows = [each for each in found if each.batch_rows == max(e.batch_rows for e in found)]
    assert any(each in pareto(found) for each in most_rows)


def test_the_price_of_a_few_rows_more_is_told() -> None:
    def found(rows: int, share: float, *, fits: bool = True) -> Candidate:
        plain = 1000 * rows
        policy = jm.StepPolicy(remat="full" if share else "none")
        return Candidate(
            policy=policy, step_bytes=rows, fits=fits, flops=plain, extra_flops=int(share * plain), plain_flops=plain,
            batch_rows=rows,
        )  # fmt: skip

    plainly = "34 rows are the largest batch that was compiled and fits"
    dear = found(34, 0.196)
    assert choose([dear, found(33, 0.0), found(20, 0.0), found(35, 0.0, fits=False)])[1] == (
        f"{plainly} at +19.6% FLOPs; 33 rows fit at +0.0%"
    )
    assert choose([dear, found(33, 0.1), found(32, 0.1)])[1] == f"{plainly} at +19.6% FLOPs; 33 rows fit at +10.0%"
    assert choose([dear, found(20, 0.0)])[1] == plainly, "far fewer rows are another run"
    assert choose([found(34, 0.003), found(33, 0.0)])[1] == plainly
    assert choose([found(34, 0.0), found(33, 0.0)])[1] == plainly


def test_a_policy_in_few_words() -> None:
    policy = jm.StepPolicy(remat="full", keep=0.25, microbatches=4, donate=("state",), sharding={"embed": "fsdp"})
    assert policy_words(policy) == "embed=fsdp: full, keep 0.25, 4 microbatches, donating state"
    assert policy_words(jm.StepPolicy(donate=(), sharding="zero1")) == "zero1: none, donating nothing"


def test_what_a_program_beside_needs_is_unknown_where_its_compiler_says_nothing() -> None:
    assert BesideProgram(name="sample", program_bytes=None, held_bytes=5, fits=False).need_bytes is None
    assert BesideProgram(name="sample", program_bytes=7, held_bytes=5, fits=True).need_bytes == 12
