"""The models that plans are judged on: remat by hand changes what is kept and nothing else, at tiny sizes."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.plan_bench import (
    Table,
    budgeted_row,
    closest,
    in_its_bytes,
    is_measured,
    kept_seconds,
    matched_row,
    printed_rows,
    row_key,
    stale,
    step_row,
    summed_up,
)
from benchmarks.plan_models import FAMILIES, PlanCase
from benchmarks.plan_models.case import policy
from benchmarks.sources import is_cut_otherwise, planned_segments, row_hashes
from jaxmem_callbacks.programs.reading.buffers import options_without_run
from jaxmem_callbacks.transforms.costs import jaxpr_flops
from jaxmem_callbacks.transforms.tracing import open_jaxpr, subjaxprs
from tests import searched_steps
from tests.comparisons import CHECKPOINTS

TINY = {
    "linen_transformer": {"batch": 2, "length": 6, "width": 16, "heads": 4, "layers": 1, "vocabulary": 11},
    "nnx_transformer": {"batch": 2, "length": 6, "width": 8, "heads": 2, "layers": 2, "vocabulary": 11},
    "dropout_transformer": {"batch": 2, "length": 6, "width": 8, "heads": 2, "layers": 1, "vocabulary": 11},
    "mixture": {
        "batch": 2, "length": 6, "width": 8, "heads": 2, "layers": 1, "hidden": 8, "experts": 4, "vocabulary": 11,
    },
    "vit": {"batch": 2, "size": 8, "patch": 4, "width": 8, "heads": 2, "layers": 1, "classes": 5},
    "resnet": {"batch": 2, "size": 16, "channels": 4, "stages": (1,), "classes": 5},
    "unet": {"batch": 2, "size": 8, "channels": (8,)},
    "lstm": {"batch": 2, "length": 6, "width": 8, "layers": 2, "vocabulary": 11},
    "equinox_transformer": {"batch": 2, "length": 6, "width": 8, "heads": 2, "layers": 1, "vocabulary": 11},
    "mixer": {"batch": 2, "size": 8, "patch": 4, "width": 8, "hidden": 8, "layers": 1, "classes": 5},
    "encoder_decoder": {"batch": 2, "length": 6, "width": 8, "heads": 2, "layers": 1, "vocabulary": 11},
    "nanodo": {"batch": 2, "length": 6, "width": 8, "heads": 2, "layers": 2, "vocabulary": 11},
    "lm1b": {"batch": 2, "length": 6, "width": 8, "heads": 2, "layers": 2, "vocabulary": 11},
    "gpt_512_words": {"batch": 2, "length": 6, "width": 8, "heads": 2, "layers": 2, "vocabulary": 11},
    "gpt_50k_words": {"batch": 2, "length": 6, "width": 8, "heads": 2, "layers": 2, "vocabulary": 11},
    "gpt_131k_words": {"batch": 2, "length": 6, "width": 8, "heads": 2, "layers": 2, "vocabulary": 11},
    "maxtext_decoder": {"batch": 2, "length": 6, "width": 8, "heads": 2, "layers": 2, "vocabulary": 11},
    "big_vision_vit": {"batch": 2, "size": 8, "patch": 4, "width": 8, "heads": 2, "layers": 2, "classes": 5},
    "dit": {"batch": 2, "size": 4, "patch": 2, "width": 8, "heads": 2, "layers": 2, "classes": 5},
    "ppo": {
        "environments": 4, "length": 4, "minibatches": 2, "epochs": 1, "updates": 2,
        "state": 4, "width": 8, "layers": 2, "actions": 3,
    },
    "haiku_transformer": {"batch": 2, "length": 6, "width": 8, "heads": 2, "layers": 2, "vocabulary": 11},
    "equinox_vit": {"batch": 2, "size": 8, "patch": 4, "width": 8, "heads": 2, "layers": 2, "classes": 5},
}  # fmt: skip
FLOAT32_ONLY = ("lstm", "equinox_transformer", "mixer", "ppo", "haiku_transformer", "equinox_vit")
HAND = [
    (name, remat)
    for name in TINY
    for remat in (
        ["full", "dots", "chunked"] if name == "lstm" else
        ["full", "names"] if name in {"resnet", "unet"} else
        [
            "full", "minimal", "minimal_with_context", "save_qkv_proj", "save_out_proj", "save_dot_except_mlpwi",
            "save_dot_except_mlp", "save_dot_with_context_except_mlp",
        ] if name == "maxtext_decoder" else
        ["full", "dots", "dots_no_batch", "names"]
    )
]  # fmt: skip


@functools.cache
def tiny(name: str) -> PlanCase:
    return FAMILIES[name](**TINY[name], **({} if name in FLOAT32_ONLY else {"dtype": jnp.float32}))


@functools.cache
def arguments_of(name: str):
    """Random numbers in the arguments' shapes, as in the middle of a run: the optimizer's moments are above zero, so that
    no gradient which is only rounding is divided by its own size.
    """
    random = np.random.default_rng(0)

    def numbers(leaf, *, positive=False):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), leaf.shape) if leaf.shape else jax.random.key(0)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(random.integers(0, 5, leaf.shape), leaf.dtype)
        return jnp.asarray(random.uniform(0.1 if positive else -0.5, 0.6, leaf.shape), leaf.dtype)

    params, opt_state, *batch = tiny(name).arguments
    opt_state = jax.tree.map(functools.partial(numbers, positive=True), opt_state)
    return jax.tree.map(numbers, params), opt_state, *jax.tree.map(numbers, batch)


@functools.cache
def traced(name: str, remat: str):
    case = tiny(name)
    return jax.jit(case.plain if remat == "none" else case.hand[remat]).trace(*arguments_of(name))


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays():
    """What was cached for this file would stay alive in its process: thousands of arrays beside those that others look at."""
    yield
    for cached in (tiny, arguments_of, traced, plain_result, names_and_policies):
        cached.cache_clear()


def run(name: str, remat: str):
    return traced(name, remat).lower().compile()(*arguments_of(name))


@functools.cache
def plain_result(name: str):
    return run(name, "none")


@functools.cache
def names_and_policies(name: str, remat: str):
    """Whether a step names values, and the policies of its checkpoints, inner ones included."""

    def inside(jaxpr):
        for eqn in open_jaxpr(jaxpr).eqns:
            yield eqn
            for body in subjaxprs(eqn):
                yield from inside(body)

    found = list(inside(traced(name, remat).jaxpr))
    named = any(eqn.primitive.name == "name" for eqn in found)
    return named, [eqn.params["policy"] for eqn in found if eqn.primitive.name in CHECKPOINTS]


def plain_numbers(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf, np.float64)


def assert_same(got, expected, tolerance):
    """The same tree, and each leaf's error within a share of its largest number; the first leaf that is not is named."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, value), other in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        value, other = plain_numbers(value), plain_numbers(other)  # noqa: PLW2901 - the same leaf, as numbers
        error, size = np.max(np.abs(other - value), initial=0), np.max(np.abs(value), initial=0)
        assert error <= tolerance * max(size, 1e-6), (jax.tree_util.keystr(path), error, size)


