"""as_writer: each shape of logger that training loops have, by a small honest object of that shape."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tensorboardX
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxmem_callbacks.analysis.figures import Spread, Window
from jaxmem_callbacks.writers.adapters import as_writer
from jaxmem_callbacks.writers.figures import draw_over_time
from jaxmem_callbacks.writers.protocol import CollectingWriter
from tests.sample_records import EVENT, READING, TABLE, WINDOW, points

SCALARS = {
    "memory/in_use_gib": 2.0,
    "window/memory/in_use_gib/min": 1.0,
    "window/memory/in_use_gib/max": 4.0,
    "train/loss": 0.5,
}


def assert_is_a_drawing(images: list[Any], where: tuple[int, str]) -> None:
    """One image of N x height x width x 3 colours, as clu takes it, with white paper and red in it."""
    ((step, drawn),) = images
    ((tag, pixels),) = drawn.items()
    assert (step, tag) == where
    assert (pixels.shape, str(pixels.dtype)) == ((1, 660, 700, 3), "uint8")
    assert pixels[0, 0, 0].tolist() == [255, 255, 255]
    assert (pixels == [0xD6, 0x27, 0x28]).all(axis=-1).any(), "the limit"


class Clu:
    """As clu.metric_writers.MetricWriter."""

    def __init__(self) -> None:
        self.scalars: list[Any] = []
        self.texts: list[Any] = []
        self.images: list[Any] = []
        self.flushed = 0

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self.scalars.append((step, scalars))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self.texts.append((step, texts))

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        self.images.append((step, images))

    def flush(self) -> None:
        self.flushed += 1


def test_clu():
    logger = Clu()
    writer = as_writer(logger)
    for record in (WINDOW, EVENT, TABLE, READING, draw_over_time(points(), [], limit_bytes=2**30)):
        writer.write(record)
    writer.close()
    assert_is_a_drawing(logger.images, (9, "memory/over_time"))
    assert logger.scalars == [(7, SCALARS)]
    assert [list(texts) for _, texts in logger.texts] == [["memory/events"], ["memory/known_here"]]
    assert "Near out of memory" in logger.texts[0][1]["memory/events"]
    assert logger.flushed == 0, "clu's flush lets no other thread write"


def test_the_real_tensorboardx(tmp_path: Path):
    with tensorboardX.SummaryWriter(str(tmp_path)) as logger:
        writer = as_writer(logger)
        picture = draw_over_time(points(), [EVENT])
        assert writer.takes_pictures
        for record in (WINDOW, EVENT, TABLE, picture):
            writer.write(record)
        writer.close()
    read_back = EventAccumulator(str(tmp_path))
    read_back.Reload()
    assert {tag: read_back.Scalars(tag)[0].value for tag in read_back.Tags()["scalars"]} == SCALARS
    assert read_back.Scalars("train/loss")[0].step == 7
    assert sorted(read_back.Tags()["tensors"]) == ["memory/events/text_summary", "memory/known_here/text_summary"]
    assert read_back.Images("memory/over_time")[0].width == 700


class Flax:
    """As flax.metrics.tensorboard.SummaryWriter."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def scalar(self, tag: str, value: float, step: int) -> None:
        self.calls.append((tag, value, step))

    def text(self, tag: str, textdata: str, step: int) -> None:
        self.calls.append((tag, textdata[:6], step))

    def image(self, tag: str, image: Any, step: int, max_outputs: int = 3) -> None:
        self.calls.append((tag, image.shape[-max_outputs:], step))

    def flush(self) -> None:
        self.calls.append("flush")


def test_flax():
    logger = Flax()
    writer = as_writer(logger)
    writer.write(draw_over_time(points(), []))
    assert logger.calls.pop() == ("memory/over_time", (660, 700, 3), 9)
    writer.write(WINDOW)
    writer.write(EVENT)
    writer.flush()
    assert logger.calls[:4] == [(tag, value, 7) for tag, value in SCALARS.items()]
    assert logger.calls[4:] == [("memory/events", "**Near", 12), "flush"]


