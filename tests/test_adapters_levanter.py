"""The real Levanter: a Trainer with own hooks, tracker and checkpoints, with and without `monitor.on_step` among the hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.watching import NotingMonitor, assert_written

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

STEPS, ROWS, WIDTH = 8, 8, 8  # a row for each device of the tests


def config(folder: Path) -> Any:
    """Initialised, without an accelerator and without an account of Weights & Biases."""
    from levanter.checkpoint import CheckpointerConfig
    from levanter.tracker.tracker import NoopConfig
    from levanter.trainer import TrainerConfig

    made = TrainerConfig(
        id="run",
        num_train_steps=STEPS,
        train_batch_size=ROWS,
        tracker=NoopConfig(),
        log_dir=folder / "logs",
        checkpointer=CheckpointerConfig(base_path=str(folder / "checkpoints")),
        require_accelerator=False,
        log_jaxprs=False,
        log_xla_hlo=False,
    )
    made.initialize()
    return made


def trainer_of(made: Any) -> Any:
    """A trainer with Levanter's own hooks; to be entered."""
    import haliax as hax
    from levanter.trainer import Trainer

    def loss_fn(model: Any, x: Any, key: Any = None) -> tuple[Any, dict[str, Any]]:  # noqa: ARG001 - Levanter's signature
        return hax.mean(model(x) ** 2), {"norm": hax.sum(model.weight**2).scalar()}

    return Trainer(made, optax.adam(1e-2), loss_fn)


def state_and_batches(trainer: Any) -> tuple[Any, list[Any]]:
    """What an entered trainer trains, and on what."""
    import haliax as hax

    axes = hax.Axis("features", WIDTH), hax.Axis("out", 4)
    rows = jax.random.normal(jax.random.key(0), (STEPS, ROWS, WIDTH))
    state = trainer.initial_state(jax.random.PRNGKey(1), model=hax.nn.Linear.init(*axes, key=jax.random.key(2)))
    return state, [hax.named(batch, ("batch", "features")) for batch in rows]


def trained(folder: Path, monitor: Any = None, every: int = 1) -> tuple[dict[str, list[Any]], list[np.ndarray]]:
    """What Levanter's tracker was told and the own hook saw, and the weights at the end."""
    import equinox as eqx
    import levanter.tracker
    from levanter.tracker.tracker import NoopTracker

    told: dict[str, list[Any]] = {"own hook": []}

    class Keeping(NoopTracker):
        def log(self, metrics: Any, *, step: int | None, commit: bool | None = None) -> None:  # noqa: ARG002 - Levanter's
            for name in {"train/loss", "train/norm"} & set(metrics):
                told.setdefault(name, []).append((step, float(jnp.asarray(metrics[name]))))

    made = config(folder)
    with levanter.tracker.current_tracker(Keeping()), trainer_of(made) as trainer:
        state, batches = state_and_batches(trainer)
        trainer.add_hook(lambda info: told["own hook"].append((info.step, info.loss)), every=3)
        if monitor is not None:
            trainer.add_hook(monitor.on_step, every=every)
        info = trainer.train(state, batches)
    return told, [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(info.model, eqx.is_array))]


def test_a_training_with_the_monitor_among_its_hooks_is_the_same(tmp_path: Path) -> None:
    """Levanter calls every hook once more at the end of a training; the monitor tells that step once all the same."""
    plain, weights = trained(tmp_path / "plain")
    with NotingMonitor(tmp_path / "monitor") as monitor:
        watched = trained(tmp_path / "watched", monitor)
    assert plain == watched[0]
    assert [step for step, _ in plain["train/loss"][:STEPS]] == list(range(STEPS))
    assert plain["train/loss"][0] != plain["train/loss"][-1], "it trained"
    assert [step for step, _ in plain["own hook"]] == [2, 5, STEPS - 1], "the last by the call at the end"
    assert all(map(np.array_equal, weights, watched[1]))
    saved = [len([*(tmp_path / name / "checkpoints").rglob("metadata.json")]) for name in ("plain", "watched")]
    assert saved == [1, 1]
    assert_written(monitor, range(STEPS), "loss")


def test_a_step_that_only_the_last_call_tells_is_told(tmp_path: Path) -> None:
    with NotingMonitor(tmp_path / "monitor") as monitor:
        trained(tmp_path, monitor, every=3)
    assert monitor.steps == [2, 5, 7]
