"""JSON lines there and back: parts by size, restarts, kills at any byte, newer and broken lines; none is lost or cut in two."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem_callbacks.analysis.observation import Metrics
from jaxmem_callbacks.readers.decoding import record_from
from jaxmem_callbacks.readers.runs import JAX_NAMES, Line, earlier_parts, fields_of, read_lines, record_of, run_files
from jaxmem_callbacks.records.arrays import HeapMap, LiveBuffer
from jaxmem_callbacks.records.errors import RunFileError
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.programs import Compilation
from jaxmem_callbacks.records.runs import (
    AcrossFigure,
    AcrossProcesses,
    Dropped,
    MemoryEvent,
    Reading,
    RunEnd,
    RunStart,
    Said,
    Unavailable,
)
from jaxmem_callbacks.writers.jsonl import JsonlWriter
from tests import sample_plans
from tests.sample_records import COMPILED, EVENT, READING, TABLE, WINDOW

TEXTS = st.text(max_size=30)
NUMBERS = st.floats(allow_nan=False) | st.integers(-(2**63), 2**63)
BYTES = st.none() | st.integers(0, 2**60)
TIMES = st.floats(0, 2e9)
READINGS = st.builds(
    Reading,
    source=st.sampled_from(["allocator", "live_arrays", "host"]),
    device=TEXTS,
    step=st.integers(-1, 2**40),
    time_s=TIMES,
    **dict.fromkeys(JAX_NAMES, BYTES),
    live_array_bytes=BYTES,
)
RECORDS = (
    READINGS
    | st.builds(Unavailable, figure=TEXTS, device=TEXTS, reason=TEXTS)
    | st.builds(Metrics, step=st.integers(), time_s=TIMES, values=st.dictionaries(TEXTS, st.floats(allow_nan=False)))
    | st.builds(
        MemoryEvent,
        kind=st.sampled_from(["near_oom", "recompilation"]),
        step=st.integers(),
        time_s=TIMES,
        device=TEXTS,
        message=TEXTS,
        action=TEXTS,
        figures=st.dictionaries(TEXTS, TEXTS | NUMBERS.filter(math.isfinite)),
    )
    | st.builds(
        HeapMap,
        device=TEXTS,
        step=st.integers(),
        time_s=TIMES,
        buffers=st.lists(
            st.builds(LiveBuffer, address=st.integers(0, 2**48), bytes=st.integers(1, 2**40), label=TEXTS)
        ).map(tuple),
    )
    | st.builds(
        AcrossProcesses,
        step=st.integers(),
        time_s=TIMES,
        processes=st.integers(1, 9),
        silent=st.lists(st.integers(0, 8)).map(tuple),
        figures=st.dictionaries(
            TEXTS,
            st.builds(
                AcrossFigure,
                low=st.integers(),
                low_process=st.integers(),
                mean=st.integers(),
                high=st.integers(),
                high_process=st.integers(),
                high_device=TEXTS,
            ),
            max_size=2,
        ),
    )
    | st.builds(Dropped, step=st.integers(), time_s=TIMES, stamps=st.integers())
    | st.builds(Said, step=st.integers(), time_s=TIMES, message=TEXTS)
    | st.sampled_from([COMPILED, dataclasses.replace(COMPILED, memory=None, unavailable="no"), sample_plans.six()])
)


def told(folder: Path) -> list[Line]:
    (files,) = run_files(folder)
    return list(read_lines(files))


def records(lines: list[Line], run: str) -> list[object]:
    return [line.record for line in lines if line.run == run and not isinstance(line.record, RunStart)]


@pytest.mark.core
@given(record=RECORDS)
def test_a_record_survives_its_line(record):
    fields = json.loads(json.dumps(fields_of(record, 1.0)))
    assert record_of(fields) == record
    assert record_of({**fields, "of_a_newer_version": {"any": [1]}}) == record


@pytest.mark.parametrize(
    "rows", [[[1, 2]], [[1, 2, 7]], [1], None], ids=["short", "no such label", "no row", "nothing"]
)
def test_a_map_whose_rows_are_none_is_told(rows):
    line = {"kind": "heap_map", "device": "gpu:0", "step": 1, "time_s": 1.0, "labels": ["f32[1]"], "buffers": rows}
    with pytest.raises(
        ValueError, match=r"`buffers` are not rows of an address, bytes and the number of one of its `labels`"
    ):
        record_of(line)


def test_what_is_no_number_survives_as_one():
    metrics = Metrics(step=1, time_s=0.0, values={"loss": math.nan, "up": math.inf, "down": -math.inf})
    back = record_of(json.loads(json.dumps(fields_of(metrics, 0.0), allow_nan=False)))
    assert isinstance(back, Metrics)
    assert math.isnan(back.values["loss"])
    assert (back.values["up"], back.values["down"]) == (math.inf, -math.inf)
    assert fields_of(WINDOW, 0.0) is fields_of(TABLE, 0.0) is None


@settings(deadline=None, max_examples=60)
@given(runs=st.lists(st.lists(RECORDS, max_size=8), min_size=1, max_size=3), part_bytes=st.integers(1, 4000))
def test_parts_lose_no_line_and_cut_none(runs, part_bytes):
    """Several runs into one file, each rotating by size: every record is there once, in order, under its own run."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "memory.jsonl"
        for number, each in enumerate(runs):
            writer = JsonlWriter(path, f"run{number}", part_bytes=part_bytes)
            for record in each:
                writer.write(record)
            writer.close()
        lines = told(Path(name))
        for number, each in enumerate(runs):
            *written, end = records(lines, f"run{number}")
            assert written == each
            assert isinstance(end, RunEnd)
            starts = [line.record for line in lines if line.run == f"run{number}" and isinstance(line.record, RunStart)]
            assert [start.part for start in starts] == list(range(1, len(starts) + 1))
        for file in [*earlier_parts(path), path]:
            text = file.read_bytes()
            assert text.endswith(b"\n")
            first, *rest = [json.loads(line) for line in text.splitlines()]
            assert first["kind"] == "run", "each part says of itself whose it is"
            if len(text) > part_bytes:
                assert len(rest) <= 1, "only a line that fits into no part makes a larger one"


