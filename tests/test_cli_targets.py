"""`jaxmem targets`: compilers of absent hardware are fetched by a real pip, into a folder that JAX itself never looks into."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.programs.targets.compile import refused_for_memory
from jaxmem_callbacks.programs.targets.compilers import compiler_versions, other_than_pinned, require_compiler
from jaxmem_callbacks.records.errors import CompileError, TargetError
from tests.pasting import pasted

JAX = importlib.metadata.version("jax")
# The first that JAX itself pins, for its own users of TPUs: `libtpu==0.0.50.*; extra == "tpu"`.
(PINNED,) = {
    found for line in importlib.metadata.requires("jax") or [] for found in re.findall(r"^libtpu==([\d.*]+)", line)
}
LIBTPU = PINNED.replace("*", "7")


def wheel(folder: Path, name: str, version: str, module: str) -> None:
    """A package of that name with one module, as an index would give it."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{module}/__init__.py": "print('loaded')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as packed:
        for path, text in files.items():
            packed.writestr(path, text)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Wheels in place of a network, and an empty folder in place of the user's caches."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version in ("0.0.999", LIBTPU):
        wheel(folder, "libtpu", version, "libtpu")
    for name in ("jax_cuda12_plugin", "jax_cuda12_pjrt"):
        wheel(folder, name, JAX, name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXMEM_TARGET_PATH", raising=False)
    return folder


@pytest.mark.usefixtures("index")
def test_what_is_missing_is_fetched_where_only_the_workers_look(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["targets"]) == 0
    missing = capfd.readouterr().out
    beside = compiler_versions("tpu", sys.path)  # a developer may have it beside JAX
    assert beside or "none. Type: jaxmem targets --install tpu" in missing
    assert "h100_sxm" in missing

    assert main(["targets", "--install", "tpu", "gpu", "--json"]) == 0
    printed = capfd.readouterr()
    told = json.loads(printed.out)
    folder = Path(told["folder"])
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    assert folder == tmp_path / "cache" / "jaxmem_callbacks" / "targets" / f"jax-{JAX}-{python}"
    assert told["compilers"]["gpu"] == {"jax-cuda12-plugin": JAX, "jax-cuda12-pjrt": JAX}
    assert beside or told["compilers"]["tpu"] == {"libtpu": LIBTPU}, "and not the newest"
    assert f"installing jax-cuda12-plugin=={JAX}, jax-cuda12-pjrt=={JAX} into {folder}" in printed.err
    assert (folder / "libtpu" / "__init__.py").exists()

    start = "import jax, sys; jax.devices(); print(sorted({'libtpu', 'jax_cuda12_plugin'} & set(sys.modules)))"
    seen = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=True)
    assert seen.stdout == "[]\n", "JAX itself loads none of it"

    old = folder.parent / "jax-0.1.2-python3.11"
    old.mkdir()
    assert main(["targets"]) == 0
    assert str(old) in capfd.readouterr().out.replace("\n    ", "")


@pytest.mark.parametrize("kind", ["tpu", "gpu", "both"])
def test_what_is_printed_installs_a_compiler(kind: str, index: Path, capfd: Any) -> None:
    """Into its folder; beside JAX pip is asked what it would take, and takes only wheels that are here."""
    wheel(index, "requests", "2.99", "requests")
    wanted = {"tpu": {"v5e": "tpu"}, "gpu": {"h100_sxm": "cuda"}, "both": {"v5e": "tpu", "h100_sxm": "cuda"}}[kind]
    for target, platform in wanted.items():
        with pytest.raises(TargetError) as refused:
            require_compiler(platform, target, [])
        typed = pasted("targets.install", refused.value)
        assert main(typed.split()[1:]) == 0
        assert "installing" in capfd.readouterr().err
        line = pasted("targets.beside_jax", refused.value)
        asked = [sys.executable, "-m", *shlex.split(line), "--dry-run"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_pip_cannot_install_is_told_by_pip(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for each in index.glob("jax_cuda12_pjrt*"):
        each.unlink()
    assert main(["targets", "--install", "gpu"]) == 1
    printed = capfd.readouterr()
    assert "No matching distribution found for jax-cuda12-pjrt" in printed.err
    assert "jaxmem: the compilers for gpu could not be installed; why is above." in printed.err
    assert not printed.out


@pytest.mark.usefixtures("index")
def test_an_older_version_that_replaces_a_newer_one_leaves_no_trace_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if compiler_versions("tpu", sys.path):
        pytest.skip("libtpu is installed beside JAX here, and is used first")
    monkeypatch.setenv("JAXMEM_TARGET_PATH", str(tmp_path))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), "libtpu"]
    subprocess.run(pip, check=True)
    assert main(["targets", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["compilers"]["tpu"] == {"libtpu": "0.0.999"}
    assert "libtpu 0.0.999 is not the one" in told["remarks"][0]

    assert main(["targets", "--install", "tpu", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["compilers"]["tpu"], told["remarks"]) == ({"libtpu": LIBTPU}, [])
    assert [each.name for each in tmp_path.glob("libtpu-*")] == [f"libtpu-{LIBTPU}.dist-info"]


def test_a_compiler_that_jax_does_not_pin_is_told(index: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    if compiler_versions("tpu", sys.path):
        pytest.skip("libtpu is installed beside JAX here, and is used first")
    for version, said in ((LIBTPU, False), ("0.0.999", True)):
        folder = index.parent / version
        (folder / f"libtpu-{version}.dist-info").mkdir(parents=True)
        (folder / f"libtpu-{version}.dist-info" / "METADATA").write_text(f"Name: libtpu\nVersion: {version}\n")
        monkeypatch.setenv("JAXMEM_TARGET_PATH", str(folder))
        assert main(["targets"]) == 0
        sentence = f"libtpu {version} is not the one that jax {JAX} asks for (libtpu=={PINNED})"
        assert (sentence in " ".join(capsys.readouterr().out.split())) == said
        remark = other_than_pinned("tpu")
        with pytest.raises(CompileError, match="the compiler refused the program") as refused:
            refused_for_memory("step for v5e", "INTERNAL: RET_CHECK failure", remark)
        assert ("Type: jaxmem targets --install tpu. Expected operations" in str(refused.value)) == said
    assert not any(map(other_than_pinned, ("cpu", "cuda")))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    assert f'Type: pip install "jax[tpu]=={JAX}"' in other_than_pinned("tpu"), "where it is beside JAX"


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["targets", "--install", "tpv"])
    assert "invalid choice: 'tpv'" in capsys.readouterr().err
