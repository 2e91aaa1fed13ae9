"""What a replay is given: the batch from ``batch_at`` or the buffer, and what steps take besides always from the buffer."""

from __future__ import annotations

import numpy as np
import pytest

from jaxmem_callbacks.records.errors import RecoveryError
from jaxmem_callbacks.recovery.ladder.replay import Batches

pytestmark = pytest.mark.core
MIB = 2**20


def kept(batch_at, most=MIB):
    said = []
    batches = Batches(batch_at, most, said.append)
    batches.begin(10)
    return batches, said


def test_what_a_step_takes_besides_the_batch_is_kept_also_where_batch_at_gives_the_batch():
    batches, said = kept(lambda step: f"batch {step}")
    scale, never = np.float32([2.0]), object()
    batches.keep(10, (never, scale))
    batches.keep(11, (never,))
    scale[0] = 3.0  # the owner goes on with its memory
    batch, again = batches.of(10)
    assert (batch, float(again[0])) == ("batch 10", 2.0)
    assert batches.of(11) == ("batch 11",)
    assert batches.of(12) == ("batch 12",)
    assert batches.bytes == 4
    assert said == []
    batches.begin(12)
    assert (batches.bytes, batches.of(12)) == (0, ("batch 12",))


def test_without_batch_at_all_of_it_is_kept():
    batches, _ = kept(None)
    batches.keep(10, (np.arange(3), 7))
    batch, number = batches.of(10)
    np.testing.assert_array_equal(batch, np.arange(3))
    assert number == 7


@pytest.mark.parametrize(
    ("batch_at", "inputs", "what"),
    [
        (None, (np.ones(MIB, np.uint8),), r"batches of up to 1\.0 MiB.*Give jm\.Recovery\(\.\.\., batch_at=\.\.\.\)"),
        (
            str,
            ("a batch", np.ones(MIB, np.uint8)),
            r"inputs besides the batch of up to 1\.0 MiB.*Let batch_at give these too",
        ),
    ],
)
def test_what_the_buffer_let_go_of_is_told_at_once_and_refused_later(batch_at, inputs, what):
    batches, said = kept(batch_at, MIB + 10)
    batches.keep(10, inputs)
    batches.keep(11, inputs)
    assert len(said) == 1
    with pytest.raises(RecoveryError, match=rf"step 10 cannot be repeated: .*{what}"):
        batches.of(10)
    assert len(batches.of(11)) == len(inputs)
