"""Lines about how a GPU's memory is taken, pasted as `jaxmem oom` prints them and put to the test in the simulated allocator."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.recovery.texts.explain import tries, why
from jaxmem_callbacks.recovery.texts.log import read_oom_log
from tests.pasting import pasted

AGAIN = """
import json, sys
import jaxmem_callbacks as jm
done = {line}
run = jm.simulate_allocator({trace!r}, done.preset, device_memory={memory!r})
print(json.dumps([run.survived, "jax" in sys.modules]))
"""


def log_of(timeline: jm.Timeline) -> str:
    """What XLA's allocator logs of a failure in the simulated one."""
    failure, pool = timeline.failure, timeline.points[-1].pool_bytes
    assert failure is not None
    assert pool is not None
    limit = int(timeline.settings.device_bytes * timeline.settings.fraction)
    used = limit - failure.free_bytes  # the simulator counts what the pool may still grow by as free
    return (
        f"W Allocator (GPU_0_bfc) ran out of memory trying to allocate {failure.asked_bytes}\n"
        f"I Total bytes in pool: {pool} memory_limit_: {limit} available bytes: {limit - pool}\n"
        f"I Stats: \nLimit: {limit}\nInUse: {used}\n"
    )


@pytest.mark.parametrize(
    ("trace", "memory", "cause", "preset"),
    [
        ("train_and_evaluate", "15GiB", "growth", "gpu_preallocate"),
        ("train_and_evaluate", "14GiB", "growth", "gpu_async"),
        ("losses_in_a_list", "14GiB", "growth", "gpu_async"),
        ("variable_lengths", "15GiB", "fragmentation", "gpu_async"),
    ],
)
def test_a_run_that_its_pool_ended_goes_on_as_printed(trace, memory, cause, preset):
    ended = jm.simulate_allocator(trace, "gpu_growth", device_memory=memory)
    assert not ended.survived
    found = read_oom_log([log_of(ended)])
    assert found is not None
    assert why(found)[0] == cause
    (printed,) = [line for _, line in tries(found) if preset in line]
    line = pasted("memory.environment", printed)
    kept = {name: text for name, text in os.environ.items() if not name.startswith("XLA_")}
    done = subprocess.run(
        [sys.executable, "-c", AGAIN.format(line=line, trace=trace, memory=memory)],
        env=kept | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, False]
