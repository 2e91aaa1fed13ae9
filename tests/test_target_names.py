"""Names of hardware that is not there: one spelling each, what a wrong one is told, and where its compiler is found."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from typing import Any

import pytest

from jaxmem_callbacks.programs.targets.compilers import (
    compiler_versions,
    folder_to_fill,
    require_compiler,
    target_folders,
)
from jaxmem_callbacks.programs.targets.target import of_so_many, resolve_target, roomier, target_names
from jaxmem_callbacks.programs.targets.worker import worker_environment
from jaxmem_callbacks.records.errors import TargetError
from tests.target_step import GIB, needs_compiler

PYPROJECT = pathlib.Path(__file__).parents[1] / "pyproject.toml"


@pytest.mark.parametrize(
    ("text", "name", "devices", "topology"),
    [
        ("v5e", "v5e:1x1", 1, "v5e:1x1"),
        ("v5e:2x2", "v5e:2x2", 4, "v5e:2x2"),
        ("V5LITEPOD:4x4", "v5e:4x4", 16, "v5e:4x4"),
        ("v4:2x2x1", "v4:2x2x1", 4, "v4:2x2x1"),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 8, "tpu7x:2x2x1"),
        ("7x:2x2x1", "tpu7x:2x2x1", 8, "tpu7x:2x2x1"),
        ("v3", "v3:2x2", 8, "v3:2x2"),
        ("trillium", "v6e:1x1", 1, "v6e:1x1"),
        ("h100_pcie", "h100_pcie", 1, "1x1x1"),
        ("H100-SXM:8", "h100_sxm:8", 8, "1x1x8"),
        ("RTX-4090", "rtx4090", 1, "1x1x1"),
        ("l40s:4", "l40s:4", 4, "1x1x4"),
        ("a100_sxm_80:64", "a100_sxm_80:64", 64, "1x8x8"),
        ("cpu", "cpu", 1, ""),
    ],
)
def test_names_resolve_to_one_spelling(text, name, devices, topology):
    target = resolve_target(text, require_installed=False)
    assert (target.name, target.device_count, target.topology) == (name, devices, topology)


def test_every_name_resolves_and_knows_its_memory():
    for name in target_names():
        target = resolve_target(name, require_installed=False)
        assert target.name.partition(":")[0] == name
        assert name == "cpu" or 7 * GIB < target.memory_bytes < 300 * GIB
        assert (target.target_config is not None) == (target.platform == "cuda")
    assert (
        'device_description_str: "NVIDIA H100 80GB HBM3"'
        in resolve_target("h100_sxm", require_installed=False).target_config
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10", r"'h10'\. Did you mean `h100_sxm`\? Expected one of: v2, .*h100_sxm.*h200.*'v5e:2x2' or 'h100_sxm:8'"),
        ("rtx_a600", r"Did you mean `a6000`\? Expected one of: .* a6000,"),
        (
            "v5p-64",
            r"Unknown target 'v5p-64'\. As Google Cloud counts, that is 32 chips: `v5p:2x4x4`\. Expected one of: ",
        ),
        ("v4-8", r"that is 4 chips: `v4:2x2x1`\."),
        ("v5litepod-16", r"that is 16 chips: `v5e:4x4`\."),
        ("v6e-1", r"that is 1 chip: `v6e:1x1`\."),
        ("v5p-200000", r"^Unknown target 'v5p-200000'\. (Did you mean `v5p`\? )?Expected one of: "),
        ("v5p-7", r"Unknown target 'v5p-7'\. Did you mean `v5p`\?"),
        ("v5e-21", r"^Unknown target 'v5e-21'\. Did you mean `v5e`\? Expected one of: "),
        ("tpu-v5e-8", r"that is 8 chips: `v5e:2x4`\."),
        ("tpu-v5p", r"Did you mean `v5p`\? "),
        ("TPU v5 lite", r"Did you mean `v5e`\? "),
        ("a100_80gb_sxm", r"Did you mean `a100_sxm_80`\? "),
        ("NVIDIA A100 40GB:4", r"Did you mean `a100_sxm_40`\? "),
        ("Tesla V100-SXM2-32GB", r"^Unknown target 'Tesla V100-SXM2-32GB'\. Its compiler is not to be had"),
        (
            "V100",
            r"'V100'\. Its compiler is not to be had without the hardware: plan on a machine that has it, without a",
        ),
        ("mi300x", r"Its compiler is not to be had without the hardware"),
        ("AMD Instinct MI250X", r"Its compiler is not to be had without the hardware"),
        ("gfx942", r"Its compiler is not to be had without the hardware"),
        ("metal", r"Its compiler is not to be had without the hardware"),
        ("GH200", r"No figures of it are known here: plan for one like it, such as `\w+`, and give as the budget what"),
        ("l40", r"No figures of it are known here: plan for one like it, such as `l40s`, and give"),
        ("NVIDIA A30", r"No figures of it are known here: plan for one like it"),
        ("gpu", r"'gpu'\. That is a kind of hardware: name the card or the generation\. Expected one of"),
        ("cuda:0", r"That is a kind of hardware"),
        (
            "NVIDIA GeForce RTX 4080",
            r"4080'\. No figures of it are known here: .* such as `rtx4090`, and give as the budget what JAX takes",
        ),
        (
            "rtx4080",
            r"^Unknown target 'rtx4080'\. No .* such as `rtx4090`, .* three quarters by default\. Expected one of: ",
        ),
        ("RTX A5000", r"such as `a6000`, and give"),
        ("rtx_409", r"Did you mean `rtx4090`\? "),
        ("cpu:8", r"Unknown target 'cpu:8'"),
        ("v5e:2x2x1", r"'v5e:2x2x1': a v5e topology has 2 dimensions of chips\. Type for example 'v5e:2x2'"),
        ("v5p:2", r"a v5p topology has 3 dimensions of chips\. Type for example 'v5p:2x2x2'"),
        (
            "h100 nvl",
            r"No figures of it are known here: plan for one like it, such as `h100_sxm`, and give as the budget",
        ),
        ("h100_sxm:12", r"'h100_sxm:12': expected a number of GPUs, at most 8 or a multiple of it .*'h100_sxm:8'"),
        ("h100_sxm:many", r"expected a number of GPUs"),
        ("h100_sxm:0", r"expected a number of GPUs"),
        ("h100_sxm:\uff12", r"expected a number of GPUs"),
        ("h100_sxm:\u0668", r"expected a number of GPUs"),
        ("v5e:\uff12x\uff12", r"a v5e topology has 2 dimensions of chips"),
    ],
)
def test_wrong_names_say_what_to_type(text, message):
    with pytest.raises(TargetError, match=message):
        resolve_target(text, require_installed=False)


@pytest.mark.parametrize(
    ("text", "cards"),
    [
        (
            "A100",
            "a100_pcie_80 (73.6 GiB), a100_sxm_40 (39.4 GiB), a100_sxm_80 (79.3 GiB). Type one of them, such as 'a100_sxm_80'.",
        ),
        ("a100_80gb:8", "a100_pcie_80 (73.6 GiB), a100_sxm_80 (79.3 GiB). Type one of them, such as 'a100_sxm_80:8'."),
        ("A100-SXM4", "a100_sxm_40 (39.4 GiB), a100_sxm_80 (79.3 GiB)."),
        ("h100", "h100_pcie (79.1 GiB), h100_sxm (79.1 GiB)."),
        ("NVIDIA H100 80GB", "h100_pcie (79.1 GiB), h100_sxm (79.1 GiB)."),
        ("RTX 6000", "rtx6000ada (47.5 GiB), rtx6000pro (96.0 GiB)."),
    ],
)
def test_a_name_that_several_cards_have_lists_them(text, cards):
    with pytest.raises(TargetError, match=r"fits [23] cards") as caught:
        resolve_target(text, require_installed=False)
    message = str(caught.value)
    assert message.startswith(f"Target {text!r} fits {cards.count('(')} cards: {cards}")
    typed = re.search("such as '(.*)'", message)[1]
    assert resolve_target(typed, require_installed=False).name == typed


@pytest.mark.parametrize(
    "name", [each for each in target_names() if resolve_target(each, require_installed=False).device_kind]
)
def test_the_makers_name_of_a_gpu_is_answered_with_ours_and_not_taken_for_it(name):
    kind = resolve_target(name, require_installed=False).device_kind
    with pytest.raises(TargetError, match=rf"Did you mean `{name}`\?"):
        resolve_target(kind, require_installed=False)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("v5e:3x7", "v5e:4x6, v5e:2x8, v5e:2x6, v5e:4x8. Type for example 'v5e:4x6'."),
        ("v5e:18x2", "v5e:16x2. Type for example 'v5e:16x2'."),
        ("v2:1x3", "v2:1x2, v2:1x4."),
        ("trillium:2x5", "v6e:2x4, v6e:2x6."),
        ("v5p:2x3x3", "v5p:2x2x3, v5p:2x4x3."),
    ],
)
def test_topologies_that_no_compiler_builds_are_answered_with_those_near(text, near):
    with pytest.raises(TargetError) as caught:
        resolve_target(text, require_installed=False)
    message = str(caught.value)
    assert message.startswith(f"Target {text!r}: ")
    assert "Expected 1 or an even number of chips" in message
    assert f"near it: {near}" in message
    for name in near.partition(". Type")[0].rstrip(".").split(", "):
        assert resolve_target(name, require_installed=False).name == name


def test_more_chips_than_there_are_in_any_slice_are_refused_before_a_device_is_built_for_each():
    told = (
        r"'v5p:1000x1000x1000': 1000000000 chips are expected to be at most 16384\. Type for example 'v5p:16x16x16'\.$"
    )
    with pytest.raises(TargetError, match=told):
        resolve_target("v5p:1000x1000x1000", require_installed=False)


BUILD_EACH = """
import json, sys
folders, wanted = json.load(sys.stdin)
sys.path.extend(folders)
from jax.experimental import topologies

