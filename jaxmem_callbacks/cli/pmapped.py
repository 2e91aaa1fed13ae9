"""A training step under `jax.pmap`: why it is not looked at, and the jit to write instead."""

from __future__ import annotations

import functools
import inspect
import types
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, cast

import jax

from jaxmem_callbacks.cli.watched import Watched, takes_gradient
from jaxmem_callbacks.programs.steps.interception import announce
from jaxmem_callbacks.programs.steps.step import JitStep
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import ScriptError
from jaxmem_callbacks.records.source_files import Owner

_PLAIN = (bool, int, float, str, type(None))


class Pmapped(Watched):
    """A function under `jax.pmap`. The script ends at its first call that takes a gradient, with what to write."""

    def _takes_gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        traced, results = jax.make_jaxpr(
            functools.partial(self.watched_jit, **kwargs), static_argnums=self._static, return_shape=True
        )(*args)
        self._results = jax.tree.leaves(results)
        return takes_gradient(traced)

    def _announce(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._watching.seen.refused = ScriptError(self.refused(args))
        announce(types.SimpleNamespace(name=self._name), args, kwargs)

    def is_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it takes a gradient; not where it cannot be traced, which its call tells."""
        try:
            return self._takes_gradient(args, kwargs)
        except Exception:  # noqa: BLE001 - whatever the user's own step raises
            return False

    @property
    def _static(self) -> tuple[int, ...]:
        return _places(self._options.get("static_broadcasted_argnums", ()))

    def refused(self, args: Sequence[Any]) -> str:
        """Why no plan is made of it, and what to write."""
        why = (
            f"{self._name} takes a gradient under jax.pmap, and no plan is made of it: policies and shardings need "
            "jax.jit. It was stopped before its first step."
        )
        if self._whose is Owner.PACKAGE:
            return f"{why} An installed package puts it under jax.pmap. Does that package, or a newer one, train under jax.jit?"
        function = self._expression(args)
        if not function:
            return (
                f"{why} Can it run under jax.shard_map inside of jax.jit, over a mesh of all devices? Its arguments then have no "
                "axis of devices."
            )
        axis = str(self._options.get("axis_name") or "devices")
        whole = self._whole(args)
        kept = [place for place in range(len(args)) if place not in self._static]
        divided = advise("step.pmap.divided", axis=axis)
        specs = ", ".join("jax.P()" if place in whole else divided for place in kept)
        donated = [at for at, place in enumerate(kept) if place in _places(self._options.get("donate_argnums", ()))]
        arguments = f"step, donate_argnums={donated!r}" if donated else "step"
        names = self._names(len(args))
        once = " and ".join(names[place] for place in kept if place in whole)
        split = " and ".join(names[place] for place in kept if place not in whole)
        lines = advise("step.pmap", axis=axis, function=function, specs=f"({specs},)", arguments=arguments)
        return (
            f"{why} Take jax.pmap off {self._name}, and write:\n{lines}\n"
            f"No argument then has an axis of devices. Pass {once or 'none'} as one copy, not replicated, and "
            f"{split or 'none'} with the rows of all devices in the first dimension. Is something drawn at random on "
            "each device? "
            f"Its key is then the same on all, unless the device's place on the axis {axis} is folded into it."
        )

    def _expression(self, args: Sequence[Any]) -> str:
        """The function under the pmap as code, its static arguments bound; empty where it has no name or they have none."""
        function, bound = self._function, dict[str, Any]()
        while isinstance(function, functools.partial) and not function.args:
            bound |= function.keywords
            function = cast("functools.partial[Any]", function).func
        name = self._watching.written(function)
        names = self._names(len(args))
        static = {names[place]: args[place] for place in self._static if place < len(args)}
        if not name or not all(isinstance(value, _PLAIN) for value in (bound | static).values()):
            return ""
        words = [f"{key}={value!r}" for key, value in bound.items()]
        if static:  # by name, for one may stand before an array
            given = [f"{key}={static[key]!r}" if key in static else f"{key}={key}" for key in names]
            taken = ", ".join(key for key in names if key not in static)
            return advise("step.pmap.static", names=taken, function=name, arguments=", ".join(given + words))
        return advise("step.pmap.partial", function=name, arguments=", ".join(words)) if words else name

    def _names(self, count: int) -> list[str]:
        """Names of the arguments by place."""
        try:
            names = list(inspect.signature(self._function).parameters)
        except (TypeError, ValueError):
            names = []
        return [*names[:count], *(f"argument {place}" for place in range(len(names), count))]

    def _whole(self, args: Sequence[Any]) -> set[int]:
        """Places of arguments that every device has alike: they are returned updated, or are not divided."""
        axes = self._options.get("in_axes", 0)
        several = list(axes) if isinstance(axes, tuple | list) else [axes] * len(args)
        made = Counter((leaf.shape, leaf.dtype) for leaf in self._results)
        whole: set[int] = set()
        for place, value in enumerate(args):
            if place in self._static:
                continue
            leaves = Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(value) if hasattr(leaf, "dtype"))
            if (place < len(several) and several[place] is None) or (leaves and leaves <= made):
                whole.add(place)
                made -= leaves
        return whole


class Named(Pmapped):
    """The same in a script that names its step itself: it is asked about where that is the step, and else runs as it is."""

    @contextmanager
    def seen_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[None]:
        """Around a call, which is nobody's affair."""
        del args, kwargs
        yield


def refuse_pmapped(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a step under `jax.pmap`, that of `jm.jit_step` too.

    Args:
        step: What a script reached.
        args: The arguments of its first call.
        kwargs: The keyword arguments.

    Raises:
        ScriptError: it takes a gradient; says what to write.
    """
    inner = step.__wrapped__ if isinstance(step, JitStep) else step
    if isinstance(inner, Pmapped) and inner.is_step(args, kwargs):
        raise ScriptError(inner.refused(args))


def _places(said: Any) -> tuple[int, ...]:
    return (said,) if isinstance(said, int) else tuple(cast("Iterable[int]", said))
