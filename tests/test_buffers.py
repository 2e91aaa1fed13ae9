"""What makes the peak: on CPU from a real compile, and on made-up plans where the answer is known."""

import math
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem_callbacks.programs.reading.buffer_assignment import (
    dump_options,
    memory_figures,
    program_memory,
    read_allocations,
)
from jaxmem_callbacks.programs.reading.buffers import Argument, Arguments, peak_attached, read_peak
from jaxmem_callbacks.programs.reading.hlo import parse_module, recomputed, without_export_prefix
from jaxmem_callbacks.records.errors import CompileError

pytestmark = pytest.mark.core
LAYERS, BATCH, WIDTH, HIDDEN = 6, 256, 128, 512
SHAPES = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}


def block(x, p):
    with jax.named_scope("mlp"):
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None


def step(params, x):
    value, grads = jax.value_and_grad(lambda p: (jax.lax.scan(block, x, p)[0] ** 2).mean())(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.fixture(scope="module")
def lowered():
    params = {
        "up": jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), jnp.float32),
        "down": jax.ShapeDtypeStruct((LAYERS, HIDDEN, WIDTH), jnp.float32),
    }
    return jax.jit(step, donate_argnums=0).lower(params, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))


@pytest.fixture(scope="module")
def peak(lowered):
    return peak_attached(lowered)


@pytest.fixture(scope="module")
def buffers(peak):
    return peak.buffers


@pytest.fixture(scope="module")
def rematted_peak():
    def rematted(params, x):
        body = jax.checkpoint(block)
        return jax.grad(lambda p: (jax.lax.scan(body, x, p)[0] ** 2).mean())(params)

    params = {
        "up": jnp.ones((LAYERS, WIDTH, HIDDEN)),
        "down": jnp.ones((LAYERS, HIDDEN, WIDTH)),
    }
    return peak_attached(jax.jit(rematted).lower(params, jnp.ones((BATCH, WIDTH))))


def of_kind(buffers, kind):
    return [buffer for buffer in buffers if buffer.kind == kind]


def test_temporaries_and_gap_are_the_programs_temporaries(lowered, buffers):
    temp = lowered.compile().memory_analysis().temp_size_in_bytes
    told = sum(buffer.bytes for buffer in of_kind(buffers, "temporary"))
    assert told + sum(buffer.bytes for buffer in of_kind(buffers, "gap")) == temp
    assert told >= 0.95 * temp


def test_the_largest_are_the_residuals_of_the_scanned_layers(buffers):
    largest = [buffer for buffer in of_kind(buffers, "temporary") if buffer.bytes == LAYERS * BATCH * HIDDEN * 4]
    assert len(largest) >= 4
    assert buffers[: len(largest)] == tuple(largest)
    line = block.__code__.co_firstlineno + 2
    for buffer in largest:
        assert buffer.source.endswith(f"test_buffers.py:{line}")
        assert "/mlp/" in buffer.operation
        assert buffer.shape.startswith(f"f32[{LAYERS},{BATCH},{HIDDEN}]")


def test_arguments_are_told_by_their_names(buffers):
    held = {buffer.operation: buffer.bytes for buffer in of_kind(buffers, "argument")}
    assert held == {
        "params['up']": LAYERS * WIDTH * HIDDEN * 4,
        "params['down']": LAYERS * WIDTH * HIDDEN * 4,
        "x": BATCH * WIDTH * 4,
    }
    assert sum(buffer.bytes for buffer in of_kind(buffers, "output")) < 1024  # the rest reuses the donated arguments


def test_remat_takes_the_residuals_away(buffers, rematted_peak):
    stacked = LAYERS * BATCH * HIDDEN * 4
    assert not [buffer for buffer in of_kind(rematted_peak.buffers, "temporary") if buffer.bytes == stacked]
    assert [buffer for buffer in of_kind(buffers, "temporary") if buffer.bytes == stacked]


def residual_bytes():
    """What the backward pass of `step` keeps besides its parameters, by its trace."""

    def pull_back(params, x):
        return jax.vjp(lambda p: (jax.lax.scan(block, x, p)[0] ** 2).mean(), params)[1]

    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    kept = jax.tree.leaves(jax.eval_shape(pull_back, params, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)))
    return sum(math.prod(leaf.shape) * 4 for leaf in kept if leaf.shape not in {*SHAPES.values(), (BATCH, WIDTH)})


