"""Six families of models over eight devices, layers written out: what the compiler's own scheduler has to order.

Each is small in its sums and has the form of its family: what a layer gathers, keeps and reduces.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxmem_callbacks as jm

LAYERS, WIDTH, HEADS = 8, 512, 8
_DEVICES = 8
_HALF = jnp.bfloat16
Tree = Any
Loss = Callable[[Tree, Tree], jax.Array]


def _norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * gain).astype(_HALF)


def _dense(x: jax.Array, weights: jax.Array) -> jax.Array:
    return x @ weights.astype(_HALF)


def _attention(x: jax.Array, memory: jax.Array, p: Tree, *, causal: bool) -> jax.Array:
    def heads(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return _dense(rows, weights).reshape(*rows.shape[:2], HEADS, -1)

    q, k, v = heads(x, p["q"]), heads(memory, p["k"]), heads(memory, p["v"])
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(_HALF), v)
    return _dense(mixed.reshape(x.shape), p["o"])


def _mlp(x: jax.Array, p: Tree) -> jax.Array:
    return _dense(jax.nn.gelu(_dense(x, p["up"])), p["down"])


def _of_words(logits: jax.Array, words: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(logp, words[..., None], -1).mean()


def _block(*, mlp: int = 4 * WIDTH, cross: bool = False) -> Tree:
    square = (WIDTH, WIDTH)
    shapes = {"n1": (WIDTH,), "n2": (WIDTH,), "q": square, "k": square, "v": square, "o": square}
    shapes |= {"up": (WIDTH, mlp), "down": (mlp, WIDTH)}
    return shapes | ({"n3": (WIDTH,), "cross": dict.fromkeys("qkvo", square)} if cross else {})


def _transformed(x: jax.Array, p: Tree, *, causal: bool) -> jax.Array:
    h = _norm(x, p["n1"])
    x = x + _attention(h, h, p, causal=causal)
    return x + _mlp(_norm(x, p["n2"]), p)


def _decoder(params: Tree, batch: Tree) -> jax.Array:
    x = params["words"].astype(_HALF)[batch["words"]]
    for p in params["layers"]:
        x = _transformed(x, p, causal=True)
    return _of_words(_dense(x, params["words"].T)[:, :-1], batch["words"][:, 1:])


def _experts(params: Tree, batch: Tree) -> jax.Array:
    x = params["words"].astype(_HALF)[batch["words"]]
    for p in params["layers"]:
        h = _norm(x, p["n1"])
        x = x + _attention(h, h, p, causal=True)
        h = _norm(x, p["n2"])
        share = jax.nn.softmax(_dense(h, p["router"]).astype(jnp.float32)).astype(_HALF)
        made = jax.nn.gelu(jnp.einsum("btd,edf->btef", h, p["experts_up"].astype(_HALF))) * share[..., None]
        x = x + jnp.einsum("btef,efd->btd", made, p["experts_down"].astype(_HALF))
    return _of_words(_dense(x, params["words"].T)[:, :-1], batch["words"][:, 1:])


def _vision(params: Tree, batch: Tree) -> jax.Array:
    x = _dense(batch["patches"], params["patch"]) + params["places"].astype(_HALF)
    for p in params["layers"]:
        x = _transformed(x, p, causal=False)
    return _of_words(_dense(x.mean(1), params["head"]), batch["labels"])


def _translating(params: Tree, batch: Tree) -> jax.Array:
    table = params["words"].astype(_HALF)
    memory, x = table[batch["source"]], table[batch["words"]]
    for p in params["layers"][: LAYERS // 2]:
        memory = _transformed(memory, p, causal=False)
    for p in params["layers"][LAYERS // 2 :]:
        h = _norm(x, p["n1"])
        x = x + _attention(h, h, p, causal=True)
        x = x + _attention(_norm(x, p["n3"]), memory, p["cross"], causal=False)
        x = x + _mlp(_norm(x, p["n2"]), p)
    return _of_words(_dense(x, params["words"].T)[:, :-1], batch["words"][:, 1:])


def _diffusing(params: Tree, batch: Tree) -> jax.Array:
    x, time = _dense(batch["patches"], params["patch"]), jax.nn.silu(_dense(batch["time"], params["time"]))[:, None]
    for p in params["layers"]:
        shift, scale, gate, shift2, scale2, gate2 = jnp.split(_dense(time, p["adapt"]), 6, -1)
        h = _norm(x, p["n1"]) * (1 + scale) + shift
        x = x + gate * _attention(h, h, p, causal=False)
        x = x + gate2 * _mlp(_norm(x, p["n2"]) * (1 + scale2) + shift2, p)
    return ((_dense(x, params["patch"].T) - batch["noise"]).astype(jnp.float32) ** 2).mean()


def _recurring(params: Tree, batch: Tree) -> jax.Array:
    x = params["words"].astype(_HALF)[batch["words"]]

    def step(one: Tree, other: Tree) -> Tree:
        return one[0] * other[0], one[1] * other[0] + other[1]

    for p in params["layers"]:
        h = _norm(x, p["n1"])
        decay, given = jax.nn.sigmoid(_dense(h, p["k"])), _dense(h, p["v"])
        state = jax.lax.associative_scan(step, (decay, given), axis=1)[1]
        x = x + _dense(state * jax.nn.silu(_dense(h, p["q"])), p["o"])
        x = x + _mlp(_norm(x, p["n2"]), p)
    return _of_words(_dense(x, params["words"].T)[:, :-1], batch["words"][:, 1:])


_WORDS, _ROWS, _LENGTH, _PATCH, _EXPERTS = 8192, 64, 512, 768, 8
_TOKENS = (_ROWS, _LENGTH)


def _of_layers(block: Tree, **more: Any) -> Tree:
    return {"layers": [block] * LAYERS, **more}


def _with_experts() -> Tree:
    block = {name: shape for name, shape in _block().items() if name not in ("up", "down")}
    block |= {
        "router": (WIDTH, _EXPERTS),
        "experts_up": (_EXPERTS, WIDTH, WIDTH),
        "experts_down": (_EXPERTS, WIDTH, WIDTH),
    }
    return _of_layers(block, words=(_WORDS, WIDTH))


# Family -> its loss, the shapes of its parameters, and those of its batch, whole numbers as tuples under "words" and their like.
FAMILIES: dict[str, tuple[Loss, Tree, Tree]] = {
    "decoder": (_decoder, _of_layers(_block(), words=(_WORDS, WIDTH)), {"words": _TOKENS}),
    "experts": (_experts, _with_experts(), {"words": _TOKENS}),
    "vision": (
        _vision,
        _of_layers(_block(), patch=(_PATCH, WIDTH), places=(256, WIDTH), head=(WIDTH, 1024)),
        {"patches": (128, 256, _PATCH), "labels": (128,)},
    ),
    "translating": (
        _translating,
        {
            "layers": [_block()] * (LAYERS // 2) + [_block(cross=True)] * (LAYERS // 2),
            "words": (_WORDS, WIDTH),
        },
        {"source": _TOKENS, "words": _TOKENS},
    ),
    "diffusing": (
        _diffusing,
        _of_layers(_block() | {"adapt": (WIDTH, 6 * WIDTH)}, patch=(_PATCH, WIDTH), time=(256, WIDTH)),
        {"patches": (128, 256, _PATCH), "noise": (128, 256, _PATCH), "time": (128, 256)},
    ),
    "recurring": (_recurring, _of_layers(_block(), words=(_WORDS, WIDTH)), {"words": _TOKENS}),
}
_COUNTED = ("words", "source", "labels")


def step_of(loss: Loss) -> Callable[..., Any]:
    """A train step with Adam's two moments, written out."""

    def train_step(params: Tree, mean: Tree, square: Tree, batch: Tree) -> Any:
        value, gradients = jm.value_and_grad(loss)(params, batch)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradients)
        square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, gradients)
        params = jax.tree.map(lambda p, m, s: p - 1e-3 * m * jax.lax.rsqrt(s + 1e-8), params, mean, square)
        return params, mean, square, value

    return train_step


def family(name: str, *, layers: int = LAYERS, sharded: bool = True) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step of one family and its arguments as shapes, the state fully sharded over eight devices or on one."""
    loss, parameters, batch = FAMILIES[name]
    parameters = {**parameters, "layers": parameters["layers"][:layers]}
    mesh = AbstractMesh((_DEVICES,), ("fsdp",), axis_types=(AxisType.Auto,))

    def shaped(shape: tuple[int, ...], dtype: Any, axis: int) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(*("fsdp" if at == axis else None for at in range(len(shape))))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec) if sharded else None)

    def is_shape(node: Any) -> bool:
        return isinstance(node, tuple)

    state = jax.tree.map(
        lambda shape: shaped(shape, jnp.float32, shape.index(max(shape))), parameters, is_leaf=is_shape
    )
    rows = {name: shaped(shape, jnp.int32 if name in _COUNTED else _HALF, 0) for name, shape in batch.items()}
    return step_of(loss), (state, state, state, rows)
