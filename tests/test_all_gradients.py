"""`gradients="all"`: gradients that an installed package takes obey the policy, however it imported JAX's functions.

Nothing else obeys, and nothing is left behind.
"""

from __future__ import annotations

import functools
import gc
import importlib
import sys
import threading
import time
import timeit
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem_callbacks as jm
from jaxmem_callbacks._compat import gradient_calls
from jaxmem_callbacks.cli.train_lines import lines_to_train
from jaxmem_callbacks.transforms import policy as policies
from jaxmem_callbacks.transforms.gradients import applied
from jaxmem_callbacks.transforms.policy import ActivePolicy
from tests.comparisons import assert_close, checkpoints
from tests.nnx_models import Net, arrays, data
from tests.nnx_models import loss_fn as nnx_loss
from tests.pasting import pasted, value

pytestmark = pytest.mark.core

FULL = jm.StepPolicy(remat="full")
WEIGHTS = {f"w{i}": jax.random.normal(jax.random.key(i), (16, 16)) * 0.3 for i in range(4)}
X = jax.random.normal(jax.random.key(9), (8, 16))
JAX_OWN = {name: getattr(jax, name) for name in ("value_and_grad", "grad", "vjp")}
WHERE_JAX_LOOKS = JAX_OWN["value_and_grad"].__wrapped__.__globals__

