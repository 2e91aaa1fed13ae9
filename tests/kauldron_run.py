"""A model, data and a trainer of Kauldron, in a module of their own: Kauldron reads annotations, and konfig imports by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from kauldron import kd, konfig, kontext
from kauldron.inspect.profile_utils import NoopProfiler

STEPS = 9  # Kauldron's num_train_steps of 8, and one more as it counts
CALLED: list[int] = []


class Net(nn.Module):
    """Its inputs are named by where they are found."""

    x: kontext.Key = "batch.x"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4)(nn.tanh(nn.Dense(16)(x)))


class OwnProfiler(NoopProfiler):
    """What a user had in the place before."""

    def __call__(self, step: int) -> None:
        CALLED.append(step)


def rows() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)}


def config(workdir: str) -> Any:
    """The same as a konfig, in which everything is a name."""
    with konfig.imports():
        import optax
        from kauldron import kd

        from tests import kauldron_run  # noqa: PLW0406 - a konfig holds names
    return kd.train.Trainer(
        workdir=workdir,
        train_ds=kd.data.InMemoryPipeline(loader=kauldron_run.rows, batch_size=8),
        model=kauldron_run.Net(),
        num_train_steps=STEPS - 1,
        train_losses={"l2": kd.losses.L2(preds="preds", targets="batch.x")},
        optimizer=optax.adam(1e-2),
    )


def trainer(workdir: Path, profiler: Any) -> Any:
    """A short training, with what stands in the profiler's place."""
    return kd.train.Trainer(
        workdir=workdir,
        train_ds=kd.data.InMemoryPipeline(loader=rows, batch_size=8),
        model=Net(),
        num_train_steps=STEPS - 1,
        log_metrics_every=2,
        train_losses={"l2": kd.losses.L2(preds="preds", targets="batch.x")},
        optimizer=optax.adam(1e-2),
        profiler=profiler,
    )
