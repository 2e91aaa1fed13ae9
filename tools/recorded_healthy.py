"""Healthy runs: each does something that looks like a fault for a while and is none."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from typing import Any

import jax
import jax.numpy as jnp
import recorded_models as models
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from recorded_models import Watch

import jaxmem_callbacks as jm

STEPS, FEW = 130, 20


def warm_up(watch: Watch) -> None:
    """Buffers are made one by one during the first steps."""
    made: list[jax.Array] = []
    models.run(watch(), STEPS, each=lambda i, s, _: made.append(s["params"]["w0"] + i) if i < FEW else None)


def evaluation(watch: Watch) -> None:
    """Every 40 steps training rests while another program runs over held-out batches and its results are kept for a while."""

    def evaluate(params: Any, batch: Any) -> Any:
        return jnp.tanh(batch @ params["wout"])

    evaluate_jit = jm.jit_step(evaluate, donate_argnames=())

    def each(index: int, state: Any, loss: Any) -> None:
        del loss
        if (index + 1) % 40 == 0:
            kept = []
            for batch in range(12):
                kept.append(evaluate_jit(state["params"], models.batch_of(batch, rows=256)))
                time.sleep(models.PACE_S)
            jax.block_until_ready(kept)

    models.run(watch(), STEPS, each=each)


def checkpoints(watch: Watch) -> None:
    """Every 30 steps a copy of the state is held by another thread until it is on the disk."""

    def save(copy: Any) -> None:
        for leaf in jax.tree.leaves(copy):
            jax.device_get(leaf)
            time.sleep(0.02)

    def each(index: int, state: Any, loss: Any) -> None:
        del loss
        if index % 30 == 0:
            threading.Thread(target=save, args=(jax.tree.map(jnp.copy, state),)).start()

    models.run(watch(), STEPS, each=each)


def lengths_in_buckets(watch: Watch) -> None:
    """Batches of four lengths, each compiled before the run begins."""
    step, state = jm.jit_step(models.train_step), models.state_of(models.parameters())
    rows = [8, 16, 32, 64]
    for count in rows:
        state, _ = step(state, models.batch_of(0, rows=count))
    models.run(watch(), STEPS, step=step, state=state, batch=lambda i: models.batch_of(i, rows=rows[i * 7 % 4]))


def ragged_metrics(watch: Watch) -> None:
    """Arrays of ever other lengths live for a few steps, made by operations outside of jit."""
    recent: deque[jax.Array] = deque(maxlen=6)
    models.run(watch(), STEPS // 2, each=lambda i, _, loss: recent.append(jnp.zeros(100 + 37 * i % 1000) + loss))


def losses_freed_each_epoch(watch: Watch) -> None:
    """Losses and large outputs are kept on the device and let go at the end of every epoch of 45 steps."""
    losses: list[jax.Array] = []
    outputs: list[jax.Array] = []

    def each(index: int, state: Any, loss: Any) -> None:
        losses.append(loss)
        outputs.append(state["params"]["w0"] * 1.0)
        if (index + 1) % 45 == 0:
            float(sum(losses))
            losses.clear()
            outputs.clear()

    models.run(watch(), 3 * STEPS, each=each)


def metrics_freed_each_long_epoch(watch: Watch) -> None:
    """A metric of every third step is kept on the device for epochs longer than a growth must last."""
    kept: list[jax.Array] = []

    def each(index: int, state: Any, loss: Any) -> None:
        del state
        if index % 3 == 0:
            kept.append(loss)
        if (index + 1) % 180 == 0:
            kept.clear()

    models.run(watch(), 400, each=each)


def losses_of_long_epochs_by_the_defaults(watch: Watch) -> None:
    """Every loss is kept on the device for epochs of 20,000 steps and let go of at their end; the thresholds are the defaults."""
    losses: list[jax.Array] = []

    def each(index: int, state: Any, loss: Any) -> None:
        del state
        losses.append(loss)
        if (index + 1) % 20_000 == 0:
            losses.clear()

    models.run(watch(defaults=True), 64_000, each=each, pace_s=0.004)


def large_arrays_by_the_defaults(watch: Watch) -> None:
    """ZeRO-1 over a weight of 64 MiB, with its average, evaluations and checkpoints; the thresholds are the defaults."""
    mesh = models.mesh_of()
    params = {"w0": jax.random.normal(jax.random.key(0), (4096, 4096)) / 64, "w1": jnp.ones((4096, 64)) / 64}
    state = jax.device_put(models.state_of(params), NamedSharding(mesh, P()))
    state["momentum"] = models.split_over(state["momentum"], mesh)
    average = models.split_over(params, mesh)
    mean = jax.jit(
        lambda a, p: jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, a, p), out_shardings=models.shardings_of(average)
    )
    held_out = jax.jit(models.loss_of)
    del params

    def each(index: int, state: Any, loss: Any) -> None:
        nonlocal average
        jax.block_until_ready(loss)
        if index % 20 == 0:
            average = mean(average, state["params"])
            jax.block_until_ready([held_out(average, models.batch_of(i, rows=64, width=4096)) for i in range(4)])
        if index % 50 == 0:
            jax.block_until_ready(jax.tree.map(jnp.copy, state))

    step = jm.jit_step(models.train_step, state_shardings=models.shardings_of(state))
    batch = NamedSharding(mesh, P("data"))
    models.run(
        watch(defaults=True, limit_bytes=4 * 2**30),
        160,
        step=step,
        state=state,
        batch=lambda index: jax.device_put(models.batch_of(index, width=4096), batch),
        each=each,
    )


def prefetch(watch: Watch) -> None:
    """Four batches wait on the device."""
    queue = deque(jax.device_put(models.batch_of(i)) for i in range(4))

    def batch(index: int) -> Any:
        queue.append(jax.device_put(models.batch_of(index)))
        return queue.popleft()

    models.run(watch(), STEPS, batch=batch)


def cache_that_fills(watch: Watch) -> None:
    """A cache of features grows to its bound and stays there."""
    cache: OrderedDict[int, jax.Array] = OrderedDict()

    def each(index: int, state: Any, loss: Any) -> None:
        del loss
        cache[index] = state["params"]["w0"] * 2
        if len(cache) > 2 * FEW:
            cache.popitem(last=False)

    models.run(watch(), 2 * STEPS, each=each)


def averaged_weights(watch: Watch) -> None:
    """A second copy of the weights is kept as their mean."""
    average = jax.jit(lambda a, p: jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, a, p))
    kept: dict[str, Any] = {}

    def each(index: int, state: Any, loss: Any) -> None:
        del loss
        if index % 10 == 0:
            kept["mean"] = average(kept.get("mean", state["params"]), state["params"])

    models.run(watch(), STEPS, each=each)


def accumulation(watch: Watch) -> None:
    """Gradients over four slices of the batch."""
    step = jm.jit_step(models.train_step, jm.load_preset("accumulate_4", "donate"))
    models.run(watch(), STEPS, step=step)


def restore(watch: Watch) -> None:
    """After 60 steps the run is set back to a checkpoint on the host and repeats 30 of them."""
    step = jm.jit_step(models.train_step)
    monitor = watch()
    state = models.run(monitor, 30, step=step)
    saved = jax.device_get(state)
    models.run(monitor, 30, step=step, state=state, first=30)
    models.run(monitor, STEPS, step=step, state=jax.device_put(saved), first=30)


def long_pause(watch: Watch) -> None:
    """The data stops coming for a second."""
    models.run(watch(), STEPS, each=lambda i, *_: time.sleep(1.0) if i == FEW else None)


def split_state(watch: Watch) -> None:
    """The state is split over four devices, and gathered for an export now and then."""
    mesh = models.mesh_of()
    state = models.split_over(models.state_of(models.parameters()), mesh)
    step = jm.jit_step(models.train_step, state_shardings=models.shardings_of(state))

    def each(index: int, state: Any, loss: Any) -> None:
        del loss
        if (index + FEW) % 40 == 0:
            whole = jax.device_put(state["params"], NamedSharding(mesh, P()))
            jax.block_until_ready(whole)
            time.sleep(0.02)

    models.run(watch(), STEPS, step=step, state=state, batch=_over(mesh), each=each)


def data_parallel(watch: Watch) -> None:
    """Every device holds the whole state, the batch is split."""
    mesh = models.mesh_of()
    state = jax.device_put(models.state_of(models.parameters()), NamedSharding(mesh, P()))
    step = jm.jit_step(models.train_step, state_shardings=models.shardings_of(state))
    models.run(watch(), STEPS, step=step, state=state, batch=_over(mesh))


def split_moments(watch: Watch) -> None:
    """ZeRO-1: parameters are whole on every device, their momentum is split."""
    mesh = models.mesh_of()
    state = jax.device_put(models.state_of(models.parameters()), NamedSharding(mesh, P()))
    state["momentum"] = models.split_over(state["momentum"], mesh)
    step = jm.jit_step(models.train_step, state_shardings=models.shardings_of(state))
    models.run(watch(), STEPS, step=step, state=state, batch=_over(mesh))


def a_weight_that_does_not_divide(watch: Watch) -> None:
    """The policy splits the state, but for a weight and its momentum of which no dimension divides by four devices."""
    mesh = models.mesh_of()
    preset = jm.load_preset("fsdp")

    def train_step(state: Any, batch: Any) -> Any:
        params, other = models.train_step({key: state[key] for key in ("params", "momentum", "count")}, batch)
        return params | {"odd": state["odd"] * 0.99, "odd_momentum": state["odd_momentum"] * 0.9}, other

    with jax.set_mesh(mesh):
        state = models.state_of(models.parameters())
        state |= {"odd": jnp.ones((331, 331)), "odd_momentum": jnp.zeros((331, 331))}
        state = jax.device_put(state, jm.infer_shardings(state, mesh, preset))
        models.run(watch(preset), STEPS, step=jm.jit_step(train_step, preset), state=state, batch=_over(mesh))


def one_of_four_devices(watch: Watch) -> None:
    """Three devices hold nothing: this run does not use them."""
    models.run(watch(), STEPS)


def stages_of_a_pipeline(watch: Watch) -> None:
    """Two stages of unlike size, each on two devices of its own."""
    first, second = models.mesh_of(2), jax.sharding.Mesh(jax.devices()[2:4], ("data",))
    large = models.split_over(models.parameters(depth=12), first)
    small = models.split_over(models.parameters(depth=1), second)
    forward = jax.jit(models.loss_of)

    def both(state: Any, batch: Any) -> Any:
        forward(small, jax.device_put(batch, NamedSharding(second, P())))
        return state, forward(large, jax.device_put(batch, NamedSharding(first, P())))

    models.run(watch(), STEPS, step=both, state=large)


def as_planned(watch: Watch) -> None:
    """The step is the one that was planned."""
    state = models.state_of(models.parameters())
    plan = jm.plan(models.train_step, state, models.batch_of(0), budget="1GiB")
    models.run(watch(plan=plan), STEPS, step=jm.jit_step(models.train_step, plan.policy), state=state)


def _over(mesh: Any) -> Any:
    return lambda index: jax.device_put(models.batch_of(index), NamedSharding(mesh, P("data")))
