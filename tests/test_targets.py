"""The real compilers of hardware that is not there: their figures are a direct compile's, their refusals are answers."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.compiles import CompileBudget, CompileQueue, Compiler
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.request import budget_for
from jaxmem_callbacks.programs.targets.compile import compile_for_target
from jaxmem_callbacks.programs.targets.compilers import compiler_versions, options_without_device, target_folders
from jaxmem_callbacks.programs.targets.worker import worker_environment
from jaxmem_callbacks.records.errors import CompileError, TargetError
from tests import forked
from tests.target_step import (
    ARGS,
    BATCH,
    GIB,
    HIDDEN,
    LAYERS,
    PARAM_BYTES,
    WIDTH,
    block,
    mesh_of,
    needs_compiler,
    shape,
    train_step,
)

pytestmark = pytest.mark.targets

TARGETS = {"v5e:1x1": "tpu", "h100_sxm": "cuda"}


@pytest.fixture(scope="module", params=sorted(TARGETS))
def compiled(request):
    """The train step compiled for each target, with what makes its peak."""
    target = needs_compiler(request.param)
    return compile_for_target(train_step, ARGS, target=target, donate_argnums=(0, 1), want_buffers=True)


DIRECT = """
import json, sys
sys.path.extend(json.loads(sys.argv[1]))
sys.path.insert(0, sys.argv[2])
import jax
from jax.experimental import topologies
platform, topology, config = json.loads(sys.argv[3])
options = {"target_config": config, "topology": topology} if config else {"chips_per_host_bounds": [1, 1, 1]}
devices = topologies.get_topology_desc(platform=platform, topology_name="" if config else topology, **options).devices
import target_step as t
one = jax.sharding.SingleDeviceSharding(devices[0])
args = jax.tree.map(lambda leaf: t.shape(*leaf.shape, sharding=one), t.ARGS)
dumps = {"xla_dump_to": sys.argv[5], "xla_dump_hlo_as_text": True}
made = jax.jit(t.train_step, donate_argnums=(0, 1)).lower(*args).compile(compiler_options=json.loads(sys.argv[4]) | dumps)
stats = made.memory_analysis()
names = ("argument", "output", "alias", "temp")
total = getattr(stats, "total_allocation_bytes", None) or None
print(json.dumps([*(getattr(stats, name + "_size_in_bytes") for name in names), total]))
"""


def test_a_targets_bytes_are_those_of_a_direct_compile(compiled, tmp_path):
    target = compiled.target
    facts = json.dumps([target.platform, target.topology, target.target_config])
    command = [sys.executable, "-c", DIRECT, json.dumps(target_folders()), str(pathlib.Path(__file__).parent), facts]
    answer = forked.run(
        [*command, json.dumps(dict(compiled.compiler_options)), str(tmp_path)],
        env=worker_environment("v5litepod-4") | {"JAX_ENABLE_X64": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    memory = compiled.memory
    *figures, temporary, total = json.loads(answer.stdout.splitlines()[-1])
    assert figures == [memory.argument_bytes, memory.output_bytes, memory.alias_bytes]
    assert total == memory.total_bytes
    if target.platform != "tpu":
        assert temporary == memory.temp_bytes
        return
    # Of a TPU what is allocated; the statistics of older compilers tell more than that, of newer ones a little more.
    (assignment,) = tmp_path.glob("*after_optimizations-buffer-assignment.txt")
    (allocated,) = re.findall(r"size (\d+),(?: page \d+,)? preallocated-temp", assignment.read_text("utf-8"))
    assert memory.temp_bytes == int(allocated) <= temporary
    if total is not None:
        assert memory.argument_bytes + memory.temp_bytes == pytest.approx(total, rel=1e-4)


def test_a_target_tells_names_platform_compiler_and_options(compiled):
    platform = TARGETS[compiled.target.name]
    assert compiled.memory.name == "train_step"
    assert (compiled.memory.platform, compiled.memory.target) == (
        {"cuda": "gpu"}.get(platform, platform),
        compiled.target.name,
    )
    assert compiled.compiler == compiler_versions(platform)
    assert compiled.compiler_options == options_without_device(platform)
    assert (compiled.compiler_options.get("xla_gpu_enable_triton_gemm") is False) == (platform == "cuda")
    assert compiled.fits is True
    assert compiled.needed_bytes == compiled.memory.step_bytes < compiled.limit_bytes
    assert compiled.compile_seconds > 0
    assert compiled.memory.compiler_remat == 0


def test_an_argument_that_is_never_read_costs_nothing(compiled):
    assert 2 * PARAM_BYTES <= compiled.memory.argument_bytes < 2 * PARAM_BYTES + 4096 * 4096 * 4
    assert compiled.memory.alias_bytes == 2 * PARAM_BYTES
    assert [compiled.paths[i] for i in compiled.kept] == [
        "params['down']",
        "params['up']",
        "momentum['down']",
        "momentum['up']",
        "x",
    ]


def test_the_hlo_reads_as_if_compiled_directly(compiled):
    assert compiled.hlo_text.startswith("HloModule jit_train_step")
    assert 'op_name="jit(train_step)/' in compiled.hlo_text
    assert "call_exported" not in compiled.hlo_text
    assert "target_step.py" in compiled.hlo_text


def test_what_makes_the_peak_adds_up_and_points_at_the_users_lines(compiled):
    temporaries = [buffer for buffer in compiled.buffers if buffer.kind == "temporary"]
    told = sum(buffer.bytes for buffer in temporaries)
    gap = sum(buffer.bytes for buffer in compiled.buffers if buffer.kind == "gap")
    assert told + gap == compiled.memory.temp_bytes
    assert told >= 0.9 * compiled.memory.temp_bytes
    line = block.__code__.co_firstlineno + 2
    largest = [buffer for buffer in temporaries if buffer.bytes >= LAYERS * BATCH * HIDDEN * 2]
    assert largest
    for buffer in largest:
        assert buffer.source.endswith(f"target_step.py:{line}"), buffer
        assert "/mlp/" in buffer.operation, buffer
    assert {"params['up']", "momentum['down']"} <= {b.operation for b in compiled.buffers if b.kind == "argument"}


def test_the_peaks_groups_are_the_known_bytes_on_every_target(compiled):
    peak = compiled.peak
    assert peak.bytes == sum(group.bytes for group in peak.groups)
    assert peak.bytes == compiled.memory.step_bytes
    assert peak.bytes_of("parameters") == peak.bytes_of("optimizer state") == PARAM_BYTES
    assert peak.bytes_of("gradients") == pytest.approx(PARAM_BYTES, rel=0.001)
    assert peak.bytes_of("batch") == BATCH * WIDTH * 4
    assert peak.bytes_of("unknown") <= (1e-4 * peak.bytes if compiled.target.platform == "tpu" else 0)
    # By the trace: gelu keeps five arrays of the hidden width, the layer one of its own. A TPU keeps some in bfloat16.
    kept = LAYERS * BATCH * (5 * HIDDEN + WIDTH) * 4
    least = 0.45 if compiled.target.platform == "tpu" else 0.999
    # On jax 0.10 a GPU's compiler holds one array of the hidden width more.
    more = jax.__version_info__ < (0, 11) and compiled.target.platform == "cuda"
    most = kept + more * LAYERS * BATCH * HIDDEN * 4
    assert least * kept <= peak.bytes_of("saved activations") <= 1.001 * most
    assert peak.moment.startswith("jit(train_step)/transpose(jvp")


@pytest.mark.parametrize(("name", "abstract"), [("v5e:2x2", True), ("h100_sxm:4", True), ("h100_sxm:4", False)])
def test_several_devices_share_what_is_sharded(name, abstract):
    needs_compiler(name)
    rows = NamedSharding(mesh_of(4, abstract=abstract), PartitionSpec("data"))
    everywhere = NamedSharding(mesh_of(4, abstract=abstract), PartitionSpec())
    args = (shape(WIDTH, WIDTH, sharding=everywhere), shape(4 * WIDTH, WIDTH, sharding=rows))

    def step(w, x):
        return w - jax.grad(lambda w: ((x @ w) ** 2).mean())(w), x * 2

    result = compile_for_target(step, args, target=name, donate_argnums=0, out_shardings=(everywhere, rows))
    assert result.memory.argument_bytes == 2 * WIDTH * WIDTH * 4
    assert result.memory.output_bytes == pytest.approx(2 * WIDTH * WIDTH * 4, abs=2048)
    assert result.memory.alias_bytes == WIDTH * WIDTH * 4
    assert "all-reduce" in result.hlo_text
    told = rf"are sharded over 4 devices, the target has 1\. Name a larger one, such as '{name}'\."
    with pytest.raises(TargetError, match=told):
        compile_for_target(step, args, target=name.partition(":")[0])


def test_cards_of_each_generation_compile_for_their_own_memory():
    """Those whose figures are not XLA's own: Turing, Ampere, Ada and Blackwell cards."""
    needs_compiler("t4")
    needs = {}
    for name, memory_gib in (("t4", 14.6), ("rtx3090", 23.7), ("l4", 22.0), ("rtx5090", 31.4)):
        result = compile_for_target(train_step, ARGS, target=name, donate_argnums=(0, 1), keep_hlo=False)
        assert result.fits
        assert result.target.memory_bytes == pytest.approx(memory_gib * GIB, rel=0.01)
        needs[name] = result.needed_bytes
    assert needs["l4"] == pytest.approx(needs["rtx3090"], rel=0.05)
    assert needs["t4"] >= 0.95 * needs["l4"]


