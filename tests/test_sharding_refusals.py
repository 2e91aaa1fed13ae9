"""`jm.jit_step` under a sharding policy: where the mesh comes from, and that nothing is moved or left undone silently."""

from __future__ import annotations

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.steps.placement import Pin, require_placed
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.transforms.sharding.mesh import abstract_mesh
from tests.pasting import pasted, run

pytestmark = pytest.mark.core
FSDP = jm.StepPolicy(sharding="fsdp")
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


@pytest.fixture(scope="module")
def mesh() -> Any:
    return jm.make_mesh("fsdp=8")


def loss_fn(params: Any, batch: Any) -> Any:
    return ((batch @ params["w"]) ** 2).mean()


def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
    loss, grads = jm.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


def data() -> tuple[Any, Any, Any]:
    params = {"w": jnp.ones((16, 64)) / 16}
    return params, OPTIMIZER.init(params), jnp.ones((8, 16))


def placed(mesh: Any, policy: jm.StepPolicy = FSDP) -> tuple[Any, Any, Any]:
    params, opt_state, batch = data()
    state = jax.device_put((params, opt_state), jm.infer_shardings((params, opt_state), mesh, policy))
    return *state, jax.device_put(batch, NamedSharding(mesh, P("fsdp")))


class Loop:
    """A step that is a method, and a state in attributes."""

    def __init__(self) -> None:
        self.params, self.opt_state, _ = data()

    def train_step(self, params: Any, opt_state: Any, batch: Any) -> Any:
        return train_step(params, opt_state, batch)


@pytest.mark.parametrize("kind", ["function", "method", "partial"])
def test_without_a_mesh_the_line_that_sets_one_is_shown(kind):
    function = {"function": train_step, "method": Loop().train_step, "partial": functools.partial(train_step)}[kind]
    step = jm.jit_step(function, FSDP)
    with pytest.raises(PolicyError, match="sharding='fsdp' needs a mesh, and none is set where") as caught:
        step(*data())
    before = jax.sharding.get_mesh()
    try:
        run(pasted("sharding.set_mesh", caught.value), jax=jax, jm=jm)
        *state, batch = placed(jax.sharding.get_mesh())
        params, *_ = step(*state, batch)
    finally:
        jax.set_mesh(before)
    assert params["w"].sharding.spec == P("fsdp")


@pytest.mark.parametrize("kind", ["names", "attributes", "one", "keywords", "rules"])
def test_a_state_that_lies_elsewhere_is_moved_by_the_line_that_is_shown(kind, mesh):
    """In the names of the user's own call, on the user's own mesh."""
    weights, moments, batch = data()
    loop, rows = Loop(), jax.device_put(batch, NamedSharding(mesh, P("fsdp")))
    policy = jm.StepPolicy(sharding=(("embed", "fsdp"),)) if kind == "rules" else FSDP

    def one_state(state: Any, batch: Any) -> Any:
        params, opt_state, loss = train_step(*state, batch)
        return (params, opt_state), loss

    def annotated(params: Any, batch: Any) -> Any:
        return jax.tree.map(lambda x: x + batch.sum(), params), 0.0

    step = jm.jit_step({"one": one_state, "rules": annotated}.get(kind, train_step), policy)
    everything = (weights, moments)
    boxed = nn.LogicallyPartitioned(jnp.ones((64, 64)), names=("embed", None))
    call = {
        "names": lambda: step(weights, moments, batch),
        "attributes": lambda: step(loop.params, loop.opt_state, batch),
        "one": lambda: step(everything, batch),
        "keywords": lambda: step(weights, batch=batch, opt_state=moments),
        "rules": lambda: step(boxed, batch),
    }[kind]
    with jax.set_mesh(mesh):
        with pytest.raises(
            PolicyError, match=r"is placed as SingleDeviceSharding.*\. It is never moved silently"
        ) as caught:
            call()
        line = pasted("sharding.move", caught.value)
        assert "mesh, policy" not in line, "these are names of the library's own"
        if kind == "rules":
            assert pasted("sharding.rules", line) in line
        assert not weights["w"].is_deleted()
        has = {"weights": weights, "moments": moments, "loop": loop, "everything": everything, "boxed": boxed}
        moved = run(line, jax=jax, jm=jm, **has)
        if kind == "one":
            state, _ = step(moved["everything"], rows)
            params = state[0]
        elif kind == "rules":
            params, _ = step(moved["boxed"], rows)
            assert params.value.sharding.spec == P("fsdp")
            return
        elif kind == "attributes":
            params, *_ = step(loop.params, loop.opt_state, rows)
        else:
            params, opt_state, _ = step(moved["weights"], moved["moments"], rows)
            half_moved = jax.device_put(opt_state, NamedSharding(mesh, P()))
            with pytest.raises(
                PolicyError, match=re.escape("opt_state[0].trace['w'] is placed as NamedSharding(mesh=")
            ):
                step(params, half_moved, rows)
            assert not params["w"].is_deleted()
        assert params["w"].sharding.spec == P("fsdp")


