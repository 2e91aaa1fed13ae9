"""Each trap among the settings of XLA's client is found and explained, and what is right is left alone; pure data in and out."""

import contextlib
import importlib.metadata
import itertools
import re

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax._src import xla_bridge
from jaxlib import xla_client

from jaxmem_callbacks.config.presets import list_presets, load_preset
from jaxmem_callbacks.environment.apply import choose, require_applied, wanted_variables
from jaxmem_callbacks.environment.findings import findings, settings_findings
from jaxmem_callbacks.environment.process import (
    SHOWN,
    as_preallocate,
    memory_flags,
    process_facts,
    unread_names,
    version_numbers,
)
from jaxmem_callbacks.records.environment import ProcessFacts
from jaxmem_callbacks.records.errors import EnvironmentSettingError, PresetError
from jaxmem_callbacks.records.presets import EnvironmentSettings, Preset

NEW, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
ALLOCATOR, PREALLOCATE = "XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_PREALLOCATE"
POOL = "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB"
TFRT = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"


def seen(variables=None, *, jaxlib="0.12.0", **more):
    return ProcessFacts(variables=variables or {}, jax="0.12.0", jaxlib=jaxlib, **more)


UNIFIED, HOST_LIMIT = "TF_FORCE_UNIFIED_MEMORY", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
OPTION = "jax_pjrt_client_create_options"
TRAPS = [
    ({NEW: "1.5", UNIFIED: "0"}, {}, "fraction out of range", r"above 1 only with", f"export {NEW}=0.015"),
    # What XLA reads by itself, and what options say.
    ({UNIFIED: "yes"}, {}, "no switch", r"takes false", f"export {UNIFIED}=1"),
    ({HOST_LIMIT: "64GB"}, {}, "no number of GB", r"whole number of GB", f"export {HOST_LIMIT}=64"),
    ({HOST_LIMIT: "0"}, {}, "no number of GB", r"above 0", f"export {HOST_LIMIT}=64"),
    ({}, {"options": {"memory_fraction": 75}}, "value of an option", r"a share above 0", OPTION),
    ({}, {"options": {"preallocate": "no"}}, "value of an option", r"True or False", OPTION),
    ({}, {"options": {"allocator": "bcf"}}, "value of an option", r"one of default, bfc", OPTION),
    # One by one.
    ({NEW: "0.9", OLD: "0.9"}, {}, "both fractions", r"fails on two even where they agree", f"unset {OLD}"),
    ({NEW: "90%"}, {}, "no fraction", r"read as a number.*runs on the CPU", f"export {NEW}=0.9"),
    ({OLD: "75"}, {}, "fraction out of range", r"above 0 and up to 1", f"export {OLD}=0.75"),
    ({NEW: "0"}, {}, "fraction out of range", r"above 0", f"export {NEW}=0.9"),
    ({NEW: "nan"}, {}, "fraction out of range", r"above 0", f"export {NEW}=0.9"),
    ({ALLOCATOR: "BCF"}, {}, "unknown allocator", r"Did you mean `bfc`\?.*runs on the CPU", f"export {ALLOCATOR}=bfc"),
    ({ALLOCATOR: "address"}, {"jaxlib": "0.10.2"}, "allocator of a later version", r"since jaxlib 0\.11\.0", "unset"),
    (
        {ALLOCATOR: "platform"},
        {"jaxlib": "0.10.2"},
        "platform that is not",
        r"silently runs the default",
        "jax 0.11 or newer",
    ),
    (
        {ALLOCATOR: "platform"},
        {"jaxlib": "0.10.1"},
        "platform that is not",
        r"silently runs the default",
        "jax 0.11 or newer",
    ),
    ({ALLOCATOR: "vmm"}, {"plugins": {"rocm": "x 1"}}, "allocator of CUDA", r"NVIDIA GPUs only", "bfc"),
    *(
        ({PREALLOCATE: word}, {}, "false that is true", r"every other text for true", f"export {PREALLOCATE}=false")
        for word in ("FALSE", "no", "off", "No", " false", "0 ")
    ),
    ({POOL: "512MiB"}, {}, "no whole number", r"a number of MiB\. .*runs on the CPU", f"export {POOL}=512"),
    ({POOL: "-1"}, {}, "negative size", r"no size is negative", f"export {POOL}=512"),
    ({TFRT: "true"}, {}, "no whole number", r"0 or 1\. .*runs on the CPU", f"export {TFRT}=1"),
    (
        {"TF_GPU_ALLOCATOR": "cuda_malloc_async"},
        {},
        "read by nothing",
        r"only TensorFlow reads it",
        f"{ALLOCATOR}=cuda_async",
    ),
    ({}, {"unread": ("XLA_PYTHON_CLIENT_ALOCATOR",)}, "read by nothing", r"Did you mean `\w+_ALLOCATOR`", ALLOCATOR),
    ({}, {"options": {"preallocate": "false"}, "options_are_text": True}, "options as text", r"wants numbers", "False"),
    (
        {NEW: "0.9"},
        {"options": {"memory_fraction": 0.5}},
        "overridden",
        r"the variable changes nothing",
        f"unset {NEW}",
    ),
    ({OLD: "0.9"}, {"options": {"memory_fraction": 0.5}}, "overridden", r"hands the option over last", f"unset {OLD}"),
    ({PREALLOCATE: "false"}, {"options": {"preallocate": True}}, "overridden", r"changes nothing", "unset"),
    ({POOL: "1"}, {"options": {"collective_memory_size": 1}}, "overridden", r"changes nothing", "unset"),
    (
        {},
        {"memory_flags": ("--xla_gpu_command_buffer_update_mode=CAPTURE_CMD_NEVER_UPDATE",)},
        "allocator replaced",
        r"takes the allocator vmm",
        f"export {ALLOCATOR}=vmm",
    ),
]


