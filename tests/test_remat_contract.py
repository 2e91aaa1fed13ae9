"""What `jm.remat` and a policy accept, leave alone and refuse, and in which words."""

from __future__ import annotations

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import io_callback

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import JaxmemError, LossRefusedError, PolicyError
from jaxmem_callbacks.records.policies import MAXTEXT_REMAT, REMAT_SYNONYMS, canonical_remat
from jaxmem_callbacks.transforms.checkpoints import named_policy
from jaxmem_callbacks.transforms.remat import cut_equations
from jaxmem_callbacks.transforms.tracing import flatten, is_checkpoint
from tests.comparisons import checkpoints
from tests.losses import INPUTS, KEY, WEIGHTS, constrained, jitted, mlp, named, own_remat, scanned

pytestmark = pytest.mark.core


def equations(function: Any, *args: Any) -> str:
    return str(jax.make_jaxpr(function)(*args))


# What is left alone.


def test_none_is_the_loss_itself_and_no_policy_is_jax() -> None:
    assert jm.remat(mlp, "none") is mlp
    assert jm.remat(mlp, "off") is mlp
    assert equations(jm.value_and_grad(mlp), WEIGHTS, INPUTS) == equations(jax.value_and_grad(mlp), WEIGHTS, INPUTS)
    assert equations(jm.grad(mlp), WEIGHTS, INPUTS) == equations(jax.grad(mlp), WEIGHTS, INPUTS)


def test_a_jitted_loss_is_cut_like_the_plain_one() -> None:
    assert len(checkpoints(jm.remat(jitted, segments=3), WEIGHTS, INPUTS)) == 2  # the last is not checkpointed
    assert len(checkpoints(jm.remat(jax.jit(mlp)), WEIGHTS, INPUTS)) == len(checkpoints(jm.remat(mlp), WEIGHTS, INPUTS))


def test_a_scan_gets_a_checkpointed_body_and_is_not_wrapped_again() -> None:
    found = checkpoints(jm.remat(scanned), WEIGHTS, INPUTS)
    inside = [eqn for eqn in found if eqn.params["prevent_cse"] is False]
    assert len(inside) == 1
    assert not any("scan" in str(eqn.params["jaxpr"]) for eqn in found)


def test_the_users_own_checkpoints_are_kept_and_not_wrapped() -> None:
    own = len(checkpoints(own_remat, WEIGHTS, INPUTS))
    found = checkpoints(jm.remat(own_remat), WEIGHTS, INPUTS)
    assert len(found) > own
    assert not any("remat" in str(eqn.params["jaxpr"]) for eqn in found)


def test_flags_texts_and_functions_stay_what_they_are() -> None:
    def loss(weights: Any, x: Any, train: bool, *, mode: str, scale: Any) -> Any:
        assert train is True
        assert mode == "fast"
        assert isinstance(scale, float)
        return mlp(weights, x) * scale

    args, kwargs = (WEIGHTS, INPUTS, True), {"mode": "fast", "scale": 2.0}
    value, _ = jax.value_and_grad(jm.remat(loss))(*args, **kwargs)
    np.testing.assert_allclose(value, 2 * mlp(WEIGHTS, INPUTS), rtol=1e-6)


def test_numpy_and_python_results_come_back_as_they_are() -> None:
    def loss(weights: Any, x: Any) -> Any:
        return mlp(weights, x), {"table": np.arange(3), "rate": 0.5, "name": "a", "nothing": None}

    (_, aux), _ = jax.value_and_grad(jm.remat(loss), has_aux=True)(WEIGHTS, INPUTS)
    assert isinstance(aux["table"], np.ndarray)
    assert (aux["rate"], aux["name"], aux["nothing"]) == (0.5, "a", None)


def test_equinox_models_are_differentiated_as_equinox_does() -> None:
    model = eqx.nn.MLP(16, 16, 32, 2, activation=jax.nn.gelu, key=KEY)

    def loss(model: Any, x: Any) -> Any:
        return (jax.vmap(model)(x) ** 2).mean()

    value, gradients = jm.value_and_grad(loss)(model, INPUTS)
    expected_value, expected = eqx.filter_value_and_grad(loss)(model, INPUTS)
    assert jax.tree.structure(gradients) == jax.tree.structure(expected)
    assert gradients.activation is None
    jax.tree.map(np.testing.assert_array_equal, gradients, expected)
    np.testing.assert_array_equal(value, expected_value)
    both = jm.value_and_grad(lambda a, b, x: loss(a, x) + loss(b, x), argnums=(0, -2))(model, model, INPUTS)[1]
    assert len(both) == 2
    jax.tree.map(np.testing.assert_array_equal, both[0], both[1])


def test_integer_parameters_are_refused_as_by_jax() -> None:
    with pytest.raises(TypeError, match="real- or complex-valued"):
        jm.value_and_grad(lambda n: n * 1.0)(jnp.int32(3))


