"""Python processes that begin where ``import jax`` has ended: a test's command takes its own time only.

`run` is `subprocess.run` for a command line of this interpreter. A process that has imported JAX and what our commands import,
and has started no backend, forks for each one. What a start itself does is tested by `subprocess.run`.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Read once, when JAX or Python starts: commands that differ in these are forked by processes of their own.
READ_AT_THE_START = ("JAX_", "PYTHON", "TF_", "LD_", "OMP_", "OPENBLAS_")
MOST = 4  # waiting processes, the last ones used


class Forking:
    """A process that forks for each command that it is given."""

    def __init__(self, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(ROOT)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, **command: Any) -> int:
        """The exit code of a command, as `subprocess` gives it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def end(self) -> None:
        """Ends it; commands have ended before."""
        self.process.communicate()


waiting: dict[tuple[tuple[str, str], ...], Forking] = {}


def run(
    command: list[str], *, cwd: Any = None, env: Any = None, check: bool = False, **expected: Any
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run(command, capture_output=True, text=True)``, in a fork of a process that has JAX."""
    assert command[0] == sys.executable
    assert expected.items() <= {"capture_output": True, "text": True}.items()
    env = dict(os.environ if env is None else env)
    key = tuple(sorted((name, value) for name, value in env.items() if name.startswith(READ_AT_THE_START)))
    forking = waiting.pop(key, None) or Forking(env)
    waiting[key] = forking
    if len(waiting) > MOST:
        waiting.pop(next(iter(waiting))).end()
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        words = [os.fspath(word) for word in command[1:]]
        code = forking.run(words=words, cwd=os.fspath(cwd or Path.cwd()), env=env, out=str(out), err=str(err))
        done = subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())
    if check:
        done.check_returncode()
    return done


@atexit.register
def end_all() -> None:
    """Ends the processes that wait."""
    while waiting:
        waiting.popitem()[1].end()


def become(words: list[str], cwd: str, env: dict[str, str], out: str, err: str) -> None:
    """In the fork: what the interpreter does with its command line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for stream, (name, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), (out, os.O_CREAT | os.O_WRONLY), (err, os.O_CREAT | os.O_WRONLY)]
    ):
        opened = os.open(name, flags)
        os.dup2(opened, stream)
        os.close(opened)
    while words[0] == "-W":
        sys.warnoptions.append(words[1])
        warnings._setoption(words[1])  # type: ignore[attr-defined]
        words = words[2:]
    match words:
        case ["-m", module, *rest]:
            sys.argv, sys.path[0] = ["-m", *rest], cwd
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.argv, sys.path[0] = ["-c", *rest], ""
            exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))  # noqa: S102 - as -c does
        case _:
            sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")


def fork_for_each_command() -> None:
    """Reads commands, forks for each, and answers with how it ended; returns in the forks, with their command."""
    sys.path.insert(1, sys.argv[1])

    import jaxmem_callbacks

    for module in pkgutil.walk_packages(jaxmem_callbacks.__path__, "jaxmem_callbacks."):
        if "integrations" not in module.name and "__main__" not in module.name:
            importlib.import_module(module.name)
    del sys.path[1]
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            become(**json.loads(line))
            return
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    fork_for_each_command()
