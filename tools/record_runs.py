"""`python tools/record_runs.py [NAME ...]`: makes the recorded runs of tests/recordings again, all or those named.

Each is a real training in a process of its own, watched by the real monitor; its JSON lines are the recording, behind one line
that names it: tests/recordings/NAME.jsonl.gz. `--out DIR` writes elsewhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "recordings"
sys.path.insert(0, str(ROOT))  # the package of this checkout, installed or not
MIB = 2**20
RECORDED: dict[str, Any] = {"tensorboard": False, "on_error": "raise"}
# Small models and short runs need lower thresholds; the shares are the defaults. Runs with `defaults=True` have none of these.
SETTINGS: dict[str, Any] = {
    **RECORDED,
    "scan_s": 0.01,
    "limit_bytes": 64 * MIB,
    "growth_steps": 50,
    "growth_min_bytes": MIB,
    "growth_min_arrays": 100,
    "replication_min_bytes": MIB // 16,
    "imbalance_min_bytes": MIB // 4,
}


def runs() -> dict[str, tuple[str, Any]]:
    """Name -> healthy, faulty or scripted, and the function."""
    import recorded_faulty
    import recorded_healthy
    import recorded_scripted

    found: dict[str, tuple[str, Any]] = {}
    for module in (recorded_healthy, recorded_faulty, recorded_scripted):
        for name, function in vars(module).items():
            if callable(function) and getattr(function, "__module__", "") == module.__name__ and name[0] != "_":
                found[name] = (module.__name__.removeprefix("recorded_"), function)
    return found


def record(name: str, out: Path) -> dict[str, Any]:
    """Make one run in this process and write its recording.

    Returns:
        ``file``, ``lines`` and the kinds of its ``events``.
    """
    import jax

    import jaxmem_callbacks as jm
    from jaxmem_callbacks.callbacks.config import split_of, versions_now
    from jaxmem_callbacks.records.presets import MonitorSettings

    jax.config.update("jax_num_cpu_devices", 4)
    kind, function = runs()[name]
    head: dict[str, Any] = {"kind": "recording", "name": name, "of": kind, "what": function.__doc__.strip()}
    opened: list[jm.MemoryMonitor] = []
    with tempfile.TemporaryDirectory() as folder:

        def watch(
            preset: Any = None, *, plan: Any = None, probes: Any = None, defaults: bool = False, **changes: Any
        ) -> jm.MemoryMonitor:
            settings = MonitorSettings(**((RECORDED if defaults else SETTINGS) | changes))
            head["settings"], head["split"] = dataclasses.asdict(settings), split_of(preset)
            head["since_s"] = time.time()
            preset = settings if preset is None else dataclasses.replace(preset, monitor=settings)
            opened.append(jm.MemoryMonitor(preset, logdir=folder, plan=plan, probes=probes))
            return opened[-1]

        function(watch)
        for monitor in opened:
            monitor.close()
        lines = (Path(folder) / "memory.jsonl").read_text().splitlines()
    head |= {
        "platform": jax.default_backend(),
        "allocator": "scripted" if kind == "scripted" else _allocator(lines),
        "command": f"python tools/record_runs.py {name}",
        "versions": versions_now(),
    }
    out.mkdir(parents=True, exist_ok=True)
    text = "\n".join([json.dumps(head), *lines]) + "\n"
    prefix = "" if jax.default_backend() == "cpu" else f"{jax.default_backend()}_"
    path = out / f"{prefix}{name}.jsonl.gz"
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write(text.encode())
    kinds = [event.kind for event in opened[-1].events]
    print(f"{name}: {len(lines)} lines, events: {', '.join(kinds) or 'none'}", flush=True)
    return {"file": path.name, "lines": len(lines), "events": kinds}


def _allocator(lines: list[str]) -> str:
    """Where the allocator's figures come from."""
    return "real" if any('"source":"allocator"' in line for line in lines) else "none on this platform"


def main(arguments: list[str]) -> int:
    """The command line; 1 where a run failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--here", action="store_true", help="in this process, without one of its own")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(runs()))
    if unknown:
        parser.error(f"no such run: {', '.join(unknown)}. There are: {', '.join(runs())}.")
    if options.here:
        for name in options.names:
            record(name, options.out)
        return 0
    failed = 0
    for name in options.names or runs():
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        variables = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, str(Path(__file__).resolve()), "--here", "--out", str(options.out), name]
        failed += subprocess.run(command, env=variables, cwd=ROOT, check=False).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
