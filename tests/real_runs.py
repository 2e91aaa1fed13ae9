"""Runs that the memory page is judged on: `python -m tests.real_runs FOLDER`, in a process of its own with eight devices.

FOLDER/eight is a training over eight devices with a plan. FOLDER/failed ends for want of memory, under a limit of the address
space that the process sets itself; the failure's report is in FOLDER/failed-oom.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.presets import MonitorSettings

OPTIMIZER = optax.adam(1e-3)
STEPS, WIDTH, LAYERS = 24, 128, 8
LIMIT, LEFT = 48 * 2**20, 500 * 2**20


def loss_fn(params: Any, batch: Any) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w) + x, None

    return ((jax.lax.scan(layer, batch["x"], params["w"])[0] - batch["y"]) ** 2).mean()


def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
    loss, grads = jm.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


def new_state() -> Any:
    params = {"w": jnp.full((LAYERS, WIDTH, WIDTH), 0.01)}
    return {"params": params, "opt": OPTIMIZER.init(params)}


def rows(count: int) -> Any:
    return {"x": jnp.ones((count, WIDTH)), "y": jnp.ones((count, WIDTH))}


def settings() -> MonitorSettings:
    return MonitorSettings(window_s=0.2, scan_s=0.2, limit_bytes=LIMIT, on_error="raise")


def over_eight_devices(folder: Path) -> None:
    policy = jm.StepPolicy(sharding="fsdp")
    with jax.set_mesh(jm.make_mesh({"fsdp": 8})):
        plan = jm.plan(train_step, new_state(), rows(4096), budget="1GiB")
        step = jm.jit_step(train_step, policy)
        state = jax.device_put(new_state(), jm.infer_shardings(new_state(), jax.sharding.get_mesh(), "fsdp"))
        with jm.MemoryMonitor(settings(), logdir=folder, plan=plan) as monitor:
            for number in range(STEPS):
                state, metrics = step(state, rows(4096 if number != STEPS // 2 else 2048))
                metrics["loss"].block_until_ready()
                monitor(number, metrics)
                monitor.flush()


def until_memory_ends(folder: Path) -> None:
    step, state = jm.jit_step(train_step), new_state()
    state, _ = step(state, rows(256))
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with jm.MemoryMonitor(settings(), logdir=folder) as monitor:
        for number in range(8):
            state, metrics = step(state, rows(256))
            monitor(number, metrics)
            monitor.flush()
        held_too = jax.block_until_ready(jnp.ones(LIMIT, jnp.uint8))  # so that the failure has an event before it
        end = time.monotonic() + 60
        while not monitor.events and time.monotonic() < end:
            number += 1
            monitor(number)
            time.sleep(0.05)
        resource.setrlimit(resource.RLIMIT_AS, (held + LEFT, resource.RLIM_INFINITY))
        step(state, rows(2**17))[1]["loss"].block_until_ready()
        del held_too


if __name__ == "__main__":
    over_eight_devices(Path(sys.argv[1]) / "eight")
    until_memory_ends(Path(sys.argv[1]) / "failed")
