"""The lines of docs/frameworks.md that need a framework of their own, run with the real one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.frameworks import OTHERS
from tests.test_docs import WORLD, blocks
from tests.watching import assert_read_back

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "frameworks.md"
# What a user of the framework has before the lines of the document, and does after them.
BEFORE = {
    "keras": """
import keras, numpy as np
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
model.compile("adam", "mse")
x, y = np.ones((40, 8), "float32"), np.ones((40, 1), "float32")
""",
    "clu": """
from clu import periodic_actions
hooks = [periodic_actions.PeriodicCallback(every_steps=2, callback_fn=lambda step, t: None)]
def train(hooks):
    for step in range(1, 5):
        for hook in hooks:
            hook(step)
""",
    "grain": """
import grain.python as pygrain
rows = [dict(batch)] * 4
loader = pygrain.MapDataset.source(rows).to_iter_dataset()
step = jax.jit(train_step)
""",
    "tunix": """
from flax import nnx
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
trainer = PeftTrainer(nnx.Linear(8, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), TrainingConfig(eval_every_n_steps=9, max_steps=3))
trainer.with_loss_fn(lambda model, x: (model(x) ** 2).mean())
train_ds = [{"x": jnp.ones((4, 8))}] * 3
""",
    "levanter": """
import contextlib
from pathlib import Path
from tests import test_adapters_levanter as levanter
own = contextlib.ExitStack()
trainer = own.enter_context(levanter.trainer_of(levanter.config(Path("."))))
state, train_loader = levanter.state_and_batches(trainer)
""",
    "kauldron": """
from kauldron import konfig
from tests import kauldron_run
cfg = kauldron_run.config("runs")
""",
}
AFTER = {
    "levanter": "own.close()",
    "kauldron": """
trainer = konfig.resolve(cfg)
trainer.train()
trainer.profiler.watching.close()
""",
}
WRITTEN = {"keras": "runs/a", "clu": "runs/a", "tunix": "runs/a", "levanter": "runs/a", "kauldron": "runs/memory"}


@pytest.mark.parametrize("name", OTHERS)
def test_the_lines_of_the_document_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", "jax")
    (block,) = blocks(DOCUMENT.read_text(), f"python {name}")
    world: dict[str, Any] = {"__name__": "__main__"}
    exec(WORLD + BEFORE[name], world)  # noqa: S102 - what the document's reader has
    exec(compile(block, f"frameworks.md, {name}", "exec"), world)  # noqa: S102 - what it says
    exec(AFTER.get(name, ""), world)  # noqa: S102 - what comes next
    if name in WRITTEN:
        assert_read_back(tmp_path / WRITTEN[name])
