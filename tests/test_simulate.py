"""`jm.simulate_allocator` and `jaxmem simulate`: traces and settings in every form, the table, its advice and the figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem_callbacks as jm
from jaxmem_callbacks.api.simulation import device_bytes_of, simulate_ways, trace_of
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.readers.traces import event_of, fields_of_event, read_trace
from jaxmem_callbacks.records.documents import as_text
from jaxmem_callbacks.records.errors import SimulationError, TargetError
from jaxmem_callbacks.records.presets import EnvironmentSettings
from jaxmem_callbacks.records.traces import (
    Alloc,
    AllocatorSettings,
    Free,
    ProgramEnd,
    ProgramOutput,
    ProgramStart,
    StepMark,
    Trace,
    TraceHead,
)
from jaxmem_callbacks.simulator.cases import CASES, losses_in_a_list, train_and_evaluate
from jaxmem_callbacks.writers.jsonl import write_trace
from jaxmem_callbacks.writers.simulation import simulation_document, simulation_figure

GIB = 2**30
NUMBERS, WORDS = st.integers(0, 2**60), st.text('ab[,]"\\é\n', max_size=12)
EVENTS = st.one_of(
    st.builds(Alloc, id=NUMBERS, bytes=NUMBERS, step=NUMBERS, name=WORDS, site=WORDS),
    st.builds(Free, id=NUMBERS, step=NUMBERS),
    st.builds(
        ProgramStart,
        run=NUMBERS,
        program=WORDS,
        step=NUMBERS,
        temp_bytes=st.none() | NUMBERS,
        outputs=st.lists(
            st.builds(ProgramOutput, id=NUMBERS, bytes=NUMBERS, reuses=st.none() | NUMBERS, name=WORDS), max_size=3
        ).map(tuple),
        unknown=st.none() | WORDS.filter(bool),
    ),
    st.builds(ProgramEnd, run=NUMBERS, step=NUMBERS),
    st.builds(StepMark, step=NUMBERS, live_bytes=st.none() | NUMBERS),
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A shipped case as a file."""
    path = tmp_path_factory.mktemp("traces") / "evaluate.jsonl"
    write_trace(train_and_evaluate(), path)
    return path