@pytest.mark.parametrize(("variables", "more", "kind", "why", "line"), TRAPS, ids=lambda value: str(value)[:40])
def test_each_trap_is_found_explained_and_refused(variables, more, kind, why, line):
    facts = seen(variables, **more)
    (found,) = findings(facts)
    assert found.kind == kind
    assert line in found.type_next
    for name, value in variables.items():
        assert f"{name}={value}" in found.given or name not in found.given
    preset = Preset(name="mine", environment=EnvironmentSettings(collective_pool_bytes=2**29))
    with pytest.raises(EnvironmentSettingError, match=r"(?s)^mine: nothing was set\..*" + why):
        choose(preset, facts)


TOGETHER = [
    ({NEW: "1.0"}, {}, "nothing left for CUDA", r"The pool takes all of the GPU", f"export {NEW}=0.9"),
    (
        {OLD: "0.98", PREALLOCATE: "true"},
        {},
        "nothing left for CUDA",
        r"outside of it and then fail",
        f"export {OLD}=0.9",
    ),
    ({ALLOCATOR: "cuda_async", NEW: "1"}, {}, "nothing left for CUDA", r"NCCL and CUDA graphs", f"export {NEW}=0.9"),
    ({}, {"options": {"memory_fraction": 0.99}}, "nothing left for CUDA", r"takes all", "{'memory_fraction': 0.9}"),
    ({ALLOCATOR: "platform", PREALLOCATE: "true"}, {}, "no pool", r"change nothing", f"unset {PREALLOCATE} "),
    ({ALLOCATOR: "Platform", OLD: "0.5"}, {}, "no pool", r"every buffer from the driver", f"unset {OLD} "),
    ({ALLOCATOR: "platform", POOL: "512", NEW: "0.9"}, {}, "no pool", r"It has no pool", f"unset {NEW}; unset {POOL} "),
    ({PREALLOCATE: "1"}, {"options": {"allocator": "platform"}}, "no pool", r"no pool", f"unset {PREALLOCATE} "),
    ({NEW: "1.5", UNIFIED: "1", ALLOCATOR: "cuda_async"}, {}, "no unified memory", r"more than the GPU has", "=bfc"),
]


@pytest.mark.parametrize(("variables", "more", "kind", "why", "line"), TOGETHER, ids=lambda value: str(value)[:40])
def test_settings_that_are_right_alone_and_wrong_together_are_told_and_not_refused(variables, more, kind, why, line):
    here = seen(variables, **more)
    (found,) = findings(here)
    assert found.kind == kind
    assert re.search(why, found.why)
    assert line in f"{found.type_next} "
    assert settings_findings(here) == ()


