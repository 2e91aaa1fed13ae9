"""Loading: names, paths, overrides, composition, and what each kind of mistake answers."""

import dataclasses
import os
from pathlib import Path

import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.config.documents import shipped_folder
from jaxmem_callbacks.config.presets import parse_preset
from jaxmem_callbacks.records.errors import PresetError
from jaxmem_callbacks.records.presets import MonitorSettings


def written(tmp_path, text, name="my.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def problem(call, *args, **kwargs):
    with pytest.raises(PresetError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_without_arguments_the_step_stays_as_it_is():
    preset = jm.load_preset()
    assert preset.name == "monitor_only"
    assert preset.policy == jm.StepPolicy(remat="none", donate=())
    assert preset.monitor == MonitorSettings()
    assert preset.said == ("policy.donate", "policy.remat")


@pytest.mark.core
def test_parts_compose_and_later_keys_win():
    preset = jm.load_preset("monitor_only", "full_remat", "tight_headroom")
    assert preset.name == "monitor_only+full_remat+tight_headroom"
    assert preset.policy == jm.StepPolicy(remat="full", donate=())
    assert preset.monitor.near_oom_headroom == 0.2
    assert jm.load_preset("dots_remat", "full_remat").policy.remat == "full"
    assert jm.load_preset("full_remat", "dots_remat").policy.remat == "dots_saveable"
    assert preset.description == " ".join(
        jm.load_preset(name).description for name in ("monitor_only", "full_remat", "tight_headroom")
    )


def test_overrides_win_and_count_as_said():
    preset = jm.load_preset("full_remat", policy={"segments": 4}, monitor={"limit": "700MiB"}, description="mine")
    assert preset.policy == jm.StepPolicy(remat="full", segments=4)
    assert preset.monitor.limit_bytes == 700 * 2**20
    assert preset.description == "mine"
    assert preset.said == ("policy.remat", "policy.segments", "monitor.limit_bytes")
    assert jm.load_preset("full_remat", monitor={"limit_bytes": 1e9}).monitor.limit_bytes == 10**9
    assert jm.load_preset("full_remat", policy={"save": ["a", "b"]}).policy.save == ("a", "b")


def test_lists_are_replaced_not_joined(tmp_path):
    first = written(tmp_path, "policy: {remat: full, save: [a, b]}", "a.yaml")
    second = written(tmp_path, "policy: {save: [c]}", "b.yaml")
    preset = jm.load_preset(first, str(second))
    assert (preset.name, preset.policy.save) == ("a+b", ("c",))


def test_a_bare_word_is_a_name_and_a_path_is_a_path(tmp_path, monkeypatch):
    written(tmp_path, "policy: {remat: full}", "full_remat")
    monkeypatch.chdir(tmp_path)
    Path("donate").write_text("policy: {remat: full}")
    assert jm.load_preset("donate").policy.remat == "none"
    assert jm.load_preset(Path("donate")).policy.remat == "full"
    assert jm.load_preset(f".{os.sep}donate").policy.remat == "full"


def test_list_presets_is_what_is_shipped():
    assert jm.list_presets() == (
        "accumulate_4",
        "chunk_head",
        "donate",
        "dots_no_batch_remat",
        "dots_remat",
        "fsdp",
        "fsdp_tensor",
        "full_remat",
        "gpu_async",
        "gpu_growth",
        "gpu_platform_debug",
        "gpu_preallocate",
        "gpu_rocm",
        "gpu_shared",
        "monitor_only",
        "quiet_monitor",
        "recover",
        "recover_from_disk",
        "replicate",
        "tight_headroom",
        "tpu_default",
        "zero1",
    )


@pytest.mark.parametrize("word", ["off", "'off'", "disabled", "none", "None"])
def test_off_is_a_word_and_means_no_remat(word):
    assert parse_preset(f"policy: {{remat: {word}}}").policy.remat == "none"


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("limit: 1e9", "limit_bytes", 10**9),
        ("limit: 700MiB", "limit_bytes", 700 * 2**20),
        ("limit_bytes: 1.5 GB", "limit_bytes", 1_500_000_000),
        ("limit: 4096", "limit_bytes", 4096),
        ("limit: null", "limit_bytes", None),
        ("fragmentation_min: 0", "fragmentation_min_bytes", 0),
        ("jsonl_part: 8MiB", "jsonl_part_bytes", 8 * 2**20),
        ("jsonl_part: null", "jsonl_part_bytes", None),
        ("every_steps: 1e2", "every_steps", 100),
        ("every_steps: 2.0", "every_steps", 2),
        ("window_s: 2", "window_s", 2.0),
        ("window_s: .5", "window_s", 0.5),
        ("near_oom_headroom: 1.5e-1", "near_oom_headroom", 0.15),
    ],
)
def test_numbers_mean_what_they_look_like(text, field, value):
    assert getattr(parse_preset(f"monitor: {{{text}}}").monitor, field) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("monitor: {every_steps: 0777}", "text:1:24: `monitor.every_steps` is the text '0777'"),
        ("monitor: {every_steps: 1:30}", "is the text '1:30'"),
        ("monitor: {every_steps: 0x10}", "is the text '0x10'"),
        ("monitor: {every_steps: 1_000}", "is the text '1_000'"),
        ("monitor: {every_steps: true}", "is true.\n    Expected: a whole number of at least 1."),
        ("monitor: {every_steps: 1.5}", "is the number 1.5.\n    Expected: a whole number"),
        ("monitor: {every_steps: 0}", "is the number 0.\n    Expected: a whole number of at least 1."),
        ("monitor: {every_steps: " + "9" * 50 + "}", "is the text '9999"),
        ("monitor: {window_s: .inf}", "is the text '.inf'.\n    Expected: a number of seconds above 0."),
        ("monitor: {window_s: 1e999}", "is the text '1e999'"),
        ("monitor: {near_oom_headroom: 1}", "Expected: a number from 0 to below 1."),
        ("monitor: {fragmentation_share: 2}", "Expected: a number above 0 and up to 1."),
        ("monitor: {tensorboard: off}", "is the text 'off'. Write `false`.\n    Expected: true or false."),
        ("monitor: {jsonl: yes}", "Write `true`."),
        ("monitor: {jsonl_part: 12B}", "Expected: a size of at least 1KiB, such as 256MiB, or null."),
        ("monitor: {on_error: rise}", "Did you mean `raise`?\n    Expected: one of: raise, warn."),
        ("monitor: {limit: 12parsec}", "Expected: a size such as 700MiB or a whole number of bytes, or null."),
        ("monitor: {limit: 0}", "`monitor.limit` is the number 0."),
        ("monitor: {limit: -5}", "`monitor.limit` is the number -5."),
        ("monitor: {limit: '" + "9" * 400 + "'}", "(400 characters)"),
        ("monitor: {limit: 1, limit_bytes: 2}", "`monitor.limit` is given twice, also spelled `limit_bytes`."),
        ("monitor: {}\nmonitor: {}", "text:2:1: the key 'monitor' is given twice, first at line 1."),
        ("policy: {remat: ful}", "text:1:17: `policy.remat`: Unknown remat policy 'ful'. Did you mean `full`?"),
        ("policy: {remat: false}", "`policy.remat` is false. Write `none`."),
        ("policy: {remat: true}", "is true. Write `full`."),
        ("policy: {remat: null}", "`policy.remat` is null (nothing).\n    Expected: one of: dots_saveable,"),
        ("policy: {segments: four}", "Expected: a whole number of at least 1, blocks, or null."),
        ("policy: {save: context}", "is the text 'context'. Write `[context]`."),
        ("policy: {save: [a, 3]}", "text:1:20: `policy.save[1]` is the number 3.\n    Expected: a text."),
        ("policy: {donate: [a, 3]}", "`policy.donate[1]` is the number 3."),
        ("policy: {donate: state}", "Write `[state]`.\n    Expected: auto, a list of argument names"),
        ("policy: {donate: Auto}", "Write `auto`."),
        ("policy: {donate: true}", "`policy.donate` is true."),
        ("policy:", "text:1:8: `policy` is null (nothing). Delete the line or write `policy: {}`."),
        (
            "policy: full_remat",
            "`policy` is the text 'full_remat'.\n    Expected: a mapping with keys from: assume_fusion, chunks,",
        ),
        ("policy: [remat]", "`policy` is a list."),
        ("policy: {rematt: full}", "text:1:10: unknown key 'rematt' in `policy`. Did you mean `remat`?"),
        ("policy: {every_steps: 3}", "unknown key 'every_steps' in `policy`. It belongs under `monitor`."),
        ("remat: full", "unknown key 'remat'. It belongs under `policy`.\n"),
        ("polcy: {}", "Did you mean `policy`?\n    Allowed here: description, environment, monitor, policy, recovery."),
        ("1: 2", "text:1:1: unknown key '1'."),
        ("description: 7", "`description` is the number 7.\n    Expected: a text."),
    ],
)
def test_each_mistake_says_given_expected_where_and_next(text, words):
    message = problem(parse_preset, text)
    assert words in message
    assert message.endswith("Next: `jaxmem presets full_remat` prints a complete preset to compare with.")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("policy: {segments: 4}", "text:1:10: this policy is refused. remat='none' leaves the loss untouched"),
        ("policy: {remat: names}", "needs the names to keep"),
        ("policy: {segments: 4}", "Given here: `segments` at text:1:10."),
    ],
)
def test_contradictions_name_the_places(text, words):
    assert words in problem(parse_preset, text)


