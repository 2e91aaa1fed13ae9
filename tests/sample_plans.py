"""Plans written by hand, for tests of what shows them; `jm.plan` makes real ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxmem_callbacks.records.plans import Candidate, PlanRecord
from jaxmem_callbacks.records.policies import StepPolicy

MIB, GIB = 2**20, 2**30


def candidate(
    mebibytes: float | None, extra: int, *, fits: bool | None = True, own: int = 0, **policy: Any
) -> Candidate:
    """One candidate of a plain step of 1,000 operations."""
    size = None if mebibytes is None else round(mebibytes * MIB)
    return Candidate(
        policy=StepPolicy(**policy),
        step_bytes=size,
        fits=fits,
        flops=1000 + extra,
        extra_flops=extra,
        compiler_remat=own,
    )


def sentences(shown: object) -> str:
    """What is printed of a plan or a peak, with every sentence on one line."""
    return " ".join(str(shown).split())


def record(candidates: Sequence[Candidate], chosen: int, budget: int | None, **fields: Any) -> PlanRecord:
    """A plan of them for one H100."""
    usual: dict[str, Any] = {
        "step": "train_step",
        "target": "h100_sxm",
        "platform": "cuda",
        "device_count": 1,
        "reason": "fewest extra operations of those that fit",
        "limit_bytes": 60 * GIB,
        "budget_reason": "as asked for",
        "fingerprint": "0123abcd",
    }
    return PlanRecord(candidates=tuple(candidates), chosen=chosen, budget_bytes=budget, **{**usual, **fields})


def six(budget: int = 72 * MIB, **fields: Any) -> PlanRecord:
    """A frontier of six, the third of which the compiler itself recomputes at, chosen by a budget in the midst of them."""
    sizes = ((134, 0, None), (92.6, 5, 1.0), (76.7, 53, 0.454), (71.6, 98, 0.341), (69.8, 143, 0.227), (61.7, 233, 0.0))
    candidates = [
        candidate(size, extra, fits=size * MIB <= budget, own=120 * (keep == 0.454))
        if keep is None
        else candidate(size, extra, fits=size * MIB <= budget, own=120 * (keep == 0.454), remat="full", keep=keep)
        for size, extra, keep in sizes
    ]
    fitting = [number for number, each in enumerate(candidates) if each.fits]
    return record(candidates, min(fitting, default=5), budget, **fields)


def fifteen() -> PlanRecord:
    """Three shardings of very different sizes, five policies each, close together."""
    found: list[Candidate] = []
    for sharding, base in (("replicate", 900_000), ("zero1", 300_000), ("fsdp", 40_000)):
        for keep, more, extra in (
            (None, 30_000, 0),
            (1.0, 20_000, 8),
            (0.5, 16_000, 60),
            (0.3, 15_000, 100),
            (0, 12_000, 230),
        ):
            policy: dict[str, Any] = {} if keep is None else {"remat": "full", "keep": keep}
            size = base + more
            found.append(candidate(size, extra, fits=size < 60_000, sharding=sharding, **policy))
    return record(found, len(found) - 1, 60_000 * MIB, target="h100_sxm:64", device_count=64, mesh={"fsdp": 64})


def crowded() -> PlanRecord:
    """Nine points in one corner and one apart."""
    close = [candidate(99.5 - 0.1 * n, 10 + n, remat="full", keep=n / 10) for n in range(9, 0, -1)]
    return record([candidate(100, 0), *close], 0, 110 * MIB)


def without_limit() -> PlanRecord:
    """As for an attached CPU."""
    plain = six()
    free = tuple(dataclasses.replace(each, fits=None) for each in plain.candidates)
    return record(
        free, 0, None, target="attached", platform="cpu", limit_bytes=None, budget_reason="the cpu has no limit."
    )


def unfit() -> PlanRecord:
    """Nothing fits, and two had no size at all."""
    refused = [candidate(None, extra, fits=False, remat="full", keep=extra / 100) for extra in (20, 30)]
    plan = six(4 * MIB)
    return record([*plan.candidates, *refused], 5, 4 * MIB, least_bytes=GIB)
