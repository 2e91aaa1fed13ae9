"""Names and paths in the place of presets and policies, at every door that takes one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.config.documents import shipped_names
from jaxmem_callbacks.config.named import load_named, policy_of
from jaxmem_callbacks.records.policies import REMAT_SYNONYMS, SHARDING_SYNONYMS

NEEDS_MORE = {"save_only_these_names", "save_and_offload_only_these_names"}


def loss(params, x):
    return jnp.mean(jnp.tanh(jnp.tanh(x @ params) @ params) ** 2)


def train_step(params, x):
    value, gradients = jm.value_and_grad(loss)(params, x)
    return params - 0.1 * gradients, value


@pytest.mark.parametrize("name", shipped_names())
def test_each_preset_by_its_name_is_the_preset(name):
    assert policy_of(name) == jm.load_preset(name).policy


@pytest.mark.parametrize(
    "word", [each for name, others in REMAT_SYNONYMS.items() if name not in NEEDS_MORE for each in (name, *others)]
)
def test_each_word_of_remat_is_a_policy(word):
    assert policy_of(word) == jm.StepPolicy(remat=word)


@pytest.mark.parametrize("word", [each for name, others in SHARDING_SYNONYMS.items() for each in (name, *others)])
def test_each_word_of_sharding_is_a_policy_and_presets_of_that_name_say_nothing_else(word):
    assert policy_of(word) == jm.StepPolicy(sharding=word)


def test_several_presets_and_paths(tmp_path):
    path = tmp_path / "mine+yours.yaml"
    path.write_text("policy: {remat: dots_saveable}\n")
    assert policy_of("donate+full_remat") == jm.StepPolicy(remat="full", donate="auto")
    assert policy_of(path) == policy_of(str(path)) == jm.StepPolicy(remat="dots_saveable")
    assert load_named("donate+full_remat") == jm.load_preset("donate", "full_remat")
    given = jm.StepPolicy(remat="full")
    assert policy_of(given) is given is load_named(given)


@pytest.mark.core
def test_a_step_by_name_is_the_step_by_policy():
    params, x = jnp.eye(16), jnp.ones((8, 16))
    named = jm.jit_step(train_step, "donate+full_remat")
    assert named.policy == jm.StepPolicy(remat="full", donate="auto")
    ours, value = named(jnp.array(params), x)
    theirs, same = jm.jit_step(train_step, jm.StepPolicy(remat="full"))(jnp.array(params), x)
    assert (ours == theirs).all()
    assert value == same
    again, _ = jm.apply_policy(train_step, "full_remat")(params, x)
    assert jnp.allclose(again, ours)
    recovery = jm.Recovery(train_step, "recover")
    assert recovery.policy == jm.load_preset("recover").policy
    assert recovery.settings == jm.load_preset("recover").recovery


@pytest.mark.core
def test_a_sharding_by_name_is_the_sharding():
    mesh = jm.make_mesh({"fsdp": 8})
    state = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    assert jm.infer_shardings(state, mesh, "fsdp") == jm.infer_shardings(state, mesh, jm.load_preset("fsdp"))


def test_a_monitor_takes_the_same_names(tmp_path):
    path = tmp_path / "often.yaml"
    path.write_text("monitor: {window_s: 5}\n")
    for preset in ("donate+full_remat", path, str(path)):
        with jm.MemoryMonitor(preset) as monitor:
            monitor(0)
        assert monitor.events == ()


def test_a_folder_in_the_place_of_a_preset(tmp_path):
    for given in ("runs/a", tmp_path, str(tmp_path)):
        with pytest.raises(TypeError, match=r"MemoryMonitor got the folder '.*' as its preset\. .*logdir='") as caught:
            jm.MemoryMonitor(given)
        assert f"Write jm.MemoryMonitor(logdir='{given}')" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("ful_remat", jm.PresetError, "Unknown preset or policy 'ful_remat'. Did you mean `full_remat`?"),
        ("fspd", jm.PresetError, "Did you mean `fsdp`?"),
        ("donate+ful_remat", jm.PresetError, "Unknown preset or policy 'donate+ful_remat'"),
        ("save_names", jm.PolicyError, "needs the names to keep"),
        ("nowhere/mine.yaml", jm.PresetError, "nowhere/mine.yaml"),
        (3, TypeError, "Expected a StepPolicy, a Preset or the name of one, got int. For example: 'full_remat'."),
        (["donate", "full_remat"], TypeError, "got list"),
    ],
)
def test_what_is_no_name(given, error, words):
    for call in (policy_of, lambda it: jm.jit_step(train_step, it), lambda it: jm.Recovery(train_step, it)):
        with pytest.raises(error) as caught:
            call(given)
        assert words in str(caught.value)
