"""Exchange: the readings of all processes on process 0, at an interval, where a preset asks for it.

Through the key-value store of `jax.distributed`, by a thread of its own: no device, no collective, and nobody waits for a process
that does not answer. A round that hangs, as where the coordinator is stopped, is left alone until it comes back.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, final

import jax

from jaxmem_callbacks._compat.coordination import Store, shared_store
from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.analysis.processes import Heard, Told
from jaxmem_callbacks.callbacks.faults import Faults
from jaxmem_callbacks.records.readings import Unavailable

WAIT_S = 0.5  # at a flush and at the end; never in a look at an interval
_LONG_S = 10.0  # of a round, from which on it is said that it hangs
_monitors = itertools.count()  # processes that make their monitors in the same order find each other by it


@final
class Exchange:
    """One process's part of it.

    Args:
        every_s: Seconds between two rounds, or None for no exchange.
        faults: Told of rounds that raise or hang.
    """

    def __init__(self, every_s: float | None, faults: Faults) -> None:
        self._every_s = every_s
        self._faults = faults
        self._folder = f"jaxmem/monitor/{next(_monitors)}" if every_s is not None else ""
        self._told = Told()
        self._next_s = 0.0
        self._store: Store | None = None
        self._heard: Heard | None = None
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self._brought: Mapping[str, str] | None = None
        self._off = every_s is None
        self._unavailable: list[Unavailable] = []

    def turn(self, observation: Observation, *, wait: bool = False) -> Observation:
        """Begin a round when one is due, or now with ``wait``.

        Args:
            observation: What was seen; what it read is told to the others.
            wait: Wait for the round, for half a second at most.

        Returns:
            The observation with what the rounds before brought, on process 0; or why there is nothing.
        """
        if self._off or self._every_s is None or not self._opened(self._every_s):
            why, self._unavailable = self._unavailable, []
            return replace(observation, unavailable=[*observation.unavailable, *why]) if why else observation
        self._told.add(observation.readings)
        now_s = time.monotonic()
        if (wait or now_s >= self._next_s) and not self._is_busy(now_s, _LONG_S):
            self._next_s, self._began_s = now_s + self._every_s, now_s
            self._start(self._round, self._told.text())
        if wait:
            self._join()
            self._is_busy(time.monotonic(), WAIT_S)
        brought, self._brought = self._brought, None
        if brought is None or self._heard is None:
            return observation
        now_s = time.monotonic()
        self._heard.learn(brought, now_s)
        return replace(observation, processes=self._heard.across(observation.step, observation.time_s, now_s))

    def close(self) -> None:
        """Take back what this process told, so that it is not missed."""
        if self._store is not None and not self._off and not self._is_busy(time.monotonic(), _LONG_S):
            self._start(self._drop)
            self._join()
        self._off = True

    def _opened(self, every_s: float) -> bool:
        if self._store is not None:
            return True
        processes = jax.process_count()
        self._store = shared_store() if processes > 1 else None
        if self._store is None:
            why = "this run has one process" if processes == 1 else "jax.distributed has no key-value store here"
            self._unavailable.append(Unavailable(figure="processes", device="all", reason=why))
            self._off = True
        elif jax.process_index() == 0:
            self._heard = Heard(every_s, processes)
        return self._store is not None

    def _start(self, action: Callable[..., None], *args: Any) -> None:
        self._thread = threading.Thread(target=self._attempt, args=(action, *args), name="jaxmem-exchange", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join(WAIT_S)

    def _is_busy(self, now_s: float, long_s: float) -> bool:
        busy = self._thread is not None and self._thread.is_alive()
        if busy and now_s - self._began_s >= long_s:
            self._faults.note(
                "exchange",
                "the exchange with the other processes gets no answer (does the coordinator, process 0, still run?): what they "
                "tell is not shown until one comes.",
            )
        return busy

    def _attempt(self, action: Callable[..., None], *args: Any) -> None:
        try:
            action(*args)
        except Exception as error:  # noqa: BLE001 - the runtime's own errors, such as a connection that is gone
            if not self._off:
                self._off = True
                self._faults.report("the exchange with the other processes", error)

    def _round(self, text: str | None) -> None:
        if self._store is not None and text is not None:
            self._store.put(self._place, text)
        if self._store is not None and self._heard is not None:
            self._brought = self._store.under(self._folder)

    def _drop(self) -> None:
        if self._store is not None:
            self._store.drop(self._place)

    @property
    def _place(self) -> str:
        return f"{self._folder}/{jax.process_index()}"
