"""The heap map: buffers by address become groups, holes and cells; asking for addresses waits for nothing and changes nothing."""

from __future__ import annotations

import gc
import io
import itertools
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from PIL import Image

import jaxmem_callbacks as jm
from jaxmem_callbacks._compat import arrays
from jaxmem_callbacks._compat.arrays import parts_of
from jaxmem_callbacks.analysis.heap_map import BREAK, HOLE, cells_of, layout_of
from jaxmem_callbacks.analysis.run_summary import HEAP_MAP
from jaxmem_callbacks.probes.live_arrays import HeapProbe, LiveArraysProbe
from jaxmem_callbacks.readers.runs import stories_of
from jaxmem_callbacks.records.arrays import HeapMap, LiveBuffer
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import Reading, Unavailable
from jaxmem_callbacks.writers.figures import draw_heap
from jaxmem_callbacks.writers.page_model import run_model
from jaxmem_callbacks.writers.protocol import LoggedTable, Picture
from tests.processes import until

# The pure part


def rows(*entries: tuple[int, int, str]) -> list[LiveBuffer]:
    return [LiveBuffer(address=address, bytes=size, label=label) for address, size, label in entries]


def test_buffers_become_groups_and_holes_by_address():
    layout = layout_of(rows((300, 100, "b"), (0, 100, "a"), (100, 100, "a")), apart_bytes=1000)
    assert [(group.label, group.count, group.bytes) for group in layout.groups] == [("a", 2, 200), ("b", 1, 100)]
    (region,) = layout.regions
    assert [(each.begin, each.end, each.group) for each in region] == [
        (0, 100, 0),
        (100, 200, 0),
        (200, 300, HOLE),
        (300, 400, 1),
    ]
    assert (layout.held_bytes, layout.hole_bytes, layout.largest_hole_bytes, layout.buffers) == (300, 100, 100, 3)


def test_arrays_that_share_memory_are_counted_once():
    layout = layout_of(rows((0, 100, "a"), (0, 100, "again"), (50, 100, "c")), apart_bytes=0)
    assert layout.held_bytes == 150
    assert [(group.label, group.bytes) for group in layout.groups] == [("a", 100), ("c", 50)]


def test_what_lies_far_away_is_another_region_and_rare_labels_share_a_group():
    far = rows(*((number * 10, 10, f"kind {number}") for number in range(20)), (10**12, 10, "far"))
    layout = layout_of(far, most_groups=4, apart_bytes=1000)
    assert [group.label for group in layout.groups][-1] == "17 other kinds"
    assert len(layout.regions) == 2
    cells, width = cells_of(layout, 100)
    assert cells.count(BREAK) == 1
    assert width >= 1


@given(
    st.lists(
        st.tuples(st.integers(0, 2**47), st.integers(1, 2**32), st.sampled_from("abcdefghijklmnop")),
        min_size=1,
        max_size=60,
    ),
    st.integers(1, 500),
)
def test_no_byte_is_lost_or_counted_twice(entries: list[tuple[int, int, str]], count: int):
    buffers = rows(*entries)
    layout = layout_of(buffers, most_groups=5)
    edges = sorted({edge for each in buffers for edge in (each.address, each.address + each.bytes)})
    covered = sum(
        end - begin
        for begin, end in itertools.pairwise(edges)
        if any(each.address <= begin and end <= each.address + each.bytes for each in buffers)
    )
    assert layout.held_bytes == covered == sum(group.bytes for group in layout.groups)
    spans = sum(region[-1].end - region[0].begin for region in layout.regions)
    assert spans == layout.held_bytes + layout.hole_bytes
    assert len(layout.groups) <= 6
    assert len(layout.regions) <= 60
    cells, _ = cells_of(layout, count)
    assert len(cells) <= max(count, 3 * len(layout.regions))
    assert set(cells) <= {HOLE, BREAK, *range(len(layout.groups))}


