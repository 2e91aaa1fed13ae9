"""Causes are found in what the program is; each remedy is pasted and keeps its promise; healthy steps have no cause."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.units import format_bytes
from tests.pasting import pasted, run, value
from tests.target_step import needs_compiler

WIDTH, ROWS, K = 256, 64, 4
PARAMS = {
    "a": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
    "b": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
}


def params():
    return {name: 0.05 * jax.random.normal(jax.random.key(at), (WIDTH, WIDTH)) for at, name in enumerate("ab")}


def batch(rows=ROWS):
    return jax.random.normal(jax.random.key(7), (rows, WIDTH))


def loss(p, x):
    return jnp.mean((jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) - x) ** 2)


def descended(p, grads):
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads)


def causes(step, *args):
    return " ".join(jm.step_memory(step, *args).causes())


MULTI = optax.MultiSteps(optax.sgd(0.1), K)


def with_optax(p, state, x):
    updates, state = MULTI.update(jax.grad(loss)(p, x), state, p)
    return optax.apply_updates(p, updates), state


def with_cond(p, held, x):
    held = {"sums": jax.tree.map(jnp.add, held["sums"], jax.grad(loss)(p, x)), "count": held["count"] + 1}

    def apply(p, sums):
        return descended(p, jax.tree.map(lambda g: g / K, sums)), jax.tree.map(jnp.zeros_like, sums)

    p, sums = jax.lax.cond(held["count"] % K == 0, apply, lambda *unchanged: unchanged, p, held["sums"])
    return p, {**held, "sums": sums}


class Trainer:
    every = K

    def update(self, p, waiting, x):
        sums = jax.tree.map(lambda s, g: s + g / self.every, waiting[1], jax.grad(loss)(p, x))
        is_due = waiting[0] % self.every == self.every - 1
        p = jax.tree.map(lambda w, s: jnp.where(is_due, w - 0.1 * s, w), p, sums)
        return p, (waiting[0] + 1, jax.tree.map(lambda s: jnp.where(is_due, 0.0, s), sums))


def zeros():
    return jax.tree.map(jnp.zeros_like, params())


EVERY = optax.chain(optax.apply_every(K), optax.sgd(0.1 / K))


def with_every(p, state, x):
    updates, state = EVERY.update(jax.grad(loss)(p, x), state, p)
    return optax.apply_updates(p, updates), state


KEPT = {
    "another transformation": (with_every, lambda: EVERY.init(params()), "state[0].grad_acc['a']"),
    "optax": (with_optax, lambda: MULTI.init(params()), "state.acc_grads['a']"),
    "a cond": (with_cond, lambda: {"sums": zeros(), "count": jnp.int32(0)}, "held['sums']['a']"),
    "a method": (Trainer().update, lambda: (jnp.int32(0), zeros()), "waiting[1]['a']"),
}


@pytest.mark.parametrize("kind", KEPT)
def test_gradients_kept_from_step_to_step(kind):
    function, make, path = KEPT[kind]
    step = jm.jit_step(function)
    printed = causes(step, params(), make(), batch())
    assert f"{path} and 1 more hold 512 KiB of gradients from step to step" in printed

    def at_once(p, x):
        return descended(p, jm.grad(loss)(p, x))

    policy = value(pasted("causes.microbatches", printed), jm=jm, K=K)
    better = jm.jit_step(at_once, policy)
    before, after = (
        jm.step_memory(*call) for call in ((step, params(), make(), batch()), (better, params(), batch(K * ROWS)))
    )
    resident = [each.step_bytes - each.temp_bytes for each in (before, after)]
    more_rows = (K - 1) * ROWS * WIDTH * 4
    assert resident[0] - (resident[1] - more_rows) >= 2 * WIDTH * WIDTH * 4, "the state is smaller by the sums"
    assert after.step_bytes - more_rows < before.step_bytes
    p, state, rows = params(), make(), batch(K * ROWS)
    for part in jnp.split(rows, K):
        p, state = step(p, state, part)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), p, better(params(), rows))


def added_up(p, x):
    grads = None
    for part in jnp.split(x, K):
        new = jax.grad(loss)(p, part)
        grads = new if grads is None else jax.tree.map(jnp.add, grads, new)
    return descended(p, jax.tree.map(lambda g: g / K, grads))


@jax.jit
def gradients(p, x):
    return jax.value_and_grad(loss)(p, x)[1]


def reduced(p, x):
    parts = [gradients(p, part) for part in jnp.split(x, K)]
    return descended(p, jax.tree.map(lambda *g: sum(each / K for each in g), *parts))


def stacked(p, x):
    parts = [jax.grad(loss)(p, part) for part in jnp.split(x, K)]
    return descended(p, jax.tree.map(lambda *g: jnp.mean(jnp.stack(g), 0), *parts))


class InClass:
    def train(self, p, x):
        total = jax.tree.map(jnp.zeros_like, p)
        for at in range(K):
            grads = jax.grad(loss)(p, x[at * len(x) // K : (at + 1) * len(x) // K])
            total = jax.tree.map(lambda t, g: t + (1 / K) * g, total, grads)
        return descended(p, total)


LOOPS = {"a function": added_up, "a stack": stacked, "a jitted gradient": reduced, "a method": InClass().train}


@pytest.mark.parametrize("kind", LOOPS)
def test_gradients_in_a_python_loop(kind):
    step, rows = jm.jit_step(LOOPS[kind]), batch(4096)
    printed = causes(step, params(), rows)
    assert f"{step.name} takes the gradients of {K} microbatches in a Python loop" in printed

    def at_once(p, x):
        return descended(p, jm.grad(loss)(p, x))

    better = jm.jit_step(at_once, value(pasted("causes.microbatches", printed), jm=jm))
    before, after = (jm.step_memory(each, params(), rows).step_bytes for each in (step, better))
    assert after < 0.8 * before
    assert not causes(better, params(), rows)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
        step(params(), rows),
        better(params(), rows),
    )


def summed(p, x):
    total = 0.0
    for at in range(K):
        total = total + loss(p, x.reshape(K, -1, WIDTH)[at])
    return total / K


def averaged(p, x):
    return jnp.mean(jnp.stack([jax.jit(loss)(p, part) for part in jnp.split(x, K)]))


class Chunked:
    parts = K

    def loss(self, p, batch):
        size = len(batch["x"]) // self.parts
        return sum(loss(p, batch["x"][at * size : (at + 1) * size]) / self.parts for at in range(self.parts))


SUMS = {
    "a function": (summed, lambda x: x),
    "a stack": (averaged, lambda x: x),
    "a method": (Chunked().loss, lambda x: {"x": x}),
    "a batch in parts": (
        lambda p, parts: sum(functools.partial(loss, p)(part) for part in parts) / K,
        lambda x: jnp.split(x, K),
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("kind", SUMS)
def test_losses_added_up_in_a_python_loop(kind):
    chunked, laid_out = SUMS[kind]

    def fit(p, x):
        value, grads = jax.value_and_grad(chunked)(p, x)
        return descended(p, grads), value

    def at_once(p, x):
        value, grads = jm.value_and_grad(loss)(p, x)
        return descended(p, grads), value

    step, rows = jm.jit_step(fit), batch(4096)
    printed = causes(step, params(), laid_out(rows))
    assert f"fit adds up the losses of {K} microbatches in a Python loop" in printed
    better = jm.jit_step(at_once, value(pasted("causes.microbatches", printed), jm=jm))
    before = jm.step_memory(step, params(), laid_out(rows)).step_bytes
    assert jm.step_memory(better, params(), rows).step_bytes < 0.8 * before
    assert not causes(better, params(), rows)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
        step(params(), laid_out(rows)),
        better(params(), rows),
    )


def under_vmap(p, x):
    grads = jax.vmap(jax.grad(loss), (None, 0))(p, x.reshape(64, -1, WIDTH))
    return descended(p, jax.tree.map(lambda g: g.mean(0), grads))


def by_example(p, x):
    values, grads = jax.vmap(lambda row: jax.value_and_grad(loss)(p, row))(x.reshape(64, -1, WIDTH))
    return descended(p, jax.tree.map(lambda g: jnp.sum(g / 64, axis=0), grads)), values.mean()


class Microbatched:
    def fit(self, p, data):
        grads = jax.vmap(functools.partial(jax.grad(loss), p))(data["x"].reshape(64, -1, WIDTH))
        return descended(p, jax.tree.map(functools.partial(jnp.mean, axis=0), grads))


SIDES = {
    "a function": (under_vmap, lambda x: x),
    "a value and a sum": (by_example, lambda x: x),
    "a method": (Microbatched().fit, lambda x: {"x": x}),
}


@pytest.mark.core
@pytest.mark.parametrize("kind", SIDES)
def test_gradients_side_by_side(kind):
    function, laid_out = SIDES[kind]
    step, rows = jm.jit_step(function), batch(4096)
    printed = causes(step, params(), laid_out(rows))
    assert f"{step.name} takes 64 gradients side by side, under jax.vmap, and adds them up: " in printed

    def at_once(p, x):
        return descended(p, jm.grad(loss)(p, x))

    better = jm.jit_step(at_once, value(pasted("causes.microbatches", printed), jm=jm))
    before = jm.step_memory(step, params(), laid_out(rows)).step_bytes
    assert jm.step_memory(better, params(), rows).step_bytes < 0.5 * before
    assert not causes(better, params(), rows)
    expected = step(params(), laid_out(rows))
    expected = expected[0] if kind == "a value and a sum" else expected
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), expected, better(params(), rows))


def clipped(grads):
    return jax.tree.map(lambda g: g / jnp.maximum(1.0, optax.tree.norm(grads)), grads)


def private(p, x):
    grads = jax.vmap(lambda row: clipped(jax.grad(loss)(p, row)))(x[:, None])
    return descended(p, jax.tree.map(lambda g: g.sum(0), grads))


def private_in_a_scan(p, x):
    def add(sums, row):
        return jax.tree.map(jnp.add, sums, clipped(jax.grad(loss)(p, row))), None

    return descended(p, jax.lax.scan(add, jax.tree.map(jnp.zeros_like, p), x[:, None])[0])


def test_gradients_that_are_clipped_side_by_side_are_added_up_in_a_scan():
    printed = causes(jm.jit_step(private), params(), batch(128))
    assert "private takes 128 gradients side by side" in printed
    assert "Each is changed before that" in printed
    assert "jm.StepPolicy" not in printed
    sizes = [
        jm.step_memory(jm.jit_step(each), params(), batch(128)).step_bytes for each in (private, private_in_a_scan)
    ]
    assert sizes[1] < 0.1 * sizes[0]
    assert not causes(jm.jit_step(private_in_a_scan), params(), batch(128))


def rounds(p, keys, kept=lambda h: h):
    def one(p, key):
        x = jax.random.normal(key, (ROWS, WIDTH))
        value, grads = jax.value_and_grad(loss)(p, x)
        return descended(p, grads), {"loss": value, "act": kept(jnp.tanh(x @ p["a"]))}

    return jax.lax.scan(one, p, keys)


class Training:
    def run(self, state, keys):
        return jax.jit(rounds)(state, keys)[1]["act"]


KEPT_ROUNDS = {
    "a function": rounds,
    "a method": Training().run,
    "a partial": functools.partial(rounds, kept=lambda h: {"h": h, "rows": h[:4]}),
}


@pytest.mark.core
@pytest.mark.parametrize("kind", KEPT_ROUNDS)
def test_what_a_loop_keeps_of_each_round(kind):
    keys = jax.random.split(jax.random.key(0), 100)
    memory = jm.step_memory(jax.jit(KEPT_ROUNDS[kind]), params(), keys)
    printed = " ".join(memory.causes())
    assert "that a loop of 100 rounds at tests/test_causes.py:" in printed
    assert "keeps of each round, the largest f32[100,64,256]. Return from a round what is needed of them" in printed
    reduced = jm.step_memory(jax.jit(functools.partial(rounds, kept=jnp.mean)), params(), keys)
    assert reduced.step_bytes < 0.5 * memory.step_bytes
    assert not reduced.causes()
    fewer = jm.step_memory(jax.jit(KEPT_ROUNDS[kind]), params(), keys[:10])
    assert fewer.step_bytes < 0.5 * memory.step_bytes


def mesh_of_all():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def laid(tree, *spec):
    return jax.device_put(tree, jax.NamedSharding(mesh_of_all(), jax.P(*spec)))


def plain(p, x):
    return descended(p, jax.grad(loss)(p, x))


class Whole:
    def fit(self, p, images):
        return plain(p, images["x"]), 0


def labelled(p, x, y):
    return descended(p, jax.grad(lambda q: loss(q, x) + loss(q, y))(p))


WHOLE = {
    "a function": (plain, lambda: (batch(4096),), "x"),
    "a method and a tree": (Whole().fit, lambda: ({"x": batch(4096)},), "images"),
    "two, the larger first": (labelled, lambda: (batch(4096), batch(64)), "x"),
    "from NumPy": (plain, lambda: (np.asarray(batch(4096)),), "x"),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_batch_that_is_whole_on_each_device(kind):
    function, make, name = WHOLE[kind]
    step, data = jm.jit_step(function), make() if kind == "from NumPy" else laid(make())
    memory = jm.step_memory(step, laid(params()), *data)
    printed = "\n".join(memory.causes())
    assert f"{name} is whole on each of 8 devices" in printed
    line = pasted("causes.split_batch", printed)
    better = run(line, jax=jax, p=laid(params()), **{name: data[0]})[name]
    again = jm.step_memory(step, laid(params()), better, *data[1:])
    assert f"needs {format_bytes(again.step_bytes)} in place of {format_bytes(memory.step_bytes)}, compiled" in printed
    assert again.step_bytes < memory.step_bytes / 2
    assert "is whole" not in " ".join(again.causes())
    expected, got = step(laid(params()), *data), step(laid(params()), better, *data[1:])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), expected, got)


CONSTRAIN = "jax.lax.with_sharding_constraint(value, jax.P())"
NAMED = "jax.lax.with_sharding_constraint(value, jax.NamedSharding(mesh, jax.P(None, None)))"
VALUES = {
    "a constraint": (CONSTRAIN, "jnp.mean((keep(jnp.tanh(x @ p['a'])) @ p['b']) ** 2)", (4096, WIDTH)),
    "tokens": (
        CONSTRAIN,
        "jnp.mean(jnp.tanh(keep(jnp.tanh(x @ p['a'])).reshape(-1, 256) @ p['b']) ** 2)",
        (64, 64, WIDTH),
    ),
    "in a loop": (
        NAMED,
        "jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(keep(jnp.tanh(h @ w)) @ p['b']), None), x, jnp.stack([*p.values()]))[0])",
        (4096, WIDTH),
    ),
}
MODEL = """
def keep(value):
    return {line}
