"""Parts of recovery by themselves: copies of states, checkpoints and what is refused; no memory runs out here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import RecoveryError, RecoveryWarning
from jaxmem_callbacks.records.recoveries import RecoverySettings
from jaxmem_callbacks.recovery.ladder.offers import microbatch_counts, offers, stronger_remats
from jaxmem_callbacks.recovery.ladder.reuse import addresses, reused_bytes
from jaxmem_callbacks.recovery.ladder.rungs import defragmented
from jaxmem_callbacks.recovery.snapshots import HostSnapshot

pytestmark = pytest.mark.core


def train_step(state, batch):
    loss, grads = jm.value_and_grad(lambda w, batch: (jnp.tanh(batch @ w) ** 2).mean())(state["w"], batch)
    return {"w": state["w"] - 0.1 * grads, "count": state["count"] + 1}, {"loss": loss}


def new_state(width=64):
    return {"w": jnp.eye(width), "count": 0}


BATCH = np.ones((8, 64), np.float32)


def test_a_copy_comes_back_as_it_was_and_in_memory_of_its_own():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    state = {
        "plain": jnp.arange(4096.0).reshape(64, 64),
        "placed": jax.device_put(jnp.ones((64, 64), jnp.bfloat16), NamedSharding(mesh, P("data"))),
        "weak": jnp.asarray(1.5) * 1,
        "key": jax.random.key(3, impl="rbg"),
        "empty": jnp.zeros((0, 3)),
        "number": 7,
    }
    snapshot = HostSnapshot(5, state)
    step = jax.jit(
        lambda state: jax.tree.map(lambda x: x if x.dtype == state["key"].dtype else x * 2, state), donate_argnums=0
    )
    kept = {name: np.asarray(state[name]) for name in ("plain", "placed", "weak")}
    for _ in range(2):  # the copy is no alias of what was donated
        back = snapshot.restore()
        for name, value in kept.items():
            np.testing.assert_array_equal(np.asarray(back[name]), value)
            assert back[name].sharding == state[name].sharding
            assert back[name].weak_type == state[name].weak_type
            assert back[name].committed == state[name].committed
        assert jax.random.key_impl(back["key"]) == jax.random.key_impl(state["key"])
        assert (back["number"], back["empty"].shape) == (7, (0, 3))
        before = addresses({"plain": back["plain"]})
        after = step(back)
        assert reused_bytes(before, addresses(after)) == 64 * 64 * 4, (
            "what comes back is XLA's own and donated in place"
        )
    assert snapshot.is_whole
    assert snapshot.bytes == 64 * 64 * 6 + 4 + 16


def test_the_ladder_in_order():
    assert microbatch_counts(1, 64, None) == [2, 4, 8, 16, 32, 64]
    assert microbatch_counts(1, 64, 12) == [2, 4, 12], "divisors, each at least twice the one before"
    assert microbatch_counts(2, 3, 12) == []
    words = [(each.remat, each.levels) for each in stronger_remats(jm.StepPolicy())]
    assert words == [("dots_saveable", 1), ("full", 1), ("full", 2)]
    assert [each.keep for each in stronger_remats(jm.StepPolicy(remat="full", keep=0.5))] == [0.0, 0.0]
    tried = [each.rung for each in offers(RecoverySettings(max_microbatches=2), jm.StepPolicy(), rows=8)]
    assert tried == ["defragment", "microbatches", "remat", "remat", "remat", "save_and_exit"]
    policy = jm.StepPolicy(remat="full", donate="auto")
    (offer,) = offers(RecoverySettings(ladder=("microbatches",), max_microbatches=2), policy, rows=None)
    assert offer.on(policy) == jm.StepPolicy(remat="full", donate="auto", microbatches=2)


def test_what_cannot_be_recovered_is_refused_with_what_to_type(tmp_path):
    recovery = jm.Recovery(train_step)
    with pytest.raises(
        RecoveryError, match=r"step\(0, state\) got no batch, and Recovery has no batch_at\. Expected one"
    ):
        recovery.step(0, new_state())
    state, _ = recovery.step(0, new_state(), BATCH)
    recovery.step(1, state, BATCH)
    with pytest.raises(
        RecoveryError, match=r"holds an array that is deleted .*Expected the state that the last step returned"
    ):
        recovery.step(5, state, BATCH)
    with pytest.raises(RecoveryError, match=r"objects of Flax NNX.*graphdef, state = nnx\.split"):
        recovery.step(0, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), BATCH)
    with pytest.raises(RecoveryError, match=r"returned a tuple of 3\. Expected \(state, metrics\)"):
        jm.Recovery(lambda state, batch: (state, batch, 1)).step(0, new_state(), BATCH)
    with pytest.raises(RecoveryError, match=r"snapshots on disk need a folder.*checkpoints='runs/a/checkpoints'"):
        jm.Recovery(train_step, jm.load_preset("recover_from_disk"))
    with pytest.raises(TypeError, match=r"Recovery got int as plan\. Expected what jm\.plan"):
        jm.Recovery(train_step, plan=3)
    with pytest.raises(RecoveryError, match=r"No checkpoint of step 4 in .*; there are: none"):
        jm.Recovery(train_step, checkpoints=tmp_path).restore(new_state(), 4)


def test_checkpoints_are_compared_at_restore(tmp_path):
    first = jm.Recovery(train_step, jm.StepPolicy(remat="full"), checkpoints=tmp_path)
    assert first.latest is None
    state, _ = first.step(0, new_state(), BATCH)
    first.save_before_oom(1, state)
    assert first.latest == 1
    with pytest.raises(
        RecoveryError, match=r"another state's: state\['w'\]: saved float32\[64,64\], here float32\[32,32\]"
    ):
        first.restore(new_state(32))
    other = jm.Recovery(train_step, jm.StepPolicy(), checkpoints=tmp_path)
    with pytest.warns(
        RecoveryWarning, match=r"step 1 was written under other conditions: policy: saved full, here none\."
    ):
        start, back = other.restore(new_state())
    assert start == 1
    np.testing.assert_array_equal(np.asarray(back["w"]), np.asarray(state["w"]))
    other.step(1, back, BATCH)  # a donation that is lost would be a warning, and so an error here


def test_a_state_changed_between_steps_is_copied_anew_and_told(capfd):
    recovery = jm.Recovery(train_step)
    state, _ = recovery.step(0, new_state(), BATCH)
    state, _ = recovery.step(1, state, BATCH)
    assert recovery.report.snapshots.taken == 1
    recovery.step(2, {**state, "w": state["w"] * 2}, BATCH)
    assert recovery.report.snapshots.taken == 2
    assert "the state given to step 2 is not the one that step 1 returned" in capfd.readouterr().err


def test_the_rung_that_moves_arrays_gives_the_state_back_with_the_reason_where_it_moved_none():
    state = {"w": jnp.arange(4.0)}
    given, why = defragmented(state)
    assert given is state
    assert "CPU" in why
