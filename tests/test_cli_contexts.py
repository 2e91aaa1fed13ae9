"""A script's step is inspected and planned as the script calls it: in its contexts and thread, among its signals and streams."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.main import main
from tests import forked
from tests.context_steps import CONTEXTS
from tests.processes import EMITTED_QUICKLY
from tests.target_step import needs_compiler

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the meshes and the jit of old

STEPS = str(Path(__file__).parent / "context_steps.py")
ALIKE = {"ranks", "dtypes", "leaks", "transfers", "keys", "no rules"}  # what is the same program as without
# What a program carries beyond its trace, or is planned below: the others have done their part before a target is asked.
THERE = ("nothing", "set_mesh", "old mesh", "explicit mesh", "logical rules", "x64", "precision", "a global")


@pytest.fixture(scope="module")
def by_jax() -> Any:
    """What JAX's own compile inside each context says: temporaries, arguments, outputs and aliases. One process a target."""
    known: dict[str, dict[str, list[int]]] = {}

    def found(target: str) -> dict[str, list[int]]:
        if target not in known:
            settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(Path(STEPS).parents[1])}
            run = forked.run(
                [sys.executable, "-W", "ignore", STEPS, "--told", ",".join(THERE if target else CONTEXTS), target],
                env=os.environ | EMITTED_QUICKLY | settings,
                capture_output=True,
                text=True,
                check=False,
            )
            assert run.returncode == 0, run.stderr
            known[target] = {
                name: sizes for line in run.stdout.splitlines() for name, sizes in json.loads(line).items()
            }
        return known[target]

    return found


def figures(figures: dict[str, Any]) -> list[int]:
    return [figures[f"{size}_bytes"] for size in ("temp", "argument", "output", "alias")]


def of_target(target: str, name: str) -> list[str]:
    if not target:
        return []
    needs_compiler(target)
    has_mesh = name in CONTEXTS and CONTEXTS[name][2] is not None
    return ["--target", f"{target}:8" if has_mesh else target]


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, "") for name in (*CONTEXTS, "thread")),
        *(pytest.param(name, "h100_sxm", marks=pytest.mark.targets) for name in THERE if name != "old mesh"),
    ],
)
def test_figures_are_those_of_jaxs_own_compile_in_the_context(name: str, target: str, by_jax: Any, capsys: Any) -> None:
    where = of_target(target, name)
    truth = by_jax(target)
    assert main(["inspect", STEPS, "--json", "--top", "0", *where, "--args", name]) == 0
    told = json.loads(capsys.readouterr().out)
    assert figures(told["step"]) == truth["x64" if name == "thread" else name]
    if name not in ALIKE | {"nothing", "thread", *(["precision"] if not target else [])}:
        assert figures(told["step"]) != truth["nothing"], "another program, so that a plain trace would be seen"


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, "") for name in ("set_mesh", "old mesh", "explicit mesh", "x64", "transfers", "nans")),
        *(
            pytest.param(name, "h100_sxm", marks=pytest.mark.targets)
            for name in ("old mesh", "explicit mesh", "a global")
        ),
    ],
)
def test_a_plan_is_made_in_the_context(name: str, target: str, by_jax: Any, capsys: Any) -> None:
    where = of_target(target, name)
    truth = by_jax(target)
    remat = [] if name == "explicit mesh" else ["--search", "remat=no"]
    code = main(["plan", STEPS, "--json", *remat, *where, "--args", name])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    made = json.loads(printed.out)
    (plain,) = [each for each in made["candidates"] if each["policy"]["remat"] == "none"]
    assert figures(plain) == truth[name]
    if not remat:
        assert len(made["candidates"]) > 1, "remat was traced on the mesh"
    if name == "nans":
        assert "jax_debug_nans is on: JAX donates nothing while it is." in made["notes"]


WATCHED = """
    import warnings
    import jax, jax.numpy as jnp

    def loss(w, x):
        return jnp.square(jnp.tanh(jnp.tanh(x @ w) @ w)).mean()

    @jax.jit
    def train_step(w, x):
        return w - jax.grad(loss)(w, x)

    w, x = jnp.ones((64, 64)), jnp.ones((128, 64)).at[100].set(jnp.nan)
    warnings.simplefilter("error")
    with jax.transfer_guard("disallow"), jax.checking_leaks(), jax.debug_nans(True), jax.debug_infs(True):
        with jax.debug_key_reuse(True):
            train_step(w, x)
"""


