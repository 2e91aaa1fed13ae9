"""What microbatches would change is refused, by how much it would change, with what to write instead."""

from __future__ import annotations

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmem_callbacks as jm

pytestmark = pytest.mark.core

KEY = jax.random.key(0)
W = jax.random.normal(KEY, (16, 16))
X = jax.random.normal(KEY, (32, 16))
MASK = jax.random.bernoulli(jax.random.key(3), 0.4, (32,)).astype(jnp.float32)
FOUR = jm.StepPolicy(microbatches=4)


def rows(w, x):
    return (jnp.tanh(x @ w) ** 2).sum(-1)


def masked(w, x, mask):
    return (rows(w, x) * mask).sum() / jnp.maximum(mask.sum(), 1)


def padded(w, x, tokens):
    mask = tokens != 0
    return (rows(w, x)[:, None] * mask).sum() / mask.sum()


def ignoring(w, x, labels):
    mask = labels != -100
    return (rows(w, x) * mask).sum() / mask.sum()


def ignoring_id(padding):
    def ignoring_one(w, x, labels):
        mask = jax.jit(lambda value: value != padding)(labels)
        return (rows(w, x) * mask).sum() / jnp.maximum(mask.sum(), 1)

    return ignoring_one


def contrast(w, x):
    z = x @ w
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T * 5, jnp.arange(len(z))).mean()


def normalised(w, x):
    h = x @ w
    return (jnp.tanh((h - h.mean(0)) / h.std(0)) ** 3).mean()


def summed(w, x):
    return rows(w, x).sum()


def by_noise(w, x, key):
    mask = jax.random.bernoulli(key, 0.5, x.shape[:1])
    return (rows(w, x) * mask).sum() / mask.sum()


def refused(loss, *args, policy=FOUR, **options):
    """The words in which a step with this loss is refused, before it runs."""
    step = jm.jit_step(jax.jit(jm.value_and_grad(loss, **options)), policy)
    with pytest.raises(ValueError, match=r"microbatches|jm\.weighted") as caught:
        step(*args)
    return str(caught.value)


@pytest.mark.parametrize(
    ("loss", "args", "least", "seen"),
    [
        (masked, (X, MASK), 20, "on rows of this batch ("),
        (contrast, (X,), 60, "on rows of this batch ("),
        (normalised, (X,), 10, "on rows of this batch ("),
        (summed, (X,), 70, "on rows of this batch ("),
        (by_noise, (X, KEY), 5, "on rows of this batch ("),
        # The first batch shows nothing: no row of it is masked or padded.
        (masked, (X, jnp.ones(32)), 20, "with zeros in some rows"),
        (masked, (X, jnp.ones(32, bool)), 20, "with zeros in some rows"),
        (padded, (X, jnp.ones((32, 6), jnp.int32)), 5, "with zeros in some rows"),
        (ignoring, (X, jnp.ones(32, jnp.int32)), 20, "with -100 in some rows"),
        (masked, (X, jnp.full(32, 0.5)), 20, "with zeros in some rows"),
        *(
            (ignoring_id(id_), (X, jnp.full(32, 7, jnp.int32)), 20, f"with {id_} in some rows")
            for id_ in (-1, 1, 50256)
        ),
    ],
)
def test_losses_that_are_no_mean_over_rows(loss, args, least, seen):
    message = refused(loss, W, *args)
    percent = re.search(r"its accumulated gradient differs by ([\d.]+)% from the full one", message)
    assert percent is not None, message
    assert float(percent[1]) > least, message
    assert seen in message
    assert f"return jm.weighted(loss_sum, weight_sum) in {loss.__name__}" in message
    assert "remat='full'" in message


def test_each_loss_of_a_step_is_checked_though_their_names_are_equal():
    losses = [lambda w, batch: ((batch @ w) ** 2).mean(), lambda w, batch: ((batch @ w) ** 2).sum()]
    step = jm.apply_policy(
        lambda w, batch, which: jm.value_and_grad(losses[which])(w, batch), jm.StepPolicy(microbatches=4)
    )
    w, batch = jnp.ones((3, 2)), jnp.arange(24.0).reshape(8, 3)
    assert jnp.allclose(step(w, batch, 0)[0], losses[0](w, batch), rtol=1e-6)
    with pytest.raises(ValueError, match="microbatches=4"):
        step(w, batch, 1)


def test_an_entry_of_aux_that_is_a_sum():
    message = refused(lambda w, x: (rows(w, x).mean(), {"total": rows(w, x).sum()}), W, X, has_aux=True)
    assert "accumulated aux['total'] differs by 75.0%" in message
    assert "jm.weighted(sum, weight), which is exact" in message


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (lambda x: (x > 0).sum(), "aux is int32[] for a microbatch of 8 rows"),
        (lambda x: x.mean(0), "aux is float32[16] for a microbatch of 8 rows"),
        (
            lambda x: x[:8, :8].mean(0),
            "aux is float32[8] for a microbatch of 8 rows",
        ),  # as long as a microbatch by chance
    ],
)
def test_an_entry_of_aux_that_cannot_be_joined(entry, told):
    message = refused(lambda w, x: (jm.weighted(rows(w, x).sum(), x.shape[0]), entry(x)), W, X, has_aux=True)
    assert told in message
    assert (
        "Expected a floating scalar (their mean is taken), an array whose leading dimension is the batch's" in message
    )


