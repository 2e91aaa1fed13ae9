"""`jm.linen.remat`: patterns that mean nothing, arguments that cannot be meant, and checkpoints that are already there."""

from __future__ import annotations

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import PatternError, PolicyError
from tests.comparisons import checkpoints
from tests.linen_models import WIDTH, Block, Net, data, started

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def variables():
    return started(Net(), data())


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (
            r"blok_0",
            [r"'blok_0' matches no module of those that", r"block_0  \(Block, 2 of these\)", r"head  \(Dense\)"],
        ),
        (r"block", [r"matches a part of some paths", r"try r'\.\*block\.\*'"]),
        (r"", [r"The model itself is never meant"]),
        (nn.Conv, [r"Pattern Conv matches no module", r"block_0/up  \(Dense, 2 of these\)"]),
        ({r"block_.*": "full", r"block_0/up": "dots"}, [r"'block_0/up' would do nothing: `block_0/up` and all others"]),
    ],
)
def test_pattern_that_means_nothing(variables, pattern, words):
    apply = jm.linen.remat(Net().apply, pattern)
    with pytest.raises(PatternError) as caught:
        jax.eval_shape(lambda v, x: apply(v, x, train=False), variables, data())
    assert [word for word in words if not re.search(word, str(caught.value))] == []


def test_one_around_another_for_the_same_module(variables):
    inner = jm.linen.remat(Net().apply, "block_0")
    outer = jm.linen.remat(lambda v, x: inner(v, x, train=False), r"block_\d")
    with pytest.raises(
        PatternError, match=r"Another jm.linen.remat is around this one.*give both patterns to one call"
    ):
        outer(variables, data())


@pytest.mark.parametrize(
    ("pattern", "policy", "error", "words"),
    [
        (r"block_(", "full", PatternError, r"is not a regular expression"),
        (None, "full", PatternError, r"pattern=None: expected a regular expression"),
        ({}, "full", PatternError, r"names no module"),
        (r"block_0", "none", PolicyError, r"no checkpoint at all"),
        (r"block_0", "dotz", PolicyError, r"Did you mean `dots`"),
    ],
)
def test_what_is_wrong_from_the_start_is_refused_at_once(pattern, policy, error, words):
    with pytest.raises(error, match=words):
        jm.linen.remat(Net().apply, pattern, policy)


@pytest.mark.parametrize("given", [Net(), 7])
def test_what_is_no_function_is_refused(given):
    with pytest.raises(PatternError, match=r"takes a function: model.apply.*not a (Net|int).*jm.nnx.remat"):
        jm.linen.remat(given, "block_0")


class Decorated(Block):
    """Rematerialised by its author, as a decorator of the method."""

    @nn.remat
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(x)


class Called(nn.Module):
    how: str

    @nn.compact
    def __call__(self, x):
        if self.how == "class":
            return nn.remat(nn.Dense)(WIDTH, name="block")(x)
        if self.how == "function":
            return nn.remat(lambda block, x: block(x))(nn.Dense(WIDTH, name="block"), x)
        if self.how == "method":
            return Decorated(name="block")(x)
        return jax.checkpoint(jnp.sin)(nn.Dense(WIDTH, name="block")(x))


@pytest.mark.parametrize("how", ["class", "function", "method", "loss"])
def test_inside_a_checkpoint_that_is_there_is_refused(how):
    apply = jm.linen.remat(Called(how).apply, "block")
    called = jax.checkpoint(apply) if how == "loss" else apply
    variables = Called(how).init(jax.random.key(0), data())
    with pytest.raises(PolicyError, match=r"`block` \(\w+\) is called inside a checkpoint that is already there"):
        jax.eval_shape(called, variables, data())


def test_a_checkpoint_beside_or_inside_a_module_stays():
    class Careful(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.remat(nn.Dense)(WIDTH)(x) + Called("beside", name="other")(x)

    variables = Careful().init(jax.random.key(0), data())
    apply = jm.linen.remat(Careful().apply, "other")
    assert len(checkpoints(apply, variables, data())) == 3
    np.testing.assert_allclose(apply(variables, data()), Careful().apply(variables, data()), rtol=1e-6)