FATAL = {"both fractions", "no fraction", "unknown allocator", "allocator of a later version", "no whole number"}
HERE = importlib.metadata.version("jaxlib")


@pytest.mark.core
@pytest.mark.parametrize(
    ("variables", "kind"), [(said, kind) for said, more, kind, *_ in TRAPS if said and not more.get("options")]
)
def test_jax_itself_fails_where_we_say_so_and_nowhere_else(variables, kind, monkeypatch):
    """The function of the installed jaxlib that reads the variables, GPU or not."""
    fails = kind in FATAL and (kind != "allocator of a later version" or version_numbers(HERE) < (0, 11))
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=r".") if fails else contextlib.nullcontext():
        xla_client.generate_pjrt_gpu_plugin_options()
    assert fails == bool(FATAL & {found.kind for found in settings_findings(seen(variables, jaxlib=HERE))})


@pytest.mark.core
def test_jax_itself_reads_what_a_preset_sets(monkeypatch):
    settings = EnvironmentSettings(
        allocator="cuda_async", preallocate=False, fraction=0.83, collective_pool_bytes=2**29
    )
    for name, text in choose(Preset(name="all", environment=settings), seen()).set.items():
        monkeypatch.setenv(name, text)
    read = xla_client.generate_pjrt_gpu_plugin_options()
    assert (read["allocator"], read["preallocate"], read["memory_fraction"]) == ("cuda_async", False, 0.83)
    assert read["collective_memory_size"] == 2**29


RIGHT = [
    ({}, {}),
    ({NEW: "1.0", PREALLOCATE: "false"}, {}),  # a limit that the pool grows to
    ({NEW: "0.95"}, {}),
    ({ALLOCATOR: "platform", PREALLOCATE: "false"}, {}),
    ({HOST_LIMIT: "128", "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE": "true"}, {}),
    ({NEW: ".9", PREALLOCATE: "false", ALLOCATOR: "BFC", POOL: "0"}, {}),
    ({OLD: "0.9", PREALLOCATE: "False", ALLOCATOR: "cuda_async", "TF_GPU_ALLOCATOR": "cuda_malloc_async"}, {}),
    ({NEW: "1.5", "TF_FORCE_UNIFIED_MEMORY": "1", PREALLOCATE: "0"}, {}),
    ({PREALLOCATE: "true", ALLOCATOR: "address"}, {}),
    ({PREALLOCATE: "1", ALLOCATOR: "vmm"}, {"jaxlib": "0.10.2"}),
    ({ALLOCATOR: "platform"}, {"jaxlib": "0.11.0"}),
    ({ALLOCATOR: "vmm"}, {"plugins": {"rocm": "x 1", "cuda": "y 0.12.0"}}),
    ({PREALLOCATE: "", ALLOCATOR: "", NEW: "", OLD: "0.5", POOL: "", TFRT: ""}, {}),
    ({NEW: "0.50", PREALLOCATE: "0"}, {"options": {"memory_fraction": 0.5, "preallocate": False}}),
    ({POOL: "512"}, {"options": {"collective_memory_size": 2**29}}),
    ({ALLOCATOR: "bfc"}, {"options": {"allocator": "bfc"}, "options_are_text": True}),
    ({"TF_GPU_ALLOCATOR": "cuda_malloc_async"}, {"options": {"allocator": "cuda_async"}}),
    ({}, {"hardware": ("cuda",), "plugins": {"cuda": "jax-cuda12-plugin 0.12.0"}, "platforms": ("cuda", "cpu")}),
    ({}, {"hardware": ("cuda",), "platforms": ("cpu",)}),
    (
        {},
        {
            "memory_flags": (
                "--xla_gpu_command_buffer_update_mode=ALWAYS_UPDATE",
                "--xla_gpu_memory_limit_slop_factor=9",
            )
        },
    ),
]


@pytest.mark.parametrize(("variables", "more"), RIGHT)
def test_what_is_right_is_left_alone(variables, more):
    assert findings(seen(variables, **more)) == ()


