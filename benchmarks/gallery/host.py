"""One of two processes of MaxText's pre-training, under the monitor. `two_hosts.py` starts them.

    python host.py RANK ADDRESS FOLDER SCENARIO

MaxText is called unedited, as by its program in `scripts`. What happens to the second process is not MaxText's doing: with
`event` it holds an array of its own from a step on, with `failure` its address space is limited from that step on.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gallery.small_maxtext import SMALL

HAPPENS, STEPS = 3, 8
MIB = 2**20
# So large that a step's temporaries are no small part of the process, and less than a limit leaves room for.
SETTINGS = SMALL | {"steps": STEPS, "per_device_batch_size": 16, "max_target_length": 256, "run_name": "hosts"}
# The share of devices' memory that arrays may take: what both hold fits, and the second's own array does not.
LIMIT_BYTES, OWN_BYTES, SPARE_BYTES = 96 * MIB, 80 * MIB, 24 * MIB
# JAX's own limits, in seconds, which are minutes otherwise: how long the end of a process waits for the other one.
ENDS = {"heartbeat_timeout_seconds": 20, "shutdown_timeout_seconds": 10}


def limit_address_space() -> None:
    """From here on this process may map `SPARE_BYTES` more than it has mapped now."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + SPARE_BYTES, resource.RLIM_INFINITY))


def main(rank: int, address: str, folder: Path, scenario: str) -> None:
    """Train; what this process saw is the last line printed, unless it failed."""
    import jax
    from jax.experimental import multihost_utils

    jax.distributed.initialize(address, num_processes=2, process_id=rank, **ENDS)
    # The processes find each other at their first collective, for which JAX lets neither wait longer than half a minute.
    multihost_utils.sync_global_devices("begun")
    import maxtext
    from maxtext.trainers.pre_train import train

    import jaxmem_callbacks as jm
    from jaxmem_callbacks.records.presets import MonitorSettings

    held: list[Any] = []

    def happening(iteration: Any) -> Any:
        def called(*args: Any) -> Any:
            if rank and args[1]["step"] == HAPPENS:
                jax.block_until_ready(jax.live_arrays())  # no step runs now, and none holds its temporaries
                if scenario == "event":
                    held.append(jax.numpy.zeros(OWN_BYTES // 4))
                else:
                    limit_address_space()
            return iteration(*args)

        return called

    own = Path(tempfile.mkdtemp())
    places = {"base_output_directory": own, "metrics_file": own / "metrics.txt"}
    settings = [f"{name}={value}" for name, value in (SETTINGS | places).items()]
    looks = MonitorSettings(limit_bytes=LIMIT_BYTES, window_s=0.2, scan_s=0.2)
    with jm.MemoryMonitor(looks, logdir=folder) as monitor:
        train.training_loop_iteration = happening(train.training_loop_iteration)
        train.training_loop_iteration = monitor.wrap(train.training_loop_iteration, step=lambda *args: args[1]["step"])
        train.main(["train", f"{Path(maxtext.__path__[0])}/configs/base.yml", *settings])
    metrics = [json.loads(line) for line in (own / "metrics.txt").read_text().splitlines()]
    events = [[event.kind, event.step] for event in monitor.events]
    print(json.dumps({"losses": [each["learning/loss"] for each in metrics], "events": events}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4])
