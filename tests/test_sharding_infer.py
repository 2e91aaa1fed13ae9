"""`jm.infer_shardings` by shape: which dimension is split, what stays whole, and that optimizer state follows parameters."""

from __future__ import annotations

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.transforms.sharding.mesh import abstract_mesh
from tests import sharded_models

pytestmark = pytest.mark.core
MESH = abstract_mesh("fsdp=4,tensor=2", 8)
POLICIES = ("replicate", "zero1", "fsdp", "fsdp_tensor")


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def specs(state: Any, sharding: Any, mesh: Any = MESH) -> Any:
    return jax.tree.map(lambda s: s.spec, jm.infer_shardings(state, mesh, jm.StepPolicy(sharding=sharding)))


@pytest.mark.parametrize(
    ("shape", "fsdp", "fsdp_tensor"),
    [
        ((512, 2048), P("fsdp"), P("fsdp", "tensor")),  # what a product sums over; matrices wide along tensor
        ((2048, 512), P("fsdp"), P(("tensor", "fsdp"))),  # both mean the first, and share it
        ((512, 512), P("fsdp"), P("fsdp", "tensor")),
        ((512, 8, 64), P("fsdp"), P("fsdp", "tensor")),  # heads
        ((510, 2046), P(), P("tensor")),  # 4 divides neither, 2 both; fsdp finds none
        ((510, 1000), P(None, "fsdp"), P("tensor", "fsdp")),  # the first does not divide, the next does
        ((1002, 1000), P(None, "fsdp"), P("tensor", "fsdp")),
        ((999, 1001), P(), P()),
        ((65536,), P("fsdp"), P("fsdp")),  # a vector is never split over tensor
        ((), P(), P()),
    ],
)
def test_the_first_dimension_that_divides_is_split(shape, fsdp, fsdp_tensor):
    state = {"w": f32(*shape), "a": f32(512, 512), "b": f32(512, 512), "c": f32(512, 512)}  # a model of width 512
    assert specs(state, "fsdp")["w"] == fsdp
    assert specs(state, "fsdp_tensor")["w"] == fsdp_tensor
    assert specs(state, "replicate")["w"] == specs(state, "zero1")["w"] == P()


def test_small_arrays_stay_whole():
    state = {"w": f32(4096, 4096), "bias": f32(16384 - 4), "long": f32(16384), "stacked": f32(96, 4096, 4)}
    assert specs(state, "fsdp") == {"w": P("fsdp"), "bias": P(), "long": P("fsdp"), "stacked": P(None, "fsdp")}
    narrow = {"w": f32(4096, 4096), "blocks": {"w": f32(96, 4096, 4096), "bias": f32(96, 4096)}}
    assert specs(narrow, "fsdp")["blocks"] == {"w": P(None, "fsdp"), "bias": P()}  # a layer's share counts
    assert specs({"w": f32(32, 64), "scale": f32(64)}, "fsdp") == {"w": P("fsdp"), "scale": P()}  # a small state


def test_keys_and_numbers_stay_whole_and_functions_are_left_out():
    state = {"w": f32(512, 512), "step": 3, "keys": jax.random.split(jax.random.key(0), 4096), "f": jax.nn.relu}
    found = jm.infer_shardings(state, MESH, jm.StepPolicy(sharding="fsdp"))
    assert found["f"] is None
    assert (found["step"].spec, found["keys"].spec) == (P(), P())


def test_axes_of_one_device_split_nothing():
    state = {"w": f32(512, 512)}
    assert specs(state, "fsdp_tensor", abstract_mesh("fsdp=8,tensor=1", 8)) == {"w": P("fsdp")}
    assert specs(state, "fsdp", abstract_mesh("data=1,fsdp=1", 1)) == {"w": P()}


OPTIMIZERS = {
    "adamw": (lambda: optax.adamw(1e-3), 4),
    "masked": (lambda: optax.masked(optax.adam(1e-3), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)), 4),
    "multi_steps": (lambda: optax.MultiSteps(optax.adam(1e-3), 4), 6),
    "inject": (lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3), 4),
    "partitioned": (lambda: optax.partition({"a": optax.adam(1e-3)}, lambda p: jax.tree.map(lambda _: "a", p)), 4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sharding", ["zero1", "fsdp", "fsdp_tensor"])
def test_optimizer_state_lies_as_its_parameters_would(name, sharding):
    make, mirrors = OPTIMIZERS[name]
    params = {"a": {"w": f32(512, 2048)}, "b": {"w": f32(2048, 512)}, "bias": f32(8)}
    optimizer = jax.eval_shape(make().init, params)
    got = specs((params, optimizer), sharding)
    wanted = specs(params, "fsdp" if sharding == "zero1" else sharding)
    assert got[0] == (specs(params, "replicate") if sharding == "zero1" else wanted)
    leaves = list(zip(jax.tree.leaves(optimizer), jax.tree.leaves(got[1]), strict=True))
    for layer in ("a", "b"):
        same = [spec for leaf, spec in leaves if leaf.shape == params[layer]["w"].shape]
        assert len(same) == mirrors // 2
        assert set(same) == {wanted[layer]["w"]}
    assert specs(optimizer, sharding) == got[1]  # alone as well as beside its parameters


def test_factored_moments_have_their_own_shapes():
    params = {"w": f32(8192, 65536), "blocks": {"w": f32(8, 65536, 32768)}}
    factored = jax.eval_shape(optax.adafactor(1e-3).init, params)
    got = jax.tree.leaves(specs((params, factored), "fsdp")[1])
    shapes = [leaf.shape for leaf in jax.tree.leaves(factored)]
    assert (8, 32768) in shapes
    for shape, spec in zip(shapes, got, strict=True):
        assert spec == (P() if max(shape, default=0) < 8192 else P(None, "fsdp") if shape[0] == 8 else spec)
    assert P("fsdp") in got


LAYER_AXIS = {
    "matrices": {"embed": f32(1000, 9), "blocks": {"w": f32(8, 9, 27), "b": f32(8, 27), "gate": f32(8)}},
    "flat dictionary": {"embed": f32(1000, 9), "w": f32(8, 9, 27), "b": f32(8, 27)},
    "more layers than width": {"w": f32(24, 6, 6), "b": f32(24, 6)},
    "no matrices": {"out": f32(9, 64), "blocks": {"scale": f32(8, 1001), "bias": f32(8, 1001)}},
    "nested stacks": {"blocks": {"w": f32(8, 16, 99, 99)}},
    "one array": f32(8, 99, 101),
}


@pytest.mark.parametrize("name", LAYER_AXIS)
@pytest.mark.parametrize("sharding", ["zero1", "fsdp", "fsdp_tensor"])
def test_the_leading_dimension_of_stacks_is_never_split(name, sharding):
    """Eight layers divide by four devices, and the other dimensions do not."""
    params = LAYER_AXIS[name]
    state = (params, jax.eval_shape(optax.adam(1e-3).init, params))
    for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(specs(state, sharding)), strict=True):
        if leaf.shape[:1] in {(8,), (24,)}:
            assert not spec or spec[0] is None, (leaf.shape, spec)


