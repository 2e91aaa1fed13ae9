"""`StepPolicy(chunks=...)`: the head of a loss and other maps in chunks, the same numbers, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.transforms.costs import jaxpr_flops
from jaxmem_callbacks.transforms.tracing import is_chunked, subjaxprs
from tests.comparisons import assert_close

pytestmark = pytest.mark.core

WORDS, WIDTH = 96, 8


def parameters(dtype: Any = jnp.float32) -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: (jax.random.normal(next(keys), shape) / np.sqrt(shape[0])).astype(dtype)  # noqa: E731
    return {
        "emb": normal(WORDS, WIDTH) * 3,
        "head": normal(WIDTH, WORDS) * 2,
        "w1": normal(WIDTH, 8 * WIDTH),
        "w2": normal(8 * WIDTH, WIDTH),
        "b": normal(8 * WIDTH),
    }


def tokens(rows: int, length: int) -> Any:
    return jax.random.randint(jax.random.key(1), (rows, length), 0, WORDS)


def trunk(p: Any, t: Any) -> Any:
    """Something that is no map along the sequence."""
    x = p["emb"][t]
    return x + jnp.tanh(jnp.cumsum(x, 1) * 0.1)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def tied(p: Any, t: Any) -> Any:
    return cross_entropy((trunk(p, t) @ p["emb"].T)[:, :-1], t[:, 1:]).mean()


def log_softmax(p: Any, t: Any) -> Any:
    logp = jax.nn.log_softmax(trunk(p, t)[:, :-1] @ p["head"])
    return -jnp.take_along_axis(logp, t[:, 1:, None], -1).mean()


def masked(p: Any, t: Any) -> Any:
    weights = (t[:, 1:] % 3 > 0).astype(jnp.float32)
    losses = cross_entropy(trunk(p, t)[:, :-1] @ p["head"], t[:, 1:])
    return (weights * losses).sum() / weights.sum()


def with_z_loss(p: Any, t: Any) -> Any:
    logits = trunk(p, t)[:, :-1] @ p["head"]
    z = jax.nn.logsumexp(logits, -1)
    picked = jnp.take_along_axis(logits, t[:, 1:, None], -1)[..., 0]
    return (z - picked).mean() + 1e-2 * (z**2).mean()


def smoothed(p: Any, t: Any) -> Any:
    logp = jax.nn.log_softmax(trunk(p, t)[:, :-1] @ p["head"])
    return -(optax.smooth_labels(jax.nn.one_hot(t[:, 1:], WORDS), 0.1) * logp).sum(-1).mean()


def one_sum(p: Any, t: Any) -> Any:
    """The sum over words and places in one."""
    logp = jax.nn.log_softmax(trunk(p, t)[:, :-1] @ p["head"])
    return -(jax.nn.one_hot(t[:, 1:], WORDS) * logp).sum() / t.size


def flattened(p: Any, t: Any) -> Any:
    logits = (trunk(p, t) @ p["head"])[:, :-1].reshape(-1, WORDS)
    return cross_entropy(logits, t[:, 1:].reshape(-1)).mean()


def capped(p: Any, t: Any) -> Any:
    logits = jnp.einsum("bsd,vd->bsv", trunk(p, t), p["emb"], preferred_element_type=jnp.float32)
    weights = jnp.arange(t.shape[1]) < t.shape[1] - 1
    return (cross_entropy(30 * jnp.tanh(logits / 30), jnp.roll(t, -1, 1)) * weights).sum() / weights.sum()


def by_row(p: Any, t: Any) -> Any:
    def one(t: Any) -> Any:
        x = p["emb"][t]
        logp = jax.nn.log_softmax((x + jnp.cumsum(x, 0) * 0.1) @ p["head"])
        return -jnp.take_along_axis(logp, t[:, None], -1).mean()

    return jax.vmap(one)(t).mean()


def mlp(p: Any, t: Any) -> Any:
    x = trunk(p, t)
    with jax.named_scope("mlp"):
        x = x + jax.nn.relu(x @ p["w1"] + p["b"]) @ p["w2"]
    return (jnp.cumsum(x, 1) ** 2).mean()


def attention(p: Any, t: Any) -> Any:
    x = trunk(p, t)
    with jax.named_scope("attention"):
        scores = jnp.einsum("bqd,bkd->bqk", x, x)
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        out = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1) @ x
    return (jnp.cumsum(out, 1) ** 2).mean()


def contrastive(p: Any, t: Any) -> Any:
    z = p["emb"][t[0]]
    logits = z @ jnp.tanh(z).T
    return (jax.nn.logsumexp(logits, 1) - (z * jnp.tanh(z)).sum(-1)).mean()


HEADS = [tied, log_softmax, masked, with_z_loss, smoothed, one_sum, flattened, capped, by_row]
PARTS = [(mlp, {"mlp": 5}), (attention, {"attention": 4}), (contrastive, 3)]


def both(loss: Any, p: Any, t: Any, policy: jm.StepPolicy) -> tuple[Any, Any]:
    """Value and gradients under a policy, and without."""

    def step(p: Any, t: Any) -> Any:
        return jm.value_and_grad(loss)(p, t)

    return jax.jit(jm.apply_policy(step, policy))(p, t), jax.jit(step)(p, t)


def loops(function: Any, *args: Any) -> list[Any]:
    """The loops over chunks of a traced function, in order."""

    def inside(eqns: Any) -> Any:
        for eqn in eqns:
            if is_chunked(eqn):
                yield eqn
            for body in subjaxprs(eqn):
                yield from inside(body.eqns)

    return list(inside(jax.make_jaxpr(function)(*args).eqns))


def chunked(loss: Any, policy: jm.StepPolicy) -> Any:
    return jm.apply_policy(jm.value_and_grad(loss), policy)


def largest(function: Any, *args: Any) -> int:
    """Elements of the largest value that a traced function makes, bodies included."""

    def inside(eqns: Any) -> Any:
        for eqn in eqns:
            yield from (var.aval.size for var in eqn.outvars if hasattr(var.aval, "size"))
            for body in subjaxprs(eqn):
                yield from inside(body.eqns)

    return max(inside(jax.make_jaxpr(function)(*args).eqns))


# The same numbers.


@pytest.mark.parametrize("loss", HEADS)
@pytest.mark.parametrize(("rows", "length"), [(1, 32), (3, 17)])
def test_the_head_in_chunks_has_the_same_loss_and_gradients(loss: Any, rows: int, length: int) -> None:
    p, t = parameters(), tokens(rows, length)
    policy = jm.StepPolicy(chunks=5)
    assert_close(*both(loss, p, t, policy))
    assert loops(chunked(loss, policy), p, t)
    assert largest(chunked(loss, policy), p, t) < rows * (length - 1) * WORDS


@pytest.mark.parametrize(("loss", "chunks"), PARTS)
def test_other_parts_in_chunks_have_the_same_loss_and_gradients(loss: Any, chunks: Any) -> None:
    p, t = parameters(), tokens(2, 64)
    policy = jm.StepPolicy(chunks=chunks)
    assert_close(*both(loss, p, t, policy))
    assert largest(chunked(loss, policy), p, t) < largest(jax.value_and_grad(loss), p, t)


def two_parts(p: Any, t: Any) -> Any:
    x = trunk(p, t)
    for _ in range(2):
        with jax.named_scope("mlp"):
            x = x + jax.nn.gelu(x @ p["w1"]) @ p["w2"]
        x = x + jnp.cumsum(x, 1) * 0.1
    return cross_entropy(x @ p["head"], t).mean()


def test_several_parts_each_in_its_own_number() -> None:
    p, t = parameters(), tokens(2, 40)
    policy = jm.StepPolicy(chunks={"head": 4, "mlp": 3})
    assert_close(*both(two_parts, p, t, policy))
    found = loops(jm.remat(two_parts, "none"), p, t), loops(chunked(two_parts, policy), p, t)
    assert next(len(each) for each in found) == 0
    assert sorted({eqn.params["length"] for eqn in found[1]}) == [3, 4]
    assert sum(eqn.params["length"] == 3 for eqn in found[1]) == 2  # on the way back; the way there has no checkpoint


@pytest.mark.parametrize("remat", [{}, {"segments": 9}, {"keep": 0.5}, {"levels": 2}])
def test_chunks_go_with_remat(remat: Any) -> None:
    p, t = parameters(), tokens(2, 40)
    policy = jm.StepPolicy(remat="full", chunks={"head": 4, "mlp": 3}, **remat)
    assert_close(*both(two_parts, p, t, policy))
    assert {eqn.params["length"] for eqn in loops(chunked(two_parts, policy), p, t)} == {3, 4}


def test_chunks_of_each_microbatch() -> None:
    p, t = parameters(), tokens(4, 33)

    def loss(p: Any, batch: Any) -> Any:
        losses = cross_entropy(trunk(p, batch)[:, :-1] @ p["head"], batch[:, 1:])
        return jm.weighted(losses.sum(), losses.size)

    policy = jm.StepPolicy(microbatches=2, chunks=4)
    assert_close(*both(loss, p, t, policy))
    assert {eqn.params["length"] for eqn in loops(chunked(loss, policy), p, t)} == {4}


def test_chunks_in_loops_over_layers_and_beside_their_own_checkpoints() -> None:
    p, t = parameters(), tokens(2, 40)

    def loss(p: Any, t: Any) -> Any:
        def layer(x: Any, scale: Any) -> Any:
            with jax.named_scope("mlp"):
                x = x + jax.nn.gelu(x @ p["w1"] * scale) @ p["w2"]
            return x + jnp.cumsum(x, 1) * 0.1, None

        x, _ = jax.lax.scan(jax.checkpoint(layer), trunk(p, t), jnp.array([1.0, 0.5, 0.25]))
        return cross_entropy(x @ p["head"], t).mean()

    for more in ({}, {"remat": "full", "own_checkpoints": "replace"}):
        policy = jm.StepPolicy(chunks={"mlp": 3, "head": 4}, **more)
        assert_close(*both(loss, p, t, policy))
        assert {eqn.params["length"] for eqn in loops(chunked(loss, policy), p, t)} == {3, 4}


def samples(p: Any, xs: Any, key: Any) -> Any:
    """A `vmap` over samples, each with a loop and draws of its own."""

    def one(x: Any, key: Any) -> Any:
        def step(state: Any, key: Any) -> Any:
            return jnp.tanh(state @ p["w1"] @ p["w2"]) + 0.1 * jax.random.normal(key, state.shape), state.sum()

        end, sums = jax.lax.scan(step, x, jax.random.split(key, 3))
        return (end**2).sum() + sums.sum()

    return jax.vmap(one)(xs, jax.random.split(key, len(xs))).mean()


def test_a_vmap_in_chunks_has_the_same_random_draws() -> None:
    p, key = parameters(), jax.random.key(3)
    xs = jax.random.normal(jax.random.key(4), (12, WIDTH))
    policy = jm.StepPolicy(chunks={"vmap": 4})

    def step(p: Any, *args: Any) -> Any:
        return jm.value_and_grad(samples)(p, *args)

    assert_close(jax.jit(jm.apply_policy(step, policy))(p, xs, key), jax.jit(step)(p, xs, key))
    assert {eqn.params["length"] for eqn in loops(jm.apply_policy(step, policy), p, xs, key)} == {4}


def test_dropout_of_one_key_has_the_same_draws() -> None:
    p, t = parameters(), tokens(2, 40)

    def loss(p: Any, t: Any, key: Any) -> Any:
        x = trunk(p, t)
        with jax.named_scope("mlp"):
            hidden = jax.nn.relu(x @ p["w1"])
            x = x + (hidden * jax.random.bernoulli(key, 0.5, hidden.shape)) @ p["w2"]
        return (jnp.cumsum(x, 1) ** 2).mean()

    def step(p: Any, *args: Any) -> Any:
        return jm.value_and_grad(loss)(p, *args)

    policy, key = jm.StepPolicy(chunks={"mlp": 4}), jax.random.key(5)
    assert_close(jax.jit(jm.apply_policy(step, policy))(p, t, key), jax.jit(step)(p, t, key))
    assert loops(jm.apply_policy(step, policy), p, t, key)


def test_second_derivatives_pass_through() -> None:
    p, t = parameters(), tokens(1, 16)
    plain = jax.grad(lambda s: tied({**p, "emb": s * p["emb"]}, t))
    cheaper = jm.apply_policy(jm.grad(lambda s: tied({**p, "emb": s * p["emb"]}, t)), jm.StepPolicy(chunks=4))
    for derive in (jax.jacfwd, jax.jacrev):
        np.testing.assert_allclose(derive(cheaper)(1.0), derive(plain)(1.0), rtol=1e-5)


def test_a_jitted_step_trains_the_same() -> None:
    p, t = parameters(), tokens(2, 33)

    def step(p: Any, t: Any) -> Any:
        value, gradients = jm.value_and_grad(log_softmax)(p, t)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradients), value

    ours, plain = jm.jit_step(step, jm.StepPolicy(chunks=8, donate=())), jax.jit(step)
    one = other = p
    for _ in range(3):
        (one, value), (other, expected) = ours(one, t), plain(other, t)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert_close(one, other)


def test_gradients_of_jax_obey_too() -> None:
    p, t = parameters(), tokens(2, 33)
    step = jm.apply_policy(jax.value_and_grad(log_softmax), jm.StepPolicy(chunks=8), gradients="all")
    assert_close(jax.jit(step)(p, t), jax.value_and_grad(log_softmax)(p, t))
    assert loops(step, p, t)


# Exactness.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_add_up_no_less_exactly_than_as_written(dtype: str) -> None:
    """bfloat16 products of parameters in float32 and in bfloat16, against the same in float32."""
    p, t = parameters(jnp.dtype(dtype)), tokens(1, 1025)
    narrow = lambda a: a.astype(jnp.bfloat16)  # noqa: E731

    def loss(p: Any, t: Any) -> Any:
        logits = (narrow(trunk(p, t)) @ narrow(p["head"])).astype(jnp.float32)[:, :-1]
        return cross_entropy(logits, t[:, 1:]).mean()

    def exact(p: Any, t: Any) -> Any:
        rounded = lambda a: a + jax.lax.stop_gradient(narrow(a).astype(jnp.float32) - a)  # noqa: E731
        x = trunk(p, t).astype(jnp.float32)
        return cross_entropy((rounded(x) @ rounded(p["head"].astype(jnp.float32)))[:, :-1], t[:, 1:]).mean()

    wanted = np.float64(jax.jit(jax.grad(exact))(p, t)["head"])
    ours, plain = (np.float64(each[1]["head"]) for each in both(loss, p, t, jm.StepPolicy(chunks=256)))
    error = [np.linalg.norm(each - wanted) / np.linalg.norm(wanted) for each in (ours, plain)]
    # Each chunk's own product is rounded to bfloat16, as the one product is; added up in it 256 of them are 40 times worse.
    assert error[0] <= (1.25 if dtype == "bfloat16" else 1.0) * error[1]


def test_the_head_is_computed_once_more_and_nothing_else() -> None:
    p, t = parameters(), tokens(1, 33)
    ours, plain = (
        jaxpr_flops(jax.make_jaxpr(each)(p, t))
        for each in (chunked(masked, jm.StepPolicy(chunks=4)), jax.value_and_grad(masked))
    )
    head = jaxpr_flops(jax.make_jaxpr(lambda p, t: cross_entropy(trunk(p, t)[:, :-1] @ p["head"], t[:, 1:]))(p, t))
    assert plain < ours <= 1.01 * (plain + head)


# What is refused.


def test_what_is_no_map_is_refused_with_what_was_found_and_what_to_type() -> None:
    p, t = parameters(), tokens(1, 32)

    def loss(p: Any, t: Any) -> Any:
        return jax.nn.softmax(trunk(p, t) @ p["head"], (0, 1, 2)).max()

    with pytest.raises(PolicyError) as caught:
        both(loss, p, t, jm.StepPolicy(chunks=4))
    text = str(caught.value)
    assert "chunks=4: the head of this loss is no map along a dimension of its large values" in text
    assert "along dimension 1 of float32[1,32,96] (test_loss_chunks.py:" in text
    assert "`reduce_max`" in text
    assert "type chunks" not in text


def test_too_few_positions_are_refused_with_the_most() -> None:
    p, t = parameters(), tokens(1, 9)
    with pytest.raises(PolicyError, match=r"has 8 positions. Expected at most as many chunks: type chunks=8\."):
        both(log_softmax, p, t, jm.StepPolicy(chunks=100))


def test_a_later_stretch_of_a_scope_with_fewer_positions_is_refused() -> None:
    """The number holds for each stretch of a scope: both of these do with 16, and only the first with 32."""

    def loss(p: Any, t: Any) -> Any:
        total = jnp.float32(0)
        for rows in (32, 16):
            with jax.named_scope("wide"):
                total += jnp.sum(jax.nn.softmax(t[:rows] @ p) ** 2)
        return total

    p, t = jnp.ones((16, 256)), jnp.ones((32, 16))
    with pytest.raises(PolicyError, match=r"has 16 positions. Expected at most .*: type chunks=\{'wide': 16\}\."):
        both(loss, p, t, jm.StepPolicy(chunks={"wide": 32}))


def test_a_part_that_is_not_there_is_refused() -> None:
    p, t = parameters(), tokens(1, 9)
    with pytest.raises(PolicyError, match=r"chunks=\{'mpl': 2\}: what this loss computes in 'mpl' is no map"):
        both(mlp, p, t, jm.StepPolicy(chunks={"mpl": 2}))


def test_logits_that_the_loss_returns_are_refused() -> None:
    p, t = parameters(), tokens(1, 32)

    def loss(p: Any, t: Any) -> Any:
        logits = trunk(p, t) @ p["head"]
        return cross_entropy(logits, t).mean(), logits

    def step(p: Any, t: Any) -> Any:
        return jm.value_and_grad(loss, has_aux=True)(p, t)

    with pytest.raises(PolicyError, match=r"float32\[1,32,96\] is a result of the loss itself"):
        jm.apply_policy(step, jm.StepPolicy(chunks=4))(p, t)


@pytest.mark.parametrize("chunks", [0, -1, 1.5, True, "4", {}, {"head": 0}, {"": 2}, {3: 2}, [("head",)]])
def test_what_is_no_number_of_chunks_is_refused_at_once(chunks: Any) -> None:
    with pytest.raises(
        PolicyError, match="expected a whole number of at least 1 for the head of the loss, or numbers by scope"
    ):
        jm.StepPolicy(chunks=chunks)


def test_spellings_of_chunks() -> None:
    assert jm.StepPolicy(chunks={"head": 4}) == jm.StepPolicy(chunks=4)
    assert jm.StepPolicy(chunks={"/mlp/": 4}).chunks == (("mlp", 4),)
    assert jm.StepPolicy(chunks={"mlp": 1}).chunked == ()
    assert not jm.StepPolicy(chunks=1).changes_gradients
    assert jm.StepPolicy(chunks=2).changes_gradients


def test_a_step_without_gradients_of_the_library_is_refused() -> None:
    p, t = parameters(), tokens(1, 9)
    with pytest.raises(PolicyError, match="The policy chunks=4 would do nothing"):
        jm.apply_policy(jax.value_and_grad(mlp), jm.StepPolicy(chunks=4))(p, t)


# Devices.


def in_loops(text: str) -> list[str]:
    """Collectives in the bodies of a compiled program's loops."""
    computations = re.split(r"\n(?=%?\S+ \(.*\{|ENTRY)", text)
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    inside = [each for each in computations if (match := re.match(r"%?([\w.\-]+)", each)) and match.group(1) in bodies]
    return re.findall(r"all-(?:reduce|gather)|reduce-scatter|all-to-all|collective-permute", "\n".join(inside))


