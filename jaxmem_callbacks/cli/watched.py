"""The jitted functions of a user's script enter, as their jit made them; one that is the step announces its calls."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from typing import Any

import jax
from jax.core import Tracer

from jaxmem_callbacks.cli.callers import Caller, caller_of
from jaxmem_callbacks.cli.stand_ins import Seen, StandIns, Within
from jaxmem_callbacks.programs.memory import as_step
from jaxmem_callbacks.programs.steps.interception import announce
from jaxmem_callbacks.programs.targets.exporting import asks_for_cudnn

# A function whose trace fails is traced again at its next call, so many times.
_TRIES = 3


class Watching:
    """Makes what stands for a jit.

    Args:
        seen: Told what is called.
        gradients: Knows where gradients are taken.
        step: The name of the step; None for what takes a gradient.
        elsewhere: Whether it is to be compiled for hardware that is not here.
    """

    def __init__(self, seen: Seen, gradients: StandIns, step: str | None, *, elsewhere: bool) -> None:
        self.seen, self.gradients, self.step, self.elsewhere = seen, gradients, step, elsewhere

    def instead_of(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A jit whose functions are watched where the user's own files make them."""

        @functools.wraps(real)
        def jit(*args: Any, **options: Any) -> Any:
            made = real(*args, **options)
            if caller_of(inspect.currentframe()) is not Caller.USER:
                return made
            if args or "fun" in options:
                return Watched(made, self, args[0] if args else options["fun"])
            return lambda function: Watched(made(function), self, function)

        return jit

    def written(self, function: Any) -> str:
        """How people write the function that they jitted: empty where that has no name of its own, as a method has none."""
        if (gradient := self.gradients.written.get(function) if callable(function) else None) is not None:
            return gradient
        is_plain = inspect.isfunction(function) and not hasattr(function, "__wrapped__")
        name = function.__qualname__.rpartition("<locals>.")[2] if is_plain else ""
        return name if name.isidentifier() else ""


class Watched:
    """A jitted function of the user's, which announces its calls where it is the step. All else is the jitted function's own."""

    def __init__(self, made: Any, watching: Watching, function: Any) -> None:
        functools.update_wrapper(self, made, updated=())
        self.watched_jit = made
        self._watching, self._written = watching, watching.written(function)
        self._known: set[Hashable] = set()
        self._instead: dict[str, str] = {}
        self._is_step, self._tries, self._refusal = False, _TRIES, ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the jitted function."""
        with self._seen(args, kwargs):
            return self.watched_jit(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As the jitted function's; a step that is compiled by hand is one too."""
        with self._seen(args, kwargs):
            return self.watched_jit.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As the jitted function's."""
        with self._seen(args, kwargs):
            return self.watched_jit.trace(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "watched_jit":  # of one that is not made yet
            raise AttributeError(name)
        return getattr(self.watched_jit, name)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return repr(self.watched_jit)

    def __copy__(self) -> Watched:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Watched:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.watched_jit,)

    @contextmanager
    def _seen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[None]:
        """Around a call, which is announced first where it is the step's."""
        gradients, seen = self._watching.gradients, self._watching.seen
        is_own = not gradients.is_within and not any(
            isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs))
        )
        if is_own:
            seen.jitted[self._name] = None
            if self._is_found(args, kwargs):
                gradients.is_told = True  # from here on a plan traces the step
                seen.instead, seen.step = dict(self._instead), self._written
                announce(as_step(self.watched_jit), args, kwargs)
        with gradients.within(is_own=is_own) as here:
            yield
        self._learn(here)
        if is_own and here.takes_gradient and self._watching.step not in (None, self._name):
            seen.pass_by(self._name, str(self._watching.step))
        if here.takes_gradient and self._refusal:
            gradients.tell(f"{self._name} takes a gradient, but does not trace ({self._refusal})")

    @property
    def _name(self) -> str:
        return getattr(self, "__name__", "a function without a name")

    def _is_found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it is the step: by its name, or by a trace for every kind of arguments that it was not traced for yet."""
        named = self._watching.step
        if named is not None:
            return self._name == named
        kind = _kind((args, kwargs))
        if kind not in self._known and self._tries:
            if not self._is_traced(args, kwargs):
                return False
            self._known.add(kind)
        return self._is_step and kind in self._known

    def _is_traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """See whether it takes a gradient. A trace that fails is left to the call itself, which fails as the user knows it.

        One that fails for want of cuDNN is its step all the same where that is compiled elsewhere, and is refused there.
        """
        with self._watching.gradients.within(is_own=True) as here:
            try:
                getattr(self.watched_jit, "trace", self.watched_jit.lower)(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - whatever the user's own step raises
                if self._watching.elsewhere and here.takes_gradient and asks_for_cudnn(error):
                    return True
                self._tries -= 1
                self._refusal = f"{type(error).__name__}: {error}".partition("\n")[0]
                return False
            finally:
                self._learn(here)
        return True

    def _learn(self, here: Within) -> None:
        """What a trace showed. JAX keeps traces: a later one may show nothing."""
        self._is_step |= here.takes_gradient and self._watching.step is None
        self._instead |= here.instead


def _itself(jitted: Any) -> Any:
    return jitted


def _kind(arguments: Any) -> Hashable:
    """What makes JAX trace anew, as far as it matters here: shapes, types, switches and words."""

    def kind_of(leaf: Any) -> Hashable:
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            return leaf.shape, str(leaf.dtype)
        return leaf if isinstance(leaf, (bool, str)) else type(leaf)

    leaves, tree = jax.tree.flatten(arguments)
    return str(tree), *map(kind_of, leaves)  # a tree's own hash is that of its static parts, which need not have one