def is_built(name, options):
    try:
        topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except Exception:
        return False
    return True

print(json.dumps({name: is_built(name, options) for name, options in wanted.items()}))
"""


@pytest.mark.core
@pytest.mark.targets
def test_the_compiler_itself_builds_what_is_accepted_and_nothing_that_is_refused():
    """Of every TPU kind, 1 to 6 chips along each of two dimensions."""
    needs_compiler("v5e")
    wanted: dict[str, dict[str, Any]] = {}
    for each in (resolve_target(kind, require_installed=False) for kind in target_names()):
        kind, _, shape = each.topology.partition(":")
        if each.platform == "tpu":
            tail = "x3" if shape.count("x") > 1 else ""
            sides = itertools.product(range(1, 7), repeat=2)
            # Of what is refused too: no host could be smaller.
            wanted |= {
                f"{kind}:{a}x{b}{tail}": {**each.topology_options, "chips_per_host_bounds": [min(a, 2), min(b, 2), 1]}
                for a, b in sides
            }
    done = subprocess.run(
        [sys.executable, "-c", BUILD_EACH], input=json.dumps([target_folders(), wanted]), check=True,
        capture_output=True, text=True, timeout=120, env=worker_environment("v5litepod-4"),
    )  # fmt: skip
    built = json.loads(done.stdout)
    assert len(built) == 7 * 36
    assert built == {name: is_accepted(name) for name in wanted}
    for name in filter(is_accepted, wanted):
        assert resolve_target(name, require_installed=False).topology_options == wanted[name]


def is_accepted(text: str) -> bool:
    try:
        resolve_target(text, require_installed=False)
    except TargetError:
        return False
    return True


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("tpu", r"jaxmem targets --install tpu \(your own JAX stays as it is\)"),
        ("gpu", r"jaxmem targets --install gpu \(your own JAX stays as it is; no CUDA libraries needed\)"),
    ],
)
def test_a_missing_compiler_is_one_line_to_type(tmp_path, kind, line):
    """The folder first, and the package of the extra that pyproject.toml has, in the version of JAX itself."""
    (package,) = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"][f"{kind}-targets"]
    package = re.escape(f"{package}=={version('jax')}")
    line = rf"not installed\. Type: {line}, or, beside JAX, .*: pip install \"{package}\"$"
    platform = {"tpu": "tpu", "gpu": "cuda"}[kind]
    assert compiler_versions(platform, [str(tmp_path)]) == {}
    with pytest.raises(TargetError, match=line) as caught:
        require_compiler(platform, "x", [str(tmp_path)])
    assert "\n" not in str(caught.value)


@pytest.mark.core
def test_a_plugin_of_another_jax_is_refused_and_of_this_one_accepted(tmp_path, monkeypatch):
    def install(version):
        for package in ("jax_cuda12_plugin", "jax_cuda12_pjrt"):
            folder = tmp_path / f"{version}" / f"{package}-{version}.dist-info"
            folder.mkdir(parents=True)
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        return [str(tmp_path / version)]

    with pytest.raises(
        TargetError,
        match=r"jax-cuda12-plugin 0\.1\.2, .* does not belong to jax \d+.*Type: jaxmem targets --install gpu$",
    ):
        require_compiler("cuda", "h100_sxm", install("0.1.2"))
    with monkeypatch.context() as beside:  # a folder would not be looked at: JAX's own environment comes first
        beside.setattr(sys, "path", [*install("0.1.3"), *sys.path])
        line = r'plugin 0\.1\.3, .*Type: pip install "jax\[cuda12-local\]==[\d.]+"$'
        with pytest.raises(TargetError, match=line):
            require_compiler("cuda", "h100_sxm")
    require_compiler("cuda", "h100_sxm", install(importlib.metadata.version("jax")))


@pytest.mark.core
@pytest.mark.parametrize(
    ("tag", "is_refused"),
    [("cp399-cp399", True), ("cp399-abi3", False), ("py3-none", False), ("", False), ("own", False)],
)
def test_a_plugin_of_another_python_is_refused(tag, is_refused, tmp_path):
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    jax = importlib.metadata.version("jax")
    for package in ("jax_cuda12_plugin", "jax_cuda12_pjrt"):
        folder = tmp_path / f"{package}-{jax}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {jax}\n")
        if tag:
            name = f"{own}-{own}" if tag == "own" else tag
            (folder / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {name}-manylinux_2_27_x86_64\n")
    if not is_refused:
        require_compiler("cuda", "h100_sxm", [str(tmp_path)])
        return
    said = rf"jax-cuda12-plugin is built for cp399, .*this Python is {own}. Type: jaxmem targets --install gpu$"
    with pytest.raises(TargetError, match=said):
        require_compiler("cuda", "h100_sxm", [str(tmp_path)])


@pytest.mark.parametrize(
    ("name", "larger"),
    [
        *(("v5e", "v5p:1x1x1"), ("v5e:2x2", "v5p:2x2x1"), ("v6e:4x4", "v5p:4x4x1"), ("v4:2x2x2", "v5p:2x2x2")),
        *(("v3:2x2", "v5p:2x2x2"), ("v2:4x4", "v5p:4x4x2"), ("v5p:2x2x1", None), ("tpu7x", None), ("h100_sxm:8", None)),
    ],
)
def test_as_many_devices_of_a_kind_with_more_memory(name, larger):
    target = resolve_target(name, require_installed=False)
    found = roomier(target)
    assert (found and found.name) == larger
    if found is not None:
        assert found.device_count == target.device_count
        assert (found.memory_bytes or 0) > (target.memory_bytes or 0)


@pytest.mark.parametrize(
    ("name", "devices", "fitting"),
    [
        *(("h100_sxm:4", 8, "h100_sxm:8"), ("h100_sxm", 12, ""), ("v5e:2x2", 8, "v5e:2x4"), ("v5e", 512, "")),
        *(("v5p", 64, "v5p:4x4x4"), ("tpu7x", 8, "tpu7x:2x2x1"), ("v3", 3, "")),
    ],
)
def test_the_same_kind_with_another_number_of_devices(name, devices, fitting):
    found = of_so_many(resolve_target(name, require_installed=False), devices)
    assert found == fitting
    if found:
        assert resolve_target(found, require_installed=False).device_count == devices


def test_the_folder_for_compilers_is_the_variables_or_the_caches(tmp_path, monkeypatch):
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = tmp_path / "jaxmem_callbacks" / "targets" / f"jax-{importlib.metadata.version('jax')}-{python}"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAXMEM_TARGET_PATH", raising=False)
    assert target_folders() == [str(folder)]
    monkeypatch.setenv("JAXMEM_TARGET_PATH", os.pathsep.join([str(tmp_path), str(tmp_path / "absent")]))
    assert target_folders() == [str(tmp_path)]


def test_a_missing_compiler_goes_where_it_will_be_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMEM_TARGET_PATH", os.pathsep.join([str(tmp_path / "absent"), str(tmp_path)]))
    assert folder_to_fill() == tmp_path / "absent"


@pytest.mark.parametrize("given", [8, object(), None, ["h100_sxm"]], ids=["count", "object", "none", "list"])
def test_what_is_no_name_of_hardware_is_answered_with_one(given: object) -> None:
    with pytest.raises(TargetError, match=r": expected the name of hardware as text, such as 'h100_sxm' or 'v5e:2x2'"):
        resolve_target(given)  # type: ignore[arg-type]
