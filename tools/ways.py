"""The three ways of data, each followed call by call: `python tools/ways.py gradient`, `plan` or `reading`.

Printed are the files in their order, with the functions that are called for the first time there; then the changes from one
file to another by pair. Many between the same two are one concept in two places, or a list that is handed on item by item.
"""

from __future__ import annotations

import collections
import itertools
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem_callbacks as jm

PACKAGE = str(Path(jm.__file__).parent) + "/"
NAMES = ("value_and_grad", "plan", "MemoryMonitor", "jit_step", "StepPolicy", "apply_policy")


def step(params: Any, x: Any) -> Any:
    """A step of stochastic gradient descent on eight layers."""

    def loss(params: Any, x: Any) -> Any:
        for into, out in params:
            x = x + jnp.tanh(x @ into) @ out
        return jnp.mean(x**2)

    value, grads = jm.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments() -> tuple[Any, Any]:
    """Parameters and a batch."""
    return [(jnp.ones((16, 32)) * 0.01, jnp.ones((32, 16)) * 0.01) for _ in range(8)], jnp.ones((64, 16))


def gradient() -> None:
    """A gradient under remat."""
    jax.make_jaxpr(jm.apply_policy(step, jm.StepPolicy(remat="full")))(*arguments())


def plan() -> None:
    """A plan for this machine."""
    jm.plan(step, *arguments(), budget="100KiB")


def reading() -> None:
    """One scalar to the monitor's files."""
    with tempfile.TemporaryDirectory() as folder, jm.MemoryMonitor(logdir=folder) as monitor:
        for number in range(3):
            monitor(number, {"loss": 1.0})


WAYS = {"gradient": gradient, "plan": plan, "reading": reading}


def followed(work: Callable[[], None]) -> list[tuple[str, str]]:
    """Files and functions of the package in the order of their first calls."""
    first: dict[tuple[str, str], None] = {}

    def called(frame: Any, event: str, _: Any) -> None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and path.startswith(PACKAGE) and not name.startswith("<"):
            first.setdefault((path.removeprefix(PACKAGE), name))

    for name in NAMES:  # imports are no part of a way
        getattr(jm, name)
    threading.setprofile(called)
    sys.setprofile(called)
    work()
    sys.setprofile(None)
    threading.setprofile(None)
    return list(first)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    calls = followed(WAYS[sys.argv[1]])
    changes = [pair for pair in itertools.pairwise(path for path, _ in calls) if pair[0] != pair[1]]
    if "--json" not in sys.argv:
        for path, several in itertools.groupby(calls, lambda call: call[0]):
            print(path, *(name for _, name in several), sep="\n    ")
        for (one, other), count in collections.Counter(changes).most_common():
            print(f"{count:3} {one} -> {other}")
    print(json.dumps([len({path for path, _ in calls}), len(changes)]))
