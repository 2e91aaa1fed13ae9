"""Run folders at addresses: a real file system of fsspec's, one that stalls, one that fails, and etils' paths."""

from __future__ import annotations

import json
import shlex
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from werkzeug.test import Client

import jaxmem_callbacks as jm
from jaxmem_callbacks.callbacks import monitor as monitors
from jaxmem_callbacks.callbacks.mirror import Mirror
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.integrations.tensorboard import MemoryPlugin
from jaxmem_callbacks.readers.runs import stories_of
from jaxmem_callbacks.readers.stores import EpathStore, opener
from jaxmem_callbacks.records.presets import MonitorSettings
from tests.pasting import pasted
from tests.processes import until
from tests.test_monitor_processes import OF_TWO, finished, start
from tests.test_monitor_processes import address as free_address

SETTINGS = MonitorSettings(window_s=0.05, scan_s=0.05)


class InMemory(MemoryFileSystem):
    """Files of the same memory under another scheme."""

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace(f"{cls.protocol}://", "memory://"))


class Stalling(InMemory):
    """An object store whose network stands still."""

    protocol = "stalls"
    go_on = threading.Event()

    def pipe_file(self, path, value, **kwargs):
        self.go_on.wait(60)
        super().pipe_file(path, value, **kwargs)


class Failing(InMemory):
    """An object store that refuses what is written at first."""

    protocol = "fails"
    left = 0

    def pipe_file(self, path, value, **kwargs):
        if Failing.left > 0:
            Failing.left -= 1
            msg = "403 Forbidden"
            raise PermissionError(msg)
        super().pipe_file(path, value, **kwargs)


for kind in (Stalling, Failing):
    fsspec.register_implementation(kind.protocol, kind, clobber=True)


@pytest.fixture(autouse=True)
def _empty():
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    Stalling.go_on.clear()
    yield
    Stalling.go_on.set()


def files():
    """Path -> bytes of all that the store has."""
    return {path: bytes(file.getvalue()) for path, file in MemoryFileSystem.store.items()}


def begun(**settings):
    """A mirror whose thread runs."""
    mirror = Mirror("memory://bucket/a", opener("memory://bucket/a"), print, **settings)
    mirror.start()
    return mirror


def train(address, steps=3):
    with jm.MemoryMonitor(SETTINGS, logdir=address) as monitor:
        for step in range(steps):
            monitor(step, {"loss": 1.0})
        monitor.flush()
    return monitor


@pytest.mark.core
def test_a_run_is_at_its_address_when_it_ends(tmp_path, capfd):
    monitor = train("memory://bucket/runs/a")
    found = files()
    assert sorted(path.rpartition("/")[2].partition(".")[0] for path in found) == ["events", "memory"]
    (tmp_path / "memory.jsonl").write_bytes(found["/bucket/runs/a/memory.jsonl"])
    (story,) = stories_of(tmp_path)
    assert story.ended
    assert story.span.last_step == 2
    assert not monitor._mirror.folder.exists(), "the copy is whole"
    assert (
        "all of it is in memory://bucket/runs/a; `jaxmem report memory://bucket/runs/a` shows" in capfd.readouterr().err
    )


def test_a_second_run_at_an_address_overwrites_nothing():
    train("memory://bucket/a")
    before = files()
    train("memory://bucket/a")
    train("memory://bucket/a")
    found = files()
    assert {path: found[path] for path in before} == before
    assert {"/bucket/a/rerun-1/memory.jsonl", "/bucket/a/rerun-2/memory.jsonl"} <= found.keys()


def test_a_store_that_stalls_holds_up_no_step_and_the_run_stays_here(capfd, monkeypatch):
    monkeypatch.setattr(monitors, "PATIENCE_S", 0.2)
    with jm.MemoryMonitor(SETTINGS, logdir="stalls://bucket/a") as monitor:
        before_s = time.thread_time()
        for step in range(100):
            monitor(step)
        assert time.thread_time() - before_s < 1
        monitor.flush()
        assert monitor.sample(100)
    folder = monitor._mirror.folder
    said = f"copying to stalls://bucket/a was not done 0.2 s after the end and is left behind: the run is in {folder} until"
    assert said in capfd.readouterr().err
    (story,) = stories_of(folder)
    assert story.ended
    Stalling.go_on.set()
    until(lambda: not folder.exists())
    assert "/bucket/a/memory.jsonl" in files(), "what was left behind is copied once the store answers"


