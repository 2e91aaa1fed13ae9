"""`jm.prefetch`: batches of a host iterator on the device, a few ahead of the step that takes them.

A thread takes from the iterator and transfers. How far ahead is bounded in batches and in bytes, and what counts is which batches
are still alive, not which were handed out.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arguments import refuse, require_whole
from jaxmem_callbacks.records.units import format_bytes, parse_bytes
from jaxmem_callbacks.transforms.sharding.infer import require_shardings

_LEAST = 2  # one in use and one on its way
_JOIN_S = 5.0  # an iterator that does not come back must not keep the process from going on


@final
class Prefetch(Iterator[Any]):
    """What `jm.prefetch` returns: an iterator that can be closed, also as a context manager.

    Args:
        channel: What the thread fills.
    """

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel
        weakref.finalize(self, channel.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self._channel.take()

    def close(self) -> None:
        """End the thread and let go of what is ready; the iterator is closed too, where it can be."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def prefetch(
    iterable: Iterable[Any], sharding: Any = None, *, batches: int = 2, max_bytes: int | str | None = None
) -> Prefetch:
    """Transfer batches to the device on a thread of their own, a bounded number ahead.

        for batch in jm.prefetch(loader, NamedSharding(mesh, P("data"))):
            state, metrics = step(state, batch)

    Device memory: at most ``batches`` batches are alive, the one in use counted, plus those that dispatched steps have still to
    read. A batch lives as long as something holds one of its arrays; where the caller keeps batches, the next one is made only
    when asked for. In host memory one batch more waits for its turn.

    Args:
        iterable: Trees of arrays; any iterable.
        sharding: Where each batch goes: a sharding, a device, or a tree of them as `jax.device_put` takes it. With a sharding
            over several processes each process gives its own rows. None: the default device.
        batches: How many may be alive, at least 2: one in use and one on its way.
        max_bytes: How many bytes of them on any one device, as a number or a text such as ``"2GiB"``; None for no such limit.

    Returns:
        An iterator. What the iterable raises comes out in its place, after the batches before it, with its traceback. ``close()``
        (or leaving it as a context manager, or dropping it) ends the thread.

    Raises:
        TypeError: no iterable, a place that is none, or ``batches`` that is no whole number.
        ValueError: fewer than two batches; ``max_bytes`` that is no size; while iterating, a batch that alone exceeds it.
    """
    if isinstance(iterable, str | bytes | Mapping) or not (
        hasattr(iterable, "__iter__") or hasattr(iterable, "__getitem__")
    ):
        refuse(
            "jm.prefetch", "iterable", iterable, "an iterable of batches, each a tree of arrays, such as a data loader"
        )
    require_shardings("jm.prefetch", "sharding", sharding)
    if isinstance(batches, bool) or require_whole("jm.prefetch", "batches", batches) < _LEAST:
        expected = f"Expected at least 2, one in use, one on its way: {advise('prefetch.least')}."
        msg = f"prefetch got batches={batches!r}. {expected}"
        raise ValueError(msg)
    try:
        limit = None if max_bytes is None else parse_bytes(max_bytes)
    except ValueError as error:
        msg = f"jm.prefetch: max_bytes={max_bytes!r}: {error}"
        raise ValueError(msg) from None
    channel = _Channel(iter(iterable), sharding, batches, limit)
    channel.start()
    return Prefetch(channel)


class _Made:
    """A batch that was made: its size, and whether any of its arrays is still there."""

    def __init__(self, batch: Any, size: int, gone: Any) -> None:
        self.size = size
        self._arrays = [weakref.ref(leaf, gone) for leaf in jax.tree.leaves(batch)]

    def is_alive(self) -> bool:
        arrays = (array() for array in self._arrays)
        return any(array is not None and not array.is_deleted() for array in arrays)


