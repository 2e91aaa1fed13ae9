"""`jm.prefetch`: batches in order, never more alive than asked for, errors in their place, no thread left behind."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from tests.pasting import pasted, value
from tests.processes import until

pytestmark = pytest.mark.core

SHAPE = (16, 333)  # of no other array in these tests
BYTES = 16 * 333 * 4


def batch(number: int) -> dict[str, np.ndarray]:
    return {"x": np.full(SHAPE, number, np.float32)}


def source(count: int, made: list[int] | None = None) -> Iterator[dict[str, np.ndarray]]:
    for number in range(count):
        if made is not None:
            made.append(number)
        yield batch(number)


def alive() -> int:
    return sum(array.shape == SHAPE and not array.is_deleted() for array in jax.live_arrays())


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "jaxmem-prefetch"]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    until(lambda: not threads())
    assert alive() == 0


def settled() -> None:
    """Time in which a thread that may go on would."""
    time.sleep(0.1)


def test_batches_come_in_order_and_on_the_device():
    seen = [int(each["x"][0, 0]) for each in jm.prefetch(source(7))]
    assert seen == list(range(7))
    (first,) = jm.prefetch([batch(3)])
    assert isinstance(first["x"], jax.Array)
    del first


@pytest.mark.parametrize("batches", [2, 3, 5])
def test_never_more_than_n_batches_are_alive(batches: int):
    made: list[int] = []
    most = 0
    for number, each in enumerate(jm.prefetch(source(12, made), batches=batches)):
        for _ in range(20):
            most = max(most, alive())
            time.sleep(0.001)
        if number == 1:
            until(lambda: alive() == batches)
            settled()
            assert len(made) <= 2 + batches, "one more waits in host memory, and no second one"
        del each
        most = max(most, alive())
    assert most == batches


def test_bytes_bound_it_too():
    stream = jm.prefetch(source(12), batches=8, max_bytes=3 * BYTES)
    first = next(stream)
    until(lambda: alive() == 3)
    settled()
    assert alive() == 3
    del first
    stream.close()


def test_a_sharded_batch_counts_by_what_one_device_holds():
    mesh = jm.make_mesh("data=8")
    stream = jm.prefetch(source(12), NamedSharding(mesh, P("data")), batches=8, max_bytes=BYTES // 2)
    first = next(stream)
    assert first["x"].sharding.shard_shape(SHAPE) == (2, 333)
    until(lambda: alive() == 4)
    settled()
    assert alive() == 4
    del first
    stream.close()


def test_shardings_may_be_a_tree():
    one, other = (SingleDeviceSharding(device) for device in jax.devices()[:2])
    batches = ({"a": np.ones(4), "b": (np.ones(4), np.ones(4))} for _ in range(2))
    for each in jm.prefetch(batches, {"a": one, "b": other}, max_bytes="1KiB"):
        assert each["a"].sharding == one
        assert [leaf.sharding for leaf in each["b"]] == [other, other]


def test_the_default_device_is_that_of_the_caller():
    with jax.default_device(jax.devices()[3]):
        (first,) = jm.prefetch([batch(0)])
    assert first["x"].devices() == {jax.devices()[3]}
    del first


def test_a_batch_that_the_step_took_over_makes_room():
    take = jax.jit(lambda batch: batch["x"] * 2, donate_argnums=0)
    stream = jm.prefetch(source(6))
    for number, each in enumerate(stream):
        result = take(each)
        assert each["x"].is_deleted()
        assert int(result[0, 0]) == 2 * number
        del result


def test_who_keeps_batches_gets_the_next_all_the_same():
    kept = list(jm.prefetch(source(6)))
    assert [int(each["x"][0, 0]) for each in kept] == list(range(6))
    del kept


def test_an_error_comes_in_its_place_and_with_its_traceback():
    def failing() -> Iterator[Any]:
        yield from source(2)
        read_shard()

    def read_shard() -> None:
        msg = "shard 7 is broken"
        raise OSError(msg)

    stream = jm.prefetch(failing(), batches=5)
    until(lambda: not threads())
    assert [int(next(stream)["x"][0, 0]) for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="shard 7 is broken") as caught:
        next(stream)
    assert "read_shard" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    with pytest.raises(StopIteration):
        next(stream)


@pytest.mark.parametrize("leave", ["close", "drop", "with", "break"])
def test_the_thread_ends_and_the_iterator_is_closed(leave: str):
    closed: list[bool] = []

    def endless() -> Iterator[Any]:
        try:
            yield from source(10**9)
        finally:
            closed.append(True)

    stream = jm.prefetch(endless())
    next(stream)
    if leave == "close":
        stream.close()
        assert not threads()
        with pytest.raises(StopIteration):
            next(stream)
        stream.close()
    elif leave == "with":
        with stream:
            pass
        assert not threads()
    elif leave == "break":
        for _ in stream:
            break
    del stream
    gc.collect()
    assert until(lambda: closed) == [True]


def test_closing_does_not_wait_for_ever_for_an_iterator_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxmem_callbacks.transforms.prefetch._JOIN_S", 0.2)
    come_back, returned = threading.Event(), []

    def hanging() -> Iterator[Any]:
        yield batch(0)
        come_back.wait(200)
        returned.append(True)

    stream = jm.prefetch(hanging())
    next(stream)
    stream.close()
    assert not returned, "it was not waited for"
    come_back.set()


def test_a_batch_over_the_limit_is_refused_in_its_place():
    batches = [batch(0), {"x": np.zeros((17, 333), np.float32)}]
    stream = jm.prefetch(batches, max_bytes=BYTES)
    assert int(next(stream)["x"][0, 0]) == 0
    with pytest.raises(
        ValueError, match=r"A batch needs 22\.1 KiB on a device, and prefetch was given max_bytes=20\.8 KiB"
    ):
        next(stream)


@pytest.mark.parametrize("batches", [1, 0, -1, True])
def test_fewer_than_two_batches_are_refused(batches: int):
    with pytest.raises(
        ValueError, match=r"prefetch got batches=.*Expected at least 2, one in use, one on its way"
    ) as error:
        jm.prefetch([], batches=batches)
    stream = value(pasted("prefetch.least", error.value), jm=jm, loader=source(3))
    assert [int(each["x"][0, 0]) for each in stream] == [0, 1, 2]


def test_it_goes_on_while_the_step_runs():
    """What it is for: the next batch is there when it is asked for."""
    made: list[int] = []
    stream = jm.prefetch(source(4, made))
    first = next(stream)
    until(lambda: len(made) >= 2)
    assert jnp.isfinite(first["x"]).all()
    until(lambda: alive() == 2)
    del first
    stream.close()
