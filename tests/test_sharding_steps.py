"""Five steps on eight devices equal those on one, the state stays where it was put, and each device really holds less."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.transforms.sharding.axes import mesh_roles
from tests import sharded_models
from tests.sharded_models import OPTIMIZER, Case, case_of, fresh

pytestmark = pytest.mark.core

STEPS = 5
# Norm of a leaf's difference relative to the norm of its tree, as in test_remat_mathematics: sums over devices are taken in
# another order.
TOLERANCE = 1e-6


def assert_same(one: Any, other: Any) -> None:
    ours, theirs = (jax.tree.leaves(jax.tree.map(lambda x: np.asarray(x, np.float64), tree)) for tree in (one, other))
    size = math.sqrt(sum(float((leaf**2).sum()) for leaf in theirs))
    assert math.isfinite(size), "a run that diverged proves nothing"
    for a, b in zip(ours, theirs, strict=True):
        assert np.linalg.norm(a - b) <= TOLERANCE * size


def train(step: Any, state: tuple[Any, ...], batch: Any) -> tuple[list[Any], tuple[Any, ...]]:
    losses = []
    for _ in range(STEPS):
        result = step(*state, batch)
        loss = result[-1] if isinstance(result, tuple) else result
        state = result[:-1] if isinstance(result, tuple) else state
        losses.append(np.asarray(loss))
    return losses, state


@functools.cache
def on_one_device(kind: str) -> tuple[list[Any], Any]:
    case = case_of(kind)
    losses, state = train(jm.jit_step(case.step, donate_argnames=()), fresh(case.state), case.batch)
    return losses, case.result(state)


class Sharded(NamedTuple):
    case: Case
    losses: list[Any]
    state: tuple[Any, ...]
    wanted: Any
    first: tuple[Any, ...]
    memory: Any


@functools.cache
def sharded(kind: str, sharding: str, remat: str) -> Sharded:
    """A case trained on eight devices, and the compiler's figures of its step."""
    case = case_of(kind)
    policy = jm.StepPolicy(sharding=sharding, remat=remat)
    mesh = jm.make_mesh("fsdp=4,tensor=2" if sharding == "fsdp_tensor" else "data=2,fsdp=4")
    wanted = jm.infer_shardings(case.state, mesh, policy)
    state = first = jax.device_put(fresh(case.state), wanted)
    batch = jax.device_put(case.batch, NamedSharding(mesh, P(mesh_roles(mesh).batch)))
    step = jm.jit_step(case.step, policy)
    with jax.set_mesh(mesh):
        losses, state = train(step, state, batch)
        memory = jm.step_memory(step, *state, batch)  # the compile that the steps used
    return Sharded(case, losses, state, wanted, first, memory)


RUNS = [
    ("plain", "replicate", "none"),
    ("plain", "zero1", "full"),
    ("plain", "fsdp", "none"),
    ("plain", "fsdp", "full"),
    ("plain", "fsdp_tensor", "full"),
    ("linen", "fsdp", "full"),
    ("linen", "fsdp_tensor", "none"),
    ("nnx", "zero1", "none"),
    ("nnx", "fsdp", "full"),
    ("equinox", "fsdp", "full"),
]


@pytest.mark.parametrize(("kind", "sharding", "remat"), RUNS)
def test_the_mathematics_is_that_of_one_device(kind, sharding, remat):
    run = sharded(kind, sharding, remat)
    losses, state = on_one_device(kind)
    assert losses[-1] < losses[0]
    assert_same(run.losses, losses)
    assert_same(run.case.result(run.state), state)


@pytest.mark.parametrize(("kind", "sharding", "remat"), RUNS)
def test_the_state_stays_where_it_was_put(kind, sharding, remat):
    run = sharded(kind, sharding, remat)
    leaves, wanted = jax.tree.leaves(run.state), jax.tree.leaves(run.wanted)
    assert all(leaf.sharding.is_equivalent_to(s, leaf.ndim) for leaf, s in zip(leaves, wanted, strict=True))
    parameters = len(jax.tree.leaves(run.wanted[0] if len(run.wanted) > 1 else run.wanted[0].params))
    split = [any(part is not None for part in s.spec) for s in wanted]
    assert any(split) == (sharding != "replicate")
    assert any(split[: parameters + 1]) == (sharding in {"fsdp", "fsdp_tensor"})