def scaled(w, x, scale):
    return jm.weighted(rows(w, x).sum(), scale * jnp.sqrt(x.shape[0]))


@pytest.mark.parametrize(
    ("loss", "args", "what"),
    [
        (lambda w, x: jm.weighted(rows(w, x).sum(), 32), (), "the loss"),
        (lambda w, x: jm.weighted(rows(w, x).sum(), jnp.ones(16).sum()), (), "the loss"),
        (lambda w, x, n: jm.weighted(rows(w, x).sum(), n), (jnp.int32(32),), "the loss"),
        (scaled, (jnp.bfloat16(2),), "the loss"),
        (lambda w, x: (rows(w, x).mean(), {"rate": jm.weighted((x > 0).sum(), 512)}), (), "aux['rate']"),
    ],
    ids=["constant", "computed constant", "argument", "root", "aux"],
)
def test_a_weight_that_does_not_follow_the_rows(loss, args, what):
    """Known from the trace alone: with shapes only, and where a gradient is inside a loop."""
    message = refused(loss, W, X, *args, has_aux=what != "the loss")
    assert f"{what} of {loss.__name__} is jm.weighted by a weight that does not add up: for 32 rows" in message
    assert "it is not 4 times what it is for 8" in message
    assert "jm.weighted(losses.sum(), losses.size)" in message
    step = jm.jit_step(jm.grad(loss, has_aux=what != "the loss"), FOUR)
    with pytest.raises(ValueError, match="a weight that does not add up"):
        step.lower(*jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (W, X, *args)))


def test_statistics_of_a_linen_batch_norm():
    model = nn.BatchNorm(use_running_average=False)
    variables = model.init(KEY, X)

    def loss(params, x):
        y, updates = model.apply({**variables, "params": params}, x, mutable=["batch_stats"])
        return jm.weighted((y**2).sum(), y.size), updates

    message = refused(loss, variables["params"], X, has_aux=True)
    assert "aux['batch_stats']['mean'] is float32[16]" in message
    assert "those of BatchNorm, are other numbers for microbatches" in message


def test_statistics_of_an_nnx_batch_norm():
    model = nnx.BatchNorm(16, rngs=nnx.Rngs(0))

    def loss(model, x):
        return jm.weighted((model(x) ** 2).sum(), x.size)

    step = jm.jit_step(lambda model, x: jm.nnx.value_and_grad(loss)(model, x)[0], FOUR)
    before = nnx.to_pure_dict(nnx.state(model))["mean"]
    with pytest.raises(
        ValueError, match=r"loss changes state by the batch: \['mean'\], \['var'\]\. Statistics of a whole batch"
    ):
        step(model, X)
    assert model.mean[...] is before or (model.mean[...] == before).all()
    model.eval()
    assert jnp.isfinite(step(model, X))


def other(w, x, extra):
    return (rows(w, x) * extra).mean()


def strange(w, one, two):
    return rows(w, one).mean() + two.mean()


@pytest.mark.parametrize(
    ("loss", "args", "options", "told"),
    [
        (lambda w: rows(w, X).mean(), (W,), {}, "no batch among the arguments of <lambda>. Given: w (differentiated)."),
        (strange, (W, X, X[0]), {}, "Arrays: one float32[32,16], two float32[16]."),
        (
            contrast,
            (W, X[:30]),
            {},
            "has 30 rows, which 4 does not divide. Expected a batch of 28 or 32 rows, or micro",
        ),
        (
            contrast,
            (W, X[:3]),
            {},
            "has 3 rows, which 4 does not divide. Expected a batch of 4 rows, or microbatches=3.",
        ),
        (
            lambda w, batch: contrast(w, batch["x"]),
            (W, {"x": X, "y": X, "pos": X[:7]}),
            {},
            "batch['pos'] float32[7,16] beside others of 32 rows",
        ),
        (lambda w, batch: w.sum(), (W, {"x": 1.0 + X[0, 0]}), {}, "(batch) has no array that has rows"),
        (other, (W, X, X[:, 0]), {}, "batch_argnames=('x', 'extra')) if so, batch_argnames=('x',) if not"),
        (other, (W, X, X[:, 0]), {"batch_argnames": "exrta"}, "no such argument that is not differentiated: 'exrta'."),
        (other, (W, X, X[:, 0]), {"batch_argnums": (0, 1)}, "differentiated: 0. Expected some of: x, extra."),
    ],
    ids=[
        "closed over",
        "two sizes",
        "30 rows",
        "3 rows",
        "odd leaf",
        "scalar",
        "unsure",
        "unknown name",
        "differentiated",
    ],
)
def test_a_batch_that_is_not_clear(loss, args, options, told):
    if jnp.ndim(jax.tree.leaves(args)[-1]) == 0:
        args = jax.tree.map(jnp.asarray, args)
    message = refused(loss, *args, **options)
    assert told in message, message