# A package as people install it: each module came by JAX's functions in another way.
PACKAGE = {
    "losses": """
import jax.numpy as jnp

def loss(weights, x):
    for name in sorted(weights):
        x = jnp.tanh(x @ weights[name])
    return jnp.mean(x ** 2)

def loss_and_sum(weights, x):
    return loss(weights, x), {"sum": x.sum()}
""",
    "by_name": """
from jax import value_and_grad
from .losses import loss

def step(weights, x):
    return value_and_grad(loss)(weights, x)
""",
    "by_attribute": """
import jax
from .losses import loss

def step(weights, x):
    return jax.value_and_grad(lambda weights: loss(weights, x))(weights)
""",
    "renamed": """
from jax import grad as differentiate
from .losses import loss_and_sum

def step(weights, x):
    gradients, aux = differentiate(loss_and_sum, has_aux=True)(weights, x)
    return aux["sum"], gradients
""",
    "by_partial": """
import functools, jax
from .losses import loss_and_sum

_with_aux = functools.partial(jax.value_and_grad, has_aux=True)

def step(weights, x):
    (value, aux), gradients = _with_aux(loss_and_sum)(weights, x)
    return value + 0 * aux["sum"], gradients
""",
    "made_before": """
import jax
from .losses import loss

GRADIENT = jax.value_and_grad(loss, argnums=(0,))

def step(weights, x):
    value, (gradients,) = GRADIENT(weights, x)
    return value, gradients
""",
    "decorated": """
import functools, jax
from .losses import loss

@functools.partial(jax.value_and_grad, argnums=-2)
def both(weights, x):
    return loss(weights, x)

def step(weights, x):
    return both(weights, x)
""",
    "in_a_class": """
import jax
from .losses import loss

class Trainer:
    transform = staticmethod(jax.value_and_grad)

    def __init__(self):
        self.both = self.transform(self.loss)

    def loss(self, weights, *, x):
        return loss(weights, x)

    def step(self, weights, x):
        return self.both(weights, x=x)

step = Trainer().step
""",
    "by_default_argument": """
import jax
from .losses import loss

def step(weights, x, transform=jax.value_and_grad):
    return transform(loss)(weights, x)
""",
    "jitted_inside": """
import jax
from .losses import loss

@jax.jit
def update(weights, x):
    return jax.value_and_grad(loss)(weights, x)

def step(weights, x):
    return update(weights, x)
""",
    "in_a_loop": """
import jax
from jax import lax
from .losses import loss

def step(weights, x):
    def body(weights, rows):
        value, gradients = jax.value_and_grad(loss)(weights, rows)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value
    weights, values = lax.scan(body, weights, x.reshape(2, 4, -1))
    return lax.cond(values[0] > 0, jax.value_and_grad(loss), lambda w, x: (values[0], w), weights, x)
""",
}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Module of the package -> its step."""
    room = tmp_path_factory.mktemp("env") / "site-packages"
    folder = room / "trains_for_you"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    for name, text in PACKAGE.items():
        (folder / f"{name}.py").write_text(text)
    sys.path.insert(0, str(room))
    try:
        yield {name: importlib.import_module(f"trains_for_you.{name}").step for name in PACKAGE if name != "losses"}
    finally:
        sys.path.remove(str(room))
        for name in [name for name in sys.modules if name.partition(".")[0] == "trains_for_you"]:
            del sys.modules[name]


@pytest.fixture(autouse=True)
def jax_is_left_as_it_was():
    yield
    assert {name: getattr(jax, name) for name in JAX_OWN} == JAX_OWN
    assert WHERE_JAX_LOOKS["vjp"] is jax.vjp


def ours(step, policy=FULL):
    return jm.apply_policy(step, policy, gradients="all")


@pytest.mark.parametrize("name", [name for name in PACKAGE if name != "losses"])
def test_a_package_that_nobody_edits_obeys(package, name):
    step = package[name]
    assert_close(ours(step)(WEIGHTS, X), step(WEIGHTS, X))
    assert checkpoints(ours(step), WEIGHTS, X)
    assert not checkpoints(step, WEIGHTS, X)
    trained = jm.jit_step(step, FULL, gradients="all", donate_argnames=())
    assert_close(trained(WEIGHTS, X), jax.jit(step)(WEIGHTS, X))
    assert (trained.gradients, trained.notes) == ("all", ())
    assert repr(trained).endswith(", gradients='all')")


@pytest.mark.parametrize("name", ["by_name", "made_before", "in_a_class"])
def test_microbatches_reach_a_package_too(package, name):
    policy = jm.StepPolicy(remat="full", microbatches=2)
    step = jm.jit_step(package[name], policy, gradients="all", donate_argnames=())
    assert_close(step(WEIGHTS, X), jax.jit(package[name])(WEIGHTS, X))
    assert any(eqn.primitive.name == "scan" for eqn in step.trace(WEIGHTS, X).jaxpr.eqns)


def test_a_step_with_and_one_without_share_no_trace(package):
    """The user's own jit and a jit inside the package are traced once for each policy, in any order."""
    jitted = jax.jit(package["jitted_inside"])

    def cut(step):
        return bool(checkpoints(step, WEIGHTS, X))

    with_all = jm.jit_step(jitted, FULL, gradients="all")
    with_own = jm.jit_step(jitted, FULL)
    for _ in range(2):
        assert not cut(jitted)
        assert cut(functools.partial(jm.apply_policy(jitted, FULL, gradients="all")))
        with pytest.raises(ValueError, match="gradients='all'"):
            with_own(WEIGHTS, X)
        assert_close(with_all(WEIGHTS, X), jitted(WEIGHTS, X))
    assert "remat" in str(with_all.trace(WEIGHTS, X).jaxpr)
    assert "remat" not in str(jitted.trace(WEIGHTS, X).jaxpr)


def test_a_new_signature_of_the_users_own_jit_obeys_too(package):
    """JAX traces it in an ordinary call then."""
    step = jm.jit_step(jax.jit(package["made_before"]), FULL, gradients="all")
    step(WEIGHTS, X)
    longer = jnp.concatenate([X, X])
    assert_close(step(WEIGHTS, longer), package["made_before"](WEIGHTS, longer))
    assert "remat" in str(step.trace(WEIGHTS, longer).jaxpr)


