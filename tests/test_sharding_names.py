"""Axis names before shapes: what a model's author wrote, in Flax NNX and in Linen, with rules of the user's or ours."""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.core.meta import Partitioned
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.transforms.sharding.mesh import abstract_mesh

pytestmark = pytest.mark.core
MESH = abstract_mesh("fsdp=4,tensor=2", 8)
ANY = jnp.zeros((512, 2048))


def boxed(names: tuple[Any, ...], shape: tuple[int, ...] = (512, 2048), rules: Any = None) -> Any:
    value = jax.ShapeDtypeStruct(shape, jnp.float32)
    return Partitioned(value, names) if rules is None else nn.LogicallyPartitioned(value, names, rules=rules)


def spec_of(leaf: Any, sharding: Any, mesh: Any = MESH) -> P:
    found = jm.infer_shardings({"w": leaf}, mesh, jm.StepPolicy(sharding=sharding))
    (sharding,) = jax.tree.leaves(found)
    return sharding.spec


@pytest.mark.parametrize(
    ("names", "fsdp", "fsdp_tensor"),
    [
        (("embed", "mlp"), P("fsdp"), P("fsdp", "tensor")),
        (("mlp", "embed"), P(None, "fsdp"), P("tensor", "fsdp")),
        (("vocab", "embed"), P(None, "fsdp"), P("tensor", "fsdp")),
        (("layers", "embed"), P(None, "fsdp"), P(None, "fsdp")),  # the layer axis has no rule
        ((None, "mlp"), P(None, "fsdp"), P(None, "tensor")),
        ((None, "tensor"), P(None, "tensor"), P(None, "tensor")),  # the name of a mesh axis is that axis
        ((None, ("fsdp", "tensor")), P(None, ("fsdp", "tensor")), P(None, ("fsdp", "tensor"))),
        ((None, None), P(), P()),  # the author wants it whole
        (("this", "that"), P("fsdp"), P("fsdp", "tensor")),  # names that mean nothing: by shape
        (("layers", "that"), P(None, "fsdp"), P(None, "fsdp")),  # but not along layers
    ],
)
def test_names_come_before_shapes(names, fsdp, fsdp_tensor):
    for leaf in (boxed(names), nnx_param(names)):
        assert spec_of(leaf, "fsdp") == fsdp
        assert spec_of(leaf, "fsdp_tensor") == fsdp_tensor


def nnx_param(names: Any, **metadata: Any) -> Any:
    with nnx.use_eager_sharding(False):
        return nnx.Param(ANY, out_sharding=names, **metadata)


def test_rules_that_are_shipped_never_refuse_an_array():
    assert spec_of(boxed(("embed", "mlp"), (511, 2048)), "fsdp") == P(None, "fsdp")
    assert spec_of(boxed(("embed", "mlp"), (511, 2047)), "fsdp") == P()
    assert spec_of(boxed(("embed", "mlp"), (512, 2047)), "fsdp_tensor") == P("fsdp")


def test_the_users_rules_come_first():
    rules = {"embed": "tensor", "mlp": ["fsdp"], "norm": None}
    assert spec_of(boxed(("embed", "mlp")), rules) == P("tensor", ("fsdp",))
    assert spec_of(boxed(("embed", "norm")), rules) == P("tensor")
    assert spec_of(boxed(("embed", "other")), rules) == P("tensor")
    state = {"named": boxed(("embed", "mlp")), "bare": jax.ShapeDtypeStruct((512, 2048), jnp.float32)}
    found = jm.infer_shardings(state, MESH, jm.StepPolicy(sharding=rules))
    assert found["bare"].spec == P()  # rules split what they name, and nothing else


def test_rules_count_in_their_order_and_each_axis_once():
    assert spec_of(boxed(("embed", "mlp")), (("mlp", "fsdp"), ("embed", "fsdp"))) == P(None, "fsdp")
    assert spec_of(boxed(("embed", "mlp")), (("mlp", "fsdp"), ("embed", "fsdp"), ("embed", "tensor"))) == P(
        "tensor", "fsdp"
    )


@pytest.mark.parametrize("sharding", ["fsdp", "fsdp_tensor", {"mlp": "tensor"}])
def test_the_models_own_rules_come_before_all_others(sharding):
    own = (("embed", "tensor"), ("mlp", "fsdp"))
    assert spec_of(boxed(("embed", "mlp"), rules=own), sharding) == P("tensor", "fsdp")
    assert spec_of(nnx_param(("embed", "mlp"), sharding_rules=own), sharding) == P("tensor", "fsdp")
    with nn.logical_axis_rules(own):
        assert spec_of(boxed(("embed", "mlp")), sharding) == P("tensor", "fsdp")
        assert spec_of(nnx_param(("embed", "mlp")), sharding) == P("tensor", "fsdp")


def test_whole_along_the_batch_means_whole_along_its_axes():
    """The axes that the batch is divided over are dropped; a tensor axis that the author named stays."""
    for sharding in ("replicate", "zero1"):
        assert spec_of(boxed(("fsdp", "tensor")), sharding) == P(None, "tensor")
        assert spec_of(boxed((None, ("fsdp", "tensor"))), sharding) == P(None, ("tensor",))
        assert spec_of(boxed(("embed", "mlp")), sharding) == P()


