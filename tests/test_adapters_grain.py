"""The real Grain: `jm.prefetch` over a DataLoader and over a Dataset gives a training the same batches, each once, in order."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_callbacks as jm
from tests.watching import NotingMonitor, assert_written

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("default")]

ROWS, BATCH = 48, 8
STEPS = 2 * ROWS // BATCH


class Rows:
    """A source of records, as Grain wants one."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        return {"x": np.random.default_rng(number).normal(size=4).astype(np.float32), "row": np.int32(number)}


def data_loader() -> Iterable[Any]:
    import grain.python as pygrain

    sampler = pygrain.IndexSampler(ROWS, pygrain.NoSharding(), shuffle=True, num_epochs=2, seed=0)
    return pygrain.DataLoader(data_source=Rows(), sampler=sampler, operations=[pygrain.Batch(BATCH)], worker_count=0)


def dataset() -> Iterable[Any]:
    import grain.python as pygrain

    return pygrain.MapDataset.source(Rows()).shuffle(seed=0).repeat(2).batch(BATCH).to_iter_dataset()


def trained(batches: Iterable[Any], hook: Any) -> tuple[list[int], np.ndarray]:
    """The rows in the order in which they were trained on, and the weights after it."""
    step = jax.jit(lambda w, batch: w - 0.1 * jnp.tanh(batch["x"] @ w).mean())
    weights, rows = jnp.ones(4), []
    for number, batch in enumerate(batches):
        rows.extend(np.asarray(batch["row"]).tolist())
        weights = step(weights, batch)
        hook(number)
    return rows, np.asarray(weights)


@pytest.mark.parametrize("make", [data_loader, dataset])
def test_batches_that_were_fetched_ahead_are_the_same(make: Any, tmp_path: Path) -> None:
    rows, weights = trained(make(), lambda number: None)
    with NotingMonitor(tmp_path) as monitor, jm.prefetch(make()) as batches:
        ahead = trained(batches, monitor)
    assert ahead[0] == rows
    assert sorted(rows) == sorted(2 * [*range(ROWS)])
    assert rows != sorted(rows), "shuffled"
    assert np.array_equal(ahead[1], weights)
    assert_written(monitor, range(STEPS))
