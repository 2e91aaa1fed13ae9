"""Agreement of a run's processes on how a step went. An error names who is missing.

No process waits for a device of another one: words go over JAX's coordination service, and every wait has a limit.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any, final

import jax

from jaxmem_callbacks._compat.coordination import Store, gathered, shared_store
from jaxmem_callbacks.records.errors import RecoveryError

Words = Mapping[str, Any]
LEFT = "left"
_FIRST_S, _LONGEST_S = 0.0005, 0.02  # between two looks


@final
class Agreement:
    """The talks of one run, counted; every process has the same ones in the same order.

    Args:
        name: Tells these talks from others of the run; the same in every process.
        seconds: How long to wait for the others.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self._name = f"jaxmem_callbacks/{name}"
        self._seconds = seconds
        self._talk = 0
        self.own = jax.process_index()
        self.count = jax.process_count()
        self._store: Store | None = shared_store() if self.count > 1 else None

    @property
    def can_look(self) -> bool:
        """Whether others can be heard while this process waits for a device."""
        return self._store is not None

    def exchange(self, words: Words) -> list[Words]:
        """Say something and hear what every process says in this talk, by process.

        Raises:
            RecoveryError: not all have spoken in time, or one has left.
        """
        self._talk += 1
        if self.count == 1:
            return [words]
        text = json.dumps(dict(words))
        try:
            heard = self._over_devices(text) if self._store is None else self._over_store(self._store, text)
        except RuntimeError as error:
            if isinstance(error, RecoveryError):
                raise
            msg = f"process 0, over which the processes talk, does not answer: {error}. So this one ends too."
            raise RecoveryError(msg) from error
        found = [json.loads(heard[number]) for number in range(self.count)]
        for number, said in enumerate(found):
            if LEFT in said:
                msg = f"process {number} of {self.count} ended by another error: {said[LEFT]}. So this one ends too."
                raise RecoveryError(msg)
        return found

    def leave(self, why: str) -> None:
        """The last words of a process that ends: whoever waits for it in the next talk need not."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # nobody may be there to hear it
                self._store.put(f"{self._name}/{self._talk + 1}/{self.own}", json.dumps({LEFT: why}))

    def heard(self) -> list[Words]:
        """What others have said already in the talk that comes next."""
        return [json.loads(text) for text in self._said(self._talk + 1).values()]

    def _said(self, talk: int) -> dict[int, str]:
        if self._store is None:
            return {}
        found = self._store.under(f"{self._name}/{talk}")
        return {int(number): text for number, text in found.items()}

    def _over_store(self, store: Store, text: str) -> dict[int, str]:
        store.put(f"{self._name}/{self._talk}/{self.own}", text)
        pause, end = _FIRST_S, time.monotonic() + self._seconds
        while len(said := self._said(self._talk)) < self.count:
            if time.monotonic() > end:
                raise RecoveryError(self._missing([number for number in range(self.count) if number not in said]))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
        if self.own == 0 and self._talk > 2:  # noqa: PLR2004 - all have heard the talk before the last one
            store.drop(f"{self._name}/{self._talk - 2}/")
        return said

    def _over_devices(self, text: str) -> dict[int, str]:
        heard = gathered(text, self._seconds)
        if heard is None:
            raise RecoveryError(self._missing(None))
        return dict(enumerate(heard))

    def _missing(self, who: list[int] | None) -> str:
        named = "some process" if who is None else f"process {', '.join(map(str, who))}"
        return (
            f"{named} of {self.count} did not say within {self._seconds:g} s how the step went: dead, or far behind. Expected "
            "all of them. This process ends; start again from the last checkpoint, or give `recovery: {agree_s: ...}` more time "
            "where a step or a compile really takes so long."
        )