@pytest.mark.parametrize(
    ("variables", "more", "name"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, {"platforms": ("cuda", "cpu")}, "CUDA_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": "-1", PREALLOCATE: "false"}, {}, "CUDA_VISIBLE_DEVICES"),
        ({"HIP_VISIBLE_DEVICES": "-1"}, {"platforms": ("rocm",)}, "HIP_VISIBLE_DEVICES"),
    ],
)
def test_a_gpu_that_is_hidden_and_spoken_of_is_a_finding_of_the_machine_only(variables, more, name):
    here = seen(variables, plugins={"cuda": "jax-cuda12-plugin 0.12.0", "rocm": "jax-rocm7-plugin 0.9"}, **more)
    (found,) = findings(here)
    assert (found.kind, found.type_next) == ("GPU hidden", f"unset {name}")
    assert found.given.startswith(f"{name}={variables[name]} hides every GPU, beside ")
    assert settings_findings(here) == ()
    hidden = seen({"CUDA_VISIBLE_DEVICES": ""}, plugins={"cuda": "jax-cuda12-plugin 0.12.0"})
    assert findings(hidden) == ()  # nothing is said of it: it was meant


TEXTS = {
    ALLOCATOR: (None, "default", "bfc", "cuda_async", "platform", "vmm", "PLATFORM", "pool"),
    PREALLOCATE: (None, "true", "false", "no"),
    NEW: (None, "0.5", "0.95", "1.0", "1.5", "90"),
    OLD: (None, "0.5", "1"),
    POOL: (None, "0", "512", "x"),
    UNIFIED: (None, "1", "0"),
}


def is_bad(said, jaxlib):
    """What is known to go wrong, told by itself: JAX fails, a share that leaves nothing, a setting that nothing uses."""
    fractions = [said[name] for name in (NEW, OLD) if said.get(name)]
    allocator = said.get(ALLOCATOR, "default").lower()
    takes_all = said.get(PREALLOCATE) != "false"
    share = float(fractions[0]) if fractions else 0.75
    unified = said.get(UNIFIED) == "1"
    real_platform = allocator == "platform" and jaxlib == "0.12.0"
    return (
        len(fractions) == 2
        or allocator not in ("default", "bfc", "cuda_async", "platform", "vmm")
        or (allocator == "platform" and not real_platform)
        or said.get(PREALLOCATE) == "no"
        or said.get(POOL) == "x"
        or (share > 1 and (not unified or allocator not in ("default", "bfc")))
        or (0.95 < share <= 1 and takes_all and not unified and allocator in ("default", "bfc", "cuda_async"))
        or (real_platform and bool(fractions or said.get(PREALLOCATE) == "true" or said.get(POOL) == "512"))
    )


def typed(line, said):
    """The variables after a line of shell, as far as the advice is one: ``export A=b``, ``unset A B``, joined by ``;``."""
    after = dict(said)
    for part in line.partition("   #")[0].split("; "):
        word, *rest = part.split()
        if word == "export":
            name, _, value = rest[0].partition("=")
            after[name] = value
        elif word == "unset":
            for name in rest:
                after.pop(name, None)
    return after


@pytest.mark.parametrize("jaxlib", ["0.12.0", "0.10.2"])
def test_no_bad_combination_is_silent_no_right_one_is_told_and_each_line_mends_what_it_is_for(jaxlib):
    names = list(TEXTS)
    for texts in itertools.product(*TEXTS.values()):
        said = {name: text for name, text in zip(names, texts, strict=True) if text is not None}
        found = findings(seen(said, jaxlib=jaxlib))
        assert bool(found) == is_bad(said, jaxlib), (said, [each.kind for each in found])
        for each in found:
            after = typed(each.type_next.partition("   #")[0], said)
            left = [other.kind for other in findings(seen(after, jaxlib=jaxlib))]
            assert each.kind not in left, (said, each)


def test_an_accelerator_without_its_plugin_is_a_finding_of_the_machine_only():
    for more, why in [
        ({"hardware": ("cuda",)}, "JAX has no plugin for it and runs on the CPU."),
        ({"platforms": ("cuda", "cpu")}, "JAX sees no NVIDIA GPU and goes on without a word."),
        ({"platforms": ("rocm",)}, "JAX fails at its first use."),
    ]:
        (found,) = findings(seen(**more))
        assert (found.kind, found.why) == ("no plugin", why)
        assert settings_findings(seen(**more)) == ()


