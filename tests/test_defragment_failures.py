"""What goes wrong between and within moves: whatever it is, the exception holds a tree with every array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.defragment import MoveStep
from jaxmem_callbacks.records.errors import DefragmentError
from jaxmem_callbacks.recovery import defragment as defragmenting
from jaxmem_callbacks.recovery.ladder.fallback import defragmented
from jaxmem_callbacks.recovery.moving import mover as moving
from jaxmem_callbacks.recovery.moving.mover import Mover

pytestmark = pytest.mark.core
HICCUP = "the driver did not answer"
TOGETHER = [MoveStep(kind="host", keys=(0, 1, 2), bytes=0, to=(0, 0, 0))]


def three():
    return {name: jnp.arange(8.0) + number for number, name in enumerate("abc")}


def check(tree):
    for number, name in enumerate("abc"):
        np.testing.assert_array_equal(np.asarray(tree[name]), np.arange(8.0) + number)


def failing_at(error, number, function):
    """A function that raises at one of its calls."""
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(args)
        if len(calls) == number:
            raise error
        return function(*args, **kwargs)

    return wrapped


@pytest.fixture
def moves_one(monkeypatch):
    """The mover moves one array and looks, also on a CPU."""

    def compact(hands, *, extra_bytes):
        del extra_bytes
        hands.buffers()
        hands.copy_to(0, 0)
        hands.buffers()
        return {}, 0

    monkeypatch.setattr(defragmenting, "_nothing_to_do", lambda probe, before: "")
    monkeypatch.setattr(defragmenting, "compact", compact)
    monkeypatch.setattr(defragmenting, "keep_copy", lambda **_: True)
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "number"), [("placed_buffers", 1), ("placed_buffers", 2), ("_free_blocks", 4), ("_report", 1)]
)
def test_a_failure_between_moves_holds_the_tree(moves_one, name, number):
    error = RuntimeError(HICCUP)
    moves_one.setattr(defragmenting, name, failing_at(error, number, getattr(defragmenting, name)))
    state = three()
    with pytest.raises(DefragmentError, match=rf"RuntimeError between two moves, .*: {HICCUP}\.") as failed:
        jm.defragment(state)
    assert failed.value.__cause__ is error
    check(failed.value.tree)
    assert (number == 1 and name == "placed_buffers") != state["a"].is_deleted(), "consumed once a move was made"


def test_a_rung_of_recovery_goes_on_with_that_tree(moves_one):
    found = failing_at(RuntimeError(HICCUP), 2, defragmenting.placed_buffers)
    moves_one.setattr(defragmenting, "placed_buffers", found)
    state, why = defragmented(three())
    check(state)
    assert HICCUP in why


def test_ctrl_c_between_moves_stays_what_it_is_and_holds_the_tree(moves_one):
    interrupt = KeyboardInterrupt()
    moves_one.setattr(defragmenting, "_report", failing_at(interrupt, 1, defragmenting._report))
    with pytest.raises(KeyboardInterrupt) as failed:
        jm.defragment(three())
    assert failed.value is interrupt
    check(interrupt.tree)


def test_an_answer_about_a_copy_that_fails_keeps_the_old_array():
    state = three()
    mover, found = Mover(state), []

    def keep(new):
        found.append(new)
        raise RuntimeError(HICCUP)

    with pytest.raises(RuntimeError, match=HICCUP):
        mover.copy_if(0, keep)
    assert mover.tree["a"] is state["a"]
    assert found[0].is_deleted()
    check(mover.tree)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("name", ["staged", "put_back"])
def test_ctrl_c_on_the_way_through_the_host_loses_nothing(monkeypatch, name, number):
    monkeypatch.setattr(moving, name, failing_at(KeyboardInterrupt(), number, getattr(moving, name)))
    mover = Mover(three())
    with pytest.raises(KeyboardInterrupt):
        mover.carry_out(TOGETHER)
    check(mover.tree)
    on_host = [key for key, leaf in mover.tree.items() if not isinstance(leaf, jax.Array)]
    assert on_host == (["abc"[number - 1]] if name == "put_back" else [])


def test_ctrl_c_right_after_the_old_array_went_loses_nothing(monkeypatch):
    class Gone:
        """Lets go of an array, and is interrupted then."""

        def __init__(self, array):
            self.array = array

        def __getattr__(self, name):
            return getattr(self.array, name)

        def delete(self):
            self.array.delete()
            raise KeyboardInterrupt

    mover, taken = Mover(three()), moving.staged
    real = mover.array
    monkeypatch.setattr(mover, "array", lambda key: Gone(real(key)) if key == 1 else real(key))
    monkeypatch.setattr(moving, "staged", lambda array: taken(getattr(array, "array", array)))
    with pytest.raises(KeyboardInterrupt):
        mover.carry_out(TOGETHER)
    check(mover.tree)
    with pytest.raises(KeyboardInterrupt):
        mover.carry_out(
            [MoveStep(kind="device", keys=(1,), bytes=0, to=(0,))], copy=lambda array: jnp.copy(array.array)
        )
    check(mover.tree)


def test_an_interrupt_stays_one_also_where_an_array_cannot_be_put_back(monkeypatch):
    monkeypatch.setattr(moving, "staged", failing_at(KeyboardInterrupt(), 2, moving.staged))
    monkeypatch.setattr(moving, "put_back", failing_at(RuntimeError(HICCUP), 1, moving.put_back))
    mover = Mover(three())
    with pytest.raises(KeyboardInterrupt) as interrupted:
        mover.carry_out(TOGETHER)
    assert isinstance(interrupted.value.__cause__, DefragmentError)
    check(mover.tree)
