"""What shows a plan: a figure in which no label covers another, tables that say where figures come from, TensorBoard's file."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import jaxmem_callbacks as jm
from jaxmem_callbacks.analysis.figures import Window
from jaxmem_callbacks.records.errors import PlanError
from jaxmem_callbacks.records.peaks import Buffer, peak_of
from jaxmem_callbacks.records.plans import BesideProgram, PlanRecord
from jaxmem_callbacks.writers.plan_figure import Box, place_labels
from jaxmem_callbacks.writers.plan_page import plan_page, require_own_folder
from jaxmem_callbacks.writers.protocol import LoggedTable, Picture
from tests import sample_plans as samples
from tests.sample_plans import GIB, MIB

RECORDS = {
    "six": samples.six(),
    "all near": samples.six(100 * MIB, limit_bytes=140 * MIB),
    "resident": samples.six(80 * MIB, resident_bytes=8 * MIB),
    "unfit": samples.unfit(),
    "without limit": samples.without_limit(),
    "fifteen": samples.fifteen(),
    "crowded": samples.crowded(),
    "one": samples.record([samples.candidate(5000, 0)], 0, 60 * GIB),
}


def figure_of(record: PlanRecord) -> Figure:
    return jm.Plan(record).figure()


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("name", RECORDS)
def test_every_point_has_a_label_and_none_covers_another(name: str) -> None:
    record = RECORDS[name]
    figure = figure_of(record)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    labels = [each for each in axes.texts if isinstance(each, Annotation)]
    assert len(labels) == sum(each.step_bytes is not None for each in record.candidates)
    boxes = [
        Box(*Text.get_window_extent(each).extents) for each in labels
    ]  # the letters, without the line to the point
    space = figure.dpi / 72 * 8  # wider than between words, so that two labels on one line never read as one
    for one, other in itertools.combinations(boxes, 2):
        assert not one.meets(other.grown(0, beside=space))
    for box in boxes:
        assert box.within(Box(*axes.get_window_extent().extents))
        for points in axes.collections:
            for x, y in axes.transData.transform(points.get_offsets()):
                assert not box.meets(Box(x, y, x, y).grown(5))
    whole = Box(0, 0, *figure.bbox.max)
    assert all(Box(*text.get_window_extent().extents).within(whole) for text in figure.legends[0].get_texts())


def test_the_figure_says_what_the_plan_says() -> None:
    figure = figure_of(samples.six())
    (axes,) = figure.axes
    assert axes.get_title() == "chosen: full, keep 0.341; 71.6 MiB, +9.8%"
    assert "none\n134 MiB, +0.0%" in [text.get_text() for text in axes.texts]
    assert [label.get_text() for label in axes.get_xticklabels()][1].endswith(" MiB")
    budget = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert [line.get_xdata()[0] for line in budget] == [72.0]
    legend = legend_of(figure)
    assert {"chosen", "fits", "too much", "budget: 72.0 MiB", "usable: 60.0 GiB, far to the right"} <= set(legend)
    # Hollow where the compiler itself recomputes, and only there.
    hollow = [
        float(each.get_offsets()[0][0]) for each in axes.collections if tuple(each.get_facecolor()[0]) == (1, 1, 1, 1)
    ]
    assert hollow == [pytest.approx(76.7, rel=1e-3)]
    assert "hollow: the compiler itself recomputes there (estimated)" in legend


def test_what_computes_hardly_anything_again_is_nowhere_shown_as_free() -> None:
    plain, recomputing = (
        dataclasses.replace(samples.candidate(size, 0), flops=10**6 + extra, extra_flops=extra, compiler_remat=extra)
        for size, extra in ((134, 0), (90, 400))
    )
    recomputing = dataclasses.replace(recomputing, policy=jm.StepPolicy(remat="full", keep=1.0))
    plan = jm.Plan(samples.record([plain, recomputing], 1, 100 * MIB))
    assert [row.split()[-3] for row in str(plan).splitlines() if "MiB  " in row] == ["+0.0%", "+<0.1%"]
    assert '<td class="right">+&lt;0.1%</td>' in plan._repr_html_()
    figure = plan.figure()
    assert figure.axes[0].get_title().endswith("90.0 MiB, +<0.1%")
    tables = [
        each for each in plan_page(plan.record, plan.frontier, step=0, time_s=0.0) if isinstance(each, LoggedTable)
    ]
    assert [sum("+<0.1%" in row for row in table.rows) for table in tables] == [1, 1]


def test_the_figure_of_a_plan_in_which_nothing_fits() -> None:
    figure = figure_of(samples.unfit())
    assert figure.axes[0].get_title() == "nothing fits; nearest: full; 61.7 MiB, +23.3%"
    assert {"nearest", "too much", "budget: 4.0 MiB, far to the left", "not drawn: 2 without a size"} <= set(
        legend_of(figure)
    )
    assert "chosen" not in legend_of(figure)


def test_the_figure_counts_what_stays_beside_the_step_and_very_different_sizes() -> None:
    figure = figure_of(RECORDS["resident"])
    assert "budget: 80.0 MiB" in legend_of(figure)
    assert 80.0 in [line.get_xdata()[0] for line in figure.axes[0].lines]
    assert min(points.get_offsets()[0][0] for points in figure.axes[0].collections) == pytest.approx(61.7 + 8, rel=1e-3)
    assert figure.axes[0].get_xlabel().endswith("; with 8.0 MiB resident")
    assert figure.axes[0].get_xscale() == "linear"
    evaluation = dataclasses.replace(samples.six().candidates[0], need_bytes=200 * MIB, sets_need="evaluate")
    larger = figure_of(samples.record([evaluation], 0, 300 * MIB))
    assert larger.axes[0].get_xlabel().endswith("; with the largest program")
    assert larger.axes[0].collections[0].get_offsets()[0][0] == 200.0
    wide = figure_of(samples.fifteen())
    assert wide.axes[0].get_xscale() == "log"
    assert "50 GiB" in [label.get_text() for label in wide.axes[0].get_xticklabels()]
    assert wide._suptitle.get_text() == "train_step on h100_sxm:64, 64 devices"


sides = st.integers(0, 400)
labels = st.tuples(st.tuples(sides, sides), st.tuples(st.integers(5, 120), st.integers(5, 30)))


@settings(max_examples=30, deadline=None)
@given(st.lists(labels, max_size=8))
def test_labels_are_inside_and_over_nothing(labels: list[Any]) -> None:
    field = Box(0, 0, 400, 400)
    points, sizes = [each[0] for each in labels], [each[1] for each in labels]
    placed = place_labels(points, sizes, field, lines=[Box(0, 199, 400, 201)])
    assert len(placed) == len(points)
    there = [box for box in placed if box is not None]
    for box in there:
        assert box.within(field)
        assert not any(box.left < x < box.right and box.bottom < y < box.top for x, y in points)
    for one, other in itertools.combinations(there, 2):
        assert not one.meets(other.grown(1, beside=8))


def test_labels_of_one_line_keep_a_space_between_them() -> None:
    field = Box(0, 0, 400, 60)
    for apart in range(40, 90, 5):
        first, second = place_labels([(150, 30), (150 + apart, 30)], [(60, 12), (60, 12)], field)
        assert first is not None
        assert second is not None
        on_one_line = first.bottom < second.top and second.bottom < first.top
        assert not on_one_line or max(second.left - first.right, first.left - second.right) >= 8


def test_a_label_without_room_is_left_out() -> None:
    assert place_labels([(5, 5)], [(50, 10)], Box(0, 0, 20, 20)) == [None]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jm.Plan(samples.six()).to_tensorboard(tmp_path_factory.mktemp("runs") / "new" / "plan")


def events_of(folder: Path) -> EventAccumulator:
    (file,) = folder.glob("events.out.tfevents.*")
    return EventAccumulator(str(file)).Reload()


def table_of(events: EventAccumulator, tag: str) -> str:
    (text,) = events.Tensors(f"{tag}/text_summary")
    return text.tensor_proto.string_val[0].decode()


@pytest.mark.core
def test_a_plan_as_a_run_of_tensorboard(written: Path) -> None:
    events = events_of(written)
    tags = events.Tags()
    assert tags["images"] == ["plan/frontier"]
    assert set(tags["tensors"]) == {
        "plan/candidates/text_summary",
        "plan/where_figures_come_from/text_summary",
        "custom_scalars__config__",
    }
    (image,) = events.Images("plan/frontier")
    assert (image.width, image.height) == (700, 700)
    assert image.encoded_image_string.startswith(b"\x89PNG")
    scalars = {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in tags["scalars"]}
    needs = samples.six().candidates[3].step_bytes
    assert scalars == {
        "memory/planned_gib/train_step": [(0, pytest.approx(needs / GIB))],
        "memory/plan_budget_gib": [(0, pytest.approx(72 / 1024))],
    }


def test_its_tables_say_where_each_figure_comes_from(written: Path) -> None:
    events = events_of(written)
    candidates = table_of(events, "plan/candidates").splitlines()
    assert len(candidates) == 2 + 6
    assert "| -> | full, keep 0.341 | 71.6 MiB | unknown | 99% | +9.8% | unknown | 0 |" in candidates
    sources = table_of(events, "plan/where_figures_come_from")
    rows = dict(row.strip("| ").split(" | ", 1) for row in sources.splitlines())
    assert rows["needs"].startswith("71.6 MiB (75,078,042 B) | the compiler for h100_sxm: arguments + results")
    assert rows["extra FLOPs"].startswith("+9.8% | counted in the trace")
    assert rows["budget"].startswith("72.0 MiB (75,497,472 B) | as asked for")
    assert rows["modelled time"].startswith("unknown | no data sheet")
    assert rows["XLA's own remat"].startswith("120 instructions")
    assert rows["usable"].startswith("60.0 GiB")


def test_a_plan_that_is_richer_tells_more(tmp_path: Path) -> None:
    plan = samples.fifteen()
    beside = BesideProgram(name="evaluate", program_bytes=58 * GIB, held_bytes=0, fits=True)
    chosen = dataclasses.replace(
        plan.candidates[-1],
        modelled_s=0.25,
        compiler_remat=7,
        refusal="out of memory",
        beside=(beside,),
        need_bytes=59 * GIB,
        sets_need="evaluate",
        placed_elsewhere=peak_of([Buffer(bytes=GIB, shape="f32[268435456]", kind="argument", group="batch")]),
        placed_by="v5p:1x1x1",
    )
    record = dataclasses.replace(
        plan,
        candidates=(*plan.candidates[:-1], chosen),
        flags={"xla_gpu_enable_triton_gemm": "False"},
        margin="left out: much",
        notes=("zero1 was not compiled.",),
        resident_bytes=GIB,
    )
    sources = table_of(events_of(jm.Plan(record).to_tensorboard(tmp_path)), "plan/where_figures_come_from")
    for words in (
        "64 devices, mesh fsdp=64",
        "| compiler option | xla_gpu_enable_triton_gemm=False |",
        "keep a margin: left out: much",
        "| evaluate, beside the step | 58.0 GiB (62,277,025,792 B) |",
        "| the device must hold | 59.0 GiB (63,350,767,616 B) | resident bytes and the largest program: evaluate |",
        "| note |  | zero1 was not compiled. |",
        "| beside the step | 1.0 GiB (1,073,741,824 B) | resident=, as given |",
        "| modelled time | 250 ms | a model from FLOPs, bytes moved and the vendor's data sheet; no measurement |",
        "an estimate for 7 instructions",
        "refused by the compiler",
        "| its peak there | 1.0 GiB (1,073,741,824 B) | the compiler for v5p:1x1x1, which has room for what ",
    ):
        assert words in sources, words
    free = table_of(
        events_of(jm.Plan(samples.without_limit()).to_tensorboard(tmp_path)), "plan/where_figures_come_from"
    )
    assert "| budget | none | the cpu has no limit. |" in free, "and the page before it was replaced"


@pytest.mark.core
def test_a_plan_writes_into_no_run(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1.host.run").touch()
    plan = jm.Plan(samples.six())
    with pytest.raises(
        PlanError, match=r"the folder holds a run \(events.*\), and TensorBoard goes over to the newest.*_plan'\)"
    ):
        plan.to_tensorboard(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(
        PlanError, match=r"logdir='gs://a/b'\): expected a local folder\. .*whose monitor takes plan=plan"
    ):
        plan.to_tensorboard("gs://a/b")
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match=r"file/plan'\): expected a folder that can be written: Not a directory\. Type"):
        plan.to_tensorboard(tmp_path / "file" / "plan")


@pytest.mark.core
def test_asking_for_a_folder_leaves_nothing_there(tmp_path: Path) -> None:
    assert require_own_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert not list(tmp_path.iterdir())


@pytest.mark.core
def test_a_plan_in_which_nothing_fits_is_no_preset() -> None:
    with pytest.raises(PlanError, match=r"Nothing fits: .* the budget of 4\.0 MiB allows"):
        jm.Plan(samples.unfit()).to_yaml()


@pytest.mark.core
def test_a_monitor_writes_its_plan_once_at_the_start(tmp_path: Path) -> None:
    writer = jm.CollectingWriter()
    settings = jm.load_preset("monitor_only", monitor={"on_error": "raise", "window_s": 0.01, "scan_s": 0.01})
    with jm.MemoryMonitor(settings, logdir=tmp_path, writer=writer, plan=jm.Plan(samples.six())) as monitor:
        for step in range(3):
            monitor(step)
            monitor.flush()
    pages = [
        each.tag for each in writer.records if isinstance(each, LoggedTable | Picture) and each.tag.startswith("plan/")
    ]
    assert pages == ["plan/candidates", "plan/where_figures_come_from", "plan/frontier"]
    assert writer.records[0] == samples.six(), "before anything else"
    windows = writer.of(Window)
    assert len(windows) > 1
    assert {window.scalars()["memory/plan_budget_mib"] for window in windows} == {72}
    assert {"memory/over_time", "plan/frontier"} <= set(events_of(tmp_path).Tags()["images"])
    lines = [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]
    (plan,) = [line["plan"] for line in lines if line["kind"] == "plan"]
    assert plan["candidates"][plan["chosen"]]["step_bytes"] == samples.six().candidates[3].step_bytes


def test_a_plan_is_not_drawn_for_writers_that_show_no_pictures() -> None:
    seen: list[dict[str, float]] = []
    with jm.MemoryMonitor(writer=lambda _step, scalars: seen.append(dict(scalars)), plan=samples.six()) as monitor:
        monitor(0)
    assert "memory/planned_mib/train_step" in seen[0]
