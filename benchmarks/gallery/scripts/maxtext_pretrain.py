"""MaxText: its pre-training's `main`, on a small decoder and synthetic tokens."""

import json
import tempfile
from pathlib import Path

import maxtext
from maxtext.trainers.pre_train import train

from benchmarks.gallery import outcome
from benchmarks.gallery.small_maxtext import SMALL

folder = Path(tempfile.mkdtemp())
settings = SMALL | {
    "run_name": "gallery",
    "base_output_directory": folder,
    "metrics_file": folder / "metrics.txt",
}
for monitor in outcome.hooks():
    train.training_loop_iteration = monitor.wrap(train.training_loop_iteration, step=lambda *args: args[1]["step"])
arguments = [
    "train",
    f"{Path(maxtext.__path__[0])}/configs/base.yml",
    *(f"{key}={value}" for key, value in settings.items()),
]
train.main(arguments)
metrics = [json.loads(line) for line in (folder / "metrics.txt").read_text().splitlines()]
outcome.keep(each["learning/loss"] for each in metrics)
