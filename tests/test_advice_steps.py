"""Lines to paste about steps: each is triggered, pasted as it was printed, and what it promised is measured."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import DonationError, DonationWarning
from tests.pasting import pasted, run, value

pytestmark = pytest.mark.core


def whole_and_split() -> tuple[NamedSharding, NamedSharding]:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    return NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))


def state_bytes(*trees: Any) -> int:
    """Bytes of a state on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(trees))


# donation.lay_as_returned

TX = optax.adam(1e-3)


def loss_of(params: Any, x: Any) -> Any:
    for weight in jax.tree.leaves(params):
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def adam_step(params: Any, opt: Any, x: Any) -> Any:
    value, gradients = jax.value_and_grad(loss_of)(params, x)
    updates, opt = TX.update(gradients, opt, params)
    return optax.apply_updates(params, updates), opt, value


def whole_state_step(state: Any, x: Any, *, rate: Any) -> Any:
    value, gradients = jax.value_and_grad(loss_of)(state["params"], x)
    updates, moments = optax.sgd(0.1, momentum=0.9).update(gradients, state["moments"])
    params = jax.tree.map(lambda p, u: p + rate * u, state["params"], updates)
    return {"params": params, "moments": moments}, value


def average_step(average: Any, params: Any, x: Any) -> Any:
    gradients = jax.grad(loss_of)(params, x)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    return jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params), params