def test_a_contradiction_between_parts_names_every_source(tmp_path):
    path = written(tmp_path, "policy:\n  segments: 3\n")
    message = problem(jm.load_preset, "monitor_only", path, policy={"save": ["a"]})
    assert f"`remat` at monitor_only.yaml:6:3, `donate` at monitor_only.yaml:7:3, `segments` at {path}:2:3" in message
    assert message.startswith("override policy.save: this policy is refused.")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            {"policy": {"rematt": "full"}},
            "override policy.rematt: unknown key 'rematt' in `policy`. Did you mean `remat`?",
        ),
        (
            {"remat": "ful"},
            "override remat: unknown key 'remat'. It belongs under `policy`: type policy={'remat': 'full'}.\n",
        ),
        ({"limit": "700MiB"}, "It belongs under `monitor`: type monitor={'limit': '700MiB'}.\n"),
        ({"policy": {"every_steps": 3}}, "in `policy`. It belongs under `monitor`: type monitor={'every_steps': 3}.\n"),
        ({"save": ["x" * 80]}, "It belongs under `policy`: type policy={'save': ...}.\n"),
        ({"policy": {"segments": "4"}}, "override policy.segments: `policy.segments` is the text '4'."),
        ({"policy": {"segments": 10**80}, "monitor": 3}, "`monitor` is the number 3."),
        ({"monitor": {"window_s": float("inf")}}, "is the number inf."),
        ({"monitor": {"window_s": 10**80 * 1j}}, "is a Python complex."),
        ({"policy": jm.StepPolicy()}, "override policy: `policy` is a Python StepPolicy."),
        ({"polcy": {}}, "override polcy: unknown key 'polcy'. Did you mean `policy`?"),
        (
            {"policy__segments": 4},
            "override policy__segments: a joined name.\n    Expected: load_preset(..., policy={'segments': ...})",
        ),
        ({"monitor": {"every_steps": -(10**80)}}, "is a number with more than 60 digits."),
    ],
)
def test_overrides_are_checked_as_strictly(overrides, words):
    assert words in problem(jm.load_preset, "full_remat", **overrides)


