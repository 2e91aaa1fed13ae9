"""Log folders that are read while they grow: each line once, parts under their new names, no link, and nothing raises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from werkzeug.test import Client

from jaxmem_callbacks.integrations.tensorboard import MemoryPlugin
from jaxmem_callbacks.readers.following import FollowedFolder, log_folders
from jaxmem_callbacks.readers.runs import stories_of
from jaxmem_callbacks.writers.report import story_model
from tests.rich_runs import write_rich_run
from tests.sample_runs import write_run


def read_all(folder: FollowedFolder) -> list[dict[str, Any]]:
    folder.advance(60)
    assert folder.share == 1
    return [story_model(story) for story in folder.runs()]


@pytest.mark.parametrize("part_bytes", [None, 4000])
def test_a_followed_folder_is_what_a_report_of_it_is(tmp_path, part_bytes):
    write_run(tmp_path, run="first", part_bytes=part_bytes)
    write_run(tmp_path, run="second", close=False, part_bytes=part_bytes)
    assert read_all(FollowedFolder(tmp_path)) == [story_model(story) for story in stories_of(tmp_path)]


def test_lines_are_read_once_and_only_whole(tmp_path):
    write_run(tmp_path / "done")
    lines = (tmp_path / "done" / "memory.jsonl").read_bytes()
    path = tmp_path / "memory.jsonl"
    folder = FollowedFolder(tmp_path)
    folder.advance(1)
    assert (folder.share, folder.runs()) == (1, [])
    for end in range(0, len(lines) + 997, 997):
        path.write_bytes(lines[:end])
        folder.advance(60)
    assert folder.version == str(lines.count(b"\n"))
    assert [story_model(story) for story in folder.runs()] == read_all(FollowedFolder(tmp_path / "done"))
    assert folder.remarks == []
    with path.open("ab") as file:
        file.write(b'{"run":"one","kind":"re')
    folder.advance(60)
    assert folder.share == 1, "a line that is being written keeps nobody waiting"


def test_a_file_that_becomes_a_part_is_not_read_again(tmp_path):
    write_run(tmp_path, close=False)
    folder = FollowedFolder(tmp_path)
    folder.advance(60)
    before = folder.version
    (tmp_path / "memory.jsonl").rename(tmp_path / "memory.000001.jsonl")
    folder.advance(60)
    assert folder.version == before
    (tmp_path / "memory.jsonl").write_text(json.dumps({"run": "one", "kind": "end", "time_s": 1.7e9 + 50}) + "\n")
    folder.advance(60)
    (story,) = folder.runs()
    assert story.ended


def test_a_file_that_was_cut_or_written_anew_is_read_from_its_begin(tmp_path):
    write_rich_run(tmp_path, steps=30)
    folder = FollowedFolder(tmp_path)
    read_all(folder)
    (tmp_path / "memory.jsonl").unlink()
    write_run(tmp_path)
    assert [run["run"] for run in read_all(folder)] == ["one"]


def test_a_little_at_a_time_ends_with_all(tmp_path):
    write_rich_run(tmp_path)
    folder = FollowedFolder(tmp_path)
    shares = []
    while not shares or shares[-1] < 1:
        folder.advance(0)
        shares.append(folder.share)
    assert len(shares) > 3
    assert shares == sorted(shares)
    assert [story_model(story) for story in folder.runs()] == read_all(FollowedFolder(tmp_path))


def test_events_of_other_processes_are_counted_once(tmp_path):
    write_run(tmp_path)
    other = {"run": "elsewhere", "kind": "event", "event": "growth", "step": 3, "time_s": 1.7e9, "device": "gpu:8"}
    line = json.dumps(other | {"message": "It grows.", "action": "Look."})
    (tmp_path / "memory.process-1.jsonl").write_text(line + "\n")
    folder = FollowedFolder(tmp_path)
    for _ in range(3):
        ((story,),) = [folder.advance(60) or folder.runs()]
    assert [(each.where, each.event.message) for each in story.elsewhere.events] == [("process 1", "It grows.")]


def test_no_link_is_followed(tmp_path):
    outside = write_run(tmp_path / "outside")
    log = tmp_path / "log"
    write_run(log / "own")
    (log / "folder").symlink_to(outside)
    (log / "file").mkdir()
    (log / "file" / "memory.jsonl").symlink_to(outside / "memory.jsonl")
    (log / "own" / "memory.process-1.jsonl").symlink_to(outside / "memory.jsonl")
    assert [folder.name for folder in log_folders(log)] == ["own"]
    (story,) = FollowedFolder(log / "file").runs() or [None]
    assert story is None
    followed = FollowedFolder(log / "file")
    followed.advance(1)
    assert followed.runs() == []
    own = FollowedFolder(log / "own")
    own.advance(60)
    assert own.runs()[0].elsewhere.events == []


# The plugin


def plugin(**context: Any) -> MemoryPlugin:
    return MemoryPlugin(SimpleNamespace(**context))  # pyright: ignore[reportArgumentType]


def answered(of: MemoryPlugin, route: str, query: str = "") -> Any:
    return Client(of.get_plugin_apps()[route]).get(f"/?{query}")


@pytest.mark.parametrize(
    "context",
    [
        {},
        {"logdir": None, "flags": None},
        {"logdir": "/does/not/exist"},
        {"logdir": "gs://bucket/runs"},
        {"logdir": "", "flags": SimpleNamespace(logdir="", logdir_spec="a:/x,/y,,s3://z,:,~/w")},
        {"logdir": "\0"},
        {"logdir": "~nobody_of_that_name/runs"},
    ],
    ids=str,
)
def test_the_plugin_never_raises(context):
    """A broken plugin takes TensorBoard down."""
    made = plugin(**context)
    assert isinstance(made.is_active(), bool)
    assert made.frontend_metadata().es_module_path == "/page.js"
    assert answered(made, "/runs").status_code in (200, 500)
    assert answered(made, "/run", "folder=nothing").status_code in (404, 500)
    assert answered(made, "/page.js").status_code == 200


def test_a_remote_folder_gets_a_sentence(tmp_path):
    write_run(tmp_path)
    made = plugin(logdir="", flags=SimpleNamespace(logdir_spec=f"here:{tmp_path},gs://bucket/runs"))
    listed = answered(made, "/runs").json
    assert [folder["name"] for folder in listed["folders"]] == ["here"]
    assert listed["notes"][0].startswith("gs://bucket/runs is no local folder")


def test_a_run_that_has_no_line_yet_is_not_closed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "memory.jsonl").write_text("")
    answer = answered(plugin(logdir=str(tmp_path)), "/run", "folder=a").json
    assert (answer["runs"], answer["closed"]) == ([], False)


def test_an_answer_that_is_known_is_not_sent_again(tmp_path):
    write_run(tmp_path / "a")
    made = plugin(logdir=str(tmp_path))
    assert made.is_active()
    first = answered(made, "/run", "folder=a").json
    assert (len(first["runs"]), first["share"], first["closed"]) == (1, 1, True)
    again = answered(made, "/run", f"folder=a&version={first['version']}").json
    assert (again["runs"], again["version"]) == ([], first["version"])


def test_the_plugin_loads_no_jax_and_no_matplotlib():
    code = (
        "import sys; from importlib.metadata import entry_points;"
        "(entry,) = entry_points(group='tensorboard_plugins', name='jaxmem'); entry.load();"
        "print([name for name in ('jax', 'jaxlib', 'flax', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    assert done.stdout == "[]\n"
