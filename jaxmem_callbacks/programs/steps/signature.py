"""A call's arrays enter; its signature leaves, and in words what differs from the signature before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxmem_callbacks.programs.steps.aliases import LeafUse

Signature = tuple[tuple[str, str], ...]
_TOLD = 8


def signature_of(uses: Sequence[LeafUse], static: Mapping[str, object]) -> Signature:
    """Path -> type of every array (sharding added where it is not a single device's), then the static arguments."""
    arrays = [(use.path, f"{use.type_text} {use.placement}".rstrip()) for use in uses]
    return (*arrays, *((name, f"static {value!r:.60}") for name, value in static.items()))


def changes(before: Signature | None, after: Signature) -> tuple[str, ...]:
    """One sentence for each path that differs: ``batch['tokens']: int32[16,129] -> int32[7,129]``."""
    if before is None:
        return ()
    old, new = dict(before), dict(after)
    told = [f"{path}: {old[path]} -> {new[path]}" for path in new if path in old and old[path] != new[path]]
    told += [f"{path}: new, {new[path]}" for path in new if path not in old]
    told += [f"{path}: gone, was {old[path]}" for path in old if path not in new]
    if len(told) > _TOLD:
        return (*told[:_TOLD], f"and {len(told) - _TOLD} more")
    return tuple(told) or ("nothing in the arguments: the jit or the policy is another one",)
