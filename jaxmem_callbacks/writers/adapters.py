"""`as_writer`: adapters for the loggers that users have, known by their shape."""

from __future__ import annotations

import inspect
import io
import logging
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, final

from jaxmem_callbacks.analysis.figures import Window
from jaxmem_callbacks.records.documents import Document, as_markdown, escape
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.writers.events import event_document
from jaxmem_callbacks.writers.protocol import EVENTS_TAG, LoggedTable, Picture, Record, Writer


def pixels_of(picture: Picture) -> Any:
    """The picture as height x width x 3 colours of uint8, on white: not every logger takes a fourth for what shines through."""
    import numpy as np
    from matplotlib.image import imread

    image = np.asarray(imread(io.BytesIO(picture.png), format="png"))
    solid = image[..., 3:]
    return ((image[..., :3] * solid + (1 - solid)) * 255).round().astype(np.uint8)


STEP = "memory/step"


@final
class WandbRows:
    """Logs to a ``wandb.Run``.

    Args:
        run: What ``wandb.init`` returned.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._named = False
        self._row = self._window_step = -1

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One window."""
        if not self._named and callable(getattr(self._run, "define_metric", None)):
            self._run.define_metric("memory/*", step_metric=STEP)
        self._named = True
        row, before = int(self._run.step), self._row
        self._row, ahead = row, row == before and row < self._window_step
        self._window_step = step
        if ahead:
            self._row = row + 1
            self._run.log({**values, STEP: step}, step=self._row)
        else:
            self._add({**values, STEP: step})

    def text(self, step: int, tag: str, words: str) -> None:
        """An event or a table, as it is written."""
        make = self._media("Html")
        if make is not None:
            self._add({tag: make(f"<pre>{escape(words)}</pre>"), STEP: step})

    def picture(self, picture: Picture) -> None:
        """A drawn figure."""
        make = self._media("Image")
        if make is not None:
            self._add({picture.tag: make(pixels_of(picture)), STEP: picture.step})

    def _add(self, data: Mapping[str, Any]) -> None:
        """To the row that is open when it arrives: the loop goes on meanwhile, and a row that is named may be behind by then."""
        self._run.log(dict(data), commit=False)

    def _media(self, name: str) -> Any:
        """A class of the package that the run comes from; it is loaded, since the run exists."""
        return getattr(sys.modules.get(type(self._run).__module__.partition(".")[0]), name, None)


SendScalars = Callable[[int, Mapping[str, float]], object]
SendText = Callable[[int, str, str], object]
SendPicture = Callable[[Picture], object]
_NO_LOGGERS = "no_logger_has_a_method_of_this_name"  # what answers to it answers to everything, as mocks do


@final
class ForwardingWriter(Writer):
    """Forwards windows as scalars, and events, tables and pictures where the logger has a place for them."""

    def __init__(
        self,
        scalars: SendScalars,
        *,
        text: SendText | None = None,
        picture: SendPicture | None = None,
        flush: Callable[[], object] | None = None,
    ) -> None:
        self._scalars = scalars
        self._text = text
        self._picture = picture
        self._flush = flush
        self.takes_pictures = picture is not None

    def write(self, record: Record) -> None:
        """Forward one record."""
        match record:
            case Window():
                self._scalars(record.step, record.scalars())
            case MemoryEvent() if self._text:
                self._text(record.step, EVENTS_TAG, as_markdown(event_document(record), escaped=False))
            case LoggedTable() if self._text:
                self._text(record.step, record.tag, as_markdown(Document([record]), escaped=False))
            case Picture() if self._picture:
                self._picture(record)
            case _:
                pass

    def flush(self) -> None:
        """Ask the logger to flush, where it can."""
        if self._flush is not None:
            self._flush()

    def close(self) -> None:
        """Flush; the logger is the user's to close."""
        self.flush()


def as_writer(obj: Any) -> Writer:
    """Make a writer of a logger that the training loop already has.

    Recognised, in this order, by method: a ``Writer`` of this library; ``write_scalars(step, scalars)`` (clu, Kauldron);
    ``add_scalar(tag, value, global_step)`` (tensorboardX, PyTorch); ``scalar(tag, value, step)`` (Flax);
    ``log_scalar(name, value, step=)`` (metrax); ``measure(name, value)`` (big_vision); ``log_metrics(scalars, step=)`` (MLflow's
    module with an active run, Lightning, Comet); ``log(scalars, step=)`` (Weights & Biases, Levanter); any callable
    ``f(step, scalars)``.

    Args:
        obj: The logger.

    Raises:
        TypeError: none of these; the message lists them.
        ValueError: MLflow's module without an active run.

    Example:
        >>> seen = []
        >>> writer = as_writer(lambda step, scalars: seen.append((step, dict(scalars))))
    """
    if isinstance(obj, Writer):
        return obj
    answers_all = callable(getattr(obj, _NO_LOGGERS, None))
    if not answers_all and not isinstance(obj, logging.Logger):  # its log() takes a level, not scalars
        for method, make in _SHAPES.items():
            if callable(getattr(obj, method, None)) and (method != "log" or _takes_scalars(obj.log)):
                return make(obj)
        if callable(obj) and not isinstance(obj, type):
            return ForwardingWriter(obj)
    methods = ", ".join(f"{method}()" for method in _SHAPES)
    why = " It has every method that it is asked for, so that its kind is unknown." if answers_all else ""
    msg = (
        f"{type(obj).__name__} is no writer.{why} Expected a Writer of jaxmem_callbacks, an object with one of {methods}, called "
        "as log(scalars, step=...), or a callable f(step, scalars). Wrap it: writer=lambda step, scalars: your_logger(...)."
    )
    raise TypeError(msg)


