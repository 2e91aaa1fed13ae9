"""Writers: what is written is read back by the reader it is meant for."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import math
import re
from pathlib import Path
from typing import get_args

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from jaxmem_callbacks.analysis.figures import Spread, Window, range_tags
from jaxmem_callbacks.analysis.observation import Metrics
from jaxmem_callbacks.records.documents import Document, as_markdown
from jaxmem_callbacks.records.runs import EventKind, Unavailable
from jaxmem_callbacks.writers.events import event_document, event_title
from jaxmem_callbacks.writers.figures import EVENT_COLOURS, draw_over_time
from jaxmem_callbacks.writers.jsonl import JsonlWriter
from jaxmem_callbacks.writers.log import LogWriter
from jaxmem_callbacks.writers.protocol import CollectingWriter, LoggedTable, Picture, Record
from jaxmem_callbacks.writers.tensorboard import TensorBoardWriter, layout_of
from tests.sample_records import COMPILED, EVENT, MIB, READING, TABLE, WINDOW, points


@pytest.fixture(scope="module")
def picture() -> Picture:
    drawn = draw_over_time(points(), [EVENT], limit_bytes=2**30, needs={"train_step": 700 * MIB})
    assert drawn is not None
    return drawn


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, picture: Picture) -> tuple[Path, EventAccumulator]:
    folder = tmp_path_factory.mktemp("run")
    writer = TensorBoardWriter(folder, "run1")
    for record in (WINDOW, EVENT, TABLE, picture, READING, COMPILED):
        writer.write(record)
    writer.flush()
    read_back = EventAccumulator(str(folder))
    read_back.Reload()
    writer.close()
    return folder, read_back


@pytest.mark.core
def test_tensorboard_writes_one_file_that_is_on_disk_after_flush(page):
    folder, read_back = page
    (file,) = folder.iterdir()
    assert file.name.startswith("events.out.tfevents.")
    assert file.name.endswith(".run1")
    assert sorted(read_back.Tags()["scalars"]) == [
        "memory/in_use_gib",
        "train/loss",
        "window/memory/in_use_gib/max",
        "window/memory/in_use_gib/min",
    ]


def test_tensorboard_scalars_carry_step_and_time(page):
    (scalar,) = page[1].Scalars("memory/in_use_gib")
    assert (scalar.step, scalar.wall_time, scalar.value) == (7, 1700000000.25, 2.0)
    assert page[1].Scalars("window/memory/in_use_gib/max")[0].value == 4.0


def test_tensorboard_says_beside_each_chart_what_it_shows(page):
    """In a field that TensorBoard's own data server reads too: `data_class` says that it is no old metadata."""
    about = page[1].SummaryMetadata("memory/in_use_gib")
    assert about.summary_description == (
        "Held by the allocator; in GiB, from the allocator's statistics (Device.memory_stats), at the moment of reading."
    )
    assert about.SerializeToString().endswith(about.summary_description.encode() + b"\x20\x01")
    assert (
        page[1].SummaryMetadata("window/memory/in_use_gib/max").summary_description.startswith("Highest of each window")
    )
    assert "train/loss" not in page[1].summary_metadata, "what a user's metric means only the user knows"


def test_tensorboard_has_a_page_of_charts(page):
    (entry,) = page[1].Tensors("custom_scalars__config__")
    layout = Layout.FromString(entry.tensor_proto.string_val[0])
    charts = {category.title: [chart.title for chart in category.chart] for category in layout.category}
    assert charts == {
        "Device memory": ["Against the limit, mean of each window [GiB]"],
        "Training": ["The step's metrics, mean of each window"],
        "Range of each window: min, mean, max": ["In use [GiB], from allocator"],
    }
    tags = ["memory/in_use_gib", "window/memory/in_use_gib/min", "window/memory/in_use_gib/max"]
    assert list(layout.category[-1].chart[0].multiline.tag) == [f"^{tag}$" for tag in tags]


