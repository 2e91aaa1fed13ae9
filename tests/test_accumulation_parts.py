"""What the check of microbatches sees beside the gradient as a whole: one parameter's part of it, and entries of aux by row."""

from __future__ import annotations

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from tests.test_accumulation_refusals import FOUR, KEY, W, X, refused, rows

pytestmark = pytest.mark.core


def balanced(coefficient, dtype=jnp.float32):
    """A gate that nothing but a small balance term reaches: beside the gradient of all others its own is lost."""

    def balanced_one(p, x):
        shares = jax.nn.softmax(x.astype(dtype) @ p["gate"].astype(dtype)).mean(0)
        return rows(p["w"], x).mean() + coefficient * 4 * (shares.astype(jnp.float32) ** 2).sum()

    return balanced_one


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_small_part_of_the_gradient_that_is_another_one(dtype):
    parameters = {"w": W, "gate": jax.random.normal(KEY, (16, 4))}
    message = refused(balanced(1e-4, dtype), parameters, X)
    found = re.search(r"its accumulated gradient\['gate'\] differs by ([\d.]+)% from the full one", message)
    assert found is not None, message
    assert 40 < float(found[1]) < 200
    with pytest.raises(ValueError, match=r"gradient\['gate'\] differs by"):
        jm.apply_policy(jm.value_and_grad(balanced(1e-4, dtype)), FOUR)(parameters, X)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_parts_of_the_gradient_that_are_nothing_but_rounding(dtype):
    """A shift before a normalisation, the bias of attention's keys: their gradients are 0, and what comes out is noise."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(16, dtype=dtype)(x) + self.param("shift", nn.initializers.ones, ()).astype(dtype)
            x = nn.LayerNorm(dtype=dtype)(x)
            return nn.MultiHeadDotProductAttention(2, dtype=dtype)(x).astype(jnp.float32)

    model = Model()
    x = X.reshape(8, 4, 16)[:6]
    parameters = model.init(KEY, x)
    step = jm.jit_step(jax.jit(jm.grad(lambda p, x: (model.apply(p, x) ** 2).mean())), jm.StepPolicy(microbatches=3))
    step(parameters, x)


def test_a_difference_below_one_percent_is_said_in_its_digits():
    message = refused(lambda w, x: rows(w, x).mean() + 1e-3 * rows(w, x).sum(), W, X)
    assert re.search(r"gradient differs by 0\.[1-9]\d?% from the full one .* 0\.01% allowed", message), message


@pytest.mark.parametrize(
    ("entry", "share"),
    [
        (lambda h: jnp.argsort(jnp.argsort(h[:, 0])), 50),
        (lambda h: h - h.mean(0), 5),
        (lambda h: h[:, 0] > h[:, 0].mean(), 5),
    ],
    ids=["rank", "centred", "above the mean"],
)
def test_an_entry_of_aux_whose_rows_depend_on_other_rows(entry, share):
    message = refused(lambda w, x: (rows(w, x).mean(), {"each": entry(x @ w)}), W, X, has_aux=True)
    found = re.search(r"accumulated aux\['each'\] differs by ([\d.]+)% from the full one", message)
    assert found is not None, message
    assert float(found[1]) > share
    assert "an array with one entry a row, each computed from that row alone" in message


def test_entries_of_aux_that_no_rounding_and_no_missing_number_makes_another():
    def loss(w, x):
        h = x @ w
        return rows(w, x).mean(), (h.argmax(-1), jnp.log(h), h / 0.0, h.astype(jnp.bfloat16), h > 0)

    _, aux = jm.jit_step(jax.jit(jm.value_and_grad(loss, has_aux=True)), FOUR)(W, X)[0]
    for ours, theirs in zip(aux, loss(W, X)[1], strict=True):
        assert ours.dtype == theirs.dtype
        assert jnp.allclose(ours, theirs, rtol=1e-2, atol=1e-4, equal_nan=True)


def test_an_entry_of_aux_with_as_many_columns_as_the_batch_has_rows():
    message = refused(lambda w, x: (jm.weighted(rows(w, x).sum(), len(x)), x @ x.T), W, X, has_aux=True)
    assert "aux is float32[8,8] for a microbatch of 8 rows" in message


def test_entries_of_aux_that_are_nothing_but_rounding():
    """The first step of a method that compares with its own earlier words: both are the same, but for rounding."""

    def loss(w, batch):
        x, old = batch["x"], batch["old"]
        h = jnp.tanh(x @ w)
        apart = (jnp.tanh(x @ w @ jnp.eye(16)) - old).mean(-1)
        return (h**2).mean(), {"rows": apart, "mean": apart.mean(), "nan": apart.sum() * jnp.nan}

    step = jm.jit_step(jax.jit(jm.value_and_grad(loss, has_aux=True)), FOUR)
    old = jax.jit(lambda w, x: jnp.tanh(x @ w))(W, X * (1 + 1e-7))
    _, aux = step(W, {"x": X, "old": old})[0]
    assert aux["rows"].shape == (32,)
    assert jnp.abs(aux["rows"]).max() < 1e-5


def test_rows_of_few_bits_that_depend_on_other_rows():
    wide = jax.random.normal(KEY, (16, 1000)) * 30  # squares of these are infinite in float16

    def loss(w, x):
        h = x @ w
        return rows(w, x).mean(), (h + 0.1 * h.mean(0)).astype(jnp.float16)

    message = refused(loss, wide, X, has_aux=True)
    assert re.search(r"accumulated aux differs by [\d.]+% from the full one", message), message


def test_rows_on_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))

        def loss(w, x):
            h = jnp.tanh(x @ w)
            return (h**2).mean(), (h, h[:, 0], h.argmax(-1))

        (_, aux), _ = jm.jit_step(jax.jit(jm.value_and_grad(loss, has_aux=True)), FOUR)(W, x)
        for ours, theirs in zip(aux, loss(W, x)[1], strict=True):
            assert jnp.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_parameters_that_explicit_axes_divide():
    mesh = jm.make_mesh("data=2,fsdp=4", axis_types="explicit")
    with jax.set_mesh(mesh):
        put = lambda array, *axes: jax.device_put(array, NamedSharding(mesh, P(*axes)))  # noqa: E731
        whole = lambda array: jax.sharding.reshard(array, P())  # noqa: E731
        params = {"w": put(W, "fsdp"), "shift": put(jnp.ones(16), "fsdp"), "tensor": put(W, None, "fsdp")}

        def loss(params, x):
            h = x @ whole(params["w"]) + whole(params["shift"])
            h = h - h.mean(-1, keepdims=True)  # the gradient of the shift's mean is nothing but rounding
            return (jnp.matmul(h, params["tensor"], out_sharding=P("data", "fsdp")) ** 2).mean()

        x = put(X, "data")
        value, gradients = jm.jit_step(jax.jit(jm.value_and_grad(loss)), FOUR)(params, x)
        expected, theirs = jax.jit(jax.value_and_grad(loss))(params, x)
        assert jnp.allclose(value, expected, rtol=1e-5)
        for name, ours in gradients.items():
            assert ours.sharding.is_equivalent_to(params[name].sharding, ours.ndim), name
            assert jnp.allclose(ours, theirs[name], rtol=1e-4, atol=1e-5), name
        mixed = jm.value_and_grad(lambda params, x: loss(params, x - x.mean(0, keepdims=True)))
        with pytest.raises(ValueError, match="would change the numbers"):
            jm.jit_step(jax.jit(mixed), FOUR)(params, x)


def test_a_search_for_nans_finds_none_of_the_checks_own():
    def loss(w, x, labels):
        return jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], 1).mean()

    with jax.debug_nans(True):
        for made in (
            jm.jit_step(jm.value_and_grad(loss), FOUR, donate_argnames=()),
            jm.apply_policy(jm.value_and_grad(loss), FOUR),
        ):
            value, _ = made(W, X, jnp.arange(32) % 16)
            assert jnp.isfinite(value)
