"""Short texts from process to process: by the key-value store of `jax.distributed`, in the coordinator's memory.

Nothing of it touches a device, so it is no collective, and no process waits for another one. But a call waits for the
coordinator, and for ever where that is stopped: never call it on a thread that somebody waits for without a limit. JAX has no
public way to the store; where its internals do not answer there is None, and `gathered` carries texts over the devices.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol, final

import jax
import numpy as np

_WORDS = 4096  # bytes that one process can send over the devices
_SET, _LIST, _DELETE = "key_value_set", "key_value_dir_get", "key_value_delete"


class Store(Protocol):
    """Texts by name, the same for all processes of a run."""

    def put(self, name: str, text: str) -> None:
        """Write one, over what was there."""
        ...

    def under(self, folder: str) -> Mapping[str, str]:
        """All whose name begins with a folder and a slash, by the rest of their name."""
        ...

    def drop(self, name: str) -> None:
        """Take one out, or with a slash at its end all of a folder; harmless where it is not there."""
        ...


def shared_store() -> Store | None:
    """The store of this run; None without `jax.distributed.initialize`, or where JAX has another form of it."""
    try:
        from jax._src import distributed

        client: Any = distributed.global_state.client
    except (ImportError, AttributeError):
        return None
    known = client is not None and all(hasattr(client, name) for name in (_SET, _LIST, _DELETE))
    return _Coordinator(client) if known else None


@final
class _Coordinator:
    """The store in the memory of the process that `coordinator_address` names."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, name: str, text: str) -> None:
        self._client.key_value_set(name, text, allow_overwrite=True)

    def under(self, folder: str) -> Mapping[str, str]:
        head = f"{folder}/"
        return {name.removeprefix(head): text for name, text in self._client.key_value_dir_get(head)}

    def drop(self, name: str) -> None:
        self._client.key_value_delete(name)


def gathered(words: str, seconds: float) -> list[str] | None:
    """The words of every process, in their order, over the devices; None where not all arrived in time.

    In a thread of its own, so that a device that never answers ends at the time limit too.

    Args:
        words: Those of this one; cut after 4 KiB.
        seconds: The time limit.
    """
    from jax.experimental import multihost_utils

    sent = words.encode()[:_WORDS].ljust(_WORDS, b"\0")
    found: list[Any] = []

    def gather() -> None:
        found.append(multihost_utils.process_allgather(np.frombuffer(sent, np.uint8)))

    thread = threading.Thread(target=gather, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        return None
    rows = np.asarray(found[0]).reshape(jax.process_count(), _WORDS)
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