def test_the_page_of_charts_is_written_again_when_a_chart_comes(tmp_path: Path):
    writer = TensorBoardWriter(tmp_path, "x")
    still = Spread(low=1.0, mean=1.0, high=1.0, count=1)
    for step, tags in enumerate(
        [["memory/host_gib"], ["memory/host_gib"], ["memory/host_gib", "memory/program_gib/train_step"]]
    ):
        writer.write(Window(step=step, time_s=1.0, spreads=dict.fromkeys(tags, still)))
    writer.close()
    read_back = EventAccumulator(str(tmp_path))
    read_back.Reload()
    assert [entry.step for entry in read_back.Tensors("custom_scalars__config__")] == [0, 2]


USE = "The limit, and below it as a band what is in use [GiB]"


def test_charts_are_the_same_for_all_platforms_so_that_tensorboard_shows_them_once():
    cpu = ["memory/live_arrays_gib"]
    gpu = ["memory/in_use_gib", "memory/limit_gib", "memory/headroom_gib", "memory/live_arrays_gib"]
    on_gpu = layout_of(gpu)["Device memory"]
    assert on_gpu.pop(USE) == ("Margin", ["memory/limit_gib", "memory/headroom_gib", "memory/limit_gib"])
    assert layout_of(cpu)["Device memory"].items() <= on_gpu.items()
    in_mib = layout_of([tag.replace("_gib", "_mib") for tag in cpu])
    assert list(in_mib["Device memory"]) == ["Against the limit, mean of each window [MiB]"]
    assert in_mib["Device memory"]["Against the limit, mean of each window [MiB]"][1][0] == "^memory/limit_mib$"
    ranged = layout_of(["memory/in_use_mib", *range_tags("memory/in_use_mib")])["Range of each window: min, mean, max"]
    assert list(ranged) == ["In use [MiB], from allocator"]
    _, patterns = layout_of(["train/loss"])["Training"]["The step's metrics, mean of each window"]
    assert [
        bool(re.match(patterns[0], tag))
        for tag in ("train/loss", "train/a/b", "train/loss/max", "window/train/loss/max")
    ] == [
        True,
        True,
        True,
        False,
    ]


def test_tensorboard_events_are_markdown_text(page):
    (entry,) = page[1].Tensors("memory/events/text_summary")
    text = entry.tensor_proto.string_val[0].decode()
    assert entry.step == 12
    assert "**Near out of memory** at step 12 (gpu:0)" in text
    assert "**What to do:** Take a smaller batch." in text
    assert "| limit bytes | 100 MiB (104857600 B) |" in text
    assert "| headroom share | 3.0% |" in text


def test_tensorboard_shows_the_table_of_what_is_known(page):
    (entry,) = page[1].Tensors("memory/known_here/text_summary")
    assert "| pool | unknown, because \\| so |" in entry.tensor_proto.string_val[0].decode()


def test_tensorboard_shows_the_figure(page, picture: Picture):
    (image,) = page[1].Images("memory/over_time")
    assert (image.width, image.height) == (picture.width, picture.height)
    assert Image.open(io.BytesIO(image.encoded_image_string)).size == (700, 660)


def test_a_point_before_the_first_step_is_shown_at_zero(tmp_path: Path):
    writer = TensorBoardWriter(tmp_path, "early")
    writer.write(Window(step=-1, time_s=1.0, spreads={"memory/host_gib": Spread(low=1.0, mean=1.0, high=1.0, count=1)}))
    writer.close()
    read_back = EventAccumulator(str(tmp_path))
    read_back.Reload()
    assert read_back.Scalars("memory/host_gib")[0].step == 0


def test_cells_with_bars_and_line_ends_stay_in_their_cell():
    assert "a\\|b" in as_markdown(event_document(EVENT))
    table = LoggedTable(tag="t", step=0, time_s=0.0, columns=("x",), rows=[("one\ntwo",)])
    assert as_markdown(Document([table])).splitlines()[-1] == "| one two |"


# The figure


def colours(drawn: Picture) -> set[tuple[int, ...]]:
    image = Image.open(io.BytesIO(drawn.png)).convert("RGB")
    return {colour for _, colour in image.getcolors(maxcolors=2**24)}


def test_the_figure_shows_limit_line_and_events():
    with_event = draw_over_time(points(), [EVENT], limit_bytes=2**30)
    without = draw_over_time(points(), [])
    red = (0xD6, 0x27, 0x28)
    assert red in colours(with_event)
    assert red not in colours(without)


