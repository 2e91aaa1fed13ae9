"""The package by itself: sdist and wheel built, installed in an environment of their own, and used with the sources out of reach.

Nothing is downloaded: the environment sees the packages of the one that runs the tests. `make check-wheel` is the same in clean
environments, with each extra.
"""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import pytest

import jaxmem_callbacks as jm
from tools.check_wheel import ROOT, build, extras, use, wheel_of_sdist

GATED = """
import jax, jax.numpy as jnp

def test_the_step_does_not_grow(assert_step_memory):
    assert_step_memory(jax.jit(lambda w, x: w @ x), jnp.ones((8, 8)), jnp.ones((8, 8)), baseline="base.json")
"""


class Built(NamedTuple):
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Built:
    return Built(*build(tmp_path_factory.mktemp("dist")))


@pytest.fixture(scope="module")
def python(built, tmp_path_factory) -> Path:
    """The interpreter of an environment with the wheel; what it depends on is seen through a path file.

    Such a path is no site folder: the path file of an editable installation in it is not read, and the sources stay unseen.
    """
    folder = tmp_path_factory.mktemp("venv").resolve()
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    names = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (site / "dependencies.pth").write_text("\n".join(names))
    install = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps", str(built.wheel)]
    done = subprocess.run(
        [sys.executable, *install, "--disable-pip-version-check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return python


@pytest.mark.core
def test_the_installed_package_works_without_the_sources(python, tmp_path):
    """Trains two steps under a monitor, with the presets, the command and the plugin of the installed files."""
    found = use(python, tmp_path, "")["found"]
    assert Path(found["package"]).is_relative_to(python.parent.parent)
    assert found["presets"] == sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    assert found["step_bytes"] > 0
    assert found["command"] == "jaxmem_callbacks.cli.main:main"
    assert found["plugin"] == "jaxmem_callbacks.integrations.pytest"


def test_the_pytest_plugin_comes_with_the_wheel(python, tmp_path):
    (tmp_path / "test_memory.py").write_text(GATED)
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    command = [python, "-P", "-m", "pytest", "-pno:cacheprovider", "-W", "error", "--jaxmem-update"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "base.json").exists()


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    assert wheel_of_sdist(built.sdist, tmp_path / "unpacked").read_bytes() == built.wheel.read_bytes()


def test_the_wheel_has_every_module_and_nothing_else(built):
    with zipfile.ZipFile(built.wheel) as archive:
        inside = set(archive.namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "jaxmem_callbacks").rglob("*.py")}
    assert sources <= inside
    assert "jaxmem_callbacks/py.typed" in inside
    assert "jaxmem_callbacks/config/shipped/preset.schema.json" in inside
    assert {"draw.js", "page.js", "page.css"} <= {Path(name).name for name in inside if "records/assets/" in name}
    assert {name.split("/")[0].partition("-")[0] for name in inside} == {"jaxmem_callbacks"}


def test_the_sdist_has_what_a_packager_needs(built):
    with tarfile.open(built.sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "jaxmem_callbacks/__init__.py"} <= inside


def test_the_wheel_says_what_it_is(built):
    """Version, license, extras, the command and the plugin, as installers read them."""
    with zipfile.ZipFile(built.wheel) as archive:
        texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    about = Parser().parsestr(texts["METADATA"])
    assert (about["Name"], about["Version"]) == ("jaxmem_callbacks", jm.__version__)
    assert about["License-Expression"] == "Apache-2.0"
    assert ["", *about.get_all("Provides-Extra")] == sorted(extras())
    entries = configparser.ConfigParser()
    entries.read_string(texts["entry_points.txt"])
    assert dict(entries["console_scripts"]) == {"jaxmem": "jaxmem_callbacks.cli.main:main"}
    assert dict(entries["tensorboard_plugins"]) == {"jaxmem": "jaxmem_callbacks.integrations.tensorboard:MemoryPlugin"}
    assert dict(entries["pytest11"]) == {"jaxmem": "jaxmem_callbacks.integrations.pytest"}
