"""What a run goes back to: the batch from ``batch_at`` or the buffer, what steps take besides, and the latest checkpoint."""

from __future__ import annotations

import time

import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import RecoveryError
from jaxmem_callbacks.recovery.snapshots import InputBuffer
from jaxmem_callbacks.transforms.frameworks import checkpoints_in

pytestmark = pytest.mark.core
MIB = 2**20


def kept(batch_at, most=MIB):
    said = []
    batches = InputBuffer(batch_at, most, said.append)
    batches.begin(10)
    return batches, said


def test_what_a_step_takes_besides_the_batch_is_kept_also_where_batch_at_gives_the_batch():
    batches, said = kept(lambda step: f"batch {step}")
    scale, never = np.float32([2.0]), object()
    batches.keep(10, (never, scale))
    batches.keep(11, (never,))
    scale[0] = 3.0  # the owner goes on with its memory
    batch, again = batches.of(10)
    assert (batch, float(again[0])) == ("batch 10", 2.0)
    assert batches.of(11) == ("batch 11",)
    assert batches.of(12) == ("batch 12",)
    assert batches.bytes == 4
    assert said == []
    batches.begin(12)
    assert (batches.bytes, batches.of(12)) == (0, ("batch 12",))


def test_arrays_that_every_step_takes_are_copied_once():
    batches, said = kept(str, 4 * MIB)
    frozen, others = {"w": jnp.ones(MIB // 4)}, jnp.zeros(MIB // 4)
    for step in range(10, 15):
        batches.keep(step, ("a batch", frozen))
    assert batches.bytes == MIB
    batches.keep(15, ("a batch", {"w": others}))
    batches.keep(16, ("a batch", {"v": others}))
    assert batches.of(12)[1]["w"][0] == 1.0
    assert batches.of(15)[1]["w"][0] == 0.0, "another array"
    assert list(batches.of(16)[1]) == ["v"], "in another place"
    assert (batches.bytes, said) == (3 * MIB, [])


def test_without_batch_at_all_of_it_is_kept():
    batches, _ = kept(None)
    batches.keep(10, (np.arange(3), 7))
    batch, number = batches.of(10)
    np.testing.assert_array_equal(batch, np.arange(3))
    assert number == 7


@pytest.mark.parametrize(
    ("batch_at", "inputs", "what"),
    [
        (None, (np.ones(MIB, np.uint8),), r"batches of up to 1\.0 MiB.*Give jm\.Recovery a batch_at"),
        (
            str,
            ("a batch", np.ones(MIB, np.uint8)),
            r"inputs besides the batch of up to 1\.0 MiB.*Let batch_at give these too",
        ),
    ],
)
def test_what_the_buffer_let_go_of_is_told_at_once_and_refused_later(batch_at, inputs, what):
    batches, said = kept(batch_at, MIB + 10)
    batches.keep(10, inputs)
    batches.keep(11, inputs)
    assert len(said) == 1
    with pytest.raises(RecoveryError, match=rf"step 10 cannot be repeated: .*{what}"):
        batches.of(10)
    assert len(batches.of(11)) == len(inputs)


def test_after_a_return_to_an_earlier_step_the_latest_is_what_was_saved_last(tmp_path):
    def train_step(state, batch):
        return {"w": state["w"] + batch}, {"loss": state["w"].sum()}

    first, state = jm.Recovery(train_step, checkpoints=tmp_path), {"w": jnp.zeros(4)}
    for step in (2, 3, 5):
        first.save_before_oom(step, {"w": jnp.full(4, float(step))})
    assert first.latest == 5
    again = jm.Recovery(train_step, checkpoints=tmp_path)
    start, back = again.restore(state, step=2)
    back, _ = again.step(start, back, np.float32(0.5))
    again.save_before_oom(3, back)
    assert (again.latest, first.latest) == (3, 3)
    begun = jm.Recovery(train_step, checkpoints=tmp_path)
    start, goes_on = begun.restore(state)
    assert (start, float(goes_on["w"][0])) == (3, 2.5)
    assert float(begun.restore(state, step=5)[1]["w"][0]) == 5.0, "nothing of the branch that was left is deleted"


def test_checkpoints_without_a_number_are_taken_by_their_step(tmp_path):
    store = checkpoints_in(tmp_path / "saved")
    for step in (7, 4):
        store.save(step, {"w": jnp.zeros(4)}, {})
    recovery = jm.Recovery(lambda state, batch: (state, {}), checkpoints=tmp_path)
    assert recovery.latest == 7
    recovery.save_before_oom(5, {"w": jnp.zeros(4)})
    assert recovery.latest == 5, "what says when it was saved is newer than what does not"


def test_a_clock_that_is_set_back_between_two_saves_changes_nothing(tmp_path, monkeypatch):
    def train_step(state, batch):
        return {"w": state["w"] + batch}, {}

    jm.Recovery(train_step, checkpoints=tmp_path).save_before_oom(5, {"w": jnp.zeros(4)})
    monkeypatch.setattr(time, "time", lambda: 1e9)  # years before
    again = jm.Recovery(train_step, checkpoints=tmp_path)
    again.save_before_oom(3, {"w": jnp.ones(4)})
    assert again.latest == 3
    again.save_before_oom(2, {"w": jnp.ones(4)})
    assert jm.Recovery(train_step, checkpoints=tmp_path).latest == 2


def test_of_a_step_that_was_saved_and_is_a_snapshot_the_last_written_counts(tmp_path):
    settings = jm.load_preset("recover_from_disk")

    def train_step(state, batch):
        return {"w": state["w"] + batch}, {"loss": state["w"].sum()}

    recovery = jm.Recovery(train_step, settings, checkpoints=tmp_path)
    state = {"w": jnp.zeros(4)}
    recovery.save_before_oom(0, {"w": jnp.full(4, 9.0)})
    recovery.step(0, state, np.float32(1.0))  # a snapshot of step 0, after that
    assert recovery.latest == 0
    assert float(jm.Recovery(train_step, settings, checkpoints=tmp_path).restore(state)[1]["w"][0]) == 0.0