def test_every_kind_of_event_has_a_title_and_a_colour_of_its_own_in_the_figure_and_in_the_log(capfd, monkeypatch):
    monkeypatch.setattr(logging.getLogger("jaxmem_callbacks"), "propagate", False)
    kinds = get_args(EventKind)
    events = [dataclasses.replace(EVENT, kind=kind) for kind in kinds]
    assert set(EVENT_COLOURS) == set(kinds)
    assert len(set(EVENT_COLOURS.values())) == len(kinds)
    plain = colours(draw_over_time(points(), []))
    for event in events:
        assert colours(draw_over_time(points(), [event])) - plain, event.kind
    for event in events:
        LogWriter().write(event)
    said = capfd.readouterr().err.splitlines()
    shown = [kind for kind in kinds if kind != "out_of_memory"]  # its report has printed the sentence
    assert [line.partition(" at step")[0] for line in said] == [f"jaxmem: {event_title(kind)}" for kind in shown]
    assert event_title("donation_lost") == "Donation lost"


def test_the_figure_draws_the_largest_programs_only():
    many = {f"program_{number}": number * MIB for number in range(30)}
    assert (
        draw_over_time(points(), [], needs=many).png
        == draw_over_time(points(), [], needs=dict(list(many.items())[-4:])).png
    )


def test_the_figure_leaves_pyplot_alone():
    import sys

    before = sys.modules.get("matplotlib.pyplot")
    draw_over_time(points(), [])
    if before is None:
        assert "matplotlib.pyplot" not in sys.modules
    else:
        assert before.get_fignums() == []


def test_without_points_there_is_no_figure():
    assert draw_over_time([], [EVENT]) is None


# JSON lines


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.core
def test_jsonl_has_bytes_as_ints_under_jax_own_names(tmp_path: Path):
    writer = JsonlWriter(tmp_path / "m.jsonl", "r1")
    writer.write(READING)
    first, reading = lines(tmp_path / "m.jsonl"), None
    (start, reading) = first
    assert start["kind"] == "run"
    assert reading == {
        "run": "r1",
        "kind": "reading",
        "source": "allocator",
        "device": "gpu:1",
        "step": 4,
        "time_s": 1.5,
        "bytes_in_use": 5,
        "bytes_limit": 2**40,
        "largest_free_block_bytes": 3,
    }
    writer.close()


def test_jsonl_lines_are_on_disk_before_close_for_every_raw_record(tmp_path: Path):
    writer = JsonlWriter(tmp_path / "m.jsonl", "r1")
    metrics = Metrics(step=1, time_s=0.0, values={"loss": math.nan, "up": math.inf})
    why = Unavailable(figure="allocator", device="cpu:0", reason="none here")
    for record in (EVENT, metrics, why, COMPILED, WINDOW, TABLE):
        writer.write(record)
    kinds = [line["kind"] for line in lines(tmp_path / "m.jsonl")]
    assert kinds == ["run", "event", "metrics", "unavailable", "compilation"], "derived records are left out"
    _, event, values, _, compiled = lines(tmp_path / "m.jsonl")
    assert event["event"] == "near_oom"
    assert event["figures"]["limit_bytes"] == 100 * MIB
    assert values["values"] == {"loss": "nan", "up": "inf"}, "JSON has no NaN"
    assert compiled["memory"]["temp_bytes"] == 3
    writer.close()


def test_jsonl_appends_after_a_run_that_was_killed_in_the_middle_of_a_line(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"run":"old","kind":"run"}\n{"run":"old","kin')
    writer = JsonlWriter(path, "new")
    writer.write(READING)
    writer.close()
    old, broken, start, reading, end = path.read_text().splitlines()
    assert json.loads(old)["run"] == "old"
    assert broken == '{"run":"old","kin'
    assert json.loads(start)["run"] == json.loads(reading)["run"] == "new"
    assert json.loads(end)["kind"] == "end", "closed, not killed"


# The double


def test_the_collecting_double_keeps_everything_in_order():
    writer = CollectingWriter()
    records: list[Record] = [READING, EVENT, WINDOW]
    for record in records:
        writer.write(record)
    writer.close()
    assert writer.records == records
    assert writer.events == [EVENT]
    assert writer.of(Window) == [WINDOW]
    assert writer.closed
