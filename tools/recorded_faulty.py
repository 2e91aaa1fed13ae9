"""Faulty runs: each has one fault, and its recording must hold the one event for it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import recorded_models as models
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from recorded_models import Watch

import jaxmem_callbacks as jm

STEPS, MIDDLE = 130, 60
MIB = 2**20


def near_oom(watch: Watch) -> None:
    """Beside the state, a buffer is made that leaves under a twentieth of the limit."""
    kept: list[jax.Array] = []

    def each(index: int, state: Any, loss: Any) -> None:
        del state, loss
        if index == MIDDLE:
            kept.append(jnp.ones((14 * MIB // 4,)))

    models.run(watch(limit_bytes=16 * MIB), STEPS, each=each)


def near_oom_by_growth(watch: Watch) -> None:
    """Outputs are kept, and the limit is near; the growth by itself would be too small for an event of its own."""
    kept: list[jax.Array] = []
    monitor = watch(limit_bytes=48 * MIB, growth_min_bytes=1024 * MIB, growth_min_arrays=10**6)
    models.run(monitor, 2 * STEPS, each=lambda _, state, __: kept.append(state["params"]["w0"] * 1.0))


def growth(watch: Watch) -> None:
    """The losses are kept on the device for ever."""
    losses: list[jax.Array] = []
    models.run(watch(), 2 * STEPS, each=lambda _, __, loss: losses.append(loss))


def growth_in_many_shapes(watch: Watch) -> None:
    """Outputs are kept, each of another length."""
    kept: list[jax.Array] = []
    models.run(
        watch(limit_bytes=None),
        2 * STEPS,
        each=lambda i, _, __: kept.append(jax.device_put(np.zeros(16384 + 64 * i, np.float32))),
    )


def donation_lost(watch: Watch) -> None:
    """From step 60 on the momentum comes in half precision and is returned in single, so that its memory is not reused."""

    def each(index: int, state: Any, loss: Any) -> Any:
        del loss
        if index < MIDDLE:
            return None
        return state | {"momentum": jax.tree.map(lambda m: m.astype(jnp.bfloat16), state["momentum"])}

    models.run(watch(), STEPS, each=each)


def donation_copied(watch: Watch) -> None:
    """A NumPy view of the first weights is kept, so that the runtime copies the state instead of reusing it."""
    state = models.state_of(models.parameters(width=256))
    views = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    models.run(watch(), STEPS, state=state, batch=lambda i: models.batch_of(i, width=256))
    del views


def recompilation(watch: Watch) -> None:
    """The last batch of every 50 is shorter."""
    models.run(watch(), STEPS, batch=lambda i: models.batch_of(i, rows=32 if (i + 1) % 50 else 5))


def recompilation_of_a_plain_jit(watch: Watch) -> None:
    """The same with a step that is not registered: the argument is unknown."""

    def plain_step(state: Any, batch: Any) -> Any:
        return models.train_step(state, batch)

    step = jax.jit(plain_step)
    models.run(watch(), STEPS, step=step, batch=lambda i: models.batch_of(i, rows=32 if (i + 1) % 50 else 5))


def replication(watch: Watch) -> None:
    """The state is split over four devices, but for the first weight and its momentum."""
    mesh = models.mesh_of()
    state = models.split_over(models.state_of(models.parameters(depth=12)), mesh, whole=("w0",))
    step = jm.jit_step(models.train_step, state_shardings=models.shardings_of(state))
    models.run(watch(), STEPS, step=step, state=state, batch=_over(mesh))


def replication_against_the_policy(watch: Watch) -> None:
    """The policy splits the state, and a whole copy of the weights is kept beside it."""
    mesh = models.mesh_of()
    preset = jm.load_preset("fsdp")
    with jax.set_mesh(mesh):
        placed = models.state_of(models.parameters())
        placed = jax.device_put(placed, jm.infer_shardings(placed, mesh, preset))
        whole = jax.device_put(placed["params"], NamedSharding(mesh, P()))
        models.run(watch(preset), STEPS, step=jm.jit_step(models.train_step, preset), state=placed, batch=_over(mesh))
    jax.block_until_ready(whole)


def imbalance(watch: Watch) -> None:
    """The state is split evenly, and the first device also holds the data set."""
    mesh = models.mesh_of()
    data = jnp.ones((4096, models.WIDTH))
    state = models.split_over(models.state_of(models.parameters()), mesh)
    step = jm.jit_step(models.train_step, state_shardings=models.shardings_of(state))
    models.run(watch(), STEPS, step=step, state=state, batch=_over(mesh))
    data.block_until_ready()


def plan_stale(watch: Watch) -> None:
    """The run has other batches than were planned for."""
    state = models.state_of(models.parameters())
    plan = jm.plan(models.train_step, state, models.batch_of(0, rows=64), budget="1GiB")
    models.run(watch(plan=plan), STEPS, step=jm.jit_step(models.train_step, plan.policy), state=state)


def prediction_off(watch: Watch) -> None:
    """The model was edited after planning: the same arguments, and activations twice as wide."""
    state = models.state_of(models.parameters())
    plan = jm.plan(models.train_step, state, models.batch_of(0, rows=512), budget="1GiB")

    def train_step(state: Any, batch: Any) -> Any:
        return models.train_step(state, jnp.concatenate([batch, batch * 2, batch * 3]))

    models.run(
        watch(plan=plan), STEPS, step=jm.jit_step(train_step), state=state, batch=lambda i: models.batch_of(i, rows=512)
    )


def _over(mesh: Any) -> Any:
    return lambda index: jax.device_put(models.batch_of(index), NamedSharding(mesh, P("data")))
