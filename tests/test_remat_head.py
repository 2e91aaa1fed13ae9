"""What waits for the loss's head: a part of the last layer, with what is dear, while the logits are differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks._compat.jaxprs import open_jaxpr
from jaxmem_callbacks.transforms.equations import flatten
from jaxmem_callbacks.transforms.flops import equation_flops, jaxpr_flops
from jaxmem_callbacks.transforms.residuals import Sunk
from jaxmem_callbacks.transforms.segments import Segment
from tests.comparisons import CHECKPOINTS, assert_close, stored_bytes

pytestmark = pytest.mark.core

LAYERS, ROWS, WIDTH, WORDS, CLASSES = 6, 512, 32, 2048, 4


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


def classes(weights: Any, x: Any, labels: Any) -> Any:
    """A few logits for all places together."""
    return loss_of(body(weights["layers"], x).mean(0, keepdims=True) @ weights["classes"], labels[:1] % CLASSES)


def arguments() -> tuple[Any, Any, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 2 * LAYERS + 3))

    def normal(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    layers = [(normal(WIDTH, 4 * WIDTH), normal(4 * WIDTH, WIDTH)) for _ in range(LAYERS)]
    weights = {"layers": layers, "words": normal(WIDTH, WORDS), "classes": normal(WIDTH, CLASSES)}
    return weights, normal(ROWS, WIDTH), jnp.arange(ROWS)


def equations(loss: Callable[..., Any]) -> list[Any]:
    return list(open_jaxpr(jax.make_jaxpr(loss)(*arguments())).eqns)


def outside(loss: Callable[..., Any]) -> list[str]:
    """What is in no checkpoint behind the last one."""
    names = [eqn.primitive.name for eqn in equations(loss)]
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


def test_no_operations_worth_the_name_come_with_it() -> None:
    weights, x, labels = arguments()
    ours, plain = (
        jaxpr_flops(jax.make_jaxpr(jax.grad(loss))(weights, x, labels)) for loss in (jm.remat(words, keep=1.0), words)
    )
    assert plain <= ours <= 1.02 * plain


@pytest.mark.parametrize("loss", [jm.remat(classes), jm.remat(words, levels=2)], ids=["a small head", "two levels"])
def test_the_rest_of_the_last_layer_stays_outside_where_that_holds_no_more(loss: Callable[..., Any]) -> None:
    assert "rsqrt" in outside(loss)


@pytest.mark.parametrize(
    "policy",
    [{}, {"keep": 0.5}, {"policy": "dots"}, {"policy": "offload_dots"}, {"policy": "offload_dots", "keep": 0.5}],
)
def test_the_numbers_stay(policy: dict[str, Any]) -> None:
    cheaper = jm.remat(words, **policy)
    got, wanted = (jax.jit(jax.value_and_grad(loss))(*arguments()) for loss in (cheaper, words))
    assert_close(got, wanted)


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
    segment = Segment(flat.eqns, Sunk({}, {}), frozenset(flat.outvars))
    kept = segment.waiting(flat.invars, 12 * sum(map(equation_flops, flat.eqns)))
    return None if kept is None else [eqn.primitive.name for eqn in flat.eqns if kept.intersection(eqn.outvars)]


def test_products_are_kept_and_elementwise_results_are_not() -> None:
    assert waiting(lambda x, up, down: jax.nn.gelu(x @ up) @ down) == ["dot_general", "dot_general"]


def test_where_jax_keeps_no_more_there_is_no_checkpoint() -> None:
    assert waiting(lambda x, up, down: (x @ up) @ down) is None
