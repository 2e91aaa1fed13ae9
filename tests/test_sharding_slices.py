"""Hybrid meshes: one axis crosses the slices, all others stay inside one; what cannot be laid out is told by name."""

from __future__ import annotations

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.transforms.sharding.mesh import hybrid_devices, slice_count, slices_by_axis

pytestmark = pytest.mark.core


@dataclass(frozen=True)
class Device:
    """A device as far as its place matters: the test double of one of several slices, or of several processes."""

    id: int
    process_index: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "a GPU"


def devices(count: int, *, slices: int = 1, processes: int = 1) -> list[Device]:
    return [
        Device(id=index, slice_index=index * slices // count, process_index=index * processes // count)
        for index in range(count)
    ]


def placed(sizes: dict[str, int], there: list[Device], across=None):
    return hybrid_devices(sizes, slices_by_axis(sizes, there, across), there)


def test_one_axis_crosses_the_slices_and_the_others_stay_inside():
    mesh = placed({"data": 4, "fsdp": 4}, devices(16, slices=2))
    assert mesh.shape == (4, 4)
    assert all(len({device.slice_index for device in row}) == 1 for row in mesh), "fsdp stays inside a slice"
    assert [row[0].slice_index for row in mesh] == [0, 0, 1, 1]


def test_the_axis_that_crosses_can_be_said():
    mesh = placed({"data": 4, "fsdp": 4}, devices(16, slices=2), "fsdp")
    assert all(len({device.slice_index for device in column}) == 1 for column in mesh.T)
    both = placed({"data": 4, "fsdp": 4}, devices(16, slices=4), {"data": 2, "fsdp": 2})
    assert {device.slice_index for device in both[:2, :2].flat} == {0}
    assert {device.slice_index for device in both[2:, 2:].flat} == {3}


def test_the_first_axis_that_divides_crosses():
    assert slices_by_axis({"expert": 3, "data": 4}, devices(12, slices=4), None) == {"expert": 1, "data": 4}


def test_processes_count_as_slices_where_devices_know_none():
    there = devices(8, processes=4)
    assert slice_count(there) == 1
    mesh = placed({"fsdp": 2, "data": 4}, there, "data")
    assert [{device.process_index for device in column} for column in mesh.T] == [{0}, {1}, {2}, {3}]


@pytest.mark.parametrize(
    ("sizes", "slices", "across", "told"),
    [
        ({"data": 3, "fsdp": 5}, 2, None, "no axis of data=3, fsdp=5 divides by 2. One axis has to cross the slices"),
        ({"data": 4}, 2, "tensor", "across_slices names 'tensor', which is no axis. Expected of: data."),
        (
            {"data": 4, "fsdp": 2},
            2,
            {"data": 4},
            "across_slices gives data=4 for the axes data=4, fsdp=2, and there are 2 slices",
        ),
        ({"data": 3, "fsdp": 2}, 2, "data", "each a divisor of its axis: across_slices={'data': 2}"),
    ],
)
def test_what_does_not_fit_is_told(sizes, slices, across, told):
    with pytest.raises(PolicyError, match=re.escape(told)):
        slices_by_axis(sizes, devices(12, slices=slices), across)


def test_slices_of_different_sizes_are_told():
    uneven = [
        *devices(8, slices=2)[:6],
        Device(id=6, process_index=0, slice_index=0),
        Device(id=7, process_index=0, slice_index=0),
    ]
    with pytest.raises(PolicyError, match=r"cannot be laid over the slices: .*Expected slices of 4 devices each"):
        placed({"data": 8}, uneven)


def test_real_devices_of_one_process_are_one_part():
    mesh = jm.make_mesh("data=2,fsdp=4", across_slices={"data": 1})
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4}
    assert mesh.axis_types == jm.make_mesh("data=2,fsdp=4").axis_types
    with pytest.raises(PolicyError, match="there are 1 processes"):
        jm.make_mesh("data=2,fsdp=4", across_slices={"data": 2})


def test_large_arrays_that_lie_whole_are_named():
    mesh = jm.make_mesh("fsdp=8")
    state = {"wide": jnp.ones((1024, 512)), "odd": jnp.ones((1021, 511)), "small": jnp.ones((7, 5))}
    policy = jm.StepPolicy(sharding="fsdp")
    state = jax.device_put(state, jm.infer_shardings(state, mesh, policy))
    batch = jax.device_put(jnp.ones((1024, 512)), NamedSharding(mesh, P()))

    def train_step(state, batch):
        loss = lambda s: (batch @ s["wide"].T).mean() + s["odd"].sum() + s["small"].sum()  # noqa: E731
        return jax.tree.map(lambda a, g: a - g, state, jm.grad(loss)(state))

    with jax.set_mesh(mesh):
        told = jm.step_memory(jm.jit_step(train_step, policy), state, batch).warnings
    named = [line.partition(" (")[0] for line in told if "is whole on each of 8 devices" in line]
    assert named == ["batch", "state['odd']"]
    assert "(float32[1024,512], 2.0 MiB) is whole on each of 8 devices, though sharding='fsdp'" in told[0]
