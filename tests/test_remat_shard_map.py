"""A `shard_map` inside a loss is cut inside, where its collectives are: the same numbers, fewer bytes on each device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.compiles import Compiler
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.request import Budget
from jaxmem_callbacks.transforms.costs import LINK_BYTE, collective_work
from tests.comparisons import assert_close, checkpoints, stored_bytes

pytestmark = pytest.mark.core
MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
LAYERS, WIDTH, ROWS = 5, 32, 512


def layer(x: Any, w: Any) -> tuple[Any, None]:
    hidden = jnp.sin(x @ w)
    for _ in range(2):
        hidden = jnp.sin(hidden @ w)
    return x + jax.lax.pmean(hidden.mean(), "data") * hidden, None


def scanned(w: Any, x: Any) -> Any:
    x, _ = jax.lax.scan(layer, x, w)
    return jax.lax.pmean((x**2).mean(), "data")


def unrolled(w: Any, x: Any) -> Any:
    for one in w:
        x, _ = layer(x, one)
    return jax.lax.pmean((x**2).mean(), "data")


def reporting(w: Any, x: Any) -> Any:
    def told(x: Any, w: Any) -> tuple[Any, None]:
        jax.debug.callback(lambda _: None, x.mean())
        return layer(x, w)

    return jax.lax.pmean((jax.lax.scan(told, x, w)[0] ** 2).mean(), "data")


def mapped(body: Any, **options: Any) -> Any:
    whole = jax.shard_map(body, mesh=MESH, in_specs=(P(), P("data")), out_specs=P(), **options)
    return lambda w, x: whole(w, jnp.tanh(x)) * 2.0


def experts(w: Any, x: Any) -> Any:
    """One small shard_map a layer, as experts have: computed again with the rest of its layer."""
    one = jax.shard_map(lambda w, x: layer(x, w)[0], mesh=MESH, in_specs=(P(), P("data")), out_specs=P("data"))
    for each in w:
        x = jnp.sin(one(each, x)) + x
    return (x**2).mean()


def arguments() -> tuple[Any, Any]:
    draw = np.random.default_rng(0).standard_normal
    weights, x = draw((LAYERS, WIDTH, WIDTH)) / 8, draw((ROWS, WIDTH))
    with jax.set_mesh(MESH):
        return (
            jax.device_put(jnp.asarray(weights, "float32"), NamedSharding(MESH, P())),
            jax.device_put(jnp.asarray(x, "float32"), NamedSharding(MESH, P("data"))),
        )


LOSSES = {
    "scanned": mapped(scanned), "unrolled": mapped(unrolled), "unchecked": mapped(scanned, check_vma=False),
    "partly manual": mapped(scanned, axis_names={"data"}), "experts": experts,
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_the_numbers_stay_and_less_is_stored(name: str) -> None:
    args = arguments()
    loss, cheaper = LOSSES[name], jm.remat(LOSSES[name])
    found, wanted = (jax.jit(jax.value_and_grad(each, (0, 1))).lower(*args).compile() for each in (cheaper, loss))
    assert_close(found(*args), wanted(*args))
    assert stored_bytes(cheaper, *args) < 0.5 * stored_bytes(loss, *args)
    if name in {"scanned", "unchecked"}:
        ours, theirs = (each.memory_analysis().temp_size_in_bytes for each in (found, wanted))
        assert ours < 0.5 * theirs


@pytest.mark.parametrize("options", [
    {"keep": 0.5}, {"levels": 2}, {"offload": ("cuts",)}, {"policy": "dots"}, {"segments": 3},
], ids=str)  # fmt: skip
def test_every_policy_acts_inside(options: dict[str, Any]) -> None:
    args = arguments()
    loss, cheaper = LOSSES["scanned"], jm.remat(LOSSES["scanned"], **options)
    assert_close(*(jax.jit(jax.grad(each))(*args) for each in (cheaper, loss)))
    assert checkpoints(cheaper, *args)
    assert stored_bytes(cheaper, *args) < stored_bytes(loss, *args)


@pytest.mark.parametrize("name", ["scanned", "unrolled"])
def test_what_is_kept_is_named_in_the_mesh_of_its_own_body(name: str) -> None:
    args = arguments()
    with jax.set_mesh(MESH):
        assert_close(*(jax.jit(jax.grad(each))(*args) for each in (jm.remat(LOSSES[name], keep=0.5), LOSSES[name])))


def test_a_policy_keeps_what_it_would_keep_on_one_device() -> None:
    def alone(w: Any, x: Any) -> Any:
        return jax.vmap(lambda x: scanned(w, x), axis_name="data")(jnp.tanh(x).reshape(4, -1, WIDTH)).mean() * 2.0

    args = arguments()
    kept = [
        [stored_bytes(jm.remat(loss, keep=keep), *args) for keep in (0.0, 0.5, 1.0)]
        for loss in (LOSSES["scanned"], alone)
    ]
    assert kept[0] == sorted(kept[0])
    assert kept[0][0] < kept[0][1] < kept[0][2]


def test_what_collectives_bring_is_kept_before_products_and_counted_by_its_time() -> None:
    def gathering(w: Any, x: Any) -> Any:
        for one in w:
            x = (
                x
                + jax.lax.psum_scatter(jnp.sin(jax.lax.all_gather(x, "data", tiled=True) @ one), "data", tiled=True) / 4
            )
        return jax.lax.pmean((x**2).mean(), "data")

    args, loss = arguments(), mapped(gathering)
    gathers = [
        str(jax.make_jaxpr(jax.grad(jm.remat(loss, keep=keep)))(*args)).count(" all_gather[")
        for keep in (0.0, 0.5, 1.0)
    ]
    plain = str(jax.make_jaxpr(jax.grad(loss))(*args)).count(" all_gather[")
    assert gathers[0] > gathers[1] >= gathers[2] == plain
    assert_close(*(jax.jit(jax.grad(each))(*args) for each in (jm.remat(loss, keep=1.0), loss)))
    (mesh_eqn,) = [eqn for eqn in jax.make_jaxpr(loss)(*args).eqns if eqn.primitive.name == "shard_map"]
    work = {eqn.primitive.name: collective_work(eqn) for eqn in mesh_eqn.params["jaxpr"].eqns}
    assert work["all_gather"] == LINK_BYTE * ROWS * WIDTH * 4
    assert work["dot_general"] == 0
    assert collective_work(mesh_eqn) > 8 * LAYERS * work["all_gather"], "on every device"


def test_a_shard_map_that_reports_is_told_and_left_alone() -> None:
    loss = mapped(reporting)

    def both(w: Any, x: Any) -> Any:
        return loss(w, x) + (jax.lax.scan(lambda x, w: (x + jnp.sin(jnp.sin(x @ w) @ w), None), x, w)[0] ** 2).mean()

    told = [line for line in told_of(both) if "report twice" in line]
    assert len(told) == 1
    assert told[0].startswith("A `shard_map` stays as it is")


def test_one_level_inside_is_told() -> None:
    assert told_of(LOSSES["scanned"]) == []
    assert told_of(LOSSES["scanned"], levels=2) == [
        "Inside a shard_map there is one level of checkpoints: levels=2 acts on the rest of the loss."
    ]


def told_of(loss: Any, **options: Any) -> list[str]:
    step = jm.jit_step(lambda w, x: w - jm.grad(loss)(w, x), jm.StepPolicy(remat="full", **options))
    step.lower(*arguments())
    return list(step.notes)


def test_a_shard_map_at_the_end_is_estimated_as_it_is_cut() -> None:
    def step(w: Any, x: Any) -> Any:
        last = jax.shard_map(scanned, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
        return jm.value_and_grad(lambda w: last(w, jnp.tanh(x)))(w)

    nowhere = Budget(bytes=None, limit_bytes=None, reason="none asked for")
    compiler = Compiler(Problem(train_step=step, args=arguments(), kwargs={}, target=None, budget=nowhere))
    inside, around = (curve[0].peak for curve in compiler.facts(jm.StepPolicy(remat="full"), survey=True).shares)
    assert around < inside, "what its body keeps once it is checkpointed, and not all of every layer"