def test_a_tpu_that_is_too_small_is_an_answer():
    needs_compiler("v5e")
    result = compile_for_target(lambda x: x + 1, (shape(5 * GIB),), target="v5e", donate_argnums=())
    assert result.fits is False
    assert result.memory is None
    assert result.needed_bytes == 40 * GIB
    assert result.limit_bytes == int(15.75 * GIB) == result.target.memory_bytes
    assert "Ran out of memory on HBM" in result.refusal


def test_a_gpu_that_is_too_small_is_compared(monkeypatch):
    needs_compiler("h100_sxm")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true --xla_gpu_autotune_level=0")
    result = compile_for_target(lambda x: x + 1, (shape(20 * GIB),), target="h100_sxm")
    assert result.fits is False
    assert result.needed_bytes == result.memory.step_bytes >= 160 * GIB
    assert result.compiler_options == {}  # the user has said what they want


def test_a_search_for_kernels_that_nothing_can_time_changes_no_bytes(monkeypatch):
    needs_compiler("h100_sxm")

    def step(kernel, weights, images):
        def loss(kernel, weights):
            features = jax.lax.conv(images, kernel, (1, 1), "SAME").reshape(len(images), -1)
            return (jax.nn.softmax(features @ weights) ** 2).mean()

        return jax.grad(loss, argnums=(0, 1))(kernel, weights)

    args, found = (shape(32, 16, 3, 3), shape(32 * 16 * 16, 64), shape(64, 16, 16, 16)), []
    for flags in ("", "--xla_gpu_autotune_level=4"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        found.append(compile_for_target(step, args, target="h100_sxm"))
    assert found[0].memory == found[1].memory
    assert "xla_gpu_autotune_level" not in found[1].compiler_options


def test_keys_offload_and_static_arguments_reach_the_compiler():
    needs_compiler("h100_sxm")
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    @functools.partial(jax.checkpoint, policy=policy)
    def body(x, _):
        return jnp.sin(jnp.sin(x @ x) @ x), None

    def step(key, unread_key, x, layers):
        del unread_key
        noise = jax.random.normal(key, x.shape)
        return jax.grad(lambda x: jax.lax.scan(body, x + noise, None, length=layers)[0].sum())(x)

    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    result = compile_for_target(step, (key, key, shape(WIDTH, WIDTH), 4), target="h100_sxm", static_argnums=3)
    assert result.memory.argument_bytes == 8 + WIDTH * WIDTH * 4
    assert result.host_temp_bytes >= 2 * 4 * WIDTH * WIDTH * 4  # two products a layer


def test_a_kernel_that_the_target_does_not_have_is_the_compilers_own_refusal():
    needs_compiler("h100_sxm")

    def step(x):
        return jax.ffi.ffi_call("jaxmem_no_such_kernel", x)(x)

    with pytest.raises(
        CompileError, match=r"step for h100_sxm: the compiler refused the program(?s:.*)jaxmem_no_such_kernel"
    ):
        compile_for_target(step, (shape(8, 8),), target="h100_sxm")


@pytest.mark.parametrize(("name", "size"), [("h100_sxm", 256), ("v5e:1x1", 4096)])  # a TPU pads to a tile
def test_the_users_process_sees_nothing_of_the_compilers(name, size):
    needs_compiler(name)
    code = (
        "import os, sys\n"
        "import jax, jax.numpy as jnp\n"
        "def seen(): return {name for name in sys.modules if 'cuda12' in name or name.startswith('libtpu')}\n"
        "jax.devices(); before = dict(os.environ), list(sys.path), seen()\n"
        "from jaxmem_callbacks.programs.targets.compile import compile_for_target\n"
        "x = jax.ShapeDtypeStruct((8, 8), jnp.float32)\n"
        f"assert compile_for_target(lambda x: x @ x, (x,), target='{name}').memory.argument_bytes == {size}\n"
        "assert (dict(os.environ), list(sys.path), seen()) == before\n"
    )
    command = [sys.executable, "-c", code]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": worker_environment("")["PYTHONPATH"]}
    answer = forked.run(command, env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout == ""
    ours = [
        line for line in answer.stderr.splitlines() if "cudart_stub" not in line and "absl::InitializeLog" not in line
    ]
    assert ours == []  # those two lines are what an older plugin beside JAX prints by itself


# Each worker notes when it begins and ends. It begins when another has started too, and alone after a while.
NOTING = """
import atexit, json, pathlib, sys, time
if "--with-caller" in sys.orig_argv:
    note = pathlib.Path(__file__).parent / "notes" / f"{time.monotonic_ns()}.json"
    note.touch()
    while len(list(note.parent.iterdir())) < 2 and time.monotonic_ns() < int(note.stem) + 60 * 10**9:
        time.sleep(0.02)
    begun = time.monotonic_ns()
    atexit.register(lambda: note.write_text(json.dumps([begun, time.monotonic_ns()])))
"""


def test_a_plan_compiles_two_policies_at_the_same_time(tmp_path, monkeypatch):
    target = needs_compiler("h100_sxm")
    (tmp_path / "sitecustomize.py").write_text(NOTING)
    (tmp_path / "notes").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("JAXMEM_CACHE_DIR", "off")

    def step(w, x):
        return w - jm.grad(lambda w: (jnp.tanh(jnp.tanh(x @ w) @ w) ** 2).mean())(w)

    args = shape(32, 32), shape(64, 32)
    problem = Problem(train_step=step, args=args, kwargs={}, target=target, budget=budget_for(None, target))
    compiler = Compiler(problem)
    queue = CompileQueue(budget=CompileBudget(2))
    found = queue.compile([(compiler, jm.StepPolicy()), (compiler, jm.StepPolicy(remat="full"))])
    assert all(each.step_bytes > 0 for each in found)
    (first_begun, first_ended), (second_begun, second_ended) = (
        json.loads(note.read_text()) for note in (tmp_path / "notes").iterdir()
    )
    assert max(first_begun, second_begun) < min(first_ended, second_ended)


@pytest.mark.targets
def test_sizes_by_argument_say_that_a_tpu_pads_them():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 3), (128, 64))]

    def step(w, x):
        return w - jm.grad(lambda w: (x @ w).mean())(w)

    told = {}
    for target in ("v5e", "h100_sxm"):
        needs_compiler(target)
        memory = jm.step_memory(step, *shapes, target=target)
        told[target] = " ".join(str(memory).split())
        elements = sum(row.bytes for row in memory.arguments)
        assert (memory.program.argument_bytes > elements) == (target == "v5e")
    words = "Sizes by argument are those of the elements, 32.8 KiB; a TPU's tiles pad them to 34.0 KiB, as in the figures above."
    assert words in told["v5e"]
    assert "tiles" not in told["h100_sxm"]
