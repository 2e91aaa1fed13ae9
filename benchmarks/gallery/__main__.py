"""Public training programs, planned as they are and trained with the printed lines. Writes results/gallery_jax_<version>.json.

    python -m benchmarks.gallery [NAME ...]

For each program of `programs.py`, in processes of their own: `jaxmem inspect` and `jaxmem plan` of the unedited program for an
H100 and for eight of them; the printed lines pasted; a few steps trained without them, and with them under the monitor. Losses
and final states are compared, and what the pasted program needs with what the plan promised. A row of the file is a program,
written as soon as it is known; other rows stay.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gallery.environment import folder_of, made, versions
from benchmarks.gallery.outcome import KEPT, WATCHED
from benchmarks.gallery.pasting import CannotPasteError, paste, printed_lines
from benchmarks.gallery.programs import PROGRAMS, SCRIPTS, Program
from benchmarks.gallery.result import file_of, read, write, written_into
from benchmarks.sources import ROOT, check_hash
from tools.environments import SetupError, targets_folder

TARGETS = ("h100_sxm", "h100_sxm:8")
WORK, PAGE = ROOT / "build" / "gallery", ROOT / "docs" / "gallery.md"
BUDGET_SHARE = 0.8  # of what the unedited step needs, so that the plan must find a policy that takes less
NOTHING_FITS = 3  # the exit code of a plan
_LIMIT_S = 900
# Of a loss, of the final state's norm: float32 of CPUs, summed in another order where something is computed again.
_LOSS_BOUND, _STATE_BOUND = 1e-3, 1e-3
_FAILED = re.compile(r"^\w*(?:Error|Exception|Exit)\b.*$", re.MULTILINE)


class FailedError(Exception):
    """A step of the test did not come out; its text is the reason in the file."""


class Trial:
    """One program in a folder of its own.

    Args:
        name: Of the program.
        program: What is known of it.
        purpose: Of a folder of its own, where it is tried for something else.
    """

    def __init__(self, name: str, program: Program, purpose: str = "") -> None:
        self.name, self.program = name, program
        self.folder = WORK / purpose / name
        shutil.rmtree(self.folder, ignore_errors=True)
        self.plain, self.pasted = self.folder / "plain", self.folder / "pasted"
        self.plain.mkdir(parents=True)
        shutil.copy(SCRIPTS / f"{name}.py", self.plain / f"{name}.py")
        if program.examples:
            shutil.copytree(folder_of(program.line) / "sources" / program.examples, self.plain, dirs_exist_ok=True)
        self.row: dict[str, Any] = {}

    def variables(self) -> dict[str, str]:
        """Of a process in the environment of the program's JAX line."""
        folder = folder_of(self.program.line)
        return {
            **os.environ,
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "JAXMEM_TARGET_PATH": str(targets_folder(folder)),  # not what make has found: those belong to another JAX
        }

    def run(self, where: Path, *command: str, ends: tuple[int, ...] = (0,), **variables: str) -> int:
        """The exit code of a command in a folder. Its output is in `stdout.txt` there; its processor seconds go into the row.

        Raises:
            FailedError: it failed, with the last line of its own.
        """
        folder = folder_of(self.program.line)
        before = _processor_seconds()
        with (where / "stderr.txt").open("w") as errors:
            try:
                done = subprocess.run(  # noqa: S603 - commands of this file
                    [str(folder / "bin" / command[0]), *command[1:]],
                    cwd=where,
                    env=self.variables() | variables,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    check=False,
                    timeout=_LIMIT_S,
                )
            except subprocess.TimeoutExpired as error:
                msg = f"{' '.join(command[:2])}: not done in {_LIMIT_S} s"
                raise FailedError(msg) from error
        self.row["processor_s"] = round(self.row.get("processor_s", 0) + _processor_seconds() - before, 1)
        printed = (where / "stderr.txt").read_text(errors="replace")
        (where / "stdout.txt").write_text(done.stdout)
        if done.returncode not in ends:
            last = [*_FAILED.findall(printed), *printed.strip().splitlines()[-1:]]
            msg = f"{' '.join(command[:2])} ended with {done.returncode}: {last[0] if last else 'nothing printed'}"[
                :400
            ]
            raise FailedError(msg)
        return done.returncode

    def inspected(self, where: Path, target: str) -> int:
        """Bytes that a step needs on one device."""
        self.run(where, "jaxmem", "inspect", f"{self.name}.py", "--target", target, "--json", "--quiet")
        return int(printed_json((where / "stdout.txt").read_text())["account"]["judged"]["one step"])

    def trained(self, where: Path, **variables: str) -> dict[str, np.ndarray]:
        """Losses, and the final state where the program returns one."""
        kept = self.folder / f"{where.name}.npz"
        if self.program.devices > 1:
            variables["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={self.program.devices}"
        self.run(where, "python", f"{self.name}.py", **{KEPT: str(kept)}, **variables)
        if not kept.exists():
            msg = "the program ended without losses"
            raise FailedError(msg)
        return dict(np.load(kept))

    def tried(self) -> None:
        """All of it, into the row.

        Raises:
            FailedError: at the first that does not come out.
            CannotPasteError: the printed lines do not name where they go.
        """
        self.row["needs_bytes"] = {target: self.inspected(self.plain, target) for target in TARGETS}
        # A program of several devices is planned, and trained, for as many.
        own = TARGETS[self.program.devices > 1]
        printed, elsewhere = {}, None
        for target in TARGETS:
            try:
                printed[target] = self.planned(target)
            except FailedError as error:  # what else can be known of the program is asked all the same
                if target == own:
                    raise
                elsewhere = FailedError(f"on {target} alone: {error}")
        self.row["lines"] = lines = printed_lines(printed[own])
        if not lines:
            msg = "the plan printed no lines"
            raise FailedError(msg)
        shutil.copytree(self.plain, self.pasted)
        self.row["edited"] = paste(lines, self.pasted / f"{self.name}.py")
        self.row["pasted_needs_bytes"] = self.inspected(self.pasted, own)
        before = self.trained(self.plain)
        after = self.trained(self.pasted, **{WATCHED: str(self.folder / "watched")})
        self.compared(before, after, own)
        if elsewhere is not None:
            raise elsewhere

    def planned(self, target: str) -> str:
        """The text of a plan that fits; its figures go into the row.

        Where nothing fits the share of the unedited step's need, the budget is what the policy that came nearest needs.
        """
        saved = f"plan_{target.partition(':')[2] or 1}.json"
        budget = int(self.row["needs_bytes"][target] * BUDGET_SHARE)
        typed = ("jaxmem", "plan", f"{self.name}.py", "--target", target, "--budget")
        if self.run(self.plain, *typed, str(budget), "--save", saved, ends=(0, NOTHING_FITS)) == NOTHING_FITS:
            self.run(self.plain, *typed, str(budget), "--json", ends=(NOTHING_FITS,))
            found = printed_json((self.plain / "stdout.txt").read_text())["candidates"]
            budget = min(each["step_bytes"] for each in found if each["step_bytes"]) + 2**10
            self.run(self.plain, *typed, str(budget), "--save", saved)
        printed = (self.plain / "stdout.txt").read_text()
        plan = json.loads((self.plain / saved).read_text())
        candidates = plan["candidates"]
        chosen = candidates[plan["chosen"]]
        self.row.setdefault("plans", {})[target] = {
            "chosen_bytes": chosen["step_bytes"],
            "fits": chosen["fits"],
            "extra_flops": round(chosen["extra_flops"] / chosen["plain_flops"], 4) if chosen["plain_flops"] else None,
            "flops": chosen["flops"],
            "compiles": len(candidates),
        }
        return printed

    def compared(self, before: dict[str, np.ndarray], after: dict[str, np.ndarray], target: str) -> None:
        """Losses, final state, the monitor's file, and the promised bytes.

        Raises:
            FailedError: they differ.
        """
        losses, again = before.pop("losses"), after.pop("losses")
        self.row["steps"] = len(losses)
        if losses.shape != again.shape or not np.isfinite(losses).all():
            msg = f"losses {losses.tolist()} and {again.tolist()}"
            raise FailedError(msg)
        self.row["largest_difference_of_losses"] = float(
            np.max(np.abs(losses - again) / np.maximum(np.abs(losses), 1e-6))
        )
        norm = np.sqrt(sum(float(np.square(value).sum()) for value in before.values()))
        apart = np.sqrt(sum(float(np.square(value - after[name]).sum()) for name, value in before.items()))
        self.row["difference_of_state"] = float(apart / norm) if norm else None
        watched = [*(self.folder / "watched").rglob("memory.jsonl")]
        self.row["monitor_lines"] = len(watched[0].read_text().splitlines()) if watched else 0
        promised, needed = self.row["plans"][target]["chosen_bytes"], self.row["pasted_needs_bytes"]
        for holds, what in (
            (self.row["largest_difference_of_losses"] <= _LOSS_BOUND, "the losses differ"),
            ((self.row["difference_of_state"] or 0) <= _STATE_BOUND, "the final states differ"),
            (self.row["monitor_lines"] > 0, "the monitor wrote nothing"),
            (needed <= 1.01 * promised, f"pasted, it needs {needed} bytes, and {promised} were promised"),
        ):
            if not holds:
                raise FailedError(what)


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def printed_json(printed: str) -> dict[str, Any]:
    """The JSON object in an output, around which a program may have printed."""
    return json.loads(printed[printed.index("{\n") :][: printed[printed.index("{\n") :].rindex("}") + 1])


def main(names: list[str]) -> int:
    """Try each, print and write its row; 1 when one failed."""
    unknown = sorted(set(names) - set(PROGRAMS))
    if unknown:
        sys.exit(f"Unknown program {unknown[0]!r}. Expected some of: {', '.join(PROGRAMS)}.")
    rows: dict[str, Any] = {}
    for name in names or PROGRAMS:
        program = PROGRAMS[name]
        print(f"{name} ({program.origin}) ...", flush=True)
        row: dict[str, Any] = {
            "program": name,
            "sources": check_hash("gallery"),
            "origin": program.origin,
            "packaged": program.packaged,
            "devices": program.devices,
        }
        try:
            made(program.line)
            row["versions"] = versions(program.line)
            trial = Trial(name, program)
            trial.row = row
            trial.tried()
            row |= {"passed": True, "why": ""}
        except (FailedError, CannotPasteError, SetupError) as error:
            row |= {"passed": False, "why": str(error).replace(str(ROOT), ".")}
        rows[name] = row
        every = read() | rows  # another process may have written its own meanwhile
        write(every)
        PAGE.write_text(written_into(PAGE.read_text(), every))
        print(f"  {'passed' if row['passed'] else 'FAILED: ' + row['why']}", flush=True)
    print(file_of())
    return int(not all(rows[name]["passed"] for name in names or PROGRAMS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
