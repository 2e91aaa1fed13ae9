"""Kauldron: `kd.train.Trainer.train` of a small autoencoder."""

import tempfile

import flax.linen as nn
import jax
import numpy as np
import optax
from kauldron import kd, kontext

from benchmarks.gallery import outcome

STEPS = 4


class Net(nn.Module):
    x: kontext.Key = "batch.x"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (512, 256, 128, 256, 512):
            x = nn.gelu(nn.Dense(width)(x))
        return nn.Dense(64)(x)


def rows() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32)}


options = {}
for monitor in outcome.hooks():
    from jaxmem_callbacks.integrations.kauldron import MemoryProfiler

    options["profiler"] = MemoryProfiler(monitor=monitor)
trainer = kd.train.Trainer(
    workdir=tempfile.mkdtemp(),
    train_ds=kd.data.InMemoryPipeline(loader=rows, batch_size=1024),
    model=Net(),
    num_train_steps=STEPS - 1,
    log_metrics_every=1,
    train_losses={"l2": kd.losses.L2(preds="preds", targets="batch.x")},
    optimizer=optax.adam(1e-3),
    **options,
)
state, auxiliary = trainer.train()
outcome.keep([auxiliary.compute().loss_values["losses/l2"]], state.params)