def test_groups_are_what_the_trace_says_and_add_up(lowered, peak):
    stats = lowered.compile().memory_analysis()
    whole = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert peak.bytes - peak.bytes_of("constants") == whole + stats.temp_size_in_bytes
    assert peak.bytes == sum(group.bytes for group in peak.groups)
    parameters = 2 * LAYERS * WIDTH * HIDDEN * 4
    assert peak.bytes_of("parameters") == parameters
    assert peak.bytes_of("gradients") == parameters
    assert peak.bytes_of("batch") == BATCH * WIDTH * 4
    assert peak.bytes_of("saved activations") == pytest.approx(residual_bytes(), rel=0.001)
    assert peak.bytes_of("unknown") == peak.waste_bytes == 0
    assert peak.basis == "alive at the peak"
    assert "transpose(jvp" in peak.moment
    assert "test_buffers.py:" in peak.moment


def test_full_remat_saves_the_carries_and_nothing_else(peak, rematted_peak):
    assert rematted_peak.bytes_of("saved activations") == LAYERS * BATCH * WIDTH * 4
    assert peak.bytes_of("saved activations") >= 5 * LAYERS * BATCH * HIDDEN * 4


def test_no_dump_is_an_error_and_not_an_empty_answer(tmp_path):
    with pytest.raises(
        CompileError, match=r"wrote no '\*after_optimizations-live-range\.txt', so what makes the peak is unknown"
    ):
        read_allocations(tmp_path)
    (tmp_path / "m.cpu_after_optimizations-buffer-assignment.txt").write_text("BufferAssignment: in another form\n")
    with pytest.raises(CompileError, match=r"wrote no '\*after_optimizations-live-range\.txt'"):
        read_allocations(tmp_path)
    (tmp_path / "m.cpu_after_optimizations-live-range.txt").write_text("")
    with pytest.raises(CompileError, match=r"has an unknown form\. Expected 'allocation N: size"):
        read_allocations(tmp_path)


def test_a_persistent_cache_does_not_hide_the_buffers(tmp_path):
    code = (
        "import sys, jax, jax.numpy as jnp\n"
        "jax.config.update('jax_compilation_cache_dir', sys.argv[1])\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)\n"
        "jax.config.update('jax_persistent_cache_min_entry_size_bytes', 0)\n"
        "from jaxmem_callbacks.programs.reading.buffers import peak_attached\n"
        "lowered = jax.jit(lambda x: jnp.sin(x @ x) @ x).lower(jnp.ones((256, 256)))\n"
        "lowered.compile()\n"
        "assert [len(peak_attached(lowered).buffers) > 1 for _ in range(2)] == [True, True]\n"
        "import jaxmem_callbacks as jm\n"
        "plan = jm.plan(lambda x: jnp.cos(x @ x), jnp.ones((8, 8)))\n"
        "assert plan.peak is None and 'What makes its peak was not read' in str(plan)\n"
    )
    root = str(pathlib.Path(__file__).parent.parent)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": root}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
    assert any(tmp_path.iterdir())


def test_figures_of_a_platform_that_reports_none_are_an_error():
    with pytest.raises(ValueError, match=r"reports no memory figures\. Compile for 'cpu'"):
        memory_figures(types.SimpleNamespace(memory_analysis=lambda: None), "cpu")


def test_the_record_of_a_program_is_the_compilers_figures(lowered):
    compiled = lowered.compile()
    memory = program_memory(compiled, name="step", platform="cpu", target="attached")
    stats = compiled.memory_analysis()
    assert (memory.temp_bytes, memory.alias_bytes) == (stats.temp_size_in_bytes, stats.alias_size_in_bytes)
    assert memory.total_bytes == (getattr(stats, "total_allocation_bytes", 0) or None)
    assert memory.assigned_bytes == memory.parts_bytes == (memory.total_bytes or memory.parts_bytes)
    assert memory.compiler_remat == 0


# --- made-up plans ---------------------------------------------------------------------------------------------------


