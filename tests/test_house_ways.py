"""How many files the three ways of data pass, and how often they change file: a bound is raised only by an edit that says why.

A way is the order in which functions of the package are called for the first time.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm

PACKAGE = str(Path(jm.__file__).parent)
NAMES = ("value_and_grad", "plan", "MemoryMonitor", "jit_step", "StepPolicy", "apply_policy")


def way(work: Callable[[], object]) -> tuple[int, int]:
    """Files that a piece of work passes, and its changes of file."""
    first: dict[tuple[str, str], None] = {}

    def called(frame, event, _):
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and path.startswith(PACKAGE) and not name.startswith("<"):
            first.setdefault((path, name))

    for name in NAMES:  # imports are no part of a way
        getattr(jm, name)
    before = sys.getprofile()
    threading.setprofile(called)
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    files = [path for path, _ in first]
    return len(set(files)), sum(one != other for one, other in itertools.pairwise(files))


def step(params, x):
    def loss(params, x):
        for into, out in params:
            x = x + jnp.tanh(x @ into) @ out
        return jnp.mean(x**2)

    value, grads = jm.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments():
    return [(jnp.ones((16, 32)) * 0.01, jnp.ones((32, 16)) * 0.01) for _ in range(8)], jnp.ones((64, 16))


def a_gradient(_: Path) -> None:
    jax.make_jaxpr(jm.apply_policy(step, jm.StepPolicy(remat="full")))(*arguments())


def a_plan(_: Path) -> None:
    jm.plan(step, *arguments(), budget="100KiB")


def a_reading(folder: Path) -> None:
    with jm.MemoryMonitor(logdir=folder) as monitor:
        for number in range(3):
            monitor(number, {"loss": 1.0})


@pytest.mark.parametrize(
    ("work", "files", "changes"),
    [
        (a_gradient, 17, 85),  # what is called first depends on what other tests have called before
        (a_plan, 61, 355),  # compiles run in threads: a few changes more or less
        (a_reading, 38, 165),  # likewise
    ],
)
def test_a_way_gets_no_longer(tmp_path, work, files, changes):
    passed, changed = way(lambda: work(tmp_path))
    assert 3 < passed <= files
    assert changed <= changes