# Reading addresses


def fullest(step: int = 0) -> HeapMap:
    maps = [each for each in HeapProbe().read(step) if isinstance(each, HeapMap)]
    assert len(maps) == len(jax.local_devices())
    return maps[0]


@pytest.mark.core
def test_a_live_array_lies_where_jax_says():
    array = jax.block_until_ready(jnp.ones((123, 7)) + 1)
    seen = fullest(5)
    (mine,) = [each for each in seen.buffers if each.label == "float32[123,7]"]
    assert (mine.address, mine.bytes) == (array.unsafe_buffer_pointer(), 123 * 7 * 4)
    assert (seen.device, seen.step) == ("cpu:0", 5)


@pytest.mark.core
def test_parts_of_arrays_are_found_and_leave_no_array_behind():
    """JAX keeps parts that were asked for with their array, and counts them as live from then on."""
    mesh = Mesh(jax.devices(), ("data",))
    split = jax.device_put(jnp.ones((8, 531)), NamedSharding(mesh, P("data")))
    whole = jax.device_put(jnp.ones((3, 531)), NamedSharding(mesh, P()))
    single = jax.device_put(np.ones((5, 531), np.float32))
    jax.block_until_ready((split, whole, single))

    def live() -> list[tuple[int | None, int | None]]:
        readings = [each for each in LiveArraysProbe().read(0) if isinstance(each, Reading)]
        return [(each.live_array_bytes, each.live_array_count) for each in readings]

    before = live()
    parts = [parts_of(each) for each in (split, whole, single)]
    assert [len(each) for each in parts] == [8, 8, 1]
    assert live() == before, "while they are in use, on whatever thread"
    del parts
    labels = [[each.label for each in seen.buffers] for seen in HeapProbe().read(0)]
    assert all("float32[1,531]" in each and "float32[3,531]" in each for each in labels)
    assert labels[0].count("float32[5,531]") == 1
    gc.collect()
    assert live() == before


@pytest.mark.core
def test_who_asks_while_it_is_asked_already_does_not_wait_for_itself():
    """A handler of a signal runs on the thread that it interrupts."""
    held = jax.block_until_ready(jnp.ones((5, 533)))
    with arrays._listing:
        began_s = time.monotonic()
        assert len(arrays.parts_of(held)) == 1
        assert any(each is held for each in arrays.live_arrays())
        assert time.monotonic() - began_s < 0.5


@pytest.mark.core
def test_a_map_keeps_nothing_alive_and_steps_donate_as_before():
    step = jax.jit(lambda state: [each + 1 for each in state], donate_argnums=0)
    mesh = Mesh(jax.devices(), ("data",))
    state = step([jax.device_put(jnp.zeros((8, 977)), NamedSharding(mesh, P("data")))])
    jax.block_until_ready(state)
    addresses = {each.address for each in fullest().buffers if each.label == "float32[1,977]"}
    old, state = state, step(state)
    assert all(each.is_deleted() for each in old)
    jax.block_until_ready(state)
    assert {each.address for each in fullest().buffers if each.label == "float32[1,977]"} == addresses, "used again"
    gone = weakref.ref(old[0])
    del old
    gc.collect()
    assert gone() is None


@pytest.mark.core
def test_an_array_that_lost_one_of_its_parts_is_mapped_by_the_others():
    """A loop that takes the part of one device out of a replicated array, and donates it."""
    whole = jax.device_put(jnp.ones(983), NamedSharding(Mesh(jax.devices(), ("data",)), P()))
    part = jax.block_until_ready(whole).addressable_shards[1].data
    part.delete()
    maps = [each for each in HeapProbe().read(0) if isinstance(each, HeapMap)]
    assert ["float32[983]" in [buffer.label for buffer in each.buffers] for each in maps] == [
        device != jax.devices()[1] for device in jax.local_devices()
    ]


