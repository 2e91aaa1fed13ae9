"""Where compiles for absent hardware are kept: as the user says, else in the user's own cache."""

from __future__ import annotations

import pytest

from jaxmem_callbacks.programs.targets.cache import cache_folder
from tests.test_target_cache import key

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
