"""Compiler options of a policy: where they count, where they are refused, and how they combine with the user's own."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem_callbacks as jm
from jaxmem_callbacks.config.presets import parse_preset, preset_to_yaml
from jaxmem_callbacks.programs.targets.compile import compile_for_target
from jaxmem_callbacks.records.policies import policy_words
from jaxmem_callbacks.records.presets import Preset

LINE = ".".join(jax.__version__.split(".")[:2])
REGIONS = "xla_cpu_copy_insertion_use_region_analysis"
OPTIONS = {"platform": "cpu", "jax": LINE, REGIONS: True}
POLICY = jm.StepPolicy(compiler_options=OPTIONS)
BATCH = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


def train_step(weights, batch):
    def loss(weights):
        return jnp.mean(jnp.tanh(batch @ weights) ** 2)

    value, gradients = jm.value_and_grad(loss)(weights)
    return weights - gradients, value


def weights():
    return jnp.eye(8)


def module_step(model, batch):
    value, gradients = jm.nnx.value_and_grad(lambda model: jnp.mean(model(batch) ** 2))(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model, nnx.Param), gradients))
    return value


def equinox_step(model, batch):
    value, gradients = jm.eqx.value_and_grad(lambda model: jnp.mean(jax.vmap(model)(batch) ** 2))(model)
    return eqx.apply_updates(model, jax.tree.map(jnp.negative, gradients)), value


def compiled_with(step):
    """The options of the jit that a step calls."""
    return step.compiler_options, dict(step._jitted.lowering._jit_info.compiler_options_kvs)


@pytest.mark.core
def test_a_step_is_compiled_with_them_and_computes_the_same():
    step = jm.jit_step(train_step, POLICY)
    updated, value = step(weights(), BATCH)
    assert compiled_with(step) == ({REGIONS: True}, {REGIONS: True})
    expected, expected_value = jax.jit(train_step)(weights(), BATCH)
    assert (updated == expected).all()
    assert value == expected_value


@pytest.mark.core
def test_a_jit_of_the_users_own_keeps_its_donation_statics_and_shardings():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    rows = jax.NamedSharding(mesh, jax.P("data"))

    @functools.partial(
        jax.jit, donate_argnums=0, static_argnums=2, in_shardings=(rows, None), out_shardings=(rows, None)
    )
    def own(weights, batch, scale):
        return weights - scale * jax.grad(lambda weights: jnp.mean(jnp.tanh(batch @ weights) ** 2))(weights), scale

    step, given = jm.jit_step(own, POLICY), jax.device_put(weights(), rows)
    lowered = step.lower(given, BATCH, 2)
    assert [info.donated for info in jax.tree.leaves(lowered.args_info)] == [True, False]
    # What is elsewhere is moved to where the user's jit wants it, and returned so.
    updated, _ = step(given, BATCH, 2)
    assert given.is_deleted()
    assert compiled_with(step)[1] == {REGIONS: True}
    assert (
        step.trace(jax.ShapeDtypeStruct((8, 8), jnp.float32), BATCH, 2).lower().compile().input_shardings[0][0] == rows
    )
    assert updated.sharding == rows
    assert not own._jit_info.compiler_options_kvs  # the user's own jit is as it was


@pytest.mark.core
@pytest.mark.parametrize(
    ("step", "model"),
    [
        (module_step, lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))),
        (nnx.jit(module_step), lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))),
        (functools.partial(nnx.jit(module_step)), lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))),
        (equinox_step, lambda: eqx.nn.Linear(8, 8, key=jax.random.key(0))),
        (eqx.filter_jit(equinox_step), lambda: eqx.nn.Linear(8, 8, key=jax.random.key(0))),
        (eqx.filter_jit(equinox_step, donate="all-except-first"), lambda: eqx.nn.Linear(8, 8, key=jax.random.key(0))),
    ],
    ids=["nnx", "nnx.jit", "partial of nnx.jit", "equinox", "filter_jit", "filter_jit that donates"],
)
@pytest.mark.filterwarnings("ignore:Donation of")
def test_steps_of_frameworks_train_as_without_them(step, model):
    def trained(policy):
        made, one = jm.jit_step(step, policy), model()
        for _ in range(2):
            result = made(one, jnp.asarray(BATCH))
            one = result[0] if isinstance(result, tuple) else one
        return made, [
            np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(one) if isinstance(one, nnx.Module) else one)
        ]

    with_options, found = trained(POLICY)
    assert with_options.compiler_options == {REGIONS: True}
    for one, other in zip(found, trained(None)[1], strict=True):
        assert (one == other).all()


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "what"),
    [
        (
            {"platform": "gpu", "jax": LINE, "xla_gpu_autotune_level": 0},
            f"are for gpu and jax {LINE}, and this compiles for cpu",
        ),
        ({**OPTIONS, "jax": "0.9"}, f"are for cpu and jax 0.9, and this compiles for cpu with jax {LINE}"),
        ({**OPTIONS, "platform": "tpu"}, f"{REGIONS}=true are for tpu"),
    ],
)
def test_elsewhere_they_are_refused_by_name_before_anything_is_compiled(options, what):
    step = jm.jit_step(train_step, jm.StepPolicy(compiler_options=options))
    given = weights()
    for act in (step, step.lower, functools.partial(jm.step_memory, step)):
        with pytest.raises(jm.PolicyError, match=what):
            act(given, BATCH)
    assert (given == weights()).all()  # alive: nothing ran
    assert step.latest is None


@pytest.mark.targets
def test_those_of_another_target_are_refused_too():
    step = jm.jit_step(train_step, POLICY)
    with pytest.raises(jm.PolicyError, match=f"are for cpu and jax {LINE}, and this compiles for gpu"):
        jm.step_memory(step, weights(), BATCH, target="h100_sxm")


@pytest.mark.targets
def test_a_target_compiles_with_them():
    name = "xla_gpu_enable_triton_gemm"
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 256), (512, 256))]
    policy = jm.StepPolicy(compiler_options={"platform": "cuda", "jax": LINE, name: True}, donate=())
    found = jm.step_memory(jm.jit_step(train_step, policy), *shapes, target="h100_sxm").program
    by_hand = compile_for_target(train_step, shapes, target="h100_sxm", compiler_options={name: True}).memory
    assert (found.step_bytes, found.temp_bytes) == (by_hand.step_bytes, by_hand.temp_bytes)


@pytest.mark.core
@pytest.mark.parametrize(
    "act",
    [
        lambda step: jax.jit(step)(weights(), BATCH),
        lambda step: jax.eval_shape(step, weights(), BATCH),
        lambda step: jax.vmap(step, in_axes=(0, None))(weights()[None], BATCH),
    ],
    ids=["jit", "eval_shape", "vmap"],
)
def test_under_another_transformation_they_are_an_error(act):
    with pytest.raises(jm.PolicyError, match=f"{REGIONS}=true and is called inside another jit"):
        act(jm.jit_step(train_step, POLICY))


@pytest.mark.core
def test_apply_policy_refuses_them_and_names_jit_step():
    with pytest.raises(jm.PolicyError, match=rf"{REGIONS}=true belong to a jit. Use jm.jit_step in its place"):
        jm.apply_policy(train_step, POLICY)


@pytest.mark.core
def test_the_users_own_options_stay_and_another_value_for_one_is_an_error():
    fast = {"xla_cpu_enable_fast_math": True}
    assert jm.jit_step(jax.jit(train_step, compiler_options=fast), POLICY).compiler_options == {**fast, REGIONS: True}
    same = jax.jit(train_step, compiler_options={REGIONS: "true"})
    assert jm.jit_step(same, POLICY).compiler_options == {REGIONS: True}
    for jit, word in ((jax.jit, "jax.jit"), (eqx.filter_jit, "eqx.filter_jit")):
        other = jit(train_step, compiler_options={REGIONS: False})
        with pytest.raises(jm.PolicyError, match=f"{REGIONS}=true, and the {word} of train_step has {REGIONS}=false"):
            jm.jit_step(other, POLICY)


@pytest.mark.core
def test_flags_of_the_process_with_another_value_are_an_error(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--{REGIONS}=false")
    with pytest.raises(jm.PolicyError, match=f"and XLA_FLAGS or LIBTPU_INIT_ARGS has {REGIONS}=false"):
        jm.jit_step(train_step, POLICY)
    monkeypatch.setenv("XLA_FLAGS", f"--{REGIONS}=true")
    jm.jit_step(train_step, POLICY)(weights(), BATCH)


@pytest.mark.core
def test_a_jit_whose_settings_cannot_be_kept_is_an_error():
    class Foreign:
        def __call__(self, weights, batch):
            return train_step(weights, batch)

        def lower(self, *args):
            return jax.jit(train_step).lower(*args)

    with pytest.raises(jm.PolicyError, match=r"the settings of the jit of .* cannot be read"):
        jm.jit_step(Foreign(), POLICY)


def test_presets_and_plans_carry_them():
    text = preset_to_yaml(Preset(name="tuned", policy=POLICY))
    assert f"  compiler_options: {{platform: cpu, jax: '{LINE}', {REGIONS}: true}}\n" in text
    assert parse_preset(text).policy == POLICY
    assert eval(f"jm.StepPolicy(compiler_options={POLICY.compiler_options!r})") == POLICY  # noqa: S307 - our own text
    assert policy_words(POLICY) == f"none, {REGIONS}=true"
    assert hash(POLICY) == hash(jm.StepPolicy(compiler_options=dict(OPTIONS)))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "expected options with the platform and the JAX line"),
        ({REGIONS: True}, "expected options with the platform and the JAX line"),
        (7, "expected options with the platform and the JAX line"),
        ({**OPTIONS, "platform": "gup"}, "platform='gup'. Did you mean `gpu`"),
        ({**OPTIONS, "jax": 0.12}, "jax=0.12: expected a version as a text"),
        ({**OPTIONS, "--xla_gpu_autotune_level": 0}, "without dashes. Write 'xla_gpu_autotune_level'"),
        ({**OPTIONS, "autotune": 0}, "have 'autotune', expected names that begin with 'xla_'"),
        ({**OPTIONS, REGIONS: [True]}, f"{REGIONS}=[True], expected True, False, a number or a text"),
    ],
)
def test_a_policy_refuses_what_no_compiler_takes(options, what):
    with pytest.raises(jm.PolicyError) as refused:
        jm.StepPolicy(compiler_options=options)
    assert what in str(refused.value)


def test_a_mistake_in_a_preset_has_its_place():
    with pytest.raises(
        jm.PresetError, match=r"tuned.yaml:2:21: `policy.compiler_options` is .*\n.*with the platform and the JAX"
    ):
        parse_preset("policy:\n  compiler_options: {xla_gpu_autotune_level: 0}\n", "tuned.yaml")