@pytest.mark.core
def test_arrays_that_are_still_computed_are_not_waited_for():
    @jax.jit
    def slow(state: jax.Array, rounds: int) -> jax.Array:
        return jax.lax.fori_loop(0, rounds, lambda _, value: jnp.tanh(value @ value) * 0.5, state)

    state, few = jnp.full((300, 301), 0.01)[:, :300], 5
    jax.block_until_ready(slow(state, few))
    began = time.perf_counter()
    jax.block_until_ready(slow(state, few))
    rounds = int(few * 0.5 / (time.perf_counter() - began)) + few
    for _ in range(6):  # longer each time, where this thread was kept waiting by others
        running = slow(state, rounds)
        seen = fullest()
        if not running.is_ready():
            break
        rounds *= 2
    assert not running.is_ready(), "it was not waited for"
    assert seen.left_out_count >= 1
    assert seen.left_out_bytes >= running.nbytes
    jax.block_until_ready(running)


def test_of_too_many_arrays_none_is_asked():
    arrays = [jnp.ones(3) + number for number in range(5)]
    entries = HeapProbe(most_arrays=4).read(0)
    assert all(isinstance(each, Unavailable) and each.figure == "heap_map" for each in entries)
    assert "asking more than 4 would hold the training thread up" in entries[0].reason
    del arrays


# The monitor


def heaps(double: jm.CollectingWriter) -> list[Picture]:
    return [picture for picture in double.of(Picture) if picture.tag == HEAP_MAP]


def test_the_monitor_takes_maps_in_the_hook_when_one_is_due_and_at_the_end():
    """Never on its own thread: a step that donates an array while its address is asked for fails on a GPU."""
    kept = jax.block_until_ready(jnp.ones((64, 65)))
    double = jm.CollectingWriter()
    settings = MonitorSettings(window_s=0.01, scan_s=0.01, heap_map_s=0.05, on_error="raise")
    with jm.MemoryMonitor(settings, writer=double) as monitor:
        monitor(0)
        time.sleep(0.4)
        assert heaps(double) == [], "due, and the hook was not called"
        monitor(1)
        until(lambda: heaps(double))
        monitor(2)
    (told,) = [row for row in double.of(LoggedTable)[-1].rows if row[0] == HEAP_MAP]
    assert told[1].endswith("(cpu:0)")
    steps = [picture.step for picture in heaps(double)]
    assert (steps[0], steps[-1]) == (1, 2)
    del kept


def test_a_map_is_taken_when_more_is_held_than_ever_before():
    """Without waiting for the next map by the clock, which here never comes; and it is in the file, and no picture."""

    def maps() -> int:
        return len(double.of(HeapMap))

    def is_mapped_again(before: int) -> bool:
        monitor(next(steps))
        return maps() > before

    double = jm.CollectingWriter()
    settings = MonitorSettings(window_s=0.01, scan_s=0.01, heap_map_s=3600.0, limit_bytes=2**50, on_error="raise")
    with jm.MemoryMonitor(settings, writer=double) as monitor:
        steps, held = itertools.count(), []
        for size in (64, 4096):
            held.append(jax.block_until_ready(jnp.ones((size, size))))
            until(partial(is_mapped_again, maps()))
        taken = maps()
        for _ in range(30):
            monitor(next(steps))
            time.sleep(0.01)
        assert maps() == taken, "and not again while no more is held"
        assert heaps(double) == []
    del held


def test_a_map_that_is_asked_for_before_the_writers_are_open_is_taken_once_they_are():
    """The first look asks for it, and opens the writers at its end; steps go on meanwhile."""

    class Slow:
        shape = ()

        def __init__(self) -> None:
            self.asked, self.go = threading.Event(), threading.Event()

        def __float__(self) -> float:
            self.asked.set()
            return float(self.go.wait(60))

    double, slow, kept = jm.CollectingWriter(), Slow(), jnp.ones(8)
    with jm.MemoryMonitor(MonitorSettings(heap_map_s=3600.0), writer=double) as monitor:
        monitor(0, {"loss": slow})
        assert slow.asked.wait(60)
        for step in range(1, 5):
            monitor(step)
        slow.go.set()
        steps = itertools.count(5)
        until(lambda: monitor(next(steps)) or double.of(HeapMap))
    del kept