PLATFORMS = [
    (
        {"platforms_text": "gpu"},
        "no plugin",
        r"gpu for each of cuda, rocm, oneapi, and wants them all.*fails",
        "JAX_PLATFORMS=cpu",
    ),
    ({"platforms_text": "gpu,cpu", "plugins": {"cuda": "x 0.12.0"}}, "no plugin", r"fails", "JAX_PLATFORMS=cuda,cpu"),
    ({"platforms_text": "gpu", "plugins": {"rocm": "x 1"}}, "no plugin", r"fails", "JAX_PLATFORMS=rocm"),
    ({"platforms_text": "cud,cpu"}, "unknown platform", r"Did you mean `cuda`\?.*fails", "JAX_PLATFORMS=cuda,cpu"),
    ({"platforms_text": "cpu, cpu"}, "unknown platform", r"blanks too.*fails", "JAX_PLATFORMS=cpu"),
    ({"platforms_text": "cpu,"}, "unknown platform", r"fails", "JAX_PLATFORMS=cpu"),
    ({"platforms_text": "CPU"}, "unknown platform", r"Did you mean `cpu`", "JAX_PLATFORMS=cpu"),
    ({"platforms_text": "bogus"}, "unknown platform", r"no plugin here has this name\. JAX fails", "lets JAX choose"),
    ({"platform_name": "GPU"}, "no plugin", r"no plugin for cuda or rocm or oneapi here", "JAX_PLATFORMS=cpu"),
    ({"platform_name": "tpu"}, "no plugin", r"fails", "JAX_PLATFORMS=cpu"),
    ({"platform_name": "tpu", "plugins": {"cuda": "x 0.12.0"}}, "no plugin", r"fails", "JAX_PLATFORMS=cuda"),
    ({"platform_name": "bogus"}, "unknown platform", r"fails", "JAX_PLATFORMS=cpu"),
]


@pytest.mark.parametrize(("more", "kind", "why", "line"), PLATFORMS, ids=lambda value: str(value)[:40])
def test_a_platform_that_cannot_start_is_a_finding_of_the_machine_only(more, kind, why, line):
    (found,) = findings(seen(**more))
    assert found.kind == kind
    assert re.search(why, found.why)
    assert line in found.type_next
    assert settings_findings(seen(**more)) == ()


@pytest.mark.parametrize(
    "more",
    [
        {"platforms_text": "gpu", "plugins": {"rocm": "x 1"}, "other_plugins": ("oneapi_plugin",)},
        {"platforms_text": "neuron,cpu", "other_plugins": ("neuron_plugin",)},
        {"platform_name": "cpu"},
        {"platform_name": "gpu", "plugins": {"rocm": "x 1"}},
    ],
)
def test_a_platform_that_can_start_is_none(more):
    assert findings(seen(**more)) == ()


UNREADABLE = [
    ("allocator", ("allocator",), True),
    ("allocator:bfc;", ("",), True),
    ('{"allocator":"bfc","preallocate":false}', ('{"allocator":"bfc","preallocate":false}',), True),
    ('{"allocator":"bfc"}', ('{"allocator":"bfc"}',), False),
    ("allocator:bfc; preallocate:0", (" preallocate:0",), False),
    ("allocator:bfc", (), False),
    ("", (), False),
]


@pytest.mark.core
@pytest.mark.parametrize(("text", "parts", "fails"), UNREADABLE)
def test_options_that_jax_cannot_read_are_a_finding_of_the_settings(text, parts, fails):
    before = jax.config.jax_pjrt_client_create_options
    jax.config.update("jax_pjrt_client_create_options", text)
    try:
        looked = process_facts(started=False)
        with pytest.raises(RuntimeError, match="key:value") if fails else contextlib.nullcontext():
            xla_bridge._options_from_jax_configs("tpu")  # a test may look where the library may not
    finally:
        jax.config.update("jax_pjrt_client_create_options", before)
    assert looked.unreadable_options == parts
    found = [each for each in settings_findings(looked) if each.kind == "options that JAX cannot read"]
    assert [repr(part) in each.given for part, each in zip(parts, found, strict=True)] == [True] * len(parts)
    assert all(("fails" in each.why) == fails for each in found)