def test_in_a_shard_map_each_device_has_chunks_of_its_own_without_collectives() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    p, t = parameters(), tokens(4, 33)

    def local(p: Any, t: Any) -> Any:
        losses = cross_entropy(trunk(p, t)[:, :-1] @ p["head"], t[:, 1:])
        return jax.lax.psum(losses.sum(), "data") / (4 * 32)

    loss = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    policy = jm.StepPolicy(chunks=4)
    assert_close(*both(loss, p, t, policy))
    assert {eqn.params["length"] for eqn in loops(chunked(loss, policy), p, t)} == {4}
    placed = jax.device_put((p, t), (NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))))
    assert in_loops(jax.jit(chunked(loss, policy)).lower(*placed).compile().as_text()) == []


def test_arrays_that_jax_divides_by_itself_have_the_same_gradients() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    p, t = parameters(), tokens(4, 33)
    placed = jax.device_put((p, t), (NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))))
    ours = jax.jit(chunked(masked, jm.StepPolicy(chunks=4)))(*placed)
    assert_close(jax.device_get(ours), jax.device_get(jax.jit(jax.value_and_grad(masked))(p, t)))


def test_a_collective_stays_outside_the_chunks() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    p, t = parameters(), tokens(4, 33)

    def local(p: Any, t: Any) -> Any:
        return cross_entropy(jax.lax.psum(trunk(p, t) @ p["head"], "data"), t).mean()[None]

    def loss(p: Any, t: Any) -> Any:
        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)(
            p, t
        ).mean()

    policy = jm.StepPolicy(chunks=4)
    assert_close(*both(loss, p, t, policy))
    assert in_loops(jax.jit(chunked(loss, policy)).lower(p, t).compile().as_text()) == []


def test_a_shard_map_that_tracks_what_varies_is_refused() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    p, t = parameters(), tokens(4, 33)

    def local(p: Any, t: Any) -> Any:
        return jax.lax.pmean(masked(p, t), "data")

    loss = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(
        PolicyError, match="inside a `shard_map` with check_vma=True, in which nothing can be traced again"
    ):
        both(loss, p, t, jm.StepPolicy(chunks=4))
