"""A handler for calls of what `jax.value_and_grad` and `jax.grad` made, under whatever name a package holds these functions.

What they make looks up `vjp` in JAX's own module when it is called. While there is a handler, another function has that name
there. So calls are seen of ``from jax import grad`` too, of partials and class attributes, and of gradient functions that were
made long before. Every other caller of that name, `jax.vjp` itself and all threads that the handler declines get JAX's own.

Where JAX's module has another form, the public names are replaced instead, in all modules that hold them. That does not reach
references that no module holds, and gradient functions that were made before.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

_NAME = "vjp"
_ARGUMENTS = {"args", "kwargs"}
_OPTIONS = ("holomorphic", "allow_int")
_KNOWN = {"fun", "argnums", "has_aux", *_OPTIONS}


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenGradient:
    """One call of a gradient function.

    Attributes:
        loss: What is differentiated.
        args: The positional arguments of the call.
        kwargs: Its keyword arguments.
        argnums: As in `jax.value_and_grad`.
        has_aux: Likewise.
        options: ``holomorphic`` and ``allow_int``.
    """

    loss: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    argnums: int | Sequence[int]
    has_aux: bool
    options: Mapping[str, Any]


#: Takes a call; gives value, aux and gradients, or None to leave it to JAX.
Handler = Callable[[TakenGradient], tuple[Any, Any, Any] | None]

_lock = threading.RLock()  # a signal's handler may take a step while this thread has it
_counts: dict[Handler, int] = {}  # with how many contexts each is in
_handlers: tuple[Handler, ...] = ()  # never changed, but replaced: a call reads it without the lock
_restore: Callable[[], None] | None = None


class handled_by:  # noqa: N801 - used as a function; a generator would cost each step several microseconds
    """Inside, gradient calls of the whole process enter ``handler``, which must decline those that are not its own.

    May be entered any number of times, by any threads, which may leave in any order: JAX is as it was when the last one has left.

    Args:
        handler: Takes a call.
    """

    __slots__ = ("_handler",)

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def __enter__(self) -> None:
        global _handlers, _restore  # noqa: PLW0603 - JAX's modules are the process's, and so is what is done to them
        with _lock:
            count = _counts.get(self._handler, 0)
            _counts[self._handler] = count + 1
            if not count:
                _handlers = (*_handlers, self._handler)
            if _restore is None:
                _restore = _replace_lookup() or replace_names()

    def __exit__(self, *raised: object) -> None:
        global _handlers, _restore  # noqa: PLW0603 - likewise
        with _lock:
            count = _counts[self._handler] - 1
            if count:
                _counts[self._handler] = count
                return
            del _counts[self._handler]
            _handlers = tuple(each for each in _handlers if each is not self._handler)
            if not _handlers and _restore is not None:
                _restore()
                _restore = None


def _answered(call: TakenGradient) -> tuple[Any, Any, Any] | None:
    """The answer of the first handler that does not decline."""
    return next((answer for handler in _handlers if (answer := handler(call)) is not None), None)


def _replace_lookup() -> Callable[[], None] | None:
    """Take JAX's name; returns what gives it back, or None where JAX's module has another form than is known."""
    names = _module_of_gradients()
    own = names.get(_NAME)
    vjp = _seeing(own)
    if vjp is None:
        return None
    names[_NAME] = vjp

    def restore() -> None:
        if names[_NAME] is vjp:
            names[_NAME] = own

    return restore


@functools.cache
def _module_of_gradients() -> dict[str, Any]:
    """The names of the module in which JAX takes gradients."""
    return inspect.unwrap(jax.value_and_grad).__globals__


@functools.lru_cache(maxsize=4)
def _seeing(own: Any) -> Callable[..., Any] | None:
    """JAX's function of that name, for which gradient calls are handled first; None where its callers have another form."""
    outer = inspect.unwrap(jax.value_and_grad)
    codes = [code for code in outer.__code__.co_consts if isinstance(code, types.CodeType) and _NAME in code.co_names]
    if not callable(own) or len(codes) != 1 or not _is_known(codes[0]):
        return None
    (inner,) = codes

    @functools.wraps(own)
    def vjp(fun: Callable[..., Any], *primals: Any, **options: Any) -> Any:
        caller = inspect.currentframe()
        caller = caller and caller.f_back  # a frame that holds itself keeps its arrays until a garbage collection
        if caller is None or caller.f_code is not inner:
            return own(fun, *primals, **options)
        local = caller.f_locals
        call = TakenGradient(
            loss=local["fun"],
            args=tuple(local["args"]),
            kwargs=dict(local["kwargs"]),
            argnums=local["argnums"],
            has_aux=local["has_aux"],
            options={name: local[name] for name in _OPTIONS},
        )
        answer = _answered(call)
        if answer is None:
            return own(fun, *primals, **options)
        value, aux, gradients = answer
        several = isinstance(call.argnums, Sequence)
        pullback = functools.partial(_given, tuple(gradients) if several else (gradients,))
        return (value, pullback, aux) if call.has_aux else (value, pullback)

    return vjp


def _is_known(code: types.CodeType) -> bool:
    return {*code.co_varnames, *code.co_cellvars} >= _ARGUMENTS and set(code.co_freevars) >= _KNOWN


def _given(gradients: tuple[Any, ...], cotangent: Any) -> tuple[Any, ...]:
    """Gradients in the form of what JAX pulls back; the value's own cotangent is one, for which they were taken."""
    del cotangent
    return gradients


def replace_names() -> Callable[[], None]:
    """Replace `jax.value_and_grad` and `jax.grad` in every loaded module that holds them; returns what undoes it."""
    replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
    for with_value, own in ((True, jax.value_and_grad), (False, jax.grad)):
        stand_in = _stand_in(own, with_value=with_value)
        for module in [*sys.modules.values()]:
            names = getattr(module, "__dict__", {})
            for name in [name for name, value in [*names.items()] if value is own]:
                names[name] = stand_in
                replaced.append((names, name, own, stand_in))

    def restore() -> None:
        for names, name, own, stand_in in replaced:
            if names.get(name) is stand_in:
                names[name] = own

    return restore


def _stand_in(own: Callable[..., Any], *, with_value: bool) -> Callable[..., Any]:
    signature = inspect.signature(own)

    @functools.wraps(own)
    def made(*given: Any, **named: Any) -> Callable[..., Any]:
        plain = own(*given, **named)  # which also raises what is wrong with them
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        asked = bound.arguments

        @functools.wraps(plain)
        def called(*args: Any, **kwargs: Any) -> Any:
            call = TakenGradient(
                loss=asked["fun"],
                args=args,
                kwargs=kwargs,
                argnums=asked["argnums"],
                has_aux=asked["has_aux"],
                options={name: asked[name] for name in _OPTIONS},
            )
            answer = _answered(call)
            if answer is None:
                return plain(*args, **kwargs)
            value, aux, gradients = answer
            if with_value:
                return ((value, aux) if call.has_aux else value), gradients
            return (gradients, aux) if call.has_aux else gradients

        return called

    return made