def test_without_a_policy_and_outside_a_step_every_bit_is_jax_own(package):
    step = package["made_before"]
    plain = jax.jit(step)(WEIGHTS, X)
    for same in (jm.jit_step(step, gradients="all", donate_argnames=()), jax.jit(ours(step, jm.StepPolicy()))):
        jax.tree.map(np.testing.assert_array_equal, same(WEIGHTS, X), plain)
    with applied(ActivePolicy(FULL, gradients="all")):
        assert checkpoints(step, WEIGHTS, X)
        with applied(None):
            assert not checkpoints(step, WEIGHTS, X)
        with applied(ActivePolicy(FULL)):
            assert not checkpoints(step, WEIGHTS, X)
        assert checkpoints(step, WEIGHTS, X)
    assert not checkpoints(step, WEIGHTS, X)


def test_other_threads_have_jax_own(package):
    """While a thread traces under the policy, another one's gradients are not touched, and leaving in any order restores JAX."""
    step, inside, done = package["by_name"], threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    def under_policy():
        with applied(ActivePolicy(FULL, gradients="all")):
            inside.set()
            assert done.wait(60)
            found["under"] = len(checkpoints(step, WEIGHTS, X))

    thread = threading.Thread(target=under_policy)
    thread.start()
    assert inside.wait(60)
    assert WHERE_JAX_LOOKS["vjp"] is not JAX_OWN["vjp"]
    found["other"] = len(checkpoints(step, WEIGHTS, X))
    bits = step(WEIGHTS, X)
    with applied(ActivePolicy(FULL, gradients="all")):
        done.set()
        thread.join(60)
        assert checkpoints(step, WEIGHTS, X)
    assert found["under"] > 0
    assert found["other"] == 0
    jax.tree.map(np.testing.assert_array_equal, bits, step(WEIGHTS, X))


def test_an_error_in_the_step_is_the_users_and_leaves_nothing(package):
    def broken(weights, x):
        package["by_name"](weights, x)
        raise KeyError(X.shape)

    def unfit(weights, x):
        return jax.value_and_grad(lambda weights: weights["w0"] @ x.T)(weights)

    with pytest.raises(KeyError, match="8, 16"):
        ours(broken)(WEIGHTS, X)
    with pytest.raises(TypeError, match="Gradient only defined for scalar-output functions"):
        ours(unfit)(WEIGHTS, X)
    with pytest.raises(TypeError, match="differentiating with respect to argnums=3"):
        ours(lambda weights, x: jax.grad(lambda *a: x.sum(), argnums=3)(weights))(WEIGHTS, X)
    with pytest.raises(TypeError, match="real- or complex-valued inputs"):
        ours(lambda weights, x: jax.grad(lambda n: x.sum() * n)(3))(WEIGHTS, X)


def quiet_loss(weights, x):
    for name in sorted(weights):
        x = jnp.tanh(x @ weights[name])
    return jnp.mean(x**2)


def step_with_a_number(weights, number, x):
    slope = jax.grad(lambda number: number * 2.0)(number)  # nothing to cut: it stays as JAX takes it
    return jax.value_and_grad(quiet_loss)(weights, x), slope


def test_calls_keep_no_arrays():
    """No frame holds itself and no error its frames: arrays go when the call is over, not at a garbage collection."""
    eager = jm.apply_policy(step_with_a_number, FULL, gradients="all")
    x, number = X + 1, jnp.ones(())
    eager(WEIGHTS, number, x)
    gc.collect()
    gc.disable()
    try:
        before = len(jax.live_arrays())
        eager(WEIGHTS, number, x)
        jax.vjp(quiet_loss, WEIGHTS, x)
        assert len(jax.live_arrays()) == before
    finally:
        gc.enable()
    held = weakref.ref(number)
    del number
    gc.collect()
    assert held() is None


def test_a_call_that_traces_nothing_leaves_jax_alone(monkeypatch):
    step = jm.jit_step(step_with_a_number, FULL, gradients="all", donate_argnames=())
    (value, _), _ = step(WEIGHTS, 1.0, X)

    def change(*_):
        pytest.fail("JAX is touched though nothing is traced")

    monkeypatch.setattr(gradient_calls.handled_by, "__enter__", change)
    (again, _), _ = step(WEIGHTS, 1.0, X)
    assert value == again


