"""The worker that compiles for absent hardware, what cannot be carried to it, and the attached CPU as a target."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmem_callbacks.programs.targets.compile import compile_for_target, refused_for_memory
from jaxmem_callbacks.programs.targets.exporting import export_program, flatten_program, sharding_text
from jaxmem_callbacks.programs.targets.worker import end_workers, run_worker, time_limit_s, worker_environment
from jaxmem_callbacks.records.errors import CompileError, TargetError
from tests.processes import alive, until
from tests.target_step import ARGS, GIB, PARAM_BYTES, mesh_of, shape, train_step

pytestmark = pytest.mark.core


# The worker, without any compiler.


def test_the_worker_gets_the_users_compiler_flags_but_not_their_jax_settings(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    monkeypatch.setenv("JAX_DISABLE_JIT", "1")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "bogus")
    monkeypatch.setenv("TEST_TMPDIR", "bogus")
    given = worker_environment("v5litepod-4")
    assert given["XLA_FLAGS"] == "--xla_gpu_enable_triton_gemm=true"
    assert given["JAX_PLATFORMS"] == "cpu"
    assert given["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    assert given["CUDA_VISIBLE_DEVICES"] == "", "no accelerator of this machine is taken"
    assert (given["TPU_SKIP_MDS_QUERY"], given["TPU_WORKER_HOSTNAMES"]) == ("1", "localhost"), "no cloud is asked"
    assert not {"JAX_DISABLE_JIT", "XLA_PYTHON_CLIENT_ALLOCATOR", "TEST_TMPDIR"} & set(given)


def test_a_worker_that_crashes_is_an_error_with_the_end_of_its_output(tmp_path):
    with pytest.raises(
        CompileError, match=r"step for v5e: the worker .* crashed \(exit code 1\).*(?s:.*)request\.json"
    ):
        run_worker(tmp_path, name="step for v5e", accelerator_type="", timeout_s=60)


def test_the_time_limit_is_the_variables_or_ten_minutes(monkeypatch):
    monkeypatch.delenv("JAXMEM_COMPILE_TIMEOUT_S", raising=False)
    assert time_limit_s() == 600
    monkeypatch.setenv("JAXMEM_COMPILE_TIMEOUT_S", "1800.5")
    assert time_limit_s() == 1800.5
    for wrong in ("soon", "0", "-1", "nan", "inf"):
        monkeypatch.setenv("JAXMEM_COMPILE_TIMEOUT_S", wrong)
        with pytest.raises(
            TargetError, match=rf"S='{wrong}': expected seconds above 0\. Type for example: export JAXMEM_COM"
        ):
            time_limit_s()


def test_a_worker_that_takes_too_long_is_ended(tmp_path):
    os.mkfifo(tmp_path / "request.json")  # nobody writes, so the worker waits for ever
    with pytest.raises(
        CompileError,
        match=r"step for v5e: the compiler was ended after 0\.5 s\. Give it longer: export JAXMEM_COMPILE_TIMEOUT_S=1\.5 \(",
    ):
        run_worker(tmp_path, name="step for v5e", accelerator_type="", timeout_s=0.5)
    assert not [
        child for child in psutil.Process().children(recursive=True) if "worker_main" in " ".join(child.cmdline())
    ]


def workers(folder):
    """Processes that were started for a folder, of this process and of its children."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if str(folder) in " ".join(process.cmdline())]


@pytest.fixture
def hanging(tmp_path):
    """A worker that waits for ever, what its caller gets in the end, and the thread that the caller is."""
    os.mkfifo(tmp_path / "request.json")
    got = []

    def call():
        try:
            run_worker(tmp_path, name="step for v5e", accelerator_type="", timeout_s=60)
        except CompileError as error:
            got.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    yield until(lambda: workers(tmp_path))[0], got, thread
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("sent", "advice"),
    [
        (signal.SIGKILL, r"This library did not end it; a system that runs out of memory does\. Close other programs"),
        (signal.SIGSEGV, r"The fault is in the compiler\. Install another version of it as in docs/targets\.md"),
    ],
)
def test_a_worker_that_a_signal_ends_is_an_error_that_names_it(hanging, sent, advice):
    process, got, thread = hanging
    process.send_signal(sent)
    thread.join(20)
    message = rf"step for v5e: the worker .* crashed \(signal {sent.name}\), your own process is unharmed\. {advice}"
    with pytest.raises(CompileError, match=message):
        raise got[0]


