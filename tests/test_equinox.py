"""Equinox's own way of writing a step: whole models as arguments, under `jm.jit_step` as under ``eqx.filter_jit``."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem_callbacks as jm
from tests.target_step import needs_compiler

WIDTH, ROWS = 32, 64
OPTIMIZER = optax.adam(1e-2)


class Net(eqx.Module):
    """A function, a number that shapes depend on, a switch and a module without arrays beside the weights."""

    layers: list[eqx.nn.Linear]
    activation: Any
    dropout: eqx.nn.Dropout
    heads: int = 4

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = self.activation(layer(x))
        return self.dropout(x.reshape(self.heads, -1), key=key).reshape(-1)


def net(seed: int = 0) -> Net:
    keys = jax.random.split(jax.random.key(seed), 4)
    return Net([eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in keys], jax.nn.gelu, eqx.nn.Dropout(0.1))


def batch() -> dict[str, jax.Array]:
    return {"x": jax.random.normal(jax.random.key(1), (ROWS, WIDTH))}


def loss(model: Net, data: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(model)(data["x"], jax.random.split(key, ROWS)) - data["x"]) ** 2)


def train_step(model: Net, opt_state: Any, data: Any, key: Any) -> Any:
    value, gradients = jm.value_and_grad(loss)(model, data, key)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, {"loss": value}


def begun(seed: int = 0) -> tuple[Net, Any]:
    model = net(seed)
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


def trained(step: Any, count: int = 3) -> tuple[Net, Any, float]:
    model, opt_state = begun()
    for number in range(count):
        model, opt_state, metrics = step(model, opt_state, batch(), jax.random.key(number))
    return model, opt_state, float(metrics["loss"])


def arrays(tree: Any) -> list[Any]:
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


@pytest.fixture(scope="module")
def by_equinox() -> tuple[Net, Any, float]:
    return trained(eqx.filter_jit(train_step))


@pytest.mark.core
@pytest.mark.parametrize("policy", [None, "donate", "donate+full_remat", "dots_saveable"])
@pytest.mark.parametrize("jitted", [False, True])
def test_a_step_of_whole_models_trains_as_equinox_does(policy: Any, jitted: bool, by_equinox: Any) -> None:
    step = jm.jit_step(eqx.filter_jit(train_step) if jitted else train_step, policy)
    model, opt_state, value = trained(step)
    assert value == pytest.approx(by_equinox[2], rel=1e-6)
    for ours, theirs in zip(arrays((model, opt_state)), arrays(by_equinox[:2]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)  # Adam divides by small numbers
    assert jax.tree.structure(model) == jax.tree.structure(by_equinox[0])
    assert model.activation is jax.nn.gelu
    assert model.heads == 4


@pytest.mark.core
@pytest.mark.parametrize("jitted", [False, True])
def test_what_the_step_returns_updated_is_donated_and_nothing_else(jitted: bool) -> None:
    def critic_step(critic: Net, maker: Net, opt_state: Any, data: Any) -> Any:
        def of_both(critic: Net) -> jax.Array:
            made = jax.vmap(maker)(data["x"], jax.random.split(jax.random.key(0), ROWS))
            return loss(critic, {"x": made}, jax.random.key(1))

        value, gradients = jm.value_and_grad(of_both)(critic)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state)
        return eqx.apply_updates(critic, updates), opt_state, value

    step = jm.jit_step(eqx.filter_jit(critic_step) if jitted else critic_step, "donate")
    (critic, opt_state), maker, data = begun(), net(1), batch()
    old = arrays((critic, opt_state))
    critic, opt_state, _ = step(critic, maker, opt_state, data)
    assert step.donated == ("critic", "opt_state")
    assert all(array.is_deleted() for array in old if array.size > 1)
    assert not any(array.is_deleted() for array in arrays((maker, data, critic, opt_state)))
    critic, opt_state, _ = step(critic, maker, opt_state, data)
    assert jnp.isfinite(jax.vmap(maker)(data["x"], jax.random.split(jax.random.key(0), ROWS))).all()


@pytest.mark.core
def test_a_value_in_a_module_is_static_and_a_number_beside_it_is_not() -> None:
    traces = []

    def step(model: Net, count: Any, data: Any) -> Any:
        traces.append(count)
        value = loss(model, data, jax.random.key(0))
        return model, count + 1, value

    jitted = jm.jit_step(step, jm.StepPolicy(donate=()))
    model, data = net(), batch()
    values = [float(jitted(model, count, data)[2]) for count in range(3)]
    before = len(traces)
    assert len(set(values)) == 1
    quiet = eqx.nn.inference_mode(model)
    assert float(jitted(quiet, 0, data)[2]) == pytest.approx(float(loss(quiet, data, jax.random.key(0))), rel=1e-5)
    assert len(traces) > before, "the switch is part of the program"
    after = len(traces)
    relu = eqx.tree_at(lambda net: net.activation, model, jax.nn.relu)
    assert jitted(relu, 7, data)[0].activation is jax.nn.relu
    assert float(jitted(relu, 8, data)[2]) == pytest.approx(float(loss(relu, data, jax.random.key(0))), rel=1e-5)
    assert len(traces) > after
    assert int(jitted(model, 41, data)[1]) == 42


class Scaled(eqx.Module):
    """A weight, and a value that its product's type depends on, once as a leaf and once in the structure."""

    weight: jax.Array
    scale: Any
    other: Any = eqx.field(static=True)


