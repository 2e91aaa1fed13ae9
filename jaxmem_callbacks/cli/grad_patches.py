"""JAX's, Flax NNX's and Equinox's gradient functions, replaced by this library's while a script runs."""

from __future__ import annotations

import contextvars
import functools
import inspect
import linecache
import sys
import types
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jaxmem_callbacks.cli.frames import caller_of, is_asked_for_shapes, place_of_user
from jaxmem_callbacks.cli.trace_log import GRADIENTS, Edit, GradFunction, TraceLog
from jaxmem_callbacks.records.source_files import Owner, short_path
from jaxmem_callbacks.records.terminal import put
from jaxmem_callbacks.transforms import gradients


@dataclass(slots=True)
class JitScope:
    """A call or trace of a jitted function of the user's, while it lasts.

    Attributes:
        is_own: Whether the script itself calls it, and not a trace of something else.
        takes_gradient: Whether a gradient was taken in it.
        edits: By which functions, as in `TraceLog`.
        is_foreign: Whether one was taken by a package, in whose code nobody writes another function.
    """

    is_own: bool
    takes_gradient: bool = False
    edits: dict[Edit, None] = field(default_factory=dict[Edit, None])
    is_foreign: bool = False


class GradPatches:
    """This library's gradient functions under other names, and where they were called.

    Args:
        seen: Records which.
        has_warned: Whether a gradient that is taken where no step is seen is no longer worth a warning.
    """

    def __init__(self, seen: TraceLog, *, has_warned: bool) -> None:
        self.has_warned = has_warned
        # Functions that it made -> how people write them with this library.
        self.written: weakref.WeakKeyDictionary[Callable[..., Any], str] = weakref.WeakKeyDictionary()
        self._seen = seen
        # Of each thread and task its own.
        self._within: contextvars.ContextVar[tuple[JitScope, ...]] = contextvars.ContextVar("within", default=())

    @property
    def is_within(self) -> bool:
        """Whether a jitted function of the user's is being called or traced."""
        return bool(self._within.get())

    @contextmanager
    def within(self, *, is_own: bool) -> Generator[JitScope]:
        """Inside, gradients are those of a jitted function."""
        here = JitScope(is_own)
        token = self._within.set((*self._within.get(), here))
        try:
            yield here
        finally:
            self._within.reset(token)

    def instead_of(self, module: str, attribute: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """A gradient function for the user's own files; for all others ``real``, whose calls are noted."""
        word, signature = GRADIENTS[module, attribute], inspect.signature(real)
        own = _counterpart(module, attribute) if word.new else real
        first = next(iter(signature.parameters))

        @functools.wraps(real)
        def made(*args: Any, **options: Any) -> Any:
            frame = inspect.currentframe()
            whose = caller_of(frame)
            if whose is Owner.LIBRARY:
                return real(*args, **options)
            edit = _edit(word, frame) if whose is Owner.USER and word.new else None
            try:
                given = dict(signature.bind_partial(*args, **options).arguments)
            except TypeError:
                return real(*args, **options)  # whose error names what is wrong
            given |= given.pop("gradkwargs", {}) | given.pop("options", {})
            if not callable(loss := given.pop(first, None)):
                return functools.partial(made_of, given, edit) if whose is Owner.USER else real(*args, **options)
            if whose is Owner.USER:
                return made_of(given, edit, loss)
            return self._noting(real(loss, **given), loss, None, {})

        def made_of(options: Mapping[str, Any], edit: Edit | None, loss: Callable[..., Any]) -> Callable[..., Any]:
            return self._noting(own(loss, **options), loss, word, {} if edit is None else {edit: None})

        return made

    def at_once(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A function that takes a gradient when it is called, and notes that it was."""

        @functools.wraps(real)
        def called(*args: Any, **options: Any) -> Any:
            if caller_of(inspect.currentframe()) is not Owner.LIBRARY:
                self._note({})
            return real(*args, **options)

        return called

    def _noting(
        self,
        gradient: Callable[..., Any],
        loss: Callable[..., Any],
        word: GradFunction | None,
        edits: dict[Edit, None],
    ) -> Callable[..., Any]:
        @functools.wraps(loss)
        def called(*args: Any, **kwargs: Any) -> Any:
            self._note(edits, is_foreign=word is None)
            return gradient(*args, **kwargs)

        if word is not None and " " not in word.new:  # else it is a sentence and no code
            self.written[called] = (word.new or word.old) + f"({getattr(loss, '__name__', 'loss')})"
        return called

    def _note(self, edits: dict[Edit, None], *, is_foreign: bool = False) -> None:
        """Record that a gradient is taken."""
        self._seen.edits |= edits
        around = self._within.get()
        for each in around:
            each.takes_gradient = True
            each.is_foreign |= is_foreign
            each.edits |= edits
        if any(each.is_own for each in around) or is_asked_for_shapes(inspect.currentframe()):
            return
        self._seen.outside = self._seen.outside or place_of_user(inspect.currentframe())
        at = self._seen.outside and f" ({self._seen.outside})"
        self.warn(
            "a gradient is taken where no step is seen: not in a function that the script itself calls under jax.jit, nnx.jit or "
            f"eqx.filter_jit{at}"
        )

    def warn(self, why: str, what_to_do: str = "jit the whole step") -> None:
        """Warn once, and at once, of what would else be known at the script's end, which may be days away."""
        if not self.has_warned:
            self.has_warned = True
            put(
                f"jaxmem: {why}. The script goes on, to its end if need be; stop it with Ctrl-C, and {what_to_do}.\n",
                sys.stderr,
            )


def _edit(word: GradFunction, frame: types.FrameType | None) -> Edit | None:
    """Where the caller of a frame's function writes a word."""
    if frame is None or frame.f_back is None:
        return None
    file, line = frame.f_back.f_code.co_filename, frame.f_back.f_lineno
    is_written = word.old.rpartition(".")[2] in linecache.getline(file, line)  # else it has a name of the user's there
    return Edit(f"{'' if is_written else 'called at '}{short_path(file)}:{line}", word.old, word.new)


def _counterpart(module: str, attribute: str) -> Callable[..., Any]:
    """This library's function, with the parameters of the original by name."""
    if module == "jax":
        return getattr(gradients, attribute)
    if module == "equinox":
        from jaxmem_callbacks.integrations import equinox

        return getattr(equinox, attribute.removeprefix("filter_"))
    from jaxmem_callbacks.integrations.flax_nnx import value_and_grad as both

    return both if attribute.endswith("value_and_grad") else functools.partial(_gradient_alone, both)


def _gradient_alone(both: Callable[..., Any], loss: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """What ``both`` makes without the value, which ``nnx.grad`` leaves out."""
    value_and_gradient = both(loss, **options)

    def found(*args: Any, **kwargs: Any) -> Any:
        value, gradient = value_and_gradient(*args, **kwargs)
        return (gradient, value[1]) if options.get("has_aux") else gradient

    return found
