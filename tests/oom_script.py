"""A script that trains under a limit of its address space that it sets itself, until memory runs out; run by the tests.

Arguments: what is around the training (``nothing``, ``guard``, ``monitor``, ``unclosed``), where reports go, seconds for
planning, and what fails (``step``, ``library``, ``text``, ``nothing left``). What follows is never read.
"""

import contextlib
import mmap
import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jaxmem_callbacks as jm

around, outdir, seconds, what = sys.argv[1:5]
OPTIMIZER = optax.adam(1e-3)


def loss_fn(params, batch):
    def layer(x, w):
        return jnp.tanh(x @ w) + x, None

    return ((jax.lax.scan(layer, batch["x"], params["w"])[0] - batch["y"]) ** 2).mean()


def train_step(state, batch):
    loss, grads = jm.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


@jax.jit
def in_a_library(x):
    y = jnp.tile(x, (64, 64))
    return (y @ y.T).sum()


def held():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def new_state():
    params = {"w": jnp.full((24, 128, 128), 0.01)}
    return {"params": params, "opt": OPTIMIZER.init(params)}


def rows(count):
    return {"x": jnp.ones((count, 128)), "y": jnp.ones((count, 128))}


def take_everything():
    taken, size = [], 2**24
    while size > 2**16:
        try:
            taken.append(mmap.mmap(-1, size))
        except (OSError, MemoryError):
            size //= 2
    return b"x" * 2**30


def train(monitor=None):
    state = new_state()
    for number, count in enumerate((256, 256, 2**15)):
        state, metrics = step(state, rows(count))
        metrics["loss"].block_until_ready()
        if monitor is not None:
            monitor(number, metrics)


def fail():
    if what == "step":
        train(watching)
    elif what == "library":
        in_a_library(jnp.ones((256, 256))).block_until_ready()
    elif what == "text":
        raise MemoryError("Unable to allocate 1.00 TiB for " + " ".join(sys.argv[5:]))
    else:
        take_everything()


step = jm.jit_step(train_step)
if what == "step":
    step(new_state(), rows(256))
elif what != "text":
    (jnp.ones((256, 256)) @ jnp.ones((256, 256))).block_until_ready()
watching = jm.MemoryMonitor(logdir=outdir + "/run") if around in ("monitor", "unclosed") else None
if watching is not None:
    watching(0)
guards = {"guard": lambda: jm.oom_guard(outdir=outdir, plan_seconds=float(seconds)), "monitor": lambda: watching}
guard = guards.get(around, contextlib.nullcontext)()
resource.setrlimit(resource.RLIMIT_AS, (held() + 700 * 2**20, resource.RLIM_INFINITY))
with guard:
    fail()
