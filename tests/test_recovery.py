"""Parts of recovery by themselves: copies of states, checkpoints and what is refused; no memory runs out here."""

from __future__ import annotations

import contextlib
import resource

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import DonationWarning, RecoveryError, RecoveryWarning
from jaxmem_callbacks.records.presets import RecoverySettings
from jaxmem_callbacks.recovery.ladder.fallback import (
    defragmented,
    fallback_options,
    frontier_below,
    microbatch_counts,
    stronger_remats,
)
from jaxmem_callbacks.recovery.ladder.runner import addresses, fitting_count, reused_bytes
from jaxmem_callbacks.recovery.snapshots import HostSnapshot
from tests.processes import bytes_of_others

pytestmark = pytest.mark.core
MIB = 2**20


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


@pytest.mark.parametrize(
    ("rows", "count", "chosen_for", "fitting"),
    [
        (100, 8, 256, 4),  # of 25 rows, where 8 of 32 were chosen
        (101, 8, 256, 101),  # a prime number
        (17, 8, 256, 1),
        (384, 16, 256, 24),
        (100, 8, None, 10),  # as many at least, where the rows that they were chosen for are not known
        (5, 8, None, 5),
    ],
)
def test_microbatches_of_other_rows_are_no_larger_than_those_chosen(rows, count, chosen_for, fitting):
    assert fitting_count(rows, count, chosen_for) == fitting


def test_the_ladder_in_order():
    assert microbatch_counts(1, 64, None) == [2, 4, 8, 16, 32, 64]
    assert microbatch_counts(1, 64, 12) == [2, 4, 12], "divisors, each at least twice the one before"
    assert microbatch_counts(2, 3, 12) == []
    prime = RecoverySettings(ladder=("microbatches", "remat"))
    assert [each.why for each in fallback_options(prime, jm.StepPolicy(remat="full"), rows=101)] == [
        "no number from 2 to max_microbatches=64 divides the batch's 101 rows",
        "",
    ]
    most = RecoverySettings(ladder=("microbatches",), max_microbatches=6)
    assert [each.why for each in fallback_options(most, jm.StepPolicy(microbatches=4), rows=64)] == [
        "twice the 4 in force are more than max_microbatches=6"
    ]
    words = [(each.remat, each.levels) for each in stronger_remats(jm.StepPolicy())]
    assert words == [("dots_saveable", 1), ("full", 1), ("full", 2)]
    assert [each.keep for each in stronger_remats(jm.StepPolicy(remat="full", keep=0.5))] == [0.0, 0.0]
    tried = [each.rung for each in fallback_options(RecoverySettings(max_microbatches=2), jm.StepPolicy(), rows=8)]
    assert tried == ["defragment", "microbatches", "remat", "remat", "remat", "save_and_exit"]
    policy = jm.StepPolicy(remat="full", donate="auto")
    (offer,) = fallback_options(RecoverySettings(ladder=("microbatches",), max_microbatches=2), policy, rows=None)
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
    with pytest.raises(RecoveryError, match=r"objects of Flax NNX.*nnx\.split of model and optimizer"):
        recovery.step(0, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), BATCH)
    with pytest.raises(RecoveryError, match=r"returned a tuple of 3\. Expected \(state, metrics\)"):
        jm.Recovery(lambda state, batch: (state, batch, 1)).step(0, new_state(), BATCH)
    with pytest.raises(RecoveryError, match=r"snapshots on disk need a folder.*checkpoints='runs/a/checkpoints'"):
        jm.Recovery(train_step, jm.load_preset("recover_from_disk"))
    with pytest.raises(TypeError, match=r"Recovery got int as plan\. Expected a plan of jm\.plan"):
        jm.Recovery(train_step, plan=3)
    with pytest.raises(RecoveryError, match=r"No checkpoint of step 4 in .*; there are: none"):
        jm.Recovery(train_step, checkpoints=tmp_path).restore(new_state(), 4)