@pytest.mark.core
@pytest.mark.parametrize("scatters", [False, True])
def test_what_is_kept_does_not_depend_on_how_machine_code_is_made(scatters) -> None:
    """So the suite may leave it as it comes: see tests/conftest.py. Older emitters make a loop of a scatter, with counters."""
    step = traced("lstm", "full") if scatters else jax.jit(searched_steps.train_step).trace(*searched_steps.abstract())
    usual = {"xla_cpu_parallel_codegen_split_count": 32}
    if jax.__version_info__ < (0, 11):
        usual["xla_cpu_use_fusion_emitters"] = True
    kept = []
    for unoptimised, options in ((True, {}), (True, usual), (False, {}), (False, usual)):
        jax.config.update("jax_disable_most_optimizations", unoptimised)
        memory = step.lower().compile(options).memory_analysis()
        kept.append((memory.temp_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes))
    plain = step.lower().compile().memory_analysis()
    unrun = step.lower().compile(options_without_run("cpu")).memory_analysis()
    assert str(unrun) == str(plain), "what a plan compiles needs what a run's own compile needs"
    temporaries, *others = (set(sizes) for sizes in zip(*kept, strict=True))
    assert [len(sizes) for sizes in others] == [1, 1]
    assert max(temporaries) - min(temporaries) <= 256 * scatters


def test_a_user_who_sets_how_code_is_optimised_is_obeyed(monkeypatch) -> None:
    assert options_without_run("cpu") == {"xla_backend_optimization_level": 0}
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=3")
    assert options_without_run("cpu") == options_without_run("cuda") == {}