@pytest.mark.core
@pytest.mark.parametrize("one_step", [False, True])
def test_values_that_python_calls_equal_are_programs_of_their_own(one_step: bool) -> None:
    def make() -> Any:
        return jm.jit_step(lambda model, x: (model, x * model.scale, x * model.other), donate_argnames=())

    whole, of_all = jnp.arange(3), make()
    for scale, other in (
        (1, 1),
        (1.0, 1),
        (True, 1),
        (0, 1),
        (False, 1),
        (0.0, 1),
        *([] if one_step else [(1, 1.0), (1, True)]),
    ):
        step = of_all if one_step else make()
        model, by_scale, by_other = step(Scaled(jnp.ones(3), scale, other), whole)
        for value, product, kept in ((scale, by_scale, model.scale), (other, by_other, model.other)):
            assert (type(kept), kept) == (type(value), value)
            assert product.dtype == (whole * value).dtype
            np.testing.assert_array_equal(product, whole * value)


@pytest.mark.core
@pytest.mark.parametrize("policy", [None, "donate", "donate+full_remat"])
def test_numbers_of_an_equinox_step_stay_numbers(policy: Any) -> None:
    @eqx.filter_jit
    def step(weights: Any, x: jax.Array, options: dict[str, Any]) -> Any:
        def error(weights: Any) -> jax.Array:
            made = x
            for _ in range(options["depth"]):
                made = jnp.tanh(made @ weights["w"] * options["gain"])
            return jnp.mean((made - x) ** 2)

        value, gradients = jm.eqx.value_and_grad(error)(weights)
        return eqx.apply_updates(weights, gradients), value, options

    for options in ({"depth": 3, "gain": 1.5}, {"depth": 2, "gain": 2}):
        given = {"w": jnp.eye(16) / 2}, jnp.linspace(-1, 1, 64).reshape(4, 16), options
        theirs = step(*given)
        ours = jm.jit_step(step, policy)(*given)
        again = jm.jit_step(jm.jit_step(step, policy), "full_remat")(
            {"w": jnp.eye(16)}, *given[1:]
        )  # under another policy
        for found in (ours, again):
            assert [(type(each), each) for each in found[2].values()] == [
                (type(each), each) for each in options.values()
            ]
        np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-6)
        np.testing.assert_allclose(ours[0]["w"], theirs[0]["w"], rtol=1e-6)


