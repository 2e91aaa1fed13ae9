"""A step that returns gradients donates no parameters and is not asked to; one that returns them updated still does."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.flatten_util import ravel_pytree

import jaxmem_callbacks as jm
from tests.pasting import pasted, value

pytestmark = pytest.mark.core

X = jnp.linspace(0.1, 1.0, 128).reshape(4, 32)


def weights() -> dict[str, Any]:
    return {"w": [jnp.full((32, 32), 0.01 * i) for i in range(1, 6)], "b": jnp.full(32, 0.2)}


def loss(params: Any, x: Any) -> Any:
    for w in params["w"]:
        x = jnp.tanh(x @ w + params["b"])
    return jnp.mean(x**2)


def penalised(params: Any, x: Any) -> Any:
    return loss(params, x) + 0.9 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))


def close(ours: Any, expected: Any) -> None:
    ours, expected = (jax.tree.leaves(eqx.filter(each, eqx.is_array_like)) for each in (ours, expected))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), ours, expected)


def held_twice(memory: jm.StepMemory) -> list[str]:
    return [each for each in memory.warnings if "held twice" in each]


# what returns gradients


def clipped(params: Any, x: Any) -> Any:
    gradients = jax.grad(loss)(params, x)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
    return jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), gradients), norm


def decayed(params: Any, x: Any) -> Any:
    return jax.tree.map(lambda g, p: g + 1e-2 * p, jax.grad(loss)(params, x), params)


def accumulated(params: Any, x: Any) -> Any:
    def body(total: Any, row: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, row[None])), None

    return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), x)[0]


def of_one_array(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(w)


def updates_of_adamw(params: Any, x: Any) -> Any:
    tx = optax.adamw(1e-3)
    return tx.update(jax.grad(loss)(params, x), tx.init(params), params)[0]


def product_with_hessian(params: Any, direction: Any, x: Any) -> Any:
    return jax.jvp(jax.grad(functools.partial(loss, x=x)), (params,), (direction,))[1]


class Model:
    def gradients(self, params: Any, x: Any) -> Any:
        return jax.value_and_grad(loss)(params, x)


GRADIENTS = {
    "grad": (jax.grad(loss), lambda: (weights(), X)),
    "value_and_grad": (jax.value_and_grad(loss), lambda: (weights(), X)),
    "with a penalty": (jax.grad(penalised), lambda: (weights(), X)),
    "a method": (Model().gradients, lambda: (weights(), X)),
    "clipped": (clipped, lambda: (weights(), X)),
    "decayed": (decayed, lambda: (weights(), X)),
    "accumulated": (accumulated, lambda: (weights(), X)),
    "one array": (of_one_array, lambda: (jnp.full((32, 32), 0.1), X)),
    "an optimizer's updates": (updates_of_adamw, lambda: (weights(), X)),
    "a Hessian's product": (product_with_hessian, lambda: (weights(), weights(), X)),
    "a partial": (functools.partial(jax.grad(penalised), x=X), lambda: (weights(),)),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_parameters_whose_gradients_are_returned_are_used_again(kind: str) -> None:
    function, given = GRADIENTS[kind]
    assert not held_twice(jm.step_memory(jax.jit(function), *given())), "nobody is asked to donate them"
    step, arguments = jm.jit_step(function), given()
    first = step(*arguments)
    assert step.donated == ()
    close(step(*arguments), first)
    close(first, function(*arguments))


def eqx_model() -> Any:
    return eqx.nn.MLP(32, 32, 16, 1, key=jax.random.key(0))


def eqx_loss(model: Any, x: Any) -> Any:
    return jnp.mean(jax.vmap(model)(x) ** 2)


class Critic(eqx.Module):
    net: Any

    def gradients(self, x: Any) -> Any:
        return eqx.filter_grad(lambda net: eqx_loss(net, x))(self.net)


EQUINOX = {
    "filter_grad": (eqx.filter_jit(eqx.filter_grad(eqx_loss)), lambda: (eqx_model(), X)),
    "filter_value_and_grad": (eqx.filter_jit(eqx.filter_value_and_grad(eqx_loss)), lambda: (eqx_model(), X)),
    "ours": (eqx.filter_jit(jm.eqx.value_and_grad(eqx_loss)), lambda: (eqx_model(), X)),
    "a method": (eqx.filter_jit(Critic.gradients), lambda: (Critic(eqx_model()), X)),
    "a reversed call": (eqx.filter_jit(lambda x, model: eqx.filter_grad(eqx_loss)(model, x)), lambda: (X, eqx_model())),
}


@pytest.mark.parametrize("kind", EQUINOX)
def test_models_whose_gradients_equinox_returns_are_used_again(kind: str) -> None:
    function, given = EQUINOX[kind]
    assert not held_twice(jm.step_memory(function, *given()))
    step, arguments = jm.jit_step(function, "donate"), given()
    close(step(*arguments), step(*arguments))


def nnx_loss(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


@pytest.mark.parametrize("gradient", [nnx.grad, nnx.value_and_grad, jm.nnx.value_and_grad])
def test_models_whose_gradients_nnx_returns_are_used_again(gradient: Any) -> None:
    model = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    assert not held_twice(jm.step_memory(nnx.jit(gradient(nnx_loss)), model, X))
    step = jm.jit_step(gradient(nnx_loss))
    close(jax.tree.leaves(step(model, X)), jax.tree.leaves(step(model, X)))


# what returns parameters updated


def by_hand(params: Any, x: Any) -> Any:
    value, gradients = jax.value_and_grad(penalised)(params, x)
    return jax.tree.map(lambda p, g: p * (1 - 0.1 * 0.01) - 0.1 * g, params, gradients), value


def with_its_gradients(params: Any, x: Any) -> Any:
    gradients = jax.grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - g, params, gradients), gradients


def flat(params: Any, x: Any) -> Any:
    vector, whole = ravel_pytree(params)
    return whole(vector - 0.1 * ravel_pytree(jax.grad(loss)(params, x))[0])


def of_a_rate(params: Any, rate: Any, x: Any) -> Any:
    return jax.tree.map(lambda p, g: p + (-rate) * g, params, jax.grad(loss)(params, x))


def adamw(params: Any, opt: Any, x: Any) -> Any:
    updates, opt = optax.adamw(1e-3).update(jax.grad(loss)(params, x), opt, params)
    return optax.apply_updates(params, updates), opt


def summed_up(params: Any, total: Any, x: Any) -> Any:
    return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x))


def orthogonalised(params: Any, opt: Any, x: Any) -> Any:
    updates, opt = optax.contrib.muon(1e-3).update(jax.grad(loss)(params, x), opt, params)
    return optax.apply_updates(params, updates), opt


def of_a_train_state(state: Any, x: Any) -> Any:
    return state.apply_gradients(grads=jax.grad(loss)(state.params, x))


UPDATES = {
    "by hand": (by_hand, lambda: (weights(), X), ("params",)),
    "with its gradients": (with_its_gradients, lambda: (weights(), X), ("params",)),
    "as one vector": (flat, lambda: (weights(), X), ("params",)),
    "by a rate": (of_a_rate, lambda: (weights(), jnp.float32(0.1), X), ("params",)),
    "adamw": (adamw, lambda: (weights(), optax.adamw(1e-3).init(weights()), X), ("params", "opt")),
    "a sum of gradients": (summed_up, lambda: (weights(), jax.tree.map(jnp.zeros_like, weights()), X), ("total",)),
    "muon": (orthogonalised, lambda: (weights(), optax.contrib.muon(1e-3).init(weights()), X), ("params", "opt")),
    "a train state": (
        of_a_train_state,
        lambda: (TrainState.create(apply_fn=loss, params=weights(), tx=optax.adam(1e-3)), X),
        ("state",),
    ),
}


@pytest.mark.parametrize("kind", UPDATES)
def test_what_is_returned_updated_is_donated(kind: str) -> None:
    function, given, names = UPDATES[kind]
    step, arguments = jm.jit_step(function), given()
    expected = function(*given())
    with warnings.catch_warnings():
        warnings.simplefilter("error", jm.DonationWarning)
        close(step(*arguments), expected)
    assert step.donated == names


# donation.argnames, donation.argnums


def donated_as(option: str, function: Any, given: Any, before: jm.StepMemory) -> Any:
    """The function jitted with a pasted option, under which nothing is held twice any more."""
    step = jax.jit(function, **value(f"dict({option})"))
    saved = jm.step_memory(step, *given())
    assert not held_twice(saved)
    assert saved.step_bytes < before.step_bytes
    return step


@pytest.mark.parametrize("kind", ["by hand", "adamw", "a sum of gradients", "a train state"])
def test_what_is_held_twice_is_donated_by_the_option(kind: str) -> None:
    function, given, names = UPDATES[kind]
    before = jm.step_memory(jax.jit(function), *given())
    (printed,) = held_twice(before)
    step = donated_as(pasted("donation.argnames", printed.partition(" in the ")[0]), function, given, before)
    arguments = given()
    expected = function(*given())
    close(step(*arguments), expected)
    gone = [
        bool(leaves := jax.tree.leaves(each)) and all(x.is_deleted() for x in leaves if isinstance(x, jax.Array))
        for each in arguments
    ]
    assert gone.count(True) == len(names), "and nothing else"


def of_any(*args: Any) -> Any:
    return by_hand(args[0], args[-1])


def second_of_any(*args: Any) -> Any:
    return by_hand(args[1], args[0])


def two_of_any(*args: Any) -> Any:
    return adamw(*args)


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (of_any, lambda: (weights(), X)),
        (second_of_any, lambda: (X, weights())),
        (two_of_any, UPDATES["adamw"][1]),
    ],
)
def test_what_has_no_name_is_donated_by_position(function: Any, given: Any) -> None:
    before = jm.step_memory(jax.jit(function), *given())
    (printed,) = held_twice(before)
    step = donated_as(pasted("donation.argnums", printed.partition(" in the ")[0]), function, given, before)
    close(step(*given()), function(*given()))


# what is worth a word, and whose file it is


def with_key(params: Any, key: Any, x: Any) -> Any:
    now, key = jax.random.split(key)
    return by_hand(params, x + 0.01 * jax.random.normal(now, x.shape))[0], key


def with_counter(count: Any, params: Any, x: Any) -> Any:
    return {"step": count["step"] + 1}, by_hand(params, x)[0]


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (with_key, lambda: (weights(), jax.random.PRNGKey(0), X)),
        (with_key, lambda: (weights(), jax.random.key(0), X)),
        (with_counter, lambda: ({"step": jnp.int32(0)}, weights(), X)),
    ],
)
def test_a_few_bytes_are_not_worth_a_word(function: Any, given: Any) -> None:
    (told,) = held_twice(jm.step_memory(jax.jit(function), *given()))
    assert told.startswith("params: returned updated")
    assert not held_twice(jm.step_memory(jax.jit(function, donate_argnames="params"), *given()))


@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit, functools.partial(jax.jit, inline=True)])
def test_a_jit_of_a_package_is_no_file_to_edit(jit: Any, tmp_path: Any) -> None:
    file = tmp_path / "site-packages" / "trainer.py"
    scope: dict[str, Any] = {"jax": jax, "loss": loss}
    code = "def fit(params, x):\n    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))\n"
    exec(compile(code, str(file), "exec"), scope)  # noqa: S102 - a package that is installed
    (told,) = held_twice(jm.step_memory(jit(scope["fit"]), weights(), X))
    assert told.endswith(f"fit is jitted in an installed package, {file}: has that an option to donate params?")


def test_a_batch_that_is_donated_is_told_without_an_option_that_the_jit_has_not() -> None:
    for jit in (
        functools.partial(jax.jit, donate_argnums=(0, 1)),
        functools.partial(jax.jit, donate_argnames=("params", "x")),
        functools.partial(jax.jit, donate_argnums=1, inline=True),
    ):
        told = "\n".join(jm.step_memory(jit(by_hand), weights(), X).warnings)
        assert "Leave 'x' out of what is donated." in told
        assert "donate_arg" not in told.replace("donate_argnames=('params'", "").partition("x is donated in vain")[2]


# donation.own_copy: what holds a view of the state, and the same with a copy as printed


def donated_state() -> dict[str, Any]:
    return {"w": jnp.ones((512, 1024)), "b": jnp.ones((1024,))}


def shifted_step(state: Any, x: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + x, state), x.sum()


class Shifts:
    def shifted_method(self, state: Any, x: Any) -> Any:
        return shifted_step(state, x)


VIEWS = {
    "a view": (shifted_step, np.asarray),
    "what the device gave": (functools.partial(shifted_step), jax.device_get),
    "a view of a method's": (Shifts().shifted_method, lambda x: np.frombuffer(memoryview(x), np.float32)),
}


def donation_events(function: Any, view: Any) -> tuple[list[Any], Any]:
    """Donations that a monitor reports as lost in a short training, and the state at its end."""
    state = donated_state()
    step = jm.jit_step(function)
    with jm.MemoryMonitor() as monitor:
        held = view(state["w"])
        for index in range(3):
            state, _ = step(state, jnp.float32(0.1))
            monitor(index)
    assert held[0].sum() in (1024, 1), "what was read is what it was"
    return [event for event in monitor.events if event.kind == "donation_lost"], state


@pytest.mark.parametrize("kind", VIEWS)
def test_what_is_copied_as_printed_is_no_view(kind: str) -> None:
    function, view = VIEWS[kind]
    (event,), held = donation_events(function, view)
    assert "state['w']: the runtime copied it" in event.message
    line = pasted("donation.own_copy", event.action)
    events, copied = donation_events(function, lambda x: value(line, np=np, x=x))
    assert events == []
    close(copied, held)


def other_dtype(state: Any, x: Any) -> Any:
    return {"w": (state["w"] * x).astype(jnp.bfloat16)}, x


def shortened(state: Any, x: Any) -> Any:
    return {"w": state["w"][:256] * x}, x


def dropped(state: Any, x: Any) -> Any:  # noqa: ARG001 - which is what is wrong
    return {"w": jnp.ones((512, 1024)) * x}, x


@pytest.mark.parametrize(
    ("function", "advised"),
    [
        (other_dtype, "Return it as it came: .astype('float32'), or keep the state in bfloat16 from the start."),
        (shortened, "Leave 'state' out of what is donated, or return it updated."),
        (dropped, "Leave it out of what is donated, or delete the argument 'state'."),
    ],
)
def test_a_lost_donation_is_advised_by_its_reason(function: Any, advised: str) -> None:
    with jm.MemoryMonitor() as monitor:
        with pytest.raises(jm.DonationError, match=r"Donation of state to ") as error:
            jm.jit_step(jax.jit(function, donate_argnames="state"))({"w": jnp.ones((512, 1024))}, jnp.float32(1))
        monitor(0)
    (event,) = [event for event in monitor.events if event.kind == "donation_lost"]
    assert event.action == advised
    assert advised in str(error.value)
