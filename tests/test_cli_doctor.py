"""`jaxmem doctor` as a user types it: what it prints, what it hides, what it starts, and its exit codes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmem_callbacks.cli.backend_probe import devices_started
from jaxmem_callbacks.cli.doctor import figures_here, in_effect
from jaxmem_callbacks.environment.apply import start_findings
from jaxmem_callbacks.environment.process import version_numbers
from jaxmem_callbacks.records.environment import DeviceFacts, Finding, ProcessFacts

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parent.parent
JAXLIB = version_numbers(importlib.metadata.version("jaxlib"))
PLATFORM = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
WRONG = {
    "XLA_PYTHON_CLIENT_ALOCATOR": "hidden-value",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "FALSE",
    "XLA_CLIENT_MEM_FRACTION": "75",
    "HF_TOKEN": "hidden-token",
    "XLA_FLAGS": "--xla_dump_to=/hidden/folder --xla_gpu_memory_limit_slop_factor=90",
}


def typed(*arguments, then="", **variables):
    """Exit code, stdout and stderr of the command in a process with these variables and no others of XLA's."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("XLA_", "JAX_", "TF_"))}
    environment = kept | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | variables
    call = f"import sys\nfrom jaxmem_callbacks.cli.main import main\ncode = main({['doctor', *arguments]!r})"
    code = f"{call}\n{then}\nsys.exit(code)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


LOOKS = """
import os
print("JAX", "jax" in sys.modules)
"""


def test_a_sound_machine_exits_0_in_80_columns_and_jax_is_not_even_imported():
    code, out, err = typed(then=LOOKS)
    assert (code, err) == (0, "")
    assert "Nothing is wrong with these settings." in out
    assert out.endswith("JAX False\n")
    assert max(map(len, out.splitlines())) <= 80
    for name in (
        "allocator statistics",
        "largest free block",
        "live arrays",
        "array addresses",
        "compile-time analysis",
        "host memory",
    ):
        assert f"\n  {name} " in out


def test_what_is_wrong_exits_1_with_the_line_to_type_and_no_foreign_value():
    code, out, _ = typed(**WRONG)
    assert code == 1
    assert "\nWrong: 3\n" in out
    for line in ("export XLA_PYTHON_CLIENT_PREALLOCATE=false", "export XLA_CLIENT_MEM_FRACTION=0.75"):
        assert f"\n      {line}\n" in out
    assert "XLA_PYTHON_CLIENT_ALOCATOR is set. Nothing in JAX reads it. Did you mean" in out
    assert "--xla_gpu_memory_limit_slop_factor=90" in out
    assert "hidden" not in out


