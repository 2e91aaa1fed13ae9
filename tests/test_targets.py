"""Hardware that is not there: its names, the worker that compiles for it, and that its figures are a direct compile's."""

import functools
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmem_callbacks.programs.targets.compile import compile_for_target
from jaxmem_callbacks.programs.targets.compilers import compiler_versions, require_compiler, target_folders
from jaxmem_callbacks.programs.targets.exporting import export_program, flatten_program, sharding_text
from jaxmem_callbacks.programs.targets.refusals import refused_for_memory
from jaxmem_callbacks.programs.targets.target import resolve_target, target_names
from jaxmem_callbacks.programs.targets.worker import run_worker, worker_environment
from jaxmem_callbacks.records.errors import CompileError, TargetError

GIB = 2**30
LAYERS, BATCH, WIDTH, HIDDEN = 6, 2048, 256, 1024
TARGETS = {"v5e:1x1": "tpu", "h100_sxm": "cuda"}


def shape(*sizes, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def block(x, p):
    with jax.named_scope("mlp"):
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None


def loss(params, x):
    return (jax.lax.scan(block, x, params)[0] ** 2).mean()


def train_step(params, momentum, x, unused):
    del unused
    value, grads = jax.value_and_grad(loss)(params, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, value


PARAMS = {"up": shape(LAYERS, WIDTH, HIDDEN), "down": shape(LAYERS, HIDDEN, WIDTH)}
ARGS = (PARAMS, PARAMS, shape(BATCH, WIDTH), shape(4096, 4096))
PARAM_BYTES = 2 * LAYERS * WIDTH * HIDDEN * 4


def needs_compiler(name):
    """Skip, and say so, where the target's compiler is not installed; fail where the machine is meant to have it."""
    try:
        return resolve_target(name)
    except TargetError:
        target = resolve_target(name, require_installed=False)
        package = {"tpu": "libtpu", "cuda": "jax-cuda12-plugin"}[target.platform]
        message = f"targets: {target.name.partition(':')[0]} not proved ({package} for this JAX is not installed)"
        if os.environ.get("JAXMEM_REQUIRE_TARGETS"):
            pytest.fail(message)
        pytest.skip(message)


@pytest.fixture(scope="module", params=sorted(TARGETS))
def compiled(request):
    """The train step compiled for each target, with what makes its peak."""
    target = needs_compiler(request.param)
    return compile_for_target(train_step, ARGS, target=target, donate_argnums=(0, 1), want_buffers=True)


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("text", "name", "devices", "topology"),
    [
        ("v5e", "v5e:1x1", 1, "v5e:1x1"),
        ("v5e:2x2", "v5e:2x2", 4, "v5e:2x2"),
        ("V5LITEPOD:4x4", "v5e:4x4", 16, "v5e:4x4"),
        ("v4:2x2x1", "v4:2x2x1", 4, "v4:2x2x1"),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 8, "tpu7x:2x2x1"),
        ("v3", "v3:2x2", 8, "v3:2x2"),
        ("trillium", "v6e:1x1", 1, "v6e:1x1"),
        ("h100", "h100_sxm", 1, "1x1x1"),
        ("H100-SXM:8", "h100_sxm:8", 8, "1x1x8"),
        ("a100_sxm_80:64", "a100_sxm_80:64", 64, "1x8x8"),
        ("cpu", "cpu", 1, ""),
    ],
)
def test_names_resolve_to_one_spelling(text, name, devices, topology):
    target = resolve_target(text, require_installed=False)
    assert (target.name, target.device_count, target.topology) == (name, devices, topology)


@pytest.mark.core
def test_every_name_resolves_and_knows_its_memory():
    for name in target_names():
        target = resolve_target(name, require_installed=False)
        assert target.name.partition(":")[0] == name
        assert name == "cpu" or 7 * GIB < target.memory_bytes < 300 * GIB
        assert (target.target_config is not None) == (target.platform == "cuda")
    assert (
        'device_description_str: "NVIDIA H100 80GB HBM3"'
        in resolve_target("h100", require_installed=False).target_config
    )


