"""What a plan keeps is told by the module and the source line that computed it, whatever JAX and the compiler put around it."""

from __future__ import annotations

import functools
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend import source_info_util

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.reading.buffers import compiled_with_peak
from jaxmem_callbacks.programs.reading.hlo import parse_module
from jaxmem_callbacks.programs.targets.compile import compile_for_target
from jaxmem_callbacks.records.peaks import GRADIENTS, SAVED, Buffer
from jaxmem_callbacks.records.policies import OFFLOAD_CUTS, OFFLOAD_KEPT
from jaxmem_callbacks.transforms.tracing import subjaxprs
from tests.target_step import needs_compiler, shape

WIDTH, LAYERS, TOKENS = 256, 2, 512
LINES = dict(enumerate(pathlib.Path(__file__).read_text("utf-8").splitlines(), 1))


def block(x: Any, p: Any) -> Any:
    with jax.named_scope("attention"):
        scores = jnp.einsum("bqd,bkd->bqk", x @ p["query"], x)
        x = x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x)
    with jax.named_scope("mlp"):
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def loss(params: Any, tokens: Any) -> Any:
    with jax.named_scope("embedding"):
        x = jnp.take(params["table"], tokens, axis=0)
    for i, p in enumerate(params["layers"]):
        with jax.named_scope(f"block_{i}"):
            x = block(x, p)
    return (x**2).mean()


def train_step(params: Any, tokens: Any) -> Any:
    value, grads = jm.value_and_grad(loss)(params, tokens)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(rows: int) -> Any:
    layer = {"query": shape(WIDTH, WIDTH), "up": shape(WIDTH, 4 * WIDTH), "down": shape(4 * WIDTH, WIDTH)}
    params = {"table": shape(WIDTH, WIDTH), "layers": [layer] * LAYERS}
    return params, shape(rows, TOKENS, dtype=jnp.int32)


EFFORT = "jax_exec_time_optimization_effort"


@functools.cache
def buffers(target: str) -> tuple[Buffer, ...]:
    """What makes the peak of the step that keeps all that is dear; a TPU has room on the chip for a small one's."""
    if target != "cpu":
        needs_compiler(target)
    step = jm.apply_policy(train_step, jm.StepPolicy(remat="full", keep=1.0))
    if target == "cpu" and jax.__version_info__ < (0, 11):
        # With the emitters that users have: of the suite's older ones (tests/processes.py) a scatter's loop has no name.
        jitted = jax.jit(step, compiler_options={"xla_cpu_use_fusion_emitters": True})
        return compiled_with_peak(jitted.lower(*arguments(4)))[1].buffers
    is_tpu = target.startswith("v5e")
    before = getattr(jax.config, EFFORT, None)  # None where this JAX has no such option
    if quick := is_tpu and before is not None:  # at the least effort the names are the same, in a fifth of the time
        jax.config.update(EFFORT, -1.0)
    try:
        found = compile_for_target(step, arguments(24 if is_tpu else 4), target=target, want_buffers=True)
    finally:
        if quick:
            jax.config.update(EFFORT, before)
    assert found.peak is not None
    return found.peak.buffers


TARGETS = ["cpu", *(pytest.param(name, marks=pytest.mark.targets) for name in ("h100_sxm", "v5e:1x1"))]


@pytest.mark.parametrize("target", TARGETS)
def test_saved_activations_are_told_by_what_computed_them(target: str) -> None:
    saved = [each for each in buffers(target) if each.group == SAVED and each.bytes > 2**16]
    assert len(saved) > LAYERS
    for each in saved:
        operation = str(each.operation)
        assert not operation.endswith("reduce_precision"), each
        assert str(each.source).startswith(f"{__file__}:"), each
        in_module = re.search(r"jvp\(block_\d\)/(attention|mlp)/|jvp\(embedding\)/", operation)
        assert in_module or ".mean()" in line_of(each), each
    products = [each for each in saved if str(each.operation).endswith("/dot_general")]
    assert products, "what is dear are the matrix products"
    assert all("@" in line_of(each) or "einsum" in line_of(each) for each in products)