def test_a_gradient_inside_the_loss_is_cut_only_once() -> None:
    def loss(weights: Any, x: Any) -> Any:
        return (jm.grad(lambda y: mlp(weights, y))(x) ** 2).sum()

    step = jm.apply_policy(jm.value_and_grad(loss), jm.StepPolicy(remat="full"))
    plain = jax.value_and_grad(loss)(WEIGHTS, INPUTS)
    value, _ = jax.jit(step)(WEIGHTS, INPUTS)
    np.testing.assert_allclose(value, plain[0], rtol=1e-6)
    outer = checkpoints(jm.remat(loss), WEIGHTS, INPUTS)
    assert not any("remat" in str(eqn.params["jaxpr"]) for eqn in outer)


def test_module_names_and_source_lines_survive_into_the_compiled_program() -> None:
    def loss(weights: Any, x: Any) -> Any:
        for index, w in enumerate(weights):
            with jax.named_scope(f"layer_{index}"):
                x = jax.jit(lambda y, w: jnp.tanh(y @ w))(x, w)
        return (x**2).mean()

    text = jax.jit(jax.grad(jm.remat(loss))).lower(WEIGHTS, INPUTS).compile().as_text()
    assert all(f"layer_{index}" in text for index in range(len(WEIGHTS)))
    assert "test_remat_contract.py" in text


def test_equal_layers_of_a_loop_share_one_jaxpr() -> None:
    bodies = [eqn.params["jaxpr"] for eqn in checkpoints(jm.remat(mlp, segments=12), [*WEIGHTS, *WEIGHTS], INPUTS)]
    assert len({id(body) for body in bodies}) < len(bodies)


@pytest.mark.parametrize("policy", [{}, {"keep": 0.5}, {"levels": 2}])
def test_a_traced_loss_can_be_cut_again_and_is_cut_alike(policy: dict[str, Any]) -> None:
    flat = flatten(jax.make_jaxpr(mlp)(WEIGHTS, INPUTS))
    before = flat.eqns
    first, second = (cut_equations(flat, jm.StepPolicy(remat="full", **policy)).jaxpr for _ in range(2))
    texts = {re.sub(r" at 0x\w+", "", str(jaxpr)) for jaxpr in (first, second)}
    assert len(texts) == 1
    assert any(map(is_checkpoint, first.eqns))
    assert flat.eqns is before


# Cheap values.


def test_cheap_values_of_parameters_are_made_again_and_never_cross_a_cut() -> None:
    def loss(weights: Any, x: Any) -> Any:
        weights = [w.astype(jnp.bfloat16) for w in weights]
        x = x.astype(jnp.bfloat16)
        for w in weights:
            x = jnp.tanh(x @ w) + x
        return (x.astype(jnp.float32) ** 2).mean()

    shapes = {eqn.params["jaxpr"].invars[i].aval.str_short() for eqn in checkpoints(jm.remat(loss), WEIGHTS, INPUTS)
              for i in range(len(eqn.invars))}  # fmt: skip
    assert "f32[16,16]" in shapes or "float32[16,16]" in shapes
    assert "bf16[16,16]" not in shapes
    assert "bfloat16[16,16]" not in shapes


# What is refused, and how.


def test_ordered_effects_are_refused_by_name() -> None:
    def loss(weights: Any, x: Any) -> Any:
        io_callback(lambda v: None, None, x.sum(), ordered=True)
        return mlp(weights, x)

    with pytest.raises(LossRefusedError, match=r"`io_callback` with the effect \w+.*Use jax.debug.callback"):
        jax.grad(jm.remat(loss))(WEIGHTS, INPUTS)
    with pytest.raises(ValueError, match="has_aux"):  # ours subclass what users catch
        jax.grad(jm.remat(loss))(WEIGHTS, INPUTS)


def test_a_loss_that_cannot_be_cut_is_refused_not_ignored() -> None:
    with pytest.raises(LossRefusedError, match=r"would do nothing: the loss is `reduce_sum`.*jax.value_and_grad"):
        jax.grad(jm.remat(jnp.sum))(INPUTS)
    for nothing in (lambda _: jnp.float32(1.0), lambda x: 2 * x[0, 0]):
        with pytest.raises(LossRefusedError, match=r"would do nothing: the loss keeps nothing for its gradient"):
            jax.grad(jm.remat(nothing, keep=0.5))(INPUTS)


@pytest.mark.parametrize("loss", [lambda w, x: x @ w, lambda w, x: (x @ w,), lambda w, x: "none"])
def test_what_jax_refuses_under_no_policy_is_refused_in_its_own_words(loss: Any) -> None:
    weights, inputs = jnp.ones((4, 4)), jnp.ones((2, 4))
    with pytest.raises(TypeError) as plain:
        jax.value_and_grad(loss)(weights, inputs)
    words = str(plain.value).partition(". ")[0]  # the rest shows a tracer
    with pytest.raises(TypeError, match=re.escape(words)):
        jm.jit_step(jm.value_and_grad(loss), "full")(weights, inputs)