def _takes_scalars(log: Callable[..., object]) -> bool:
    """Whether it can be called with a mapping and a step; Tunix's takes a name, a value and more."""
    try:
        inspect.signature(log).bind({}, step=0)
    except TypeError:
        return False
    except ValueError:  # a builtin that has no signature
        return True
    return True


def _clu(obj: Any) -> Writer:
    texts, images = getattr(obj, "write_texts", None), getattr(obj, "write_images", None)
    send_text = None if texts is None else lambda step, tag, text: texts(max(step, 0), {tag: text})

    def picture(drawn: Picture) -> None:
        obj.write_images(max(drawn.step, 0), {drawn.tag: pixels_of(drawn)[None]})

    # Never flushed: clu 0.0.12 shuts its pool down while it flushes, and what the loop writes at that moment raises in the loop.
    return ForwardingWriter(
        lambda step, scalars: obj.write_scalars(max(step, 0), dict(scalars)),
        text=send_text,
        picture=None if images is None else picture,
    )


def _tensorboardx(obj: Any) -> Writer:
    def picture(drawn: Picture) -> None:
        obj.add_image(drawn.tag, pixels_of(drawn), global_step=max(drawn.step, 0), dataformats="HWC")

    text = getattr(obj, "add_text", None)
    return ForwardingWriter(
        _each(lambda tag, value, step: obj.add_scalar(tag, value, global_step=step)),
        text=None if text is None else lambda step, tag, words: text(tag, words, global_step=max(step, 0)),
        picture=picture if hasattr(obj, "add_image") else None,
        flush=_flush_of(obj),
    )


def _flax(obj: Any) -> Writer:
    text = getattr(obj, "text", None)
    send_text = None if text is None else lambda step, tag, words: text(tag, words, max(step, 0))

    def picture(drawn: Picture) -> None:
        obj.image(drawn.tag, pixels_of(drawn), max(drawn.step, 0))

    return ForwardingWriter(
        _each(obj.scalar), text=send_text, picture=picture if hasattr(obj, "image") else None, flush=_flush_of(obj)
    )


def _metrax(obj: Any) -> Writer:
    return ForwardingWriter(_each(lambda tag, value, step: obj.log_scalar(tag, value, step=step)))


def _big_vision(obj: Any) -> Writer:
    return ForwardingWriter(_each(lambda tag, value, _step: obj.measure(tag, value)))


def _wandb(obj: Any) -> Writer:
    """A run of Weights & Biases, its module with a run, or what takes ``log(scalars, step=)`` and counts no rows (Levanter)."""
    run = getattr(obj, "run", None) if isinstance(obj, ModuleType) else obj
    if isinstance(getattr(run, "step", None), int):
        rows = WandbRows(run)
        return ForwardingWriter(rows.scalars, text=rows.text, picture=rows.picture)
    return ForwardingWriter(lambda step, scalars: obj.log(dict(scalars), step=step))


def _log_metrics(obj: Any) -> Writer:
    """MLflow's module, and what takes ``log_metrics(scalars, step=)``: a logger of Lightning, an experiment of Comet."""
    text: Any = getattr(obj, "log_text", None)
    if isinstance(obj, ModuleType) and callable(getattr(obj, "active_run", None)):
        return _mlflow(obj)
    send_text = (
        None if not _takes(text, "step") else lambda step, tag, words: text(f"{tag}\n\n{words}", step=max(step, 0))
    )

    def picture(drawn: Picture) -> None:
        obj.log_image(pixels_of(drawn), name=drawn.tag, step=max(drawn.step, 0))

    return ForwardingWriter(
        lambda step, scalars: obj.log_metrics(dict(scalars), step=max(step, 0)),
        text=send_text,
        picture=picture if _takes(getattr(obj, "log_image", None), "name", "step") else None,
    )


_NO_MLFLOW_NAME = re.compile(r"[^\w\-. /]", re.ASCII)


def _mlflow(module: Any) -> Writer:
    """MLflow's run that is active now: it is one of a thread, and on the monitor's a new one would be started."""
    active = module.active_run()
    if active is None:
        msg = "MLflow has no active run, so there is nothing to log to. Start one before the monitor is made."
        raise ValueError(msg)
    run_id = active.info.run_id

    def scalars(step: int, values: Mapping[str, float]) -> None:
        named = {_NO_MLFLOW_NAME.sub("_", tag): value for tag, value in values.items()}
        module.log_metrics(named, step=max(step, 0), run_id=run_id)

    def text(step: int, tag: str, words: str) -> None:
        module.log_text(words, f"{_NO_MLFLOW_NAME.sub('_', tag)}/{max(step, 0)}.md", run_id=run_id)

    return ForwardingWriter(scalars, text=text)


def _takes(method: Any, *names: str) -> bool:
    """Whether a method has arguments of these names."""
    try:
        return callable(method) and set(names) <= inspect.signature(method).parameters.keys()
    except (TypeError, ValueError):
        return False


_SHAPES: dict[str, Callable[[Any], Writer]] = {
    "write_scalars": _clu,
    "add_scalar": _tensorboardx,
    "scalar": _flax,
    "log_scalar": _metrax,
    "measure": _big_vision,
    "log_metrics": _log_metrics,
    "log": _wandb,
}


def _each(send: Callable[[str, float, int], object]) -> SendScalars:
    def scalars(step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            send(tag, value, max(step, 0))

    return scalars


def _flush_of(obj: Any) -> Callable[[], object] | None:
    flush = getattr(obj, "flush", None)
    return flush if callable(flush) else None
