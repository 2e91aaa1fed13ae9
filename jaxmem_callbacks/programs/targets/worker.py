"""Runs one request in a process of its own: folder in, the worker's answer out; time limit and crashes become errors.

A separate process is what keeps the compilers of absent hardware, their environment variables, their log lines and their
crashes out of the user's process. It is started by its file name, so that the user's script does not run again. It never
outlives its caller: whatever ends the wait, Ctrl-C too, ends the worker, and a caller that is killed ends it by the pipe
between them.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from typing import Any

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import CompileError, CompileTimeoutError, TargetError

_TIME_LIMIT, _TIME_LIMIT_S = "JAXMEM_COMPILE_TIMEOUT_S", 600.0
_TAIL_LINES = 15
# Two compilers at once are as many as a small machine stands.
_SLOTS = threading.BoundedSemaphore(2)
# Workers that are compiling now -> whether `end_workers` ended them.
_running: dict[subprocess.Popen[bytes], bool] = {}
_SMALLER = "try a smaller program first (fewer unrolled layers: jax.lax.scan compiles one)"
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
    "TEST_TMPDIR",  # XLA asks for it before TMPDIR
    "JAX_",
    "XLA_PYTHON_CLIENT_",
    "XLA_CLIENT_MEM_FRACTION",
    "TPU_",
    "PYTHONSAFEPATH",
    "PYTHONSTARTUP",
    "PYTHONWARNINGS",
)


def time_limit_s() -> float:
    """Seconds that one compile may take by default: the variable's, else ten minutes.

    Raises:
        TargetError: the variable holds no number of seconds.
    """
    text = os.environ.get(_TIME_LIMIT) or str(_TIME_LIMIT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if 0 < seconds < threading.TIMEOUT_MAX:
        return seconds
    msg = f"{_TIME_LIMIT}={text!r}: expected seconds above 0. Type for example: {_time_limit(1800)}"
    raise TargetError(msg)


def _time_limit(seconds: float) -> str:
    return advise("environment.set", name=_TIME_LIMIT, value=f"{seconds:g}")


def worker_environment(accelerator_type: str) -> dict[str, str]:
    """The worker's environment: the caller's, less what steers its own JAX, plus what a compile without devices needs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    import jax

    # The caller may have found its JAX by a changed sys.path; the worker must find the same one, and this package.
    roots = [str(pathlib.Path(__file__).parents[3]), str(pathlib.Path(str(jax.__file__)).parents[1])]
    path = os.pathsep.join(dict.fromkeys([*roots, *filter(None, [os.environ.get("PYTHONPATH")])]))
    return kept | _SETTINGS | {"TPU_ACCELERATOR_TYPE": accelerator_type, "PYTHONPATH": path}


