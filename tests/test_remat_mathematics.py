"""Promise 1: a policy never changes the mathematics. Five steps of every kind of loss, states equal."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from tests.losses import INPUTS, KEY, SAMPLES, WEIGHTS, Sample, mesh_of, mlp

pytestmark = pytest.mark.core

# Norm of a leaf's difference relative to the norm of its tree (all gradients, all parameters), by dtype: a recomputation
# may be fused, and so summed, in another order.
TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-2}


def assert_same(one: Any, other: Any, slack: float = 1.0) -> None:
    """Leaf by leaf: integers, flags and texts exactly, inexact arrays within the table."""
    ours, theirs = jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    inexact = [leaf for leaf in theirs if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)]
    size = math.sqrt(sum(float((np.asarray(leaf, np.float64) ** 2).sum()) for leaf in inexact))
    for (path, a), b in zip(ours, theirs, strict=True):
        if isinstance(a, jax.Array):
            assert_same_array(jax.tree_util.keystr(path), a, b, slack * size)
        else:
            assert a == b, jax.tree_util.keystr(path)


def assert_same_array(path: str, a: jax.Array, b: jax.Array, scale: float) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape), path
    assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False), path
    numbers = [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, np.float64)
        for x in (a, b)
    ]
    allowed = TOLERANCE.get(a.dtype.name, 0.0) * scale
    assert math.isfinite(allowed), f"{path}: a run that diverged proves nothing"
    assert np.linalg.norm(numbers[0] - numbers[1]) <= allowed, path


def assert_same_run(one: Any, other: Any, computes_in: str = "float32") -> None:
    """Losses, gradients and final states, each judged by its own size and by the dtype of what is computed."""
    slack = TOLERANCE[computes_in] / TOLERANCE["float32"]
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (ours_value, ours_grads), (value, grads) in zip(one[0], other[0], strict=True):
        assert_same(ours_value, value, slack)
        assert_same(ours_grads, grads, slack)
    for ours, theirs in zip(one[1:], other[1:], strict=True):
        assert_same(ours, theirs, slack)


def train(sample: Sample, policy: jm.StepPolicy) -> Any:
    """Five optimizer steps; every loss, gradient, auxiliary output and final state."""
    # Adam would divide a gradient that is zero but for rounding by itself; momentum keeps differences in proportion.
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9))
    arrays, static = _partition(sample.params)

    @jax.jit
    def step(arrays: Any, state: Any, rest: Any) -> Any:
        def run(params: Any) -> Any:
            return jm.value_and_grad(sample.loss, has_aux=sample.has_aux)(params, *_merge(rest, static_rest))

        value, gradients = jm.apply_policy(run, policy)(_merge(arrays, static))
        gradients, _ = _partition(gradients)
        updates, state = optimizer.update(gradients, state, arrays)
        dynamic, fixed = _partition(value)
        kept["value"] = fixed
        return optax.apply_updates(arrays, updates), state, dynamic, gradients

    kept: dict[str, Any] = {}
    rest, static_rest = _partition(sample.rest)
    state = optimizer.init(arrays)
    history = []
    for _ in range(5):
        arrays, state, value, gradients = step(arrays, state, rest)
        history.append((_merge(value, kept["value"]), gradients))
    return history, arrays, state


def _partition(tree: Any) -> tuple[Any, Any]:
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda leaf: leaf is None)
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
    return tuple(
        jax.tree.unflatten(
            treedef, [leaf if keep is flag else None for leaf, flag in zip(leaves, is_array, strict=True)]
        )
        for keep in (True, False)
    )


def _merge(arrays: Any, static: Any) -> Any:
    return jax.tree.map(lambda a, s: s if a is None else a, arrays, static, is_leaf=lambda leaf: leaf is None)


@functools.cache
def plain_run(name: str) -> Any:
    return train(SAMPLES[name](), jm.StepPolicy())


# Their gradients are small differences: only the programs that users run are as near to each other as the table says.
DIFFERENCES = {"reversed_scan", "scan_with_constants"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.optimised] * (name in DIFFERENCES)) for name in SAMPLES]
)
def test_five_steps_under_full_remat_equal_the_plain_ones(name: str) -> None:
    sample = SAMPLES[name]()
    assert_same_run(train(sample, jm.StepPolicy(remat="full")), plain_run(name), sample.computes_in)


@pytest.mark.parametrize("policy", [
    jm.StepPolicy(remat="dots"), jm.StepPolicy(remat="save_all"), jm.StepPolicy(remat="dots_with_no_batch_dims"),
    jm.StepPolicy(remat="full", segments=2), jm.StepPolicy(remat="full", save=("hidden",)),
    jm.StepPolicy(remat="full", segments="blocks", keep=0.5),
    jm.StepPolicy(remat="full", levels=2), jm.StepPolicy(remat="full", keep=0.5),
    jm.StepPolicy(remat="full", offload=("hidden",)), jm.StepPolicy(remat="offload_dots"),
], ids=lambda p: f"{p.remat}-{p.segments}-{p.levels}-{p.keep}-{p.save}-{p.offload}")  # fmt: skip
def test_other_policies_equal_the_plain_step(policy: jm.StepPolicy) -> None:
    assert_same_run(train(SAMPLES["named"](), policy), plain_run("named"))


def test_gradient_of_gradient_forward_over_reverse_and_vmap() -> None:
    cheaper = jm.remat(mlp)

    def norm(loss: Any) -> Any:
        return lambda w: sum((g**2).sum() for g in jax.grad(loss)(w, INPUTS))

    assert_same(jax.jit(jax.grad(norm(cheaper)))(WEIGHTS), jax.jit(jax.grad(norm(mlp)))(WEIGHTS))
    directions = [jnp.ones_like(w) for w in WEIGHTS]
    both = [jax.jvp(lambda w, f=f: jax.grad(f)(w, INPUTS), (WEIGHTS,), (directions,)) for f in (cheaper, mlp)]
    assert_same(*both, slack=4)
    assert_same(jax.jvp(lambda w: cheaper(w, INPUTS), (WEIGHTS,), (directions,)),
                jax.jvp(lambda w: mlp(w, INPUTS), (WEIGHTS,), (directions,)))  # fmt: skip
    over = [jax.vmap(jax.grad(f), (None, 0))(WEIGHTS, INPUTS[:, None]) for f in (cheaper, mlp)]
    assert_same(*over)


def test_a_traced_value_from_outside_is_differentiated_too() -> None:
    def outer(loss: Any) -> Any:
        return lambda scale: loss(lambda w, x: mlp(w, x) * scale)

    ours = jax.grad(outer(lambda f: jax.grad(jm.remat(f))(WEIGHTS, INPUTS)[0].sum()))(2.0)
    theirs = jax.grad(outer(lambda f: jax.grad(f)(WEIGHTS, INPUTS)[0].sum()))(2.0)
    assert_same(ours, theirs)


def test_under_an_explicit_mesh_and_inside_shard_map() -> None:
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        weights = [jax.device_put(w, NamedSharding(mesh, P())) for w in WEIGHTS]
        inputs = jax.device_put(INPUTS, NamedSharding(mesh, P("data")))
        ours, theirs = (jax.jit(jax.grad(f))(weights, inputs) for f in (jm.remat(mlp), mlp))
        assert [leaf.sharding for leaf in ours] == [leaf.sharding for leaf in theirs]
    assert_same(ours, theirs)
    mesh = mesh_of(AxisType.Auto)

    def mapped(loss: Any) -> Any:
        def body(w: Any, x: Any) -> Any:
            return jax.lax.pmean(loss(w, x), "data")

        whole = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        return jax.jit(jax.grad(lambda w: whole(w, INPUTS)))(WEIGHTS)

    assert_same(mapped(jm.remat(mlp)), mapped(mlp))


class Transformer(nnx.Module):
    """Attention blocks with dropout, and BatchNorm before the head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.attention = nnx.List(
            [nnx.MultiHeadAttention(2, 16, dropout_rate=0.1, decode=False, rngs=rngs) for _ in range(3)]
        )
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(16, 32, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.attention:
            x = x + self.dropout(block(x, deterministic=False))
        return self.head(self.norm(x))


def nnx_run(policy: jm.StepPolicy) -> Any:
    model = Transformer(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
    tokens = jax.random.randint(KEY, (4, 9), 0, 32)

    def loss(model: Transformer, tokens: Any, smooth: bool) -> Any:
        assert smooth is True
        logits = model(tokens[:, :-1])
        value = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return value, {"logits": jnp.abs(logits).mean()}

    @nnx.jit
    def step(model: Transformer, optimizer: nnx.Optimizer, tokens: Any) -> Any:
        def gradients(model: Transformer) -> Any:
            return jm.nnx.value_and_grad(loss, has_aux=True)(model, tokens, smooth=True)

        (value, aux), grads = jm.apply_policy(gradients, policy)(model)
        optimizer.update(model, grads)
        return value, aux

    history = [step(model, optimizer, tokens) for _ in range(5)]
    return history, nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(optimizer))


def test_nnx_state_moves_as_without_the_policy() -> None:
    plain, cheaper = nnx_run(jm.StepPolicy()), nnx_run(jm.StepPolicy(remat="full"))
    assert_same_run(cheaper, plain)
    fresh = nnx.to_pure_dict(nnx.state(Transformer(nnx.Rngs(0))))
    assert cheaper[1]["dropout"]["rngs"]["count"] > fresh["dropout"]["rngs"]["count"]
    assert not np.array_equal(cheaper[1]["norm"]["mean"], fresh["norm"]["mean"])


def test_debug_output_comes_once_and_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    def reporting(weights: Any, x: Any) -> Any:
        for index, w in enumerate(weights):
            x = jnp.tanh(x @ w)
            jax.debug.print("layer {i}", i=index)
        return (x**2).mean()

    def scanned(weights: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            jax.debug.print("scan {mean}", mean=x.mean())
            return jnp.tanh(x @ w), None

        return (jax.lax.scan(layer, x, jnp.stack(weights))[0] ** 2).mean()

    for loss in (reporting, scanned):
        ours = jax.block_until_ready(jax.jit(jax.value_and_grad(jm.remat(loss)))(WEIGHTS, INPUTS))
        jax.effects_barrier()
        out = capfd.readouterr().out
        assert out.count("layer") + out.count("scan") == len(WEIGHTS), out
        assert_same(ours, jax.jit(jax.value_and_grad(loss))(WEIGHTS, INPUTS))
        jax.effects_barrier()
        capfd.readouterr()
