"""Tunix: `MemoryHooks(monitor)` for `PeftTrainer.with_training_hooks`. Tunix is imported here, so only when this file is.

Tunix reports the end of a step one step late, and of several micro-steps only the last, but the start of each. So a micro-step
is reported at the start of the next one, when it has been dispatched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from tunix.sft.hooks import TrainingHooks  # pyright: ignore[reportMissingImports] - not installed where types are checked

from jaxmem_callbacks.records.advice import advise

if TYPE_CHECKING:
    from jaxmem_callbacks.callbacks.monitor import MemoryMonitor

_LOCAL = "logdir='runs/a'"


@final
class MemoryHooks(TrainingHooks):  # pyright: ignore[reportUntypedBaseClass]
    """Report every micro-step of a trainer to a `MemoryMonitor` by ``train_ctx.iter_steps``; evaluation is no step.

    The trainer has one place for hooks, so other ones go on inside. The monitor stays the user's to close.

    Args:
        monitor: Called with each micro-step.
        hooks: The trainer's hooks so far, called before the monitor.

    Raises:
        TypeError: ``monitor`` is none.
    """

    def __init__(self, monitor: MemoryMonitor, hooks: Any = None) -> None:
        if not callable(monitor):
            msg = (
                f"{type(monitor).__name__} is no monitor. Expected a MemoryMonitor. "
                f"Write: MemoryHooks({advise('monitor.call', arguments=_LOCAL)})."
            )
            raise TypeError(msg)
        self._monitor = monitor
        self._hooks = hooks
        self._began: int | None = None  # the micro-step that is not reported yet

    def on_train_start(self, train_ctx: Any) -> None:
        """A training begins; what was left of one that failed is not reported."""
        self._began = None
        if self._hooks is not None:
            self._hooks.on_train_start(train_ctx)

    def on_train_step_start(self, train_ctx: Any) -> None:
        """Report the micro-step before."""
        if self._hooks is not None:
            self._hooks.on_train_step_start(train_ctx)
        self._report()
        self._began = train_ctx.iter_steps

    def on_train_end(self, train_ctx: Any) -> None:
        """Report the last one."""
        if self._hooks is not None:
            self._hooks.on_train_end(train_ctx)
        self._report()

    def on_train_step_end(self, train_ctx: Any, train_step: int, train_loss: float) -> None:
        """For the other hooks."""
        if self._hooks is not None:
            self._hooks.on_train_step_end(train_ctx, train_step, train_loss)

    def on_eval_step_start(self, train_ctx: Any) -> None:
        """For the other hooks."""
        if self._hooks is not None:
            self._hooks.on_eval_step_start(train_ctx)

    def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None:
        """For the other hooks."""
        if self._hooks is not None:
            self._hooks.on_eval_step_end(train_ctx, eval_loss)

    def _report(self) -> None:
        if self._began is not None:
            step, self._began = self._began, None
            self._monitor(step)
