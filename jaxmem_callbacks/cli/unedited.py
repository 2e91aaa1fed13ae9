"""A script as its user has it enters, without a word of this library: its jitted step is found, and its gradients obey policies.

While such a script is looked at, JAX's own names stand for this library's: the gradient functions of JAX, Flax NNX and Equinox
for `jm.value_and_grad` and its like, and whatever their jits make announces the first call that takes a gradient. Only what the
user's own files call is meant; what installed packages call stays JAX's. Nothing is edited, and all is put back at the end.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pathlib
import sys
import sysconfig
import types
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jaxmem_callbacks.programs.steps.interception import announce
from jaxmem_callbacks.transforms import gradients

_OWN_NAME = b"jaxmem"
_PACKAGE = str(pathlib.Path(__file__).parents[1])
_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = ("site-packages", "dist-packages")
# Module -> what makes jitted functions there.
_JITS = {"jax": "jit", "flax.nnx": "jit", "equinox": "filter_jit"}
# Module and gradient function there -> what to write instead.
_GRADIENTS = {
    ("jax", "value_and_grad"): "jm.value_and_grad",
    ("jax", "grad"): "jm.grad",
    ("flax.nnx", "value_and_grad"): "jm.nnx.value_and_grad",
    ("flax.nnx", "grad"): "the second result of jm.nnx.value_and_grad",
    ("equinox", "filter_value_and_grad"): "jm.value_and_grad",
    ("equinox", "filter_grad"): "jm.grad",
}
_WORDS = {"jax": "jax", "flax.nnx": "nnx", "equinox": "eqx"}  # modules as people import them


@dataclass(slots=True)
class Seen:
    """What of a script took part.

    Attributes:
        instead: Gradient functions that it called, as people write them -> what to write instead.
        jitted: Names of the jitted functions that it called, in their order.
    """

    instead: dict[str, str] = field(default_factory=dict[str, str])
    jitted: dict[str, None] = field(default_factory=dict[str, None])


def is_unedited(script: pathlib.Path) -> bool:
    """Whether a script says nothing of this library."""
    return script.is_file() and _OWN_NAME not in script.read_bytes()


@contextmanager
def as_written(script: str, *, step: str | None = None) -> Generator[Seen]:
    """Inside, an unedited script's step is announced to `first_calls_seen_by`, and its gradients obey the policy of a step.

    Args:
        script: As typed: ``train.py`` or ``train.py:name``. One that names this library is left alone.
        step: The name of the jitted function that is the step; None for the first that takes a gradient.
    """
    seen = Seen()
    file, _, name = script.rpartition(":")
    if not is_unedited(pathlib.Path(file if file and name.isidentifier() else script)):
        yield seen
        return
    before: list[tuple[types.ModuleType, str, Any]] = []
    taken = _Gradients(seen, is_told=step is not None)
    try:
        for module_name, attribute in (*_GRADIENTS, *_JITS.items()):
            try:
                module = importlib.import_module(module_name)
            except ImportError:  # not every user has every framework
                continue
            real = getattr(module, attribute)
            before.append((module, attribute, real))
            is_jit = (module_name, attribute) not in _GRADIENTS
            new = _jit(real, seen, taken, step) if is_jit else taken.instead_of(module_name, attribute, real)
            setattr(module, attribute, new)
        yield seen
    finally:
        for module, attribute, real in reversed(before):
            setattr(module, attribute, real)


class _Gradients:
    """This library's gradient functions under JAX's names, and whether any was called."""

    def __init__(self, seen: Seen, *, is_told: bool) -> None:
        self.called = self.is_tracing = False
        self.is_told = is_told  # or need not be: that gradients are taken where no step is seen
        self._seen = seen

    def _tell(self) -> None:
        """Say at once what would else be known at the script's end, which may be days away."""
        self.is_told = True
        sys.stderr.write(
            "jaxmem: a gradient is taken outside jax.jit, nnx.jit and eqx.filter_jit, where no step is seen. The script goes on, "
            "to its end if need be; stop it with Ctrl-C, and jit the whole step.\n"
        )

    def instead_of(self, module: str, attribute: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """A gradient function for the user's own files; for all others ``real``."""
        own = _own_gradient(module, attribute)

        @functools.wraps(real)
        def made(*args: Any, **options: Any) -> Any:
            if not _is_users(inspect.currentframe()):
                return real(*args, **options)
            return self._noted(f"{_WORDS[module]}.{attribute}", _GRADIENTS[module, attribute], own, args, options)

        return made

    def _noted(
        self, word: str, instead: str, own: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Callable[..., Any]:
        if not args:  # as a decorator with options
            return lambda loss: self._noted(word, instead, own, (loss,), options)
        gradient = own(*args, **options)

        @functools.wraps(args[0])
        def called(*inner: Any, **kwargs: Any) -> Any:
            self.called = True
            if not (self.is_tracing or self.is_told):
                self._tell()
            self._seen.instead[word] = instead
            return gradient(*inner, **kwargs)

        return called


def _own_gradient(module: str, attribute: str) -> Callable[..., Any]:
    """This library's counterpart, with the parameters of the original."""
    if module != "flax.nnx":
        return getattr(gradients, attribute.removeprefix("filter_"))
    from jaxmem_callbacks.integrations.flax_nnx import value_and_grad

    if attribute == "value_and_grad":
        return value_and_grad

    def grad(loss: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        both = value_and_grad(loss, **options)

        def found(*args: Any, **kwargs: Any) -> Any:
            value, gradients_of_all = both(*args, **kwargs)
            return (gradients_of_all, value[1]) if options.get("has_aux") else gradients_of_all

        return found

    return grad


def _jit(real: Callable[..., Any], seen: Seen, taken: _Gradients, step: str | None) -> Callable[..., Any]:
    """A jit whose functions are watched where the user's own files make them."""

    @functools.wraps(real)
    def jit(*args: Any, **options: Any) -> Any:
        made = real(*args, **options)
        if not _is_users(inspect.currentframe()):
            return made
        if args:
            return _Jitted(made, seen, taken, step)
        return lambda function: _Jitted(made(function), seen, taken, step)

    return jit


class _Jitted:
    """A jitted function of the user's, which announces its first call where that is the step's."""

    def __init__(self, made: Any, seen: Seen, taken: _Gradients, step: str | None) -> None:
        functools.update_wrapper(self, made, updated=())
        self._made, self._seen, self._taken, self._step = made, seen, taken, step
        self._known = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._known and not self._is_traced(args, kwargs):
            self._known = True
            name = getattr(self, "__name__", "a function without a name")
            self._seen.jitted[name] = None
            if name == self._step if self._step is not None else self._takes_a_gradient(args, kwargs):
                from jaxmem_callbacks.programs.memory import as_step

                self._taken.is_told = True  # from here on a plan traces the step
                announce(as_step(self._made), args, kwargs)
        return self._made(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _takes_a_gradient(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """By a trace. One that fails is left to the call itself, which fails as the user knows it."""
        self._taken.called, self._taken.is_tracing = False, True
        try:
            self._made.lower(*args, **kwargs)
        except Exception:  # noqa: BLE001 - whatever the user's own step raises
            return False
        finally:
            self._taken.is_tracing = False
        return self._taken.called

    def _is_traced(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether it is called by another function that is traced just now, and so is a part of that."""
        import jax
        from jax.core import Tracer

        leaves = jax.tree.leaves((args, kwargs))
        return self._taken.is_tracing or any(isinstance(leaf, Tracer) for leaf in leaves)


@functools.cache
def _is_of_a_user(file: str) -> bool:
    parts = pathlib.Path(file).parts
    return not (file.startswith(("<frozen", _PACKAGE, _STANDARD)) or any(each in parts for each in _INSTALLED))


def _is_users(here: types.FrameType | None) -> bool:
    """Whether the function of a frame was called by a file of the user's."""
    caller = None if here is None else here.f_back
    return caller is not None and _is_of_a_user(caller.f_code.co_filename)