@pytest.mark.parametrize("kind", ["model", "both", "one"])
def test_models_with_functions_are_moved_by_the_line_that_is_shown(kind, mesh):
    net = eqx.nn.MLP(16, 16, 64, 2, activation=jax.nn.gelu, key=jax.random.key(0))
    moments = OPTIMIZER.init(eqx.filter(net, eqx.is_inexact_array))

    def of_both(model: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jm.eqx.value_and_grad(lambda model: (jax.vmap(model)(batch) ** 2).mean())(model)
        updates, opt_state = OPTIMIZER.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    def of_model(model: Any, batch: Any) -> Any:
        grads = jm.eqx.grad(lambda model: (jax.vmap(model)(batch) ** 2).mean())(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -g, grads)), 0.0

    def of_one(state: Any, batch: Any) -> Any:
        model, opt_state, loss = of_both(*state, batch)
        return (model, opt_state), loss

    step = jm.jit_step({"model": of_model, "both": of_both, "one": of_one}[kind], FSDP)
    state = (net, moments)
    with jax.set_mesh(mesh):
        batch = jax.device_put(data()[2], NamedSharding(mesh, P("fsdp")))
        call = {
            "model": lambda: step(net, batch),
            "both": lambda: step(net, moments, batch),
            "one": lambda: step(state, batch),
        }[kind]
        with pytest.raises(PolicyError, match="is placed as SingleDeviceSharding") as caught:
            call()
        line = pasted("sharding.move_modules", caught.value)
        moved = run(line, jax=jax, jm=jm, eqx=eqx, net=net, moments=moments, state=state)
        net, moments, state = moved["net"], moved["moments"], moved["state"]
        model, *_ = call()
    if kind == "one":
        model = model[0]
    assert model.layers[1].weight.sharding.spec == P("fsdp")


def test_fresh_counters_of_one_element_may_lie_anywhere(mesh):
    """`tx.init` and `TrainState.create` make them; JAX spreads a single number, and nothing is compiled twice for it."""
    optimizer = optax.adam(1e-3)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jm.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    params, _, batch = placed(mesh)
    opt_state = optimizer.init(params)
    assert not opt_state[0].count.committed
    jitted = jm.jit_step(step, FSDP)
    with jax.set_mesh(mesh):
        for _ in range(2):
            params, opt_state, _ = jitted(params, opt_state, batch)
    assert int(opt_state[0].count) == 2


def test_an_open_place_differs_from_what_a_filtered_model_does_not_hold(mesh):
    w = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("fsdp")))
    model = {"activation": None, "count": jnp.zeros(2), "w": w}
    required = {"activation": None, "count": None, "w": NamedSharding(mesh, P("fsdp"))}
    pin = Pin(argument="model", shardings=required, place=None, required_by="sharding='fsdp'", move="...")
    require_placed(pin, model)
    with pytest.raises(PolicyError, match=r"model\['w'\] is placed as .* expected .*'fsdp'"):
        require_placed(pin, model | {"w": jnp.ones(8)})