def fit(p, x):
    return descended(p, jax.grad(lambda p: {loss})(p))
"""


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_that_is_whole_on_each_device(kind, tmp_path):
    slip, text, shape = VALUES[kind]

    def trained(line):
        (file := tmp_path / "model.py").write_text(MODEL.format(line=line, loss=text))
        scope = {"jax": jax, "jnp": jnp, "mesh": mesh_of_all(), "descended": descended}
        exec(compile(file.read_text(), str(file), "exec"), scope)  # noqa: S102
        return jm.jit_step(scope["fit"])

    rows = laid(jax.random.normal(jax.random.key(3), shape), "data")
    with jax.set_mesh(mesh_of_all()):
        memory = jm.step_memory(trained(slip), laid(params()), rows)
        printed = " ".join(memory.causes())
        assert "all rows of the batch on each of 8 devices, though the batch is divided. Divide the rows" in printed
        better = trained(pasted("causes.split_rows", printed))
        again = jm.step_memory(better, laid(params()), rows)
        assert again.step_bytes < 0.7 * memory.step_bytes
        assert not again.causes()
        expected, got = trained(slip)(laid(params()), rows), better(laid(params()), rows)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), expected, got)


SCHEDULED = """
import functools, jax, jax.numpy as jnp
PAIRS = [(i, j) for i in range(4) for j in range(4)]
def histograms(x):
    return jnp.stack([jnp.bincount(jnp.clip(x[i] + x[j], 0, 255), length=256) for i, j in PAIRS])
