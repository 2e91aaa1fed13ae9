"""Where compiles for absent hardware are kept: as the user says, else in the user's own cache."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jaxmem_callbacks.programs.targets.cache import cache_entry, cache_folder
from tests.test_target_cache import REQUEST, VERSIONS, blob, key

pytestmark = pytest.mark.core


def test_the_folder_is_the_users_cache_unless_said(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    for word in ("", "off", " OFF "):
        monkeypatch.setenv("JAXMEM_CACHE_DIR", word)
        assert cache_folder() is None
        assert key() is None
    monkeypatch.delenv("JAXMEM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "jaxmem_callbacks" / "compiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "jaxmem_callbacks" / "compiles"


NO_HOME = """
import pwd, sys
def nobody(uid):
    raise KeyError("uid not found")
pwd.getpwuid = nobody
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.programs.targets.cache import cache_entry, cache_folder
print("exit codes", main(["doctor"]) < 2, main(["targets"]), main(["targets", "--json"]), main(["targets", "--install", "gpu"]))
print("cache", cache_folder(), [cache_entry(b"", {"compiler_options": {}}, {}, {}) for _ in range(2)])
"""


def without_home(tmp_path, **variables):
    """A process of a user who has no home folder, as a container's numeric user has none."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HOME", "XDG_CACHE_HOME", "JAXMEM_TARGET_PATH")
    }
    env = {
        **{name: value for name, value in kept.items() if name != "JAXMEM_CACHE_DIR"},
        "JAX_PLATFORMS": "cpu",
        **variables,
    }
    return subprocess.run(
        [sys.executable, "-c", NO_HOME], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )


@pytest.mark.core
def test_a_user_without_a_home_folder_only_has_no_cache(tmp_path):
    done = without_home(tmp_path)
    assert "exit codes True 0 0 2" in done.stdout
    assert "cache None [None, None]" in done.stdout
    assert "Their folder: none, since this user has no home folder; export JAXMEM_TARGET_PATH=/a/folder" in " ".join(
        done.stdout.split()
    )
    assert (
        "There is no folder for compilers, since this user has no home folder. Expected one: export JAXMEM_TARGET"
        in done.stderr
    )
    said = "jaxmem: compilers' answers are not kept, since this user has no home folder. Name a folder for them: export JAXMEM_"
    assert done.stderr.count(said) == 1
    off = without_home(tmp_path, JAXMEM_CACHE_DIR="off", JAXMEM_TARGET_PATH=str(tmp_path))
    assert "compilers' answers" not in off.stderr
    assert f"Their folder: {tmp_path}" in " ".join(off.stdout.split())


def test_a_cache_that_cannot_be_written_is_named_once(tmp_path, capfd, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "answer.json").write_text("{}")
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        entry = cache_entry(blob(2), REQUEST, VERSIONS, {"PATH": "/bin"})
        assert entry is not None
        entry.keep(tmp_path / "place", want_buffers=False)
    said = capfd.readouterr().err
    assert said.count("compilers' answers are not kept, since") == 1
    assert (
        "file/cache cannot be written (Not a directory). Name a folder for them: export JAXMEM_CACHE_DIR=/a/folder"
        in said
    )