def test_reaching_all_gradients_costs_a_call_next_to_nothing():
    """Each call of a step of the user's own jit pays it; 17 times as much as the context alone were too many."""

    def spent(enter, active):
        def calls():
            for _ in range(5000):
                with enter(active):
                    pass

        return min(timeit.repeat(calls, timer=time.process_time, number=1, repeat=9))

    context = spent(policies.activate, policies.ActivePolicy(FULL))
    assert spent(applied, policies.ActivePolicy(FULL, gradients="all")) < 8 * context


def test_a_signals_handler_may_take_a_step():
    """It runs in the thread that it interrupts, which may have the locks of a step that begins."""
    done = []

    def interrupted():
        with gradient_calls._lock, policies._making:
            done.append(jm.apply_policy(step_with_a_number, FULL, gradients="all")(WEIGHTS, 1.0, X))

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(120)
    assert done, "it waits for itself"


def test_a_word_that_there_is_not(package):
    for made in (jm.jit_step, jm.apply_policy):
        with pytest.raises(ValueError, match=r"gradients='al': expected 'own' .* or 'all'"):
            made(package["by_name"], FULL, gradients="al")


# Gradients of gradients, and JAX's options


def penalty(weights, x):
    """A Wasserstein critic's: the norm of a gradient is part of the loss."""

    def score(x):
        for w in weights.values():
            x = jnp.tanh(x @ w)
        return x.sum()

    norms = jnp.sqrt(jnp.sum(jax.vmap(jax.grad(score))(x) ** 2, axis=-1) + 1e-6)
    return score(x) / len(x) + 10.0 * jnp.mean((norms - 1.0) ** 2)


def adapted(weights, x):
    """Meta-learning: the loss after a step of descent."""

    def inner(weights):
        return jnp.mean(jnp.tanh(x @ weights["w0"]) @ weights["w1"]) ** 2

    moved = jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(inner)(weights))
    return inner(moved) + penalty(moved, x)


@pytest.mark.parametrize("loss", [penalty, adapted])
@pytest.mark.parametrize("policy", [FULL, jm.StepPolicy(remat="dots", keep=0.0), jm.StepPolicy(remat="full", levels=2)])
def test_a_gradient_inside_a_loss_is_part_of_the_loss(loss, policy):
    def step(weights, x):
        return jax.value_and_grad(loss)(weights, x)

    def by_ours(weights, x):
        return jm.value_and_grad(loss)(weights, x)

    assert_close(jax.jit(ours(step, policy))(WEIGHTS, X), jax.jit(step)(WEIGHTS, X))
    mine = jm.apply_policy(by_ours, policy)
    assert len(checkpoints(ours(step, policy), WEIGHTS, X)) == len(checkpoints(mine, WEIGHTS, X))
    assert len(checkpoints(ours(by_ours, policy), WEIGHTS, X)) == len(checkpoints(mine, WEIGHTS, X))


def test_second_order_products_of_a_step():
    def loss(w):
        return jnp.sum(jnp.tanh(jnp.tanh(X @ w) @ w) ** 2)

    def step(w, v):
        _, product = jax.jvp(jax.grad(loss), (w,), (v,))
        return jax.value_and_grad(lambda w: jnp.vdot(jax.grad(loss)(w), v))(w), product

    w = WEIGHTS["w0"]
    assert_close(ours(step)(w, w), step(w, w))


def test_options_of_jax_do_what_they_do():
    z = (X[:, :4] + 1j * X[:, 4:8]).astype(jnp.complex64)

    def holomorphic(z):
        return jax.value_and_grad(lambda z: jnp.sum(jnp.tanh(jnp.sin(z) ** 2)), holomorphic=True)(z)

    def of_integers(w, n):
        return jax.grad(lambda w, n: jnp.sum(jnp.tanh(jnp.sin(w @ w) * n)), (0, 1), allow_int=True)(w, n)

    def by_name(w, x):
        return jax.value_and_grad(lambda a, *, b: (jnp.sum(jnp.tanh(jnp.sin(b @ a))), {"n": 3, "s": "word"}), 0, True)(
            w, b=x
        )

    for got, plain in zip(ours(holomorphic)(z), holomorphic(z), strict=True):
        np.testing.assert_allclose(got, plain, rtol=1e-5)
    got, plain = ours(of_integers)(WEIGHTS["w0"], 3), of_integers(WEIGHTS["w0"], 3)
    assert_close(got[0], plain[0])
    assert (got[1].dtype, got[1].shape) == (plain[1].dtype, plain[1].shape)
    (value, aux), gradient = ours(by_name)(WEIGHTS["w0"], X)
    (plain_value, plain_aux), plain_gradient = by_name(WEIGHTS["w0"], X)
    assert aux == plain_aux
    assert_close((value, gradient), (plain_value, plain_gradient))


