"""The gallery's result file, and the table of docs/gallery.md that is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gallery.programs import PROGRAMS
from benchmarks.sources import RESULTS

MIB = 2**20
BEGIN, END = "<!-- table of programs -->", "<!-- end of the table -->"


def file_of() -> Path:
    """The result file: programs run on several JAX lines, and each row has its own versions."""
    return RESULTS / "gallery.json"


def read() -> dict[str, Any]:
    """Its rows by program; empty before the first."""
    rows = json.loads(file_of().read_text())["rows"] if file_of().exists() else []
    return {row["program"]: row for row in rows}


def write(rows: dict[str, Any]) -> None:
    """Write rows, by program, in the order of the list."""
    ordered = [rows[name] for name in PROGRAMS if name in rows]
    file_of().write_text(json.dumps({"command": "python -m benchmarks.gallery", "rows": ordered}, indent=1) + "\n")


def written_into(page: str, rows: dict[str, Any]) -> str:
    """A page with its table of programs as the rows have it now."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    return "".join([before, begin, "\n", "\n".join(table(rows)), "\n", end, after])


def table(rows: dict[str, Any]) -> list[str]:
    """The lines of the table of programs in Markdown."""
    lines = [
        "| program | JAX | needs | planned | extra FLOPs | edits | loss differs by | outcome |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, program in PROGRAMS.items():
        if name not in rows:
            lines.append(f"| `{name}`: {program.origin} | {program.line} | | | | | | not tried |")
            continue
        row = rows[name]
        target = "h100_sxm:8" if program.devices > 1 else "h100_sxm"
        plan = row.get("plans", {}).get(target, {})
        needs, extra = row.get("needs_bytes", {}).get(target), plan.get("extra_flops")
        cells = [
            f"`{name}`: {program.origin}",
            row.get("versions", {}).get("jax", program.line),
            "" if needs is None else f"{needs / MIB:.1f} MiB",
            f"{plan['chosen_bytes'] / MIB:.1f} MiB" if plan else "",
            "" if extra is None else f"{extra:+.1%}",
            str(len(row["edited"])) if "edited" in row else "",
            f"{row['largest_difference_of_losses']:.0e}" if "largest_difference_of_losses" in row else "",
            "passed" if row["passed"] else f"failed: {row['why'].replace('|', '/')}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def hosts_table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of the table of a training's two processes in Markdown.

    Args:
        rows: Of results/two_hosts.json.
    """
    pages = ("process 0", "process 1")
    lines = [
        "| run | exit codes | on the page of process 0 | on the page of process 1 |",
        "| --- | --- | --- | --- |",
    ]
    for row in rows:
        parts = [row["pages"][page]["sentence"].rstrip(".").split("; ") for page in pages]
        said = ["; ".join(part for part in each if "reported" in part and "no event" not in part) for each in parts]
        codes = " and ".join(str(code) for code in row["exit_codes"])
        lines.append(f"| `{row['scenario']}` | {codes} | {said[0]} | {said[1]} |")
    return lines


def estimator_table(result: dict[str, Any]) -> list[str]:
    """The lines of the table of MaxText's estimator in Markdown."""
    lines = ["| | needs | FLOPs | compiles |", "| --- | --- | --- | --- |"]
    for name, words in (("estimator", "MaxText's estimator"), ("plan", "`jaxmem plan`")):
        each = result[name]
        flops = each["flops"] / result["estimator"]["flops"]
        lines.append(f"| {words} | {each['step_bytes'] / 2**30:.2f} GiB | {flops:.3f} | {each['compiles']} |")
    return lines