@pytest.mark.parametrize("options", [{"batch_argnames": ("x", "extra")}, {"batch_argnums": (1, -1)}])
def test_a_batch_that_is_said(options):
    def step(w, x, extra):
        value, _ = jm.value_and_grad(other, **options)(w, x, extra)
        return value

    assert jnp.allclose(jm.jit_step(step, FOUR)(W, X, X[:, 0]), other(W, X, X[:, 0]), rtol=1e-5)


def test_a_second_accumulation_by_optax():
    optimizer = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)
    model = nnx.Linear(16, 1, rngs=nnx.Rngs(0))
    wrapped = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    words = r"microbatches=4 and optax\.MultiSteps .* would accumulate twice\. Expected one of them"

    def step(w, state, x):
        gradient = jm.grad(lambda w, x: rows(w, x).mean())(w, x)
        return optimizer.update(gradient, state, w)

    for state in (optimizer.init(W), {"inner": (optimizer.init(W),)}):
        with pytest.raises(ValueError, match=words):
            jm.jit_step(step, FOUR)(W, state, X)
        with pytest.raises(ValueError, match=words):
            jm.apply_policy(step, FOUR)(W, state, X)
    with pytest.raises(ValueError, match=words):
        jm.jit_step(lambda model, optimizer, x: model(x), FOUR)(model, wrapped, X)


def mean(w, x):
    return rows(w, x).mean()


def test_a_gradient_where_nothing_can_be_compared():
    def step(w, x):
        return jax.lax.map(lambda part: jm.grad(mean)(w, part), x.reshape(2, 16, 16))

    with pytest.raises(ValueError, match=r"the gradient of mean is taken inside a loop, a branch or a shard_map"):
        jm.jit_step(jax.jit(step), FOUR)(W, X)
    with pytest.raises(ValueError, match=r"only be checked with real arrays, and here its arguments are being traced"):
        jax.jit(jm.apply_policy(jm.grad(mean), FOUR))(W, X)
    with pytest.raises(ValueError, match=r"only be checked with real arrays, and here its arguments are being traced"):
        jax.jit(jm.jit_step(jax.jit(jm.grad(mean)), FOUR))(W, X)


def test_a_gradient_that_is_not_finite():
    message = refused(mean, W, X.at[0].set(jnp.inf))
    assert "could not be checked, because its gradient or loss on 8 rows of the batch is not finite" in message


def test_what_jm_weighted_takes():
    with pytest.raises(
        ValueError, match=r"jm\.weighted: total has the shape \(32,\), expected a scalar\. Sum over the rows"
    ):
        jm.weighted(jnp.ones(32), 32)
    with pytest.raises(ValueError, match=r"jm\.weighted: weight has the shape \(32,\)"):
        jm.weighted(1.0, jnp.ones(32))
    alone = (
        r"The loss .*<lambda> returned what jm\.weighted gave alone, and has_aux=True expects a pair\. Return the pair"
    )
    with pytest.raises(ValueError, match=alone):
        jm.value_and_grad(lambda w: jm.weighted(w.sum(), 1), has_aux=True)(W)
    with pytest.raises(TypeError, match=r"two-element tuple|pair"):
        jm.value_and_grad(lambda w: w.sum(), has_aux=True)(W)


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "4"])
def test_numbers_of_microbatches(count):
    with pytest.raises(ValueError, match=r"microbatches=.*: expected a whole number of at least 1"):
        jm.StepPolicy(microbatches=count)


def test_a_step_that_takes_no_gradient_through_the_library():
    with pytest.raises(
        ValueError, match=r"The policy microbatches=4 would do nothing: .* never calls jm\.value_and_grad"
    ):
        jm.jit_step(lambda w, x: jax.grad(mean)(w, x).sum(), FOUR)(W, X)


def test_a_variant_that_is_finite_whole_and_not_in_parts_is_another_gradient():
    def masked_mean(w, x, mask):
        return (jnp.sum((x @ w) ** 2, -1) * mask).sum() / mask.sum()

    step = jm.jit_step(jm.value_and_grad(masked_mean), jm.StepPolicy(microbatches=2))
    mask = (jnp.arange(512) % 3 > 0).astype(jnp.float32)  # as many in each half, which later batches need not have
    with pytest.raises(jm.PolicyError, match=r"would change the numbers of masked_mean"):
        step(jnp.eye(64), jnp.linspace(0.0, 1.0, 512 * 64).reshape(512, 64), mask)
