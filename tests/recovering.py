"""Trainings that run out of memory at step 37 of 60: in a process of their own, because its address space gets a limit.

    python -m tests.recovering FOLDER microbatches remat ...

Prints one JSON object: for each scenario the losses by step, what was recovered, and how a failure ended.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem_callbacks as jm

STEPS, FAILS = 60, 36  # the 37th
WIDTH, LAYERS = 32, 48
ROWS, LONG = 256, 32768  # of every batch, and of the one that does not fit
UNEVEN = {
    34: 250,
    38: 101,
}  # rows that no power of two divides: of a batch that is repeated, and of one that comes later
SPARE = 250 * 2**20  # all that a rung needs by its compiler is 70 MiB less, or more


def deep(params, batch, key):
    """A scanned network with dropout: what its backward pass keeps is thousands of times its state."""

    def layer(h, inputs):
        weight, number = inputs
        keep = jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, (1, WIDTH))  # one mask for all rows
        return jnp.where(keep, jnp.tanh(h @ weight), 0.0), None

    return jax.lax.scan(layer, batch["x"], (params, jnp.arange(LAYERS)))[0]


def loss_fn(params, batch, key):
    """A plain mean over rows."""
    return ((deep(params, batch, key) - batch["y"]) ** 2).mean()


def squared(params, batch, key):
    """The square of a mean is no mean of squares."""
    return loss_fn(params, batch, key) ** 2


def step_of(loss):
    """Momentum, a random key and a counter, all in the state."""

    def train_step(state, batch):
        key, now = jax.random.split(state["key"])
        value, grads = jm.value_and_grad(loss)(state["params"], batch, now)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - 0.5 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum, "key": key, "count": state["count"] + 1}, {"loss": value}

    return train_step


def echoed(train_step):
    """The same step, which gives the batch back, so that its memory can be donated."""

    def train_and_echo(state, batch):
        state, metrics = train_step(state, batch)
        return state, {**metrics, "batch": batch}

    return train_and_echo


def new_state():
    params = 0.7 * jnp.eye(WIDTH) + 0.1 * jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH))
    return {"params": params, "momentum": jnp.zeros_like(params), "key": jax.random.key(1), "count": jnp.int32(0)}


def batch_at(step, seed=0, *, uneven=False):
    rows = UNEVEN.get(step, ROWS) if uneven else ROWS
    x = np.random.default_rng(step + seed).standard_normal((LONG if step == FAILS else rows, WIDTH), np.float32)
    return {"x": x, "y": np.roll(x, 1, axis=1)}


def limit_address_space(spare):
    """From here on this process may map so many bytes more than it has mapped now; None lifts the limit."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = resource.RLIM_INFINITY if spare is None else mapped + spare
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def train(
    folder,
    *,
    first=0,
    limited=True,
    restore=False,
    spoil=False,
    buffered=False,
    donated=False,
    uneven=False,
    loss=loss_fn,
    policy=None,
    **recovery,
):
    """The user's own loop; what it gave, also where it ended with an error."""
    told, source = {"losses": {}}, {"seed": 0}
    preset = jm.load_preset("recover", policy=policy or {}, monitor={"tensorboard": False}, recovery=recovery)
    with jm.MemoryMonitor(preset, logdir=folder / "run") as monitor, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        kept = jm.Recovery(
            echoed(step_of(loss)) if donated else step_of(loss),
            preset,
            donate_argnames=("state", "batch") if donated else None,
            batch_at=None if buffered else lambda step: batch_at(step, **source, uneven=uneven),
            monitor=monitor,
            checkpoints=folder / "kept",
        )
        state, room = new_state(), batch_at(0)
        try:
            if restore:
                first, state = kept.restore(state)
                told["restored"] = [first, str(kept.policy.microbatches)]
            for i in range(first, STEPS):
                if i == FAILS and limited:
                    limit_address_space(SPARE)
                if buffered and i != FAILS:  # a loader that writes every batch into the same memory
                    jax.tree.map(np.copyto, room, batch_at(i))
                given = (batch_at(i) if i == FAILS else room,) if buffered else ()
                if donated:
                    given = (jax.tree.map(jnp.array, given[0]),)
                if i == FAILS and spoil:  # from here on the user's function gives other batches for the same steps
                    source["seed"] = 1000
                state, metrics = kept.step(i, state, *given)
                told["losses"][i] = float(metrics["loss"])
                monitor(i, metrics)
        except Exception as error:  # noqa: BLE001 - what it is gets compared
            frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            told["error"] = [type(error).__name__, str(error), frames, type(error.__cause__).__name__]
        finally:
            limit_address_space(None)
    told["moves"] = [
        [move.step, move.rung, move.policy, move.from_step, list(move.passed_over)] for move in kept.report.moves
    ]
    cost = kept.report.snapshots
    told["snapshots"] = [cost.kind, cost.taken, cost.bytes, cost.seconds, cost.buffered_bytes]
    told["warned"] = [str(each.message) for each in warned]
    told["events"] = [
        line["event"] for line in map(json.loads, (folder / "run" / "memory.jsonl").open()) if line["kind"] == "event"
    ]
    return told


def unlimited(_):
    """What the same loop gives without this library's recovery and without a limit."""
    step, state, losses = jm.jit_step(step_of(loss_fn), jm.StepPolicy()), new_state(), {}
    for i in range(STEPS):
        state, metrics = step(state, batch_at(i))
        losses[i] = float(metrics["loss"])
    return {"losses": losses}


def resumed(folder):
    """Ends with the failure and a checkpoint; a second run goes on from that."""
    ladder = {"ladder": ["microbatches", "save_and_exit"], "max_microbatches": 2, "every_steps": 10}
    return {"ended": train(folder, **ladder), "went_on": train(folder, limited=False, restore=True, **ladder)}


SCENARIOS = {
    "unlimited": unlimited,
    "microbatches": lambda folder: train(folder, ladder=["defragment", "microbatches"], every_steps=10),
    "remat": lambda folder: train(folder, ladder=["remat"], every_steps=10, buffered=True),
    "both_from_disk": lambda folder: train(
        folder, ladder=["microbatches", "remat"], max_microbatches=2, every_steps=10, snapshots="orbax"
    ),
    "resumed": resumed,
    "refused": lambda folder: train(folder, first=34, loss=squared, ladder=["microbatches", "remat"]),
    "alive": lambda folder: train(folder, first=34, policy={"donate": []}, ladder=["remat"]),
    "other_batches": lambda folder: train(folder, first=34, spoil=True, ladder=["remat"]),
    "forgotten": lambda folder: train(folder, first=34, ladder=["remat"], buffered=True, buffer="1MiB"),
    "donated": lambda folder: train(folder, first=34, ladder=["remat"], buffered=True, donated=True),
    "uneven": lambda folder: train(folder, first=34, uneven=True, ladder=["microbatches"]),
    "no_ladder": lambda folder: train(folder, first=35, ladder=[]),
}


if __name__ == "__main__":
    where = Path(sys.argv[1])
    print(json.dumps({name: SCENARIOS[name](where / name) for name in sys.argv[2:]}), flush=True)
    os._exit(0)