def test_a_plugin_of_another_jaxlib_is_a_finding_of_the_machine_only():
    mixed = seen(plugins={"cuda": "jax-cuda12-plugin 0.11.1", "rocm": "jax-rocm7-plugin 0.9"})
    (found,) = findings(mixed)
    assert found.given == "jax-cuda12-plugin 0.11.1 beside jaxlib 0.12.0."
    assert found.type_next == "Is the plugin of this JAX installed? Its extra is jax[cuda12]==0.12.0."
    assert settings_findings(mixed) == ()


def test_variables_that_nothing_reads_are_told_from_others():
    spelt = ["XLA_PYTHON_CLIENT_PREALOCATE", "XLA_CLIENT_MEMORY_FRACTION", "xla_python_client_allocator"]
    others = ["XLA_FLAGS", "JAX_PLATFORMS", "HF_TOKEN", "XLA_PYTHON", "PYTHONPATH", "CLIENT_SECRET", *SHOWN]
    assert unread_names([*others, *spelt]) == tuple(sorted(spelt))


def test_flags_are_shown_where_they_concern_memory_and_paths_are_not():
    text = "--xla_dump_to=/secret/memory --xla_gpu_memory_limit_slop_factor=90 word --xla_tpu_rematerialization_algo=x"
    assert memory_flags(text) == ("--xla_gpu_memory_limit_slop_factor=90", "--xla_tpu_rematerialization_algo=x")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0.10.2", (0, 10, 2)), ("0.12.0.1", (0, 12, 0, 1)), ("0.11.1.dev3+g5", (0, 11, 1)), ("x", ())],
)
def test_versions(text, numbers):
    assert version_numbers(text) == numbers


# choosing
def test_a_value_of_the_users_is_never_overwritten():
    user = {NEW: "0.4", PREALLOCATE: "false", ALLOCATOR: "cuda_async", POOL: "64"}
    preset = load_preset("gpu_preallocate", environment={"allocator": "bfc", "collective_pool": "512MiB"})
    with pytest.raises(EnvironmentSettingError) as caught:
        choose(preset, seen(user))
    told = str(caught.value)
    for name, value, wanted in [(NEW, "0.4", "0.9"), (PREALLOCATE, "false", "true"), (ALLOCATOR, "cuda_async", "bfc")]:
        assert f"{name} is {value}, and the preset has {wanted}." in told
    kept = "{'allocator': 'cuda_async', 'preallocate': False, 'fraction': 0.4, 'collective_pool': '64MiB'}"
    assert f"jm.apply_environment(jm.load_preset('gpu_preallocate', environment={kept}))" in told
    # What it says to type works.
    mine = load_preset("gpu_preallocate", environment=eval(kept))  # noqa: S307 - our own text
    assert choose(mine, seen(user)).set == {}


def test_the_old_name_and_the_options_count_as_said():
    done = choose(load_preset("gpu_preallocate"), seen({OLD: ".90"}, options={"preallocate": True}))
    assert (done.set, done.already) == ({}, {OLD: ".90", "jax_pjrt_client_create_options['preallocate']": "True"})
    with pytest.raises(EnvironmentSettingError, match=r"options\['memory_fraction'\] is 0.5, and the preset has 0.9"):
        choose(load_preset("gpu_preallocate"), seen(options={"memory_fraction": 0.5}))


def test_a_preset_whose_own_allocator_is_a_trap_here_is_refused():
    with pytest.raises(EnvironmentSettingError, match=r"gpu_platform_debug: nothing was set\.\n.*silently runs"):
        choose(load_preset("gpu_platform_debug"), seen(jaxlib="0.10.2"))
    assert choose(load_preset("gpu_platform_debug"), seen()).set == {ALLOCATOR: "platform"}


def test_too_late_says_that_what_started_it_is_unknown_and_what_to_type():
    with pytest.raises(EnvironmentSettingError, match="too late for") as caught:
        choose(load_preset("donate", "gpu_shared"), seen({NEW: "0.4"}, started=True))
    assert "what started it is unknown" in str(caught.value)
    assert "jm.apply_environment(jm.load_preset('donate', 'gpu_shared'))" in str(caught.value)
    assert f"{PREALLOCATE}=true python" in str(caught.value)
    assert f"{NEW}=0.4" not in str(caught.value)