def test_rows_each_with_a_gradient_of_their_own():
    def step(weights, x):
        return jax.vmap(jax.grad(lambda w, row: jnp.sum(jnp.tanh(jnp.tanh(row @ w["w0"]) @ w["w1"]))), (None, 0))(
            weights, x
        )

    assert_close(ours(step)(WEIGHTS, X), step(WEIGHTS, X))


# What a policy cannot change, and what it does not reach


def test_a_gradient_that_cannot_be_cut_stays_and_is_noted(package):
    """A temperature beside the model, as SAC has it."""

    def step(weights, x):
        value, gradients = package["by_name"](weights, x)
        return value, gradients, jax.grad(lambda temperature: temperature)(jnp.float32(0.2))

    made = jm.jit_step(step, FULL, gradients="all", donate_argnames=())
    assert_close(made(WEIGHTS, X), jax.jit(step)(WEIGHTS, X))
    (note,) = made.notes
    assert note.startswith("The gradient of <lambda> stays without checkpoints: remat='full' would do nothing")
    assert note in jm.step_memory(made, WEIGHTS, X).warnings


def test_nothing_but_gradients_that_cannot_be_cut_is_an_error():
    with pytest.raises(ValueError, match="remat='full' would do nothing"):
        ours(jax.grad(lambda w: w))(jnp.float32(0.2))


@pytest.mark.parametrize("gradients", ["own", "all"])
def test_a_policy_that_another_one_hides_is_an_error_that_names_it(package, gradients):
    inner = jm.apply_policy(package["by_name"], "full_remat", gradients="all")
    with pytest.raises(ValueError, match=r"would do nothing: step has another one inside, by jm\.apply_policy"):
        jm.jit_step(inner, FULL, gradients=gradients)(WEIGHTS, X)


def by_vjp(weights, x):
    value, pull = jax.vjp(lambda w: jnp.sum(x @ w["w0"]), weights)
    return value, pull(jnp.float32(1))


def test_what_is_out_of_reach_is_an_error_that_names_it():
    expected = (
        r"takes no gradient by jax.value_and_grad or jax.grad.*jax.vjp, jax.linearize.*gradients.py:\d+: value, pull"
    )
    with pytest.raises(ValueError, match=expected):
        ours(by_vjp)(WEIGHTS, X)
    with pytest.raises(ValueError, match="would do nothing: <lambda> takes no gradient"):
        ours(lambda w, x: jax.jacrev(lambda w: jnp.tanh(jnp.tanh(x @ w["w0"]) @ w["w1"]))(w))(WEIGHTS, X)
    with pytest.raises(ValueError, match="would do nothing: <lambda> takes no gradient"):
        ours(eval("lambda w: w"))(X)  # noqa: S307 - no source to name a line of


def test_what_the_error_says_of_jax_vjp_works():
    """Give the step no policy, and differentiate jm.remat(function)."""

    def by_hand(w, x):
        value, pull = jax.vjp(jm.remat(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w["w0"]) @ w["w1"]))), w)
        return value, pull(jnp.float32(1))[0]

    assert checkpoints(by_hand, WEIGHTS, X)


