"""Real loggers of other projects, each written into and read back. Writes results/adapters_jax_<version>.json.

    python -m benchmarks.adapters

A short watched run goes into each package; the file has its version and how it went, or why it cannot be loaded here.
`make bench-adapters` installs them; the tests of this project use small objects of the same shape instead.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

import jaxmem_callbacks as jm
from benchmarks.sources import write_result
from jaxmem_callbacks.records.presets import MonitorSettings

STEPS = 30
_HEAD, _BLOCK, _LAST = 7, 32768, (1, 4)  # of a LevelDB log: bytes of a head and of a block; kinds that end a record
SETTINGS = MonitorSettings(window_s=0.02, scan_s=0.02, limit_bytes=2**20, on_error="raise")
HOST, LOSS, EVENTS, KNOWN, PICTURE = (
    *("memory/host_mib", "train/loss", "memory/events", "memory/known_here"),
    "memory/over_time",
)


def watched(logger: Any, each: Callable[[int], object] = str) -> None:
    """A run with an event; ``each`` is what the loop logs itself, by default nothing."""
    state = jax.numpy.zeros((1024, 1024))
    step = jax.jit(lambda x: (x + 1, {"loss": x.sum()}))
    with jm.MemoryMonitor(SETTINGS, writer=logger) as monitor:
        for number in range(STEPS):
            state, metrics = step(state)
            each(number)
            monitor(number, metrics)
            jax.block_until_ready(state)
    assert "near_oom" in [event.kind for event in monitor.events], f"events: {monitor.events}"


def tensorboard_tags(folder: Path) -> dict[str, list[str]]:
    """What TensorBoard reads in the folder's event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload().Tags()
    return {kind: list(found[kind]) for kind in ("scalars", "images", "tensors")}


def assert_shown(shown: set[str], *wanted: str) -> None:
    """All of these are there."""
    missing = [tag for tag in wanted if not any(tag in each for each in shown)]
    assert not missing, f"not shown: {missing}, of {sorted(shown)}"


def assert_all_shown(folder: Path) -> None:
    """Event files with scalars, texts and pictures."""
    tags = tensorboard_tags(folder)
    assert_shown({tag for several in tags.values() for tag in several}, HOST, LOSS, EVENTS, KNOWN, PICTURE)


def tensorboardx(folder: Path) -> None:
    """tensorboardX.SummaryWriter."""
    with importlib.import_module("tensorboardX").SummaryWriter(str(folder)) as logger:
        watched(logger)
    assert_all_shown(folder)


def clu(folder: Path) -> None:
    """What clu.metric_writers makes by default: event files and the log, written by other threads."""
    logger = importlib.import_module("clu.metric_writers").create_default_writer(str(folder))
    watched(logger)
    logger.close()
    assert_all_shown(folder)


def flax(folder: Path) -> None:
    """flax.metrics.tensorboard.SummaryWriter."""
    logger = importlib.import_module("flax.metrics.tensorboard").SummaryWriter(str(folder))
    watched(logger)
    logger.close()
    assert_all_shown(folder)


def metrax(folder: Path) -> None:
    """metrax.logging.TensorboardBackend, which takes scalars only."""
    logger = importlib.import_module("metrax.logging").TensorboardBackend(str(folder))
    watched(logger)
    logger.close()
    assert_shown(set(tensorboard_tags(folder)["scalars"]), HOST, LOSS)


def wandb(folder: Path) -> None:
    """A run of Weights & Biases without its server, beside what the loop logs itself: no row of either is lost."""
    package = importlib.import_module("wandb")
    run = package.init(mode="offline", dir=str(folder), project="jaxmem", settings=package.Settings(console="off"))
    watched(run, lambda step: run.log({"own": step}, step=step))
    run.finish()
    rows = list(wandb_rows(next(folder.rglob("*.wandb")), importlib.import_module("wandb.proto.wandb_internal_pb2")))
    own = [row["own"] for row in rows if "own" in row]
    assert own == [str(step) for step in range(STEPS)], f"the loop's own rows: {own}"
    assert_shown({name for row in rows for name in row}, HOST, LOSS, EVENTS, KNOWN, PICTURE, "memory/step")


def wandb_rows(path: Path, messages: Any) -> Iterator[dict[str, str]]:
    """The rows in a run's file: a LevelDB log of messages, after a head of seven bytes."""
    data, at, parts = path.read_bytes(), _HEAD, b""
    while at + _HEAD <= len(data):
        if _BLOCK - at % _BLOCK < _HEAD:  # the end of a block is left empty
            at += _BLOCK - at % _BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + _HEAD : at + _HEAD + size]
        at += _HEAD + size
        if kind in _LAST:  # whole, or the last part
            record = messages.Record()
            record.ParseFromString(parts)
            parts = b""
            if record.WhichOneof("record_type") == "history":
                yield {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}


LOGGERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "tensorboardX": ("tensorboardX", tensorboardx),
    "clu": ("clu", clu),
    "flax.metrics.tensorboard": ("flax", flax),
    "metrax": ("google-metrax", metrax),
    "wandb": ("wandb", wandb),
}


def tried(package: str, use: Callable[[Path], None]) -> dict[str, str]:
    """Version and outcome of one."""
    version = "not installed"
    with suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(package)
    with tempfile.TemporaryDirectory() as folder:
        try:
            use(Path(folder))
        except ModuleNotFoundError as error:
            return {"version": version, "outcome": f"not tried: {error}"}
        except Exception as error:  # noqa: BLE001 - what any of them may raise is what is asked
            return {"version": version, "outcome": f"failed: {type(error).__name__}: {error}"}
    return {"version": version, "outcome": "passed"}


def main() -> int:
    """Try each, print, write the result file; 1 when one failed."""
    os.environ.setdefault("WANDB_SILENT", "true")
    loggers = {name: tried(*row) for name, row in LOGGERS.items()}
    for name, each in loggers.items():
        print(f"  {name:26} {each['version']:14} {each['outcome']}")
    write_result("adapters", loggers=loggers)
    return int(any(each["outcome"].startswith("failed") for each in loggers.values()))


if __name__ == "__main__":
    sys.exit(main())
