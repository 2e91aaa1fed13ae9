"""What may be said as ``budget=`` and ``resident=``, and which steps are none; nothing is compiled here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.problem import parse_resident
from jaxmem_callbacks.planning.request import parse_budget
from jaxmem_callbacks.records.errors import PlanError, PolicyError

pytestmark = pytest.mark.core

EMA = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32), "b": np.ones(4, np.float32)}
OF_EMA = 8 * 4 * 4 + 4 * 4


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ((), 0),
        (5, 5),
        (np.int64(2 << 30), 2 << 30),
        ([np.int64(2 << 30), np.uint8(3)], (2 << 30) + 3),
        ("2GiB", 2 << 30),
        (["1KiB", 24], 1048),
        (EMA, OF_EMA),
        ([EMA, EMA, "1KiB"], 2 * OF_EMA + 1024),
        ((each for each in (EMA, 7)), OF_EMA + 7),
        (jnp.ones((4, 4)), 64),
        ([[jnp.ones(2), jnp.ones(3)]], 20),
    ],
)
def test_what_stays_is_a_size_a_tree_or_several(said: Any, count: int) -> None:
    assert parse_resident(said).bytes == count


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("foo", r"resident='foo': Not a size: 'foo'\. Expected a number with one of"),
        (["foo"], r"resident='foo': Not a size"),
        (-5, r"resident=-5: A size is not negative"),
        ([-5], r"resident=-5: A size is not negative"),
        (["2"], r"resident='2': The size '2' has no unit\. Type '2GiB', or '2B' for bytes\."),
        (np.float32(2e9), r"resident holds float32, which has no arrays\. Give bytes as an int, '2GiB', or trees"),
        (2e9, r"resident holds float, which has no arrays"),
        (True, r"resident holds bool, which has no arrays"),
        (None, r"resident holds NoneType, which has no arrays"),
        ({"ema": "2GiB"}, r"resident holds dict, which has no arrays"),
    ],
)
def test_what_has_no_bytes_is_refused(said: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_resident(said)


@pytest.mark.parametrize(
    ("said", "meant"),
    [("72GiB", 72 << 30), ("4096 B", 4096), (np.int64(2**21), 2**21), (0.9, 0.9), (np.float64(0.5), 0.5), (1.0, 1.0)],
)
def test_a_budget_is_bytes_or_a_share(said: Any, meant: float) -> None:
    assert parse_budget(said) == meant
    assert isinstance(parse_budget(said), type(meant))


@pytest.mark.parametrize("text", ["0.9", "72", "1", "0"])
def test_text_without_a_unit_is_no_budget(text: str) -> None:
    words = rf"budget='{text}': The size '{text}' has no unit\. Type '{text}GiB', or '{text}B' for bytes\. .*such as 0\.9, is"
    with pytest.raises(PlanError, match=words):
        parse_budget(text)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [(72, "72GiB"), (2, "2GiB"), (np.int64(4095), "4095GiB"), (80_000, "80000B"), (2**20 - 1, "1048575B")],
)
def test_a_small_whole_number_is_no_budget(asked: Any, meant: str) -> None:
    words = rf"budget=.*: expected a size with its unit, since .* hold no step\. Type '{meant}', or a share"
    with pytest.raises(PlanError, match=words):
        parse_budget(asked)
    with pytest.raises(PlanError, match=words):
        jm.plan(lambda p: p, 1.0, budget=asked, progress=False)
    assert parse_budget(meant) > 0


@pytest.mark.parametrize("asked", ["0B", 0, True, "nan"])
def test_nothing_is_no_budget(asked: Any) -> None:
    with pytest.raises(PlanError, match=r"nothing to plan for: expected bytes above 0|Not a size"):
        parse_budget(asked)


def branching(params: jax.Array, batch: jax.Array) -> jax.Array:
    total = jnp.sum(params * batch)
    return total if total > 0 else -total


def untraceable(params: jax.Array, batch: jax.Array) -> jax.Array:
    return params - jm.grad(branching)(params, batch)


def test_a_step_that_cannot_be_traced_is_told_with_its_line_and_its_cause() -> None:
    line = branching.__code__.co_firstlineno + 2
    words = rf"^untraceable could not be traced for planning: TracerBool.*\(.*test_plan_sizes\.py:{line}\)\. Expected a step"
    with pytest.raises(PlanError, match=words) as caught:
        jm.plan(untraceable, jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert isinstance(caught.value.__cause__, jax.errors.TracerBoolConversionError)


def test_this_librarys_own_refusals_stay_what_they_are() -> None:
    def other(_: jax.Array) -> jax.Array:
        message = "mine"
        raise PolicyError(message)

    with pytest.raises(PolicyError, match=r"^mine"):
        jm.plan(other, jnp.ones(4))


def test_no_function_is_no_step() -> None:
    with pytest.raises(PlanError, match=r"jm\.plan was given NoneType as its step\. Expected a function"):
        jm.plan(None, jnp.ones(4))  # pyright: ignore[reportArgumentType]
