"""The real Tunix: a PeftTrainer is trained to its end with hooks of its own, with and without the monitor among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.watching import NotingMonitor, assert_written

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("default")]

MICRO_STEPS, ACCUMULATED, WIDTH = 8, 2, 8


def losses_and_weights(wrap: Any) -> tuple[list[float], list[str], list[np.ndarray]]:
    """A training with evaluation and accumulation: losses and calls that the loop's own hooks saw, and the weights after it."""
    from tunix.sft.hooks import TrainingHooks
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

    losses: list[float] = []
    calls: list[str] = []

    class Own(TrainingHooks):
        def on_train_start(self, train_ctx: Any) -> None:
            calls.append("train_start")

        def on_train_end(self, train_ctx: Any) -> None:
            calls.append("train_end")

        def on_train_step_start(self, train_ctx: Any) -> None:
            calls.append(f"step_start {train_ctx.iter_steps}")

        def on_train_step_end(self, train_ctx: Any, train_step: int, train_loss: float) -> None:
            losses.append(float(train_loss))

        def on_eval_step_start(self, train_ctx: Any) -> None:
            calls.append("eval_start")

        def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None:
            losses.append(float(eval_loss))

    model = nnx.Linear(WIDTH, 1, rngs=nnx.Rngs(0))
    config = TrainingConfig(
        eval_every_n_steps=2, max_steps=MICRO_STEPS // ACCUMULATED, gradient_accumulation_steps=ACCUMULATED
    )
    trainer = PeftTrainer(model, optax.adam(1e-2), config)
    trainer.with_loss_fn(lambda model, x: (model(x) ** 2).mean())
    trainer.with_training_hooks(wrap(Own()))
    rows = jax.random.normal(jax.random.key(0), (MICRO_STEPS, 4, WIDTH))
    trainer.train([{"x": batch} for batch in rows], [{"x": jnp.ones((4, WIDTH))}])
    return losses, calls, [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


def test_a_training_with_the_monitor_among_its_hooks_is_the_same(tmp_path: Path) -> None:
    from jaxmem_callbacks.integrations.tunix import MemoryHooks

    losses, calls, weights = losses_and_weights(lambda own: own)
    with NotingMonitor(tmp_path) as monitor:
        watched = losses_and_weights(lambda own: MemoryHooks(monitor, own))
    assert (losses, calls) == watched[:2]
    assert len(losses) > MICRO_STEPS // ACCUMULATED, "evaluations are among them"
    assert calls.count("eval_start") > 1
    assert losses[0] != losses[-1]
    assert all(map(np.array_equal, weights, watched[2]))
    assert_written(monitor, range(MICRO_STEPS))


def test_what_is_no_monitor_is_refused() -> None:
    from jaxmem_callbacks.integrations.tunix import MemoryHooks

    with pytest.raises(TypeError, match=r"str is no monitor\. Expected a MemoryMonitor\. Write: MemoryHooks"):
        MemoryHooks("runs/a")  # type: ignore[arg-type]
