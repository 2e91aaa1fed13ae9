"""Levanter: a `Trainer` with its own hooks and checkpoints, of a small Haliax model."""

import tempfile

import equinox as eqx
import haliax as hax
import jax
import optax
from levanter.checkpoint import CheckpointerConfig
from levanter.tracker.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

from benchmarks.gallery import outcome

STEPS, ROWS, WIDTH = 4, 64, 256
folder = tempfile.mkdtemp()
config = TrainerConfig(
    id="run",
    num_train_steps=STEPS,
    train_batch_size=ROWS,
    tracker=NoopConfig(),
    log_dir=f"{folder}/logs",
    checkpointer=CheckpointerConfig(base_path=f"{folder}/checkpoints"),
    require_accelerator=False,
    log_jaxprs=False,
    log_xla_hlo=False,
)
config.initialize()
axes = hax.Axis("features", WIDTH), hax.Axis("out", WIDTH)


def loss_fn(model, x, key=None):
    return hax.mean(model(x) ** 2), {}


losses, hooks = [], outcome.hooks()
with Trainer(config, optax.adam(1e-3), loss_fn) as trainer:
    model = hax.nn.MLP.init(axes[0], axes[1], width=1024, depth=4, key=jax.random.key(2))
    state = trainer.initial_state(jax.random.PRNGKey(1), model=model)
    trainer.add_hook(lambda info: losses.append(info.loss))
    for hook in hooks:
        trainer.add_hook(hook.on_step)
    rows = jax.random.normal(jax.random.key(0), (STEPS, ROWS, WIDTH))
    info = trainer.train(state, [hax.named(batch, ("batch", "features")) for batch in rows])
outcome.keep(losses[:STEPS], eqx.filter(info.model, eqx.is_array))