def test_workers_of_other_threads_can_be_ended(hanging):
    process, got, thread = hanging
    assert until(end_workers) == 1  # the process is there a moment before its caller knows it
    thread.join(20)
    assert not process.is_running()
    with pytest.raises(
        CompileError,
        match=r"step for v5e: the compile was ended on request \(.*end_workers\), before .* Type the same call again",
    ):
        raise got[0]
    assert end_workers() == 0


GARBAGE = """
import os, sys
if "--with-caller" in sys.orig_argv:
    folder = sys.orig_argv[-2]
    print("a stray line")
    if {answer!r}:
        open(os.path.join(folder, "answer.json"), "w").write({answer!r})
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", r"No such file"),
        ("{garbage", r"Expecting property name"),
        ('{"figures": 1, "kept": [], "warnings": []}', r"is neither figures nor a refusal"),
        ('{"figures": {}, "kept": [], "warnings": []}', r"there are figures, and no program"),
    ],
)
def test_an_answer_that_cannot_be_read_is_an_error(tmp_path, monkeypatch, answer, reason):
    (tmp_path / "sitecustomize.py").write_text(GARBAGE.format(answer=answer))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        CompileError, match=rf"step for v5e: the worker .* its answer cannot be read: .*{reason}(?s:.*)a stray line"
    ):
        run_worker(tmp_path, name="step for v5e", accelerator_type="", timeout_s=60)


# A worker that has a temporary file and a process of its own, as compilers do, and hangs. It stands in for no compiler: none is
# reached.
HANGING = """
import subprocess, sys, tempfile, time
if "--with-caller" in sys.orig_argv:
    tempfile.mkstemp()
    subprocess.Popen(["sleep", "60"])
    time.sleep(60)
"""
CALLER = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background has it ignored
import jax, jax.numpy as jnp
from jaxmem_callbacks.programs.targets.compile import compile_for_target
from jaxmem_callbacks.programs.targets.target import resolve_target
x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
compile_for_target(lambda x: x @ x, (x,), target=resolve_target('h100_sxm', require_installed=False))
"""


def family(caller):
    """The processes of a caller whose worker has started one of its own."""
    found = psutil.Process(caller.pid).children(recursive=True)
    return found if len(found) > 1 else None


def test_ctrl_c_ends_the_worker_at_once_and_leaves_nothing(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HANGING)
    places = tmp_path / "places"
    places.mkdir()
    path = os.pathsep.join([worker_environment("")["PYTHONPATH"], str(tmp_path)])
    # Without the cache: an answer that another test of this run was given would need no worker.
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "TMPDIR": str(places), "JAXMEM_CACHE_DIR": "off"}
    environment = os.environ | own
    with subprocess.Popen([sys.executable, "-c", CALLER], env=environment, stderr=subprocess.PIPE, text=True) as caller:
        started = until(lambda: family(caller), seconds=60)
        (place,) = places.iterdir()  # the worker's temporary file is in the folder too
        assert place.name.startswith("jaxmem-")
        before = time.monotonic()
        caller.send_signal(signal.SIGINT)
        errors = caller.communicate(timeout=20)[1]
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert time.monotonic() - before < 10
    assert not [process for process in started if alive(process)]
    assert list(places.iterdir()) == []


KILLED = """
import pathlib, sys
from jaxmem_callbacks.programs.targets.worker import run_worker
run_worker(pathlib.Path(sys.argv[1]), name="step", accelerator_type="", timeout_s=60)
"""


def test_a_worker_does_not_outlive_a_caller_that_is_killed(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    os.mkfifo(place / "request.json")
    environment = os.environ | {"PYTHONPATH": worker_environment("")["PYTHONPATH"]}
    with subprocess.Popen([sys.executable, "-c", KILLED, str(place)], env=environment) as caller:
        worker = until(lambda: psutil.Process(caller.pid).children())[0]
        caller.kill()
    until(lambda: not alive(worker))
    assert not place.exists()


def test_a_refusal_for_memory_is_read_and_other_refusals_are_errors():
    printed = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (29.24G) exceeds available HBM (15.75G)."
    )
    assert refused_for_memory("x", printed) == (round(29.24 * GIB), round(15.75 * GIB))
    older = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 21.1G of 15.5G hbm."
    assert refused_for_memory("x", older) == (round(21.1 * GIB), round(15.5 * GIB))
    assert refused_for_memory("x", "RESOURCE_EXHAUSTED: no figures") == (None, None)
    with pytest.raises(
        CompileError,
        match=r"step for h100: the compiler refused .*Expected .*leave it out or replace it: docs/targets(?s:.*)No such",
    ):
        refused_for_memory("step for h100", "INVALID_ARGUMENT: No such operation: 'x'")
    with pytest.raises(CompileError, match=r"step for h100: its compiler has no option 'x'\. .*Expected an option"):
        refused_for_memory("step for h100", "INVALID_ARGUMENT: No such compile option: 'x'")


