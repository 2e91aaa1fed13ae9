"""Processes: others that tests start and end, waiting for what they do, and what this one holds already."""

from __future__ import annotations

import gc
import time

import jax
import psutil
import pytest

# Variables of a process that compiles for the CPU. Its machine code is not optimised, as in the tests' own process, whose time
# goes into compiles: what is computed, kept and told is decided before. All processes of tests have them (tests/conftest.py) but
# those in which rounding decides. A compiler of absent hardware has no variable of JAX.
UNOPTIMISED = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
OPTIMISED = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
# Older emitters of XLA's CPU compiler, which jaxlib has until 0.10, and no parts compiled side by side: a step of a test takes a
# fifth of the time to compile. The buffers stay as they are (tests/test_plan_models.py).
EMITTED_QUICKLY = {
    "XLA_FLAGS": "--xla_cpu_parallel_codegen_split_count=1"
    + " --xla_cpu_use_fusion_emitters=false" * (jax.__version_info__ < (0, 11))
}


def kept_compiles(folder):
    """Variables of processes that compile the same programs: each is compiled once, and read from the folder then."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def alive(process):
    """Whether a process still does anything; what is left of one whose parent died may wait for ever to be looked at."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition, *, seconds=60.0):
    """The condition's first true value; a failure where it has none in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail("it did not happen in time")


def bytes_of_others():
    """Bytes of the arrays that are alive before a test makes its own: constants of other test files in this process."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())