@settings(deadline=None, max_examples=60)
@given(each=st.lists(RECORDS, min_size=1, max_size=6), share=st.floats(0, 1))
def test_a_kill_at_any_byte_leaves_every_full_line(each, share):
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "memory.jsonl"
        writer = JsonlWriter(path, "killed")
        for record in each:
            writer.write(record)
        text = path.read_bytes()
        kept = text[: round(share * len(text))]
        path.write_bytes(kept)
        whole = kept.count(b"\n")
        again = JsonlWriter(path, "again")
        again.write(READING)
        again.close()
        writer.close()  # whose file is the same: it appends its end
        lines = told(Path(name))
        before = [record for record in records(lines, "killed") if not isinstance(record, RunEnd)]
        assert before[: max(whole - 1, 0)] == each[: max(whole - 1, 0)]
        assert len(before) - max(whole - 1, 0) in (0, 1), "the last line may lack only its end"
        assert records(lines, "again")[:1] == [READING]


def test_a_full_file_is_a_part_and_the_newest_keeps_its_name(tmp_path: Path):
    path = tmp_path / "memory.jsonl"
    writer = JsonlWriter(path, "r", part_bytes=600)
    for _ in range(12):
        writer.write(READING)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names[:2] == ["memory.000001.jsonl", "memory.000002.jsonl"]
    assert names[-1] == "memory.jsonl"
    assert all(file.stat().st_size <= 600 for file in tmp_path.iterdir())
    writer.close()
    (tmp_path / "memory.000001.jsonl").rename(tmp_path / "memory.000011.jsonl")
    second = JsonlWriter(path, "s", part_bytes=1)
    second.close()
    assert (tmp_path / "memory.000012.jsonl").exists(), "no part is ever written over"
    path.unlink()  # killed between the renaming and the next line
    assert len([line for line in told(tmp_path) if line.record == READING]) == 12


WRITE_FOR_EVER = """
import sys
from pathlib import Path
from jaxmem_callbacks.records.runs import Reading
from jaxmem_callbacks.writers.jsonl import JsonlWriter
writer = JsonlWriter(Path(sys.argv[1]), "killed", part_bytes=4096)
step = 0
while True:
    writer.write(Reading(source="host", device="host", step=step, time_s=1.0, resident_bytes=step))
    if step == 200:
        print("going", flush=True)
    step += 1
"""


@pytest.mark.core
def test_kill_9_while_it_writes_and_rotates_loses_no_line(tmp_path: Path):
    path = tmp_path / "memory.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", WRITE_FOR_EVER, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    seen = [line.record.step for line in told(tmp_path) if isinstance(line.record, Reading)]
    assert len(seen) > 200
    assert seen == list(range(len(seen)))


