"""The picture of docs/plan.md, drawn from the committed figures of a pod's plan. Writes docs/images/plan_frontier.png.

    python -m benchmarks.plan_picture

Nothing is compiled: results/plan_pod_*.json, by benchmarks/plan_examples.py, enters, and `Plan.figure` draws it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jaxmem_callbacks as jm
from benchmarks.sources import RESULTS, ROOT
from jaxmem_callbacks.records.plans import Candidate, PlanRecord

PICTURE = ROOT / "docs" / "images" / "plan_frontier.png"


def plan_of(path: Path) -> jm.Plan:
    """The plan in a file of `Plan.to_json`, as far as its picture needs it: without peaks."""
    saved = json.loads(path.read_text("utf-8"))
    plain = next(each["flops"] for each in saved["candidates"] if each["policy"]["remat"] == "none")
    candidates = tuple(_candidate({"plain_flops": plain, **each}) for each in saved["candidates"])
    return jm.Plan(PlanRecord(**_fields(PlanRecord, saved) | {"candidates": candidates}))


def _candidate(saved: dict[str, Any]) -> Candidate:
    policy = {name: tuple(value) if isinstance(value, list) else value for name, value in saved["policy"].items()}
    return Candidate(**_fields(Candidate, saved) | {"policy": jm.StepPolicy(**policy), "peak": None, "beside": ()})


def _fields(record: type[Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record that a file has; an older file may have fewer."""
    return {field.name: saved[field.name] for field in dataclasses.fields(record) if field.name in saved}


def main() -> None:
    """Draw and write the picture."""
    (path,) = RESULTS.glob("plan_pod_*.json")
    plan_of(path).figure().savefig(PICTURE, dpi="figure")  # its labels were placed at that size
    print(f"{PICTURE.relative_to(ROOT)} from {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