# What cannot leave the process.


def exported(function, *args, platform="cuda", **options):
    return export_program(flatten_program(function, args, {}, **options), platform)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            jax.jit(lambda x: jax.pure_callback(np.sin, x, x)),
            r"cannot be compiled for an absent cuda: it takes values from Python \(pure_callback\).*arrays of the same shapes",
        ),
        (lambda x: io_callback(np.sin, x, x), r"it takes values from Python \(io_callback\)"),
        (
            lambda x: jax.lax.scan(lambda c, r: (c, io_callback(np.sin, r, r, ordered=True)), x[0], x),
            r"it takes values from Python \(io_callback\)",
        ),
        (
            lambda x: jax.nn.dot_product_attention(
                *[x[None, :, None].astype(jnp.bfloat16)] * 3, implementation="cudnn"
            ),
            r"it asks for a cuDNN kernel.*implementation='xla'",
        ),
    ],
)
def test_what_cannot_be_carried_is_refused_with_what_to_do(function, message):
    with pytest.raises(CompileError, match=message):
        exported(function, shape(8, 8))


def test_a_sharding_without_names_is_refused():
    class Scattered:
        memory_kind = None

    with pytest.raises(
        CompileError, match=r"cannot be carried to another device\. Expected jax\.sharding\.NamedSharding"
    ):
        sharding_text(Scattered())


def test_errors_of_the_users_own_function_pass_unchanged():
    with pytest.raises(ZeroDivisionError):
        exported(lambda x: x / (1 // 0), shape(2))


def test_arguments_are_split_into_arrays_and_the_rest():
    def step(state, x, *, activation, scale, config):
        return activation(x @ state["w"]) * scale + len(config)

    flat = flatten_program(
        step,
        ({"w": np.ones((2, 3), np.float32), "name": "mine"}, shape(4, 2)),
        {"activation": jnp.tanh, "scale": 2.0, "config": (1, 2)},
        donate_argnames=("state",),
        static_argnames=("config",),
    )
    assert flat.paths == ("state['w']", "x", "scale")
    assert flat.donated == (0,)
    assert [leaf.weak_type for leaf in flat.leaves] == [False, False, True]
    assert [leaf.shape for leaf in jax.eval_shape(flat.function, *flat.leaves)] == [(4, 3)]


# The attached CPU.


def test_the_cpu_target_gives_the_figures_of_a_direct_compile():
    result = compile_for_target(train_step, ARGS, target="cpu", donate_argnums=(0, 1), keep_hlo=False)
    direct = jax.jit(train_step, donate_argnums=(0, 1)).lower(*ARGS).compile().memory_analysis()
    assert result.memory.temp_bytes == direct.temp_size_in_bytes
    assert result.memory.alias_bytes == direct.alias_size_in_bytes == 2 * PARAM_BYTES
    assert result.memory.argument_bytes == direct.argument_size_in_bytes
    assert (result.fits, result.limit_bytes, result.hlo_text) == (None, None, None)


def test_shardings_of_arguments_and_results_hold_on_the_cpu_target():
    split = NamedSharding(mesh_of(4), PartitionSpec("data"))
    result = compile_for_target(
        lambda x: (x * 2, x.sum()),
        (shape(64, 16, sharding=split),),
        target="cpu",
        out_shardings=(split, None),
        donate_argnums=0,
    )
    assert result.memory.argument_bytes == result.memory.alias_bytes == 64 * 16 * 4 // 4


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_bare_specs_mean_the_set_mesh(kind):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones((64, 16), np.float32), PartitionSpec("data"))
        flat = flatten_program(lambda x: x * 2, (x,), {}, out_shardings=PartitionSpec("data"))
        portable = export_program(flat, "cuda")
    expected = {"axes": [["data", 4]], "spec": ["data"], "memory_kind": None}
    assert portable.out_shardings == (expected,)
    assert portable.shardings[0]["axes"] == [["data", 4]]
    assert portable.device_count == 4


def test_a_donation_that_cannot_be_used_is_reported():
    result = compile_for_target(lambda x: x.sum(), (shape(8, 8),), target="cpu", donate_argnums=0)
    assert any("donated buffers were not usable" in warning for warning in result.warnings)