def test_the_mesh_of_state_shardings_is_used_and_its_word_wins(mesh):
    params, opt_state, batch = placed(mesh)
    other = {"w": NamedSharding(mesh, P(None, "fsdp"))}  # the other dimension
    params = jax.device_put(params, other)
    step = jm.jit_step(train_step, FSDP, state_shardings=other)
    with pytest.raises(PolicyError, match=r"opt_state\[0\]\.trace\['w'\] is placed as SingleDevice"):
        step(params, OPTIMIZER.init(data()[0]), batch)
    params, opt_state, _ = step(params, opt_state, batch)
    assert params["w"].sharding.spec == P(None, "fsdp")
    assert opt_state[0].trace["w"].sharding.spec == P("fsdp")


@pytest.mark.parametrize("kind", ["tree", "one for all", "of the optimizer"])
def test_the_mesh_of_state_shardings_is_in_the_line_that_is_shown(kind, mesh):
    """No mesh is set; the first argument's place is the user's own word, or the second's."""
    weights, moments, batch = placed(mesh)
    split = NamedSharding(mesh, P("fsdp"))
    by_policy = jax.tree.map(lambda array: array.sharding, moments)
    state_shardings = {"tree": {"w": split}, "one for all": split, "of the optimizer": by_policy}[kind]
    step = jm.jit_step(train_step, FSDP, state_shardings=state_shardings)
    elsewhere = jax.device_put((weights, moments), jax.devices()[0])
    if kind == "of the optimizer":
        weights = elsewhere[0]
    else:
        moments = elsewhere[1]
    with pytest.raises(PolicyError, match="is placed as SingleDevice") as caught:
        step(weights, moments, batch)
    line = pasted("sharding.move", caught.value)
    assert pasted("sharding.mesh_of_state", line) in line
    has = {"weights": weights, "moments": moments, "state_shardings": state_shardings}
    moved = run(line, jax=jax, jm=jm, **has)
    params, *_ = step(moved["weights"], moved["moments"], batch)
    assert params["w"].sharding.spec == P("fsdp")


def test_shardings_of_the_whole_state_are_enough(mesh):
    def one_state(state: Any, batch: Any) -> Any:
        return jax.tree.map(lambda x: x + batch.sum(), state), 0.0

    state = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    wanted = jm.infer_shardings(state, mesh, FSDP)
    step = jm.jit_step(one_state, FSDP, state_shardings=wanted)
    state, _ = step(jax.device_put(state, wanted), jnp.ones(8))
    assert state["w"].sharding == wanted["w"]


def test_a_policy_and_shardings_that_contradict_each_other_are_refused(mesh):
    params, opt_state, batch = placed(mesh)
    whole = {"w": NamedSharding(mesh, P())}
    step = jm.jit_step(train_step, FSDP, state_shardings=whole)
    with pytest.raises(PolicyError, match="sharding='fsdp' and state_shardings contradict each other"):
        step(jax.device_put(params, whole), opt_state, batch)


def test_a_policy_that_would_split_nothing_is_refused(mesh):
    def step(state: Any, batch: Any) -> Any:
        return jax.tree.map(lambda x: x + batch.sum(), state), 0.0

    with jax.set_mesh(mesh):
        with pytest.raises(
            PolicyError, match=re.escape("sharding='fsdp' would do nothing on this mesh (fsdp=8): no array")
        ):
            jm.jit_step(step, FSDP)({"w": jnp.ones((63, 63))}, jnp.ones(8))
        with pytest.raises(PolicyError, match="sharding='zero1' would do nothing on this mesh"):
            jm.jit_step(step, jm.StepPolicy(sharding="zero1"))({"w": jnp.ones((64, 64))}, jnp.ones(8))
        with pytest.raises(
            PolicyError, match=r"would do nothing: <lambda> returns none of its arguments updated \(state, batch\)"
        ):
            jm.jit_step(lambda state, batch: (state["w"] * batch).sum(), FSDP)({"w": jnp.ones((8, 8))}, jnp.ones(8))