def test_a_preset_of_a_file_is_named_by_the_file_and_not_by_its_stem(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("environment: {fraction: 0.8}")
    call = f"jm.load_preset('donate', {str(mine)!r})"
    assert load_preset("donate", mine) == load_preset("donate", str(mine))
    for ask in (lambda preset: choose(preset, seen(started=True)), require_applied):
        with pytest.raises(EnvironmentSettingError) as caught:
            ask(load_preset("donate", mine, monitor={"window_s": 2.0}))
        assert f"jm.apply_environment({call})" in str(caught.value)
    assert f"To do without it: {call}.policy for a step, .monitor for a monitor" in str(caught.value)


def test_a_preset_without_environment_is_refused():
    with pytest.raises(
        EnvironmentSettingError, match=r"donate sets nothing of the environment.*'donate', 'gpu_growth'"
    ):
        choose(load_preset("donate"), seen())


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            ("gpu_growth", "tpu_default"),
            r"tpu_default.yaml:7:3.*TPUs read no such setting(.|\n)*`preallocate` at gpu_growth",
        ),
        (("gpu_rocm", "gpu_async"), r"gpu_async.yaml.*exists on NVIDIA GPUs only"),
    ],
)
def test_parts_that_contradict_each_other_are_refused_where_they_stand(parts, words):
    with pytest.raises(ValueError, match=words):
        load_preset(*parts)


VALUES = {
    "allocator": st.sampled_from(["default", "bfc", "cuda_async", "vmm", "platform", "address"]),
    "preallocate": st.booleans(),
    "fraction": st.floats(0.001, 1),
    "collective_pool_bytes": st.integers(1, 10**6).map(lambda mib: mib * 2**20),
}
SETTINGS = st.fixed_dictionaries({}, optional=VALUES).filter(bool).map(lambda said: EnvironmentSettings(**said))


@given(first=SETTINGS, second=SETTINGS)
def test_applied_twice_changes_nothing_and_another_preset_never_overwrites(first, second):
    variables = dict(choose(Preset(name="first", environment=first), seen()).set)
    again = choose(Preset(name="first", environment=first), seen(variables, started=True))
    assert (again.set, again.already) == ({}, variables)
    wanted = wanted_variables(second)
    differs = any(wanted[name] != value for name, value in variables.items() if name in wanted)
    with (
        pytest.raises(EnvironmentSettingError, match="is set otherwise already")
        if differs
        else contextlib.nullcontext()
    ):
        done = choose(Preset(name="second", environment=second), seen(variables))
        assert not set(done.set) & set(variables)
        assert {**variables, **done.set} == {**wanted_variables(first), **wanted}


@pytest.mark.core
@pytest.mark.parametrize("text", ["false", "False", "0", "FALSE", "no", "true", "True", "1", "off", " 0"])
def test_what_counts_as_false_is_what_jax_counts(text, monkeypatch):
    monkeypatch.setenv(PREALLOCATE, text)
    assert as_preallocate(text) == xla_client.generate_pjrt_gpu_plugin_options()["preallocate"]


def test_any_two_parts_of_the_environment_compose_or_are_refused():
    parts = [name for name in list_presets() if load_preset(name).environment != EnvironmentSettings()]
    assert len(parts) == 7
    for first, second in itertools.permutations(parts, 2):
        alone = [load_preset(name).environment for name in (first, second)]
        said, wins = alone
        platform = wins.platform or said.platform
        allocator = wins.allocator or said.allocator
        refused = (platform == "tpu" and bool(said.of_gpus() or wins.of_gpus())) or (platform, allocator) == (
            "rocm",
            "cuda_async",
        )
        with pytest.raises(PresetError, match="this environment is refused") if refused else contextlib.nullcontext():
            both = load_preset("fsdp", first, second)
            assert both.policy.sharding == "fsdp"
            for name in ("platform", *VALUES):
                value = getattr(wins, name)
                assert getattr(both.environment, name) == (getattr(said, name) if value is None else value)
