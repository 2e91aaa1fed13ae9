"""What computes with 16 bits is compared in float32, where rounding does not hide a few percent of one parameter's gradient."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.transforms.accumulation.accumulate import coarsest
from jaxmem_callbacks.transforms.accumulation.equivalence_check import program_in_float32
from jaxmem_callbacks.transforms.tracing import evaluate_closed, open_jaxpr, subjaxprs
from tests.test_accumulation_refusals import FOUR, KEY, W, X, refused

pytestmark = pytest.mark.core

GATED = {"w": W, "gate": jax.random.normal(KEY, (16, 4))}


def gated(coefficient, dtype):
    """A mixture whose gate is also balanced over the batch, by a term that makes a small part of its gradient."""

    def gated_one(p, x):
        h = jnp.tanh(x.astype(dtype) @ p["w"].astype(dtype))
        shares = jax.nn.softmax(h @ p["gate"].astype(dtype))
        y = (h[:, None, :] * shares[..., None]).sum(1).astype(jnp.float32)
        return (y**2).mean() + coefficient * (shares.astype(jnp.float32).mean(0) ** 2).sum()

    return gated_one


@pytest.mark.parametrize("parameters", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("coefficient", [4e-3, 4e-4])
def test_a_part_of_a_gradient_that_bfloat16_would_hide(parameters, coefficient):
    given = jax.tree.map(lambda a: a.astype(parameters), GATED)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), given)
    narrow, exact = (
        refused(gated(coefficient, jnp.bfloat16), given, X),
        refused(gated(coefficient, jnp.float32), wide, X),
    )
    found = [re.search(r"differs by ([\d.]+)% .* 0\.01% allowed", message) for message in (narrow, exact)]
    assert all(found), (narrow, exact)
    shares = [float(each[1]) for each in found]
    assert shares[0] == pytest.approx(shares[1], rel=0.05)
    assert shares[1] < 3  # what bfloat16's own rounding would have been given
    step = jm.jit_step(jax.jit(jm.value_and_grad(gated(0.0, jnp.bfloat16))), FOUR)
    assert jnp.isfinite(step(given, X)[0])


def everything(x, w, key, places):
    """Loops, branches, reductions, scatters, a convolution, random numbers: forwards and backwards."""
    x = x + jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * 2, c[1] + 1), (jax.lax.stop_gradient(x), 0))[0]
    x = jax.lax.cond(x.sum() > 0, lambda y: y * 2, lambda y: y + 1, x)
    x = x.at[places].add(x[1]).at[jnp.array([0])].max(x[1]).at[jnp.array([1])].mul(x[1], unique_indices=True)
    x = jax.nn.relu(x) + w[0][places]
    x = x + jax.lax.reduce_window(
        jax.lax.stop_gradient(x), np.array(0, x.dtype), lambda a, b: a + b * 1, (2, 2), (1, 1), "SAME"
    )
    x, sums = jax.lax.scan(jax.checkpoint(lambda h, v: (jnp.tanh(h @ v), h.sum())), x / 8, w)
    x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)
    x = x + jax.random.uniform(key, x.shape, jnp.bfloat16, 1, 2).astype(x.dtype)
    x = jax.nn.softmax(jnp.sort(x)) + jnp.cumsum(x, 0) + jax.lax.top_k(x, 2)[0].sum()
    ones = jnp.ones((3, 3, 1, 2), x.dtype)
    x = jax.lax.conv_general_dilated(
        x[None, ..., None], ones, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = jax.lax.reduce_window(x, np.array(-np.inf, x.dtype), jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")
    return (jax.lax.dot_general(x, x, (((1,), (1,)), ((0,), (0,)))).mean() + sums.sum()).astype(jnp.float32)


def test_a_program_computes_the_same_in_float32():
    x, w = jax.random.uniform(KEY, (8, 8)), jax.random.normal(KEY, (3, 8, 8))
    narrow = [x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)]
    rest = [KEY, jnp.arange(8) % 3]
    gradient = jax.value_and_grad(everything, argnums=(0, 1))
    program = program_in_float32(jax.make_jaxpr(gradient)(*narrow, *rest), [*narrow, *rest])
    assert coarsest(program) == jnp.float32
    ours = jax.jit(lambda *args: evaluate_closed(program, args))(*narrow, *rest)
    with jax.default_matmul_precision("highest"):
        exact = jax.tree.leaves(jax.jit(gradient)(*(a.astype(jnp.float32) for a in narrow), *rest))
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()))
    # The stacked weights are widened slice by slice: nowhere is there a wide copy of all.
    assert not [eqn for eqn in widenings(program) if eqn.outvars[0].aval.shape == w.shape]


def widenings(program):
    for eqn in open_jaxpr(program).eqns:
        if eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype == jnp.bfloat16:
            yield eqn
        for body in subjaxprs(eqn):
            yield from widenings(body)


def outside(function):
    """An elementwise function that only the host computes, in bfloat16 forwards and backwards, and what dtypes it was given."""
    seen = set()

    def called(h):
        seen.add(h.dtype)
        return function(h.astype(np.float32)).astype(h.dtype)

    @jax.custom_vjp
    def computed(h):
        return jax.pure_callback(called, h, h, vmap_method="sequential")

    computed.defvjp(lambda h: (computed(h), None), lambda _, g: (computed(g),))
    return computed, seen


def test_a_call_that_cannot_be_widened_keeps_its_dtype():
    """A callback gets what it was written for, and what it rounds is allowed for."""
    halved, seen = outside(lambda h: h / 2)

    def loss(w, x):
        return (jnp.tanh(halved(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))).astype(jnp.float32) ** 2).mean()

    step = jm.jit_step(jax.jit(jm.value_and_grad(loss)), FOUR)
    assert jnp.isfinite(step(W, X)[0])
    assert seen == {jnp.dtype("bfloat16")}
    assert "3.0% allowed" in refused(lambda w, x: 32 * loss(w, x) / x.shape[0], W, X)


def test_parts_that_are_nothing_but_the_rounding_of_such_a_call():
    """The bias of attention's keys has no gradient: what comes out moves as far when the parameters are nudged."""

    def added_up(g):
        return functools.reduce(lambda total, row: total + row, g.reshape(-1, 16))

    @jax.custom_vjp
    def shifted(h, bias):
        return h + bias

    def backwards(_, g):
        like = jax.ShapeDtypeStruct((16,), jnp.bfloat16)
        return g, jax.pure_callback(added_up, like, g.astype(jnp.bfloat16), vmap_method="sequential").astype(g.dtype)

    shifted.defvjp(lambda h, bias: (shifted(h, bias), None), backwards)

    def loss(p, x):
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ p["queries"], shifted(x @ p["keys"], p["bias"])))
        return (jnp.tanh(weights @ x) ** 2).mean()

    x = jax.random.normal(KEY, (8, 16, 16))
    given = {"keys": W / 4, "queries": W[::-1] / 4, "bias": jnp.ones(16)}
    assert jnp.isfinite(jm.jit_step(jax.jit(jm.grad(loss)), FOUR)(given, x)["bias"]).all()


