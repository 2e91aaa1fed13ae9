"""The effect, in the compiler's own bytes: cut losses against remat written into the model by hand.

The whole table, at larger sizes, is in results/remat_by_hand_jax_*.json; here the same cases at a size for every run.
"""

from __future__ import annotations

import functools

import pytest

from benchmarks.models import Case, llama, nnx_scanned, unet
from benchmarks.remat_by_hand import measure, ratios
from tests.target_step import needs_compiler

MOST_BYTES, MOST_FLOPS = 1.10, 1.05
CASES = {
    "llama": functools.partial(llama, batch=8, length=256, layers=4),
    "nnx_scanned": functools.partial(nnx_scanned, batch=8, length=256),
    "nnx_scanned_small": functools.partial(nnx_scanned, batch=4, length=128),
    "unet": functools.partial(unet, batch=8, size=32, channels=(32, 64)),
}


def case_of(name: str) -> Case:
    return CASES[name]()


def assert_as_good_as_by_hand(case: Case, target: str) -> None:
    row = measure(case, target, with_plain=False)
    memory, work = ratios(row)
    assert memory <= MOST_BYTES, row
    assert work <= MOST_FLOPS, row


@pytest.mark.core
def test_scanned_layers_on_the_attached_cpu() -> None:
    row = measure(case_of("nnx_scanned"), "cpu")
    assert max(*ratios(row)) <= MOST_FLOPS, row
    assert row["ours"]["temp_bytes"] < 0.5 * row["none"]["temp_bytes"], row


@pytest.mark.targets
@pytest.mark.recorded
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("target", "name"),
    # For a v5e the unrolled models take minutes to compile, and larger arrays twice as long; they are in the result file.
    [*(("h100_sxm", name) for name in ("llama", "nnx_scanned", "unet")), ("v5e:2x2", "nnx_scanned_small")],
)
def test_on_hardware_that_is_not_there(name: str, target: str) -> None:
    needs_compiler(target)
    assert_as_good_as_by_hand(case_of(name), target)
