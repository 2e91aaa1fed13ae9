"""A train step that records each of its calls: `MemoryMonitor.wrap`, for training loops without hooks."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any, final

from jaxmem_callbacks._compat.trace_state import is_traced
from jaxmem_callbacks.callbacks.background import Faults

# They have `__get__`, which binds them to nothing.
_BOUND = (types.MethodType, staticmethod)


@final
class WrappedStep:
    """A function that calls the monitor after each of its own calls, and otherwise stands for the function that it wraps.

    Its attributes are that function's, such as ``lower`` of a jitted one; in a class it is a method where that function is one.
    Inside a trace, where no step runs, the monitor is not called.

    Args:
        function: What is called. Its result and its exceptions are the caller's.
        number: The number of a step by the arguments of the call; calls are counted from 0 where it is None or fails.
        record: Called with the number after the call.
        faults: Where an exception of ``number`` is reported.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        number: Callable[..., Any] | None,
        record: Callable[[Any], None],
        faults: Faults,
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function, self._number, self._record, self._faults = function, number, record, faults
        self._counted = itertools.count()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's own result."""
        if is_traced(args, kwargs):
            self._faults.note(
                f"{self._name} in a trace",
                f"{self._name} was called inside a trace, where no step runs, and is not counted there. Where no step is "
                "counted at all, wrap the jitted function and not the one that is jitted.",
            )
            return self._function(*args, **kwargs)
        step = self._numbered(args, kwargs)  # before the call, which may donate its arguments or change them
        result = self._function(*args, **kwargs)
        self._record(step)
        return result

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A method, where the wrapped function would be one."""
        binds = hasattr(type(self._function), "__get__") and not isinstance(self._function, _BOUND)
        return types.MethodType(self, instance) if binds and instance is not None else self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_function"), name)

    @property
    def _name(self) -> str:
        return str(getattr(self._function, "__name__", type(self._function).__name__))

    def _numbered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counted = next(self._counted)
        if self._number is None:
            return counted
        number = functools.partial(self._number, *args, **kwargs)
        return self._faults.attempt(f"the step's number of {self._name}", number, default=counted)