@pytest.mark.core
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10", r"Unknown target 'h10'\. Did you mean `h100`\? Expected one of: v2, .*h200.*'v5e:2x2' or 'h100_sxm:8'"),
        ("cpu:8", r"Unknown target 'cpu:8'"),
        ("v5e:2x2x1", r"'v5e:2x2x1': a v5e topology has 2 dimensions of chips\. Type for example 'v5e:2x2'"),
        ("v5p:2", r"a v5p topology has 3 dimensions of chips\. Type for example 'v5p:2x2x2'"),
        ("h100:12", r"'h100:12': expected a number of GPUs, at most 8 or a multiple of it .*'h100_sxm:8'"),
        ("h100:many", r"expected a number of GPUs"),
        ("h100:0", r"expected a number of GPUs"),
    ],
)
def test_wrong_names_say_what_to_type(text, message):
    with pytest.raises(TargetError, match=message):
        resolve_target(text, require_installed=False)


@pytest.mark.core
@pytest.mark.parametrize(
    ("platform", "line"),
    [
        (
            "tpu",
            r"not installed\. Type: pip install \"jaxmem_callbacks\[tpu-targets\]\" \(or, .* pip install --target \S+ libtpu\)$",
        ),
        (
            "cuda",
            r"Type: pip install --no-deps jax-cuda12-plugin==(\S+) jax-cuda12-pjrt==\1 \(no CUDA libraries needed.*$",
        ),
    ],
)
def test_a_missing_compiler_is_one_line_to_type(tmp_path, platform, line):
    assert compiler_versions(platform, [str(tmp_path)]) == {}
    with pytest.raises(TargetError, match=line) as caught:
        require_compiler(platform, "x", [str(tmp_path)])
    assert "\n" not in str(caught.value)


@pytest.mark.core
def test_a_plugin_of_another_jax_is_refused_and_of_this_one_accepted(tmp_path):
    def install(version):
        for package in ("jax_cuda12_plugin", "jax_cuda12_pjrt"):
            folder = tmp_path / f"{version}" / f"{package}-{version}.dist-info"
            folder.mkdir(parents=True)
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        return [str(tmp_path / version)]

    with pytest.raises(
        TargetError, match=r"jax-cuda12-plugin 0\.1\.2, .* does not belong to jax \d+.*Type: pip install"
    ):
        require_compiler("cuda", "h100_sxm", install("0.1.2"))
    require_compiler("cuda", "h100_sxm", install(importlib.metadata.version("jax")))


@pytest.mark.core
def test_the_folder_for_compilers_is_the_variables_or_the_caches(tmp_path, monkeypatch):
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = tmp_path / "jaxmem_callbacks" / "targets" / f"jax-{importlib.metadata.version('jax')}-{python}"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAXMEM_TARGET_PATH", raising=False)
    assert target_folders() == [str(folder)]
    monkeypatch.setenv("JAXMEM_TARGET_PATH", os.pathsep.join([str(tmp_path), str(tmp_path / "absent")]))
    assert target_folders() == [str(tmp_path)]


# --- the worker, without any compiler --------------------------------------------------------------------------------


@pytest.mark.core
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


@pytest.mark.core
def test_a_worker_that_crashes_is_an_error_with_the_end_of_its_output(tmp_path):
    with pytest.raises(
        CompileError, match=r"step for v5e: the worker .* crashed \(exit code 1\).*(?s:.*)request\.json"
    ):
        run_worker(tmp_path, name="step for v5e", accelerator_type="", timeout_s=60)


@pytest.mark.core
def test_a_worker_that_takes_too_long_is_ended(tmp_path):
    os.mkfifo(tmp_path / "request.json")  # nobody writes, so the worker waits for ever
    with pytest.raises(
        CompileError, match=r"step for v5e: the compiler was ended after 0\.5 s\. Pass a larger timeout_s="
    ):
        run_worker(tmp_path, name="step for v5e", accelerator_type="", timeout_s=0.5)
    assert not [
        child for child in psutil.Process().children(recursive=True) if "worker_main" in " ".join(child.cmdline())
    ]


@pytest.mark.core
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


# --- what cannot leave the process -----------------------------------------------------------------------------------


def exported(function, *args, platform="cuda", **options):
    return export_program(flatten_program(function, args, {}, **options), platform)


def printing(x):
    jax.debug.print("{}", x[0])
    return x


@pytest.mark.core
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


@pytest.mark.core
def test_a_sharding_without_names_is_refused():
    class Scattered:
        memory_kind = None

    with pytest.raises(
        CompileError, match=r"cannot be carried to another device\. Expected jax\.sharding\.NamedSharding"
    ):
        sharding_text(Scattered())


