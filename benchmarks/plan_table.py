"""The rows of `plan_bench` as a Markdown table: the plain step, the best by hand and ours, by model and target.

    python -m benchmarks.plan_table

The best by hand is the one of fewest bytes; beside it stands the point of our frontier whose larger ratio to it is least. Writes
results/plan_bench_jax_<version>.md, and needs nothing but the result file beside it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from benchmarks.plan_bench import NONE, OURS
from benchmarks.sources import RESULTS

Row = Mapping[str, Any]
_MIB = 2**20
_HEAD = (
    "# Plans against remat by hand\n\n"
    "Of each model's whole AdamW step on one device: MiB by the target's own compiler, FLOPs above the plain step's by count,\n"
    "instructions that the compiler chose to compute again, and seconds (of a plan all its compiles, two at a time). Of the\n"
    "policies by hand the one of fewest bytes; of our frontier, compiled unasked, the point nearest to it.\n"
    "`python -m benchmarks.plan_table`, from `{source}`.\n\n"
    "| model | target | step | MiB | extra FLOPs | own remat | compiles | seconds |\n"
    "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |\n"
)


def plan_table(rows: Sequence[Row], source: str) -> str:
    """The table.

    Args:
        rows: Of the result file, in its order.
        source: The result file's name.
    """
    groups = itertools.groupby(rows, key=lambda row: (row["model"], row["target"]))
    lines = [line for (model, target), several in groups for line in _lines(model, target, list(several))]
    return _HEAD.format(source=source) + "\n".join(lines) + "\n"


def _lines(model: str, target: str, rows: Sequence[Row]) -> Iterator[str]:
    here = {row["policy"]: row for row in rows}
    plain = here[NONE]
    for step, row, whole in _steps(here):
        extra = f"{100 * (row['flops'] / plain['flops'] - 1):+.1f} %"
        bytes_, recomputed = f"{row['step_bytes'] / _MIB:.0f}", row.get("compiler_remat") or 0
        cells = (model, target, step, bytes_, extra, recomputed, whole.get("compiles", 1), f"{whole['seconds']:.0f}")
        yield f"| {' | '.join(map(str, cells))} |"


def _steps(here: Mapping[str, Row]) -> Iterator[tuple[str, Row, Row]]:
    """What to call a step, its figures, and the row with the time that it took."""
    plain = here[NONE]
    if plain.get("step_bytes"):
        yield "none", plain, plain
    hands = [row for name, row in here.items() if name != NONE and not name.startswith(OURS)]
    best = min((row for row in hands if row.get("step_bytes")), key=lambda row: row["step_bytes"], default=None)
    if best is None:
        return
    yield f"by hand: {best['policy']}", best, best
    candidates = [each for each in here.get(OURS, {}).get("candidates", []) if each["step_bytes"]]
    if candidates:
        near = min(
            candidates,
            key=lambda each: max(each["step_bytes"] / best["step_bytes"], each["flops"] / best["flops"]),
        )
        yield f"ours: {_words(near)}", near, here[OURS]


def _words(candidate: Row) -> str:
    parts = [candidate["remat"]]
    parts += [f"{candidate['segments']} segments"] if candidate["segments"] else []
    parts += [f"keep {candidate['keep']:.3g}"] if candidate["keep"] else []
    return ", ".join(parts)


def main() -> None:
    """Write the table beside the result file."""
    source = RESULTS / f"plan_bench_jax_{jax.__version__}.json"
    rows = json.loads(source.read_text("utf-8"))["rows"]
    source.with_suffix(".md").write_text(plan_table(rows, source.name), "utf-8")


if __name__ == "__main__":
    main()