def sorted_sums(x, scale):
    return jnp.stack([jnp.sum(jnp.sort(x[i] * scale + x[j])[::7]) for i, j in PAIRS])
class Pairs:
    def distances(self, x):
        return jnp.stack([jnp.cumsum(jnp.abs(x[i] - x[j])).max() for i, j in PAIRS])
INTS, FLOATS = jax.ShapeDtypeStruct((4, 40_000), jnp.int32), jax.ShapeDtypeStruct((4, 40_000), jnp.float32)
STEPS = [(histograms, INTS), (functools.partial(sorted_sums, scale=2.0), FLOATS), (Pairs().distances, FLOATS)]
"""
SIZES = "print(*(jax.jit(f).lower(x).compile().memory_analysis().temp_size_in_bytes for f, x in STEPS))"


@pytest.fixture(scope="module")
def sizes_by_line():
    """Bytes of temporaries of each function in a process that is started as the line says."""

    @functools.cache
    def sizes(line):
        name, _, flags = line.partition("=")
        done = subprocess.run(
            [sys.executable, "-c", SCHEDULED + SIZES], capture_output=True, text=True, check=True, timeout=120,
            env={**os.environ, name: flags, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        return list(map(int, done.stdout.split()))

    return sizes


@pytest.mark.parametrize("at", [0, 1, 2])
def test_temporaries_that_the_cpu_holds_at_once(at, sizes_by_line):
    scope = {}
    exec(SCHEDULED, scope)  # noqa: S102
    function, x = scope["STEPS"][at]
    memory = jm.step_memory(jax.jit(function), x)
    printed = " ".join(memory.causes())
    assert "XLA's scheduler for CPUs holds many temporaries of" in printed
    assert sizes_by_line(pasted("causes.cpu_scheduler", printed))[at] < 0.8 * memory.temp_bytes


def recurrent(p, x):
    def unrolled(p):
        h = x
        for _ in range(6):
            h = jnp.tanh(h @ p["a"]) + h
        return jnp.mean(h @ p["b"])

    return descended(p, jax.grad(unrolled)(p))


def two_losses(p, x):
    first, second = jax.grad(loss)(p, x), jax.grad(lambda q, y: jnp.mean(jnp.sin(y @ q["b"])) + 0 * q["a"].sum())(p, x)
    return descended(p, jax.tree.map(jnp.add, first, second))


ADAM = optax.adam(1e-3)


def with_moments(p, state, x):
    updates, state = ADAM.update(jax.grad(loss)(p, x), state, p)
    return optax.apply_updates(p, updates), state


def with_target(p, target, count, x):
    p = descended(p, jax.grad(loss)(p, x))
    return p, jax.tree.map(lambda t, w: jnp.where(count % 100 == 0, w, t), target, p), count + 1


def finite(p, x):
    grads = jax.grad(loss)(p, x)
    is_finite = jnp.isfinite(optax.tree.norm(grads))
    return jax.tree.map(lambda w, new: jnp.where(is_finite, new, w), p, descended(p, grads))


AHEAD = optax.lookahead(optax.sgd(0.1), sync_period=5, slow_step_size=0.5)


def looking_ahead(p, state, x):
    updates, state = AHEAD.update(jax.grad(loss)(p.fast, x), state, p)
    return optax.apply_updates(p, updates), state


def in_a_scan(p, x):
    def add(sums, part):
        return jax.tree.map(jnp.add, sums, jax.grad(loss)(p, part)), None

    return descended(p, jax.lax.scan(add, jax.tree.map(jnp.zeros_like, p), jnp.stack(jnp.split(x, K)))[0])


def over_time(p, x):
    def unrolled(p):
        h, total = jnp.zeros((256, WIDTH)), 0.0
        for at in range(4):
            h = jnp.tanh(x.reshape(4, 256, WIDTH)[at] @ p["a"] + h)
            total = total + jnp.mean((h @ p["b"]) ** 2)
        return total

    return descended(p, jax.grad(unrolled)(p))


def several_heads(p, x):
    def heads(p):
        h = jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"])
        return sum(jnp.mean((h - x[:, at : at + 64].sum(1, keepdims=True)) ** 2) for at in range(0, WIDTH, 64))

    return descended(p, jax.grad(heads)(p))


def decayed(p, x):
    return descended(p, jax.grad(lambda p: loss(p, x) + sum(jnp.sum(w**2) for w in p.values()))(p))


def two_views(p, x):
    def contrasted(p):
        one, two = (jnp.tanh(x[rows] @ p["a"]) @ p["b"] for rows in (slice(0, 512), slice(512, 1024)))
        return jnp.mean((one * two).sum(1)) - jnp.mean(jnp.square(one - two))

    return descended(p, jax.grad(contrasted)(p))


def vmapped_loss(p, x):
    return descended(p, jax.grad(lambda p: jax.vmap(loss, (None, 0))(p, x.reshape(64, -1, WIDTH)).mean())(p))


def adapted(p, x):
    def outer(p, rows):
        return loss(descended(p, jax.grad(loss)(p, rows)), rows)

    return descended(p, jax.grad(lambda p: jax.vmap(outer, (None, 0))(p, x.reshape(2, -1, WIDTH)).mean())(p))


HEALTHY = {
    "losses over time": (over_time, ()),
    "several heads": (several_heads, ()),
    "decayed weights": (decayed, ()),
    "two views": (two_views, ()),
    "a plain step": (plain, ()),
    "shared weights": (recurrent, ()),
    "two losses": (two_losses, ()),
    "moments": (with_moments, (ADAM.init(PARAMS),)),
    "a target network": (with_target, (PARAMS, jax.ShapeDtypeStruct((), jnp.int32))),
    "finite gradients only": (finite, ()),
    "a scan over microbatches": (in_a_scan, ()),
    "lookahead": (looking_ahead, (AHEAD.init(optax.LookaheadParams.init_synced(PARAMS)),)),
}


@pytest.mark.core
@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_step_has_no_cause(kind):
    function, state = HEALTHY[kind]
    x = jax.ShapeDtypeStruct((1024, WIDTH), jnp.float32)
    weights = optax.LookaheadParams.init_synced(PARAMS) if function is looking_ahead else PARAMS
    assert causes(jm.jit_step(function), weights, *state, x) == ""


@pytest.mark.core
@pytest.mark.parametrize("function", [adapted, vmapped_loss])
def test_one_gradient_of_what_is_under_vmap_is_no_sum_of_several(function):
    printed = causes(jm.jit_step(function), PARAMS, jax.ShapeDtypeStruct((1024, WIDTH), jnp.float32))
    assert "side by side" not in printed
    assert "microbatches" not in printed


def layered(p, x):
    def forward(p):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"])[0]

    return descended(p, jax.grad(lambda p: jnp.mean(forward(p) ** 2))(p))


def joined(p, x):
    def forward(p):
        q, k, v = jnp.split(x @ jnp.concatenate([p["q"], p["k"], p["v"]], 1), 3, axis=1)
        return jnp.mean(jnp.tanh(q * k).astype(jnp.bfloat16) @ p["out"].astype(jnp.bfloat16) * v)

    return descended(p, jax.grad(forward)(p))


FSDP = {
    "scanned layers": (layered, {"layers": (6, WIDTH, WIDTH)}, (None, "data")),
    "joined and cast weights": (joined, dict.fromkeys(("q", "k", "v", "out"), (WIDTH, WIDTH)), ("data",)),
}


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("kind", FSDP)
def test_gathered_weights_are_no_rows_of_the_batch(kind, rows):
    function, shapes, spec = FSDP[kind]
    weights = laid({name: 0.05 * jax.random.normal(jax.random.key(1), shape) for name, shape in shapes.items()}, *spec)
    assert "rows" not in causes(jm.jit_step(function), weights, laid(batch(rows), "data"))


@pytest.mark.parametrize(("rows", "width"), [(64, 2048), (4096, WIDTH), (4100, WIDTH)])
def test_what_dividing_rows_saves_under_tensor_parallelism_is_compiled_first(rows, width):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    weights = {
        "a": jax.device_put(jnp.ones((width, width)), jax.NamedSharding(mesh, jax.P(None, "model"))),
        "b": jax.device_put(jnp.ones((width, width)), jax.NamedSharding(mesh, jax.P("model"))),
    }
    x = jax.device_put(jnp.ones((rows, width)), jax.NamedSharding(mesh, jax.P()))
    memory = jm.step_memory(jm.jit_step(plain), weights, x)
    printed = "\n".join(memory.causes())
    if "is whole" not in printed:
        assert rows < width, "little to save"
        return
    better = run(pasted("causes.split_batch", printed), jax=jax, x=x, p=weights)["x"]
    again = jm.step_memory(jm.jit_step(plain), weights, better).step_bytes
    assert again < memory.step_bytes
    assert f"needs {format_bytes(again)} in place of {format_bytes(memory.step_bytes)}, compiled" in printed


def test_a_healthy_step_on_several_devices_has_no_cause():
    assert causes(jm.jit_step(plain), laid(params()), laid(batch(4096), "data")) == ""
    assert causes(jm.jit_step(plain), laid(params(), "data"), laid(batch(4096), "data")) == ""


@pytest.mark.core
def test_the_names_of_accumulated_gradients_under_nnx():
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.MultiSteps(optax.adam(1e-3), K), wrt=nnx.Param)

    def fit(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)

    printed = causes(jm.jit_step(nnx.jit(fit)), model, optimizer, batch())
    assert "optimizer.opt_state.acc_grads['kernel']" in printed
    assert ".mu" not in printed


@pytest.mark.parametrize("target", [None, pytest.param("h100_sxm", marks=pytest.mark.targets)])
def test_no_array_stays_alive_for_the_causes(target):
    if target is not None:
        needs_compiler(target)
    weights = params()
    gone = [weakref.ref(each) for each in jax.tree.leaves(weights)]
    memory = jm.step_memory(jm.jit_step(plain), weights, batch(), target=target)
    del weights
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert memory.causes() == ()
    assert memory.peak().bytes > 0
