"""Real compilers asked twice: the second answer is the first one's, nothing is compiled, and it never stands in for another."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import psutil
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.targets.compile import compile_for_target
from jaxmem_callbacks.programs.targets.worker import worker_environment
from tests.processes import alive, until
from tests.target_step import GIB, mesh_of, needs_compiler, shape

pytestmark = pytest.mark.targets

# Asks for what its arguments say. Without an interpreter to start no worker can start: what it answers then was on disk.
SCRIPT = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
sys.path.insert(0, sys.argv[1])
import target_step as t
from jaxmem_callbacks.programs.targets.compile import compile_for_target
asked = json.loads(sys.argv[2])
if not asked.pop("worker"):
    sys.executable = "/no/such/interpreter"
answers = []
for options in asked["compiles"]:
    try:
        found = compile_for_target(t.small_step, t.SMALL_ARGS, target="h100_sxm", donate_argnums=0, **options)
        made = (found.cached, found.memory.step_bytes, found.memory.temp_bytes, found.compile_seconds, hash(found.hlo_text))
        answers.append([*made, len(found.buffers or ()), found.paths, found.kept])
    except FileNotFoundError:
        answers.append("a worker was asked for")
print(json.dumps(answers))
"""


def script(folder, *compiles, worker=True):
    environment = os.environ | {
        "PYTHONPATH": worker_environment("")["PYTHONPATH"],
        "JAXMEM_CACHE_DIR": str(folder),
        "PYTHONHASHSEED": "0",
    }
    asked = json.dumps({"worker": worker, "compiles": compiles})
    command = [sys.executable, "-c", SCRIPT, str(pathlib.Path(__file__).parent), asked]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def answers(process):
    return json.loads(process.communicate()[0].splitlines()[-1])


def test_a_second_process_compiles_nothing(tmp_path):
    needs_compiler("h100_sxm")
    with script(tmp_path, {"want_buffers": True}) as one, script(tmp_path, {"want_buffers": True}) as two:
        both = [answers(one)[0], answers(two)[0]]  # at once: each may find nothing, none may break the other's
    assert len(list(tmp_path.iterdir())) == 1
    both.sort()
    assert both[0][0] is False
    asked = [
        {"want_buffers": True},
        {},
        {"want_buffers": True, "cache": False},
        {"compiler_options": {"xla_gpu_enable_triton_gemm": True}},
    ]
    with script(tmp_path, *asked, worker=False) as second:
        again, figures, off, other = answers(second)
    assert again[0] is figures[0] is True
    assert again[1:3] == figures[1:3] == both[0][1:3]
    assert again[1:] in (both[0][1:], both[1][1:])  # to the letter, time in the compiler and program text included
    assert (again[5] > 0, figures[5]) == (True, 0)
    assert off == other == "a worker was asked for"  # so the two answers above needed none


COMPILING = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import jax, jax.numpy as jnp
from jaxmem_callbacks.programs.targets.compile import compile_for_target
def step(x, w):
    for i in range(300):  # some seconds for a TPU's compiler
        x = jnp.tanh(x @ w) * i
    return x
x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
compile_for_target(jax.grad(lambda x, w: step(x, w).sum()), (x, x), target="v5e")
"""


@pytest.mark.skipif(not psutil.LINUX, reason="reads the libraries that another process has loaded")
def test_ctrl_c_in_the_middle_of_a_real_compile_leaves_nothing(tmp_path):
    needs_compiler("v5e")
    places, compiles = tmp_path / "places", tmp_path / "compiles"
    places.mkdir()
    locks = {path: path.exists() for path in (pathlib.Path("/tmp/libtpu_lockfile"), places / "libtpu_lockfile")}  # noqa: S108
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": worker_environment("")["PYTHONPATH"],
        "JAXMEM_CACHE_DIR": str(compiles),
        "TMPDIR": str(places),
    }
    with subprocess.Popen(
        [sys.executable, "-c", COMPILING], env=environment, stderr=subprocess.PIPE, text=True
    ) as caller:
        worker = until(lambda: psutil.Process(caller.pid).children(), seconds=60)[0]
        until(lambda: any("libtpu" in library.path for library in worker.memory_maps()), seconds=60)
        time.sleep(1)
        caller.send_signal(signal.SIGINT)
        errors = caller.communicate(timeout=20)[1]
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert not alive(worker)
    assert list(places.iterdir()) == []
    assert not compiles.exists()
    assert {path: path.exists() for path in locks} == locks


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    needs_compiler("h100_sxm")
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path / "compiles"))
    return tmp_path / "compiles"


STEP = """
import jax, jax.numpy as jnp
def step(w, x):
    with jax.named_scope("block"):
        return w - jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
