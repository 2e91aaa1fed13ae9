"""A module's call as what a checkpoint traces and everything else.

Arrays and the framework's own objects go through the checkpoint. Flags, strings and numbers stay the very objects that the
caller passed, so ``if train:`` behaves as without it, by position or by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxmem_callbacks.transforms.tracing import split_arrays


class Parting:
    """Parts pytrees into what is traced and the rest.

    Args:
        is_object: Whether a value is one of the framework's own, which travel with the arrays and are never looked into.
    """

    def __init__(self, is_object: Callable[[Any], bool]) -> None:
        self._is_object = is_object

    def through(
        self, checkpointed: Callable[..., Any], module: Any, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """The result of ``call(module, *args, **kwargs)``, run by ``checkpointed``.

        Args:
            checkpointed: From a function of a module and a list of traced values, the same function under a checkpoint.
            module: The module.
            call: Its method, unbound.
            args: The caller's.
            kwargs: The caller's.
        """
        traced, join = split_arrays((args, kwargs), self._is_object)
        rest: list[Callable[[Sequence[Any]], Any]] = []

        def rematerialised(inner_module: Any, inner_traced: Sequence[Any]) -> list[Any]:
            inner_args, inner_kwargs = join(inner_traced)
            results, join_results = split_arrays(call(inner_module, *inner_args, **inner_kwargs), self._is_object)
            rest.append(join_results)
            return results

        results = checkpointed(rematerialised)(module, traced)
        return rest[-1](results)
