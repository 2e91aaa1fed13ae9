"""What a plan's figures rest on: modelled time, and what a compiler recomputes by itself, read from its program."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.request import budget_for
from jaxmem_callbacks.planning.step_time import Speed, modelled_seconds, speed_of, speed_of_device
from jaxmem_callbacks.programs.reading.hlo import collectives_of, parse_module, recomputed, recomputed_flops
from jaxmem_callbacks.programs.targets.compile import compile_for_target
from jaxmem_callbacks.programs.targets.target import nearest_target, resolve_target, target_names
from jaxmem_callbacks.records.errors import PlanError
from jaxmem_callbacks.transforms.costs import LINK_BYTE
from tests.target_step import needs_compiler

pytestmark = pytest.mark.core

SPEED = Speed(flops=1e12, bandwidth=1e9, link=1e9, float32_share=0.5)


def seconds(function: Any, *shapes: Any) -> float:
    return modelled_seconds(jax.make_jaxpr(function)(*shapes), SPEED)


def matrix(*sizes: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def test_a_product_takes_the_longer_of_its_work_and_its_traffic() -> None:
    large = matrix(4096, 4096)
    assert seconds(jnp.matmul, large, large) == pytest.approx(max(2 * 4096**3 / 1e12, 3 * 2 * 4096**2 / 1e9))
    thin = matrix(4096, 8), matrix(8, 4096)
    assert seconds(jnp.matmul, *thin) == pytest.approx(2 * (2 * 8 * 4096 + 4096**2) / 1e9)
    wide = matrix(4096, 4096, dtype=jnp.float32)
    assert seconds(jnp.matmul, wide, wide) == pytest.approx(2 * 4096**3 / 0.5e12)


def test_a_loop_takes_as_often_as_it_runs_and_devices_share() -> None:
    def layers(x: Any, weights: Any) -> Any:
        return jax.lax.scan(lambda x, w: (x @ w, None), x, weights)[0]

    once, often = (seconds(layers, matrix(512, 512), matrix(count, 512, 512)) for count in (1, 32))
    assert often == pytest.approx(32 * once)
    jaxpr = jax.make_jaxpr(jnp.matmul)(matrix(64, 64), matrix(64, 64))
    assert modelled_seconds(jaxpr, SPEED, devices=4) == pytest.approx(modelled_seconds(jaxpr, SPEED) / 4)


def test_every_accelerator_has_a_speed_and_the_attached_cpu_none() -> None:
    for name in target_names():
        speed = speed_of(resolve_target(name, require_installed=False))
        assert (speed is None) == (name == "cpu")
        if speed is not None:
            assert 5e12 < speed.flops < 1e16
            assert 1e11 < speed.bandwidth < 1e13
            # The first chips that JAX ran on had faster links for what they computed, and cards without NVLink have slower ones.
            if not name.startswith(("v2", "l40s", "rtx6000ada")):
                assert LINK_BYTE / 5 < speed.flops / speed.link < 5 * LINK_BYTE, name


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("gpu", "NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("gpu", "NVIDIA H100 PCIe", "h100_pcie"),
        ("gpu", "NVIDIA H200", "h200"),
        ("gpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("gpu", "NVIDIA A100-SXM4-80GB", "a100_sxm_80"),
        ("gpu", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx6000pro"),
        ("gpu", "NVIDIA GeForce RTX 4090", "rtx4090"),
        ("gpu", "NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("gpu", "NVIDIA GeForce RTX 4080", None),
        ("gpu", "NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("gpu", "NVIDIA RTX A6000", "a6000"),
        ("gpu", "NVIDIA L40S", "l40s"),
        ("gpu", "NVIDIA L4", "l4"),
        ("gpu", "Tesla T4", "t4"),
        ("tpu", "TPU v4", "v4"),
        ("tpu", "TPU v5 lite", "v5e"),
        ("tpu", "TPU v5", "v5p"),
        ("tpu", "TPU v6 lite", "v6e"),
        ("tpu", "TPU7x", "tpu7x"),
        ("tpu", "TPU v99", None),
        ("cpu", "cpu", "cpu"),
    ],
)
def test_an_attached_device_has_the_speed_of_the_target_that_it_is(platform: str, kind: str, name: str | None) -> None:
    assert nearest_target(platform, kind) == name
    known = None if name is None else speed_of(resolve_target(name, require_installed=False))
    assert speed_of_device(platform, kind) == known
    assert (known is None) == (name in (None, "cpu"))


def test_what_is_kept_never_takes_longer_than_what_is_computed_again() -> None:
    """`jax.checkpoint` rounds what it keeps by `reduce_precision`, which is no reduction."""

    def loss(weights: Any, x: Any) -> Any:
        for _ in range(6):
            x = jnp.tanh(x @ weights) @ weights
        return jnp.square(x).mean()

    shapes = matrix(512, 512), matrix(4096, 512)
    times = [
        seconds(jax.grad(jm.remat(loss, keep=keep) if keep is not None else loss), *shapes)
        for keep in (None, 1.0, 0.75, 0.5, 0.25, 0.0)
    ]
    assert times == sorted(times)
    assert times[0] < 0.9 * times[-1]
    assert seconds(lambda x: jax.lax.reduce_precision(x, 8, 7), matrix(512, 512)) == 0


def test_what_a_compiler_recomputes_is_never_free() -> None:
    hlo = textwrap.dedent(
        """\
        HloModule jit_step

        %fused_computation.1 (p0: f32[8,16], p1: f32[16,32]) -> f32[8,32] {
          %p0 = f32[8,16]{1,0} parameter(0)
          %p1 = f32[16,32]{1,0} parameter(1)
          ROOT %dot.1 = f32[8,32]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
        }

        ENTRY %main (a: f32[8,16], b: f32[16,32]) -> f32[8,32] {
          %a = f32[8,16]{1,0} parameter(0)
          %b = f32[16,32]{1,0} parameter(1)
          %exponential.2.remat = f32[8,16]{1,0} exponential(%a)
          %fusion.1.remat2 = f32[8,32]{1,0} fusion(%exponential.2.remat, %b), kind=kOutput, calls=%fused_computation.1
          %image = f32[2,8,8,4]{3,2,1,0} parameter(2)
          %kernel = f32[3,3,4,6]{3,2,1,0} parameter(3)
          %convolution.3.remat = f32[2,8,8,6]{3,2,1,0} convolution(%image, %kernel), dim_labels=b01f_01io->b01f
          ROOT %add.1 = f32[8,32]{1,0} add(%fusion.1.remat2, %fusion.1.remat2)
        }
        """
    )
    elementwise, product, convolution = 8 * 16, 8 * 32 + 2 * 8 * 32 * 16, 2 * (2 * 8 * 8 * 6) * (3 * 3 * 4)
    assert recomputed_flops(parse_module(hlo)) == elementwise + product + convolution
    assert recomputed_flops(parse_module(hlo.replace(".remat", ".clone"))) == 0
    free = "  %broadcast.1.rematerialized = f32[8,16]{1,0} fusion(), kind=kLoop, calls=%fused_computation.2"
    assert recomputed_flops(parse_module(free)) == 0
    assert recomputed(parse_module(free)) == []
    assert len(recomputed(parse_module(hlo))) == 3


def test_collectives_move_bytes_as_often_as_their_loop_runs() -> None:
    hlo = textwrap.dedent(
        """\
        %body.1 (p: (s32[], f32[64])) -> (s32[], f32[64]) {
          %gather = f32[64]{0} all-gather(%part), channel_id=2, dimensions={0}
          %start = (f32[8]{0}, f32[8]{0}) all-reduce-start(%a, %b), to_apply=%add
          %done = (f32[8]{0}, f32[8]{0}) all-reduce-done(%start)
          %two = ((f32[2]{0}, /*index=1*/f32[4]{0}), (f32[16]{0}, /*index=1*/f32[32]{0})) all-gather-start(%c, %d), dimensions={0}
          %one = ((f32[64]{0}), f32[8]{0}) reduce-scatter-start(%e), to_apply=%add
          %move = (f32[2,4]{1,0}, f32[2,4]{1,0}, u32[], u32[]) collective-permute-start(%f)
        }


        ENTRY %main (a: f32[64]) -> f32[64] {
          %loop = (s32[], f32[64]) while(%init), body=%body.1, backend_config={"known_trip_count":{"n":"12"}}
          ROOT %scatter = bf16[8]{0} reduce-scatter(%whole), dimensions={0}, to_apply=%add
        }
        """
    )
    seven_eighths = 7 / 8
    inside = int(64 * 4 * seven_eighths) + int(2 * 8 * 4 * seven_eighths * 2)
    inside += int((16 + 32) * 4 * seven_eighths) + int(8 * 4 * 8 * seven_eighths) + 8 * 4
    found = collectives_of(parse_module(hlo), 8)
    assert found.count == 12 * 5 + 1
    assert found.moved_bytes == 12 * inside + int(8 * 2 * 8 * seven_eighths)


def test_collectives_count_all_their_results_among_the_devices_that_take_part() -> None:
    hlo = textwrap.dedent(
        """\
        %other (p: f32[8]) -> f32[64] {
          %small = f32[8]{0} all-gather(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
        }

        %one (p: f32[8]) -> f32[64] {
          %large = f32[64]{0} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}
        }

        %scattered (p: f32[64]) -> f32[16] {
          %part = f32[16]{0} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
        }

        ENTRY %main (a: f32[64]) -> f32[64] {
          %two = (f32[32]{0}, f32[4]{0}) all-reduce(%a, %b), replica_groups={}, to_apply=%add
          %start = (f32[8]{0}, f32[64]{0}) all-gather-start(%c), replica_groups=[1,8]<=[8], dimensions={0}
          %sent = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%d), source_target_pairs={{0,1}}
          %later = ((f32[64]{0}), f32[16]{0}) async-start(%e), calls=%scattered
          %chosen = f32[64]{0} conditional(%which, %p, %p), branch_computations={%one, %other}
          ROOT %either = f32[64]{0} conditional(%true, %p, %p), true_computation=%other, false_computation=%other
        }
        """
    )
    reduced, gathered, permuted = int(36 * 4 * 7 / 8 * 2), 64 * 4 * 7 // 8, 32
    scattered, branch, either = 16 * 4 * 3, 64 * 4 * 7 // 8, 8 * 4 // 2
    found = collectives_of(parse_module(hlo), 8)
    assert found.moved_bytes == reduced + gathered + permuted + scattered + branch + either
    assert found.count == 6


@pytest.mark.targets
def test_products_that_libraries_compute_are_counted() -> None:
    needs_compiler("h100_sxm")
    rows, width, image, kernel = 64, 128, (8, 16, 16, 4), (3, 3, 4, 32)

    def step(x: jax.Array, w: jax.Array, images: jax.Array, k: jax.Array) -> tuple[jax.Array, ...]:
        def convolved(k: jax.Array, images: jax.Array) -> jax.Array:
            return jax.lax.conv_general_dilated(images, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

        made, back = jax.vjp(convolved, k, images)
        return jnp.sin(x @ w), jnp.sin(made), *back(made)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, width), (width, width), image, kernel)]
    hlo = compile_for_target(step, shapes, target="h100_sxm").hlo_text
    assert hlo is not None
    marked, count = re.subn(r"%((?:custom-call|cudnn-conv)[\w.-]*) = ", r"%\1.remat = ", hlo)
    product, convolution = 2 * rows * width * width, 2 * (8 * 16 * 16 * 32) * (3 * 3 * 4)
    assert count >= 4
    assert recomputed_flops(parse_module(marked)) == product + 3 * convolution


def test_the_budget_of_a_target_is_what_is_usable_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    gpu, tpu = (resolve_target(name, require_installed=False) for name in ("h100_sxm", "v5e"))
    assert budget_for(None, gpu).bytes == int(gpu.memory_bytes * 0.75)
    assert "75% of the 79.1 GiB of h100_sxm" in budget_for(None, gpu).reason
    assert budget_for(None, tpu).bytes == tpu.memory_bytes
    assert budget_for(0.5, tpu).bytes == tpu.memory_bytes // 2
    assert budget_for("4GiB", gpu).bytes == 4 * 2**30
    for device, whole in ((gpu, gpu.memory_bytes), (tpu, tpu.memory_bytes)):
        more = budget_for("500GiB", device)
        assert more.bytes == whole, "more than there is cannot be used"
        assert "which is less than the 500 GiB asked for" in more.reason
    assert budget_for("72GiB", gpu).share_for(int(gpu.memory_bytes * 0.75)) is None
    assert budget_for("72GiB", gpu).share_for(int(gpu.memory_bytes * 0.804)) == 0.81
    assert budget_for("72GiB", tpu).share_for(tpu.memory_bytes) is None
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert budget_for(None, gpu).bytes == int(gpu.memory_bytes * 0.9)
    with pytest.raises(PlanError, match="above 0 and up to 1"):
        budget_for(0.0, gpu)


@pytest.mark.core
def test_a_plan_says_that_nobody_knows_how_often_a_while_loop_runs() -> None:
    def settled(x: Any) -> Any:
        return jax.lax.while_loop(lambda value: jnp.abs(value).max() > 1.0, lambda value: 0.5 * value @ value, x)

    def step(weights: Any, x: Any, *, loop: bool) -> Any:
        return weights - jm.grad(lambda w: (jnp.tanh(jnp.tanh((settled(x) if loop else x) @ w) @ w) ** 2).mean())(
            weights
        )

    shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2
    notes = [jm.plan(step, *shapes, loop=loop, search={"remat": False}).record.notes for loop in (True, False)]
    assert [any("count their bodies once" in note for note in some) for some in notes] == [True, False]
