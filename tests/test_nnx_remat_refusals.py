"""`jm.nnx.remat`: patterns that mean nothing, modules that cannot take it or have it already, and what undo refuses."""

from __future__ import annotations

import re

import jax
import pytest
from flax import nnx

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import PatternError, PolicyError
from tests.nnx_models import Block, Net, data

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (
            r"blok/0",
            [r"Pattern 'blok/0' matches no module of Net", r"blocks/0  \(Block, 2 of these\)", r"head  \(Linear\)"],
        ),
        (r"blocks", [r"matches a part of some paths", r"try r'\.\*blocks\.\*'"]),
        (r"", [r"The model itself is never meant", r"blocks/0/up  \(Linear, 2 of these\)"]),
        (nnx.Conv, [r"Pattern Conv matches no module of Net", r"blocks/0"]),
        ({r"blocks/.*": "full", r"blocks/0": "dots"}, [r"'blocks/0' would do nothing: an earlier pattern takes"]),
        (r"blocks/(", [r"is not a regular expression: missing \)"]),
        (7, [r"pattern=7: expected a regular expression such as r'blocks/\\d\+', a module class or a mapping"]),
        ({}, [r"names no module"]),
    ],
)
def test_pattern_that_means_nothing(pattern, words):
    model = Net(nnx.Rngs(0))
    with pytest.raises(PatternError) as caught:
        jm.nnx.remat(model, pattern)
    assert [word for word in words if not re.search(word, str(caught.value))] == []
    assert {type(block) for block in model.blocks} == {Block}


def test_a_long_list_is_cut_short():
    class Wide(nnx.Module):
        def __init__(self, rngs):
            for name in "abcdefghijklmnop":
                setattr(self, name, nnx.Linear(1, 1, rngs=rngs))

    with pytest.raises(PatternError, match=r"\.\.\. and 4 more"):
        jm.nnx.remat(Wide(nnx.Rngs(0)), r"z")
    with pytest.raises(PatternError, match=r"It could match:\n    none"):
        jm.nnx.remat(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), r"z")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("none", "no checkpoint at all"),
        ("minimal", "MaxText"),
        ("fulll", "Did you mean `full`"),
        ("save_names", "needs the names to keep"),
    ],
)
def test_policy_that_is_none(policy, words):
    with pytest.raises(PolicyError, match=words):
        jm.nnx.remat(Net(nnx.Rngs(0)), r"blocks/\d+", policy)


def test_what_is_no_module_is_refused():
    with pytest.raises(PatternError, match=r"takes an nnx.Module, not a dict. For a Linen model use jm.linen.remat"):
        jm.nnx.remat({"blocks": 1}, r"blocks")


def test_class_that_refuses_subclasses():
    class Registered(nnx.Module):
        def __init_subclass__(cls, *, tag, **options):
            super().__init_subclass__(**options)

    class Tagged(Registered, tag="t"):
        def __call__(self, x):
            return x

    with pytest.raises(PolicyError, match=r"needs a subclass of Tagged, and making one failed \(.*'tag'\)"):
        jm.nnx.remat(nnx.Sequential(Tagged()), r"layers/0")


def test_never_twice():
    model = Net(nnx.Rngs(0))
    undo = jm.nnx.remat(model, r"blocks/1", "dots")
    with pytest.raises(
        PolicyError, match=r"`blocks/1` \(Block\) is rematerialised already, policy 'dots_saveable': undo"
    ):
        jm.nnx.remat(model, r"blocks/\d+")
    assert [type(block) is Block for block in model.blocks] == [True, False]
    undo()
    jm.nnx.remat(model, r"blocks/\d+")


def test_undo_as_context_manager_restores_after_an_error():
    model = Net(nnx.Rngs(0))
    with pytest.raises(PolicyError, match="already"), jm.nnx.remat(model, Block):
        jm.nnx.remat(model, Block)
    assert {type(block) for block in model.blocks} == {Block}


def test_undo_after_somebody_elses_exchange_is_refused():
    model = Net(nnx.Rngs(0))
    undo = jm.nnx.remat(model, r"blocks/\d+")
    ours = type(model.blocks[1])
    model.blocks[1].__class__ = type("Quantised", (ours,), {})
    with pytest.raises(PolicyError, match=r"The class of `blocks/1` was exchanged again"):
        undo()
    assert type(model.blocks[0]) is ours
    model.blocks[1].__class__ = ours
    undo()
    assert {type(block) for block in model.blocks} == {Block}


@pytest.mark.parametrize("decorate", [nnx.remat, nnx.remat(graph=False), jax.checkpoint], ids=["graph", "tree", "jax"])
def test_module_that_its_author_rematerialised_is_refused(decorate):
    class Careful(Block):
        __call__ = decorate(Block.__call__)

    model = nnx.Sequential(Careful(nnx.Rngs(0)), Block(nnx.Rngs(0)))
    with pytest.raises(PolicyError, match=r"`layers/0`: Careful.__call__ is under nnx.remat or jax.checkpoint already"):
        jm.nnx.remat(model, Block)
    jm.nnx.remat(model, r"layers/1")


@pytest.mark.parametrize("around", ["loss", "caller"])
def test_inside_a_checkpoint_that_is_there_is_refused(around):
    model = Net(nnx.Rngs(0), by_hand=around == "caller")
    jm.nnx.remat(model, r"blocks/\d+")
    forward = nnx.remat(lambda model, x: model(x)) if around == "loss" else lambda model, x: model(x)
    with pytest.raises(
        PolicyError, match=r"A Block meant by jm.nnx.remat is called inside a checkpoint that is already"
    ):
        nnx.grad(lambda model, x: forward(model, x).sum())(model, data())