@pytest.mark.parametrize(
    ("variables", "told", "line"),
    [
        ({"XLA_CLIENT_MEM_FRACTION": "1.0"}, "The pool takes all of the GPU", "export XLA_CLIENT_MEM_FRACTION=0.9"),
        (
            {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.97", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"},
            "The pool takes all of the GPU",
            "export XLA_PYTHON_CLIENT_MEM_FRACTION=0.9",
        ),
        (
            {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"},
            "It has no pool",
            "unset XLA_PYTHON_CLIENT_PREALLOCATE",
        ),
    ],
)
def test_what_is_wrong_together_exits_1(variables, told, line):
    code, out, _ = typed(**variables)
    assert code == 1
    if "platform" in variables.values() and JAXLIB < (0, 11):
        told, line = "silently runs the default", "unset XLA_PYTHON_CLIENT_ALLOCATOR"
    assert told in " ".join(out.split())
    assert f"\n      {line}" in out


def test_an_allocator_without_a_pool_is_not_shown_with_one():
    rows = {name: value for name, value, _ in in_effect(ProcessFacts(variables=PLATFORM, jaxlib="0.12.0"))}
    assert rows["allocator"] == "platform"
    assert {rows[name] for name in ("preallocate", "fraction", "pool for collectives")} == {
        "none: the platform allocator has no pool"
    }
    was = {name: value for name, value, _ in in_effect(ProcessFacts(variables=PLATFORM, jaxlib="0.10.2"))}
    assert was["preallocate"] == "yes, at the first allocation"  # that version runs the default pool


def test_json_has_the_same_and_start_asks_the_devices():
    then = "import jax, os; print(jax.live_arrays(), os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'])"
    code, out, _ = typed("--json", "--start", then=then, **WRONG)
    assert code == 1
    text, _, last = out.removesuffix("\n").rpartition("\n")
    assert last == "[] FALSE", "nothing was allocated, and the variable is the user's again"
    told = json.loads(text)
    assert [finding["kind"] for finding in told["findings"]] == [
        "fraction out of range",
        "false that is true",
        "read by nothing",
    ]
    assert [device["label"] for device in told["devices"]] == ["cpu:0"]
    assert {figure["name"]: figure["exists"] for figure in told["figures"]}["allocator statistics"] is False
    assert "hidden" not in out


def test_a_jax_that_does_not_start_is_a_finding():
    code, out, _ = typed("--start", JAX_PLATFORMS="rocm,cpu")
    assert code == 1
    plain = " ".join(out.split())
    assert "JAX does not start. Its error: Unable to initialize backend 'rocm'" in plain
    assert "JAX_PLATFORMS=rocm,cpu, and JAX has no plugin for rocm here. JAX fails at its first use." in plain


@pytest.mark.parametrize("said", ["JAX_PLATFORMS=gpu", "JAX_PLATFORMS=cud,cpu", "JAX_PLATFORM_NAME=bogus"])
def test_a_platform_that_cannot_start_is_found_before_and_jax_agrees(said):
    name, _, text = said.partition("=")
    code, out, _ = typed("--start", "--json", **{"JAX_PLATFORMS": "", name: text})
    assert code == 1
    kinds = [finding["kind"] for finding in json.loads(out)["findings"]]
    assert kinds == ["no plugin" if text == "gpu" else "unknown platform", "no start"]


def test_a_flag_that_ends_the_process_is_a_finding_with_xlas_own_words():
    code, out, err = typed("--start", "--json", XLA_FLAGS="--xla_bogus_flag=1")
    assert code == 1
    (found,) = json.loads(out)["findings"]
    assert found["kind"] == "no start"
    assert "Unknown flag in XLA_FLAGS: --xla_bogus_flag=1" in found["why"]
    assert found["type_next"].startswith("unset XLA_FLAGS")
    assert "Unknown flag" in err, "what JAX logs is shown"


def test_of_several_flags_xla_says_it_in_the_plural():
    _, out, _ = typed("--start", "--json", XLA_FLAGS="--xla_bogus_flag=1 --xla_other_bogus_flag=1")
    (found,) = json.loads(out)["findings"]
    assert "--xla_other_bogus_flag" in found["why"]
    assert found["type_next"].startswith("unset XLA_FLAGS")


@pytest.mark.slow
def test_of_a_start_that_python_ends_the_error_is_told_and_no_line_of_its_traceback(monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "maybe")
    failed = devices_started()
    assert isinstance(failed, Finding)
    assert re.search(r"\(exit code 1\)\. Its last words: \w*Error: .*maybe", failed.why), failed.why


@pytest.mark.slow
def test_a_start_that_takes_too_long_is_a_finding():
    failed = devices_started(limit_s=0.01)
    assert isinstance(failed, Finding)
    assert failed.kind == "no start"
    assert "within 0.01 seconds" in failed.why


def test_a_start_that_fell_back_to_the_cpu_is_a_finding():
    here = [DeviceFacts(label="cpu:0", platform="cpu", kind="cpu", statistics=None, total_bytes=None)]
    (found,) = start_findings(here, ProcessFacts(hardware=("cuda",)))
    assert str(found).startswith("JAX fell back to the CPU. It runs on cpu:0 although this machine shows cuda hardware")
    assert start_findings(here, ProcessFacts(hardware=("cuda",), platforms=("cpu",))) == ()
    assert start_findings(here, ProcessFacts(plugins={"cuda": "for compiling only"})) == ()
    assert start_findings([device(FULL)], ProcessFacts(hardware=("cuda",))) == ()


def test_a_plugin_of_another_jaxlib_is_a_finding(tmp_path):
    plugin = tmp_path / "jax_cuda12_plugin-0.1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: jax-cuda12-plugin\nVersion: 0.1\n")
    code, out, _ = typed(JAX_PLATFORMS="", PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path)]))
    assert code == 1
    assert "jax-cuda12-plugin 0.1 beside jaxlib" in out
    assert "JAX runs on    unknown before a start" in out