@pytest.mark.parametrize(("kind", "sharding", "remat"), RUNS)
def test_donation_holds_under_sharding(kind, sharding, remat):
    """Every byte that is donated is reused, by the compiled program, and the old arrays are gone."""
    run = sharded(kind, sharding, remat)
    assert run.memory.alias_bytes == run.memory.donated_bytes > 0
    assert run.memory.warnings == ()
    if kind != "nnx":  # whose modules hold the new arrays
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(run.first))


@pytest.mark.parametrize(("kind", "sharding", "remat"), RUNS)
def test_the_compiler_says_that_each_device_holds_its_share(kind, sharding, remat):
    """Argument bytes are those of one device: the state's shards and the batch's."""
    run = sharded(kind, sharding, remat)
    shards = [
        math.prod(s.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, s in zip(jax.tree.leaves(run.state), jax.tree.leaves(run.wanted), strict=True)
    ]
    assert run.memory.donated_bytes == sum(shards)
    assert sum(shards) < run.memory.argument_bytes <= sum(shards) + run.case.batch.nbytes // 4


def test_the_policies_hold_less_and_less():
    plain = [run for run in RUNS if run[0] == "plain" and run[1:] != ("fsdp", "none")]
    one, zero1, fsdp, tensor = (sharded(*run).memory.argument_bytes for run in plain)
    parameters = one / 2  # momentum is as large
    assert zero1 == pytest.approx(parameters * 1.25, rel=0.02)
    assert fsdp == pytest.approx(one / 4, rel=0.04)
    assert tensor == pytest.approx(one / 8, rel=0.06)


def explicit_case() -> Case:
    """A model for explicit axes: it says where its weights are gathered."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"wide": jax.random.normal(keys[0], (64, 256)) / 8, "narrow": jax.random.normal(keys[1], (256, 64)) / 16}
    data = jax.random.normal(jax.random.key(2), (16, 64))

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        gather = lambda w: jax.sharding.reshard(w, P()) if not jax.sharding.get_abstract_mesh().empty else w  # noqa: E731
        hidden = jnp.tanh(batch @ gather(params["wide"]))
        return ((hidden @ gather(params["narrow"]) - batch) ** 2).mean()

    def train_step(params: Any, opt_state: Any, batch: jax.Array) -> Any:
        loss, grads = jm.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return Case(train_step, (params, OPTIMIZER.init(params)), data)


@pytest.mark.parametrize(("sharding", "remat"), [("zero1", "none"), ("fsdp", "full")])
def test_explicit_axes_hold_the_same_promises(sharding, remat):
    case = explicit_case()
    expected = train(jm.jit_step(case.step, donate_argnames=()), case.state, case.batch)
    policy = jm.StepPolicy(sharding=sharding, remat=remat)
    mesh = jm.make_mesh("data=2,fsdp=4", axis_types="explicit")
    wanted = jm.infer_shardings(case.state, mesh, policy)
    batch = jax.device_put(case.batch, NamedSharding(mesh, P(("data", "fsdp"))))
    step = jm.jit_step(case.step, policy)
    with jax.set_mesh(mesh):
        got = train(step, jax.device_put(case.state, wanted), batch)
        memory = jm.step_memory(step, *got[1], batch)
    assert_same(got, expected)
    assert memory.alias_bytes == memory.donated_bytes
    for leaf, placed in zip(jax.tree.leaves(got[1]), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(placed, leaf.ndim)
        assert placed.mesh.axis_types == mesh.axis_types


def test_the_layer_axis_of_the_models_divides():
    """Else it would prove nothing that it stays whole."""
    assert sharded_models.LAYERS % 8 == 0
