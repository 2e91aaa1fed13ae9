"""Losses at the edges of the contract: layers that only look alike, collectives, reports in inner loops, odd arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import LossRefusedError, PolicyError
from tests.comparisons import stored_bytes
from tests.losses import INPUTS, WEIGHTS, WIDTH
from tests.test_remat_mathematics import assert_same

pytestmark = pytest.mark.core


TABLES = [jnp.linspace(-1, 1 + index, 8 * WIDTH).reshape(8, WIDTH) for index in range(len(WEIGHTS))]
DEVICES = Mesh(np.array(jax.devices()), ("d",), axis_types=(AxisType.Auto,))


def results_under_dispute(weights: Any, x: Any) -> Any:
    """Odd layers take the second result of one equation where even ones take the result of the next."""
    for index, w in enumerate(weights):
        left, right = jnp.split(jnp.sin(x @ w), 2, axis=1)
        other = jnp.tanh(left)
        first = right if index % 2 else other
        x = x + jnp.concatenate([first, left + 0.5 * other + 0.25 * right], axis=1)
    return (x**2).mean()


def constants_of_branches(weights: Any, x: Any) -> Any:
    for index, w in enumerate(weights):
        scaled = jax.jit(lambda y, index=index: jnp.tanh(y * TABLES[index]))
        x = jax.lax.cond(x.sum() > -1e9, scaled, lambda y: y, x @ w) + x
    return (x**2).mean()


@pytest.mark.parametrize("loss", [results_under_dispute, constants_of_branches])
@pytest.mark.parametrize("segments", [6, None])
def test_layers_that_only_look_alike_stay_apart(loss: Callable[..., Any], segments: int | None) -> None:
    ours = jax.jit(jax.value_and_grad(jm.remat(loss, segments=segments)))(WEIGHTS, INPUTS)
    assert_same(ours, jax.jit(jax.value_and_grad(loss))(WEIGHTS, INPUTS))


# Collectives: the loss runs inside vmap, pmap or shard_map and speaks to its neighbours.


def centred(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
        x = x - jax.lax.pmean(x, "d") + 0.1 * jax.lax.axis_index("d")
    return jax.lax.pmean((x**2).mean(), "d")


def centred_scan(weights: Any, x: Any) -> Any:
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) - jax.lax.pmean(x, "d"), None), x, jnp.stack(weights))
    return jax.lax.pmean((x**2).mean(), "d")


def in_shard_map(step: Callable[..., Any]) -> Any:
    mapped = jax.shard_map(step, mesh=DEVICES, in_specs=(P(), P("d")), out_specs=P())
    return jax.jit(mapped)(WEIGHTS, INPUTS)


def in_vmap(step: Callable[..., Any]) -> Any:
    return jax.jit(jax.vmap(step, (None, 0), axis_name="d"))(WEIGHTS, INPUTS[:, None])


@pytest.mark.parametrize("loss", [centred, centred_scan])
@pytest.mark.parametrize("run", [in_shard_map, in_vmap])
def test_collectives_are_no_effects(loss: Callable[..., Any], run: Callable[..., Any]) -> None:
    cheaper = jax.value_and_grad(jm.remat(loss))
    assert_same(run(cheaper), run(jax.value_and_grad(loss)))


# Complex values, which JAX's checkpoints fail to keep.


def spectral(weights: Any, x: Any) -> Any:
    for w in weights:
        filtered = checkpoint_name(jnp.fft.rfft(x) @ (w[: WIDTH // 2 + 1, : WIDTH // 2 + 1] * (1 + 0.5j)), "filtered")
        x = jnp.tanh(jnp.fft.irfft(filtered, n=WIDTH) + x @ w)
    return (x**2).mean()


@pytest.mark.parametrize("options", [
    {"policy": "dots"}, {"policy": "everything_saveable"}, {"keep": 0.5}, {"keep": 1.0}, {},
], ids=str)  # fmt: skip
def test_complex_values_are_computed_again_whatever_is_kept(options: dict[str, Any]) -> None:
    ours = jax.jit(jax.value_and_grad(jm.remat(spectral, **options)))(WEIGHTS, INPUTS)
    assert_same(ours, jax.jit(jax.value_and_grad(spectral))(WEIGHTS, INPUTS))
    if options:
        less, more = (stored_bytes(jm.remat(spectral, **each), WEIGHTS, INPUTS) for each in ({}, options))
        assert less < more, "real values are kept all the same"


def test_a_complex_value_cannot_be_saved_by_name() -> None:
    with pytest.raises(PolicyError, match=r"value named 'filtered' is complex64, .*keep real values only.*jnp\.real"):
        jax.grad(jm.remat(spectral, save=("filtered",)))(WEIGHTS, INPUTS)


# Reports from inside a loop of a loop.


def test_reports_of_inner_loops_come_once_or_the_loss_is_refused() -> None:
    seen: list[int] = []

    def inner(x: Any, w: Any) -> Any:
        jax.debug.callback(lambda _: seen.append(1), x.mean())
        return jnp.tanh(x @ w), None

    def nested(weights: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, _: (jax.lax.scan(inner, x, jnp.stack(weights))[0], None), x, None, length=3)
        return (x**2).mean()

    def nested_then_layers(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x @ w)
        return nested(weights, x)

    with pytest.raises(LossRefusedError, match=r"reports stays whole: move jax\.debug calls into the outer body"):
        jax.grad(jm.remat(nested))(WEIGHTS, INPUTS)
    ours = jax.block_until_ready(jax.jit(jax.value_and_grad(jm.remat(nested_then_layers)))(WEIGHTS, INPUTS))
    jax.effects_barrier()
    assert len(seen) == 3 * len(WEIGHTS)
    assert_same(ours, jax.jit(jax.value_and_grad(nested_then_layers))(WEIGHTS, INPUTS))
    jax.effects_barrier()


# Numbers of segments, arguments and results.


def test_fewer_segments_than_loops_make_are_refused() -> None:
    def loss(weights: Any, x: Any) -> Any:
        for w in weights[:2]:
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), jnp.sin(x @ w), jnp.stack(weights))
        return (x**2).mean()

    with pytest.raises(PolicyError, match=r"segments=2: this loss has loops.*so 5 segments at least.*segments=5 or"):
        jax.grad(jm.remat(loss, segments=2))(WEIGHTS, INPUTS)
    ours = jax.jit(jax.value_and_grad(jm.remat(loss, segments=5)))(WEIGHTS, INPUTS)
    assert_same(ours, jax.jit(jax.value_and_grad(loss))(WEIGHTS, INPUTS))


@pytest.mark.parametrize("segments", [None, 2, 3])
def test_a_loss_whose_only_product_comes_first_is_cut_behind_it(segments: int | None) -> None:
    def loss(weights: Any, x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ weights[0])).sum()

    ours = jax.jit(jax.value_and_grad(jm.remat(loss, segments=segments)))(WEIGHTS, INPUTS)
    assert_same(ours, jax.jit(jax.value_and_grad(loss))(WEIGHTS, INPUTS))


def test_argnums_may_be_what_jax_takes() -> None:
    def loss(x: Any, y: Any) -> Any:
        return (x * y**2).sum()

    argnums: Any
    for argnums in (np.int64(1), [1, 0], (-1,), -2):
        ours = jm.value_and_grad(loss, argnums)(INPUTS, 2 * INPUTS)
        assert_same(ours, jax.value_and_grad(loss, argnums)(INPUTS, 2 * INPUTS))


def test_constant_results_are_arrays_outside_jit_too() -> None:
    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x**2).mean(), {"count": jnp.int32(3), "weak": jnp.asarray(2.0), "rows": jnp.asarray(x.shape[0])}

    (_, ours), _ = jax.value_and_grad(jm.remat(loss), has_aux=True)(WEIGHTS, INPUTS)
    (_, theirs), _ = jax.value_and_grad(loss, has_aux=True)(WEIGHTS, INPUTS)
    assert_same(ours, theirs)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(ours))
