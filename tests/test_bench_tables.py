"""Plans against remat by hand: docs/benchmarks_plans.md says of each target what the rows of the bench do."""

from __future__ import annotations

import json
import re
import statistics

import pytest

from benchmarks.plan_bench import MATCHED, at_equal_flops, closest
from benchmarks.plan_table import plan_table
from benchmarks.sources import RESULTS, ROOT, ROWS_BENCHMARK
from jaxmem_callbacks.planning.compiles import MOST_OF_REMAT

NAMES = {
    "linen_transformer": "Linen transformer, unrolled",
    "nnx_transformer": "NNX transformer, scanned",
    "dropout_transformer": "dropout, tied embeddings, bf16 casts",
    "mixture": "mixture of experts",
    "vit": "ViT",
    "resnet": "ResNet with BatchNorm",
    "unet": "U-Net",
    "lstm": "LSTM over time",
    "equinox_transformer": "Equinox transformer",
    "mixer": "MLP-mixer, plain JAX",
    "encoder_decoder": "encoder-decoder",
}
LATER = {
    "nanodo": "after nanodo",
    "lm1b": "after Flax's lm1b",
    "gpt_512_words": "after GPT-2, 512 words, tied head",
    "gpt_50k_words": "after GPT-2, 50,304 words, tied head",
    "gpt_131k_words": "after GPT-2, 131,072 words, untied head",
    "maxtext_decoder": "after MaxText's decoder, its own policies",
    "big_vision_vit": "after big_vision's ViT",
    "dit": "a diffusion transformer",
    "ppo": "PPO in one scan",
    "haiku_transformer": "after haiku's transformer",
    "equinox_vit": "after Equinox's ViT",
}
LATER_TARGETS = ("h100_sxm", "cpu")
POLICIES = ("full", "dots", "dots_no_batch", "names", "chunked")
PAGE = ROOT / "docs" / "benchmarks_plans.md"
TARGETS = {"h100_sxm": "an H100", "v5e": "a v5e", "cpu": "the CPU"}


@pytest.fixture(scope="module")
def every_row():
    """Target -> model -> policy -> row."""
    (path,) = RESULTS.glob(f"{ROWS_BENCHMARK}_jax_*.json")
    found = {}
    for row in json.loads(path.read_text("utf-8"))["rows"]:
        found.setdefault(row["target"], {}).setdefault(row["model"], {})[row["policy"]] = row
    return found


@pytest.fixture(scope="module")
def rows(every_row):
    """The same of the models that the tables by policy are of."""
    return {
        target: {model: here for model, here in models.items() if model in NAMES}
        for target, models in every_row.items()
    }


@pytest.fixture(scope="module")
def later(every_row):
    """Target -> model written after a public program -> policy by hand -> its row, and what the plan compiled."""
    return {
        target: {
            model: {
                policy: (row, here["ours"]["candidates"])
                for policy, row in here.items()
                if policy != "none" and not policy.startswith("ours") and row.get("step_bytes")
            }
            for model, here in every_row[target].items()
            if model in LATER
        }
        for target in LATER_TARGETS
    }