@pytest.mark.parametrize("name", ["by_name", "in_a_class", "jitted_inside"])
def test_a_policy_that_reaches_nothing_says_what_would(package, name):
    """A function, a method, and a partial of a jit: the line as printed trains under the policy."""
    step, policy = package[name], FULL
    if name == "jitted_inside":
        step = jax.jit(functools.partial(step, x=X))
    inputs = () if name == "jitted_inside" else (X,)
    plain = step(WEIGHTS, *inputs)
    with pytest.raises(jm.PolicyError, match="Where a package takes the gradient, which you do not edit") as refused:
        jm.jit_step(step, policy)(WEIGHTS, *inputs)
    line = pasted("gradients.all", refused.value)
    made = value(line, jm=jm, policy=policy, **{getattr(step, "__name__", "step"): step})
    assert_close(made(jax.tree.map(jnp.copy, WEIGHTS), *inputs), plain)
    assert "remat" in str(made.trace(WEIGHTS, *inputs).jaxpr)


# A step under its policy inside another one: the innermost decides


def layers(weights):
    x = X
    for name in sorted(weights):
        x = jnp.tanh(x @ weights[name])
    return jnp.mean(x**2)


def plain_gradient(weights):
    return jax.grad(layers)(weights)


def own_gradient(weights):
    return jm.grad(layers)(weights)


def both_gradients(weights):
    return plain_gradient(weights), own_gradient(weights)


FORMS = {
    "apply_policy": lambda step, policy, gradients: jm.apply_policy(step, policy, gradients=gradients),
    "jit_step": lambda step, policy, gradients: jm.jit_step(step, policy, gradients=gradients, donate_argnames=()),
    "jit_step of a jit": lambda step, policy, gradients: jm.jit_step(jax.jit(step), policy, gradients=gradients),
}


@pytest.mark.core
@pytest.mark.parametrize("form", FORMS)
def test_the_innermost_policy_decides_which_gradients_obey(form):
    def remats(step):
        return str(jax.make_jaxpr(step)(WEIGHTS)).count(" remat")

    def around(step, gradients):
        return jm.apply_policy(lambda weights: (both_gradients(weights), step(weights)), FULL, gradients=gradients)

    under = FORMS[form]
    every, own = under(both_gradients, FULL, "all"), under(both_gradients, FULL, "own")
    assert remats(every) == 2 * remats(own) > 0
    assert remats(around(own, "all")) == remats(every) + remats(own), "the plain gradient inside stays JAX's"
    assert remats(around(every, "own")) == remats(own) + remats(every)
    assert remats(around(under(both_gradients, jm.StepPolicy(), "own"), "all")) == remats(every), "none is a policy too"


# Where JAX's own module has another form


@pytest.mark.parametrize("name", ["by_name", "by_attribute", "renamed", "jitted_inside", "in_a_loop"])
def test_names_alone_reach_what_modules_hold(package, name, monkeypatch):
    monkeypatch.setattr(gradient_calls, "_is_known", lambda _: False)
    monkeypatch.setattr(gradient_calls, "_seeing", gradient_calls._seeing.__wrapped__)  # which remembers
    step = package[name]
    assert_close(ours(step)(WEIGHTS, X), step(WEIGHTS, X))
    assert checkpoints(ours(step), WEIGHTS, X)
    assert package["by_name"].__globals__["value_and_grad"] is JAX_OWN["value_and_grad"]


# Equinox and Flax NNX, by their own functions


class Model(eqx.Module):
    layers: list[eqx.nn.Linear]
    act: Any
    steps: int

    def __call__(self, x):
        for layer in self.layers:
            x = self.act(layer(x))
        return x.sum() * self.steps


def equinox_model():
    keys = jax.random.split(jax.random.key(3), 3)
    return Model([eqx.nn.Linear(16, 16, key=key) for key in keys], jnp.tanh, 2)


def equinox_loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


@pytest.mark.parametrize("policy", [FULL, jm.StepPolicy(microbatches=2)])
def test_equinox(policy):
    @eqx.filter_jit
    def step(model, x):
        value, gradients = eqx.filter_value_and_grad(equinox_loss)(model, x)
        again = eqx.filter_grad(lambda m, x: (equinox_loss(m, x), 3), has_aux=True)(model, x)
        return value, gradients, again[0]

    model = equinox_model()
    got = jm.jit_step(step, policy, gradients="all")(model, X)
    assert_close(*(eqx.filter(each, eqx.is_array) for each in (got, step(model, X))))
    assert jm.step_memory(jm.jit_step(step, FULL, gradients="all"), model, X).step_bytes > 0


