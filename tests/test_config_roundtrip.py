"""Properties: what a preset says survives YAML, and composing is associative."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem_callbacks.config.presets import Part, compose, list_presets, load_preset, parse_preset, preset_to_yaml
from jaxmem_callbacks.config.schema import RANGES
from jaxmem_callbacks.records.policies import REMAT_SYNONYMS, SHARDING_SYNONYMS, StepPolicy
from jaxmem_callbacks.records.presets import EnvironmentSettings, MonitorSettings, Preset, RecoverySettings

NAMES = st.lists(
    st.text(max_size=8) | st.sampled_from(["off", "null", "1e3", "~", "yes", "1:30", "&a", "*a", "!x", "#", "- a"]),
    max_size=3,
)
DONATE = st.none() | st.just("auto") | NAMES.map(tuple)
MESH_AXES = st.none() | st.text(max_size=8) | st.lists(st.text(max_size=8), min_size=1, max_size=3)
SHARDING = (
    st.none()
    | st.sampled_from(list(SHARDING_SYNONYMS))
    | st.lists(st.tuples(st.text(max_size=8), MESH_AXES), min_size=1)
)
MICROBATCHES = st.integers(1, 1000)
POLICIES = st.builds(StepPolicy, microbatches=MICROBATCHES, donate=DONATE, sharding=SHARDING) | st.builds(
    StepPolicy,
    remat=st.sampled_from([name for name in REMAT_SYNONYMS if name != "none"]),
    segments=st.none() | st.just("blocks") | st.integers(1, 1000),
    keep=st.floats(0, 1),
    save=NAMES.map(lambda names: ("kept", *names)),
    offload=NAMES.map(tuple),
    donate=DONATE,
)
SECONDS = st.floats(min_value=1e-300, max_value=1e300) | st.floats(0.01, 100)
MONITORS = st.builds(
    MonitorSettings,
    every_steps=st.integers(1, 10**15),
    window_s=SECONDS,
    scan_s=SECONDS,
    host_s=SECONDS,
    driver_s=SECONDS,
    heap_map_s=SECONDS,
    figure_s=SECONDS,
    processes_s=st.none() | SECONDS,
    trace_steps=st.integers(0, 10**9),
    limit_bytes=st.none() | st.integers(1, 2**50) | st.integers(1, 2**20).map(lambda count: count * 2**20),
    near_oom_headroom=st.floats(0, 1, exclude_max=True),
    fragmentation_share=st.floats(0, 1, exclude_min=True),
    fragmentation_min_bytes=st.integers(0, 2**50),
    near_oom_steps=st.integers(1, 10**9),
    near_oom_profiles=st.integers(0, 10**9),
    growth_steps=st.integers(10, 10**9),
    growth_min_bytes=st.integers(1, 2**50),
    growth_min_arrays=st.none() | st.integers(1, 10**9),
    replication_min_bytes=st.integers(1, 2**50),
    imbalance_share=st.floats(0, 1, exclude_min=True),
    imbalance_min_bytes=st.integers(0, 2**50),
    tensorboard=st.booleans(),
    jsonl=st.booleans(),
    jsonl_part_bytes=st.none() | st.integers(2**10, 2**50),
    on_error=st.sampled_from(["warn", "raise"]),
)
ENVIRONMENTS = st.builds(EnvironmentSettings, platform=st.sampled_from([None, "tpu"])) | st.builds(
    EnvironmentSettings,
    platform=st.sampled_from([None, "cuda"]),
    allocator=st.sampled_from([None, "default", "bfc", "cuda_async", "vmm", "platform", "address"]),
    preallocate=st.none() | st.booleans(),
    fraction=st.none() | st.floats(0, 1, exclude_min=True),
    collective_pool_bytes=st.none() | st.integers(1, 2**20).map(lambda mib: mib * 2**20),
)

RECOVERIES = st.builds(
    RecoverySettings,
    ladder=st.lists(st.sampled_from(["defragment", "microbatches", "remat", "save_and_exit"])).map(tuple),
    snapshots=st.sampled_from(["host", "orbax"]),
    every_steps=st.integers(1, 10**9),
    buffer_bytes=st.integers(0, 2**50),
    max_microbatches=st.integers(1, 10**6),
    agree_s=SECONDS,
)


@pytest.mark.core
@settings(deadline=None, max_examples=150)
@given(
    description=st.text(max_size=200),
    policy=POLICIES,
    monitor=MONITORS,
    environment=ENVIRONMENTS,
    recovery=RECOVERIES,
    defaults=st.sampled_from(["omit", "show"]),
)
def test_what_a_preset_says_survives_yaml(description, policy, monitor, environment, recovery, defaults):  # noqa: PLR0917 - each drawn
    said = {"policy": policy, "monitor": monitor, "environment": environment, "recovery": recovery}
    preset = Preset(name="a", description=description.strip(), **said)
    read = parse_preset(preset_to_yaml(preset, defaults=defaults), "a.yaml")
    assert dataclasses.replace(read, said=()) == preset
    assert set(read.said) >= {
        f"policy.{f.name}" for f in dataclasses.fields(policy) if getattr(policy, f.name) != f.default
    }


@pytest.mark.parametrize("names", [(), *((name,) for name in list_presets()), ("donate", "full_remat")])
def test_the_said_keys_survive_too(names):
    preset = load_preset(*names)
    assert parse_preset(preset_to_yaml(preset), f"{preset.name}.yaml") == preset


@pytest.mark.parametrize(
    "text", ["1e3", "off", "null", "", " ", "\x85", "\u2028", "\0", "a\nb", "&a", "- x", "\ufeff", "'\""]
)
def test_texts_that_look_like_something_else_stay_texts(text):
    preset = Preset(name="a", policy=StepPolicy(remat="full", save=(text,)))
    assert parse_preset(preset_to_yaml(preset), "a.yaml").policy == preset.policy


def test_a_preset_that_says_nothing_is_still_a_preset():
    assert preset_to_yaml(Preset(name="a")) == "{}\n"
    assert parse_preset("{}\n", "a.yaml") == Preset(name="a")


def test_every_range_is_in_the_generated_records():
    # A new bounded field must get a strategy above, else the property says nothing about it.
    assert set(RANGES) == {
        "policy.microbatches",
        "policy.keep",
        "environment.fraction",
        *(
            f"monitor.{name}"
            for name in ("every_steps", "window_s", "scan_s", "near_oom_headroom", "fragmentation_share")
        ),
        *(f"monitor.{name}" for name in ("host_s", "driver_s", "heap_map_s", "figure_s", "processes_s", "trace_steps")),
        "monitor.near_oom_profiles",
        *(f"monitor.{name}" for name in ("near_oom_steps", "growth_steps", "growth_min_arrays", "imbalance_share")),
        *(f"recovery.{name}" for name in ("every_steps", "max_microbatches", "agree_s")),
    }


KEYS = st.fixed_dictionaries(
    {},
    optional={
        "policy": st.fixed_dictionaries(
            {}, optional={"remat": st.just("full"), "save": NAMES.map(tuple), "donate": DONATE}
        ),
        "monitor": st.fixed_dictionaries({}, optional={"every_steps": st.integers(1, 9), "jsonl": st.booleans()}),
        "environment": st.fixed_dictionaries(
            {}, optional={"preallocate": st.booleans(), "allocator": st.sampled_from(["bfc", "cuda_async"])}
        ),
    },
)


def merged(left, right):
    return {key: {**left.get(key, {}), **right.get(key, {})} for key in {**left, **right}}


@settings(deadline=None, max_examples=100)
@given(first=KEYS, second=KEYS, third=KEYS)
def test_composing_is_associative(first, second, third):
    base = {"policy": {"remat": "full"}}
    composed = [
        compose([Part(name="x", values=values, keys={}) for values in parts])
        for parts in (
            [base, first, second, third],
            [base, merged(first, second), third],
            [base, first, merged(second, third)],
        )
    ]
    for other in composed[1:]:
        assert dataclasses.replace(other, name="") == dataclasses.replace(composed[0], name="")
