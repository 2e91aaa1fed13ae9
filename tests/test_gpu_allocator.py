"""What `make gpu-check` asks of the simulated allocator: the comparison finds likeness, and every kind of difference."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from jaxmem_callbacks.records.errors import SimulationError
from jaxmem_callbacks.records.traces import AllocatorSettings
from jaxmem_callbacks.simulator.allocators import Bfc
from jaxmem_callbacks.simulator.cases import CASES
from jaxmem_callbacks.simulator.replay import replay

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
spec = importlib.util.spec_from_file_location("gpu_allocator", ROOT / "tools" / "gpu_allocator.py")
assert spec is not None
assert spec.loader is not None
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


class Device:
    """A device whose pool is another model of it, at addresses of its own."""

    def __init__(self, pool, *, at=0x7F00_0000_0000, tells=True):
        self.pool, self.at, self.tells = pool, at, tells

    def make(self, size):
        address = self.pool.allocate(size)
        if address is None:
            msg = "RESOURCE_EXHAUSTED: Out of memory"
            raise RuntimeError(msg)
        return Block(self, address)

    def statistics(self):
        return self.pool.statistics() if self.tells else None


class Block:
    def __init__(self, device, address):
        self.device, self.address = device, address

    def unsafe_buffer_pointer(self):
        return self.device.at + self.address

    def delete(self):
        self.device.pool.free(self.address)


def told(case, model, device):
    requests = tool.requests_of(CASES[case](), 1.0)
    rows = tool.modelled(requests, model)
    return tool.compared(rows, list(tool.really(requests, device.make, device.statistics)), model.regions())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("preallocate", [True, False])
def test_a_pool_that_does_the_same_is_alike_to_the_last_request(case, preallocate):
    found = told(case, *(Bfc(12 * GIB, preallocate=preallocate), Device(Bfc(12 * GIB, preallocate=preallocate))))
    assert found["alike"] == found["requests"]
    assert found["first_unlike"] is None
    assert found["refused_at"] == found["device_refused_at"]
    # The requests are the trace's own: what it refuses, they refuse.
    settings = AllocatorSettings(device_bytes=16 * GIB, preallocate=preallocate, partitioned=False)
    assert (found["refused_at"] is None) == replay(CASES[case](), settings).survived


def test_another_pool_is_told_by_the_first_request_that_differs():
    model = Bfc(12 * GIB, partitioned=True)
    assert told("train_and_evaluate", model, Device(Bfc(10 * GIB)))["first_unlike"]["unlike"] == [
        "pool_bytes",
        "largest_free_block_bytes",
    ]
    found = told("losses_in_a_list", Bfc(12 * GIB, partitioned=True), Device(Bfc(12 * GIB)))
    assert "address" in found["first_unlike"]["unlike"], "the open end is kept apart, or it is not"
    found = told("train_and_evaluate", Bfc(12 * GIB), Device(Bfc(8 * GIB), tells=False))
    assert found["first_unlike"]["unlike"] == ["refused"]
    assert found["device_refused_at"] < found["requests"]
    assert found["not_reported"] == ["bytes_in_use", "largest_free_block_bytes", "pool_bytes"]


def test_large_sizes_follow_the_pool_and_small_ones_stay():
    whole, tenth = (tool.requests_of(CASES["losses_in_a_list"](), scale) for scale in (1.0, 0.1))
    assert [kind for kind, _, _ in whole] == [kind for kind, _, _ in tenth]
    assert {size for _, _, size in whole if size < 2**20} == {size for _, _, size in tenth if size < 2**20}
    assert max(size for *_, size in tenth) == round(0.1 * max(size for *_, size in whole))


def test_a_half_taken_trace_is_no_trace():
    case = CASES["losses_in_a_list"]()
    with pytest.raises(SimulationError, match="contradicts itself"):
        replay(type(case)(head=case.head, events=case.events[5:]), AllocatorSettings(device_bytes=16 * GIB))
