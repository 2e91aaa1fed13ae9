"""What a step needs is one figure, the sum of the compiler's own, under whatever flags move its memory about."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.reading.buffer_assignment import assigned_bytes
from jaxmem_callbacks.programs.targets.compile import compile_for_target
from jaxmem_callbacks.programs.targets.compilers import options_without_device, target_folders
from jaxmem_callbacks.programs.targets.worker import worker_environment
from tests import forked
from tests.target_step import ARGS, needs_compiler, train_step

CPU_FLAGS = {
    "xla_multiheap_size_constraint_per_heap": 2_000_000,
    "xla_cpu_enable_concurrency_optimized_scheduler": True,
    "xla_cpu_copy_insertion_use_region_analysis": True,
    "xla_cpu_enable_fast_math": True,
}
GPU_FLAGS = {
    "xla_gpu_temp_buffer_use_separate_color": True,
    "xla_gpu_enable_nccl_user_buffers": True,
    "xla_gpu_enable_while_loop_double_buffering": True,
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_copy_insertion_use_region_analysis": True,
    "xla_multiheap_size_constraint_per_heap": 20_000_000,
}
SMALL = ({"up": jnp.ones((6, 64, 256)), "down": jnp.ones((6, 256, 64))}, jnp.ones((256, 64)))


def step(params, x):
    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x))


def loss(params, x):
    for up, down in zip(params["up"], params["down"], strict=True):
        x = x + jax.nn.gelu(x @ up) @ down
    return (x**2).mean()


def parts(stats):
    names = ("argument", "output", "temp")
    return sum(getattr(stats, f"{name}_size_in_bytes") for name in names) - stats.alias_size_in_bytes


@pytest.mark.core
@pytest.mark.parametrize("flag", CPU_FLAGS)
def test_an_option_of_the_compile_here_leaves_one_figure(flag):
    jitted = jax.jit(step, donate_argnums=0, compiler_options={flag: CPU_FLAGS[flag]})
    memory = jm.step_memory(jitted, *SMALL)
    assert memory.step_bytes == parts(jitted.lower(*SMALL).compile().memory_analysis()) + memory.constant_bytes
    assert memory.step_bytes == memory.peak().bytes
    assert memory.program.disagreements == ()


@pytest.mark.core
def test_flags_of_the_process_leave_one_figure():
    code = (
        "import jax, jaxmem_callbacks as jm\n"
        "from tests.test_memory_flags import SMALL, parts, step\n"
        "memory = jm.step_memory(jax.jit(step), *SMALL)\n"
        "assert memory.step_bytes == parts(jax.jit(step).lower(*SMALL).compile().memory_analysis()) + memory.constant_bytes\n"
        "assert not memory.warnings or 'own total' not in str(memory.warnings)\n"
    )
    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in CPU_FLAGS.items())
    root = str(pathlib.Path(__file__).parent.parent)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": root, "XLA_FLAGS": flags}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


DIRECT = """
import json, sys
folders, root, facts, flags, base = map(json.loads, sys.argv[1:])
sys.path.extend(folders)
sys.path.insert(0, root)
import jax
from jax.experimental import topologies
platform, topology, config = facts
devices = topologies.get_topology_desc(platform=platform, topology_name="", target_config=config, topology=topology).devices
from tests.target_step import ARGS, shape, train_step
from tests.test_memory_flags import parts
one = jax.sharding.SingleDeviceSharding(devices[0])
args = jax.tree.map(lambda leaf: shape(*leaf.shape, sharding=one), ARGS)
lowered = jax.jit(train_step, donate_argnums=(0, 1)).lower(*args)
print(json.dumps([parts(lowered.compile(compiler_options=base | each).memory_analysis()) for each in flags]))
"""


@pytest.mark.targets
def test_a_gpu_that_is_not_there_is_given_the_sum_under_every_flag(monkeypatch):
    target = needs_compiler("h100_sxm")
    each = [{name: value} for name, value in GPU_FLAGS.items()]
    root = str(pathlib.Path(__file__).parent.parent)
    facts = [target.platform, target.topology, target.target_config]
    given = [json.dumps(x) for x in (target_folders(), root, facts, each, options_without_device(target.platform))]
    answer = forked.run(
        [sys.executable, "-c", DIRECT, *given],
        env=worker_environment("") | {"JAX_ENABLE_X64": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = json.loads(answer.stdout.splitlines()[-1])

    def needed(**options):
        memory = compile_for_target(train_step, ARGS, target=target, donate_argnums=(0, 1), **options).memory
        return memory, memory.step_bytes - memory.constant_bytes

    assert [needed(compiler_options=flag)[1] for flag in each] == expected
    name, value = next(iter(GPU_FLAGS.items()))
    monkeypatch.setenv("XLA_FLAGS", f"--{name}={str(value).lower()}")
    memory, without_constants = needed(want_buffers=True)
    assert without_constants == pytest.approx(expected[0], abs=64)  # constants by the text, which may hold some twice
    assert memory.step_bytes == memory.assigned_bytes


@pytest.mark.core
def test_the_serialized_assignment_is_read_or_unknown():
    stats = jax.jit(step).lower(*SMALL).compile().memory_analysis()
    serialized = stats.serialized_buffer_assignment_proto
    assert assigned_bytes(serialized, "cpu") >= parts(stats)
    assert assigned_bytes(b"", "gpu") is None
    assert assigned_bytes(serialized[:-3], "cpu") is None
    assert assigned_bytes(b"\x1b", "cpu") is None


def test_colors_that_are_device_memory_count_and_others_do_not():
    def allocation(*fields):
        inner = b"".join(bytes([number * 8, value]) for number, value in fields)
        return bytes([3 * 8 + 2, len(inner)]) + inner

    serialized = b"".join(
        allocation((2, size), *more) for size, more in [(100, ()), (20, ((8, 3),)), (9, ((8, 5),)), (7, ((3, 1),))]
    )
    assert assigned_bytes(serialized, "gpu") == 120  # host memory (color 5) and stacks are no part of it
    assert assigned_bytes(serialized, "tpu") == 100