def write_plan(folder, values, size, kind="preallocated-temp", color=""):
    """Dumps of a program with one allocation; values are (name, offset, bytes, first, last)."""
    folder.mkdir(exist_ok=True)
    lines = [f"allocation 0: size {size}, {color}page 0, {kind}:"]
    lines += [
        f" value: <{i} {v[0]} @0> (size={v[2]},offset={v[1]}): f32[{v[2] // 4}]{{0}}" for i, v in enumerate(values)
    ]
    (folder / "m.cpu_after_optimizations-buffer-assignment.txt").write_text(
        "\n".join(["BufferAssignment:", *lines, ""])
    )
    ranges = "\n".join(f"    {name}{{}}:{first}-{last}" for name, _, _, first, last in values)
    (folder / "m.cpu_after_optimizations-live-range.txt").write_text(
        f"  BufferLiveRange:\n{ranges}\n  Live ranges at 0 (peak):\n"
    )
    (folder / "m.cpu_after_optimizations.txt").write_text("HloModule m\n\n\n")


def test_the_peak_is_the_moment_with_most_bytes_and_the_rest_is_a_gap(tmp_path):
    write_plan(tmp_path, [("a", 0, 400, 0, 3), ("b", 400, 100, 2, 5), ("c", 0, 200, 4, 9), ("d", 500, 40, 6, 9)], 540)
    buffers = read_peak(tmp_path, "cpu").buffers
    assert [(buffer.kind, buffer.bytes) for buffer in buffers] == [("temporary", 400), ("temporary", 100), ("gap", 40)]


def test_of_several_programs_the_largest_is_told(tmp_path):
    values = [(f"v{i}", 4 * i, 4, 0, 3) for i in range(9)]
    write_plan(tmp_path, values, 36)
    for file in list(tmp_path.iterdir()):
        file.rename(file.with_name("b" + file.name))
    write_plan(tmp_path, [("tuned", 0, 400, 0, 3)], 400)
    (tmp_path / "m.cpu_after_optimizations.txt").write_text("HloModule a_longer_text\n" * 99)
    assert sum(buffer.bytes for buffer in read_peak(tmp_path, "gpu").buffers) == 36


def test_values_of_one_place_are_told_once(tmp_path):
    write_plan(tmp_path, [("init", 0, 400, 0, 3), ("loop", 0, 400, 3, 6), ("part", 100, 100, 3, 4)], 400)
    assert [(buffer.kind, buffer.bytes) for buffer in read_peak(tmp_path, "cpu").buffers] == [("temporary", 400)]


@pytest.mark.parametrize(("platform", "color", "told"), [("tpu", 1, 0), ("gpu", 1, 1), ("gpu", 5, 0), ("cpu", 0, 1)])
def test_on_chip_and_host_memory_are_not_device_memory(tmp_path, platform, color, told):
    write_plan(tmp_path, [("a", 0, 400, 0, 3)], 400, color=f"color {color}, " if color else "")
    assert len(read_peak(tmp_path, platform).buffers) == told


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("parameter 0, shape |f32[100]| at ShapeIndex {}", "argument"),
        ("parameter 0, shape |f32[100]| at ShapeIndex {}, maybe-live-out", "argument"),
        ("maybe-live-out", "output"),
        ("constant", "constant"),
    ],
)
def test_kinds_of_allocations(tmp_path, kind, told):
    write_plan(tmp_path, [("a", 0, 400, 0, 3)], 400, kind=kind)
    named = Arguments(by_number={0: Argument(path="params['w']", kind="parameters")})
    (buffer,) = read_peak(tmp_path, "cpu", named).buffers
    assert (buffer.kind, buffer.bytes) == (told, 400)
    assert buffer.operation == ("params['w']" if told == "argument" else None)


def test_a_donated_arguments_memory_is_told_as_the_argument_and_not_as_what_is_lent_it(tmp_path):
    """A small value that is there later, and is told first, once made the rest of the argument look like padding."""
    values = [("lent", 0, 16, 4, 5), ("w", 0, 400, 0, 3), ("updated", 0, 400, 6, 9)]
    write_plan(tmp_path, values, 400, kind="parameter 0, shape |f32[100]| at ShapeIndex {}, maybe-live-out")
    (buffer,) = read_peak(tmp_path, "cpu").buffers
    assert (buffer.shape, buffer.unpadded_bytes, buffer.waste_bytes) == ("f32[100]{0}", 400, 0)


