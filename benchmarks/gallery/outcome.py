"""What a program hands over when it has trained, and the monitor among its hooks. The programs import this.

Which of the two is wanted, the runner says by variables: none of them is set while a program is inspected or planned.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

KEPT, WATCHED = "GALLERY_KEPT", "GALLERY_WATCHED"  # a file for losses and state; a folder for the monitor

_monitors: list[Any] = []


def hooks() -> list[Any]:
    """What a loop calls with the number of each step: the monitor where this run is to be watched, else nothing."""
    if WATCHED not in os.environ:
        return []
    import jaxmem_callbacks as jm

    _monitors.append(jm.MemoryMonitor(logdir=os.environ[WATCHED]))
    return [_monitors[-1]]


def keep(losses: Iterable[Any], state: Any = ()) -> None:
    """Write losses and the arrays of the final state for the runner to compare, and close the monitor.

    Args:
        losses: One for each step, in order.
        state: What the program returns, a tree of arrays; empty where its trainer returns none.
    """
    import jax
    import numpy as np

    for monitor in _monitors:
        monitor.close()
    leaves = [leaf for leaf in jax.tree.leaves(state) if hasattr(leaf, "dtype")]
    plain = [
        jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf for leaf in leaves
    ]
    arrays = {f"state {at}": np.asarray(leaf, np.float64) for at, leaf in enumerate(plain)}
    if KEPT in os.environ:
        np.savez(os.environ[KEPT], losses=np.asarray([float(each) for each in losses]), **arrays)
