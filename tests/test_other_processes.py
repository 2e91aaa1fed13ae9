"""Events of processes that are not the first: in a file each, found by the report, each event once with who told it."""

from __future__ import annotations

from pathlib import Path

from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.readers.runs import process_files, process_name, stories_of
from jaxmem_callbacks.records.runs import MemoryEvent, Reading, RunStart
from jaxmem_callbacks.writers.jsonl import JsonlWriter, OwnEventsWriter
from tests.pages import Page
from tests.sample_runs import BEGAN, HOSTILE, event, write_run


def tell(folder: Path, process: int, *events: MemoryEvent, began_s: float = BEGAN) -> None:
    """As a monitor in that process does."""
    path = folder / process_name(process)
    start = RunStart(time_s=began_s, devices={"platform": "gpu", "process": process})
    writer = OwnEventsWriter(lambda: JsonlWriter(path, f"of-{process}-{began_s}", start=start))
    writer.write(Reading(source="host", device="host", step=0, time_s=began_s, resident_bytes=1))
    for each in events:
        writer.write(each)
    writer.close()


def again(text: str, step: int = 20) -> MemoryEvent:
    return event(text, kind="recompilation", step=step, device="train_step")


def test_a_process_without_events_leaves_no_file(tmp_path: Path):
    tell(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_the_report_tells_each_event_once_with_the_processes_that_told_it(tmp_path: Path, capsys):
    write_run(tmp_path)
    for process in (1, 2, 3, 10):
        tell(tmp_path, process, again("train_step was compiled again."))
    tell(tmp_path, 2, event(HOSTILE, step=35, device="gpu:2"))
    assert main(["report", str(tmp_path)]) == 0
    sentence = capsys.readouterr().out.splitlines()[0]
    assert sentence.endswith(
        "one event was reported: near out of memory at step 30; other processes reported recompilation at step 20 "
        "(4 processes: 1 to 10), near out of memory at step 35 (process 2)."
    )
    (run,) = Page(tmp_path / "report.html").model["runs"]
    assert [(each["where"], each["step"], each["title"], each["message"]) for each in run["elsewhere"]] == [
        ("4 processes: 1 to 10", 20, "Recompilation", "train_step was compiled again."),
        ("process 2", 35, "Near out of memory", HOSTILE.replace("\u202e", "\\u202e")),
    ]
    assert [len(story.events) for story in stories_of(tmp_path)] == [1], "those of the first are its own"


def test_what_is_told_goes_to_the_run_that_began_next_to_it(tmp_path: Path):
    write_run(tmp_path, run="first")
    late = JsonlWriter(tmp_path / "memory.jsonl", "second", start=RunStart(time_s=BEGAN + 5000.0))
    late.close()
    tell(tmp_path, 1, again("of the first run"), began_s=BEGAN - 2.0)
    tell(tmp_path, 1, again("of the second"), began_s=BEGAN + 4999.0)
    path = tmp_path / process_name(1)
    path.write_text(path.read_text() + '{"run":"of-1')
    found = [[each.event.message for each in story.elsewhere.events] for story in stories_of(tmp_path)]
    assert found == [["of the first run"], ["of the second"]]
    (remark,) = stories_of(tmp_path / "memory.jsonl")[1].remarks
    assert remark.startswith("memory.process-1.jsonl, line 7, is left out: cut in the middle")


def test_a_disk_that_has_other_processes_only_is_told_as_it_is(tmp_path: Path, capsys):
    tell(tmp_path, 12, again("again"))
    tell(tmp_path, 9, again("again"))
    assert list(process_files(tmp_path / "memory.jsonl")) == [9, 12]
    assert [[each.message for each in story.events] for story in stories_of(tmp_path)] == [["again"], ["again"]]
    assert main(["report", str(tmp_path / process_name(9))]) == 0
    assert "one event was reported: recompilation at step 20" in capsys.readouterr().out
    (tmp_path / "memory.jsonl").write_text("")
    assert len(stories_of(tmp_path)) == 1, "the first process wrote nothing: what the others told is one run"


def test_a_gate_judges_the_first_process(tmp_path: Path):
    for name in ("a", "b"):
        write_run(tmp_path / name)
    tell(tmp_path / "b", 1, again("again"), began_s=BEGAN + 9000.0)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--max-regress", "0%"]) == 0
