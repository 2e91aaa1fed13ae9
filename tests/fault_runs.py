"""One training of 200 steps under each fault that a run can meet. Names enter; exit codes leave, and what each run said.

    python -m tests.fault_runs FOLDER NAME ...

Imports take seconds and a run less than one, so one process imports, starts no backend, and forks a process for each run. Nothing
heavy is imported at the top: a spawned child of a run reads this file again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import resource
import shutil
import signal
import stat
import sys
import termios
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

STEPS = 200
MIDDLE = 100
AT_ONCE = 4
LIMIT_S = 120
PIPE_BYTES = 56_000  # nearly what a pipe takes before it blocks


def train(
    hook: Callable[..., Any],
    *,
    fault: Callable[[], Any] = lambda: None,
    metrics_of: Callable[[Any], Any] = lambda metrics: metrics,
    steps: Iterable[int] = range(STEPS),
    after: Callable[[Any], Any] = lambda metrics: None,
) -> None:
    """The training; says what its state is in the middle and at the end."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    step = jax.jit(lambda state: (jnp.sin(state @ state) + 0.1, {"loss": state.sum()}))
    state = jnp.full((8, 8), 0.01)
    for count, number in enumerate(steps):
        state, metrics = step(state)
        hook(number, metrics_of(metrics))
        after(metrics)
        if count == MIDDLE:
            print("middle", np.asarray(state).tobytes().hex(), flush=True)
            fault()
        time.sleep(0.002)
    print("end", np.asarray(state).tobytes().hex(), flush=True)


def monitor(folder: Path, **options: Any) -> Any:
    import jaxmem_callbacks as jm
    from jaxmem_callbacks.records.presets import MonitorSettings

    return jm.MemoryMonitor(MonitorSettings(window_s=0.02, scan_s=0.02), logdir=folder / "run", **options)


def plain(folder: Path) -> None:
    del folder
    train(lambda *_: None)


def healthy(folder: Path) -> None:
    with monitor(folder) as hook:
        train(hook)


def unwritable(folder: Path) -> None:
    (folder / "run").write_text("a file where the folder should be")
    healthy(folder)


def removed(folder: Path) -> None:
    with monitor(folder) as hook:
        train(hook, fault=lambda: shutil.rmtree(folder / "run"))


def too_large(folder: Path) -> None:
    """The file system takes no more: files may not grow any further."""

    def no_more() -> None:
        largest = max(path.stat().st_size for path in (folder / "run").iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest + 300, largest + 300))

    with monitor(folder) as hook:
        train(hook, fault=no_more)


def full_device(folder: Path) -> None:
    (folder / "run").mkdir()
    os.mknod(folder / "run" / "memory.jsonl", stat.S_IFCHR | 0o600, Path("/dev/full").stat().st_rdev)
    healthy(folder)


def stalled(folder: Path) -> None:
    """A pipe that nobody reads."""
    (folder / "run").mkdir()
    os.mkfifo(folder / "run" / "memory.jsonl")
    with monitor(folder) as hook:
        train(hook, fault=hook.flush)


class Raising:
    """A probe that works for a while."""

    def __init__(self) -> None:
        self.broken = False

    def read(self, step: int) -> tuple[()]:
        if self.broken:
            msg = f"driver gone at step {step}"
            raise RuntimeError(msg)
        return ()


def raising_probe(folder: Path) -> None:
    from jaxmem_callbacks.probes.host import HostProbe

    probe = Raising()
    with monitor(folder, probes=[probe, HostProbe()]) as hook:
        train(hook, fault=lambda: setattr(probe, "broken", True))


def two_monitors(folder: Path) -> None:
    with monitor(folder) as first, monitor(folder) as second:
        # Both have asked for the folder before either closes, however slow their threads are here.
        train(lambda *given: (first(*given), second(*given)), fault=lambda: (first.flush(), second.flush()))


def forked(folder: Path) -> None:
    with monitor(folder) as hook:

        def worker() -> None:
            hook(999, {"loss": 1.0})
            hook.flush()
            hook.close()

        train(hook, fault=lambda: ran(multiprocessing.get_context("fork").Process(target=worker)))


def ran(child: Any) -> None:
    child.start()
    child.join()
    assert child.exitcode == 0, child.exitcode


def spawned(folder: Path) -> None:
    multiprocessing.set_start_method("spawn")
    with monitor(folder) as hook:
        train(hook, fault=lambda: ran(multiprocessing.Process(target=abs, args=(1,))))


def cell_again(folder: Path) -> None:
    """A notebook's cell that never closes its monitor, run twice."""
    from jaxmem_callbacks.callbacks import recorder

    recorder._CLOSING_S = 60.0  # where others take the processor, the first one's last figure takes longer
    cell = compile("hook = monitor(folder)\ntrain(hook)\n", "cell", "exec")
    names = {"monitor": monitor, "train": train, "folder": folder}
    with contextlib.redirect_stdout(None):
        exec(cell, names)  # noqa: S102 - as notebooks do
    exec(cell, names)  # noqa: S102


