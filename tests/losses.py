"""Losses of every kind that users write, for the tests of promise 1: the same numbers with and without a policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

KEY = jax.random.key(0)
WIDTH = 16
WEIGHTS = [jax.random.normal(jax.random.fold_in(KEY, i), (WIDTH, WIDTH)) / 4 for i in range(6)]
INPUTS = jax.random.normal(KEY, (8, WIDTH))


@dataclass(frozen=True)
class Sample:
    """A loss of (parameters, *rest), and what it is called with."""

    loss: Callable[..., Any]
    params: Any
    rest: tuple[Any, ...] = ()
    has_aux: bool = False
    computes_in: str = "float32"


def mlp(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w) + x
    return (x**2).mean()


def named(weights: Any, x: Any) -> Any:
    for w in weights:
        x = checkpoint_name(jnp.tanh(x @ w), "hidden") + x
    return (x**2).mean()


@jax.jit
def jitted(weights: Any, x: Any) -> Any:
    return jax.jit(mlp)(weights, jnp.where(x > 0, x, 0.1 * x))


def scanned(weights: Any, x: Any) -> Any:
    def layer(carry: Any, w: Any) -> Any:
        hidden = jax.nn.gelu(carry @ w)
        return hidden @ w.T + carry, hidden.mean()

    x, means = jax.lax.scan(layer, x, jnp.stack(weights))
    return (x**2).mean() + means.sum()


def reversed_scan(weights: Any, x: Any) -> Any:
    def layer(carry: Any, w: Any) -> Any:
        return jnp.tanh(carry[0] @ w) + carry[0], None

    def body(carry: Any, w: Any) -> Any:
        x, count = carry
        return (layer((x,), w)[0], count + 1), x.sum()

    (x, _), sums = jax.lax.scan(body, (x, 0), jnp.stack(weights), reverse=True, unroll=2)
    return (x**2).mean() + (sums**2).mean()


TABLE = np.linspace(-1, 1, WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH)


def scan_with_constants(weights: Any, x: Any) -> Any:
    """The body calls a jitted function that closes over arrays of its own."""
    offset = jnp.asarray(TABLE)
    inner = jax.jit(lambda y: jnp.tanh(y @ TABLE) + offset.mean())
    x, _ = jax.lax.scan(lambda y, w: (inner(y @ w) + y, None), x, jnp.stack(weights))
    return (inner(x) ** 2).mean()


def with_while(weights: Any, x: Any) -> Any:
    steps = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, 0)
    x = jax.lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y @ weights[0]), x)
    return mlp(weights, x * steps)


def with_cond(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jax.lax.cond(x.sum() > 0, lambda y, w=w: jnp.tanh(y @ w), lambda y, w=w: jnp.sin(y @ w), x)
    return (x**2).mean()


@jax.custom_vjp
def scaled_sine(x: Any) -> Any:
    return jnp.sin(x)


scaled_sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def tripled_gradient(x: Any, factor: float) -> Any:
    return x * factor


tripled_gradient.defvjp(lambda x, factor: (x * factor, None), lambda factor, _, g: (3 * g * factor,))


def custom_rules(weights: Any, x: Any) -> Any:
    x = tripled_gradient(x, 2.0)
    for w in weights:
        x = jax.nn.relu(scaled_sine(x @ w))
    return (x**2).mean()


def dropout(weights: Any, x: Any, key: Any) -> Any:
    for index, w in enumerate(weights):
        x = jnp.tanh(x @ w) * jax.random.bernoulli(jax.random.fold_in(key, index), 0.9, x.shape)
    return (x**2).mean()


def mixed_precision(weights: Any, x: Any) -> Any:
    weights = [w.astype(jnp.bfloat16) for w in weights]
    mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
    x = x.astype(jnp.bfloat16)
    for w in weights:
        mixed = jnp.where(mask, x @ x.T, -1e9).astype(jnp.float32)
        x = jax.nn.softmax(mixed).astype(jnp.bfloat16) @ x @ w + x
    return (x.astype(jnp.float32) ** 2).mean()


def with_aux(weights: Any, x: Any) -> Any:
    value = mlp(weights, x)
    return value, {
        "count": jnp.int32(3),
        "right": (x > 0).sum(),
        "mean": x.mean(0),
        "rate": 2 * 0.5,
        "name": "run",
        "no": None,
    }


def own_remat(weights: Any, x: Any) -> Any:
    block = jax.checkpoint(lambda x, w: jnp.tanh(x @ w) + x)
    for w in weights:
        x = jnp.sin(block(x, w))
    return (x**2).mean()


def long_skips(weights: Any, x: Any) -> Any:
    skips = []
    for w in weights[:3]:
        x = jnp.tanh(x @ w)
        skips.append(x)
    for w in weights[3:]:
        x = jnp.tanh((x + skips.pop()) @ w)
    return (x**2).mean()


def several_losses(weights: Any, x: Any) -> Any:
    encoded = x
    for w in weights[:4]:
        encoded = jnp.tanh(encoded @ w)
    return (
        jnp.abs(encoded @ weights[4] - x).mean()
        + 0.1 * jax.nn.logsumexp(encoded @ weights[5])
        + (weights[0] ** 2).sum()
    )


def grad_penalty(weights: Any, x: Any) -> Any:
    slope = jax.grad(lambda y: mlp(weights, y))(x)
    return mlp(weights, x) + ((slope**2).sum() - 1) ** 2


def mesh_of(kind: AxisType) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(kind,) * 2)


def constrained(weights: Any, x: Any) -> Any:
    place = NamedSharding(mesh_of(AxisType.Auto), P("data", "model"))
    for w in weights:
        x = jax.lax.with_sharding_constraint(jnp.tanh(x @ w) + x, place)
    return (x**2).mean()


def shard_mapped(weights: Any, x: Any) -> Any:
    mesh = mesh_of(AxisType.Auto)
    layer = jax.shard_map(
        lambda w, x: 0.1 * jax.lax.psum(jnp.tanh(x @ w), "data") + x,
        mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"),
    )  # fmt: skip
    for w in weights:
        x = layer(w, x)
    return (x**2).mean()


class ConvNet(nn.Module):
    """Batch statistics and dropout in Linen."""

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        for _ in range(3):
            x = nn.Conv(8, (3, 3))(x)
            x = nn.BatchNorm(use_running_average=not train)(x)
            x = nn.Dropout(0.2, deterministic=not train)(nn.relu(x))
        return nn.Dense(4)(x.mean((1, 2)))


def linen() -> Sample:
    model, images = ConvNet(), jax.random.normal(KEY, (4, 8, 8, 3))
    variables = model.init({"params": KEY, "dropout": KEY}, images)

    def loss(params: Any, stats: Any, images: Any, key: Any, train: bool) -> Any:
        out, new = model.apply(
            {"params": params, "batch_stats": stats}, images, train, rngs={"dropout": key}, mutable=["batch_stats"]
        )
        return (out**2).mean(), new["batch_stats"]

    return Sample(loss, variables["params"], (variables["batch_stats"], images, KEY, True), has_aux=True)


def equinox() -> Sample:
    model = eqx.nn.MLP(WIDTH, WIDTH, 32, 3, activation=jax.nn.gelu, key=KEY)
    return Sample(lambda model, x: (jax.vmap(model)(x) ** 2).mean(), model, (INPUTS,))


SAMPLES: dict[str, Callable[[], Sample]] = {
    name: partial(Sample, loss, WEIGHTS, (INPUTS,))
    for name, loss in {
        "plain": mlp, "named": named, "jitted": jitted, "scanned": scanned, "reversed_scan": reversed_scan,
        "scan_with_constants": scan_with_constants,
        "while": with_while, "cond": with_cond, "custom_rules": custom_rules,
        "own_remat": own_remat, "long_skips": long_skips, "several_losses": several_losses, "grad_penalty": grad_penalty,
        "constrained": constrained, "shard_mapped": shard_mapped,
    }.items()
} | {
    "dropout": partial(Sample, dropout, WEIGHTS, (INPUTS, KEY)),
    "mixed_precision": partial(Sample, mixed_precision, WEIGHTS, (INPUTS,), computes_in="bfloat16"),
    "aux": partial(Sample, with_aux, WEIGHTS, (INPUTS,), has_aux=True),
    "linen": linen,
    "equinox": equinox,
}  # fmt: skip