def test_several_mistakes_are_reported_together_in_order(tmp_path):
    path = written(tmp_path, "descripton: x\npolicy:\n  rematt: full\n  segments: four\nmonitor:\n  jsonl: 3\n")
    lines = problem(jm.load_preset, path).splitlines()
    assert lines[0] == "4 problems:"
    assert [line.split(": ")[0] for line in lines[1:-1:2]] == [
        f"{path}:{place}" for place in ("1:1", "3:3", "4:13", "6:10")
    ]


def test_unknown_names_are_answered_with_the_nearest():
    message = problem(jm.load_preset, "ful_remat")
    assert (
        "Unknown preset 'ful_remat'. Did you mean `full_remat`? Expected one of: accumulate_4, chunk_head, donate, "
        in message
    )
    assert message.endswith("or a path such as ./ful_remat.yaml.\nNext: `jaxmem presets` describes each.")
    assert "a preset is named by int." in problem(jm.load_preset, 3)
    assert "a preset is named by bytes." in problem(jm.load_preset, b"donate")


def test_an_incomplete_installation_says_so(tmp_path):
    assert "The installation is incomplete." in problem(shipped_folder, tmp_path / "jaxmem_callbacks" / "config")


def test_a_wheels_own_folder_wins_over_a_checkouts(tmp_path):
    room = tmp_path / "jaxmem_callbacks" / "config"
    for folder in (room / "shipped", tmp_path / "configs"):
        folder.mkdir(parents=True)
        (folder / "preset.schema.json").write_text("{}")
    assert shipped_folder(room) == room / "shipped"


def test_presets_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        jm.load_preset().name = "other"
