"""The wheel by itself: built, unpacked elsewhere, and used with the source tree out of reach."""

import configparser
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USE = """
import jaxmem_callbacks as jm
print(jm.__file__)
print(",".join(jm.list_presets()))
policy = jm.load_preset("donate", "full_remat").policy
print(policy.remat, policy.donate)
from jaxmem_callbacks.config.locate import shipped_folder
print(shipped_folder())
from jaxmem_callbacks.cli.main import main
main(["presets", "full_remat"])
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The folder into which the wheel was unpacked, which is what installing a pure wheel does."""
    built = tmp_path_factory.mktemp("wheel")
    call = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(built)]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = built.glob("*.whl")
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_presets_work_without_the_source_tree(unpacked, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "PYTHONPATH": str(unpacked)
    }
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    file, names, policy, folder, *yaml = done.stdout.splitlines()
    assert Path(file).is_relative_to(unpacked)
    assert Path(folder) == unpacked / "jaxmem_callbacks" / "config" / "shipped"
    assert names.split(",") == sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    assert policy == "full auto"
    assert "  remat: full" in yaml


def test_the_wheel_has_every_module_and_nothing_else(unpacked):
    inside = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "jaxmem_callbacks").rglob("*.py")}
    assert sources <= inside
    assert "jaxmem_callbacks/py.typed" in inside
    assert "jaxmem_callbacks/config/shipped/preset.schema.json" in inside
    assert {name.split("/")[0].partition("-")[0] for name in inside} == {"jaxmem_callbacks"}


def test_the_wheel_installs_the_command_and_the_pytest_plugin(unpacked):
    (entries,) = unpacked.glob("*.dist-info/entry_points.txt")
    parser = configparser.ConfigParser()
    parser.read(entries)
    assert dict(parser["console_scripts"]) == {"jaxmem": "jaxmem_callbacks.cli.main:main"}
    assert dict(parser["pytest11"]) == {"jaxmem": "jaxmem_callbacks.integrations.pytest"}
