"""A module's call as what a checkpoint traces and everything else.

Arrays and the framework's own objects go through the checkpoint. Flags, strings and numbers stay the very objects that the
caller passed, so ``if train:`` behaves as without it, by position or by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax


class Parting:
    """Parts pytrees into what is traced and the rest.

    Args:
        is_object: Whether a value is one of the framework's own, which travel with the arrays and are never looked into.
    """

    def __init__(self, is_object: Callable[[Any], bool]) -> None:
        self._is_object = is_object

    def part(self, tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        """What of a tree is traced, and the function that puts others in its place."""
        leaves, treedef = jax.tree.flatten(tree, is_leaf=self._is_object)
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) or self._is_object(leaf)]

        def join(traced: Sequence[Any]) -> Any:
            filled = list(leaves)
            for place, value in zip(places, traced, strict=True):
                filled[place] = value
            return jax.tree.unflatten(treedef, filled)

        return [leaves[place] for place in places], join

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
        traced, join = self.part((args, kwargs))
        rest: list[Callable[[Sequence[Any]], Any]] = []

        def rematerialised(inner_module: Any, inner_traced: Sequence[Any]) -> list[Any]:
            inner_args, inner_kwargs = join(inner_traced)
            results, join_results = self.part(call(inner_module, *inner_args, **inner_kwargs))
            rest.append(join_results)
            return results

        results = checkpointed(rematerialised)(module, traced)
        return rest[-1](results)