@pytest.mark.core
def test_a_step_takes_models_and_trees_without_one_in_any_order() -> None:
    def half(weights: Any, kind: str) -> Any:
        if isinstance(weights, dict):
            return {"is": kind, "made": Scaled(weights["w"] / 2, kind, None)} if kind == "whole" else weights["w"] / 2
        return weights.activation(weights.layers[0].weight) / 2

    step = jm.jit_step(half, donate_argnames=())
    for _ in range(2):
        assert step({"w": jnp.ones(2)}, "plain").tolist() == [0.5, 0.5]
        np.testing.assert_allclose(step(net(), "plain"), jax.nn.gelu(net().layers[0].weight) / 2, rtol=1e-6)
        made = step({"w": jnp.ones(2)}, "whole")
        assert (made["is"], made["made"].scale) == ("whole", "whole")
    traced = []
    known = jm.jit_step(lambda weights, kind: traced.append(kind) or weights, donate_argnames=())
    known({"w": jnp.ones(2)}, "plain")
    for _ in range(3):
        known(net(), "plain")
    assert len(traced) == len(set(map(str, traced))) + 1  # once for each tree: the word is the same one


def test_models_inside_of_other_trees() -> None:
    """A state that is a tuple, a dict or a NamedTuple of models and numbers; a keyword; None."""

    def step(state: Any, optimizer: Any = OPTIMIZER, *, data: Any, teacher: Any = None) -> Any:
        value, gradients = jm.value_and_grad(loss)(state["model"], data, jax.random.key(0))
        updates, opt_state = optimizer.update(gradients, state["opt"])
        model = eqx.apply_updates(state["model"], updates)
        extra = 0.0 if teacher is None else loss(teacher[0], data, jax.random.key(0))
        return {"model": model, "opt": opt_state, "count": state["count"] + 1}, value + extra

    jitted = jm.jit_step(step, "donate+full_remat")
    model, opt_state = begun()
    state = {"model": model, "opt": opt_state, "count": 0}
    state, _ = jitted(state, OPTIMIZER, data=batch())
    state, _ = jitted(state, data=batch(), teacher=(net(1), None))
    assert int(state["count"]) == 2
    assert jitted.donated == ("state",)
    assert state["model"].activation is jax.nn.gelu


@pytest.mark.core
def test_what_the_step_needs_and_a_plan_of_it() -> None:
    model, opt_state = begun()
    args = (model, opt_state, batch(), jax.random.key(0))
    memory = jm.step_memory(train_step, *args)
    assert [(row.name, row.kind) for row in memory.arguments] == [
        ("model", "parameters"),
        ("opt_state", "optimizer state"),
        ("data", "batch"),
        ("key", "other"),
    ]
    assert memory.signature[0] == ("model.layers[0].weight", f"float32[{WIDTH},{WIDTH}]")
    assert memory.alias_bytes >= sum(array.nbytes for array in arrays((model, opt_state))) - 64
    plan = jm.plan(train_step, *args)
    assert plan.record.signature[0] == memory.signature[0]
    dynamic, static = eqx.partition(model, eqx.is_array)

    def by_hand(arrays: Any, *others: Any) -> Any:
        return eqx.filter(train_step(eqx.combine(arrays, static), *others), eqx.is_array)

    compiled = jax.jit(by_hand, donate_argnums=(0, 1)).lower(dynamic, *args[1:]).compile().memory_analysis()
    assert memory.temp_bytes == compiled.temp_size_in_bytes
    assert memory.argument_bytes == compiled.argument_size_in_bytes


@pytest.mark.targets
@pytest.mark.recorded
def test_a_gpu_that_is_not_there_needs_what_it_needs_for_equinox() -> None:
    needs_compiler("h100_sxm")
    model, opt_state = begun()
    args = (model, opt_state, batch(), jax.random.key(0))
    ours = jm.step_memory(jm.jit_step(train_step, donate_argnames=()), *args, target="h100_sxm")
    theirs = jm.step_memory(eqx.filter_jit(train_step), *args, target="h100_sxm")
    assert ours.step_bytes == pytest.approx(theirs.step_bytes, abs=1024)
    assert jm.step_memory(train_step, *args, target="h100_sxm").alias_bytes >= 3 * 4 * WIDTH * WIDTH * 4