def run_worker(
    folder: pathlib.Path, *, name: str, accelerator_type: str, timeout_s: float, remark: str = ""
) -> dict[str, Any]:
    """Let a worker answer the request that is in ``folder``.

    Args:
        folder: Holds ``request.json`` and ``program.bin``; the answer's files are put there.
        name: What is compiled and for which target, for messages.
        accelerator_type: What libtpu is to take the machine for.
        timeout_s: After so many seconds the worker is ended; waiting for a free slot does not count.
        remark: What may be wrong with the compiler, for the error of one that crashed.

    Returns:
        The contents of ``answer.json``.

    Raises:
        CompileTimeoutError: the time is up.
        CompileError: the worker crashed or was ended, or its answer cannot be read; the message holds the
            end of what it wrote.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "jaxmem_callbacks.programs.targets.worker_main",
        str(folder),
        "--with-caller",
    ]
    log = folder / "worker.log"
    with _SLOTS, log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own module, in our own interpreter
            command,
            # A compiler that is ended leaves its temporary files, such as a GPU program's PTX: they go with the folder.
            env=worker_environment(accelerator_type) | {"TMPDIR": str(folder)},
            stdin=subprocess.PIPE,  # never written to: it closes when this process ends, however that happens
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _running[process] = False
            _give_room(process.pid)
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            msg = (
                f"{name}: the compiler was ended after {timeout_s:g} s. Give it longer: {_time_limit(3 * timeout_s)} "
                f"(compile_for_target also takes timeout_s=), or {_SMALLER}.{_tail(log)}"
            )
            raise CompileTimeoutError(msg) from None
        finally:
            _end(process)
            asked = _running.pop(process, False)
    if code < 0 and asked:
        msg = (
            f"{name}: the compile was ended on request (something in this process called end_workers), before it had an answer. "
            f"Expected to be left alone for up to {timeout_s:g} s. Type the same call again to have its figures."
        )
        raise CompileError(msg)
    if code != 0:
        msg = f"{name}: the worker that compiles it crashed {_crash(code)}{remark and f' {remark}.'}{_tail(log)}"
        raise CompileError(msg)
    return _answer(folder, name)


def end_workers() -> int:
    """End every compile that this process is waiting for, in whatever thread; each waiting thread gets a `CompileError`.

    For those who compile in threads of their own: Ctrl-C reaches only the main thread.

    Returns:
        How many were ended.
    """
    ended = 0
    for process in tuple(_running):
        if process in _running and process.poll() is None:
            _running[process] = True
            _end_group(process)
            ended += 1
    return ended


def usable_answer(text: str) -> dict[str, Any]:
    """The contents of ``answer.json``.

    Raises:
        ValueError: it is none.
    """
    answer = json.loads(text)
    if isinstance(answer, dict) and isinstance(answer.get("warnings"), list):
        refused = isinstance(answer.get("error"), str)
        if refused or (isinstance(answer.get("figures"), dict) and isinstance(answer.get("kept"), list)):
            return answer
    msg = f"{text!r:.80} is neither figures nor a refusal"
    raise ValueError(msg)


def _answer(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """The answer of a worker that ended well."""
    try:
        answer = usable_answer((folder / "answer.json").read_text("utf-8"))
        if "error" not in answer and not (folder / "optimised.hlo").exists():
            msg = "there are figures, and no program"
            raise ValueError(msg)  # noqa: TRY301 - one error for all that an answer can lack
    except (OSError, ValueError) as error:
        msg = (
            f"{name}: the worker that compiles it ended well, and its answer cannot be read: {error}. Expected figures or a "
            f"refusal in answer.json. Look for what ends processes early (a sitecustomize of yours?), and ask again."
            f"{_tail(folder / 'worker.log')}"
        )
        raise CompileError(msg) from error
    return answer


def _crash(code: int) -> str:
    """How a worker ended that ended badly, and what to do."""
    unharmed = "your own process is unharmed."
    if code >= 0:
        return f"(exit code {code}), {unharmed} Install its compiler again as in docs/targets.md, or {_SMALLER}."
    number = signal.Signals(-code)
    if number is signal.SIGKILL:
        why = "This library did not end it; a system that runs out of memory does. Close other programs, or"
    else:
        why = "The fault is in the compiler. Install another version of it as in docs/targets.md, or"
    return f"(signal {number.name}), {unharmed} {why} {_SMALLER}."


def _give_room(pid: int) -> None:
    """A worker may take all the address space that the system allows: the caller's own bound is about the caller."""
    try:
        import resource

        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.prlimit(pid, resource.RLIMIT_AS, (most, most))
    except (ImportError, AttributeError, OSError, ValueError):  # not Linux, gone already, or not allowed
        return


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the worker, where it has not ended well by itself, with whatever it started, and let go of its pipe."""
    if process.poll() != 0:
        _end_group(process)
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS raises the other one
        os.killpg(process.pid, signal.SIGKILL)


def _tail(log: pathlib.Path) -> str:
    """The last lines of the worker's output, introduced, or nothing where it wrote none."""
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return "\nThe end of its output:\n  " + "\n  ".join(lines[-_TAIL_LINES:]) if lines else ""
