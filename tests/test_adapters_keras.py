"""The real Keras 3 on JAX: `model.fit` with the callback gives the history and the weights of one without, and syncs no more."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.watching import NotingMonitor, assert_written

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("default")]

ROWS, BATCH, EPOCHS = 80, 8, 2
STEPS = 8  # an epoch; two batches are kept for validation


@pytest.fixture(autouse=True)
def on_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")


class Trained:
    """A model after its training, and how often its state was synced."""

    def __init__(self, *callbacks: Any, steps_per_execution: int = 1) -> None:
        import keras

        keras.utils.set_random_seed(0)
        layers = keras.layers
        self.model = keras.Sequential(
            [
                layers.Input((8,)),
                layers.Dense(16, "relu"),
                layers.BatchNormalization(),
                layers.Dropout(0.1),
                layers.Dense(1),
            ]
        )
        self.model.compile("adam", "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
        self.syncs, self._sync = 0, self.model.jax_state_sync
        self.model.jax_state_sync = self._counted
        self.x = np.random.default_rng(0).normal(size=(ROWS, 8)).astype("float32")
        self.fit(*callbacks)

    def fit(self, *callbacks: Any) -> None:
        import keras

        keras.utils.set_random_seed(0)  # batches are shuffled by a generator that all models share
        y = self.x.sum(1, keepdims=True)
        self.history = self.model.fit(
            self.x, y, batch_size=BATCH, epochs=EPOCHS, validation_split=0.2, verbose=0, callbacks=list(callbacks)
        ).history

    def evaluated(self, *callbacks: Any) -> dict[str, float]:
        return self.model.evaluate(self.x, self.x[:, :1], verbose=0, return_dict=True, callbacks=list(callbacks))

    def _counted(self) -> None:
        self.syncs += 1
        self._sync()


def assert_same(one: Trained, other: Trained) -> None:
    assert one.history == other.history
    assert len(one.history["val_loss"]) == EPOCHS
    assert one.history["loss"][0] != one.history["loss"][-1], "it trained"
    assert all(map(np.array_equal, one.model.get_weights(), other.model.get_weights()))


def test_steps_of_a_generator_and_after_an_interrupted_fit_are_told_once_and_go_on(tmp_path: Path) -> None:
    import keras

    from jaxmem_callbacks.integrations.keras import MemoryCallback

    class Stop(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - as Keras calls it
            if batch == 3:
                raise KeyboardInterrupt

    monitor, trained = NotingMonitor(tmp_path), Trained()

    def batches() -> Any:
        for start in range(0, 40, BATCH):
            yield trained.x[start : start + BATCH], trained.x[start : start + BATCH, :1]

    callback = MemoryCallback(monitor)
    trained.model.fit(batches(), epochs=1, verbose=0, callbacks=[callback])
    assert monitor.steps == [0, 1, 2, 3, 4], "of unknown length: Keras begins a batch that never comes"
    with pytest.raises(KeyboardInterrupt):
        trained.model.fit(batches(), epochs=1, verbose=0, callbacks=[callback, Stop()])
    trained.model.fit(batches(), epochs=1, verbose=0, callbacks=[callback])
    assert monitor.steps[5:8] == [5, 6, 7]
    assert monitor.steps[8:] == [8, 9, 10, 11, 12]
    monitor.close()


def test_training_is_the_same_and_every_step_is_told_once(tmp_path: Path) -> None:
    from jaxmem_callbacks.integrations.keras import MemoryCallback

    plain = Trained()
    with NotingMonitor(tmp_path) as monitor:
        callback = MemoryCallback(monitor)
        watched = Trained(callback)
        assert_same(plain, watched)
        assert watched.syncs == plain.syncs, "no access to the state beside Keras's own"
        assert watched.evaluated(callback) == plain.evaluated(), "and evaluation is no step"
        plain.fit()
        watched.fit(callback)  # steps go on where the first fit left off
    assert_same(plain, watched)
    assert_written(monitor, range(2 * EPOCHS * STEPS), "loss", "mae", "val_loss", "val_mae")


def test_several_steps_in_one_execution_are_told_by_their_last(tmp_path: Path) -> None:
    from jaxmem_callbacks.integrations.keras import MemoryCallback

    with NotingMonitor(tmp_path) as monitor:
        watched = Trained(MemoryCallback(monitor), steps_per_execution=4)
    assert_same(Trained(steps_per_execution=4), watched)
    assert_written(monitor, range(3, EPOCHS * STEPS, 4), "loss")


def test_no_other_thread_calls_the_monitor_and_none_waits_for_values() -> None:
    """Keras would wait for the values of each step where a callback with batch hooks is not async_safe."""
    import keras

    from jaxmem_callbacks.integrations import keras as adapters

    told: list[int] = []

    def monitor(step: int, metrics: Any = None) -> None:  # noqa: ARG001 - a monitor's signature
        told.append(threading.get_ident())

    callback = adapters.MemoryCallback(monitor)  # type: ignore[arg-type]
    assert keras.callbacks.CallbackList([callback])._async_train
    Trained(callback)
    assert set(told) == {threading.get_ident()}
    assert len(told) == EPOCHS * STEPS
    mine = [
        each
        for each in vars(adapters).values()
        if isinstance(each, type) and issubclass(each, keras.callbacks.Callback)
    ]
    assert mine == [adapters.MemoryCallback]


def test_calls_that_overtake_one_another_lose_no_step_and_mix_up_no_metrics() -> None:
    from jaxmem_callbacks.integrations.keras import MemoryCallback

    told: list[tuple[int, Any]] = []
    callback = MemoryCallback(lambda step, metrics: told.append((step, metrics)))  # type: ignore[arg-type]
    for _epoch in range(2):
        callback.on_train_batch_begin(0)
        callback.on_train_batch_end(1, {"loss": 1})
        callback.on_train_batch_end(0, {"loss": 0})
        callback.on_train_batch_begin(1)
        callback.on_train_batch_begin(2)
        callback.on_train_batch_end(2, {"loss": 2})
        callback.on_epoch_end(0, {"loss": 9})
    assert told == [(0, None), (1, {"loss": 1}), (2, {"loss": 9}), (3, None), (4, {"loss": 1}), (5, {"loss": 9})]


def test_what_is_no_monitor_is_refused() -> None:
    from jaxmem_callbacks.integrations.keras import MemoryCallback

    with pytest.raises(TypeError, match=r"str is no monitor\. Expected a MemoryMonitor\. Write: MemoryCallback"):
        MemoryCallback("runs/a")  # type: ignore[arg-type]


def test_nothing_of_the_package_imports_keras_before_it_is_asked_for() -> None:
    code = """
import sys
import jaxmem_callbacks as jm
for name in jm.__all__:
    getattr(jm, name)
print({"keras", "clu", "tunix", "kauldron", "tensorflow"} & set(sys.modules))
import jaxmem_callbacks.integrations.keras
print("keras" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["set()", "True"]


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    from jaxmem_callbacks.integrations.keras import MemoryCallback

    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(RuntimeError, match=r"backend 'torch'.*Expected 'jax'.*KERAS_BACKEND"):
        MemoryCallback(print)  # type: ignore[arg-type]
