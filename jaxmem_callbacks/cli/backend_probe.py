"""JAX started in a process of its own: its devices, or why it has none."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys

from jaxmem_callbacks.environment.process import PREALLOCATE
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.environment import DeviceFacts, Finding
from jaxmem_callbacks.records.terminal import put

LIMIT_S = 300.0
_SHOWN = 600
_FLAGS = "XLA_FLAGS"
_FATAL = re.compile(r"F\d{4} |Fatal ")  # how XLA's log, and Python's, mark what ends the process; a stack may follow


def devices_started(*, limit_s: float = LIMIT_S) -> tuple[DeviceFacts, ...] | Finding:
    """The devices of a backend that takes nothing before it must, or what went wrong with its start.

    What the process logs is shown on stderr.

    Args:
        limit_s: Seconds after which it is ended.
    """
    command = [sys.executable, "-P", "-m", "jaxmem_callbacks.cli.backend_probe"]
    variables = os.environ | {PREALLOCATE: "false"}
    try:
        done = subprocess.run(  # noqa: S603 - our own module, in our own interpreter
            command, env=variables, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return _no_start(f"It had no devices within {limit_s:g} seconds, and was ended.")
    put(done.stderr, sys.stderr)
    printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not printed:
        return _no_start(_last_words(done))
    answer = json.loads(printed[-1])
    if "failed" in answer:
        return _no_start(f"Its error: {answer['failed'][:_SHOWN]}")
    return tuple(DeviceFacts(**each) for each in answer["devices"])


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    fatal = [line for line in lines if _FATAL.match(line)]
    words = (fatal or lines or ["nothing"])[-1][:_SHOWN]
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return f"It ends the process ({how}). Its last words: {words}"


_ANY = '""'


def _no_start(why: str) -> Finding:
    line = f"{advise('environment.set', name='JAX_PLATFORMS', value=_ANY)}   # lets JAX choose"
    if re.search(rf"flags? in {_FLAGS}", why):
        line = f"{advise('environment.unset', name=_FLAGS)}   # or correct the flag"
    return Finding(kind="no start", given="JAX does not start.", why=why, type_next=line)


def main() -> None:
    """Start the backend of this process and print one JSON object, its devices or why there are none."""
    from jaxmem_callbacks.probes.device_memory import devices_here

    try:
        answer = {"devices": [dataclasses.asdict(device) for device in devices_here()]}
    except (RuntimeError, AssertionError) as error:  # JAX raises either, by what is missing
        answer = {"failed": str(error) or "its own assertion failed: the platforms that are named give no device"}
    put(f"\n{json.dumps(answer)}\n", as_json=True)


if __name__ == "__main__":
    main()
