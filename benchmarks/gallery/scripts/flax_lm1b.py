"""Flax: the LM1B example of its published sources, on mocked data."""

import json
import tempfile
from pathlib import Path

import tensorflow as tf
import tensorflow_datasets as tfds
import train
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from benchmarks.gallery import outcome
from configs import default

config = default.get_config()
settings = {
    "max_corpus_chars": 1000,
    "vocab_size": 32,
    "per_device_batch_size": 8,
    "num_train_steps": 4,
    "eval_every_steps": 1,
    "num_eval_steps": 1,
    "num_predict_steps": 1,
    "num_layers": 2,
    "qkv_dim": 128,
    "emb_dim": 128,
    "mlp_dim": 512,
    "num_heads": 8,
    "max_target_length": 64,
    "max_eval_target_length": 64,
    "max_predict_length": 16,
    "save_checkpoints": False,
    "restore_checkpoints": False,
    "use_bfloat16": False,
}
config.update(settings)
folder = Path(tempfile.mkdtemp())
tf.random.set_seed(0)  # the sources shuffle without one
# What TensorFlow Datasets keeps of a data set that it has prepared; the sources are published without theirs.
prepared = folder / "data" / "lm1b" / "1.1.0"
prepared.mkdir(parents=True)
splits = [{"name": name, "numBytes": "1", "shardLengths": ["128"]} for name in ("train", "test")]
(prepared / "dataset_info.json").write_text(json.dumps({"name": "lm1b", "version": "1.1.0", "splits": splits}))
for monitor in outcome.hooks():
    train.periodic_actions.Profile = lambda monitor=monitor, **_: monitor  # the hook that the loop calls at each step
with tfds.testing.mock_data(num_examples=128, data_dir=str(folder / "data")):
    train.train_and_evaluate(config, str(folder))
losses = [
    float(make_ndarray(value.tensor))
    for file in sorted(folder.glob("events*"))
    for event in EventFileLoader(str(file)).Load()
    for value in event.summary.value
    if value.tag == "train_loss"
]
outcome.keep(losses)
