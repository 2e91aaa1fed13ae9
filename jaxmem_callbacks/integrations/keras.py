"""Keras 3 on the JAX backend: `MemoryCallback(monitor)` for `model.fit`. Keras is imported here, so only when this file is.

Keras calls `on_train_batch_end` on threads of a pool, in any order, once the values are there. So a step is reported at the
beginning of the next one, on the thread that dispatches, where nothing waits.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, final

import keras

from jaxmem_callbacks.records.advice import advise

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxmem_callbacks.callbacks.monitor import MemoryMonitor


_LOCAL = "logdir='runs/a'"


@final
class MemoryCallback(keras.callbacks.Callback):  # pyright: ignore - it takes `keras` for this file
    """Report every step of `model.fit` to a `MemoryMonitor`, without a sync: neither the values nor the state are waited for.

    Steps are counted over epochs and over calls of `fit`, where Keras begins again; with ``steps_per_execution=4`` they are 3, 7
    and so on, as Keras counts its batches. A step's metrics come with it where Keras knew them in time, an epoch's with its
    last step, but for data without a length, whose last step is reported before. Validation and `evaluate` are no steps. The
    monitor stays the user's to close.

    Args:
        monitor: Called with each step.

    Raises:
        TypeError: ``monitor`` is none.
        RuntimeError: Keras runs on another backend.
    """

    async_safe = True  # without it Keras waits for the values of every step, since there are hooks of batches

    def __init__(self, monitor: MemoryMonitor) -> None:
        if not callable(monitor):
            msg = (
                f"{type(monitor).__name__} is no monitor. Expected a MemoryMonitor. "
                f"Write: MemoryCallback({advise('monitor.call', arguments=_LOCAL)})."
            )
            raise TypeError(msg)
        backend = keras.backend.backend()  # pyright: ignore - likewise
        if backend != "jax":
            msg = (
                f"Keras runs on the backend {backend!r}, and the monitor sees the memory of JAX only. "
                "Expected 'jax'. Set it before keras is imported: os.environ['KERAS_BACKEND'] = 'jax'."
            )
            raise RuntimeError(msg)
        super().__init__()
        self._monitor = monitor
        self._before = 0  # batches of earlier epochs
        self._reported = -1  # the latest batch of this epoch that the monitor knows
        self._lock = threading.Lock()
        self._latest: tuple[int, Mapping[str, Any] | None] = (-1, None)

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """A training begins behind the batches of one that was interrupted, whose last is not reported."""
        self._next_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Report the step before, which has been dispatched."""
        if batch > 0:
            known, metrics = self._latest
            self._report(batch - 1, metrics if known == batch - 1 else None)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Keep what belongs to the latest batch; on any thread, in any order."""
        with self._lock:
            if batch > self._latest[0]:
                self._latest = batch, logs

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Report the epoch's last step, with the epoch's metrics.

        Of data without a length Keras begins one batch too many, so that the last step was reported then.
        """
        self._report(self._latest[0], logs)
        self._next_epoch()

    def _report(self, batch: int, metrics: Mapping[str, Any] | None) -> None:
        if batch > self._reported:
            self._reported = batch
            self._monitor(self._before + batch, metrics)

    def _next_epoch(self) -> None:
        last = max(self._reported, self._latest[0])
        self._before, self._reported, self._latest = self._before + last + 1, -1, (-1, None)
