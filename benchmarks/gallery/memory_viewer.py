"""The step of a program in XProf's memory viewer and in `jaxmem inspect`. Writes results/memory_viewer.json.

    python -m benchmarks.gallery.memory_viewer [NAME ...]

A program is trained on the CPU under JAX's profiler. XProf's own converter makes its memory viewer of that profile: the buffers
that are alive at the peak of the step's program. `jaxmem inspect` is asked for the same on the attached CPU.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gallery.__main__ import FailedError, Trial, printed_json
from benchmarks.gallery.environment import made, versions
from benchmarks.gallery.programs import PROGRAMS
from benchmarks.sources import RESULTS, check_hash

RESULT, VIEWER = RESULTS / "memory_viewer.json", Path(__file__).with_name("viewed.py")
LARGEST, ALL = 10, 100_000
# Programs of one device on the JAX line whose environment has XProf: packages of several frameworks, and a loop of each kind.
VIEWED = ("maxtext_pretrain", "tunix_peft", "keras_fit", "kauldron_train", "equinox_mlp", "nanodo", "dit")

Sized = list[tuple[int, str]]


def compared(ours: Sized, theirs: Sized, gap_bytes: int, program_bytes: int, shown: dict[str, Any]) -> dict[str, Any]:
    """What both show of one program.

    Args:
        ours: Bytes and shape of each buffer at the peak, by `jaxmem inspect`, without the gap between them.
        theirs: The same by XProf, which adds the smallest buffers up into one without a shape.
        gap_bytes: What the program needs besides the buffers at the peak.
        program_bytes: What it needs in all.
        shown: What XProf shows of the program as a whole.
    """
    at_least = min(size for size, shape in theirs if shape)
    large = [each for each in ours if each[0] >= at_least]
    alone = Counter(large) - Counter(theirs), Counter(each for each in theirs if each[1]) - Counter(large)
    sizes = [sorted((size for size, _ in each), reverse=True)[:LARGEST] for each in (large, theirs)]
    return {
        "program_bytes": program_bytes,
        "program_bytes_xprof": shown["program_bytes"],
        "peak_bytes": program_bytes - gap_bytes,
        "peak_bytes_xprof": shown["peak_bytes"],
        "ten_largest": sizes[0],
        "ten_largest_xprof": sizes[1],
        "buffers": len(large),
        "smaller_buffers": len(ours) - len(large),
        "shown_by_one_alone": [sum(each.values()) for each in alone],
    }


def asked(name: str) -> dict[str, Any]:
    """A row of the result.

    Raises:
        FailedError: one of them could not be asked.
    """
    trial = Trial(name, PROGRAMS[name], "viewed")
    script = f"{name}.py"
    trial.run(trial.plain, "jaxmem", "inspect", script, "--json", "--quiet", "--top", str(ALL))
    inspected = printed_json((trial.plain / "stdout.txt").read_text())
    shutil.copy(VIEWER, trial.plain)
    trial.run(trial.plain, "python", VIEWER.name, script, inspected["account"]["name"])
    shown = json.loads((trial.plain / "stdout.txt").read_text().splitlines()[-1])
    ours = [(each["bytes"], each["shape"]) for each in inspected["top_buffers"] if each["kind"] != "gap"]
    gap = sum(each["bytes"] for each in inspected["top_buffers"] if each["kind"] == "gap")
    theirs = [(size, shape or "") for size, shape in shown.pop("buffers")]
    return compared(ours, theirs, gap, inspected["step"]["total_bytes"], shown)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of the page's table in Markdown."""
    lines = [
        "| program | needs, by both | at the peak, by both | ten largest | buffers that one alone shows |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        totals = [f"{row[name]:,} B" for name in ("program_bytes", "peak_bytes")]
        for at, name in enumerate(("program_bytes", "peak_bytes")):
            if row[f"{name}_xprof"] != row[name]:
                totals[at] += f", XProf {row[f'{name}_xprof']:,} B"
        largest = "equal" if row["ten_largest"] == row["ten_largest_xprof"] else "differ"
        ours, theirs = row["shown_by_one_alone"]
        alone = f"{ours} here, {theirs} there, of {row['buffers']}" if ours or theirs else f"none of {row['buffers']}"
        lines.append(f"| `{row['program']}` | {totals[0]} | {totals[1]} | {largest} | {alone} |")
    return lines


def main(names: list[str]) -> int:
    """Ask both of each, write the rows; 1 where one could not be asked."""
    rows = {row["program"]: row for row in json.loads(RESULT.read_text())["rows"]} if RESULT.exists() else {}
    failed = False
    for name in names or VIEWED:
        line = PROGRAMS[name].line
        made(line)
        row = {"program": name, "sources": check_hash("memory_viewer"), "versions": versions(line)}
        try:
            rows[name] = row | asked(name)
        except FailedError as error:
            failed = True
            print(f"{name}: {error}", file=sys.stderr)
            continue
        RESULT.write_text(json.dumps({"command": "make bench-viewer", "rows": [*rows.values()]}, indent=1) + "\n")
        print(name, {key: value for key, value in rows[name].items() if key != "versions"}, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
