"""as_writer: each shape of logger that training loops have, by a small honest object of that shape."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tensorboardX
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxmem_callbacks.writers.collecting import CollectingWriter
from jaxmem_callbacks.writers.over_time import draw_over_time
from jaxmem_callbacks.writers.shapes import as_writer
from tests.sample_records import EVENT, READING, TABLE, WINDOW, points

SCALARS = {"memory/in_use_gib": 2.0, "memory/in_use_gib/min": 1.0, "memory/in_use_gib/max": 4.0, "train/loss": 0.5}


class Clu:
    def __init__(self) -> None:
        self.scalars: list[Any] = []
        self.texts: list[Any] = []
        self.flushed = 0

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self.scalars.append((step, scalars))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self.texts.append((step, texts))

    def flush(self) -> None:
        self.flushed += 1


def test_clu():
    logger = Clu()
    writer = as_writer(logger)
    for record in (WINDOW, EVENT, TABLE, READING):
        writer.write(record)
    writer.close()
    assert logger.scalars == [(7, SCALARS)]
    assert [list(texts) for _, texts in logger.texts] == [["memory/events"], ["memory/known_here"]]
    assert "Near out of memory" in logger.texts[0][1]["memory/events"]
    assert logger.flushed == 1


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
    assert read_back.Images("memory/over_time")[0].width == 720


class Flax:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def scalar(self, tag: str, value: float, step: int) -> None:
        self.calls.append((tag, value, step))

    def text(self, tag: str, textdata: str, step: int) -> None:
        self.calls.append((tag, textdata[:6], step))

    def flush(self) -> None:
        self.calls.append("flush")


def test_flax():
    logger = Flax()
    writer = as_writer(logger)
    writer.write(WINDOW)
    writer.write(EVENT)
    writer.flush()
    assert logger.calls[:4] == [(tag, value, 7) for tag, value in SCALARS.items()]
    assert logger.calls[4:] == [("memory/events", "**Near", 12), "flush"]


class Wandb:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.calls.append((data, step))


def test_wandb():
    logger = Wandb()
    as_writer(logger).write(WINDOW)
    assert logger.calls == [(SCALARS, 7)]


class Metrax:
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


@pytest.mark.parametrize("wrong", [object(), 3, "runs/a", dict, logging.getLogger("x")])
def test_anything_else_is_refused_with_the_list(wrong: object):
    with pytest.raises(
        TypeError, match=r"is no writer\. Expected .*write_scalars\(\), add_scalar\(\).*f\(step, scalars\)"
    ):
        as_writer(wrong)