"""


def ask(source=STEP, *, rows=64, **options):
    names = {}
    exec(compile(source, "mine.py", "exec"), names)  # noqa: S102 - the same source in other places
    args = (shape(32, 32), shape(rows, 32))
    return compile_for_target(names["step"], args, target="h100_sxm", **{"donate_argnums": 0, **options})


def lines_of(result):
    return {buffer.source for buffer in result.buffers if buffer.source and "mine.py" in buffer.source}


def test_moved_lines_are_never_told_wrong(own_cache):
    first = ask(want_buffers=True)
    assert (first.cached, lines_of(first)) == (False, {"mine.py:5"})
    again = ask(want_buffers=True)  # another caller's line, which the program's text would tell wrong
    assert (again.cached, again.memory, again.buffers) == (True, first.memory, first.buffers)
    assert "mine.py" not in again.hlo_text
    moved = ask("# one more line\n" + STEP)
    assert (moved.cached, moved.memory) == (True, first.memory)
    assert "mine.py" in first.hlo_text
    assert "mine.py" not in moved.hlo_text
    assert "block/" in moved.hlo_text
    with_lines = ask("# one more line\n" + STEP, want_buffers=True)
    assert (with_lines.cached, with_lines.memory, lines_of(with_lines)) == (False, first.memory, {"mine.py:6"})
    assert len(list(own_cache.iterdir())) == 2


def test_another_question_is_compiled_and_a_spoilt_answer_is_replaced(own_cache):
    first = ask()
    spoilt = next(own_cache.iterdir())
    spoilt.write_bytes(spoilt.read_bytes()[:100])
    repaired, again = ask(), ask()
    assert (first.cached, repaired.cached, again.cached) == (False, False, True)
    assert repaired.memory == again.memory == first.memory
    kept, larger = ask(donate_argnums=()), ask(rows=128)
    assert (kept.cached, larger.cached) == (False, False)
    assert (kept.memory.alias_bytes, first.memory.alias_bytes) == (0, 32 * 32 * 4)
    assert larger.memory.argument_bytes == first.memory.argument_bytes + 64 * 32 * 4


def test_a_refusal_for_memory_is_kept_and_other_refusals_are_not(own_cache, monkeypatch):
    needs_compiler("v5e")

    def refused():
        return compile_for_target(lambda x: x + 1, (shape(5 * GIB),), target="v5e")

    first = refused()
    monkeypatch.setattr(sys, "executable", "/no/such/interpreter")
    again = refused()
    assert (first.cached, again.cached) == (False, True)
    assert (again.fits, again.needed_bytes, again.limit_bytes) == (False, 40 * GIB, first.limit_bytes)
    assert len(list(own_cache.iterdir())) == 1


@pytest.mark.usefixtures("own_cache")
def test_a_folder_that_cannot_be_written_costs_only_compiles(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path / "file" / "compiles"))
    assert ask().memory.argument_bytes == (32 + 64) * 32 * 4


def test_result_shardings_of_the_users_step_reach_the_target():
    needs_compiler("h100_sxm:4")
    rows = NamedSharding(mesh_of(4, abstract=True), PartitionSpec("data"))
    everywhere = NamedSharding(mesh_of(4, abstract=True), PartitionSpec())
    args = (shape(64, 64, sharding=everywhere), shape(64, 64, sharding=rows))

    def step(w, x):
        return w - (x * 1.5).sum(), x * 2

    free = jm.step_memory(jax.jit(step, donate_argnums=0), *args, target="h100_sxm:4")
    pinned = jax.jit(step, donate_argnums=0, out_shardings=(rows, None))
    split = jm.step_memory(pinned, *args, target="h100_sxm:4")
    quarter = 64 * 64 * 4 // 4
    assert free.output_bytes == pytest.approx(5 * quarter, abs=64)
    assert (free.alias_bytes, split.alias_bytes) == (4 * quarter, 0)
    assert split.output_bytes == pytest.approx(2 * quarter, abs=64)