@pytest.mark.core
def test_a_model_with_functions_is_divided_over_devices(by_equinox: Any) -> None:
    mesh = jm.make_mesh({"fsdp": 8})
    with jax.set_mesh(mesh):
        state = begun()
        policy = jm.StepPolicy(remat="full", sharding="fsdp", donate="auto")
        step = jm.jit_step(train_step, policy)
        model, opt_state = eqx.filter_shard(state, jm.infer_shardings(state, mesh, "fsdp"))
        data = jax.device_put(batch(), jax.NamedSharding(mesh, jax.P("fsdp")))
        for number in range(3):
            key = jax.device_put(jax.random.key(number), jax.NamedSharding(mesh, jax.P()))
            model, opt_state, metrics = step(model, opt_state, data, key)
    assert model.layers[0].weight.sharding.spec == jax.P("fsdp")
    assert float(metrics["loss"]) == pytest.approx(by_equinox[2], rel=1e-4)


def test_microbatches_of_a_whole_model() -> None:
    def plain(model: Net, data: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jax.vmap(eqx.nn.inference_mode(model), (0, None))(data["x"], None) - data["x"]) ** 2)

    def step(model: Net, data: Any) -> Any:
        value, gradients = jm.value_and_grad(plain)(model, data)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients)), value

    whole, _ = jm.jit_step(step)(net(), batch())
    parts, _ = jm.jit_step(step, jm.StepPolicy(microbatches=4))(net(), batch())
    for ours, theirs in zip(arrays(parts), arrays(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


# jm.eqx


@pytest.mark.core
@pytest.mark.parametrize("policy", [None, "full_remat"])
def test_gradients_in_equinoxs_own_forms(policy: Any) -> None:
    """A function, a decorator with and without options, aux; a model, and a tree with whole numbers that JAX refuses."""

    def of_tree(tree: Any, x: jax.Array) -> Any:
        value = jnp.mean(jnp.tanh(x @ tree["w"]) ** tree["power"]) * tree["scale"]
        return value, {"x": x.sum()}

    tree = {"w": jnp.eye(8), "power": jnp.array(2), "scale": 3.0, "name": "mine"}
    x = jnp.linspace(-1, 1, 32).reshape(4, 8)
    theirs = eqx.filter_value_and_grad(of_tree, has_aux=True)(tree, x)

    def step(arrays: jax.Array) -> Any:
        whole = {**tree, "w": arrays}
        ours = jm.eqx.value_and_grad(of_tree, has_aux=True)(whole, x)
        decorated = jm.eqx.value_and_grad(has_aux=True)(of_tree)(whole, x)
        gradient, aux = jm.eqx.grad(has_aux=True)(of_tree)(whole, x)

        @jm.eqx.grad
        def plain(whole: Any) -> jax.Array:
            return of_tree(whole, x)[0]

        return ours, decorated, ((ours[0][0], aux), gradient), ((ours[0][0], aux), plain(whole))

    run = step if policy is None else jm.apply_policy(step, policy)
    for found in run(tree["w"]):
        assert jax.tree.structure(found) == jax.tree.structure(theirs)
        for ours, theirs_leaf in zip(jax.tree.leaves(found), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(ours, theirs_leaf, rtol=1e-6)
    model, data, key = net(), batch(), jax.random.key(0)
    _, ours = jax.jit(lambda: eqx.filter(jm.eqx.value_and_grad(loss)(model, data, key), eqx.is_array))()
    _, theirs = eqx.filter_value_and_grad(loss)(model, data, key)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)


def test_the_line_with_equinoxs_own_gradient_is_named() -> None:
    def train_step(model: Any, data: Any, key: jax.Array) -> Any:
        return eqx.filter_value_and_grad(loss)(model, data, key)

    said = (
        r"train_step never calls .* or jm\.eqx\.value_and_grad\. Change .*test_equinox\.py:\d+ from "
        r"eqx\.filter_value_and_grad to jm\.eqx\.value_and_grad:\n    return eqx\.filter_value_and_grad\(loss\)"
    )
    with pytest.raises(jm.PolicyError, match=said):
        jm.jit_step(train_step, "full_remat")(net(), batch(), jax.random.key(0))


def test_equinoxs_gradients_take_no_argnums() -> None:
    for name in ("value_and_grad", "grad"):
        with pytest.raises(
            TypeError, match=rf"jm\.eqx\.{name} differentiates its first argument, as eqx\.filter_{name} does"
        ):
            getattr(jm.eqx, name)(loss, argnums=1)