def test_a_store_that_fails_is_reported_once_and_tried_again(capfd):
    Failing.left = 3
    monitor = jm.MemoryMonitor(SETTINGS, logdir="fails://bucket/a")
    monitor._mirror._every_s = 0.01
    monitors_mirror = monitor._mirror
    monitor(0)
    until(lambda: "/bucket/a/memory.jsonl" in files() or not monitors_mirror._thread.is_alive())
    monitor.close()
    own = [line for line in capfd.readouterr().err.splitlines() if "403 Forbidden" in line]
    assert len(own) == 1
    assert "copying to fails://bucket/a failed and is tried again" in own[0]
    assert files()["/bucket/a/memory.jsonl"].splitlines()[-1].startswith(b"{")


def test_a_store_that_fails_to_the_end_names_the_local_folder(capfd):
    Failing.left = 10**6
    monitor = train("fails://bucket/a")
    folder = monitor._mirror.folder
    err = capfd.readouterr().err
    assert "could not be copied to fails://bucket/a (" in err
    assert f"), and is in {folder}." in err
    assert (folder / "memory.jsonl").exists()


def test_a_line_that_is_half_written_is_not_copied():
    mirror = begun()
    (mirror.folder / "memory.jsonl").write_text('{"a":1}\n{"b"')
    (mirror.folder / "link").symlink_to("/etc/hostname")
    mirror.finish(10)
    assert files() == {"/bucket/a/memory.jsonl": b'{"a":1}\n'}


def test_what_did_not_change_is_not_copied_again():
    mirror = begun(every_s=0.01)
    (mirror.folder / "memory.jsonl").write_text("{}\n")
    until(lambda: mirror._copied)
    MemoryFileSystem.store.clear()
    (mirror.folder / "memory.000001.jsonl").write_text("{}\n")
    mirror.finish(10)
    assert list(files()) == ["/bucket/a/memory.000001.jsonl"]


class Choosy(InMemory):
    """An object store that never takes event files."""

    protocol = "choosy"

    def pipe_file(self, path, value, **kwargs):
        if "events" in path:
            msg = "too large"
            raise ValueError(msg)
        super().pipe_file(path, value, **kwargs)


@pytest.mark.parametrize("name", ["jaxmem-a", "jaxmem-0pwd", "my_token", "api_key"])
def test_a_file_that_the_store_refuses_keeps_no_other_from_it(name, capfd, monkeypatch, tmp_path):
    """Nor does a name of the local folder that ends as a secret's does hide why: `tempfile` names it by chance."""
    (tmp_path / name).mkdir()
    monkeypatch.setattr("jaxmem_callbacks.callbacks.mirror.tempfile.mkdtemp", lambda **_: str(tmp_path / name))
    fsspec.register_implementation(Choosy.protocol, Choosy, clobber=True)
    monitor = train("choosy://bucket/a")
    assert "/bucket/a/memory.jsonl" in files()
    assert f"(ValueError: too large), and is in {monitor._mirror.folder}." in capfd.readouterr().err


def test_two_runs_that_begin_at_one_address_at_once_have_a_place_each():
    with jm.MemoryMonitor(SETTINGS, logdir="memory://bucket/a") as one:
        one(0)
        with jm.MemoryMonitor(SETTINGS, logdir="memory://bucket/a") as two:
            two(1)
    found = files()
    assert {path.rpartition("/")[0] for path in found} == {"/bucket/a", "/bucket/a/rerun-1"}
    runs = [json.loads(found[f"/bucket/a/{at}memory.jsonl"].splitlines()[0])["run"] for at in ("", "rerun-1/")]
    assert len(set(runs)) == 2


TWO = (
    OF_TWO
    + """
for run in range(2):
    with jm.MemoryMonitor(replace(settings, limit_bytes=2**20), logdir=sys.argv[1]) as monitor:
        x = jnp.zeros(8)
        for i in range(5):
            x, metrics = step(x)
            monitor(i, metrics)
            time.sleep(0.03)
        monitor.flush()
"""
)


@pytest.mark.core
@pytest.mark.slow
def test_the_processes_of_a_run_share_its_place_and_no_file(tmp_path):
    where = free_address()
    processes = [start(TWO, f"file://{tmp_path}/a", str(rank), where) for rank in range(2)]
    results = [finished(process) for process in processes]
    assert [code for code, _, _ in results] == [0, 0], results
    for place in (tmp_path / "a", tmp_path / "a" / "rerun-1"):
        assert {each.name for each in place.glob("memory*")} == {"memory.jsonl", "memory.process-1.jsonl"}
        assert next((place / "process-1").glob("events.*"))
    assert [story.elsewhere.events[0].where for story in stories_of(tmp_path / "a")] == ["process 1"] * 2


