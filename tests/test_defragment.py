"""``jm.defragment`` and its mover, over real CPU arrays: whatever is moved is the same afterwards, and nothing is ever lost."""

from __future__ import annotations

import ast
import itertools
import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.probes.device_memory import AllocatorProbe
from jaxmem_callbacks.records.defragment import DefragmentReport, FreeBlocks, MovedArray, MoveStep
from jaxmem_callbacks.records.errors import DefragmentError
from jaxmem_callbacks.records.runs import Reading
from jaxmem_callbacks.recovery.defragment import (
    DeviceMover,
    _free_blocks,
    _nothing_to_do,
    free_blocks,
    placed_buffers,
)
from jaxmem_callbacks.recovery.moving.compaction import plan_moves
from jaxmem_callbacks.recovery.moving.mover import (
    STAYS_WEAK,
    Mover,
    address_on,
    copied_by_program,
    copied_by_runtime,
    device_copy_rate,
    host_link_rate,
)
from tests import forked
from tests.sample_devices import GPU, Card

pytestmark = pytest.mark.core
MIB = 2**20
ROOT = Path(__file__).resolve().parent.parent


def steps(mover, kind):
    """Every array of a tree that can be moved so, one step on the device each, or one through the host for all."""
    keys = [key for key in mover.paths if mover.array(key).size]
    if kind == "device":
        return [MoveStep(kind="device", keys=(key,), bytes=0, to=(0,)) for key in keys]
    keys = [key for key in keys if mover.paths[key] != "['weak']"]
    return [MoveStep(kind="host", keys=tuple(keys), bytes=0, to=(0,) * len(keys))]


def bits(array):
    """The bytes of every part, with its device."""
    data = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    return [(shard.device.id, np.asarray(shard.data).tobytes()) for shard in data.addressable_shards]


def facts(array):
    return (
        *(
            array.shape,
            array.dtype,
            getattr(array, "weak_type", False),
            array.sharding,
            array.sharding.memory_kind,
            array.committed,
        ),
        None if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array.format.layout,
    )


def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))


def odd_floats():
    patterns = np.array([0x7FC00001, 0xFFA00000, 0x80000000, 0x7F800000, 0x00000001], np.uint32)
    return jnp.asarray(patterns).view(jnp.float32)


def every_kind():
    """A tree of what a state may hold."""
    rows, whole = NamedSharding(mesh(), P("a", "b")), NamedSharding(mesh(), P())
    turned = Format(Layout(major_to_minor=(1, 0)), SingleDeviceSharding(jax.devices()[2]))
    with jax.enable_x64(True):
        wide = jnp.arange(5, dtype=jnp.float64) / 3
        long = jax.device_put(jnp.arange(5) * 2**40, jax.devices()[1])
    kept = jnp.arange(6.0)
    return {
        "nan": odd_floats(),
        "half": jnp.array([1.5, -0.0, jnp.nan], jnp.bfloat16),
        "quarter": jnp.array([0.5, -0.0, 448.0], jnp.float8_e4m3fn),
        "four_bits": jnp.arange(-8, 8).astype(jnp.int4),
        "flags": jnp.array([True, False]),
        "wide": wide,
        "long": long,
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(7), 3),
        "weak": jnp.broadcast_to(1.0, (4,)),
        "empty": jnp.zeros((0, 3)),
        "scalar": jnp.float32(2.5),
        "sharded": jax.device_put(jnp.arange(64.0).reshape(8, 8), rows),
        "whole": jax.device_put(jnp.arange(8), whole),
        "turned": jax.device_put(jnp.arange(12.0).reshape(3, 4), turned),
        "pinned": jax.device_put(kept + 1, SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")),
        "once": [kept, {"again": kept}],
        "others": ("text", 3, None, np.arange(3)),
    }