def test_every_family_and_every_policy_is_tested() -> None:
    assert list(FAMILIES) == list(TINY)
    assert [(name, remat) for name in FAMILIES for remat in tiny(name).hand] == HAND


@pytest.mark.parametrize(("name", "remat"), HAND)
def test_remat_by_hand_is_there(name, remat) -> None:
    named, policies = names_and_policies(name, remat)
    assert policies
    # MaxText's own policies are all of names, but for the one that keeps nothing.
    assert named == (remat == "names" or name == "maxtext_decoder")
    if name == "maxtext_decoder":
        assert len(set(policies)) == 1
        assert (policies[0] is None) == (remat == "full")
    elif remat != "names":
        assert set(policies) == {None if remat == "chunked" else policy(remat, ())}


# The other rows differ from `full` in names and policy alone, which the test above reads; one of each framework is run.
@pytest.mark.parametrize(
    ("name", "remat"),
    [row for row in HAND if row[1] in {"full", "chunked"}]
    + [
        ("linen_transformer", "names"),
        ("nnx_transformer", "names"),
        ("equinox_transformer", "dots"),
        ("mixer", "dots_no_batch"),
    ],
)
def test_remat_by_hand_computes_the_same(name, remat) -> None:
    assert_same(run(name, remat), plain_result(name), 1e-5)


@pytest.mark.parametrize("name", TINY)
def test_the_plain_step_has_no_hint_and_returns_what_it_takes(name) -> None:
    assert names_and_policies(name, "none") == (False, [])
    params, opt_state, loss = plain_result(name)
    given, returned = (
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (arguments_of(name), (params, opt_state))
    )
    assert given[:2] == returned
    assert np.isfinite(loss)


def rows_of_a_plan():
    hand = {"step_bytes": 100, "flops": 100, "seconds": 1.0}
    key = row_key("vit", "cpu", "full")
    candidates = [
        {"step_bytes": 50, "flops": 130},
        {"step_bytes": 104, "flops": 101},
        {"step_bytes": None, "flops": 90},
    ]
    return key | hand, row_key("vit", "cpu", "ours") | {"candidates": candidates, "seconds": 2.0}


def test_the_point_compared_is_nearest_in_both_and_never_a_refused_one() -> None:
    hand, ours = rows_of_a_plan()
    assert closest(ours["candidates"], hand) == (1.04, 1.01)
    assert [line.split()[-2:] for line in printed_rows([hand, ours])] == [["x1.040", "x1.010"]]


def test_the_table_is_summed_up_over_all_policies_by_hand() -> None:
    hand, ours = rows_of_a_plan()
    dots = row_key("vit", "cpu", "dots") | {"step_bytes": 100, "flops": 100, "seconds": 1.0}
    # What was matched to `dots` has as few operations as `full`, too, but only its own counts, which has one too many.
    equal = [
        row_key("vit", "cpu", f"ours as {name}") | {"step_bytes": size, "flops": flops}
        for name, size, flops in (("full", 20, 101), ("dots", 200, 100))
    ]
    assert list(summed_up([hand, dots, ours, *equal])) == [
        "cpu: 2 policies by hand; the frontier's nearest point is within 1.040 of each",
        "cpu: at equal FLOPs 2.000 of their bytes (geometric mean of 1), 0 below 1",
    ]
    less = {**ours, "candidates": [{"step_bytes": 50, "flops": 100}, {"step_bytes": None, "flops": 90}]}
    assert "at equal FLOPs x0.500" in printed_rows([hand, less, *equal])[0]
    assert "at equal FLOPs" not in printed_rows([hand, less])[0], "before it was asked for"


def test_ours_as_a_policy_by_hand_has_no_more_operations() -> None:
    case = tiny("mixer")
    by_hand = jaxpr_flops(jax.make_jaxpr(case.hand["names"])(*case.arguments))
    row = matched_row(case, "names", "cpu", 300)
    assert 0 < row["keep"] < 1, row
    assert 0.9 * by_hand < row["flops"] <= by_hand
    as_plain = dataclasses.replace(case, hand={"none": case.plain})
    assert matched_row(as_plain, "none", "cpu", 300)["error"].startswith("No cut has as few operations as none")