def test_passwords_of_an_address_reach_no_message_and_no_file(capfd):
    Failing.left = 10**6
    monitor = train("fails://me:hunter2-hunter2@bucket/a?sig=0123456789abcdef")
    said = capfd.readouterr().err
    assert "could not be copied" in said
    written = b"".join(path.read_bytes() for path in monitor._mirror.folder.rglob("*") if path.is_file())
    for secret in ("hunter2", "0123456789abcdef"):
        assert secret not in said
        assert secret.encode() not in written
    with pytest.raises(ValueError, match="nosuch://") as refused:
        jm.MemoryMonitor(logdir="nosuch://me:hunter2-hunter2@bucket/a")
    assert "hunter2" not in str(refused.value)


def test_an_address_that_a_path_took_a_slash_of_is_refused():
    with pytest.raises(ValueError, match=r"before pathlib.Path took one of its slashes.*logdir='gs://\.\.\.'"):
        jm.MemoryMonitor(logdir=Path("gs://bucket/a"))


def test_a_failure_is_explained_at_the_address_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MemoryError), jm.MemoryMonitor(SETTINGS, logdir="memory://bucket/a") as monitor:  # noqa: PT012
        monitor(0)
        raise MemoryError
    (report,) = (tmp_path / "oom").iterdir()
    assert files()[f"/bucket/a/oom/{report.name}/report.html"] == (report / "report.html").read_bytes()


def test_a_monitor_that_was_never_called_leaves_nothing():
    with jm.MemoryMonitor(SETTINGS, logdir="memory://bucket/a") as monitor:
        pass
    assert not monitor._mirror.folder.exists()
    assert files() == {}


def test_report_compare_and_watch_read_an_address(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train("memory://bucket/a")
    train("memory://bucket/a")
    assert main(["report", "memory://bucket/a"]) == 0
    assert "wrote report.html" in capsys.readouterr().out
    assert "memory://bucket/a" in (tmp_path / "report.html").read_text()
    assert main(["compare", "memory://bucket/a", "memory://bucket/a/rerun-1"]) == 0
    assert "memory://bucket/a holds 2 runs" in capsys.readouterr().out
    assert main(["watch", "memory://bucket/a/rerun-1/"]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("memory://bucket/a/rerun-1/.: step 2, ended; ")
    assert list(tmp_path.iterdir()) == [tmp_path / "report.html"]


@pytest.mark.parametrize(
    ("place", "context"),
    [
        ("memory://bucket/a", {"logdir": "memory://bucket"}),
        ("memory://bucket/a b", {"logdir": "memory://bucket/a b"}),
        ("memory://c/a", {"logdir": "", "flags": SimpleNamespace(logdir_spec="here:/none,there:memory://c/a")}),
    ],
    ids=str,
)
def test_the_tab_names_the_command_that_reads_an_address(place, context, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(place)
    plugin = MemoryPlugin(SimpleNamespace(**context))  # pyright: ignore[reportArgumentType]
    (note,) = Client(plugin.get_plugin_apps()["/runs"]).get("/").json["notes"]
    _, line, _ = note.split("`")
    command, *typed = shlex.split(pasted("command.typed", f"    {line}"))
    assert command == "jaxmem"
    assert main(typed) == 0
    assert "What makes the peak" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("command", ["report", "watch"])
def test_an_address_that_cannot_be_read_is_refused_in_a_sentence(command, capsys):
    assert main([command, "nosuch://bucket/a"]) == 2
    assert "no package that is installed here opens nosuch://: fsspec with its own package" in capsys.readouterr().err


def test_an_address_without_a_run_is_refused_in_a_sentence(capsys):
    assert main(["report", "memory://bucket/none"]) == 2
    assert "memory://bucket/none holds no memory.jsonl." in capsys.readouterr().err


def test_etils_paths_are_written_with_their_folders_and_read(tmp_path):
    store = EpathStore()
    place = f"{tmp_path}/runs/a/memory.jsonl"
    store.put(place, b"{}\n", new=True)
    with pytest.raises(FileExistsError):
        store.put(place, b"", new=True)
    assert store.get(place) == b"{}\n"
    assert store.sizes(str(tmp_path)) == {"runs/a/memory.jsonl": 3}


def test_an_address_that_nothing_opens_is_refused():
    assert opener("nosuch://bucket/a") is None
    with pytest.raises(ValueError, match=r"no package that is installed here opens nosuch://"):
        jm.MemoryMonitor(logdir="nosuch://bucket/a")