@pytest.mark.core
@pytest.mark.parametrize("target", TARGETS[:2])
def test_the_gradient_of_what_a_librarys_function_looks_up_has_the_line_that_calls_it(target: str) -> None:
    looked_up = [each for each in buffers(target) if each.group == GRADIENTS and "embedding" in str(each.operation)]
    assert len(looked_up) == 1, (
        "the first layer's is the last gradient to be made, at a peak that is in the backward pass"
    )
    assert "jnp.take" in line_of(looked_up[0])


def line_of(buffer: Buffer) -> str:
    """The line of this file that a buffer is told to come from."""
    return LINES[int(str(buffer.source).rpartition(":")[2])]


@pytest.mark.parametrize("fields", [{"keep": 1.0}, {"keep": 1.0, "offload": (OFFLOAD_CUTS, OFFLOAD_KEPT)}], ids=str)
def test_what_a_loop_keeps_of_each_layer_is_told_alike(fields: Any) -> None:
    def looped(params: Any, tokens: Any) -> Any:
        with jax.named_scope("embedding"):
            x = jnp.take(params["table"], tokens, axis=0)
        return (jax.lax.scan(lambda x, p: (block(x, p), None), x, params["layers"])[0] ** 2).mean()

    params, tokens = arguments(2)
    params["layers"] = jax.tree.map(lambda p: shape(LAYERS, *p.shape), params["layers"][0])
    traced = jax.make_jaxpr(jax.grad(jm.remat(looped, "full", **fields)))(params, tokens)
    kept = [eqn for eqn in every(traced.eqns) if eqn.primitive.name in {"name", "reduce_precision"}]
    assert len(kept) > 2
    for eqn in kept:
        assert re.search("attention|mlp|embedding", str(eqn.source_info.name_stack)), eqn
        assert source_info_util.summarize(eqn.source_info).startswith(__file__), eqn


def every(eqns: Any) -> Any:
    for eqn in eqns:
        yield eqn
        for body in subjaxprs(eqn):
            yield from every(body.eqns)


# A module in which a checkpoint's rounding was fused with what reads it, as a CPU's compiler does, and with an argument.
FUSED = """HloModule jit_step

%reading (kept: f32[8,8], other: f32[8,8]) -> (f32[8,8], f32[8,8]) {
  %other = f32[8,8]{1,0} parameter(1)
  %kept = f32[8,8]{1,0} parameter(0)
  %rounded = f32[8,8]{1,0} reduce-precision(%kept), metadata={op_name="jit(step)/jvp(mlp)/reduce_precision"}
  %view = f32[8,8]{1,0} bitcast(%rounded), metadata={op_name="jit(step)/jvp(mlp)/reduce_precision"}
  %read = f32[8,8]{1,0} multiply(%rounded, %other), metadata={op_name="jit(step)/jvp(mlp)/mul"}
  ROOT %two = (f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%read, %view)
}

ENTRY %main (w: f32[8,8]) -> f32[8,8] {
  %w = f32[8,8]{1,0} parameter(0), metadata={op_name="w"}
  %product = f32[8,8]{1,0} dot(%w, %w), metadata={op_name="jit(step)/jvp(mlp)/dot_general"}
  %laid = f32[8,8]{0,1} copy(%product)
  %fused = (f32[8,8]{1,0}, f32[8,8]{1,0}) fusion(%laid, %w), calls=%reading, metadata={op_name="jit(step)/jvp(mlp)/mul"}
  %first = f32[8,8]{1,0} get-tuple-element(%fused), index=1
  %again = f32[8,8]{1,0} reduce-precision(%first), metadata={op_name="jit(step)/jvp()/reduce_precision"}
  %argument = f32[8,8]{1,0} reduce-precision(%w), metadata={op_name="jit(step)/jvp(norm)/reduce_precision"}
  ROOT %sum = f32[8,8]{1,0} add(%again, %argument), metadata={op_name="jit(step)/add"}
}
"""


@pytest.mark.parametrize(
    ("name", "index", "told"),
    [
        ("fused", (1,), "jit(step)/jvp(mlp)/dot_general"),
        ("fused", (0,), "jit(step)/jvp(mlp)/mul"),
        ("again", (), "jit(step)/jvp(mlp)/dot_general"),
        ("argument", (), "jit(step)/jvp(norm)/reduce_precision"),  # which nothing computed
    ],
)
def test_a_rounded_value_is_followed_to_what_computed_it(name: str, index: tuple[int, ...], told: str) -> None:
    found = parse_module(FUSED).origin(name, index)
    assert found is not None
    assert found.op_name == told