def test_a_solver_that_was_traced_with_its_dtype_keeps_it():
    def loss(w, x):
        a, b = (w @ w.T / 16 + jnp.eye(16)).astype(jnp.bfloat16), x.mean(1)[:, None].astype(jnp.bfloat16)
        solved = jax.lax.custom_linear_solve(
            lambda v: a @ v, x.astype(jnp.bfloat16).T, lambda _, b: b * 2, symmetric=True
        )
        return ((solved.T * b).astype(jnp.float32) ** 2).mean()

    gradient = jax.value_and_grad(loss)
    program = program_in_float32(jax.make_jaxpr(gradient)(W, X), [W, X])
    assert coarsest(program) == jnp.bfloat16
    found, expected = (jax.jit(f)(W, X) for f in (lambda *args: evaluate_closed(program, args)[0], loss))
    np.testing.assert_allclose(found, expected, rtol=2e-2)


def test_noise_and_keys_beside_what_is_widened():
    def loss(w, x, key):
        h = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0) + jax.random.normal(key, h.shape, h.dtype)
        return (jnp.tanh(h).astype(jnp.float32) ** 2).mean()

    step = jm.jit_step(jax.jit(jm.value_and_grad(loss)), FOUR)
    assert jnp.isfinite(step(W, X, KEY)[0])
    assert "0.01% allowed" in refused(lambda *a: loss(*a) + 1e-3 * loss(*a) * a[1].shape[0], W, X, KEY)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_rows_that_a_mesh_divides(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        given = jax.device_put(jax.tree.map(lambda a: a.astype(jnp.bfloat16), GATED), NamedSharding(mesh, P()))
        assert "0.01% allowed" in refused(gated(4e-4, jnp.bfloat16), given, x)
        assert jnp.isfinite(jm.jit_step(jax.jit(jm.value_and_grad(gated(0.0, jnp.bfloat16))), FOUR)(given, x)[0])