def signalled(number: int) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        with monitor(folder) as hook:
            train(hook, fault=lambda: os.kill(os.getpid(), number))

    return run


def signalled_plain(number: int) -> Callable[[Path], None]:
    return lambda _: train(lambda *_: None, fault=lambda: os.kill(os.getpid(), number))


def killed_writing(folder: Path) -> None:
    """Killed while the writer's thread is in the middle of a line: the pipe in the file's place is full then."""
    kept = os.open(folder / "run" / "memory.jsonl", os.O_RDWR)

    wide = {f"a metric with a long name, number {index}": 1.0 for index in range(2000)}  # a line longer than the pipe

    def kill() -> None:
        waiting, end = bytearray(4), time.monotonic() + 30
        while int.from_bytes(waiting, sys.byteorder) < PIPE_BYTES and time.monotonic() < end:
            hook(MIDDLE, wide)
            time.sleep(0.002)
            fcntl.ioctl(kept, termios.FIONREAD, waiting)
        os.kill(os.getpid(), signal.SIGKILL)

    with monitor(folder) as hook:
        train(hook, fault=kill)


def clock_set_back(folder: Path) -> None:
    real, back_s = time.time, [0.0]
    time.time = lambda: real() - back_s[0]
    with monitor(folder) as hook:

        def set_back() -> None:
            back_s[0] = 3600.0
            hook.flush()

        train(hook, fault=set_back)


def restored(folder: Path) -> None:
    """Steps that are repeated after a restore, then skipped."""
    with monitor(folder) as hook:
        train(hook, steps=[*range(120), *range(60, 120), *range(150, 170)])


def deleted(folder: Path) -> None:
    """Arrays and metrics are deleted while the monitor looks at them."""
    import jax.numpy as jnp

    def churn(metrics: Any) -> None:
        arrays = [jnp.float32(index) + 0 for index in range(20)]
        metrics["loss"].delete()
        for array in arrays:
            array.delete()

    with monitor(folder) as hook:
        train(hook, after=churn)


def not_finite(folder: Path) -> None:
    with monitor(folder) as hook:
        train(hook, metrics_of=lambda metrics: {**metrics, "nan": metrics["loss"] * float("nan"), "inf": float("inf")})


def many_arrays(folder: Path) -> None:
    import jax
    import numpy as np

    arrays = jax.device_put([np.float32(0)] * 100_000)
    with monitor(folder) as hook:
        train(hook)
    del arrays


RUNS: dict[str, Callable[[Path], None]] = {
    "stalled": stalled,  # first: it waits longest
    "plain": plain,
    "healthy": healthy,
    "unwritable": unwritable,
    "removed": removed,
    "too_large": too_large,
    "full_device": full_device,
    "raising_probe": raising_probe,
    "two_monitors": two_monitors,
    "forked": forked,
    "spawned": spawned,
    "cell_again": cell_again,
    "interrupted": signalled(signal.SIGINT),
    "interrupted_plain": signalled_plain(signal.SIGINT),
    "terminated": signalled(signal.SIGTERM),
    "terminated_plain": signalled_plain(signal.SIGTERM),
    "killed_writing": killed_writing,
    "killed_plain": signalled_plain(signal.SIGKILL),
    "clock_set_back": clock_set_back,
    "restored": restored,
    "deleted": deleted,
    "not_finite": not_finite,
    "many_arrays": many_arrays,
}
if os.geteuid():  # a device without a link to it can be made by root alone
    del RUNS["full_device"]


def begin(name: str, folder: Path) -> int:
    """Fork a process for a run; its process id. What it prints and says goes to files in its folder."""
    folder.mkdir(parents=True)
    if name == "killed_writing":  # the pipe must outlive the process
        (folder / "run").mkdir()
        os.mkfifo(folder / "run" / "memory.jsonl")
        os.open(folder / "run" / "memory.jsonl", os.O_RDWR | os.O_NONBLOCK)
    child = os.fork()
    if child:
        return child
    for number, file in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background begins without
    signal.alarm(LIMIT_S)
    RUNS[name](folder)
    sys.exit(0)


def main() -> None:
    """Run what is asked for, a few at once; print the exit codes as JSON."""
    import jax

    import jaxmem_callbacks as jm
    import jaxmem_callbacks.writers.figures
    import jaxmem_callbacks.writers.tensorboard

    jax.config.update("jax_platforms", "cpu")
    assert jm.MemoryMonitor
    place, waiting = Path(sys.argv[1]), sys.argv[2:]
    running: dict[int, str] = {}
    codes: dict[str, int] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name = waiting.pop(0)
            running[begin(name, place / name)] = name
        child, status = os.wait()
        codes[running.pop(child)] = os.waitstatus_to_exitcode(status)
    pipe = place / "killed_writing" / "run" / "memory.jsonl"
    if pipe.is_fifo():
        content = os.read(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), 1 << 20)
        pipe.unlink()
        pipe.write_bytes(content)
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
