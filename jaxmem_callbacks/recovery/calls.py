"""How often each step had been called when a guard was entered: what was not called since did not fail inside it."""

from __future__ import annotations

import weakref
from typing import final

from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.programs.steps.registry import Step


@final
class CallsBefore:
    """The counts of this moment. Keeps no step alive."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[Step, int] = weakref.WeakKeyDictionary()
        for step, _ in registry.steps():
            self._counts[step] = step.calls

    def called_since(self, step: Step) -> bool:
        """Whether a step was called after this moment."""
        return step.calls > self._counts.get(step, 0)
