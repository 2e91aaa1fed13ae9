"""Probes: what the runtime says becomes readings, and what it does not say becomes a reason, never a 0 or -1."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks._compat.arrays import creation_site
from jaxmem_callbacks._compat.executables import NewExecutables
from jaxmem_callbacks.analysis.figures import Fragmentation, fragmentation_of
from jaxmem_callbacks.probes.device_memory import AllocatorProbe, reading_of
from jaxmem_callbacks.probes.host import HostProbe
from jaxmem_callbacks.probes.jax_events import NOT_REGISTERED, ProgramsProbe
from jaxmem_callbacks.probes.live_arrays import LiveArraysProbe
from jaxmem_callbacks.probes.protocol import ScriptedProbe
from jaxmem_callbacks.records.arrays import ArrayCensus
from jaxmem_callbacks.records.programs import Compilation
from jaxmem_callbacks.records.runs import Reading, Unavailable
from tests.processes import bytes_of_others
from tests.sample_devices import GIB, GPU, Card

# As reported for a TPU in jax issue 1491, with reserved memory as in Enzyme-JAX issue 2422.
TPU = {
    "bytes_in_use": 3 * GIB,
    "bytes_limit": 31 * GIB,
    "bytes_reservable_limit": 29 * GIB,
    "bytes_reserved": 27 * GIB,
    "largest_free_block_bytes": GIB,
    "num_allocs": 1,
    "peak_bytes_in_use": 3 * GIB,
}


def read_one(card: Card) -> Reading:
    (reading,) = AllocatorProbe([card]).read(3)
    assert isinstance(reading, Reading)
    return reading


@pytest.mark.core
def test_gpu_statistics_become_a_reading():
    reading = read_one(Card("gpu", GPU, id=5))
    assert (reading.source, reading.device, reading.step) == ("allocator", "gpu:5", 3)
    assert reading.in_use_bytes == 10 * GIB
    assert reading.peak_bytes_since_start == 30 * GIB
    assert reading.limit_bytes == reading.pool_bytes == 60 * GIB
    assert reading.largest_free_bytes == 40 * GIB
    assert reading.reserved_bytes is None, "BFC never writes it, so its 0 says nothing"


def test_tpu_keeps_what_is_reserved_for_temporaries():
    reading = read_one(Card("tpu", TPU))
    assert (reading.reserved_bytes, reading.pool_bytes, reading.largest_free_bytes) == (27 * GIB, None, GIB)


def test_a_largest_block_of_zero_beside_free_memory_is_unknown_not_full_fragmentation():
    """jaxlib before 0.11 leaves it 0 on GPU."""
    old = read_one(Card("gpu", {**GPU, "largest_free_block_bytes": 0}))
    assert old.largest_free_bytes is None
    full = read_one(Card("gpu", {**GPU, "bytes_in_use": 60 * GIB, "largest_free_block_bytes": 0}))
    assert full.largest_free_bytes == 0


def test_cuda_async_without_preallocation_has_no_limit_and_no_largest_block():
    stats = {
        "num_allocs": 3,
        "bytes_in_use": 5,
        "peak_bytes_in_use": 9,
        "bytes_limit": 0,
        "largest_free_block_bytes": 0,
    }
    reading = read_one(Card("gpu", stats))
    assert (reading.in_use_bytes, reading.limit_bytes, reading.largest_free_bytes) == (5, None, None)


KEYS = sorted(GPU | TPU)


@given(
    stats=st.dictionaries(st.sampled_from(KEYS), st.sampled_from([-1, 0, 1, GIB, 7 * GIB, 60 * GIB])),
    platform=st.sampled_from(["gpu", "tpu"]),
)
def test_unknown_never_comes_through_as_a_number(stats: dict[str, int], platform: str):
    reading = reading_of(Card(platform, stats), stats, 1, 0.0)
    figures = [getattr(reading, name) for name in Reading.__slots__ if name.endswith("_bytes")]
    assert all(figure is None or figure >= 0 for figure in figures)
    assert reading.limit_bytes != 0
    found = fragmentation_of(reading)
    if isinstance(found, Fragmentation):
        assert 0 <= found.share <= 1
        assert stats.get("largest_free_block_bytes", -1) >= 0
    else:
        assert found.reason


@pytest.mark.core
def test_cpu_says_that_it_knows_nothing_and_why_and_is_not_asked_again():
    probe = AllocatorProbe()
    entries = probe.read(0)
    assert len(entries) == len(jax.local_devices()) == 8
    assert all(isinstance(entry, Unavailable) for entry in entries)
    assert entries[3].device == "cpu:3"
    assert "CPU client keeps no allocator statistics" in entries[3].reason
    assert probe.reports is False
    assert probe.snapshot() == ()


def test_a_gpu_allocator_without_statistics_names_one_that_has_them():
    (entry,) = AllocatorProbe([Card("gpu", None)]).read(0)
    assert isinstance(entry, Unavailable)
    assert "the default one (BFC) does" in entry.reason


def by_device(step: int = 0) -> dict[str, Reading]:
    return {entry.device: entry for entry in LiveArraysProbe().read(step) if isinstance(entry, Reading)}


@pytest.mark.core
def test_live_arrays_are_counted_per_device():
    gc.collect()
    before = by_device()
    mesh = Mesh(jax.devices(), ("data",))
    single = jax.device_put(jnp.ones((1024,), jnp.float32), jax.devices()[2])
    sharded = jax.device_put(jnp.ones((8, 1024), jnp.float32), NamedSharding(mesh, P("data")))
    replicated = jax.device_put(jnp.ones((1024,), jnp.float32), NamedSharding(mesh, P()))
    jax.block_until_ready((single, sharded, replicated))
    after = by_device(7)
    grown = {name: after[name].live_array_bytes - before[name].live_array_bytes for name in after}
    assert grown["cpu:2"] == 3 * 4096, "its own array, a shard, and the replica"
    assert grown["cpu:5"] == 2 * 4096
    assert after["cpu:5"].live_array_count - before["cpu:5"].live_array_count == 2
    assert after["cpu:5"].step == 7


def test_a_state_that_is_gone_for_a_moment_is_looked_at_again_and_a_real_fall_is_believed():
    """As while a donating step is dispatched: the old state is deleted, the new one not there yet."""
    gc.collect()
    pauses = [0.01] * 6000  # a minute at least, where the other thread is late
    probe, count = LiveArraysProbe(pauses_s=pauses), 2**22 + bytes_of_others() // 8  # much beside what is held already

    def held() -> int:
        return sum(entry.live_array_bytes or 0 for entry in probe.read(0) if isinstance(entry, Reading))

    kept = [jnp.ones((count,), jnp.float32)]
    usual = held()
    kept[0].delete()
    again = threading.Timer(0.01, lambda: kept.append(jnp.ones((count,), jnp.float32)))
    again.start()
    assert held() == usual
    again.join()
    kept.clear()
    del pauses[3:]
    assert held() == usual - 4 * count


@pytest.mark.core
def test_parts_that_somebody_took_of_an_array_are_no_arrays_of_their_own():
    """JAX lists them beside the whole one; kept after it is gone, they count."""
    gc.collect()
    before = by_device()["cpu:5"]
    sharding = NamedSharding(Mesh(jax.devices(), ("data",)), P("data"))
    arrays = [jax.device_put(jnp.full((8, 1024), index), sharding) for index in range(3)]
    listed = len(jax.live_arrays())
    kept = [shard.data for array in arrays for shard in array.addressable_shards]
    np.asarray(arrays[0])
    assert len(jax.live_arrays()) >= listed + 24, "or there is nothing to tell apart"
    whole = by_device()["cpu:5"]
    del arrays[1:]
    gc.collect()
    after = by_device()["cpu:5"]
    assert len(kept) == 24
    assert [each.live_array_bytes - before.live_array_bytes for each in (whole, after)] == [3 * 4096, 3 * 4096]
    assert [each.live_array_count - before.live_array_count for each in (whole, after)] == [3, 3]


def test_live_arrays_keeps_none_alive_and_survives_deletion_meanwhile():
    arrays = [jnp.full((4,), float(index)) for index in range(300)]
    first = weakref.ref(arrays[0])

    def delete() -> None:
        for array in arrays:
            array.delete()

    thread = threading.Thread(target=delete)
    thread.start()
    for _ in range(5):
        assert len([entry for entry in LiveArraysProbe().read(0) if isinstance(entry, Reading)]) == 8
    thread.join()
    arrays.clear()
    gc.collect()
    assert first() is None


def test_host_reads_resident_bytes():
    (reading,) = HostProbe().read(2)
    assert isinstance(reading, Reading)
    assert reading.device == "host"
    assert reading.resident_bytes > 50 * 2**20


def test_scripted_replays_and_then_says_nothing():
    reading = Reading(source="host", device="host", step=1, time_s=1.0, resident_bytes=5)
    why = Unavailable(figure="host", device="host", reason="scripted")
    probe = ScriptedProbe([reading, [reading, why]])
    assert probe.read(0) == (reading,)
    assert probe.read(1) == (reading, why)
    assert probe.read(2) == ()


class Registry:
    """A registry that says what it is told to."""

    def __init__(self) -> None:
        self.compiles: list[Compilation] = []
        self.called: dict[Compilation, int] = {}

    def since(self, cursor: int) -> tuple[tuple[Compilation, ...], int]:
        return tuple(self.compiles[cursor:]), len(self.compiles)

    def calls(self) -> tuple[tuple[Compilation, int], ...]:
        return tuple(self.called.items())


def test_earlier_compiles_count_once_their_step_is_called():
    registry = Registry()
    used, compared = (
        Compilation(program=name, time_s=1.0, signature=(("x", "f32[]"),)) for name in ("used", "compared")
    )
    registry.compiles += [used, compared]
    registry.called = {used: 5, compared: 1}
    probe = ProgramsProbe(registry)
    assert probe.drain() == ()
    registry.called[used] = 6
    fresh = Compilation(program="fresh", time_s=2.0, signature=(("x", "f32[]"),))
    registry.compiles.append(fresh)
    assert probe.drain() == (used, fresh)
    registry.called[used] = 7
    assert probe.drain() == ()


@pytest.mark.core
def test_a_real_steps_compile_before_the_monitor_is_noticed_when_it_runs():
    step = jm.jit_step(lambda x: x * 2, jm.StepPolicy())
    x = jnp.ones(23)
    step(x)
    other = jm.jit_step(lambda x: x * 4, jm.StepPolicy())
    other(x)
    probe = ProgramsProbe()
    assert probe.drain() == ()
    step(x)
    (noticed,) = probe.drain()
    assert noticed.program == "<lambda>"
    assert noticed.memory.argument_bytes == 23 * 4


def uncommon_step(x: jax.Array) -> jax.Array:
    return x * 3


@pytest.mark.core
def test_unregistered_compiles_are_heard_while_listening_and_jax_own_operations_are_not():
    probe = ProgramsProbe(Registry())
    step = jax.jit(uncommon_step)
    short, long, longer = jnp.ones(3), jnp.ones(11), jnp.ones(13)
    step(short)
    probe.start()
    step(long)
    jax.random.normal(jax.random.key(0), (19,)).sum() + jnp.ones((17,)).mean()
    assert probe.drain(settle_s=3600.0) == (), "they settle first, so that a registered step can enter the registry"
    compiled = probe.drain(settle_s=0.0)
    assert [each.program for each in compiled] == ["uncommon_step"]
    assert (compiled[0].memory.argument_bytes, compiled[0].memory.output_bytes) == (44, 44), (
        "of this compile, not another"
    )
    assert compiled[0].unavailable == NOT_REGISTERED
    assert abs(compiled[0].time_s - time.time()) < 60
    probe.stop()
    step(longer)
    assert probe.drain(settle_s=0.0) == ()
    probe.stop()  # a second time is harmless


@pytest.mark.core
def test_the_need_of_each_unregistered_program_is_its_own():
    def first(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x.T).sum()

    def second(x: jax.Array) -> jax.Array:
        return jnp.cos(x)

    probe = ProgramsProbe(Registry())
    x = jnp.ones((37, 11))
    probe.start()
    for function in (first, second, first):
        jax.jit(function)(x)
    needs = {each.program: each.memory for each in probe.drain(settle_s=0.0)}
    probe.stop()
    expected = {
        function.__name__: jax.jit(function).lower(x).compile().memory_analysis() for function in (first, second)
    }
    for name, stats in expected.items():
        assert (needs[name].temp_bytes, needs[name].output_bytes) == (
            stats.temp_size_in_bytes,
            stats.output_size_in_bytes,
        )


@pytest.mark.core
def test_programs_that_cannot_be_told_apart_have_no_need():
    new = NewExecutables()
    x = jnp.ones((5, 7))
    # Programs live as long as their functions.
    first, second, third, fourth = (jax.jit(lambda x, n=n: x * n) for n in (3, 11, 12, 7))
    first(x)
    assert new.statistics() is not None, "the newest"
    assert new.statistics() is None, "no new one"
    second(x)
    third(x)
    assert new.statistics() is None, "one of two"
    fourth(x)
    assert new.statistics().argument_size_in_bytes == 140


def census_of(probe: LiveArraysProbe) -> ArrayCensus:
    return next(entry for entry in probe.read(5) if isinstance(entry, ArrayCensus))


@pytest.mark.core
def test_a_census_groups_like_arrays_and_names_the_line_that_made_them():
    mesh = Mesh(jax.devices()[:4], ("data",))
    # Large: a census names the groups with the most bytes, and other tests of this process keep arrays too.
    many = [jnp.full((512, 7, 1111), float(index), jnp.float16) for index in range(3)]  # the line that is named
    split = jax.device_put(jnp.ones((8, 13, 2**16), jnp.int32), NamedSharding(mesh, P("data")))
    whole = jax.device_put(jnp.ones((8, 13, 2**16), jnp.int32), NamedSharding(mesh, P()))
    jax.block_until_ready((many, split, whole))
    groups = {(group.type_text, group.placement): group for group in census_of(LiveArraysProbe()).groups}
    like = groups["float16[512,7,1111]", ""]
    assert (like.count, like.bytes, like.devices, like.replicated) == (3, 3 * 512 * 7 * 1111 * 2, ("cpu:0",), False)
    source = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(source, start=1) if text.endswith("# the line that is named"))
    assert like.site.startswith(f"test_probes.py:{line} (")
    four = tuple(f"cpu:{index}" for index in range(4))
    assert groups["int32[8,13,65536]", "P('data')"].devices == four
    assert groups["int32[8,13,65536]", "P('data')"].bytes == 8 * 13 * 2**16
    assert groups["int32[8,13,65536]", "P()"].replicated
    assert groups["int32[8,13,65536]", "P()"].bytes == 8 * 13 * 2**16 * 4


def test_a_census_is_bounded_and_counts_what_it_leaves_out():
    kept = jax.device_put(
        [np.zeros(1000 + index, np.int8) for index in range(120)]
    )  # of many shapes, with nothing to compile
    census = census_of(LiveArraysProbe())
    assert len(census.groups) == 48
    assert census.left_out_count >= 120 - 48
    total = next(entry for entry in LiveArraysProbe().read(0) if isinstance(entry, Reading) and entry.device == "cpu:0")
    assert census.count >= total.live_array_count >= len(kept)


def test_where_no_traceback_is_kept_the_line_is_unknown():
    assert creation_site(object()) == "unknown, because the runtime keeps no traceback of them"