class _Channel:
    """Between the thread and the caller; the thread holds this and never the `Prefetch`, so that dropping that ends it."""

    def __init__(self, source: Iterator[Any], sharding: Any, batches: int, limit: int | None) -> None:
        self._source, self._sharding, self._batches, self._limit = source, sharding, batches, limit
        config: Any = jax.config  # its types name no settings on jax 0.10
        self._default_device = config.jax_default_device  # `jax.default_device` holds for one thread only
        # Reentrant: an array may be let go of, and its finalizer run, on the thread that holds the lock.
        self._changed = threading.Condition(threading.RLock())
        self._ready: deque[Any] = deque()
        self._made: list[_Made] = []
        self._error: BaseException | None = None
        self._asking = self._ended = self._closed = False
        self._thread = threading.Thread(target=self._run, name="jaxmem-prefetch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> Any:
        """The next batch, or what the iterator raised."""
        with self._changed:
            self._asking = True
            self._changed.notify_all()
            while not (self._ready or self._ended or self._closed):
                self._changed.wait()
            self._asking = False
            if self._ready:
                return self._ready.popleft()
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while self._wait(0):
                try:
                    host = next(self._source)
                except StopIteration:
                    break
                if not self._make(host):
                    break
                del host
        except BaseException as error:  # noqa: BLE001 - raised again where the caller takes it
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            self._close_source()

    def _make(self, host: Any) -> bool:
        size = _bytes_a_device(host, self._sharding)
        if self._limit is not None and size > self._limit:
            msg = (
                f"A batch needs {format_bytes(size)} on a device, and prefetch was given max_bytes={format_bytes(self._limit)}. "
                "Give it more by max_bytes, or split the batch over more devices by a sharding."
            )
            raise ValueError(msg)
        if not self._wait(size):
            return False
        with jax.default_device(self._default_device):
            batch = _placed(host, self._sharding)
        with self._changed:
            if self._closed:
                return False
            self._made.append(_Made(batch, size, self._gone))
            self._ready.append(batch)
            self._changed.notify_all()
        return True

    def _wait(self, size: int) -> bool:
        """Until there is room for one more batch of a size; False when closed."""
        with self._changed:
            while not self._closed and not self._has_room(size):
                self._changed.wait()
            return not self._closed

    def _has_room(self, size: int) -> bool:
        if self._asking and not self._ready:
            return True  # what else is alive the caller keeps himself
        self._made = [made for made in self._made if made.is_alive()]
        held = sum(made.size for made in self._made)
        return len(self._made) < self._batches and (self._limit is None or held + size <= self._limit)

    def _gone(self, _: Any) -> None:
        with self._changed:
            self._changed.notify_all()

    def _close_source(self) -> None:
        close = getattr(self._source, "close", None)
        if self._closed and close is not None:
            close()


def _placed(host: Any, sharding: Any) -> Any:
    if all(_is_here(where) for where in jax.tree.leaves(sharding)):
        return jax.device_put(host, sharding)
    return jax.tree.map(
        lambda where, leaf: jax.make_array_from_process_local_data(where, np.asarray(leaf)),
        _spread(sharding, host),
        host,
    )


def _is_here(where: Any) -> bool:
    return not isinstance(where, jax.sharding.Sharding) or where.is_fully_addressable


def _spread(sharding: Any, host: Any) -> Any:
    """One sharding an array, from one for several of them."""
    return jax.tree.map(lambda where, part: jax.tree.map(lambda _: where, part), sharding, host)


def _bytes_a_device(host: Any, sharding: Any) -> int:
    """Bytes of a batch on one of this process's devices, before anything is transferred."""
    arrays = [leaf if hasattr(leaf, "nbytes") else np.asarray(leaf) for leaf in jax.tree.leaves(host)]
    places = [None] * len(arrays) if sharding is None else jax.tree.leaves(_spread(sharding, host))
    return sum(-(-array.nbytes // _parts(where, array.shape)) for array, where in zip(arrays, places, strict=True))


def _parts(where: Any, shape: tuple[int, ...]) -> int:
    """Over how many parts this process's rows are spread on its devices."""
    if isinstance(where, NamedSharding) and isinstance(where.mesh, Mesh):
        named = {axis for part in where.spec for axis in ((part,) if isinstance(part, str) else part or ())}
        axes = [index for index, name in enumerate(where.mesh.axis_names) if name in named]
        here = jax.process_index()
        places = [place for place, device in np.ndenumerate(where.mesh.devices) if device.process_index == here]
        return len({tuple(place[axis] for axis in axes) for place in places}) or 1
    if isinstance(where, jax.sharding.Sharding):
        return math.prod(shape) // max(1, math.prod(where.shard_shape(shape))) or 1
    return 1
