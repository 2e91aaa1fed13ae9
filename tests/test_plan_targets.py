"""Plans for hardware that is not there: its own compilers' bytes, nothing compiled twice, Ctrl-C gives the best so far."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.config.presets import parse_preset
from jaxmem_callbacks.readers.decoding import plan_from
from jaxmem_callbacks.records.errors import CompileError, PlanError, PolicyError
from jaxmem_callbacks.records.presets import EnvironmentSettings
from jaxmem_callbacks.records.units import format_bytes
from tests.sample_plans import sentences
from tests.target_step import needs_compiler
from tests.test_plan import DEPTH, ROWS, WIDTH, abstract, loss_fn, train_step

pytestmark = [pytest.mark.targets, pytest.mark.timeout(300)]
TARGETS = ("h100_sxm", "v5e:1x1")
ROOT = Path(__file__).parents[1]
SCRIPT = textwrap.dedent(
    """\
    import jax
    import jaxmem_callbacks as jm
    from tests.test_plan import abstract, real, train_step

    def make():
        return train_step, abstract()
    """
)


@pytest.fixture(scope="module", params=TARGETS)
def plan(request: pytest.FixtureRequest) -> jm.Plan:
    needs_compiler(request.param)
    return jm.plan(train_step, *abstract(), target=request.param)


def test_the_frontier_is_the_targets_own(plan: jm.Plan) -> None:
    assert 3 <= plan.compiles <= 8
    assert plan.record.platform in {"cuda", "tpu"}
    assert plan.record.versions.keys() > {"jax", "jaxlib"}
    assert plan.record.margin
    chosen = plan.chosen
    assert chosen.policy == jm.StepPolicy()
    assert chosen.fits is True
    assert all(each.modelled_s and each.modelled_s > 0 for each in plan.candidates)
    memory = jm.step_memory(jm.jit_step(train_step), *abstract(), target=plan.record.target)
    assert (chosen.step_bytes, chosen.temp_bytes) == (memory.step_bytes, memory.temp_bytes)


def test_what_is_written_of_it_is_the_whole_plan(plan: jm.Plan) -> None:
    assert plan_from(json.loads(plan.to_json())) == plan.record


def test_every_candidate_tells_what_makes_its_peak(plan: jm.Plan) -> None:
    for each in plan.candidates:
        assert each.peak is not None
        assert each.peak.bytes == pytest.approx(each.step_bytes, rel=0 if jax.__version__ >= "0.12" else 0.01)
    peak = plan.peak
    assert peak is not None
    assert peak.bytes_of("parameters") == DEPTH * 3 * WIDTH * 4 * WIDTH * 4
    counter = peak.bytes_of("optimizer state") - 2 * peak.bytes_of("parameters")
    assert 0 < counter <= 512  # Adam's count, which a TPU keeps in a tile of its own
    by_policy = {each.policy.remat: each.peak.bytes_of("saved activations") for each in plan.candidates if each.peak}
    carries = DEPTH * ROWS * WIDTH * 4
    assert by_policy["full"] <= 4 * carries
    if plan.record.platform == "tpu":  # which has room for all of so small a step's in its on-chip memory
        assert any(buffer.memory_space == "on-chip" for buffer in peak.elsewhere)
    else:
        assert by_policy["none"] - by_policy["full"] >= 3 * 4 * carries  # tanh, its factor and their product
    assert f"What makes its peak of {format_bytes(peak.bytes)}: " in str(plan)
    assert peak.words in sentences(plan)


def test_padding_is_what_tiles_add(plan: jm.Plan) -> None:
    assert plan.peak is not None
    told = [buffer for buffer in plan.peak.buffers if ":T(" in buffer.shape and buffer.shape[0] != "("]
    assert bool(told) == (plan.record.platform == "tpu")
    assert (plan.peak.waste_bytes > 0) == (plan.record.platform == "tpu")
    for buffer in told:
        match = re.match(r"[a-z]+(\d*)\[([\d,]*)\]\{([\d,]*):T\((?:(\d+),)?(\d+)\)", buffer.shape)
        assert match, buffer.shape
        sizes = [int(size) for size in match[2].split(",") if size]
        tile = [int(match[4] or 1), int(match[5])]
        minor = [sizes[int(axis)] for axis in match[3].split(",") if axis]  # the fastest axis first
        minor += [1] * (2 - len(minor))
        padded = [-(-minor[0] // tile[1]) * tile[1], -(-minor[1] // tile[0]) * tile[0], *minor[2:]]
        width = int(match[1] or 8) // 8
        assert buffer.bytes == max(math.prod(padded) * width, 512), buffer
        assert buffer.waste_bytes == buffer.bytes - math.prod(sizes) * width, buffer


def test_the_same_plan_compiles_nothing_twice(plan: jm.Plan) -> None:
    again = jm.plan(train_step, *abstract(), target=plan.record.target)
    assert again.record.compiled == 0
    assert again.compiles == plan.compiles
    assert [each.step_bytes for each in again.candidates] == [each.step_bytes for each in plan.candidates]
    assert "from the cache" in str(again)
    assert without_lines(again.peak) == without_lines(plan.peak)


def without_lines(peak: Any) -> Any:
    """An answer from disk has lost its source lines where the one who asks stands in another.

    Of several operations that share a buffer one with a line is told, as long as there are lines.
    """
    told = dataclasses.asdict(peak)
    told["moment"] = told["moment"].partition(" (")[0]
    return told | {
        name: [{key: value for key, value in one.items() if key not in lost} for one in told[name]]
        for name, lost in (("buffers", {"source"}), ("elsewhere", {"source", "operation"}))
    }


def test_what_a_tpus_compiler_refuses_is_placed_by_that_of_a_kind_with_more_memory() -> None:
    needs_compiler("v5e")

    def step(w: Any, x: Any) -> Any:
        return w - jm.grad(lambda w, x: (jnp.tanh(jnp.tanh(x @ w) @ w) ** 2).mean())(w, x)

    w, x = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((2**24, 256), jnp.float32)
    planned = functools.partial(jm.plan, step, target="v5e", search={"remat": False})
    plan = planned(w, x)
    chosen = plan.chosen
    assert chosen.fits is False
    assert chosen.refusal
    assert chosen.placed_by == "v5p:1x1x1"
    assert chosen.peak is not None
    assert chosen.peak.bytes == chosen.step_bytes
    there = plan.peak
    assert there is not None
    assert there is chosen.placed_elsewhere
    assert there.bytes_of("batch") == 4 * 2**32
    assert there.bytes_of("unknown") < 0.01 * there.bytes
    told = f"The compiler for v5p:1x1x1, which has room for it, places {format_bytes(there.bytes)}: {there.words}."
    assert told in sentences(plan)
    assert told in plan.policy.reason
    again = planned(w, x)
    assert again.record.compiled == 0
    assert again.compiles == plan.compiles
    fitting = planned(w, jax.ShapeDtypeStruct((2**16, 256), jnp.float32), budget="1MiB")
    assert fitting.chosen.placed_elsewhere is None, "its own compiler placed it"


def test_ctrl_c_gives_the_best_so_far(tmp_path: Path) -> None:
    needs_compiler("h100_sxm")
    program = textwrap.dedent(
        """\
        import signal
        import jaxmem_callbacks as jm
        from tests.test_plan import abstract, train_step

        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs do not have

        def told(what, done, most):
            print("done", done, flush=True)

        if __name__ == "__main__":
            plan = jm.plan(train_step, *abstract(), target="h100_sxm", progress=told)
            print(plan, flush=True)
        """
    )
    script = tmp_path / "planned.py"
    script.write_text(program)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAXMEM_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("done 2"):
                time.sleep(0.3)  # the next compiles have begun
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
    assert process.returncode == 0, rest
    assert "Interrupted: this is the best of what was compiled so far." in rest
    assert "->  none" in rest


def test_the_command_plans_saves_and_tells_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs_compiler("h100_sxm")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    least = min(each.step_bytes for each in jm.plan(train_step, *abstract(), target="h100_sxm").candidates)
    saved, picture = tmp_path / "plan.yaml", tmp_path / "plan.png"
    options = [
        "plan",
        f"{script}:make",
        "--target",
        "h100_sxm",
        "--search",
        "donate",
        "--budget",
        str(int(least * 1.2)),
    ]
    pages = tmp_path / "pages"
    assert main([*options, "--save", str(saved), "--figure", str(picture), "--logdir", str(pages)]) == 0
    out = capsys.readouterr()
    assert "Plan of train_step for h100_sxm" in out.out
    assert f'jm.load_preset("{saved}")' in out.out
    assert "\n  parameters " in out.out
    assert "by the compiler's buffer assignment" in out.out
    assert "plan: none and full (0 of at most 8 compiled)" in out.err
    assert jm.load_preset(str(saved)).policy.remat == "full"
    assert picture.stat().st_size > 10_000
    assert len(list(pages.glob("events.out.tfevents.*.plan"))) == 1
    assert main([*options[:-1], "1MiB", "--json"]) == 3
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    nearest = figures["candidates"][figures["chosen"]]
    assert nearest["fits"] is False
    told = sum(group["bytes"] for group in nearest["peak"]["groups"])
    assert told == pytest.approx(nearest["step_bytes"], rel=0 if jax.__version__ >= "0.12" else 0.01)


def test_a_budget_above_what_jax_takes_says_what_to_set_and_one_above_the_card_is_the_card() -> None:
    needs_compiler("h100_sxm")
    plan = jm.plan(train_step, *abstract(), target="h100_sxm", budget="72GiB", resident="63GiB")
    assert plan.chosen.fits is True
    assert "more than the 59.3 GiB that JAX's allocator takes of h100_sxm unless set" in sentences(plan)
    assert "Start with XLA_CLIENT_MEM_FRACTION=0.8 or more." in sentences(plan)
    preset = parse_preset(plan.to_yaml())
    assert (preset.environment, preset.policy) == (EnvironmentSettings(fraction=0.8), plan.policy)
    plan = jm.plan(train_step, *abstract(), target="h100_sxm", budget="200GiB", resident="90GiB")
    assert plan.chosen.fits is False
    assert plan.record.over_bytes == plan.chosen.need_bytes - plan.record.budget_bytes
    assert "all that h100_sxm has, which is less than the 200 GiB asked for" in sentences(plan)
    small = jm.plan(train_step, *abstract(), target="h100_sxm", budget="1GiB")
    assert "XLA_CLIENT_MEM_FRACTION" not in sentences(small)
    assert "environment" not in small.to_yaml()


def test_several_devices_without_shardings_get_one_searched() -> None:
    needs_compiler("h100_sxm")
    planned = functools.partial(jm.plan, target="h100_sxm:4", search={"remat": False})
    plan = planned(train_step, *abstract(), budget="40MiB")
    assert plan.record.mesh == {"fsdp": 4}
    assert {each.policy.sharding for each in plan.candidates} == {"replicate", "zero1", "fsdp"}
    held = {each.policy.sharding: each.argument_bytes for each in plan.candidates}
    assert held["replicate"] > held["zero1"] > held["fsdp"]
    assert "(4 devices, mesh fsdp=4)" in str(plan)
    own = planned(jm.jit_step(train_step, jm.StepPolicy(sharding="zero1")), *abstract(), budget="40MiB")
    assert [each for each in own.candidates if each.policy.sharding != "zero1"] == []
    tight = planned(train_step, *abstract(), budget=f"{held['zero1']}B")
    assert {each.policy.sharding for each in tight.candidates} <= {"zero1", "fsdp"}
    assert "replicate was not compiled: its arguments alone are" in str(tight)
    assert tight.chosen.fits is False


def mean_loss(params: Any, batch: Any) -> Any:
    return loss_fn(params, batch)


@pytest.mark.recorded
def test_an_absent_gpus_largest_batch_is_compiled_and_the_next_is_too_much() -> None:
    needs_compiler("h100_sxm")
    search = {"remat": False, "batch": {"multiple_of": 512}}
    plan = jm.plan(train_step, *abstract(), target="h100_sxm", budget="100MiB", search=search)
    rows = {each.batch_rows: each for each in plan.candidates}
    chosen = plan.chosen
    assert chosen.fits
    assert chosen.batch_rows == max(row for row, each in rows.items() if each.fits) > 2048
    assert rows[chosen.batch_rows + 512].fits is False
    params, opt_state, batch = abstract()
    larger = jax.ShapeDtypeStruct((chosen.batch_rows, batch.shape[1]), batch.dtype)
    memory = jm.step_memory(jm.jit_step(train_step), params, opt_state, larger, target="h100_sxm")
    assert memory.step_bytes == chosen.step_bytes


def test_absent_gpus_with_microbatches_matrices_split_and_an_evaluation_beside() -> None:
    needs_compiler("h100_sxm")
    params, opt_state, batch = abstract()
    plan = jm.plan(
        train_step,
        *(params, opt_state, batch),
        target="h100_sxm:4",
        budget="8MiB",
        search={"remat": False, "sharding": ["fsdp_tensor"], "microbatches": [2]},
        beside=[(mean_loss, (params, batch))],
    )
    assert plan.record.mesh == {"fsdp": 2, "tensor": 2}
    assert {each.policy.sharding for each in plan.candidates} == {"fsdp_tensor"}
    assert plan.compiles == len(plan.candidates) <= 16
    assert plan.record.beside_compiles == 1
    assert plan.policy.microbatches > 1
    assert plan.chosen.fits == (plan.chosen.need_bytes <= 8 * 2**20)
    (evaluation,) = plan.chosen.beside
    optimizer = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(opt_state))
    assert evaluation.held_bytes < 0.3 * optimizer, "its share of the optimizer's state, on each of four devices"
    assert "Whether the loss may be accumulated was not checked" in str(plan)


def test_what_cannot_be_divided_is_an_error() -> None:
    needs_compiler("h100_sxm")
    params, opt_state, batch = abstract()
    odd = jax.ShapeDtypeStruct((batch.shape[0] + 1, batch.shape[1]), batch.dtype)
    with pytest.raises(
        PlanError, match=rf"^4 devices do not divide the first dimension of batch \({batch.shape[0] + 1} rows\), and"
    ):
        jm.plan(train_step, params, opt_state, odd, target="h100_sxm:4")
    with pytest.raises(PolicyError, match=r"the axes fsdp=3 need 3 devices, and the target has 4 devices"):
        jm.plan(train_step, params, opt_state, batch, target="h100_sxm:4", mesh={"fsdp": 3})
    with pytest.raises(PlanError, match=r"mesh=\{'fsdp': 2\} says how to divide a step among several devices"):
        jm.plan(train_step, params, opt_state, batch, mesh={"fsdp": 2})
    for asked in ("fsdp", {"embed": "fsdp"}, ["fsdp", {"embed": "fsdp"}]):
        words = re.escape(f'["sharding"]={asked!r} says how to divide')
        with pytest.raises(PlanError, match=words + " .* the plan is for one device"):
            jm.plan(train_step, params, opt_state, batch, target="h100_sxm", search={"sharding": asked})


def test_absent_gpus_without_a_batch_to_divide_are_planned_with_what_divides_the_state() -> None:
    needs_compiler("h100_sxm")
    params, opt_state, batch = abstract()
    asked: dict[str, Any] = {"target": "h100_sxm:4", "budget": "1GiB", "search": {"remat": False}}

    def made_here(params: Any, opt_state: Any, key: Any) -> Any:
        return train_step(params, opt_state, jax.random.normal(key, batch.shape))

    plan = jm.plan(made_here, params, opt_state, jax.random.key(0), **asked)
    assert {each.policy.sharding for each in plan.candidates} == {"replicate", "zero1", "fsdp"}
    assert "each of the 4 devices does all of the work of a step" in str(plan)

    def all_made_here(key: Any) -> Any:
        params = {"w": jax.random.normal(key, (8, 8))}
        return jm.grad(lambda p: jnp.tanh(p["w"]).sum())(params)

    plan = jm.plan(all_made_here, jax.random.key(0), **asked)
    assert [each.policy.sharding for each in plan.candidates] == [None]
    assert (plan.record.device_count, plan.record.mesh) == (4, {"fsdp": 4})


def test_a_mesh_of_another_size_than_the_target_is_refused() -> None:
    needs_compiler("h100_sxm")
    half = AbstractMesh((4,), ("fsdp",), (AxisType.Auto,))
    for mesh, words in [
        (jm.make_mesh({"fsdp": 1}, devices=jax.devices()[:1]), "need 1 devices"),
        (half, "need 4 devices"),
        (AbstractMesh((16,), ("fsdp",)), "need 16 devices"),
    ]:
        with pytest.raises(PolicyError, match=words + r', and the target has 8 devices. Type mesh={"fsdp": 8}'):
            jm.plan(train_step, *abstract(), target="h100_sxm:8", mesh=mesh)
    *state, batch = abstract()
    there = jax.ShapeDtypeStruct(batch.shape, batch.dtype, sharding=NamedSharding(half, PartitionSpec("fsdp")))
    refused = "are on 4 devices, and the target h100_sxm:8 has 8. Name a target of 4 devices, such as 'h100_sxm:4'; "
    refused += r'.* type mesh={"fsdp": 8}'
    with pytest.raises(PlanError, match=refused):
        jm.plan(train_step, *state, there, target="h100_sxm:8")


def test_without_a_budget_too_two_levels_are_tried_where_one_does_not_fit() -> None:
    needs_compiler("h100_sxm")
    layers, width, rows = 96, 1024, 480 * 1024

    def deep_loss(weights: Any, x: Any) -> Any:
        def layer(carry: Any, w: Any) -> tuple[Any, None]:
            return carry + jnp.tanh(carry @ w), None

        return (jax.lax.scan(layer, x, weights)[0] ** 2).mean()

    def deep_step(weights: Any, x: Any) -> tuple[Any, Any]:
        value, gradient = jm.value_and_grad(deep_loss)(weights, x)
        return weights - gradient, value

    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((layers, width, width), (rows, width))]
    plan = jm.plan(deep_step, *arguments, target="h100_sxm")
    assert plan.chosen.fits is True
    assert plan.chosen.policy.levels == 2
    assert plan.compiles <= 8


@pytest.mark.parametrize("door", [jm.plan, jm.step_memory])
def test_a_kernel_of_cudnn_is_refused_with_what_to_write(door: Callable[..., Any]) -> None:
    needs_compiler("h100_sxm")

    def attention(weights: Any, x: Any) -> Any:
        heads = (x @ weights).reshape(8, 64, 4, 64).astype(jnp.bfloat16)
        return (
            (jax.nn.dot_product_attention(heads, heads, heads, implementation="cudnn") ** 2).mean().astype(jnp.float32)
        )

    def attending(weights: Any, x: Any) -> Any:
        return weights - jm.grad(attention)(weights, x)

    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 256), (512, 256))]
    with pytest.raises(CompileError, match=r"attending cannot be compiled.*a cuDNN kernel.*implementation='xla'"):
        door(attending, *arguments, target="h100_sxm")
