"""Recorded runs on a GPU: real allocator statistics under the monitor, and the events of each run.

On a GPU the recordings go to tests/recordings as gpu_NAME.jsonl.gz, where the tests find them from then on.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import record_runs

HEALTHY = ("warm_up", "evaluation", "checkpoints", "losses_freed_each_epoch", "lengths_in_buckets", "prefetch")
FAULTY = ("near_oom", "growth", "donation_lost")


def record_on(*, small: bool) -> dict[str, Any]:
    """Name -> lines written and the kinds of its events, or why the run failed."""
    if small or jax.default_backend() == "cpu":
        with tempfile.TemporaryDirectory() as folder:
            return _recorded(HEALTHY[:1], Path(folder))
    return _recorded((*HEALTHY, *FAULTY), record_runs.FOLDER)


def _recorded(names: tuple[str, ...], out: Path) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for name in names:
        try:
            answers[name] = record_runs.record(name, out)
        except Exception as error:  # noqa: BLE001 - one run that fails is an answer, and the others are asked too
            answers[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
    return {"runs": answers, "expected": {name: name for name in FAULTY if name in names}}
