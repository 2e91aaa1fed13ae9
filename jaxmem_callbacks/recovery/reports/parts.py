"""The parts of a report, each tried by itself: one that fails is named, and the others are made all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, final

_Result = TypeVar("_Result")


@final
class Parts:
    """What failed so far. Keeps texts only: an exception would keep the failed call's arrays alive."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def attempt(
        self, part: str, action: Callable[..., _Result], *args: Any, default: _Result, **kwargs: Any
    ) -> _Result:
        """Make one part, or take ``default`` and remember why."""
        try:
            return action(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever fails here, the user's exception goes on
            words = str(error).strip().splitlines() or ["without a word"]
            self.failures.append(f"{part}: {type(error).__name__}: {words[0]}")
            return default