@pytest.mark.parametrize("kind", ["device", "host"])
def test_moved_arrays_are_the_same_and_the_old_ones_are_gone(kind):
    tree = every_kind()
    before = {path: leaf for path, leaf in jax.tree.leaves_with_path(tree) if isinstance(leaf, jax.Array)}
    told = {path: (facts(leaf), bits(leaf)) for path, leaf in before.items()}
    mover = Mover(tree)
    mover.carry_out(steps(mover, kind))
    after = mover.tree
    assert jax.tree.structure(after) == jax.tree.structure(tree)
    for path, leaf in jax.tree.leaves_with_path(after):
        if isinstance(leaf, jax.Array):
            assert (facts(leaf), bits(leaf)) == told[path], path
    assert after["once"][0] is after["once"][1]["again"]
    assert after["others"][0] == "text"
    assert after["others"][3] is tree["others"][3]
    stay = {"empty", "weak"} if kind == "host" else {"empty"}
    assert {path[0].key for path, leaf in before.items() if not leaf.is_deleted()} == stay
    assert all(after[name] is tree[name] for name in stay)
    paths = [each.path for each in mover.moved]
    assert len(paths) == len(set(paths))
    assert {each.kind for each in mover.moved} == {kind}
    assert [(each.path, each.bytes, len(each.after)) for each in mover.moved if each.path == "['sharded']"] == [
        ("['sharded']", 256, 8)
    ]
    assert mover.seconds[kind] > 0


@pytest.mark.parametrize("copy", [copied_by_runtime, copied_by_program], ids=["runtime", "program"])
def test_both_ways_to_copy_on_a_device_make_another_buffer(copy):
    mover = Mover({"x": jax.device_put(odd_floats(), jax.devices()[3])})
    was, told = bits(mover.array(0)), facts(mover.array(0))
    mover.carry_out(steps(mover, "device"), copy=copy)
    assert (bits(mover.array(0)), facts(mover.array(0))) == (was, told)
    (moved,) = mover.moved
    assert moved.before != moved.after


def test_a_step_that_may_not_go_through_the_host_is_refused_and_loses_nothing():
    odd = jnp.broadcast_to(1.0, (4,))
    mover = Mover({"a": jnp.arange(3.0), "odd": odd})
    with pytest.raises(DefragmentError, match=r"\['odd'\] cannot go through the host: .*Leave it out") as failed:
        mover.carry_out([MoveStep(kind="host", keys=(0, 1), bytes=0, to=(0, 0))])
    assert STAYS_WEAK in str(failed.value)
    tree = failed.value.tree
    assert tree["odd"] is odd
    assert tree["a"].tolist() == [0.0, 1.0, 2.0]


FAILS = """
import json, resource
import jax, jax.numpy as jnp, numpy as np
from jaxmem_callbacks.records.defragment import MoveStep
from jaxmem_callbacks.records.errors import DefragmentError
from jaxmem_callbacks.recovery.moving.mover import Mover, address_on

MIB = 2**20
def step(kind, *keys): return MoveStep(kind=kind, keys=keys, bytes=0, to=(0,) * len(keys))

warm = Mover({"small": jnp.arange(64.0)})
warm.carry_out([step("device", 0), step("host", 0)])
def attempt(steps, room, lend):
    tree = {"a": jnp.arange(1000.0), "big": jnp.full(200 * MIB, 7, jnp.uint8), "c": jnp.arange(2000.0)}
    jax.block_until_ready(tree)
    old = tree["a"]
    view = np.asarray(tree["big"]) if lend else None  # who reads the buffer keeps it, so that deleting frees nothing
    mover = Mover(tree)
    held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + room * MIB, resource.RLIM_INFINITY))
    try:
        mover.carry_out(steps)
    except DefragmentError as error:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        out = error.tree
        return {
            "said": str(error), "cause": repr(error.__cause__)[:200], "old": old.is_deleted(),
            "kinds": {name: type(leaf).__name__ for name, leaf in out.items()},
            "values": [bool((np.asarray(out["a"]) == np.arange(1000.0)).all()), int(np.asarray(out["big"])[-1]),
                       bool((np.asarray(out["c"]) == np.arange(2000.0)).all())],
            "moved": [each.path for each in mover.moved],
        }

each = [step("device", key) for key in range(3)]
together = [step("host", 0, 1, 2)]
print(json.dumps([attempt(each, 100, False), attempt(together, 100, False), attempt(together, 300, True)]))
"""


