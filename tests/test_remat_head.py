"""What waits for the loss's head: a part of the last layer, with what is dear, while the logits are differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.transforms.costs import equation_flops, jaxpr_flops
from jaxmem_callbacks.transforms.loss_profile import CheapValues
from jaxmem_callbacks.transforms.segments import Segment
from jaxmem_callbacks.transforms.tracing import flatten, open_jaxpr
from tests.comparisons import CHECKPOINTS, assert_close, checkpoints, stored_bytes

pytestmark = pytest.mark.core

LAYERS, ROWS, WIDTH, WORDS = 4, 512, 32, 2048


def normed(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def body(layers: Sequence[Any], x: Any) -> Any:
    for up, down in layers:
        x = x + jax.nn.gelu(normed(x) @ up) @ down
    return normed(x)


def loss_of(logits: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def words(weights: Any, x: Any, labels: Any) -> Any:
    """A logit for each word at each place: more than a layer's gradients."""
    return loss_of(body(weights["layers"], x) @ weights["words"], labels % WORDS)


def arguments() -> tuple[Any, Any, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 2 * LAYERS + 2))

    def normal(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    layers = [(normal(WIDTH, 4 * WIDTH), normal(4 * WIDTH, WIDTH)) for _ in range(LAYERS)]
    weights = {"layers": layers, "words": normal(WIDTH, WORDS)}
    return weights, normal(ROWS, WIDTH), jnp.arange(ROWS)


def equations(loss: Callable[..., Any], arrays: Sequence[Any] = ()) -> list[Any]:
    return list(open_jaxpr(jax.make_jaxpr(loss)(*(arrays or arguments()))).eqns)


@functools.cache
def of_the_plain_loss() -> Any:
    return jax.jit(jax.value_and_grad(words))(*arguments())


def outside(loss: Callable[..., Any], arrays: Sequence[Any] = ()) -> list[str]:
    """What is in no checkpoint behind the last one."""
    names = [eqn.primitive.name for eqn in equations(loss, arrays)]
    last = max(place for place, name in enumerate(names) if name in CHECKPOINTS)
    return names[last + 1 :]


def test_what_waits_for_the_logits_is_computed_again() -> None:
    assert "rsqrt" not in outside(jm.remat(words))
    assert outside(jm.remat(words)).count("dot_general") == 1
    # At the head there is nothing of the last layer but what the cuts hand on.
    weights, x, labels = arguments()
    head = stored_bytes(lambda w, h: loss_of(h @ w, labels), weights["words"], jnp.zeros((ROWS, WIDTH)))
    cuts = [eqn for eqn in equations(jm.remat(words)) if eqn.primitive.name in CHECKPOINTS]
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(weights["layers"])) + len(cuts) * x.nbytes
    assert stored_bytes(jm.remat(words), weights, x, labels) <= head + arrays


DEEP = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 8, jax.ShapeDtypeStruct((128, 256), jnp.float32)


def layers_of(weights: Any, x: Any) -> Any:
    """Layers that are wide enough for elementwise work to be little."""
    for w in weights:
        x = x + jnp.tanh(jnp.sin(x @ w)) @ w.T
    return x


def deep(weights: Any, x: Any) -> Any:
    return jax.nn.logsumexp(layers_of(weights, x) @ weights[0].repeat(8, axis=1), -1).mean()


def classes(weights: Any, x: Any) -> Any:
    """A few logits for each row: less than a layer's gradients."""
    return jax.nn.logsumexp(layers_of(weights, x) @ weights[0][:, :4], -1).mean()


def test_no_product_of_what_waits_is_done_again() -> None:
    cheaper = jm.remat(deep, segments=2, keep=1.0)
    *_, waits = checkpoints(cheaper, *DEEP)
    names = [eqn.primitive.name for eqn in open_jaxpr(waits.params["jaxpr"]).eqns]
    assert names.count("dot_general") > 1
    ours, plain = (jaxpr_flops(jax.make_jaxpr(jax.grad(loss))(*DEEP)) for loss in (cheaper, deep))
    assert plain < ours < 1.005 * plain