@pytest.mark.parametrize(
    ("step", "error"),
    [*((wrong, TypeError) for wrong in ("x", None, True, 1.5, [0], b"1", jnp.ones(3))), (-1, ValueError)],
    ids=str,
)
def test_a_step_number_that_is_none_is_refused_before_the_state_is_given_away(step, error, tmp_path):
    recovery, state = jm.Recovery(train_step, "donate", checkpoints=tmp_path), new_state()
    with pytest.raises(error, match=r"recovery\.step: step=.* Expected a whole number of at least 0"):
        recovery.step(step, state, BATCH)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))
    with pytest.raises(error, match=r"recovery\.save_before_oom: step=.* Expected a whole number"):
        recovery.save_before_oom(step, state)
    if step is not None:
        with pytest.raises(error, match=r"recovery\.restore: step=.* Expected a whole number"):
            recovery.restore(state, step)
    after, _ = recovery.step(np.int64(0), state, BATCH)
    assert recovery.save_before_oom(np.int64(1), after) == tmp_path / "saved" / "1"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"checkpoints": 3}, r"jm\.Recovery: checkpoints=3 is of type int\. Expected a path"),
        ({"checkpoints": b"x"}, r"checkpoints=b'x' is of type bytes"),
        ({"checkpoints": "a\0b"}, r"checkpoints='a\\x00b' is no path\. Expected one such as checkpoints='runs/a"),
        ({"checkpoints": ""}, r"checkpoints='' is no path"),
        ({"batch_at": 3}, r"batch_at=3 is of type int\. Expected a function from a step's number"),
        ({"monitor": 3}, r"monitor=3 is of type int\. Expected a jm\.MemoryMonitor"),
    ],
    ids=str,
)
def test_what_recovery_cannot_use_is_refused_when_it_is_made(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        jm.Recovery(train_step, **given)


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


def test_a_restored_state_that_is_not_donated_is_told(tmp_path, capfd):
    recovery = jm.Recovery(train_step, checkpoints=tmp_path)
    recovery.save_before_oom(4, new_state())
    start, back = recovery.restore(new_state())
    reader = np.asarray(back["w"])  # who reads the memory keeps it from being written over
    said = r"first step after a restore reused \d+ B of the old state's memory, where the program reuses 16\.0 KiB.*held at once"
    with pytest.warns(DonationWarning, match=said):
        state, _ = recovery.step(start, back, BATCH)
    assert reader[0, 0] == 1.0
    assert "Copy the restored state once: state = jax.tree.map(jnp.copy, state)" in capfd.readouterr().err
    recovery.step(start + 1, state, BATCH)  # told once; a second warning would be an error here


def test_a_near_oom_event_is_a_checkpoint_of_that_step(tmp_path):
    others = bytes_of_others()
    preset = jm.load_preset("recover", monitor={"tensorboard": False, "limit": 2 * others + 64 * MIB})
    recovery, state = jm.Recovery(train_step, preset, checkpoints=tmp_path / "kept"), new_state()
    kept, saved = [], []
    with jm.MemoryMonitor(preset, logdir=tmp_path / "run") as monitor:
        for i in range(4):
            state, metrics = recovery.step(i, state, BATCH)
            if i == 2:
                kept.append(jnp.zeros(2 * others + 63 * MIB, jnp.int8))
            monitor(i, metrics)
            monitor.flush()
            if recovery.should_save(monitor):
                saved.append(recovery.save_before_oom(i + 1, state).name)
    assert [event.kind for event in monitor.events] == ["near_oom"]
    assert saved == ["3"], "once, right behind the step that it was told at"
    assert jm.Recovery(train_step, checkpoints=tmp_path / "kept").restore(new_state())[0] == 3


@contextlib.contextmanager
def address_space(spare):
    """So many bytes more than this process has mapped."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + spare, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_without_memory_for_a_copy_an_earlier_one_stays_and_without_one_the_run_ends(capfd):
    def bulky(state, batch):
        small, metrics = train_step(state["small"], batch)
        return {"small": small, "bulk": state["bulk"]}, metrics

    recovery = jm.Recovery(bulky, jm.load_preset("recover", recovery={"every_steps": 1}))
    state = {"small": new_state(), "bulk": jnp.zeros(256 * MIB, jnp.int8)}
    state, _ = recovery.step(0, state, BATCH)
    with address_space(128 * MIB):
        state, _ = recovery.step(1, state, BATCH)
        assert recovery.report.snapshots.taken == 1
        with pytest.raises(
            RecoveryError, match=r"step 7 has no snapshot to go back to, and there was no memory for one: .*Memory"
        ):
            recovery.step(7, state, BATCH)
    assert "no snapshot at step 1, the one of an earlier step stays: " in capfd.readouterr().err


def test_under_a_plan_the_rungs_of_remat_are_the_rest_of_its_frontier_and_checkpoints_say_it(tmp_path):
    def deep_step(state, batch):
        def loss(w, batch):
            return (jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer) @ layer, None), batch, w)[0] ** 2).mean()

        value, grads = jm.value_and_grad(loss)(state["w"], batch)
        return {"w": state["w"] - 0.1 * grads}, {"loss": value}

    state = {"w": jax.ShapeDtypeStruct((8, 64, 64), jnp.float32)}
    plan = jm.plan(deep_step, state, jax.ShapeDtypeStruct((4096, 64), jnp.float32))
    sizes = {each.policy: each.step_bytes for each in plan.record.candidates}
    below = frontier_below(plan.record, jm.StepPolicy())
    assert len(below) >= 2
    assert [sizes[policy] for policy in below] == sorted((sizes[policy] for policy in below), reverse=True)
    assert sizes[below[0]] < max(sizes.values())
    assert frontier_below(plan.record, below[0]) == below[1:]
    settings = RecoverySettings(ladder=("remat",))
    tried = [
        offer.on(jm.StepPolicy(microbatches=2))
        for offer in fallback_options(settings, jm.StepPolicy(), rows=8, frontier=below)
    ]
    assert [(each.microbatches, each.remat, each.keep) for each in tried] == [
        (2, policy.remat, policy.keep) for policy in below
    ]
    planned = jm.Recovery(deep_step, plan=plan, checkpoints=tmp_path)
    real = {"w": jnp.zeros((8, 64, 64))}
    planned.save_before_oom(1, real)
    assert jm.Recovery(deep_step, plan=plan, checkpoints=tmp_path).restore(real)[0] == 1  # a difference would warn
    chosen = plan.record.candidates[plan.record.chosen].step_bytes
    with pytest.warns(
        RecoveryWarning, match=rf"plan target: saved attached, .*plan step_bytes: saved {chosen}, here nothing"
    ):
        jm.Recovery(deep_step, plan.policy, checkpoints=tmp_path).restore(real)


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