def test_one_device_is_no_reason_to_refuse():
    with jax.set_mesh(jm.make_mesh("fsdp=1", devices=jax.devices()[:1])):
        params, _, loss = jm.jit_step(train_step, FSDP)(*data())
    assert np.isfinite(loss)
    assert params["w"].shape == (16, 64)


def test_arrays_by_keyword_are_refused(mesh):
    params, opt_state, batch = placed(mesh)
    with (
        jax.set_mesh(mesh),
        pytest.raises(PolicyError, match="sharding='fsdp' pins arguments by position, and batch came"),
    ):
        jm.jit_step(train_step, FSDP)(params, opt_state, batch=batch)


def test_a_switch_by_keyword_beside_an_nnx_module_is_refused(mesh):
    def step(model: Any, batch: Any, *, square: bool) -> Any:
        return model(batch).sum() if square else 0.0

    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    model = jax.device_put(model, jm.infer_shardings(model, mesh, FSDP))
    with jax.set_mesh(mesh), pytest.raises(PolicyError, match="pins arguments by position, and square came by keyword"):
        jm.jit_step(step, FSDP)(model, jnp.ones((8, 64)), square=True)


def test_switches_and_results_in_dictionaries_are_pinned_around(mesh):
    def step(params: Any, batch: Any, *, square: bool) -> Any:
        value = (batch**2 if square else batch).sum()
        return {"loss": value, "params": jax.tree.map(lambda x: x + value, params)}

    params, _, batch = placed(mesh)
    jitted = jm.jit_step(step, FSDP)
    with jax.set_mesh(mesh):
        params = jitted(params, batch, square=True)["params"]
        params = jitted(params, batch, square=False)["params"]
    assert params["w"].sharding.spec == P("fsdp")


def test_a_state_of_other_shapes_is_pinned_anew(mesh):
    step = jm.jit_step(train_step, FSDP)
    with jax.set_mesh(mesh):
        step(*placed(mesh))
        params = {"w": jnp.ones((12, 64)) / 16}  # of which only the other dimension divides
        state = (params, OPTIMIZER.init(params))
        moved = jax.device_put(state, jm.infer_shardings(state, mesh, FSDP))
        params, _, _ = step(*moved, jnp.ones((8, 12)))
    assert params["w"].sharding.spec == P(None, "fsdp")


def test_a_shorter_batch_keeps_the_state_where_it_is(mesh):
    step = jm.jit_step(train_step, FSDP)
    params, opt_state, batch = placed(mesh)
    with jax.set_mesh(mesh):
        params, opt_state, _ = step(params, opt_state, batch)
        params, opt_state, _ = step(params, opt_state, jnp.ones((3, 16)))
    assert params["w"].sharding.spec == P("fsdp")


def test_a_step_that_the_user_jitted_is_held_against_the_policy(mesh):
    params, opt_state, batch = placed(mesh)
    wanted = jm.infer_shardings((params, opt_state), mesh, FSDP)
    elsewhere = (NamedSharding(mesh, P()), None, None)
    careless = jax.jit(train_step, out_shardings=elsewhere)
    with jax.set_mesh(mesh):
        for jit, said in (
            (jax.jit, "jax.jit"),
            (nnx.jit, "nnx.jit"),
        ):  # plain jax.jit would lose updates of NNX modules
            with pytest.raises(PolicyError, match="train_step is already jitted and returns params") as caught:
                jm.jit_step(jit(train_step, out_shardings=elsewhere), FSDP)(params, opt_state, batch)
            assert f"Write out_shardings in the {said} of train_step" in str(caught.value)
        with pytest.raises(
            PolicyError, match=r"params\['w'\] is placed as .*, expected .* as sharding='fsdp' requires"
        ):
            jm.jit_step(careless, FSDP)(*data())
        pinned = jm.jit_step(jax.jit(train_step, out_shardings=(*wanted, None)), FSDP)
        params, _, _ = pinned(params, opt_state, batch)
    assert params["w"].sharding.spec == P("fsdp")