def test_matrices_beside_stacks_are_split_all_the_same():
    state = {"blocks": {"w": f32(8, 64, 64)}, "head": f32(512, 63), "q": f32(512, 8, 64), "square": f32(256, 256)}
    found = specs(state, "fsdp")
    assert (found["head"], found["q"], found["square"]) == (P("fsdp"), P("fsdp"), P("fsdp"))


@pytest.mark.parametrize("kind", sharded_models.CASES)
@pytest.mark.parametrize("sharding", ["zero1", "fsdp", "fsdp_tensor"])
def test_the_layer_axis_of_each_framework_is_never_split(kind, sharding):
    state = abstract_state(kind)
    split = 0
    for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(specs(state, sharding)), strict=True):
        if getattr(leaf, "shape", ())[:1] == (sharded_models.LAYERS,):
            assert not spec or spec[0] is None, (leaf.shape, spec)
            split += bool(spec)
    assert split >= (2 if sharding == "zero1" else 4)


def abstract_state(kind: str) -> tuple[Any, ...]:
    state = sharded_models.case_of(kind).state
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def test_an_abstract_module_and_its_state_are_placed_like_the_real_one():
    def make() -> tuple[Any, Any]:
        model = sharded_models.NnxModel(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(make)
    policy = jm.StepPolicy(sharding="fsdp")
    found = jm.infer_shardings((model, optimizer), MESH, policy)
    assert found[0].blocks.wide.kernel.get_value().spec == P(None, "fsdp")
    assert found[1].opt_state[0].mu["blocks"]["wide"]["kernel"].get_value().spec == P(None, "fsdp")
    assert jax.tree.leaves(found[0]) == jax.tree.leaves(jm.infer_shardings(nnx.state(model), MESH, policy))


def test_an_equinox_model_keeps_its_functions_out():
    model = eqx.nn.MLP(64, 64, 256, 1, key=jax.random.key(0))
    mesh = jm.make_mesh("fsdp=8")
    found = jm.infer_shardings(model, mesh, jm.StepPolicy(sharding="fsdp"))
    assert found.layers[0].weight.spec == P("fsdp")
    arrays = eqx.filter(model, eqx.is_array)
    moved = eqx.combine(jax.device_put(arrays, eqx.filter(found, lambda x: x is not None)), model)
    assert moved.layers[0].weight.sharding == found.layers[0].weight


def test_a_train_state_can_be_moved_by_what_comes_out():
    state = sharded_models.case_of("linen").state[0]
    mesh = jm.make_mesh("data=2,fsdp=4")
    found = jm.infer_shardings(state, mesh, jm.load_preset("fsdp"))
    moved = jax.device_put(state, found)
    assert moved.params["Embed_0"]["embedding"].sharding.spec == P("fsdp")
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(moved)} == {mesh}


@pytest.mark.parametrize("sharding", POLICIES)
def test_nothing_is_allocated(sharding):
    before = len(jax.live_arrays())
    specs({"w": jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32)}, sharding)
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize(
    ("mesh", "policy", "told"),
    [
        (
            MESH,
            jm.StepPolicy(),
            "The policy sets no sharding. Expected one that does: jm.load_preset('fsdp')",
        ),
        (None, jm.StepPolicy(sharding="fsdp"), "infer_shardings got the mesh None"),
        (
            jax.sharding.get_abstract_mesh(),
            jm.StepPolicy(sharding="fsdp"),
            "infer_shardings got the mesh AbstractMesh(()",
        ),
        (
            abstract_mesh("a=2,b=4", 8),
            jm.StepPolicy(sharding="zero1"),
            "sharding='zero1' needs an axis for the state, called one of fsdp,",
        ),
        (
            abstract_mesh("fsdp=8", 8),
            jm.StepPolicy(sharding="fsdp_tensor"),
            'the mesh has the axes fsdp=8. Type jm.make_mesh({"fsdp": -1, "tensor": 2}).',
        ),
    ],
)
def test_what_is_missing_is_told(mesh, policy, told):
    with pytest.raises(PolicyError, match=re.escape(told)):
        jm.infer_shardings({"w": f32(8, 8)}, mesh, policy)


def test_a_name_instead_of_a_policy_is_answered_with_the_call():
    with pytest.raises(jm.PresetError, match=re.escape("Unknown preset or policy 'fspd'. Did you mean `fsdp`?")):
        jm.infer_shardings({}, MESH, "fspd")
