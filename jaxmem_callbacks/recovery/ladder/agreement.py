"""Agreement of a run's processes on the outcome of a step. An error names the processes that are missing.

No process waits for another one's device: messages go over JAX's coordination service, and every wait has a time limit.
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

Message = Mapping[str, Any]
_LEFT = "left"
_FIRST_S, _LONGEST_S = 0.0005, 0.02  # between two looks


@final
class Agreement:
    """The message rounds of one run, counted; every process takes part in the same ones in the same order.

    Args:
        name: Sets these rounds apart from others of the run; the same in every process.
        seconds: How long to wait for the others.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self._name = f"jaxmem_callbacks/{name}"
        self._seconds = seconds
        self._round = 0
        self.own = jax.process_index()
        self.count = jax.process_count()
        self._store: Store | None = shared_store() if self.count > 1 else None

    @property
    def can_poll(self) -> bool:
        """Whether messages can be read while this process waits for a device."""
        return self._store is not None

    def exchange(self, message: Message) -> list[Message]:
        """Send a message and return every process's message of this round, by process.

        Raises:
            RecoveryError: a message did not come in time, or a process has left.
        """
        self._round += 1
        if self.count == 1:
            return [message]
        text = json.dumps(dict(message))
        try:
            answers = self._over_devices(text) if self._store is None else self._over_store(self._store, text)
        except RuntimeError as error:
            if isinstance(error, RecoveryError):
                raise
            msg = f"process 0, over which the processes talk, does not answer: {error}. So this one ends too."
            raise RecoveryError(msg) from error
        found = [json.loads(answers[number]) for number in range(self.count)]
        for number, answer in enumerate(found):
            if _LEFT in answer:
                msg = f"process {number} of {self.count} ended by another error: {answer[_LEFT]}. So this one ends too."
                raise RecoveryError(msg)
        return found

    def leave(self, why: str) -> None:
        """The last message of a process that ends, so that no other one waits for it in the next round."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # nobody may be there to hear it
                self._store.put(f"{self._name}/{self._round + 1}/{self.own}", json.dumps({_LEFT: why}))

    def early_answers(self) -> list[Message]:
        """What other processes have already sent in the next round."""
        return [json.loads(text) for text in self._messages(self._round + 1).values()]

    def _messages(self, number: int) -> dict[int, str]:
        if self._store is None:
            return {}
        found = self._store.under(f"{self._name}/{number}")
        return {int(process): text for process, text in found.items()}

    def _over_store(self, store: Store, text: str) -> dict[int, str]:
        store.put(f"{self._name}/{self._round}/{self.own}", text)
        pause, end = _FIRST_S, time.monotonic() + self._seconds
        while len(messages := self._messages(self._round)) < self.count:
            if time.monotonic() > end:
                raise RecoveryError(self._missing([number for number in range(self.count) if number not in messages]))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
        if self.own == 0 and self._round > 2:  # noqa: PLR2004 - every process has read the round before the last one
            store.drop(f"{self._name}/{self._round - 2}/")
        return messages

    def _over_devices(self, text: str) -> dict[int, str]:
        answers = gathered(text, self._seconds)
        if answers is None:
            raise RecoveryError(self._missing(None))
        return dict(enumerate(answers))

    def _missing(self, who: list[int] | None) -> str:
        named = "some process" if who is None else f"process {', '.join(map(str, who))}"
        return (
            f"{named} of {self.count} did not report within {self._seconds:g} s how the step went: dead, or far behind. Expected "
            "all of them. This process ends; start again from the last checkpoint, or give `recovery: {agree_s: ...}` more time "
            "where a step or a compile really takes so long."
        )