def told(capsys, *arguments):
    code = main(["simulate", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


# traces and their files


@settings(max_examples=50)
@given(EVENTS)
def test_an_event_is_its_line(event):
    assert event_of(json.loads(json.dumps(fields_of_event(event)))) == event


@pytest.mark.parametrize("name", CASES)
def test_a_trace_is_read_as_it_was_written(name, tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(CASES[name](), path)
    assert read_trace(path) == CASES[name]()
    assert trace_of(path) == trace_of(name)


def test_a_trace_that_was_cut_by_a_kill_ends_at_its_last_whole_line(kept, tmp_path):
    text = kept.read_text()
    cut = tmp_path / "cut.jsonl"
    cut.write_text(text[: text.rindex('"live_bytes"')])
    whole, part = read_trace(kept), read_trace(cut)
    assert part.events == whole.events[:-1]
    cut.write_text(text.replace('{"kind":"free"', '{"kind":"fr', 1))
    with pytest.raises(SimulationError, match=r"cut.jsonl:\d+: .* is no line of a trace"):
        read_trace(cut)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "x.jsonl:1: '' is no line of a trace: the file is empty"),
        ("{}\n", "`kind` is None, expected 'trace'"),
        ("[1]\n", "it is no object"),
        ('{"kind":"trace","form":2,"name":"a"}\n', "`form` is 2, expected 1"),
        ('{"kind":"trace","form":1}\n', "`name` is missing"),
        ('{"kind":"trace","form":1,"name":"a"}\n{"kind":"grow"}\n', ":2: .*expected one of alloc, free"),
        ('{"kind":"trace","form":1,"name":"a"}\n{"kind":"free","id":"b","step":0}\n', "`id` is 'b', expected a whole"),
    ],
)
def test_what_is_no_trace_is_refused_with_file_and_line(text, problem, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(SimulationError, match=problem):
        read_trace(path)


def test_a_folder_holds_one_trace_or_is_refused(kept, tmp_path):
    with pytest.raises(SimulationError, match=r"holds no trace. Expected one trace's file.*trace_steps: 50"):
        read_trace(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"allocations.{name}.jsonl").write_bytes(kept.read_bytes())
        if name == "a":
            assert read_trace(tmp_path) == train_and_evaluate()
    with pytest.raises(SimulationError, match=r"holds 2 traces: allocations.a.jsonl, allocations.b.jsonl"):
        read_trace(tmp_path)
    with pytest.raises(SimulationError, match=r"nowhere does not exist.*losses_in_a_list"):
        trace_of("nowhere")
    locked = tmp_path / "a.jsonl"
    locked.symlink_to("a.jsonl")
    with pytest.raises(SimulationError, match="cannot be read"):
        read_trace(locked)


# settings in every form


@pytest.mark.core
def test_settings_come_as_a_preset_its_name_its_environment_or_whole(kept):
    ways = (
        "gpu_growth",
        jm.load_preset("fsdp", "gpu_growth"),
        EnvironmentSettings(preallocate=False),
        AllocatorSettings(device_bytes=16 * GIB, preallocate=False),
    )
    timelines = [jm.simulate_allocator(kept, way) for way in ways]
    assert timelines[1:] == timelines[:-1]
    assert timelines[0].failure is not None
    assert jm.simulate_allocator(str(kept), "gpu_growth", device_memory="24GiB").survived
    assert jm.simulate_allocator(train_and_evaluate(), "gpu_growth", device_memory="h100_sxm").survived
    assert jm.simulate_allocator("losses_in_a_list", EnvironmentSettings(), defragment="when_needed").survived
    assert not jm.simulate_allocator("losses_in_a_list", EnvironmentSettings(), device_memory=16 * GIB).survived
    steps = jm.simulate_allocator("losses_in_a_list", EnvironmentSettings(), defragment_steps=range(40)).defragmented
    assert len(steps) == 40
    assert not jm.simulate_allocator("train_and_evaluate", "gpu_preallocate", outside="10GiB").survived


def test_what_cannot_be_simulated_is_refused(kept):
    with pytest.raises(TypeError, match=r"got int as settings. Expected a preset"):
        jm.simulate_allocator(kept, 3)
    with pytest.raises(SimulationError, match="the allocator vmm is not modelled"):
        jm.simulate_allocator(kept, EnvironmentSettings(allocator="vmm"))
    with pytest.raises(SimulationError, match="a TPU's allocator is not modelled"):
        jm.simulate_allocator(kept, "tpu_default")
    nameless = Trace(head=TraceHead(name="mine"), events=())
    with pytest.raises(
        SimulationError, match=r"the trace 'mine' does not say its device's memory. Say a size or a GPU"
    ):
        jm.simulate_allocator(nameless, "gpu_growth")
    with pytest.raises(SimulationError, match="'v5e' is no GPU"):
        device_bytes_of("v5e", nameless)
    with pytest.raises(TargetError, match="Unknown target 'h10'"):
        device_bytes_of("h10", nameless)


def test_the_ways_are_those_that_presets_say():
    found = simulate_ways(train_and_evaluate(), 16 * GIB)
    rows = {row.name: row for row in found.rows}
    for name in ("gpu_preallocate", "gpu_growth", "gpu_async", "gpu_platform_debug"):
        assert rows[name].timeline == jm.simulate_allocator(train_and_evaluate(), name)
        assert rows[name].line.startswith(f"jm.apply_environment({name!r})")
        assert rows[name].modelled == (name in {"gpu_async", "gpu_platform_debug"})
    assert rows["JAX's default"].timeline.settings == AllocatorSettings(device_bytes=16 * GIB)
    line = rows["gpu_growth, fraction 0.9"].line
    assert line.startswith("jm.apply_environment(jm.load_preset('gpu_growth', environment={'fraction': 0.9}))")
    assert eval(line.partition("#")[0].removeprefix("jm.apply_environment"), {"jm": jm}).environment.fraction == 0.9  # noqa: S307
    assert found.advised is rows["JAX's default"]


# the command


def test_the_table_says_who_survives_why_the_others_fail_and_what_to_type(capsys):
    code, out, _ = told(capsys, "losses_in_a_list")
    assert code == 0
    assert "jax-ml/jax#9064" in out
    assert "JAX's default                                       fails at step 2: fragmentation" in out
    fails = (
        "Why JAX's default fails: train_step, temporaries asked for 3.5 GiB; 5.9 GiB were free, 3.1 GiB of it in one"
    )
    assert fails in " ".join(out.split()), "wrapped as a paragraph"
    assert out.endswith(
        "Take gpu_preallocate:\n    jm.apply_environment('gpu_preallocate')  # above the first use of JAX\n"
    )
    code, out, _ = told(capsys, "train_and_evaluate")
    assert code == 0
    assert out.endswith("Take JAX's default: the run survives, and there is nothing to set.\n")


def test_nothing_helps_where_the_device_is_too_small(capsys):
    code, out, _ = told(capsys, "train_and_evaluate", "--device-memory", "8GiB")
    assert code == 1
    assert "fails at step 0: capacity" in out
    assert out.endswith("None of these survives: the run needs less memory, or a larger device.\n")
    assert "temporaries asked for 3.8 GiB, and 2.9 GiB were free in all" in out


def test_defragmentation_is_a_way_of_its_own_and_its_line_is_told(capsys):
    code, out, _ = told(capsys, "losses_in_a_list", "--device-memory", "15GiB", "--outside", "1.5GiB")
    assert code == 0
    assert "defragmented when needed" in out
    code, out, _ = told(capsys, "losses_in_a_list", "--defragment-at", "1", "--defragment-at", "3", "--before-0.11")
    assert code == 0
    assert "JAX's default, defragmented after step 1, 3" in out
    found = simulate_ways(losses_in_a_list(), 16 * GIB, defragment_steps=(1,))
    row = next(row for row in found.rows if row.name == "gpu_preallocate, defragmented after step 1")
    assert row.line.splitlines()[1] == "state, report = jm.defragment(state)  # after step 1"


def test_json_says_every_figure(capsys, kept):
    code, out, _ = told(capsys, kept, "--target", "h100_sxm", "--json")
    said = json.loads(out)
    assert code == 0
    assert said["trace"]["name"] == "train_and_evaluate"
    assert said["device_bytes"] == 84_942_979_072
    assert said["advised"] == "JAX's default"
    assert len(said["rows"]) == 10
    assert said["rows"][0]["survived"] is True
    assert said["rows"][0]["timeline"]["points"][0]["in_use_bytes"] > 3 * GIB


def test_the_figure_has_a_line_for_each_outcome(capsys, tmp_path):
    path = tmp_path / "blocks.png"
    assert told(capsys, "variable_lengths", "--figure", path)[0] == 0
    assert path.read_bytes()[:4] == b"\x89PNG"
    found = simulate_ways(CASES["variable_lengths"](), 16 * GIB)
    (axes,) = simulation_figure(found).axes
    labels = [line.get_label() for line in axes.lines if not line.get_label().startswith("_")]
    assert sum(label.count("gpu_") + label.count("default") for label in labels) == len(found.rows)
    grown = next(label for label in labels if label.startswith("gpu_growth;"))
    assert grown.endswith("fails at step 9: fragmentation, asked for 8.2 GiB")
    line = next(line for line in axes.lines if line.get_label().startswith("JAX's default"))
    points = found.rows[0].timeline.points
    assert list(line.get_ydata()) == [point.least_block_bytes / GIB for point in points]
    code, _, err = told(capsys, "variable_lengths", "--figure", tmp_path / "nowhere" / "x.png")
    assert code == 2
    assert "x.png cannot be written" in err


def test_unknown_temporaries_and_what_a_trace_cannot_see_are_told():
    start = ProgramStart(run=1, program="theirs", step=0, temp_bytes=None, unknown="not registered")
    head = TraceHead(name="mine", device="gpu:0", device_bytes=GIB, blind=("It sees little.",))
    text = as_text(simulation_document(simulate_ways(Trace(head=head, events=(start, ProgramEnd(run=1, step=0))), GIB)))
    assert "mine (recorded on gpu:0) on a device of 1.0 GiB" in text
    assert "! The temporaries of theirs are unknown and left out" in text
    assert "! It sees little." in text


def test_the_command_lists_its_cases_and_refuses_what_it_cannot_do(capsys):
    code, out, _ = told(capsys, "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(CASES)
    assert "between two programs" in out
    assert told(capsys)[0] == 2
    for arguments, message in (
        ((), "needs a trace. Name a file"),
        (("nowhere",), "nowhere does not exist"),
        (("variable_lengths", "--device-memory", "12"), "has no unit"),
        (("variable_lengths", "--device-memory", "12 furlongs"), "Not a size"),
        (("variable_lengths", "--outside", "much"), "Not a size: 'much'"),
        (("variable_lengths", "--target", "v5e"), "'v5e' is no GPU"),
    ):
        code, _, err = told(capsys, *arguments)
        assert code == 2, arguments
        assert message in err


def test_names_of_files_win_over_names_of_cases(kept, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("losses_in_a_list").write_bytes(kept.read_bytes())
    assert trace_of("losses_in_a_list").head.name == "train_and_evaluate"