def test_zero1_adds_its_axis_to_what_the_author_split():
    params = {"w": boxed((None, "tensor"))}
    state = (params, jax.eval_shape(optax.adam(1e-3).init, params))
    found = jm.infer_shardings(state, MESH, jm.StepPolicy(sharding="zero1"))
    assert found[0]["w"].value.spec == P(None, "tensor")
    assert found[1][0].mu["w"].value.spec == P("fsdp", "tensor")


def test_optimizer_state_of_other_shapes_is_no_reason_to_refuse():
    """Adafactor's rows and columns stay in the boxes of their parameters, whose names are not theirs."""
    params = {"w": boxed(("embed", "mlp"), (512, 2048)), "b": boxed(("mlp",), (2048,))}
    optimizer = jax.eval_shape(optax.adafactor(1e-3, min_dim_size_to_factor=8).init, params)
    rules = {"embed": "fsdp", "mlp": "tensor"}
    found = jm.infer_shardings((params, optimizer), MESH, jm.StepPolicy(sharding=rules))
    for leaf, sharding in zip(jax.tree.leaves(optimizer), jax.tree.leaves(found[1]), strict=True):
        sharding.shard_shape(leaf.shape)


class Model(nn.Module):
    """Two scanned layers along the second axis, which only its name tells."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))

        class Block(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
                return nn.Dense(64, kernel_init=init, use_bias=False)(x), None

        scanned = nn.scan(
            Block,
            variable_axes={"params": 1},
            split_rngs={"params": True},
            length=64,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scanned()(x)[0]


def test_a_scanned_axis_inside_is_known_by_its_name():
    params = jax.eval_shape(Model().init, jax.random.key(0), jnp.ones((2, 64)))["params"]
    (leaf,) = jax.tree.leaves(params)
    assert leaf.shape == (64, 64, 64)
    for sharding in ("zero1", "fsdp", "fsdp_tensor"):
        (found,) = jax.tree.leaves(jm.infer_shardings(params, MESH, jm.StepPolicy(sharding=sharding)))
        assert len(found.spec) < 2 or found.spec[1] is None
        assert bool(found.spec) == (sharding != "zero1")


def test_nnx_inserts_its_layer_axis_into_the_names():
    @nnx.split_rngs(splits=4)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(rngs: nnx.Rngs) -> nnx.Linear:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        return nnx.Linear(64, 256, rngs=rngs, kernel_init=init)

    with nnx.use_eager_sharding(False):
        model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    found = jm.infer_shardings(model, MESH, jm.StepPolicy(sharding="fsdp_tensor"))
    assert found.kernel.get_value().spec == P(None, "fsdp", "tensor")


@pytest.mark.parametrize(
    ("leaf", "sharding", "told"),
    [
        (
            boxed(("fsdp", None), (510, 4)),
            "fsdp",
            "state['w'].value of shape [510, 4] cannot be sharded as its annotation 'fsdp' asks for dimension 0: its size 510",
        ),
        (
            boxed(("fsdp", None), (510, 4)),
            "fsdp",
            "does not divide by 4 devices (mesh fsdp=4, tensor=2). Make it a multiple of 4, change the mesh, or use None.",
        ),
        (
            boxed(("embed", None), (510, 4)),
            {"embed": "fsdp"},
            "as the rule 'embed' -> 'fsdp' asks for dimension 0: its size 510",
        ),
        (
            boxed(("embed", None)),
            {"embed": "data"},
            "the mesh has no axis 'data', only fsdp=4, tensor=2. Name one of these",
        ),
        (
            boxed(("fsdp", "fsdp")),
            "fsdp",
            "'fsdp' already shards another dimension. Name each mesh axis once an array.",
        ),
        (boxed(("a", "b", "c")), "fsdp", "annotated with 3 axis names, ('a', 'b', 'c'), and has 2 dimensions"),
        (
            boxed(("embed", "mlp")),
            {"heads": "tensor"},
            "The sharding rules heads would do nothing: its arrays' axes are called embed, mlp.",
        ),
        (
            jax.ShapeDtypeStruct((8, 8), jnp.float32),
            {"mlp": "tensor"},
            "would do nothing: none of its arrays names its axes",
        ),
        (
            boxed(("embed", "mlp")),
            {"embed": "fsdp", "mpl": "tensor"},
            "names no axis of the state. Did you mean 'mlp'? Its arrays' axes are called embed, mlp. Type sharding={..., 'mlp'",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_the_array(leaf, sharding, told):
    with pytest.raises(PolicyError, match=re.escape(told)):
        spec_of(leaf, sharding)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("ZeRO-3", "fsdp"), ("fsdp+tp", "fsdp_tensor"), ("ddp", "replicate"), ({"a": ["x", "y"]}, (("a", ("x", "y")),))],
)
def test_shardings_have_one_spelling(given, wanted):
    assert jm.StepPolicy(sharding=given).sharding == wanted
    hash(jm.StepPolicy(sharding=given))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            "fdsp",
            "Unknown sharding 'fdsp'. Did you mean `fsdp`? Expected one of: replicate, zero1, fsdp, fsdp_tensor; or rules",
        ),
        ({}, "sharding={}: Expected one of"),
        (3, "sharding=3: Expected one of"),
        ({"a": 3}, "sharding has the rule ('a', 3)."),
        ([("a", "b", "c")], "sharding has the rule ('a', 'b', 'c')."),
        ({"a": []}, "sharding has the rule ('a', [])."),
    ],
)
def test_what_is_no_sharding_is_told(given, told):
    with pytest.raises(PolicyError, match=re.escape(told)):
        jm.StepPolicy(sharding=given)
