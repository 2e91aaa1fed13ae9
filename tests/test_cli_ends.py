"""A command prints, saves and ends with its exit code once its work is done, whatever the script's threads do by then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

import jaxmem_callbacks as jm
from tests import forked
from tests.processes import EMITTED_QUICKLY, until

SCRIPT = """
    import asyncio, ctypes, os, queue, signal, subprocess, sys, threading, time
    import jax, jax.numpy as jnp

    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight) + x
        return jnp.square(x).mean()

    @jax.jit
    def train_step(weights, x):
        return [w - g for w, g in zip(weights, jax.grad(loss)(weights, x))]

    weights, x = [jnp.ones((32, 32)) + at for at in range(3)], jnp.ones((512, 32))

    def train():
        train_step(weights, x)

    blocks, where, number = sys.argv[1:]

    def put():
        full = queue.Queue(1)
        full.put(1)
        full.put(2)

    def lock():
        held = threading.Lock()
        held.acquire()
        held.acquire()

    def event():
        threading.Event().wait()

    def join():
        waits = threading.Thread(target=event)
        waits.start()
        waits.join()

    def sleep():
        time.sleep(1000)

    def child():
        subprocess.run([sys.executable, "-c", "import os; os.read(0, 1)"], stdin=os.pipe()[0])

    def loop():
        async def wait():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print, "the script's own handler")
            await asyncio.sleep(1000)
        asyncio.run(wait())

    def swallow():
        while True:
            try:
                sleep()
            except BaseException:
                pass

    def c_code():  # which no signal ends
        system, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
        system.pthread_mutex_lock(mutex)
        system.pthread_mutex_lock(mutex)

    ended = []

    def compiled(event, *_, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            ended.append(event)
            if len(ended) == 2 and number != "no signal":  # of the first the plan may not know yet
                os.kill(os.getpid(), getattr(signal, number))

    jax.monitoring.register_event_duration_secs_listener(compiled)
    block = globals()[blocks]
    if where == "main":
        threading.Thread(target=train).start()
        block()
    elif where == "cleanup":
        try:
            train()
        finally:
            block()
    elif where == "exit":
        import atexit
        atexit.register(block)
        train()
    else:
        threading.Thread(target=block).start()
        train()
"""


# A step whose compile takes long: sorts, one in the other's backward pass.
LONG = """
    import jax, jax.numpy as jnp

    def loss(weight, x):
        for at in range(150):
            x = jax.lax.sort(jnp.tanh(x @ weight) + jnp.sin(x[::-1]) * at, dimension=0)
        return jnp.square(x).mean()

    @jax.jit
    def train_step(weight, x):
        return weight - jax.grad(loss)(weight, x)

    train_step(jnp.ones((64, 64)), jnp.ones((256, 64)))
"""
COMMAND = [sys.executable, "-m", "jaxmem_callbacks", "plan", "train.py", "--save", "plan.json"]
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])}


def planned(script: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command, environment = [*COMMAND, "--", *args], ENVIRONMENT | EMITTED_QUICKLY
    return forked.run(command, cwd=script.parent, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("blocks", "where", "number"),
    [
        ("put", "main", "no signal"),
        ("put", "main", "SIGTERM"),
        ("loop", "main", "SIGTERM"),
        ("swallow", "main", "SIGINT"),
        ("c_code", "main", "no signal"),
        ("c_code", "main", "SIGTERM"),
        ("child", "cleanup", "no signal"),
        ("c_code", "cleanup", "SIGTERM"),
        ("join", "exit", "SIGINT"),
        ("lock", "other", "no signal"),
    ],
)
def test_a_plan_is_told_saved_and_ended_while_the_script_blocks(
    blocks: str, where: str, number: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    run = planned(script, blocks, where, number)
    assert run.returncode == {"no signal": 0, "SIGTERM": 143, "SIGINT": 130}[number], run.stdout + run.stderr
    assert run.stdout.startswith("Plan of train_step")
    assert ("Interrupted: this is the best" in run.stdout) == (number != "no signal")
    assert "Traceback" not in run.stderr
    assert len(jm.load_plan(tmp_path / "plan.json").candidates) >= 1


@pytest.mark.parametrize(("number", "name", "code"), [(signal.SIGTERM, "SIGTERM", 143), (signal.SIGINT, "Ctrl-C", 130)])
def test_a_compile_that_nothing_can_end_does_not_hold_up_the_end(
    number: signal.Signals, name: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(LONG))
    (tmp_path / "written").mkdir()
    environment = ENVIRONMENT | {"TMPDIR": str(tmp_path / "written")}
    with subprocess.Popen(
        COMMAND, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        until(lambda: list((tmp_path / "written").glob("jaxmem-*/*")))  # the compiler writes its buffers down
        before = psutil.Process(run.pid).cpu_times()
        run.send_signal(number)
        _, status, used = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
        out, err = run.communicate()
    assert run.returncode == code
    assert f"stopped by {name} before the first compile ended, so there is no plan." in err
    assert "Traceback" not in err
    assert out == ""
    assert used.ru_utime + used.ru_stime - before.user - before.system < 4


def test_an_alarm_of_the_scripts_own_is_told_as_what_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import signal, time

def late(*_):
    raise TimeoutError("stuck")

signal.signal(signal.SIGALRM, late)
signal.setitimer(signal.ITIMER_REAL, 0.1)
time.sleep(100)
""")
    run = planned(script)
    assert run.returncode == 1
    assert "train.py failed before its first step: its own alarm went off. Its own traceback is above." in run.stderr