@pytest.mark.core
def test_errors_of_the_users_own_function_pass_unchanged():
    with pytest.raises(ZeroDivisionError):
        exported(lambda x: x / (1 // 0), shape(2))


@pytest.mark.core
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


# --- the attached CPU ------------------------------------------------------------------------------------------------


@pytest.mark.core
def test_the_cpu_target_gives_the_figures_of_a_direct_compile():
    result = compile_for_target(train_step, ARGS, target="cpu", donate_argnums=(0, 1), keep_hlo=False)
    direct = jax.jit(train_step, donate_argnums=(0, 1)).lower(*ARGS).compile().memory_analysis()
    assert result.memory.temp_bytes == direct.temp_size_in_bytes
    assert result.memory.alias_bytes == direct.alias_size_in_bytes == 2 * PARAM_BYTES
    assert result.memory.argument_bytes == direct.argument_size_in_bytes
    assert (result.fits, result.limit_bytes, result.hlo_text) == (None, None, None)


@pytest.mark.core
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


@pytest.mark.core
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


@pytest.mark.core
def test_a_donation_that_cannot_be_used_is_reported():
    result = compile_for_target(lambda x: x.sum(), (shape(8, 8),), target="cpu", donate_argnums=0)
    assert any("donated buffers were not usable" in warning for warning in result.warnings)


# --- the real compilers of absent hardware ---------------------------------------------------------------------------

DIRECT = """
import json, sys
sys.path.extend(json.loads(sys.argv[1]))
sys.path.insert(0, sys.argv[2])
import jax
from jax.experimental import topologies
platform, topology, config = json.loads(sys.argv[3])
options = {"target_config": config, "topology": topology} if config else {}
devices = topologies.get_topology_desc(platform=platform, topology_name="" if config else topology, **options).devices
import test_targets as t
one = jax.sharding.SingleDeviceSharding(devices[0])
args = jax.tree.map(lambda leaf: t.shape(*leaf.shape, sharding=one), t.ARGS)
made = jax.jit(t.train_step, donate_argnums=(0, 1)).lower(*args).compile(compiler_options=json.loads(sys.argv[4]))
stats = made.memory_analysis()
names = ("argument", "output", "alias", "temp")
print(json.dumps([getattr(stats, name + "_size_in_bytes") for name in names]))
"""


@pytest.mark.targets
def test_a_targets_bytes_are_those_of_a_direct_compile(compiled):
    target = compiled.target
    facts = json.dumps([target.platform, target.topology, target.target_config])
    command = [sys.executable, "-c", DIRECT, json.dumps(target_folders()), str(pathlib.Path(__file__).parent), facts]
    answer = subprocess.run(
        [*command, json.dumps(dict(compiled.compiler_options))],
        env=worker_environment("v5litepod-4") | {"JAX_ENABLE_X64": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    memory = compiled.memory
    figures = [memory.argument_bytes, memory.output_bytes, memory.alias_bytes, memory.temp_bytes]
    assert figures == json.loads(answer.stdout.splitlines()[-1])


@pytest.mark.targets
def test_a_target_tells_names_platform_compiler_and_options(compiled):
    platform = TARGETS[compiled.target.name]
    assert compiled.memory.name == "train_step"
    assert (compiled.memory.platform, compiled.memory.target) == (
        {"cuda": "gpu"}.get(platform, platform),
        compiled.target.name,
    )
    assert compiled.compiler == compiler_versions(platform)
    assert compiled.compiler_options == ({"xla_gpu_enable_triton_gemm": False} if platform == "cuda" else {})
    assert compiled.fits is True
    assert compiled.needed_bytes == compiled.memory.step_bytes < compiled.limit_bytes
    assert compiled.compile_seconds > 0
    assert compiled.memory.compiler_remat == 0


@pytest.mark.targets
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


@pytest.mark.targets
def test_the_hlo_reads_as_if_compiled_directly(compiled):
    assert compiled.hlo_text.startswith("HloModule jit_train_step")
    assert 'op_name="jit(train_step)/' in compiled.hlo_text
    assert "call_exported" not in compiled.hlo_text
    assert "test_targets.py" in compiled.hlo_text


@pytest.mark.targets
def test_what_makes_the_peak_adds_up_and_points_at_the_users_lines(compiled):
    temporaries = [buffer for buffer in compiled.buffers if buffer.kind == "temporary"]
    told = sum(buffer.bytes for buffer in temporaries)
    gap = sum(buffer.bytes for buffer in compiled.buffers if buffer.kind == "gap")
    # A TPU adds a little room of its own to the temporaries; see docs/targets.md.
    assert told + gap == pytest.approx(compiled.memory.temp_bytes, rel=0.01)
    assert told >= 0.9 * compiled.memory.temp_bytes
    line = block.__code__.co_firstlineno + 2
    largest = [buffer for buffer in temporaries if buffer.bytes >= LAYERS * BATCH * HIDDEN * 2]
    assert largest
    for buffer in largest:
        assert buffer.source.endswith(f"test_targets.py:{line}"), buffer
        assert "/mlp/" in buffer.operation, buffer
    assert {"params['up']", "momentum['down']"} <= {b.operation for b in compiled.buffers if b.kind == "argument"}


def mesh_of(count, *, abstract=False):
    if abstract:
        return AbstractMesh((count,), ("data",), axis_types=(AxisType.Auto,))
    return Mesh(np.array(jax.devices()[:count]), ("data",))


@pytest.mark.targets
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
    with pytest.raises(TargetError, match=r"are sharded over 4 devices, the target has 1\. Name a larger one"):
        compile_for_target(step, args, target=name.partition(":")[0])


@pytest.mark.targets
def test_a_tpu_that_is_too_small_is_an_answer():
    needs_compiler("v5e")
    result = compile_for_target(lambda x: x + 1, (shape(5 * GIB),), target="v5e", donate_argnums=())
    assert result.fits is False
    assert result.memory is None
    assert result.needed_bytes == 40 * GIB
    assert result.limit_bytes == int(15.75 * GIB) == result.target.memory_bytes
    assert "CompileTimeHbmOom" in result.refusal


@pytest.mark.targets
def test_a_gpu_that_is_too_small_is_compared(monkeypatch):
    needs_compiler("h100")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    result = compile_for_target(lambda x: x + 1, (shape(20 * GIB),), target="h100")
    assert result.fits is False
    assert result.needed_bytes == result.memory.step_bytes >= 160 * GIB
    assert result.compiler_options == {}  # the user has said what they want


@pytest.mark.targets
def test_keys_offload_and_static_arguments_reach_the_compiler():
    needs_compiler("h100")
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    @functools.partial(jax.checkpoint, policy=policy)
    def body(x, _):
        return jnp.sin(jnp.sin(x @ x) @ x), None

    def step(key, unread_key, x, layers):
        del unread_key
        noise = jax.random.normal(key, x.shape)
        return jax.grad(lambda x: jax.lax.scan(body, x + noise, None, length=layers)[0].sum())(x)

    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    result = compile_for_target(step, (key, key, shape(WIDTH, WIDTH), 4), target="h100", static_argnums=3)
    assert result.memory.argument_bytes == 8 + WIDTH * WIDTH * 4
    assert result.host_temp_bytes >= 2 * 4 * WIDTH * WIDTH * 4  # two products a layer


@pytest.mark.targets
def test_a_kernel_that_the_target_does_not_have_is_the_compilers_own_refusal():
    needs_compiler("h100")

    def step(x):
        return jax.ffi.ffi_call("jaxmem_no_such_kernel", x)(x)

    with pytest.raises(
        CompileError, match=r"step for h100_sxm: the compiler refused the program(?s:.*)jaxmem_no_such_kernel"
    ):
        compile_for_target(step, (shape(8, 8),), target="h100")


@pytest.mark.targets
def test_the_users_process_sees_nothing_of_the_compilers():
    needs_compiler("h100")
    code = (
        "import os, sys\n"
        "import jax, jax.numpy as jnp\n"
        "def seen(): return {name for name in sys.modules if 'cuda12' in name or name.startswith('libtpu')}\n"
        "jax.devices(); before = dict(os.environ), list(sys.path), seen()\n"
        "from jaxmem_callbacks.programs.targets.compile import compile_for_target\n"
        "x = jax.ShapeDtypeStruct((8, 8), jnp.float32)\n"
        "assert compile_for_target(lambda x: x @ x, (x,), target='h100').memory.argument_bytes == 256\n"
        "assert (dict(os.environ), list(sys.path), seen()) == before\n"
    )
    command = [sys.executable, "-c", code]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": worker_environment("")["PYTHONPATH"]}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout == ""
    ours = [
        line for line in answer.stderr.splitlines() if "cudart_stub" not in line and "absl::InitializeLog" not in line
    ]
    assert ours == []  # those two lines are what an older plugin beside JAX prints by itself
