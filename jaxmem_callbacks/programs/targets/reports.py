"""A traced program without what only reports to Python, and what was left out.

`jax.debug.print`, `jax.debug.callback` and an `io_callback` without results give nothing back to the program, and have no
counterpart on hardware that is absent. What gives values back stays.
"""

from __future__ import annotations

from typing import Any

from jax.extend import core, source_info_util

from jaxmem_callbacks._compat.jaxprs import open_jaxpr, subjaxprs

_EFFECTS = {"DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect"}
# A kernel's own prints are compiled into it.
_KERNELS = {"pallas_call"}
# Primitives of JAX -> as people write them.
_WORDS = {
    "debug_callback": "jax.debug.callback",
    "debug_print": "jax.debug.print",
    "inspect_sharding": "jax.debug.inspect_array_sharding",
}


def without_reports(closed: Any) -> tuple[Any, tuple[str, ...]]:
    """A closed jaxpr without its reports, those inside loops, branches and nested functions included.

    Returns:
        The jaxpr, the same object where there are none; and what was left out, as ``jax.debug.print (train.py:12 (loss))``.
    """
    if not _reports(open_jaxpr(closed).effects):
        return closed, ()
    stripping = _Stripping()
    return stripping.of(closed), tuple(stripping.found)


def _reports(effects: Any) -> set[Any]:
    return {effect for effect in effects if type(effect).__name__ in _EFFECTS}


class _Stripping:
    """Takes reports out of jaxprs; a jaxpr that is used twice stays one, so that JAX lowers it once."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}  # what was taken out, in the order of the program
        self._done: dict[int, tuple[Any, Any]] = {}  # with the original, whose number then stays its own

    def of(self, jaxpr: Any) -> Any:
        """The same jaxpr, closed or open, without reports."""
        opened = open_jaxpr(jaxpr)
        if not _reports(opened.effects):
            return jaxpr
        if id(opened) not in self._done:
            self._done[id(opened)] = opened, self._stripped(opened)
        kept = self._done[id(opened)][1]
        return kept if opened is jaxpr else jaxpr.replace(jaxpr=kept)

    def _stripped(self, opened: Any) -> Any:
        eqns = [self._inside(eqn) for eqn in opened.eqns if not self._only_reports(eqn)]
        return opened.replace(eqns=eqns, effects=_left(opened.effects, [eqn.effects for eqn in eqns]))

    def _only_reports(self, eqn: Any) -> bool:
        """Whether an equation does nothing but report; it is noted then."""
        is_report = bool(_reports(eqn.effects)) and not eqn.outvars and not subjaxprs(eqn)
        if is_report:
            word = _WORDS.get(eqn.primitive.name) or str(eqn.primitive.name)
            place = source_info_util.summarize(eqn.source_info)
            self.found[f"{word} ({place})" if place else word] = None
        return is_report

    def _inside(self, eqn: Any) -> Any:
        if not _reports(eqn.effects) or not subjaxprs(eqn) or eqn.primitive.name in _KERNELS:
            return eqn
        params = {name: self._parameter(value) for name, value in eqn.params.items()}
        inner = eqn.replace(params=params)
        return inner.replace(effects=_left(eqn.effects, [body.effects for body in subjaxprs(inner)]))

    def _parameter(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._parameter, value)) if any(map(_is_jaxpr, value)) else value
        return self.of(value) if _is_jaxpr(value) else value


def _left(effects: Any, inner: list[Any]) -> frozenset[Any]:
    """Effects without the reports that nothing inside makes any more."""
    made = set[Any]().union(*inner)
    return frozenset(effect for effect in effects if effect in made or not _reports([effect]))


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))