def test_an_equinox_jit_is_held_against_the_policy_too(mesh):
    model = eqx.nn.Linear(64, 64, key=jax.random.key(0))

    @eqx.filter_jit
    def train(model: Any, batch: Any) -> Any:
        return jax.tree.map(lambda x: x - batch.sum(), model), batch.sum()

    with jax.set_mesh(mesh):
        with pytest.raises(PolicyError, match=re.escape("model.weight is placed as SingleDeviceSharding")):
            jm.jit_step(train, FSDP)(model, jnp.ones(8))
        moved = jax.device_put(model, jm.infer_shardings(model, mesh, FSDP))
        model, _ = jm.jit_step(train, FSDP)(moved, jnp.ones(8))
    assert model.weight.sharding.spec == P("fsdp")


def test_nnx_objects_are_told_and_moved_as_trees(mesh):
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))

    def train(model: Any, batch: Any) -> Any:
        _, grads = jm.nnx.value_and_grad(lambda m: (m(batch) ** 2).mean())(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model, nnx.Param), grads))

    step = jm.jit_step(train, FSDP)
    with jax.set_mesh(mesh):
        line = re.escape('model = jax.device_put(model, jm.infer_shardings(model, jax.sharding.get_mesh(), "fsdp"))')
        with pytest.raises(PolicyError, match=line):
            step(model, jnp.ones((8, 64)))
        model = jax.device_put(model, jm.infer_shardings(model, mesh, FSDP))
        before = model.kernel[...] + 0
        step(model, jnp.ones((8, 64)))
    assert model.kernel[...].sharding.spec == P("fsdp")
    assert not np.allclose(model.kernel[...], before)


def test_figures_need_no_arrays(mesh):
    """`jm.step_memory` of shapes without shardings compiles the step as the policy places it."""
    state = jax.eval_shape(lambda: data()[:2])
    batch = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    with jax.set_mesh(mesh):
        split = jm.step_memory(jm.jit_step(train_step, FSDP), *state, batch)
        whole = jm.step_memory(jm.jit_step(train_step, jm.StepPolicy(sharding="replicate")), *state, batch)
    assert split.donated_bytes * 8 == whole.donated_bytes == 2 * 16 * 64 * 4
    assert split.alias_bytes == split.donated_bytes


def test_a_step_is_traced_for_devices_that_are_not_there():
    """What planning does: an abstract mesh, shapes only, and every array told where it will be."""
    state = jax.eval_shape(lambda: data()[:2])
    batch = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    with jax.sharding.use_abstract_mesh(abstract_mesh("fsdp=16", 16)):
        traced = jm.jit_step(train_step, FSDP).traced((*state, batch), {})
    specs = {leaf.path: getattr(leaf.value.sharding, "spec", None) for leaf in traced.leaves}
    assert specs["params['w']"] == specs["opt_state[0].trace['w']"] == P("fsdp")
    assert specs["batch"] is None
    assert [getattr(s, "spec", None) for s in traced.out_shardings] == [P("fsdp"), P("fsdp"), None]


def test_a_step_inside_another_trace_is_placed_by_that_one(mesh):
    params, opt_state, batch = placed(mesh)
    step = jm.jit_step(train_step, FSDP)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(step, params, opt_state, batch)
    assert shapes[0]["w"].shape == (16, 64)