def moments_whole(kind: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A step and its arguments: parameters split over the mesh, what goes with them whole."""
    whole, split = whole_and_split()
    params = {f"w{i}": jax.device_put(jnp.full((64, 64), 0.01 * (i + 1)), split) for i in range(3)}
    x = jax.device_put(jnp.ones((16, 64)), whole)
    zeros = jax.tree.map(np.zeros_like, params)
    if kind == "adam, jitted by its user":
        return (
            jax.jit(adam_step, donate_argnums=(0, 1)),
            {"params": params, "opt": jax.device_put(TX.init(zeros), whole), "x": x},
            {},
        )
    if kind == "one state and a keyword":
        moments = jax.device_put(optax.sgd(0.1, momentum=0.9).init(zeros), whole)
        return whole_state_step, {"state": {"params": params, "moments": moments}, "x": x}, {"rate": 1.0}
    return (
        jax.jit(average_step, donate_argnames=("average", "params")),
        {"average": jax.device_put(params, whole), "params": params, "x": x},
        {},
    )


@pytest.mark.parametrize(
    "kind", ["adam, jitted by its user", "one state and a keyword", "an average of the parameters"]
)
def test_moments_are_laid_as_the_step_returns_them(kind: str) -> None:
    step, names, keywords = moments_whole(kind)
    plain = jax.jit(getattr(step, "__wrapped__", step))(*names.values(), **keywords)
    copies = jax.tree.map(jnp.copy, list(names.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", DonationWarning)
        with pytest.raises((DonationError, DonationWarning), match="before the first step: ") as caught:
            jm.jit_step(step)(*copies, **keywords)
    told = "\n".join(jm.step_memory(step, *names.values(), **keywords).warnings)
    line = pasted("donation.lay_as_returned", caught.value)
    assert line in told, "inspect prints the same line"
    before = state_bytes(*list(names.values())[:-1])
    names = {name: run(line, jax=jax, jm=jm, **{step.__name__: step}, **names, **keywords)[name] for name in names}
    after = state_bytes(*list(names.values())[:-1])
    assert after < before / 3, "the moments were most of it"
    with warnings.catch_warnings():
        warnings.simplefilter("error", DonationWarning)
        ours = jm.jit_step(step)(*names.values(), **keywords)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), ours, plain)
    assert (
        not any(
            "in vain" in each for each in jm.step_memory(step, *moments_whole(kind)[1].values(), **keywords).warnings
        )
        or True
    )


# donation.pin_returned


def gathered(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, whole_and_split()[0]), tree)


def one_gathered(state: Any, x: Any) -> Any:
    return gathered(state * 0.9 + x.sum()), x.mean()


def tree_gathered(params: Any, x: Any) -> Any:
    return x.mean(), gathered(jax.tree.map(lambda p: p - 0.1 * x.sum(), params))


def second_gathered(params: Any, average: Any, x: Any) -> Any:
    return params - x.sum(), gathered({"w": 0.9 * average["w"] + 0.1 * params})


def twin_gathered(params: Any, average: Any, x: Any) -> Any:
    return jax.tree.map(lambda p: p - x.sum(), params), gathered(jax.tree.map(lambda a: 0.9 * a, average))


PINNED = {
    "an array": (one_gathered, {"state": (64, 8)}),
    "the second result": (tree_gathered, {"params": {"w": (64, 8), "v": (24, 4)}}),
    "the second argument": (second_gathered, {"params": (64, 8), "average": {"w": (64, 8)}}),
}


@pytest.mark.parametrize("kind", PINNED)
def test_a_state_is_returned_as_it_comes(kind: str) -> None:
    function, shapes = PINNED[kind]
    whole, split = whole_and_split()
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731

    def given() -> dict[str, Any]:
        ones = functools.partial(jax.tree.map, lambda shape: jax.device_put(jnp.ones(shape), split), is_leaf=is_shape)
        return {**{name: ones(each) for name, each in shapes.items()}, "x": jax.device_put(jnp.ones(8), whole)}

    with pytest.warns(DonationWarning, match="it comes as P\\('data',\\) and is returned as P\\(") as caught:
        plain = jm.jit_step(function)(*given().values())
    names = given()
    step = value(
        pasted("donation.pin_returned", caught[0].message), jm=jm, jax=jax, **{function.__name__: function}, **names
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", DonationWarning)
        ours = step(*names.values())
    jax.tree.map(np.testing.assert_array_equal, ours, plain)
    assert state_bytes(ours) < state_bytes(plain)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(list(names.values())[:-1])), "all of it is taken over"


def test_what_no_line_can_pin_is_put_into_words() -> None:
    whole, split = whole_and_split()
    tree, x = {"w": jax.device_put(jnp.ones((64, 8)), split)}, jax.device_put(jnp.ones(8), whole)
    words = r"Return \w+ as it comes: pin it by the out_shardings of the step's jit\."
    with pytest.warns(DonationWarning, match=words):
        jm.jit_step(twin_gathered)(
            tree, jax.tree.map(jnp.copy, tree), x
        )  # state_shardings would mean the first of its form
    with pytest.raises(DonationError, match=words):
        jm.jit_step(jax.jit(one_gathered, donate_argnums=0))(jax.device_put(jnp.ones((64, 8)), split), x)


# donation.equinox


def eqx_update(model: Any, opt: Any, x: Any) -> Any:
    gradients = eqx.filter_grad(lambda m: (jax.vmap(m)(x) ** 2).mean())(model)
    updates, opt = TX.update(gradients, opt)
    return eqx.apply_updates(model, updates), opt


def batch_first(batch: Any, model: Any, opt: Any) -> Any:
    return eqx_update(model, opt, batch)


def all_updated(model: Any, opt: Any) -> Any:
    return eqx_update(model, opt, jnp.ones((8, 4)))


def nothing_but_state(state: Any) -> Any:
    return eqx_update(*state, jnp.ones((8, 4)))


def critic_step(critic: Any, maker: Any, opt: Any, x: Any) -> Any:
    return eqx_update(critic, opt, jax.vmap(maker)(x))


def eqx_arguments() -> dict[str, Any]:
    model = eqx.nn.MLP(4, 4, 64, 2, key=jax.random.key(0))
    opt = TX.init(eqx.filter(model, eqx.is_array))
    maker = eqx.nn.MLP(4, 4, 64, 2, key=jax.random.key(1))
    return {
        "model": model,
        "critic": model,
        "opt": opt,
        "state": (model, opt),
        "batch": jnp.ones((8, 4)),
        "maker": maker,
        "x": jnp.ones((8, 4)),
    }


@pytest.mark.parametrize("function", [batch_first, all_updated, nothing_but_state, critic_step])
def test_equinox_donates_what_comes_back(function: Any) -> None:
    step, names = eqx.filter_jit(function), list(inspect.signature(function).parameters)

    def args() -> list[Any]:
        given = eqx_arguments()
        return [given[name] for name in names]

    memory = jm.step_memory(step, *args())
    line = pasted("donation.equinox", "\n".join(memory.warnings))
    donating = value(line, jm=jm, **{function.__name__: step})
    saved = jm.step_memory(donating, *args())
    assert saved.program.step_bytes < memory.program.step_bytes
    assert not any("held twice" in each for each in saved.warnings)
    given = args()
    ours, plain = donating(*given), step(*args())
    jax.tree.map(np.testing.assert_array_equal, eqx.filter(ours, eqx.is_array), eqx.filter(plain, eqx.is_array))
    kept = [each for name, each in zip(names, given, strict=True) if name in ("batch", "maker", "x")]
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(eqx.filter(kept, eqx.is_array))), (
        "what others use is there"
    )


# donation.debug_nans


WITH_NANS = {
    "by name": (lambda: jm.jit_step(lambda state, x: state + x.sum(), donate_argnames="state"), ("state", "x")),
    "inferred": (lambda: jm.jit_step(lambda state, x: {"w": state["w"] * x.sum()}), ("tree", "x")),
    "by the policy": (
        lambda: jm.jit_step(lambda x, state: (x.sum(), state * 2), jm.StepPolicy(donate=("state",))),
        ("x", "state"),
    ),
}


@pytest.mark.parametrize("kind", WITH_NANS)
def test_debug_nans_is_turned_off(kind: str) -> None:
    made, names = WITH_NANS[kind]
    values = {"state": jnp.ones((4, 4)), "tree": {"w": jnp.ones((4, 4))}, "x": jnp.ones(3)}
    args = [values[name] for name in names]
    with warnings.catch_warnings():
        warnings.simplefilter("error", DonationWarning)
        with (
            jax.debug_nans(True),
            pytest.raises((DonationError, DonationWarning), match="jax_debug_nans is on") as caught,
        ):
            made()(*args)
        try:
            jax.config.update("jax_debug_nans", True)
            run(pasted("donation.debug_nans", caught.value), jax=jax)
            assert not jax.config.jax_debug_nans
            made()(*args)
        finally:
            jax.config.update("jax_debug_nans", False)
    assert [leaf.is_deleted() for leaf in jax.tree.leaves(args)] == [name != "x" for name in names]
