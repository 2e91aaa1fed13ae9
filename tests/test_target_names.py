"""Names of hardware that is not there: one spelling each, what a wrong one is told, and where its compiler is found."""

from __future__ import annotations

import importlib.metadata
import os
import sys

import pytest

from jaxmem_callbacks.programs.targets.compilers import compiler_versions, require_compiler, target_folders
from jaxmem_callbacks.programs.targets.target import resolve_target, target_names
from jaxmem_callbacks.records.errors import TargetError
from tests.target_step import GIB

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("text", "name", "devices", "topology"),
    [
        ("v5e", "v5e:1x1", 1, "v5e:1x1"),
        ("v5e:2x2", "v5e:2x2", 4, "v5e:2x2"),
        ("V5LITEPOD:4x4", "v5e:4x4", 16, "v5e:4x4"),
        ("v4:2x2x1", "v4:2x2x1", 4, "v4:2x2x1"),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 8, "tpu7x:2x2x1"),
        ("v3", "v3:2x2", 8, "v3:2x2"),
        ("trillium", "v6e:1x1", 1, "v6e:1x1"),
        ("h100", "h100_sxm", 1, "1x1x1"),
        ("H100-SXM:8", "h100_sxm:8", 8, "1x1x8"),
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
        in resolve_target("h100", require_installed=False).target_config
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10", r"Unknown target 'h10'\. Did you mean `h100`\? Expected one of: v2, .*h200.*'v5e:2x2' or 'h100_sxm:8'"),
        ("cpu:8", r"Unknown target 'cpu:8'"),
        ("v5e:2x2x1", r"'v5e:2x2x1': a v5e topology has 2 dimensions of chips\. Type for example 'v5e:2x2'"),
        ("v5p:2", r"a v5p topology has 3 dimensions of chips\. Type for example 'v5p:2x2x2'"),
        ("h100:12", r"'h100:12': expected a number of GPUs, at most 8 or a multiple of it .*'h100_sxm:8'"),
        ("h100:many", r"expected a number of GPUs"),
        ("h100:0", r"expected a number of GPUs"),
    ],
)
def test_wrong_names_say_what_to_type(text, message):
    with pytest.raises(TargetError, match=message):
        resolve_target(text, require_installed=False)


@pytest.mark.parametrize(
    ("platform", "line"),
    [
        (
            "tpu",
            r"not installed\. Type: pip install \"jaxmem_callbacks\[tpu-targets\]\" \(or, .* pip install --target \S+ libtpu\)$",
        ),
        (
            "cuda",
            r"Type: pip install --no-deps jax-cuda12-plugin==(\S+) jax-cuda12-pjrt==\1 \(no CUDA libraries needed.*$",
        ),
    ],
)
def test_a_missing_compiler_is_one_line_to_type(tmp_path, platform, line):
    assert compiler_versions(platform, [str(tmp_path)]) == {}
    with pytest.raises(TargetError, match=line) as caught:
        require_compiler(platform, "x", [str(tmp_path)])
    assert "\n" not in str(caught.value)


def test_a_plugin_of_another_jax_is_refused_and_of_this_one_accepted(tmp_path):
    def install(version):
        for package in ("jax_cuda12_plugin", "jax_cuda12_pjrt"):
            folder = tmp_path / f"{version}" / f"{package}-{version}.dist-info"
            folder.mkdir(parents=True)
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        return [str(tmp_path / version)]

    with pytest.raises(
        TargetError, match=r"jax-cuda12-plugin 0\.1\.2, .* does not belong to jax \d+.*Type: pip install"
    ):
        require_compiler("cuda", "h100_sxm", install("0.1.2"))
    require_compiler("cuda", "h100_sxm", install(importlib.metadata.version("jax")))


def test_the_folder_for_compilers_is_the_variables_or_the_caches(tmp_path, monkeypatch):
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = tmp_path / "jaxmem_callbacks" / "targets" / f"jax-{importlib.metadata.version('jax')}-{python}"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAXMEM_TARGET_PATH", raising=False)
    assert target_folders() == [str(folder)]
    monkeypatch.setenv("JAXMEM_TARGET_PATH", os.pathsep.join([str(tmp_path), str(tmp_path / "absent")]))
    assert target_folders() == [str(tmp_path)]
