"""MaxText in two processes of one training, the monitor on. Writes results/two_hosts.json.

    python -m benchmarks.gallery.two_hosts [SCENARIO ...]

Each process has one device of the CPU, and the state is divided between both. In `event` the second one comes near a limit, in
`failure` it runs out of memory. Each process ends as JAX lets it, and `jaxmem report` is asked for the page of the run, which
process 0 wrote, and for that of process 1.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gallery.__main__ import FailedError, Trial
from benchmarks.gallery.environment import folder_of, made, versions
from benchmarks.gallery.programs import PROGRAMS
from benchmarks.sources import RESULTS, ROOT, check_hash
from tools.environments import venv_python

RESULT, NAME, HOST = RESULTS / "two_hosts.json", "maxtext_pretrain", Path(__file__).with_name("host.py")
PAGES = {"process 0": "run", "process 1": "run/memory.process-1.jsonl"}  # whose page -> what it is made of
_LIMIT_S = 540
# What differs from run to run, and says nothing.
_RUN, _REPORT = re.compile(r"^\S+: (?=Steps? )", re.MULTILINE), re.compile(r" The report is in \S+\.")


def trained(trial: Trial, scenario: str) -> list[int]:
    """The exit codes of both processes, whose output is in the folder `plain` of the trial.

    Raises:
        FailedError: they did not end in time.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command, where = [str(venv_python(folder_of(trial.program.line))), str(HOST)], trial.plain
    processes: list[subprocess.Popen[str]] = []
    for rank in range(2):
        with (where / f"stdout{rank}.txt").open("w") as out, (where / f"stderr{rank}.txt").open("w") as errors:
            typed = [*command, str(rank), address, "run", scenario]
            started = subprocess.Popen(  # noqa: S603 - commands of this file
                typed, cwd=where, env=trial.variables(), stdout=out, stderr=errors, text=True
            )
        processes.append(started)
    try:
        return [process.wait(_LIMIT_S) for process in processes]
    except subprocess.TimeoutExpired as error:
        msg = f"{scenario}: not done in {_LIMIT_S} s"
        raise FailedError(msg) from error
    finally:
        for process in processes:
            process.kill()


def page_of(trial: Trial, run: str) -> dict[str, Any]:
    """What `jaxmem report` says in a sentence, and its page on the first screen.

    Raises:
        FailedError: it failed.
    """
    trial.run(trial.plain, "jaxmem", "report", run, "--output", "page.html")
    sentence = _RUN.sub("", (trial.plain / "stdout.txt").read_text().splitlines()[0])
    verdict = re.search(r'"verdict": ?"([^"]*)"', (trial.plain / "page.html").read_text())
    return {"sentence": sentence, "verdict": verdict[1] if verdict else None}


def tried(scenario: str) -> dict[str, Any]:
    """A row of the result.

    Raises:
        FailedError: a process did not end, or has no page.
    """
    trial = Trial(NAME, PROGRAMS[NAME], f"hosts-{scenario}")
    codes = trained(trial, scenario)
    row: dict[str, Any] = {"exit_codes": codes}
    last = [(trial.plain / f"stdout{rank}.txt").read_text().splitlines()[-1:] for rank in range(2)]
    row["ended"] = [json.loads(line[0]) if line and line[0].startswith("{") else None for line in last]
    own = (trial.plain / "run" / "memory.process-1.jsonl").read_text().splitlines()
    told = [event for event in map(json.loads, own) if event["kind"] == "event"]
    row["events"] = [
        {"event": event["event"], "step": event["step"], "message": _REPORT.sub("", event["message"])} for event in told
    ]
    row["pages"] = {whose: page_of(trial, run) for whose, run in PAGES.items()}
    row["reports"] = [re.sub(r"\d{8}-\d{6}|pid\d+", "*", path.name) for path in (trial.plain / "run-oom").glob("*")]
    return row


def main(names: list[str]) -> int:
    """Try each, write the rows; 1 where one failed."""
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": []}
    rows, failed = {row["scenario"]: row for row in result["rows"]}, False
    line = PROGRAMS[NAME].line
    made(line)
    for name in names or ("event", "failure"):
        try:
            row = tried(name)
        except (FailedError, FileNotFoundError) as error:
            failed = True
            print(f"{name}: {str(error).replace(str(ROOT), '.')}", file=sys.stderr)
            continue
        rows[name] = {"scenario": name, "sources": check_hash("two_hosts"), "versions": versions(line)} | row
        RESULT.write_text(json.dumps({"command": "make bench-hosts", "rows": [*rows.values()]}, indent=1) + "\n")
        print(name, json.dumps(row, indent=1), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
