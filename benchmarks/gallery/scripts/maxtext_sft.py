"""MaxText post-training: supervised fine-tuning, which Tunix trains, from scratch on synthetic tokens."""

import tempfile
from pathlib import Path

import maxtext
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.trainers.post_train.sft import train_sft

from benchmarks.gallery import outcome
from benchmarks.gallery.small_maxtext import SMALL

settings = SMALL | {
    "run_name": "gallery",
    "base_output_directory": tempfile.mkdtemp(),
    "eval_interval": -1,
}
path = f"{Path(maxtext.__path__[0])}/configs/post_train/sft.yml"
config = pyconfig.initialize(["train_sft", path, *(f"{key}={value}" for key, value in settings.items())])
trainer, mesh = train_sft.setup_trainer_state(config)
for monitor in outcome.hooks():
    from jaxmem_callbacks.integrations.tunix import MemoryHooks

    trainer.with_training_hooks(MemoryHooks(monitor, trainer.training_hooks))
train_sft.train_model(config, trainer, mesh)
losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
outcome.keep(losses, nnx.state(trainer.model, nnx.Param))
