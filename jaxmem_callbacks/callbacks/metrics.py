"""The user's metrics: what a step returned enters on the training thread, host floats leave on the monitor's thread.

On the training thread only shapes are looked at; a value is read elsewhere, and only once it is ready, so nothing ever waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

ONLY = "metric"  # the name of a metric that was handed over without one


def scalars_of(metrics: Any, skipped: set[str], prefix: str = "") -> dict[str, Any]:
    """The scalars among the metrics, unread: nothing larger is ever held.

    Args:
        metrics: A mapping of scalars, nested or not, or one scalar.
        skipped: Names of what is no scalar are added here.
        prefix: Of the names, in recursion.
    """
    if not isinstance(metrics, Mapping):
        if _is_scalar(metrics):
            return {ONLY: metrics}
        skipped.add(f"{type(metrics).__name__} (expected a mapping of names to scalars)")
        return {}
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if _is_scalar(value):
            found[f"{prefix}{name}"] = value
        elif isinstance(value, Mapping):
            found.update(scalars_of(value, skipped, f"{prefix}{name}/"))
        else:
            skipped.add(f"{prefix}{name}")
    return found


def all_ready(values: Mapping[str, Any]) -> bool:
    """Whether reading these would wait for nothing."""
    return all(_is_ready(value) for value in values.values())


def read(values: Mapping[str, Any], skipped: set[str]) -> dict[str, float]:
    """Ready values as floats; what was deleted meanwhile is left out, what is no number is added to ``skipped``."""
    floats: dict[str, float] = {}
    # Only this thread's guard is opened: a guard that the user set for the whole process is about his own code.
    with jax.transfer_guard("allow"):
        for name, value in values.items():
            try:
                floats[name] = float(value)
            except (TypeError, ValueError, OverflowError):
                skipped.add(name)
            except RuntimeError:  # deleted or donated meanwhile
                continue
    return floats


def _is_scalar(value: Any) -> bool:
    return type(value) in (float, int, bool) or getattr(value, "shape", None) == ()


def _is_ready(value: Any) -> bool:
    is_ready, is_deleted = getattr(value, "is_ready", None), getattr(value, "is_deleted", None)
    if is_ready is None:
        return True
    # A deleted array is never asked: jaxlib 0.10.2 crashes the process in is_ready(). Reading it raises without waiting.
    try:
        return (is_deleted is not None and is_deleted()) or bool(is_ready())
    except RuntimeError:  # deleted between the two
        return True
