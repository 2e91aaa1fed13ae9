"""Which exceptions are taken for a failure for want of memory, where only limits or vague words could tell."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.reading.hlo import library_bytes, parse_module
from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.records.oom import MemoryLimit, OomFacts
from jaxmem_callbacks.recovery import failure
from jaxmem_callbacks.recovery.failure import failing_program, oom_failure
from jaxmem_callbacks.recovery.reporting import summarize

pytestmark = pytest.mark.core
MIB = 2**20
OPERATION_FAILED = "INTERNAL: YNNPACK operation failed: error"


def refuse(_):
    msg = "my data is wrong"
    raise ValueError(msg)


@jax.jit
def fails_in_a_callback(x):
    wide = jnp.sort(x @ x.T, axis=0)
    told = jax.pure_callback(refuse, jax.ShapeDtypeStruct((), jnp.float32), wide[0, 0])
    return jnp.sort(wide * told, axis=1).sum()


def caught(function, *args):
    with pytest.raises(Exception) as found:  # noqa: PT011 - JAX raises one of two types, by its version
        jax.block_until_ready(function(*args))
    return found.value


def leave(monkeypatch, size):
    """So many bytes are left of a control group."""
    limit = MemoryLimit(name="control group", limit_bytes=2**32, used_bytes=2**32 - size, source="")
    monkeypatch.setattr(failure, "host_limits", lambda: (limit,))


def test_an_error_of_the_users_callback_is_none_however_little_is_left(monkeypatch):
    error = caught(fails_in_a_callback, jnp.ones((1024, 64)))
    leave(monkeypatch, 1)
    assert oom_failure(error) is None
    assert "my data is wrong" in str(error)
    failed = jax.errors.JaxRuntimeError(f"INTERNAL: CpuCallback error calling callback: {error}")
    assert oom_failure(failed) is None
    assert oom_failure(jax.errors.JaxRuntimeError(OPERATION_FAILED)) is not None


def test_an_error_of_the_users_callback_that_names_one_in_passing_is_none():
    def refuse(value):
        del value
        msg = "bad shard 7; the node log has CUDA_ERROR_OUT_OF_MEMORY"
        raise ValueError(msg)

    step = jax.jit(lambda x: jax.pure_callback(refuse, jax.ShapeDtypeStruct((), jnp.float32), x))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        step(jnp.float32(1)).block_until_ready()
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(caught.value)
    assert oom_failure(caught.value) is None


def test_a_librarys_results_are_counted_once(monkeypatch):
    @jax.jit
    def one_product_that_is_sorted(x):
        return jnp.sort(x @ x.T, axis=1).sum()

    x, program = jnp.ones((4096, 64)), one_product_that_is_sorted
    compiled = program.lower(x).compile()
    program(x).block_until_ready()
    assert 63 * MIB < compiled.memory_analysis().temp_size_in_bytes < 66 * MIB
    assert library_bytes(parse_module(compiled.as_text())) == 0
    leave(monkeypatch, 104 * MIB)  # enough for the temporaries, and not for twice as many
    verdict = oom_failure(jax.errors.JaxRuntimeError(OPERATION_FAILED))
    assert verdict is None or program.__name__ not in verdict.evidence


MANY, FEW = 1000, 700  # rows, whose squares no other test's program is likely to take


@pytest.fixture(scope="module")
def compiled_twice():
    """A step that was compiled for many rows, then for few."""

    def sums_sorted_products(state, batch):  # the name of no other program
        return state + jnp.sort(batch @ batch.T, axis=0).sum(), {}

    step = jm.jit_step(sums_sorted_products, donate_argnames=())
    for rows in (MANY, FEW):
        step(jnp.float32(0), np.ones((rows, 8)))  # of 64 bits, of which JAX takes 32
    return step


def test_what_a_failed_call_needs_is_told_of_its_own_compile(compiled_twice):
    gone = jnp.float32(0)
    gone.delete()
    for rows in (FEW, MANY):
        failing = failing_program(caught(compiled_twice, gone, np.ones((rows, 8))), OomFacts())
        assert (failing.memory.argument_bytes, failing.is_call, failing.proved) == (rows * 8 * 4 + 4, True, True)
        assert failing.known_by == "the exception passed through its call"


def test_a_program_that_only_its_size_tells_is_the_probable_one(compiled_twice):
    small = registry.of(compiled_twice)[1]
    asked = small.memory.temp_bytes
    assert 4 * FEW**2 <= asked < 4 * MANY**2
    error = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: Out of memory allocating {asked} bytes.")
    verdict = oom_failure(error)
    assert verdict.program.step is compiled_twice
    assert verdict.program.memory.temp_bytes == asked, "of two compiles the one that is as large"
    assert verdict.program.known_by == "probably this one: what it takes is as large as what was asked for"
    assert summarize(verdict, []).sentence.startswith(f"Probably the program {compiled_twice.name} asked for ")
    named = failing_program(error, OomFacts(program=f"jit_{compiled_twice.name}", requested_bytes=asked))
    assert (named.proved, named.known_by) == (True, "the exception names it")
    assert named.memory.temp_bytes == asked


def test_a_program_of_plain_jit_is_found_by_its_size_behind_many_newer_ones():
    @jax.jit
    def sorts_many_rows(batch):
        return jnp.sort(batch @ batch.T, axis=0).sum()

    compiled = sorts_many_rows.lower(jnp.ones((2 * MANY, 8))).compile()
    small = [jax.jit(lambda x, n=n: x * n).lower(1.0).compile() for n in range(20)]
    asked = compiled.memory_analysis().temp_size_in_bytes
    for text in (f"Out of memory allocating {asked} bytes.", "Out of memory while jit_sorts_many_rows ran."):
        facts = OomFacts(program="jit_sorts_many_rows" if "ran" in text else None, requested_bytes=asked)
        found = failing_program(jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {text}"), facts)
        assert (found.name, found.memory.temp_bytes) == ("jit_sorts_many_rows", asked)
    del small


def test_a_compile_is_that_of_its_step_where_another_has_its_name(compiled_twice):
    other = jm.jit_step(compiled_twice.__wrapped__, donate_argnames=())
    other(jnp.float32(0), np.ones((FEW // 2, 8)))
    for step, asked in ((compiled_twice, registry.of(compiled_twice)[1]), (other, registry.of(other)[0])):
        size = asked.memory.temp_bytes
        error = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: Out of memory allocating {size} bytes.")
        assert oom_failure(error).program.step is step
        named = failing_program(error, OomFacts(program=f"jit_{step.name}", requested_bytes=size))
        assert (named.step is step, named.memory.temp_bytes, named.proved) == (True, size, False)


ADVICE = "bad data file; note: if you see CUDA_ERROR_OUT_OF_MEMORY, lower the batch"
NAMED = "the file says CUDA_ERROR_OUT_OF_MEMORY at row 3"


@pytest.mark.parametrize(
    "error",
    [
        ValueError(ADVICE),
        RuntimeError(ADVICE),
        jax.errors.JaxRuntimeError(f"INVALID_ARGUMENT: {ADVICE}"),
        ValueError(NAMED),
        KeyError("hipErrorOutOfMemory"),
        TypeError("expected a number, got 'MemoryError'"),
    ],
    ids=str,
)
def test_words_about_memory_in_an_error_of_the_users_are_none(error):
    assert oom_failure(error) is None
    outer = ValueError("the epoch ended")
    outer.__cause__ = error
    assert oom_failure(outer) is None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        OSError("Cannot allocate memory"),
        MemoryError("no words that anybody knows"),
        jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
        ValueError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes."),
    ],
    ids=str,
)
def test_words_of_a_runtime_are_one_also_where_another_error_was_raised_from_them(error):
    assert oom_failure(error) is not None
    outer = ValueError("the epoch ended")
    outer.__cause__ = error
    verdict = oom_failure(outer)
    assert verdict is not None
    assert verdict.error is error
