"""Runs one request in a process of its own: folder in, the worker's answer out; time limit and crashes become errors.

A separate process is what keeps the compilers of absent hardware, their environment variables, their log lines and their
crashes out of the user's process. It is started by its file name, so that the user's script does not run again.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from typing import Any

from jaxmem_callbacks.records.errors import CompileError

_TAIL_LINES = 15
# Two compilers at once are as many as a small machine stands.
_SLOTS = threading.BoundedSemaphore(2)
# What TPU libraries would otherwise ask the machine or its network for, and what silences them.
_SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_X64": "1",  # the program's dtypes are settled already; nothing may narrow them
    "JAX_ENABLE_COMPILATION_CACHE": "0",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no lock file, so no quarrel with a TPU job of this machine
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TPU_MIN_LOG_LEVEL": "2",
    "PYTHONUNBUFFERED": "1",
}
_DROPPED = (
    "JAX_",
    "XLA_PYTHON_CLIENT_",
    "XLA_CLIENT_MEM_FRACTION",
    "TPU_",
    "PYTHONSAFEPATH",
    "PYTHONSTARTUP",
    "PYTHONWARNINGS",
)


def worker_environment(accelerator_type: str) -> dict[str, str]:
    """The worker's environment: the caller's, less what steers its own JAX, plus what a compile without devices needs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    import jax

    # The caller may have found its JAX by a changed sys.path; the worker must find the same one, and this package.
    roots = [str(pathlib.Path(__file__).parents[3]), str(pathlib.Path(str(jax.__file__)).parents[1])]
    path = os.pathsep.join(dict.fromkeys([*roots, *filter(None, [os.environ.get("PYTHONPATH")])]))
    return kept | _SETTINGS | {"TPU_ACCELERATOR_TYPE": accelerator_type, "PYTHONPATH": path}


def run_worker(folder: pathlib.Path, *, name: str, accelerator_type: str, timeout_s: float) -> dict[str, Any]:
    """Let a worker answer the request that lies in ``folder``.

    Args:
        folder: Holds ``request.json`` and ``program.bin``; the answer's files are put there.
        name: What is compiled and for which target, for messages.
        accelerator_type: What libtpu is told the machine is.
        timeout_s: After so many seconds the worker is ended; waiting for a free slot does not count.

    Returns:
        The contents of ``answer.json``.

    Raises:
        CompileError: the time is up, or the worker crashed; the message holds the end of what it wrote.
    """
    command = [sys.executable, "-P", "-m", "jaxmem_callbacks.programs.targets.worker_main", str(folder)]
    log = folder / "worker.log"
    with _SLOTS, log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own module, in our own interpreter
            command,
            env=worker_environment(accelerator_type),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            msg = (
                f"{name}: the compiler was ended after {timeout_s:g} s. Pass a larger timeout_s=, or try a smaller "
                f"program first (fewer unrolled layers: jax.lax.scan compiles one).{_tail(log)}"
            )
            raise CompileError(msg) from None
        finally:
            _end(process)
    answer = folder / "answer.json"
    if code != 0 or not answer.exists():
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        msg = f"{name}: the worker that compiles it crashed ({ended}), your own process is unharmed.{_tail(log)}"
        raise CompileError(msg)
    return json.loads(answer.read_text("utf-8"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the worker and whatever it started; a no-op for one that has ended by itself."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: pathlib.Path) -> str:
    """The last lines of the worker's output, introduced, or nothing where it wrote none."""
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return "\nThe end of its output:\n  " + "\n  ".join(lines[-_TAIL_LINES:]) if lines else ""