def test_what_a_script_watches_in_its_own_code_fails_no_comparison(tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(WATCHED))
    assert main(["plan", str(script), "--search", "microbatches=2", "--search", "remat", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert {each["policy"]["microbatches"] for each in made["candidates"]} == {1, 2}, made["notes"]


TRAINER = """
    import concurrent.futures, queue, sys, threading
    import jax, jax.numpy as jnp

    @jax.jit
    def train_step(w, x):
        return w - jax.grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(w)

    def train():
        w = jnp.ones((64, 64))
        for _ in range(3):
            w = train_step(w, jnp.ones((128, 64)))
        print("trained")
        return w

"""
CLOSES = """
    import sys
    sys.stdout.close()
    sys.stderr.close()
"""


@pytest.mark.parametrize("ends", ["x = 1", "sys.exit(3)", "raise KeyError('lr')"])
def test_a_script_that_closed_its_streams_and_has_no_step_is_answered_all_the_same(ends: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(CLOSES) + ends)
    run = forked.run(
        [sys.executable, "-m", "jaxmem_callbacks", "inspect", "train.py"],
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(STEPS).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode in (1, 2)
    assert "jaxmem: train.py" in run.stderr


THREADS = {
    "waits for an answer that does not come": """
        answers = queue.Queue()
        threading.Thread(target=lambda: answers.put(train()), daemon=True).start()
        answers.get()
        print("went on")
    """,
    "in a pool, with a time limit": """
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            print("went on", pool.submit(train).result(timeout=0.01))
    """,
    "started last": """
        threading.Thread(target=train).start()
    """,
    "and the script ends by itself": """
        threading.Thread(target=train).start()
        sys.exit("no more to do")
    """,
}


@pytest.mark.parametrize("kind", THREADS)
def test_a_step_in_a_thread_ends_the_script_without_a_word(kind: str, tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAINER) + textwrap.dedent(THREADS[kind]))
    hook = threading.excepthook
    try:
        code = main(["plan", str(script), "--search", "remat=no"])
    finally:
        threading.excepthook = hook
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert printed.out.startswith("Plan of train_step")
    assert not {"trained", "went on"} & set(printed.out.split())
    assert "Traceback" not in printed.err


# Ends itself once a policy was compiled, whatever the script does with signals, alarms, streams and its folder.
SIGNALLED = """
    import faulthandler, os, signal, sys, threading
    import jax, jax.numpy as jnp

    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight) + x
        return jnp.square(x).mean()

    @jax.jit
    def train_step(weights, x):
        return [w - g for w, g in zip(weights, jax.grad(loss)(weights, x))]

    def train():
        train_step(weights, x)

    ended = []

    def compiled(event, *_, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            ended.append(event)
            if len(ended) == 2:  # of the first the plan may not know yet
                os.kill(os.getpid(), getattr(signal, sys.argv[1]))

    def own(*_):
        print("the script's own handler")
        os._exit(9)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, own)
    signal.setitimer(signal.ITIMER_REAL, 600)
    faulthandler.dump_traceback_later(600, exit=True)
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    log = open("log.txt", "w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout.close()
    weights, x = [jnp.ones((32, 32)) + at for at in range(3)], jnp.ones((512, 32))
    jax.monitoring.register_event_duration_secs_listener(compiled)
    if sys.argv[2] == "thread":
        in_thread = threading.Thread(target=train)
        in_thread.start()
        in_thread.join()
    else:
        train()
    os._exit(8)
"""


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "where", "code"), [("SIGTERM", "main", 143), ("SIGTERM", "thread", 143), ("SIGINT", "thread", 130)]
)
def test_a_signal_gives_the_best_so_far_and_saves_it_where_it_was_typed(
    name: str, where: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SIGNALLED))
    command = [sys.executable, "-m", "jaxmem_callbacks.cli.main", "plan", "train.py", "--save", "plan.json"]
    run = forked.run(
        [*command, "--args", name, where],
        cwd=tmp_path,
        env=os.environ | EMITTED_QUICKLY | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(STEPS).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == code, run.stderr
    assert "Interrupted: this is the best of what was compiled so far." in run.stdout
    assert "Traceback" not in run.stderr
    plan = jm.load_plan(tmp_path / "plan.json")
    assert 1 <= len(plan.candidates) < 4
    assert sorted(each.name for each in tmp_path.iterdir()) == ["elsewhere", "plan.json", "train.py"]


def test_a_terminal_is_shown_what_is_done_before_jax_is_there(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAINER) + "\ntrain()\n")
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "jaxmem_callbacks.cli.main", "inspect", str(script), "--json"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TERM": "xterm", "COLUMNS": "200"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment) as process:
        os.close(theirs)
        shown = os.read(ours, 2**16).decode()
        times = psutil.Process(process.pid).cpu_times()
        assert f"jaxmem: running {script} up to the first call of its step" in shown
        assert times.user + times.system < 1
        with contextlib.suppress(OSError):  # the end: nobody has the other side any more
            while part := os.read(ours, 2**16):
                shown += part.decode()
        assert process.stdout is not None
        json.loads(process.stdout.read())
    os.close(ours)
    assert process.returncode == 0, shown
    assert "compiling train_step once more, for what makes its peak" in shown