class Levanter:
    """As levanter.tracker.Tracker."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log(self, metrics: Mapping[str, Any], *, step: int | None, commit: bool | None = None) -> None:
        del commit
        self.calls.append((metrics, step))


def test_levanter():
    logger = Levanter()
    as_writer(logger).write(WINDOW)
    assert logger.calls == [(SCALARS, 7)]


class Run:
    """As wandb.Run keeps its rows: one is open, a log for an earlier one is dropped, one for a later one closes it."""

    def __init__(self) -> None:
        self.step = 0
        self.rows: dict[int, dict[str, Any]] = {}
        self.dropped: list[Any] = []
        self.metrics: list[Any] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        if step is not None and step < self.step:
            self.dropped.append(data)
            return
        self.step = self.step if step is None else step
        self.rows.setdefault(self.step, {}).update(data)
        if commit if commit is not None else step is None:
            self.step += 1

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))


class Image:
    """As wandb.Image, found in the module that the run is from."""

    def __init__(self, data: Any) -> None:
        self.data = data


def windows(steps: list[int]) -> list[Window]:
    return [
        Window(step=step, time_s=0.0, spreads={"memory/host_gib": Spread(low=step, mean=step, high=step, count=1)})
        for step in steps
    ]


def test_wandb_gets_every_window_and_loses_nothing_of_the_users():
    run = Run()
    writer = as_writer(run)
    logged = 0
    for step, window in enumerate(windows([100, 200, 300, 400, 500, 600])):
        writer.write(window)
        if step % 3 == 0:
            run.log({"loss": 0.5}, step=window.step - 1)  # a loop that reads metrics one step late
            logged += 1
    assert run.dropped == []
    assert sum("loss" in row for row in run.rows.values()) == logged
    shown = [row["memory/step"] for row in run.rows.values() if "memory/step" in row]
    assert shown == [100, 200, 300, 400, 500, 600], "each in a row of its own"
    assert run.metrics == [("memory/*", "memory/step")]


def test_wandb_loses_nothing_where_the_loop_logs_while_an_event_is_on_its_way(monkeypatch: pytest.MonkeyPatch):
    """What is read of the run's counter is old by the time that a text or picture was made."""
    run = type("Run", (Run,), {"__module__": "wandb_like.sdk.run"})()

    def made_slowly(data: Any) -> Any:
        run.log({"loss": 0.5}, step=run.step + 3)
        return data

    package = ModuleType("wandb_like")
    package.Image = package.Html = made_slowly
    monkeypatch.setitem(sys.modules, "wandb_like", package)
    slow = run.log

    def log(data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        if "memory/step" in data:
            slow({"loss": 0.25}, step=run.step + 1)
        slow(data, step, commit)

    run.log = log
    writer = as_writer(run)
    for record in (WINDOW, EVENT, draw_over_time(points(), []), *windows([30, 31])):
        writer.write(record)
    assert run.dropped == []


def test_wandb_rows_that_the_run_numbers_itself_are_shared():
    run = Run()
    writer = as_writer(run)
    for window in windows([10, 20, 30]):
        writer.write(window)
        run.log({"loss": 0.5})
    assert [sorted(row) for row in run.rows.values()] == [["loss", "memory/host_gib", "memory/step"]] * 3


def test_wandb_shows_events_and_pictures_by_its_own_classes(monkeypatch: pytest.MonkeyPatch):
    package = ModuleType("wandb_like")
    package.Image, package.Html = Image, str
    monkeypatch.setitem(sys.modules, "wandb_like", package)
    run = type("Run", (Run,), {"__module__": "wandb_like.sdk.run"})()
    writer = as_writer(run)
    writer.write(EVENT)
    writer.write(draw_over_time(points(), []))
    (row,) = run.rows.values()
    assert row["memory/events"].startswith("<pre>**Near out of memory**")
    assert row["memory/over_time"].data.shape == (660, 700, 3)
    package.run = run
    package.log = run.log
    as_writer(package).write(WINDOW)
    assert row["memory/step"] == 7, "the module stands for its run"


class Metrax:
    """As metrax.logging's backends."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log_scalar(self, event: str, value: float, **kwargs: Any) -> None:
        self.calls.append((event, value, kwargs))

    def log(self) -> None:
        self.calls.append("the wrong method")


def test_metrax():
    logger = Metrax()
    as_writer(logger).write(WINDOW)
    assert logger.calls[0] == ("memory/in_use_gib", 2.0, {"step": 7})


class BigVision:
    def __init__(self) -> None:
        self.calls: dict[str, float] = {}

    def measure(self, name: str, value: float) -> float:
        self.calls[name] = value
        return value


def test_big_vision():
    logger = BigVision()
    writer = as_writer(logger)
    writer.write(WINDOW)
    writer.write(EVENT)
    writer.close()
    assert logger.calls == SCALARS


@pytest.mark.core
def test_a_callable():
    calls: list[Any] = []
    as_writer(lambda step, scalars: calls.append((step, scalars))).write(WINDOW)
    assert calls == [(7, SCALARS)]


def test_our_own_writers_stay_what_they_are():
    writer = CollectingWriter()
    assert as_writer(writer) is writer


class Tunix:
    """As tunix.sft.metrics_logger.MetricsLogger."""

    def log(self, prefix: str, name: str, value: float, mode: str, step: int) -> None:
        raise AssertionError((prefix, name, value, mode, step))


class AnswersAll:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def test_what_answers_every_name_is_refused_with_the_reason():
    with pytest.raises(TypeError, match=r"^AnswersAll is no writer\. It has every method.*write_scalars\(\)"):
        as_writer(AnswersAll())


@pytest.mark.parametrize("wrong", [Tunix(), object(), 3, "runs/a", dict, logging.getLogger("x")])
def test_anything_else_is_refused_with_the_list(wrong: object):
    with pytest.raises(
        TypeError, match=r"is no writer\. Expected .*write_scalars\(\), add_scalar\(\).*f\(step, scalars\)"
    ):
        as_writer(wrong)


class Lightning:
    """As lightning.pytorch.loggers.Logger."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((step, metrics))


def test_lightning():
    logger = Lightning()
    writer = as_writer(logger)
    for record in (WINDOW, EVENT, TABLE, draw_over_time(points(), [])):
        writer.write(record)
    assert logger.calls == [(7, SCALARS)]
    assert not writer.takes_pictures


class Comet:
    """As comet_ml.Experiment."""

    def __init__(self) -> None:
        self.metrics: list[Any] = []
        self.texts: list[Any] = []
        self.images: list[Any] = []

    def log_metrics(self, dic: dict[str, float], prefix: Any = None, step: Any = None) -> None:
        assert prefix is None
        self.metrics.append((step, dic))

    def log_text(self, text: str, step: Any = None) -> None:
        self.texts.append((step, text))

    def log_image(self, image_data: Any, name: Any = None, step: Any = None) -> None:
        self.images.append((step, name, image_data.shape))


def test_comet():
    experiment = Comet()
    writer = as_writer(experiment)
    for record in (WINDOW, EVENT, draw_over_time(points(), [])):
        writer.write(record)
    assert experiment.metrics == [(7, SCALARS)]
    ((step, text),) = experiment.texts
    assert (step, text.splitlines()[0]) == (EVENT.step, "memory/events")
    assert "Near out of memory" in text
    assert experiment.images == [(9, "memory/over_time", (660, 700, 3))]


class Mlflow(ModuleType):
    """As the module mlflow 3: the active run is one of a thread, names have few letters, and a run is started where none is."""

    def __init__(self, run: str | None) -> None:
        super().__init__("mlflow")
        self.thread, self.run = threading.get_ident(), run
        self.calls: list[Any] = []

    def active_run(self) -> Any:
        here = self.run is not None and threading.get_ident() == self.thread
        return SimpleNamespace(info=SimpleNamespace(run_id=self.run)) if here else None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, run_id: str | None = None) -> None:
        assert all(re.fullmatch(r"[\w\-. /]+", name, re.ASCII) for name in metrics)
        self.calls.append((run_id or "a new run", step, metrics))

    def log_text(self, text: str, artifact_file: str, run_id: str | None = None) -> None:
        self.calls.append((run_id or "a new run", artifact_file, text))


def test_mlflow_gets_everything_in_the_run_that_was_active():
    module = Mlflow("run-1")
    writer = as_writer(module)
    odd = Window(step=8, time_s=1.0, spreads={"memory/need_gib/<lambda>": Spread(low=1.0, mean=1.0, high=1.0, count=1)})
    thread = threading.Thread(target=lambda: [writer.write(each) for each in (WINDOW, odd, EVENT)])
    thread.start()
    thread.join()
    metrics, named, event = module.calls
    assert metrics == ("run-1", 7, SCALARS)
    assert named == ("run-1", 8, {"memory/need_gib/_lambda_": 1.0})
    assert event[:2] == ("run-1", f"memory/events/{EVENT.step}.md")


def test_mlflow_without_a_run_is_refused():
    with pytest.raises(ValueError, match="no active run"):
        as_writer(Mlflow(None))