def test_what_offloads_by_kind_is_combined_with_nothing_that_is_kept() -> None:
    for more, words_ in (({"keep": 0.5}, r"keep=0\.5"), ({"save": ("hidden",)}, r"save=\('hidden',\)")):
        loss = jm.remat(lambda w, x, y: words(w, checkpoint_name(x + 1, "hidden"), y), "offload_dots", **more)
        with pytest.raises(PolicyError, match=rf"offload_dot_with_no_batch_dims' with {words_}: .* use remat='full'"):
            jax.make_jaxpr(jax.grad(loss))(*arguments())


def test_what_the_head_itself_takes_cannot_wait_on_the_host() -> None:
    def named(weights: Any, x: Any, labels: Any) -> Any:
        return loss_of(checkpoint_name(body(weights["layers"], x), "last") @ weights["words"], labels)

    with pytest.raises(PolicyError, match=r"'last' is where nothing is cut .* or at a cut"):
        jax.make_jaxpr(jm.remat(named, offload=("last",)))(*arguments())


def test_the_rest_of_the_last_layer_stays_outside_where_the_head_is_small() -> None:
    assert "tanh" in outside(jm.remat(classes, segments=2), DEEP)
    assert "tanh" not in outside(jm.remat(deep, segments=2), DEEP)


def test_the_rest_of_the_last_layer_stays_outside_with_two_levels() -> None:
    assert "rsqrt" in outside(jm.remat(words, levels=2))


@pytest.mark.parametrize("policy", [{}, {"keep": 0.5}, {"policy": "dots"}, {"policy": "offload_dots"}])
def test_the_numbers_stay(policy: dict[str, Any]) -> None:
    assert_close(jax.jit(jax.value_and_grad(jm.remat(words, **policy)))(*arguments()), of_the_plain_loss())


def test_a_report_in_it_comes_once(capfd: pytest.CaptureFixture[str]) -> None:
    def reporting(weights: Any, x: Any, labels: Any) -> Any:
        features = body(weights["layers"], x)
        jax.debug.print("mean {}", features.mean())
        return loss_of(features @ weights["words"], labels)

    jax.block_until_ready(jax.jit(jax.grad(jm.remat(reporting)))(*arguments()))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("mean") == 1


WIDE = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 512), (512, 2048), (2048, 512))]


def waiting(layer: Callable[..., Any]) -> list[str] | None:
    """What makes the values that a layer, one of a dozen, keeps while it waits."""
    flat = flatten(jax.make_jaxpr(layer)(*WIDE))
    segment = Segment(flat.eqns, CheapValues({}, {}), frozenset(flat.outvars))
    kept = segment.dear_values(flat.invars, 12 * sum(map(equation_flops, flat.eqns)))
    return None if kept is None else [eqn.primitive.name for eqn in flat.eqns if kept.intersection(eqn.outvars)]


def test_products_are_kept_and_elementwise_results_are_not() -> None:
    assert waiting(lambda x, up, down: jax.nn.gelu(x @ up) @ down) == ["dot_general", "dot_general"]


@jax.custom_vjp
def opaque(x: Any, up: Any, down: Any) -> Any:
    return jnp.tanh(x @ up) @ down


opaque.defvjp(lambda *args: jax.vjp(opaque.fun, *args), lambda pull, cotangent: pull(cotangent))


@pytest.mark.parametrize(
    "layer",
    [
        lambda x, up, down: (x @ up) @ down,
        lambda x, up, _: jnp.tanh(x @ up).reshape(-1),  # the head takes the one value that JAX would keep
        lambda x, up, down: jax.nn.gelu(opaque(x, up, down)),  # its products would be done again
    ],
    ids=["nothing elementwise", "a view", "a custom rule"],
)
def test_where_it_gains_nothing_there_is_no_checkpoint(layer: Callable[..., Any]) -> None:
    assert waiting(layer) is None
