"""Where accumulated gradients are taken: in Flax NNX and Equinox, on a mesh, under other transformations, in inner functions."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from tests.accumulated_losses import FOUR, KEY, PLAIN, WEIGHTS, WIDTH, X, copy, mean_loss, weighted_loss
from tests.comparisons import assert_close

pytestmark = pytest.mark.core


class Net(nnx.Module):
    def __init__(self, rate):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.norm, self.drop = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = x + self.drop(jnp.tanh(layer(self.norm(x))))
        return x


def nnx_loss(model, x):
    return (model(x) ** 2).mean()


def nnx_step(model, optimizer, x):
    value, gradients = jm.nnx.value_and_grad(nnx_loss)(model, x)
    optimizer.update(model, gradients)
    return value


@functools.cache
def trained(policy, *, rate=0.0, jitted=False):
    model = Net(rate)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = jm.jit_step(nnx.jit(nnx_step) if jitted else nnx_step, policy)
    values = [step(model, optimizer, X) for _ in range(2)]
    return values, nnx.to_pure_dict(nnx.state(model, nnx.Param)), model.drop.rngs.count[...]


@pytest.mark.parametrize("policy", [FOUR, jm.StepPolicy(microbatches=4, remat="full")], ids=["plain", "remat"])
def test_nnx_modules_train_as_without_microbatches(policy):
    assert_close(trained(policy), trained(PLAIN))


def test_nnx_counters_are_those_of_one_plain_call():
    values, parameters, count = trained(FOUR, rate=0.2, jitted=True)
    assert int(count) == int(trained(PLAIN, rate=0.2)[2]) == 4
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((values, parameters)))


def test_equinox_modules():
    model = eqx.nn.MLP(WIDTH, WIDTH, 16, 2, key=KEY)

    def loss(model, x):
        return (jax.vmap(model)(x) ** 2).mean()

    step = jm.jit_step(eqx.filter_jit(jm.value_and_grad(loss)), FOUR)
    value, gradients = step(model, X)
    plain_value, plain_gradients = eqx.filter_value_and_grad(loss)(model, X)
    arrays: Any = eqx.filter(gradients, eqx.is_array)
    assert_close((value, arrays), (plain_value, eqx.filter(plain_gradients, eqx.is_array)))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_rows_stay_on_their_devices(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        params = jax.device_put(copy(WEIGHTS), NamedSharding(mesh, P()))

        def loss(params, x):
            if axis_type == AxisType.Auto:  # divides the rows of every microbatch, and of the check
                x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))
            return mean_loss(params, x)

        def step(params, x):
            value, gradients = jm.value_and_grad(loss)(params, x)
            return value, {"sums": jax.tree.map(jnp.sum, gradients)}

        ours = jm.jit_step(step, FOUR)
        assert_close(ours(params, x), jax.jit(step)(params, x))
        text = ours.lower(params, x).compile().as_text()
    assert "all-reduce" in text
    assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))


def test_sums_of_gradients_lie_as_their_parameters_do():
    """Whole on every device they would be as large as eight times the state."""
    mesh, layers, width = jm.make_mesh({"fsdp": 8}), 4, 256
    params = {"up": jnp.ones((layers, width, 4 * width)), "down": jnp.ones((layers, 4 * width, width))}
    params = jax.device_put(params, jm.infer_shardings(params, mesh, jm.StepPolicy(sharding="fsdp")))
    x = jax.device_put(jnp.ones((64, width)), NamedSharding(mesh, P("fsdp")))

    def loss(params, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        out = jax.lax.scan(layer, x, params)[0]
        return jm.weighted((out**2).sum(), out.size)

    def step(params, x):
        gradients = jm.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    def temporaries(count):
        ours = jm.jit_step(step, jm.StepPolicy(sharding="fsdp", microbatches=count))
        with jax.set_mesh(mesh):
            return ours.lower(params, x).compile().memory_analysis().temp_size_in_bytes

    on_one_device = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) // 8
    assert temporaries(4) - temporaries(1) < 1.5 * on_one_device


def closing_over_a_tracer(params, x):
    scale = x[0, 0] ** 2
    return jm.value_and_grad(lambda params, x: mean_loss(params, x) * scale)(params, x)


def of_several_models(params, x):
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
    return jax.vmap(lambda one: jm.value_and_grad(mean_loss)(one, x))(stacked)


def under_another_gradient(params, x):
    def size(scale):
        gradients = jm.grad(lambda params, x: mean_loss(params, x) * scale)(params, x)
        return sum((leaf**2).sum() for leaf in jax.tree.leaves(gradients))

    return jax.grad(size)(2.0)


def of_whole_numbers(params, x):
    def loss(params, x):
        return mean_loss(params["floats"], x) * params["count"]

    gradients = jm.grad(loss, allow_int=True)({"floats": params, "count": jnp.int32(3)}, x)
    assert gradients["count"].dtype == jax.dtypes.float0
    return gradients["floats"]


def inside_a_shard_map(params, x):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def on_one_device(params, x):
        params = jax.lax.pcast(params, ("data",), to="varying")
        return jax.lax.pmean(jm.value_and_grad(weighted_loss)(params, x, x[:, 0] ** 2), "data")

    return jax.shard_map(on_one_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(params, x)


@pytest.mark.parametrize(
    "step",
    [closing_over_a_tracer, of_several_models, under_another_gradient, of_whole_numbers, inside_a_shard_map],
    ids=lambda step: step.__name__,
)
def test_wherever_a_gradient_is_taken(step):
    jitted = jax.jit(step)
    assert_close(jm.jit_step(jitted, FOUR)(WEIGHTS, X), jitted(WEIGHTS, X))