def test_framework_objects_are_sent_to_the_function_that_keeps_their_state() -> None:
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    gradient = jm.value_and_grad(lambda m: m(jnp.ones((1, 4))).sum())
    step = jm.apply_policy(gradient, jm.StepPolicy(remat="full"))
    with pytest.raises(LossRefusedError, match=r"Flax NNX objects.*Use jm.nnx.value_and_grad instead"):
        step(model)


def test_missing_names_and_their_nearest_are_told() -> None:
    with pytest.raises(PolicyError, match=r"no value named 'hiden'. Did you mean `hidden`\?.*: hidden\."):
        jax.grad(jm.remat(named, "full", save=("hiden",)))(WEIGHTS, INPUTS)
    with pytest.raises(PolicyError, match=r"no value named 'x'.*: none\."):
        jax.grad(jm.remat(mlp, "full", save=("x",)))(WEIGHTS, INPUTS)
    with pytest.raises(PolicyError, match=r"combines offloading by name with no other"):
        jax.grad(jm.remat(named, "dots", offload=("hidden",)))(WEIGHTS, INPUTS)


def test_more_segments_than_places_are_refused() -> None:
    with pytest.raises(PolicyError, match=r"segments=500: this loss can be cut into \d+ segments at most"):
        jax.grad(jm.remat(mlp, segments=500))(WEIGHTS, INPUTS)
    assert len(checkpoints(jm.remat(mlp, segments=4), WEIGHTS, INPUTS)) == 3  # the last is not checkpointed


@pytest.mark.parametrize(("options", "words"), [
    ({"policy": "ful"}, r"Unknown remat policy 'ful'. Did you mean `full`\? Expected one of: none, full"),
    ({"policy": "save_names"}, r"needs the names to keep: save="),
    ({"policy": "none", "segments": 3}, "leaves the loss untouched"),
    ({"segments": 0}, "segments=0: expected a whole number of at least 1"),
    ({"segments": True}, "segments=True"),
])  # fmt: skip
def test_contradictions_are_refused_at_construction(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        jm.remat(mlp, **options)


def test_texts_in_place_of_tuples_are_refused() -> None:
    with pytest.raises(PolicyError, match=r"save='hidden' is one text.*save=\('hidden',\)"):
        jm.StepPolicy(remat="full", save="hidden")  # pyright: ignore[reportArgumentType] - the mistake under test
    with pytest.raises(PolicyError, match=r"donate='state': expected 'auto', a tuple"):
        jm.StepPolicy(donate="state")  # pyright: ignore[reportArgumentType] - the mistake under test


def test_every_synonym_has_one_canonical_spelling() -> None:
    words = [word for name, synonyms in REMAT_SYNONYMS.items() for word in (name, *synonyms)]
    assert len(words) == len(set(words))
    assert all(canonical_remat(word.upper()) in REMAT_SYNONYMS for word in words)
    assert not set(words).intersection(MAXTEXT_REMAT)
    assert canonical_remat("none") != canonical_remat("full")
    with pytest.raises(PolicyError, match="no checkpoint at all"):
        named_policy("none")
    assert issubclass(PolicyError, (JaxmemError, ValueError))


# The active policy.


def test_a_step_that_was_traced_before_is_traced_again_under_a_policy() -> None:
    def step(weights: Any, x: Any) -> Any:
        return inner(weights, x)

    @jax.jit
    def inner(weights: Any, x: Any) -> Any:
        return jm.value_and_grad(mlp)(weights, x)

    plain = equations(step, WEIGHTS, INPUTS)
    cheaper = equations(jm.apply_policy(step, jm.StepPolicy(remat="full")), WEIGHTS, INPUTS)
    assert "remat" not in plain
    assert "remat" in cheaper
    assert "remat" not in equations(step, WEIGHTS, INPUTS)


def test_a_policy_on_a_step_without_our_gradients_names_the_line() -> None:
    def step(weights: Any, x: Any) -> Any:
        return jax.value_and_grad(mlp)(weights, x)

    policy = jm.StepPolicy(remat="full")
    with pytest.raises(PolicyError, match=r"test_remat_contract.py:\d+ from jax.value_and_grad to jm.value_and_grad"):
        jax.jit(jm.apply_policy(step, policy))(WEIGHTS, INPUTS)
    with pytest.raises(PolicyError, match=r"Take the gradient by jm\.value_and_grad"):
        jm.apply_policy(eval("lambda w, x: w"), policy)(WEIGHTS, INPUTS)  # noqa: S307 - no source to name a line of
    assert jm.apply_policy(step, jm.StepPolicy())(WEIGHTS, INPUTS)[0].shape == ()


def test_what_is_no_policy_is_refused_with_the_call_to_type() -> None:
    with pytest.raises(
        TypeError, match=r"Expected a StepPolicy, a Preset or the name of one, got int\. .* 'full_remat'"
    ):
        jm.apply_policy(mlp, 3)  # pyright: ignore[reportArgumentType] - the mistake under test


def test_sharding_constraints_stay_in_the_cut_program() -> None:
    count = equations(constrained, WEIGHTS, INPUTS).count("sharding_constraint")
    assert equations(jm.remat(constrained), WEIGHTS, INPUTS).count("sharding_constraint") >= count - 1