def test_a_plan_in_the_bytes_of_a_policy_by_hand_is_a_row_of_its_own(tmp_path) -> None:
    case = tiny("mixer")
    hand = step_row(case, "full", "cpu", 300)
    row = budgeted_row(case, "cpu", hand["step_bytes"])
    assert row["fits"]
    assert row["step_bytes"] <= row["budget"] == hand["step_bytes"]
    here = {"full": hand, "ours in full": row}
    assert in_its_bytes(here, "full") == row["flops"] / hand["flops"]
    assert in_its_bytes({**here, "ours in full": {**row, "fits": False}}, "full") == math.inf
    assert in_its_bytes({"full": hand}, "full") is None, "before it was asked for"
    assert in_its_bytes({**here, "ours in full": budgeted_row(case, "cpu", None)}, "full") is None
    table = Table(tmp_path / "rows.json")
    for name, figures in here.items():
        table.add(row_key("mixer", "cpu", name) | figures | {"seconds": 1.0})
    assert is_measured(table, "mixer", "cpu", "ours in full")
    assert list(summed_up(table.rows)) == [
        f"cpu: in their bytes 1 of 1 plans fit, with at most {row['flops'] / hand['flops']:.3f} of their FLOPs"
    ]
    table.add({**table.of("mixer", "cpu", "full"), "step_bytes": hand["step_bytes"] + 1})
    assert not is_measured(table, "mixer", "cpu", "ours in full"), "to be measured again, in other bytes"


def test_rows_already_measured_are_kept_until_source_or_versions_change(tmp_path) -> None:
    path = tmp_path / "table.json"
    hand, ours = rows_of_a_plan()
    first = Table(path)
    assert not first.has(row_key("vit", "cpu", "full"))
    first.add(hand)
    first.add(ours)
    again = Table(path)
    assert again.has(row_key("vit", "cpu", "full"))
    assert not again.has(row_key("vit", "cpu", "full") | {"source": "of another day"})
    assert [stale(row) for row in again.rows] == [False, False]
    assert stale(hand | {"source": "of another day"})
    again.add(hand | {"step_bytes": 7})
    assert [(row["policy"], row.get("step_bytes")) for row in Table(path).rows] == [("full", 7), ("ours", None)]


def test_a_row_knows_its_own_model_and_what_that_imports() -> None:
    hashes = {name: row_hashes(name, "full")["source"] for name in FAMILIES}
    files = {factory.__module__ for factory in FAMILIES.values()}  # three forms of GPT-2 are one file
    assert len(set(hashes.values())) == len(files)
    assert "library" in row_key("vit", "cpu", "ours")
    assert "library" not in row_key("vit", "cpu", "full")


def test_ours_is_matched_with_the_segments_of_the_plan_between_its_ends(tmp_path):
    def candidate(segments, keep):
        return {"segments": segments, "keep": keep}

    table = Table(tmp_path / "rows.json")
    half = [candidate(None, 0.0), candidate(7, 0.0), candidate(7, 0.3), candidate(7, 1.0)]
    table.add({"model": "vit", "target": "cpu", "policy": "ours", "candidates": half})
    assert planned_segments(table.of("vit", "cpu", "ours")) == 7
    assert planned_segments({"candidates": [candidate(7, 0.0), candidate(None, 0.0), candidate(None, 0.5)]}) is None
    assert planned_segments(table.of("vit", "v5e", "ours")) is None, "not planned yet"
    matched = {"model": "vit", "target": "cpu", "policy": "ours as full", "segments": 7}
    assert not is_cut_otherwise(matched, table.rows)
    assert is_cut_otherwise(matched | {"segments": None}, table.rows), "to be measured again"
    assert not is_cut_otherwise(matched | {"policy": "full", "segments": None}, table.rows)
    row = matched_row(tiny("linen_transformer"), "names", "cpu", 300, segments=2)
    assert row["segments"] == 2


def test_a_row_that_compiled_nothing_keeps_the_seconds_of_the_one_that_did() -> None:
    """The disk cache answers in no time, and a table of seconds is of compiles."""

    def row(seconds: float, *, compiled: int, step_bytes: int = 8) -> dict[str, Any]:
        return {
            "candidates": [{"step_bytes": step_bytes, "compile_seconds": seconds}],
            "seconds": seconds,
            "compiled": compiled,
        }

    before = {"model": "vit", "library": "old"} | kept_seconds(row(60.0, compiled=6), {})
    assert "compiled" not in before
    assert kept_seconds(row(1.0, compiled=0), before) == before
    for other in (row(1.0, compiled=1), row(1.0, compiled=0, step_bytes=9)):
        assert kept_seconds(other, before)["seconds"] == 1.0
