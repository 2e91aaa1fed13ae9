"""The worker that compiles for absent hardware, what cannot be carried to it, and the attached CPU as a target."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmem_callbacks.programs.targets.compile import compile_for_target
from jaxmem_callbacks.programs.targets.exporting import export_program, flatten_program, sharding_text
from jaxmem_callbacks.programs.targets.refusals import refused_for_memory
from jaxmem_callbacks.programs.targets.worker import run_worker, worker_environment
from jaxmem_callbacks.records.errors import CompileError
from tests.target_step import ARGS, GIB, PARAM_BYTES, mesh_of, shape, train_step

pytestmark = pytest.mark.core


# The worker, without any compiler.


def test_the_worker_gets_the_users_compiler_flags_but_not_their_jax_settings(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    monkeypatch.setenv("JAX_DISABLE_JIT", "1")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "bogus")
    given = worker_environment("v5litepod-4")
    assert given["XLA_FLAGS"] == "--xla_gpu_enable_triton_gemm=true"
    assert given["JAX_PLATFORMS"] == "cpu"
    assert given["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    assert not {"JAX_DISABLE_JIT", "XLA_PYTHON_CLIENT_ALLOCATOR"} & set(given)


def test_a_worker_that_crashes_is_an_error_with_the_end_of_its_output(tmp_path):
    with pytest.raises(
        CompileError, match=r"step for v5e: the worker .* crashed \(exit code 1\).*(?s:.*)request\.json"
    ):
        run_worker(tmp_path, name="step for v5e", accelerator_type="", timeout_s=60)


def test_a_worker_that_takes_too_long_is_ended(tmp_path):
    os.mkfifo(tmp_path / "request.json")  # nobody writes, so the worker waits for ever
    with pytest.raises(
        CompileError, match=r"step for v5e: the compiler was ended after 0\.5 s\. Pass a larger timeout_s="
    ):
        run_worker(tmp_path, name="step for v5e", accelerator_type="", timeout_s=0.5)
    assert not [
        child for child in psutil.Process().children(recursive=True) if "worker_main" in " ".join(child.cmdline())
    ]


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
        CompileError, match=r"step for h100: the compiler refused the program\.(?s:.*)No such compile option"
    ):
        refused_for_memory("step for h100", "INVALID_ARGUMENT: No such compile option: 'x'")


# What cannot leave the process.


def exported(function, *args, platform="cuda", **options):
    return export_program(flatten_program(function, args, {}, **options), platform)


def printing(x):
    jax.debug.print("{}", x[0])
    return x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            printing,
            r"printing cannot be compiled for an absent cuda: it calls back to Python \(debug_print\).*Take jax\.debug\.print",
        ),
        (jax.jit(lambda x: jax.pure_callback(np.sin, x, x)), r"calls back to Python \(pure_callback\)"),
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