def nnx_training(take, policy=None, gradients="own", make=Net, **options):
    """Three steps: losses, and all arrays of the model after them."""
    model = make(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model, optimizer, x):
        value, found = take(nnx_loss, **options)(model, x)
        optimizer.update(model, found)
        return value

    run = nnx.jit(step) if policy is None else jm.jit_step(step, policy, gradients=gradients)
    return [run(model, optimizer, data()) for _ in range(3)], arrays(model)


def assert_same_training(got, plain):
    assert_close(got[0], plain[0])
    for name, expected in plain[1].items():
        np.testing.assert_allclose(np.asarray(got[1][name]), np.asarray(expected), atol=1e-6, err_msg=name)


class Dropping(nnx.Module):
    """Random numbers, and no statistics of the batch."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(jnp.tanh(self.up(x)), deterministic=False))


class Pure(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def test_nnx_statistics_and_random_streams_move_as_without_a_policy():
    plain = nnx_training(nnx.value_and_grad)
    assert_same_training(nnx_training(nnx.value_and_grad, FULL, "all"), plain)
    assert_same_training(nnx_training(jm.nnx.value_and_grad, FULL, "all"), plain)


def test_nnx_over_microbatches_is_what_our_own_function_makes_of_it():
    policy = jm.StepPolicy(remat="full", microbatches=2)
    theirs = nnx_training(nnx.value_and_grad, policy, "all", Dropping)
    assert_same_training(theirs, nnx_training(jm.nnx.value_and_grad, policy, make=Dropping))
    assert_same_training(
        nnx_training(nnx.value_and_grad, policy, "all", Pure), nnx_training(nnx.value_and_grad, make=Pure)
    )
    with pytest.raises(ValueError, match=r"changes state by the batch: \['blocks'\]\[0\]\['norm'\]\['mean'\]"):
        nnx_training(nnx.value_and_grad, policy, "all")


@pytest.mark.parametrize("policy", [FULL, jm.StepPolicy(microbatches=2)])
def test_nnx_modules_as_plain_trees(policy):
    """``graph=False``, and NNX state under JAX's own function."""
    plain = nnx_training(nnx.value_and_grad, make=Pure, graph=False)
    assert_same_training(nnx_training(nnx.value_and_grad, policy, "all", Pure, graph=False), plain)
    assert_same_training(nnx_training(jax.value_and_grad, policy, "all", Pure), plain)


def test_a_gradient_without_the_value_of_nnx():
    def step(model, x):
        gradients, aux = nnx.grad(lambda model, x: (nnx_loss(model, x), {"rows": x[:, 0]}), has_aux=True)(model, x)
        return nnx.state(gradients), aux

    plain = nnx.jit(step)(Net(nnx.Rngs(0)), data())
    assert_close(jm.jit_step(step, FULL, gradients="all")(Net(nnx.Rngs(0)), data()), plain)


# What is planned is what is trained


def test_a_plan_reaches_what_its_step_reaches(package):
    def step(weights, x):
        value, gradients = package["in_a_class"](weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    big = {f"w{i}": jnp.eye(64) * 0.9 for i in range(12)}
    rows = jnp.linspace(0, 1, 512 * 64).reshape(512, 64)
    made = jm.plan(jm.jit_step(step, gradients="all"), big, rows)
    assert made.record.gradients == "all"
    assert any(each.policy.remat != "none" and each.extra_flops > 0 for each in made.record.candidates)
    assert lines_to_train(made, None)[-1].endswith(', gradients="all")')
    own = jm.plan(step, big, rows).record
    assert {each.policy.remat for each in own.candidates} == {"none"}
    assert any("gradients='all'" in note for note in own.notes)
