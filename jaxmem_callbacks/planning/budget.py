"""A budget as the user writes it and a target enter; bytes that a step may use on one device leave, and where they come from."""

from __future__ import annotations

import math
import numbers
import os
from dataclasses import dataclass

from jaxmem_callbacks.environment.variables import DEFAULT_FRACTION, as_fraction, fraction_said
from jaxmem_callbacks.programs.targets.target import Target
from jaxmem_callbacks.records.errors import PlanError
from jaxmem_callbacks.records.units import MIB, format_bytes, is_whole, parse_bytes

# A device has less; a number above it that has no unit is of no such unit.
_MOST_GIB = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How much a step may use.

    Attributes:
        bytes: On one device, at most what it has; None where there is no limit (an attached CPU).
        limit_bytes: All that a program could use there as JAX is set up, or None.
        reason: Where both come from, one sentence.
        device_bytes: All that the device has, where JAX's allocator takes a share of it that it can be told; else None.
    """

    bytes: int | None
    limit_bytes: int | None
    reason: str
    device_bytes: int | None = None

    @property
    def untold_bytes(self) -> int | None:
        """What JAX's allocator takes wherever nobody tells it a share, and as this process is set up; None where it takes all."""
        if self.device_bytes is None or self.limit_bytes is None:
            return None
        return min(self.limit_bytes, int(self.device_bytes * DEFAULT_FRACTION))

    def share_for(self, need: int) -> float | None:
        """The share of the device that JAX's allocator must be told to take for so many bytes; None where it need not be told.

        What this process was told is said again where it is enough, since another share would contradict it.
        """
        if self.device_bytes is None or self.untold_bytes is None or need <= self.untold_bytes:
            return None
        if self.limit_bytes is not None and need <= self.limit_bytes:
            return _gpu_share()[0]
        return min(math.ceil(100 * need / self.device_bytes) / 100, 1.0)


def budget_for(asked: str | float | None, target: Target | None) -> Budget:
    """What a step may use on one device of a target.

    Args:
        asked: Bytes, ``"72GiB"``, of which no more count than the device has; a share of what is usable there as a float in
            (0, 1], or None for all of it.
        target: Hardware that is not there, or None for the attached devices.

    Raises:
        PlanError: no size, a share outside (0, 1], or a share of an unknown whole.
    """
    usable, reason = _usable(target)
    if asked is None:
        return Budget(bytes=usable, limit_bytes=usable, reason=reason, device_bytes=_whole(target))
    size = parse_budget(asked)
    if not isinstance(size, float):
        whole = _whole(target) or usable
        if whole is not None and size > whole:
            name = "the attached device" if target is None or target.platform == "cpu" else target.name
            reason = f"all that {name} has, which is less than the {format_bytes(size)} asked for"
            return Budget(bytes=whole, limit_bytes=usable, reason=reason, device_bytes=_whole(target))
        return Budget(bytes=size, limit_bytes=usable, reason="as asked for", device_bytes=_whole(target))
    if usable is None:
        msg = f"budget={asked!r} is a share, and the whole is unknown: {reason} Type bytes instead, such as '12GiB'."
        raise PlanError(msg)
    reason = f"{size:.0%} of the usable memory: {reason}"
    return Budget(bytes=int(usable * size), limit_bytes=usable, reason=reason, device_bytes=_whole(target))


def parse_budget(asked: str | float) -> int | float:
    """Bytes as an int, or a share as a float.

    Raises:
        PlanError: neither; text without a unit may mean GiB, bytes or a share, and so may a whole number below 1 MiB.
    """
    if isinstance(asked, numbers.Real) and not isinstance(asked, bool) and not is_whole(asked):
        share = float(asked)
        if not 0 < share <= 1:
            msg = f"budget={asked!r}: a float is a share of the usable memory, above 0 and up to 1. For bytes type '72GiB'."
            raise PlanError(msg)
        return share
    try:
        size = parse_bytes(asked, unit_needed=True)  # pyright: ignore[reportArgumentType] - what it is not, it refuses
    except ValueError as error:
        msg = f"budget={asked!r}: {error} A float above 0 and up to 1, such as 0.9, is a share of the usable memory."
        raise PlanError(msg) from None
    if size <= 0:
        msg = (
            f"budget={asked!r} is nothing to plan for: expected bytes above 0, such as '72GiB', or a share such as 0.9."
        )
        raise PlanError(msg)
    if is_whole(asked) and size < MIB:
        msg = (
            f"budget={asked!r}: expected a size with its unit, since {format_bytes(size)} hold no step. Type "
            f"{size_meant(size)!r}, or a share of what is usable above 0 and up to 1, such as 0.9."
        )
        raise PlanError(msg)
    return size


def size_meant(number: float | None) -> str:
    """The size that was likely meant by a number without a unit: gibibytes as far as a device may have so many, else bytes."""
    if number is None or not 0 < number < MIB:
        return "72GiB"
    return f"{number:g}GiB" if number < _MOST_GIB else f"{number:.0f}B"


def _whole(target: Target | None) -> int | None:
    """All memory of one GPU that is not here: of what is here, and of a TPU, no more can be used than the limit says."""
    return target.memory_bytes if target is not None and target.platform == "cuda" else None


def _usable(target: Target | None) -> tuple[int | None, str]:
    if target is None or target.platform == "cpu":
        return _attached()
    if target.memory_bytes is None:
        return None, f"the memory of {target.name} is not known."
    if target.platform == "tpu":
        return target.memory_bytes, f"what the compiler lets a program use on {target.name}"
    share, source = _gpu_share()
    whole = format_bytes(target.memory_bytes)
    return int(target.memory_bytes * share), f"{share:.0%} of the {whole} of {target.name}: {source}"


def _gpu_share() -> tuple[float, str]:
    """The share of a GPU that JAX's allocator takes, as this process is set up; the rest stays with CUDA, NCCL and cuDNN."""
    name, text = fraction_said(os.environ) or ("", "")
    share = as_fraction(text) or 0.0
    if 0 < share <= 1:
        return share, f"{name}={text}"
    ignored = f", and {name}={text} is no share above 0 and up to 1" if name else ""
    return DEFAULT_FRACTION, f"JAX takes as much unless told otherwise{ignored}"


def _attached() -> tuple[int | None, str]:
    import jax  # here, so that a command line judges what was typed without it

    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit") or None
    if limit is None:
        return None, f"the attached {device.platform} has no limit that its runtime reports."
    return int(limit), f"bytes_limit of the attached {device.device_kind}"
