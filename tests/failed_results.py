"""A script whose results come from calls that ran out of memory; prints who holds them. Run by the tests.

A kernel library of XLA's CPU client fails while the program runs, after the call has returned. The limit of the address space is
this script's own.
"""

import dataclasses
import json
import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.steps.leaves import user_leaves
from jaxmem_callbacks.recovery.reports.live_buffers import find_live_buffers

WIDTH = 512


@jax.jit
def in_a_library(x):
    y = jnp.tile(x, (64, 64))
    return (y @ y.T).sum()


def a_function(x):
    return jax.jit(lambda x: jnp.ones((WIDTH, WIDTH)) * in_a_library(x))(x)


def train_step(state, x):
    return {"w": state["w"] + in_a_library(x)}, {}


def a_step_that_donates(x):
    step = jm.jit_step(train_step, jm.StepPolicy(donate=("state",)))
    state, _ = step({"w": jnp.zeros((WIDTH, WIDTH))}, x)
    return state["w"]


def a_function_of_a_failed_result(x):
    return jax.jit(lambda w: w + 1)(a_function(x))


SMALL, LARGE = jnp.ones((8, 8)), jnp.ones((256, 256))
WAYS = {
    "a function": a_function,
    "a step that donates": a_step_that_donates,
    "a function of a failed result": a_function_of_a_failed_result,
}
for way in WAYS.values():
    way(SMALL).block_until_ready()
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 300 * 2**20, resource.RLIM_INFINITY))
told = {}
for name, way in WAYS.items():
    kept = jnp.ones((WIDTH, WIDTH))
    result = way(LARGE)
    try:
        result.block_until_ready()
    except jax.errors.JaxRuntimeError:
        leaves = user_leaves("state", {"w": jax.ShapeDtypeStruct(result.shape, result.dtype)})
        names = {id(result): "state (train.py)", id(kept): "kept (train.py)"}
        held = find_live_buffers(leaves, names, are_the_calls=False)
        told[name] = [dataclasses.asdict(each) for each in held.holders], held.failed_bytes, result.nbytes
sys.stdout.write(json.dumps(told) + "\n")