# What is no run


def wrong(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "memory.jsonl"
    path.write_text(text)
    with pytest.raises(RunFileError, match=match):
        told(tmp_path)


START = '{"run":"r","kind":"run","time_s":1.0}\n'


def test_lines_of_something_else_are_told_with_file_and_line(tmp_path: Path):
    wrong(
        tmp_path, START + "oops\n" + START.replace("run", "unavailable"), r"memory\.jsonl:2: 'oops' is no line of a run"
    )
    wrong(
        tmp_path, START + '{"loss": 3}\n', r"memory\.jsonl:2: '\{\"loss\": 3\}' is no line of a run. Expected an object"
    )
    wrong(
        tmp_path,
        START + '{"run":"r","kind":"reading","source":"host","device":"h","step":"x","time_s":1}\n',
        r"memory\.jsonl:2: a line of kind 'reading' whose `step` is 'x', expected a whole number",
    )
    wrong(
        tmp_path, '{"run":"r","kind":"event","event":"near_oom"}', r":1: a line of kind 'event' whose `step` is missing"
    )
    wrong(tmp_path, START + "[1]\n{}\n", r":2: '\[1\]' is no line of a run")


def test_places_without_a_run_are_told(tmp_path: Path):
    with pytest.raises(RunFileError, match=r"nothing does not exist. Expected the folder that MemoryMonitor"):
        run_files(tmp_path / "nothing")
    with pytest.raises(RunFileError, match=r"holds no memory\.jsonl\. Expected a folder in which a monitor wrote"):
        run_files(tmp_path)
    with pytest.raises(RunFileError, match=r"cannot be read: Is a directory"):
        list(read_lines([tmp_path]))


def test_cut_lines_and_newer_kinds_are_remarked_upon(tmp_path: Path):
    text = START + '{"run":"r","ki\n' + START + '{"run":"r","kind":"of_2030","x":1}\n\x00\x00'
    (tmp_path / "memory.jsonl").write_text(text)
    lines = told(tmp_path)
    assert [(line.number, line.remark.partition(":")[0]) for line in lines if line.remark] == [
        (2, "cut in the middle"),
        (4, "of kind 'of_2030', which only a newer version knows"),
        (5, "cut in the middle"),
    ]


def test_folders_of_folders_and_single_files(tmp_path: Path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        writer = JsonlWriter(tmp_path / name / "memory.jsonl", name, part_bytes=1)
        writer.write(READING)
        writer.close()
    found = run_files(tmp_path)
    assert [[file.relative_to(tmp_path).as_posix() for file in files] for files in found] == [
        [f"{name}/memory.000001.jsonl", f"{name}/memory.jsonl"] for name in ("a", "b")
    ]
    assert run_files(tmp_path / "a" / "memory.jsonl") == [found[0]]


# Decoding


def test_plans_are_decoded_with_all_that_they_hold():
    for made in (sample_plans.six(), sample_plans.fifteen(), sample_plans.unfit(), sample_plans.without_limit()):
        assert record_from(PlanRecord, json.loads(json.dumps(dataclasses.asdict(made)))) == made


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"memory": {"name": 3}}, r"`memory\.name` is 3, expected a text"),
        ({"signature": [["x"]]}, r"`signature\[0\]` is \['x'\], expected a list of 2"),
        ({"signature": 7}, "`signature` is 7, expected a list"),
        ({"time_s": True}, "`time_s` is True, expected a number"),
        ({"program": None}, "`program` is None, expected a text"),
    ],
)
def test_fields_of_another_type_are_named(change, match):
    with pytest.raises(ValueError, match=match):
        record_from(Compilation, {**dataclasses.asdict(COMPILED), **change})


def test_what_a_record_itself_refuses_is_told_with_its_place():
    with pytest.raises(ValueError, match=r"`policy`: Unknown remat policy 'all'"):
        record_from(StepPolicy, {"remat": "all"}, "policy")
    with pytest.raises(ValueError, match="3 is not an object"):
        record_from(StepPolicy, 3)
    with pytest.raises(ValueError, match="`figures` is 3, expected an object"):
        record_from(MemoryEvent, {**dataclasses.asdict(EVENT), "figures": 3})
    with pytest.raises(ValueError, match="`kind` is 3, expected a text"):
        record_from(MemoryEvent, {**dataclasses.asdict(EVENT), "kind": 3})
