"""Weights & Biases: windows, events and pictures as rows of the user's run, beside his own and never in their way.

A run has one row counter that only goes up, and drops what comes for a row behind it. So a window is added to the row that the
user is at, or, when he wrote nothing since the last window, to one row more, yet never beyond the step of the window before:
what the user logs late still finds its row. The step itself stands in ``memory/step``, which is made the axis of these figures.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, final

from jaxmem_callbacks.writers.html_text import escape
from jaxmem_callbacks.writers.pixels import pixels_of
from jaxmem_callbacks.writers.protocol import Picture

STEP = "memory/step"


@final
class WandbRows:
    """Logs to a ``wandb.Run``.

    Args:
        run: What ``wandb.init`` returned.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._named = False
        self._row = self._window_step = -1

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One window."""
        if not self._named and callable(getattr(self._run, "define_metric", None)):
            self._run.define_metric("memory/*", step_metric=STEP)
        self._named = True
        row, before = int(self._run.step), self._row
        self._row, ahead = row, row == before and row < self._window_step
        self._window_step = step
        if ahead:
            self._row = row + 1
            self._run.log({**values, STEP: step}, step=self._row)
        else:
            self._add({**values, STEP: step})

    def text(self, step: int, tag: str, words: str) -> None:
        """An event or a table, as it is written."""
        make = self._media("Html")
        if make is not None:
            self._add({tag: make(f"<pre>{escape(words)}</pre>"), STEP: step})

    def picture(self, picture: Picture) -> None:
        """A drawn figure."""
        make = self._media("Image")
        if make is not None:
            self._add({picture.tag: make(pixels_of(picture)), STEP: picture.step})

    def _add(self, data: Mapping[str, Any]) -> None:
        """To the row that is open when it arrives: the loop goes on meanwhile, and a row that is named may be behind by then."""
        self._run.log(dict(data), commit=False)

    def _media(self, name: str) -> Any:
        """A class of the package that the run comes from; it is loaded, since the run exists."""
        return getattr(sys.modules.get(type(self._run).__module__.partition(".")[0]), name, None)