def test_a_map_is_taken_after_an_event_of_too_little_memory():
    """What comes before it is too little more for a map by itself."""
    double = jm.CollectingWriter()
    gc.collect()  # what earlier tests left, which would be freed while this one waits
    held = [jax.block_until_ready(jnp.ones((4096, 4096)))]
    seen = [each for each in LiveArraysProbe().read(0) if isinstance(each, Reading)]
    total = max(each.live_array_bytes or 0 for each in seen)  # on one device, what other tests keep there too
    limit = round(total / 0.93)
    settings = MonitorSettings(window_s=0.01, scan_s=0.01, heap_map_s=3600.0, limit_bytes=limit, on_error="raise")
    with jm.MemoryMonitor(settings, writer=double) as monitor:
        steps = itertools.count()

        def is_mapped_from(first: int) -> bool:
            monitor(next(steps))
            return any(heap.step >= first for heap in double.of(HeapMap))

        until(partial(is_mapped_from, 0))
        assert not monitor.events
        held.append(jax.block_until_ready(jnp.ones(total * 3 // 100, jnp.uint8)))
        until(partial(is_mapped_from, next(steps)))
        assert [event.kind for event in monitor.events] == ["near_oom"]
    del held


def until_memory_ends(folder: Path) -> None:
    with jm.MemoryMonitor(MonitorSettings(heap_map_s=3600.0), logdir=folder) as monitor:
        monitor(7)
        late = jax.block_until_ready(jnp.ones((64, 69)))
        jax.block_until_ready(jnp.ones((2**46,)))
        del late


def test_a_failure_has_a_map_of_what_was_held(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        until_memory_ends(tmp_path / "run")
    (story,) = stories_of(tmp_path / "run")
    assert "float32[64,69]" in {buffer.label for buffer in story.timeline.heaps[-1].buffers}
    (event,) = story.events
    assert (event.kind, event.step) == ("out_of_memory", 7)
    glance = run_model(story, name="", sentence="", details=())["glance"]
    assert (glance["level"], glance["verdict"]) == ("bad", "It does not fit: memory ran out at step 7.")
    assert glance["first"]["action"] == event.action
    assert event.message.endswith(f"The report is in {next((tmp_path / 'run-oom').iterdir())}.")


def test_without_a_logger_for_pictures_nothing_is_drawn():
    seen = []
    with jm.MemoryMonitor(MonitorSettings(heap_map_s=0.01), writer=lambda step, scalars: seen.append(step)) as monitor:
        monitor(0)
        monitor.flush()
    assert seen


# The figure


def test_the_figure_shows_groups_holes_and_what_is_left_out():
    buffers = rows((2**40, 2**28, "float32[8192,8192]"), (2**40 + 2**29, 2**28, "bfloat16[16,8192,1024]"))
    drawn = draw_heap(HeapMap(device="gpu:3", step=7, time_s=2.0, buffers=buffers, left_out_count=2, left_out_bytes=5))
    assert (drawn.tag, drawn.step, drawn.width, drawn.height) == (HEAP_MAP, 7, 700, 660)
    pixels = np.asarray(Image.open(io.BytesIO(drawn.png)).convert("RGB"))
    shares = [(pixels == colour).all(axis=-1).mean() for colour in ((31, 119, 180), (255, 127, 14), (228, 228, 228))]
    assert min(shares) > 0.1, "two groups and the hole between them"
    assert draw_heap(HeapMap(device="cpu:0", step=0, time_s=0.0, buffers=[])) is None
