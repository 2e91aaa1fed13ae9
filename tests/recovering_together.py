"""One of two processes that train together and run out of memory: on one, on both, in a collective, or dead; or moves arrays.

    python -m tests.recovering_together RANK ADDRESS FOLDER SCENARIO ...

Prints one JSON object a scenario: losses, what was recovered, and from where.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.defragment import MoveStep
from jaxmem_callbacks.recovery.ladder.agreement import Agreement
from jaxmem_callbacks.recovery.moving.mover import Mover
from tests import recovering

STEPS, FAILS = 6, 3
# Less than the half of the long batch takes that each has of a divided one (in one allocation 224 MiB, before jax 0.11 320 MiB);
# half of that must fit, beside a compile.
SPARE = (205 if jax.__version_info__ >= (0, 11) else 300) * 2**20


def batch_at(step):
    """The long batch of the other script, at another step."""
    return recovering.batch_at(recovering.FAILS if step == FAILS else step)


def constant_in_the_program(params, batch, key):
    """Needs memory while it is traced: 512 MiB for the long batch."""
    np.empty((len(batch["x"]), 2**14), np.uint8)
    return recovering.loss_fn(params, batch, key)


def train(folder, *, limited, mesh=None, dies=None, loss=recovering.loss_fn, **recovery):
    """The loop of one process; over a mesh the batch is divided between both."""
    whole = None if mesh is None else NamedSharding(mesh, P())
    rows = None if mesh is None else NamedSharding(mesh, P("data"))

    def placed(step):
        made = batch_at(step)
        if rows is None:
            return made
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, rows, lambda index: x[index]), made)

    preset = jm.load_preset("recover", recovery=recovery)
    kept = jm.Recovery(
        recovering.step_of(loss),
        preset,
        batch_at=placed,
        checkpoints=folder / "kept",
        state_shardings=whole,
    )
    state, losses = recovering.new_state(), []
    if whole is not None:
        state = jax.jit(recovering.new_state, out_shardings=whole)()
    for i in range(STEPS):
        if i == FAILS and limited:
            recovering.limit_address_space(SPARE)
        if i == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        state, metrics = kept.step(i, state)
        losses.append(float(metrics["loss"]))
    recovering.limit_address_space(None)
    moves = [[move.step, move.rung, move.policy, move.from_step, move.failed_on] for move in kept.report.moves]
    if mesh is not None:
        kept.save_before_oom(STEPS, state)
        kept.save_before_oom(2, state)
    return {"losses": losses, "moves": moves, "latest": kept.latest}


def over_devices(rank):
    """What JAX's public functions carry where its coordination service is not to be had."""
    agreement = Agreement("fallback", 60.0)
    agreement._store = None
    return {"heard": agreement.exchange({"from": rank, "text": "é" * rank}), "can_poll": agreement.can_poll}


def moved_by_one(rank, mesh):
    """Arrays that are divided between both processes: the first moves its parts, the second does nothing of the kind."""
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    tree = {
        "keys": jax.jit(lambda: jax.random.split(jax.random.key(0), 2), out_shardings=rows)(),
        "own": jax.device_put(values, jax.local_devices()[0]),
        "rows": jax.make_array_from_callback(values.shape, rows, lambda index: values[index]),
        "weak": jax.jit(lambda: jax.numpy.broadcast_to(1.0, (4,)), out_shardings=whole)(),
        "whole": jax.make_array_from_callback(values.shape, whole, lambda index: values[index] * 2),
    }
    data = {name: jax.random.key_data(array) if name == "keys" else array for name, array in tree.items()}
    before = {
        name: [np.asarray(shard.data).tolist() for shard in each.addressable_shards] for name, each in data.items()
    }
    mover, told = Mover(tree), {}
    if rank == 0:
        same, report = jm.defragment(tree)
        told["untouched"] = same is tree and not report.done
        keys = [key for key in mover.paths if mover.paths[key] != "['weak']"]
        mover.carry_out([MoveStep(kind="device", keys=(key,), bytes=0, to=(0,)) for key in mover.paths])
        mover.carry_out([MoveStep(kind="host", keys=tuple(keys), bytes=0, to=(0,) * len(keys))])
    after = mover.tree
    data = {**after, "keys": jax.random.key_data(after["keys"])}
    here = {name: [np.asarray(shard.data).tolist() for shard in each.addressable_shards] for name, each in data.items()}
    total = jax.jit(lambda rows, whole: (rows * whole).sum())(after["rows"], after["whole"])
    moved = [[each.path, each.kind] for each in mover.moved]
    return {**told, "same": here == before, "weak": after["weak"].weak_type, "moved": moved, "total": float(total)}


def main(rank, folder, name):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    ladder = ["microbatches", "save_and_exit"]
    if name == "apart":
        return train(folder, limited=rank == 1, ladder=ladder)
    if name == "compiling":
        return train(folder, limited=rank == 1, loss=constant_in_the_program, ladder=ladder)
    if name == "both":
        return train(folder, limited=True, mesh=mesh, ladder=ladder)
    if name == "in_a_collective":
        return train(folder, limited=rank == 1, mesh=mesh, ladder=ladder)
    if name == "dead":
        limit_s = 15.0  # the first steps compile, on one sooner
        return train(folder, limited=False, dies=2 if rank == 1 else None, agree_s=limit_s)
    return over_devices(rank) if name == "over_devices" else moved_by_one(rank, mesh)


if __name__ == "__main__":
    own = int(sys.argv[1])
    missed = 30 if "dead" in sys.argv else 20  # after so many seconds JAX itself ends the other one
    jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=own, heartbeat_timeout_seconds=missed)
    for scenario in sys.argv[4:]:
        began = time.monotonic()
        try:
            answer = main(own, Path(sys.argv[3]) / scenario, scenario)
        except Exception as error:
            told = {"scenario": scenario, "error": [type(error).__name__, str(error)]}
            print(json.dumps({**told, "seconds": time.monotonic() - began}), flush=True)
            raise
        print(json.dumps({"scenario": scenario, "seconds": time.monotonic() - began, **answer}), flush=True)