def figures(seen, devices=None, **more):
    given = {"compilers": {"cuda": {}, "tpu": {"libtpu": "0.1"}}, "resident_bytes": 2**20, "has_driver": False} | more
    return {figure.name: (figure.exists, figure.text) for figure in figures_here(seen, devices, **given)}


def device(statistics, platform="cuda"):
    return DeviceFacts(label="gpu:0", platform=platform, kind="x", statistics=statistics, total_bytes=None)


GPU = ProcessFacts(jaxlib="0.12.0", plugins={"cuda": "x 1"}, hardware=("cuda",))
FULL = {"bytes_in_use": 1, "bytes_limit": 9, "pool_bytes": 9, "largest_free_block_bytes": 8}


@pytest.mark.parametrize(
    ("seen", "devices", "statistics", "largest"),
    [
        (ProcessFacts(), None, False, False),
        (GPU, None, None, None),
        (ProcessFacts(platforms=("cpu",), plugins={"cuda": "x 1"}), None, False, False),
        (ProcessFacts(platforms=("cuda", "cpu")), None, None, None),
        (GPU, [device(FULL)], True, True),
        (GPU, [device(FULL | {"pool_bytes": 0, "largest_free_block_bytes": 0})], True, None),
        (GPU, [device({"bytes_in_use": 1, "largest_free_block_bytes": 0})], True, False),
        (GPU, [device(None)], False, False),
        (ProcessFacts(jaxlib="0.10.2", plugins={"cuda": "x 1"}), [device(FULL)], True, False),
        (ProcessFacts(jaxlib="0.10.2"), [device(FULL, "tpu")], True, True),
    ],
)
def test_a_figure_exists_or_not_or_is_unknown_with_the_reason(seen, devices, statistics, largest):
    told = figures(seen, devices)
    assert (told["allocator statistics"][0], told["largest free block"][0]) == (statistics, largest)
    assert all(words for _, words in told.values())


def test_compilers_the_driver_and_the_host_are_told_as_they_are():
    told = figures(GPU, has_driver=True, resident_bytes=None)
    assert told["compile-time analysis"][1].startswith(
        "of the attached device, and of absent ones: tpu (libtpu 0.1); no comp"
    )
    assert told["memory by the driver"][0] is True
    assert told["host memory"] == (False, "the operating system refuses")
    silent = ProcessFacts(variables={"XLA_PYTHON_CLIENT_ALLOCATOR": "vmm"}, jaxlib="0.12.0")
    assert "the allocator vmm reports none" in figures(silent, [device(None)])["allocator statistics"][1]


def test_what_is_in_effect_names_its_source():
    said = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4", "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB": "512"}
    assert in_effect(ProcessFacts(variables=said, options={"preallocate": False})) == (
        ("allocator", "default (BFC)", "JAX's default"),
        ("fraction", "0.4", "XLA_PYTHON_CLIENT_MEM_FRACTION=0.4"),
        ("preallocate", "False", "jax_pjrt_client_create_options['preallocate']"),
        ("pool for collectives", "512 MiB", "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB=512"),
    )