plans = st.lists(st.tuples(st.integers(1, 64), st.integers(0, 20), st.integers(0, 10)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(plan=plans, room=st.integers(0, 50))
def test_what_is_told_fills_the_allocation_and_no_moment_holds_more(tmp_path_factory, plan, room):
    values, offset = [], 0
    for number, (size, first, length) in enumerate(plan):
        values.append((f"v{number}", offset, size * 4, first, first + length))
        offset += size * 4
    folder = tmp_path_factory.mktemp("plan")
    write_plan(folder, values, offset + room)
    buffers = read_peak(folder, "cpu").buffers
    told = sum(buffer.bytes for buffer in of_kind(buffers, "temporary"))
    assert sum(buffer.bytes for buffer in buffers) == offset + room
    assert told == max(sum(v[2] for v in values if v[3] <= moment <= v[4]) for moment in range(32))


# --- HLO text --------------------------------------------------------------------------------------------------------

HLO = """HloModule jit_step, is_scheduled=true

FileNames
1 "/lib/python3.12/site-packages/flax/linear.py"
2 "model.py"
3 "<frozen runpy>"

FunctionNames
1 "call"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=31 end_line=31 column=1 end_column=2}
3 {file_name_id=3 function_name_id=1 line=88 end_line=88 column=1 end_column=2}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}
3 {file_location_id=1 parent_frame_id=1}
4 {file_location_id=3 parent_frame_id=1}


%fused (p0: f32[4,8], p1: f32[8]) -> f32[4,8] {
  %p0 = f32[4,8]{1,0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  %bitcast.1 = f32[1,8]{1,0} bitcast(%p1)
  ROOT %dus = f32[4,8]{1,0} dynamic-update-slice(%p0, %bitcast.1), metadata={op_name="jit(f)/dynamic_update_slice"}
}

ENTRY %main (a: f32[4,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0), metadata={op_name="params[\\'w\\']"}
  %tanh.2.remat = f32[8]{0} tanh(%a), metadata={op_name="jit(step)/call_exported/jit(step)/Block_0/tanh" stack_frame_id=2}
  %dot.remat2 = (f32[8]{0:T(8,128)S(1)}, s32[]) dot(%a, %a), metadata={op_name="jit(step)/dot" stack_frame_id=3}
  %lost = f32[8]{0} negate(%a), metadata={op_name="jit(step)/call_exported" stack_frame_id=4}
  ROOT %fusion = f32[4,8]{1,0} fusion(%a, %tanh.2.remat), kind=kLoop, calls=%fused
}
"""


def test_source_lines_are_the_users_own():
    module = parse_module(HLO)
    found = module.instructions
    assert found["tanh.2.remat"].source == "model.py:31"  # past the library that it was called through
    assert found["dot.remat2"].source == "/lib/python3.12/site-packages/flax/linear.py:7"  # nothing better
    assert found["lost"].source is None
    assert found["dot.remat2"].opcode == "dot"
    assert found["dot.remat2"].operands == ("a", "a")


def test_parents_are_found_whichever_way_frames_are_numbered():
    plain = HLO.replace("parent_frame_id=1}", "parent_frame_id=0}").replace("parent_frame_id=2}", "parent_frame_id=1}")
    assert parse_module(plain).instructions["tanh.2.remat"].source == "model.py:31"


def test_names_read_as_if_there_had_been_no_export():
    module = parse_module(HLO)
    assert module.instructions["tanh.2.remat"].op_name == "jit(step)/Block_0/tanh"
    assert module.instructions["lost"].op_name is None
    assert module.instructions["a"].op_name == "params['w']"
    assert "call_exported" not in without_export_prefix(HLO)


def test_a_stacked_value_is_followed_to_what_was_stacked():
    module = parse_module(HLO)
    assert module.origin("fusion").name == "tanh.2.remat"
    assert module.writes_slice("fusion")
    assert not module.writes_slice("dot.remat2")
    assert module.origin("no such instruction") is None


def test_the_compilers_own_recomputation_is_counted():
    assert len(recomputed(parse_module(HLO))) == 2
    assert recomputed(parse_module(None)) == []


def test_dump_options_are_options_of_one_compile(tmp_path):
    whole = {"xla_dump_hlo_module_re": ".*", "xla_dump_max_hlo_modules": -1}
    assert dump_options(tmp_path) == {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True, **whole}