@pytest.fixture(scope="module")
def sections():
    """Target -> what the page says of it: from its own words to those of the next."""
    text = PAGE.read_text("utf-8").partition("\n## Models after public programs\n")[0]
    parts = re.split(r"^For (an H100|a v5e|the CPU)\b", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def nearest_points(models: dict) -> dict[tuple[str, str], tuple[float, float]]:
    """Model and policy by hand -> bytes and operations of the frontier's nearest point, over those of the hand."""
    return {
        (model, policy): closest(here["ours"]["candidates"], row)
        for model, here in models.items()
        for policy, row in here.items()
        if policy in POLICIES and row.get("step_bytes")
    }


def with_its_match(models: dict) -> list[float]:
    """By policy by hand, the larger ratio at the nearest point of the frontier and of the one step that was matched to it."""
    return [
        max(closest([*here["ours"]["candidates"], *([match] if match.get("step_bytes") else [])], row))
        for here in models.values()
        for policy, row in here.items()
        if policy in POLICIES and row.get("step_bytes")
        for match in [here.get(MATCHED + policy, {})]
    ]


def at_equal_operations(models: dict, *, unasked: bool = False) -> list[float]:
    """Our bytes over those of each policy by hand that was asked for at equal operations."""
    found = [
        at_equal_flops(here, policy, unasked=unasked)
        for here in models.values()
        for policy in here
        if policy in POLICIES
    ]
    return [ratio for ratio in found if ratio is not None]


def test_every_model_was_planned_for_every_target(rows):
    assert rows.keys() == TARGETS.keys()
    assert all(here.keys() == NAMES.keys() for here in rows.values())
    assert all({"none", "ours"} < policies.keys() for here in rows.values() for policies in here.values())


@pytest.mark.parametrize("target", TARGETS)
def test_every_policy_by_hand_has_a_near_point_and_fewer_bytes_at_equal_operations(rows, target):
    points = nearest_points(rows[target])
    assert {both: far for both, far in points.items() if max(far) > 1.05} == {}
    assert statistics.geometric_mean(at_equal_operations(rows[target])) <= 0.92


@pytest.mark.parametrize("target", TARGETS)
def test_the_table_of_a_target_is_that_of_the_rows(rows, sections, target):
    lines = sections[TARGETS[target]].splitlines()
    for (model, policy), (memory, work) in nearest_points(rows[target]).items():
        (line,) = (line for line in lines if line.startswith(f"| {NAMES[model]} |"))
        cells = [cell.strip() for cell in line.split("|")[2:]]
        assert cells[POLICIES.index(policy)] == f"{memory:.2f} at {work:.2f}", (model, policy)
    assert sum(line.startswith("| ") and " at " in line for line in lines) == len(NAMES)


WORDS = {("lstm", "chunked"): "the LSTM in chunks", ("mixer", "names"): "the MLP-mixer by name"}


def test_the_farthest_of_each_target_is_named(rows, sections):
    told = {target: " ".join(sections[words].split()) for target, words in TARGETS.items()}
    near = {target: nearest_points(rows[target]) for target in TARGETS}
    for target in ("v5e", "cpu"):
        farthest = max(near[target], key=lambda both, points=near[target]: max(points[both]))
        assert f"The farthest is {WORDS[farthest]}" in told[target]
    equal = {
        (target, model, policy): ratio
        for target in TARGETS
        for model, here in rows[target].items()
        for policy in here
        if policy in POLICIES and (ratio := at_equal_flops(here, policy)) is not None
    }
    _, model, policy = on_h100 = max((key for key in equal if key[0] == "h100_sxm"), key=lambda key: equal[key])
    assert f"At equal FLOPs the farthest there is {equal[on_h100]:.3f}, {WORDS[model, policy]}" in told["h100_sxm"]
    _, model, policy = on_cpu = max((key for key in equal if key[0] == "cpu"), key=lambda key: equal[key])
    assert f"At equal FLOPs it is {WORDS[model, policy]} ({equal[on_cpu]:.3f})" in told["cpu"]


def test_every_policy_by_hand_has_a_counterpart_at_equal_operations(rows):
    lost = [
        (target, model, policy)
        for target, models in rows.items()
        for model, here in models.items()
        for policy, row in here.items()
        if policy.startswith(MATCHED) and "error" in row
    ]
    assert lost == []


def test_the_page_tells_the_rows_in_short(rows):
    lines = PAGE.read_text("utf-8").splitlines()
    start = next(
        i for i, line in enumerate(lines) if re.match(r"\| of \d+ policies by hand \| H100 \| v5e \| CPU \|", line)
    )
    told = [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines[start + 2 : start + 11]]
    far = [[max(both) for both in nearest_points(rows[target]).values()] for target in TARGETS]
    matched = [with_its_match(rows[target]) for target in TARGETS]
    assert [f"{len(each)}" for each in far] == [re.findall(r"\d+", lines[start])[0]] * len(TARGETS)
    assert told == [
        [f"{sum(x <= 1.05 for x in each)}" for each in far],
        [f"{sum(x <= 1.02 for x in each)}" for each in far],
        [f"{sum(x < 1 for x in each)}" for each in far],
        [f"{sum(size < 1 for size, _ in nearest_points(rows[target]).values())}" for target in TARGETS],
        [f"{max(each):.3f}" for each in far],
        [f"{sum(x <= 1.02 for x in each)}" for each in matched],
        [f"{sum(x < 1 for x in each)}" for each in matched],
        *(
            [
                f"{statistics.geometric_mean(at_equal_operations(rows[target], unasked=unasked)):.3f}"
                for target in TARGETS
            ]
            for unasked in (False, True)
        ),
    ]


def test_what_the_page_says_of_the_goals_holds(rows):
    """Which of them are met by an unasked plan, and which by one compile more."""
    far = {target: [max(both) for both in nearest_points(rows[target]).values()] for target in TARGETS}
    matched = {target: with_its_match(rows[target]) for target in TARGETS}

    def half(ratios: list[float]) -> bool:
        return sum(x < 1 for x in ratios) >= len(ratios) / 2

    assert all(max(each) <= 1.05 for each in far.values())
    assert {target for target in TARGETS if max(far[target]) <= 1.02} == {"cpu"}
    assert {target for target in TARGETS if max(matched[target]) <= 1.02} == set(TARGETS)
    assert {target for target in TARGETS if half(far[target])} == set(TARGETS)


def nearest_later(policies: dict) -> list[tuple[float, float]]:
    """Of each policy by hand the nearest point of the plan."""
    return [closest(candidates, row) for row, candidates in policies.values()]


def test_models_after_public_programs_were_planned_and_have_near_points(later):
    assert all(models.keys() == LATER.keys() for models in later.values())
    far = {
        (target, model, policy): max(closest(candidates, row))
        for target, models in later.items()
        for model, policies in models.items()
        for policy, (row, candidates) in policies.items()
    }
    assert {place for place, ratio in far.items() if ratio > 1.05} == set()


def test_the_page_has_the_farthest_point_of_each_model_after_a_public_program(later):
    text = PAGE.read_text("utf-8").partition("\n## Models after public programs\n")[2]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    far = {target: [max(both) for each in later[target].values() for both in nearest_later(each)] for target in later}
    assert table[0] == [f"of {len(far['cpu'])} policies by hand", "H100", "CPU"]
    assert table[2:6] == [
        ["have a point of an unasked plan within 1.05 of both", *(f"{sum(x <= 1.05 for x in far[t])}" for t in far)],
        ["the same within 1.02", *(f"{sum(x <= 1.02 for x in far[t])}" for t in far)],
        ["the same, below both", *(f"{sum(x < 1 for x in far[t])}" for t in far)],
        ["the farthest nearest point", *(f"{max(far[t]):.3f}" for t in far)],
    ]
    cells = {model: [max(nearest_later(later[target][model]), key=max) for target in later] for model in LATER}
    assert table[8:] == [
        [name, str(len(later["cpu"][model])), *(f"{size:.2f} at {work:.2f}" for size, work in cells[model])]
        for model, name in LATER.items()
    ]


def test_the_short_figures_of_other_pages_are_those_of_the_rows(rows):
    h100, v5e, cpu = (f"{statistics.geometric_mean(at_equal_operations(rows[target])):.3f}" for target in TARGETS)
    benchmarks = " ".join((ROOT / "docs" / "benchmarks.md").read_text("utf-8").split())
    assert (
        f"it needs {h100} (H100), {v5e} (v5e) and {cpu} (CPU) of the hand's bytes, with one compile more" in benchmarks
    )
    count = len(nearest_points(rows["h100_sxm"]))
    assert f"Eleven models, {count} policies by hand" in benchmarks
    readme = (ROOT / "README.md").read_text("utf-8")
    near = sum(max(both) <= 1.05 for both in nearest_points(rows["h100_sxm"]).values())
    assert (
        f"| policies written by hand, of {count}, that a plan matches within 5 % in bytes and in FLOPs, on an H100 | {near} |"
        in readme
    )
    assert (
        f"| bytes of a plan over theirs, at equal FLOPs and with one compile more (geometric mean) | {h100} |" in readme
    )


def test_the_whole_table_is_that_of_the_rows():
    """The plain step, the best by hand and ours, each with bytes, operations, what the compiler computes again, and seconds."""
    (path,) = RESULTS.glob(f"{ROWS_BENCHMARK}_jax_*.json")
    every, text = json.loads(path.read_text("utf-8"))["rows"], path.with_suffix(".md").read_text("utf-8")
    assert text == plan_table(every, path.name)
    cells = [line.split(" | ") for line in text.splitlines() if re.match(r"\| (?!model|---)", line)]
    assert len(cells) == 3 * len({(row["model"], row["target"]) for row in every})
    for plain, hand, ours in zip(cells[::3], cells[1::3], cells[2::3], strict=True):
        assert (plain[2], hand[2][:7], ours[2][:5]) == ("none", "by hand", "ours:")
        assert float(ours[3]) <= 1.05 * float(hand[3])
        assert int(ours[6]) <= MOST_OF_REMAT