def test_memory_that_runs_out_in_the_middle_loses_nothing():
    """Under a real limit: a copy on the device, a copy to the host, and the way back find no room."""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = forked.run([sys.executable, "-c", FAILS], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    copying, fetching, putting = json.loads(done.stdout.splitlines()[-1])
    assert [told["values"] for told in (copying, fetching, putting)] == [[True, 7, True]] * 3
    assert [told["old"] for told in (copying, fetching, putting)] == [True] * 3
    assert "['big'] could not be copied on its device; it is where it was" in copying["said"]
    assert "Out of memory" in copying["cause"]
    assert copying["moved"] == fetching["moved"] == ["['a']"]
    assert "['big'] could not be copied to the host" in fetching["said"]
    assert set(fetching["kinds"].values()) == {"ArrayImpl"}
    assert (
        "['big'] could not be put back on the device, and stands in the error's tree as NumPy arrays" in putting["said"]
    )
    assert putting["kinds"] == {"a": "ArrayImpl", "big": "ndarray", "c": "ArrayImpl"}
    assert putting["moved"] == ["['a']", "['c']"]


def test_what_is_no_array_that_can_be_moved_is_refused():
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(
        DefragmentError, match=r"\['x'\] was deleted or donated before\. Give what the last step returned"
    ):
        jm.defragment({"x": gone})
    with pytest.raises(DefragmentError, match=r"a function is being traced here\. Call it outside of jax\.jit"):
        jax.jit(jm.defragment)({"x": jnp.ones(3)})
    real = {"x": jnp.ones(3)}
    with pytest.raises(DefragmentError, match=r"a function is being traced here"):
        jax.jit(lambda: jm.defragment(real)[0]["x"])()


def test_on_a_cpu_the_tree_is_returned_untouched_and_the_report_says_why():
    tree = every_kind()
    same, report = jm.defragment(tree)
    assert same is tree
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    assert (report.done, report.moved, report.device_bytes, report.host_bytes) == (False, (), 0, 0)
    assert "no pool" in report.reason
    assert {blocks.largest_free_bytes for blocks in report.before.values()} == {None}
    assert all(blocks.reason for blocks in report.before.values())
    assert (report.device_share, report.host_share) == (None, None)
    assert jm.defragment({"n": 3})[0] == {"n": 3}


def test_a_tpu_and_an_allocator_without_a_pool_are_left_alone_and_say_why():
    def why(device):
        probe = AllocatorProbe([device])
        return _nothing_to_do(probe, _free_blocks(probe))

    assert "TPU's runtime moves buffers by itself" in why(Card("tpu", GPU))
    assert "keeps no pool" in why(Card("gpu", None))
    assert not why(Card("gpu", GPU))


def test_the_runtimes_own_defragment_which_aborts_on_todays_wheels_is_called_nowhere():
    files = list((ROOT / "jaxmem_callbacks").rglob("*.py"))
    calls = [
        f"{path.name}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "defragment"
    ]
    assert len(files) > 200
    assert calls == []


def test_where_arrays_lie_is_planned_over_without_overlap():
    """Real addresses of a device, the tree's and all others, go into a plan, and its steps into the mover."""
    # Whole multiples of 256 bytes: the system, which places a CPU's arrays, puts them no closer together than a GPU's pool would.
    kept = [jax.device_put(jnp.full(64 * 1000, number, jnp.float32), jax.devices()[4]) for number in range(8)]
    jax.block_until_ready(kept)  # an array that is not ready is asked for no address
    mover = Mover(kept[::2])
    buffers = placed_buffers(mover, jax.devices()[4])
    movable = {each.key for each in buffers if each.movable}
    assert movable == set(mover.paths)
    assert len(buffers) >= 8
    ordered = sorted(buffers, key=lambda each: each.address)
    assert all(low.address + low.bytes <= high.address for low, high in itertools.pairwise(ordered))
    plan = plan_moves(buffers, extra_bytes=MIB, tail_bytes=MIB)
    mover.carry_out(plan.steps)
    assert [float(array[0]) for array in mover.tree] == [0.0, 2.0, 4.0, 6.0]
    assert [float(array[0]) for array in kept[1::2]] == [1.0, 3.0, 5.0, 7.0]


def test_a_copy_that_lies_wrong_is_let_go_of_and_the_old_array_stays():
    mover = Mover({"x": jax.device_put(jnp.arange(1000.0), jax.devices()[6])})
    hands, old = DeviceMover(mover, jax.devices()[6]), mover.array(0)
    alive = sum(each.bytes for each in hands.buffers())
    assert not hands.copy_to(0, 1)
    assert mover.array(0) is old
    assert not old.is_deleted()
    assert (sum(each.bytes for each in hands.buffers()), mover.moved) == (alive, [])
    assert (hands.free_bytes(), hands.largest_free_bytes()) == (None, None)
    assert mover.copy_if(0, lambda new: address_on(new, jax.devices()[6]) != address_on(old, jax.devices()[6]))
    assert old.is_deleted()
    assert float(mover.array(0)[7]) == 7.0
    hands.stage(MoveStep(kind="host", keys=(0,), bytes=0, to=(0,)))
    assert [each.kind for each in mover.moved] == ["device", "host"]
    assert [each.key for each in hands.buffers() if each.movable] == [0]


def test_two_arrays_of_one_memory_stay():
    one = jax.device_put(jnp.arange(1000.0), jax.devices()[5])
    other = one.addressable_shards[0].data
    buffers = placed_buffers(Mover({"one": one, "other": other}), jax.devices()[5])
    (shared,) = [each for each in buffers if each.address == one.unsafe_buffer_pointer()]
    assert not shared.movable


def reading(**figures):
    return Reading(source="allocator", device="gpu:0", step=0, time_s=0.0, **figures)


def test_free_memory_is_told_or_unknown_because():
    whole = free_blocks(reading(in_use_bytes=60, pool_bytes=100, largest_free_bytes=10))
    assert whole == FreeBlocks(free_bytes=40, largest_free_bytes=10, fragmentation=0.75)
    older = free_blocks(reading(in_use_bytes=60, pool_bytes=100))
    assert (older.free_bytes, older.fragmentation) == (40, None)
    assert older.reason == "jaxlib before 0.11 does not report the largest free block"
    assert "no pool" in free_blocks(reading(in_use_bytes=60)).reason
    assert free_blocks(reading(in_use_bytes=100, pool_bytes=100, largest_free_bytes=0)).fragmentation is None


def test_the_speed_of_moves_is_a_share_of_one_large_copys():
    moved = tuple(
        MovedArray(path=path, kind=kind, bytes=size, before=(), after=())
        for path, kind, size in (("a", "device", 30), ("b", "device", 10), ("c", "host", 6))
    )
    rates = {"device_copy_bytes_per_s": 80.0, "host_link_bytes_per_s": 12.0, "device_seconds": 1.0, "host_seconds": 2.0}
    report = DefragmentReport(done=True, before={}, after={}, stayed={}, moved=moved, **rates)
    assert (report.device_share, report.host_share) == (0.5, 0.25)


def test_rates_are_measured_by_real_copies():
    for rate in (device_copy_rate, host_link_rate):
        told = rate(jax.devices()[0], 4 * MIB)
        assert told is not None
        assert told > MIB


def test_a_bound_that_is_no_size_is_refused():
    from jaxmem_callbacks.recovery.defragment import _bound

    mover = Mover({"x": jnp.ones(10)})
    assert (_bound(None, mover), _bound("2MiB", mover), _bound(7, mover)) == (2**30, 2 * MIB, 7)
    with pytest.raises(DefragmentError, match=r"max_extra_bytes='much' is no size\. Not a size: 'much'"):
        _bound("much", mover)
