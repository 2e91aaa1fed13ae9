"""A script's step is inspected and planned as the script calls it: in its contexts and its thread, among its signals and streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from jaxmem_callbacks.cli.main import main
from tests.context_steps import CONTEXTS
from tests.processes import UNOPTIMISED
from tests.target_step import needs_compiler

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the meshes and the jit of old

STEPS = str(Path(__file__).parent / "context_steps.py")
WATCHES = ["transfers", "leaks", "keys", "nans"]
TARGETS = [pytest.param("", id="attached"), pytest.param("h100_sxm", id="h100_sxm", marks=pytest.mark.targets)]
ALIKE = {"ranks", "dtypes", "leaks", "transfers", "keys", "no rules"}  # what is the same program as without


@pytest.fixture(scope="module")
def by_jax() -> Any:
    """What JAX's own compile inside each context says: temporaries, arguments, outputs and aliases. One process a target."""
    known: dict[str, dict[str, list[int]]] = {}

    def found(target: str) -> dict[str, list[int]]:
        if target not in known:
            settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(Path(STEPS).parents[1])}
            run = subprocess.run(
                [sys.executable, "-W", "ignore", STEPS, "--told", *filter(None, [target])],
                env=os.environ | UNOPTIMISED | settings,
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
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [*CONTEXTS, "thread"])
def test_figures_are_those_of_jaxs_own_compile_in_the_context(name: str, target: str, by_jax: Any, capsys: Any) -> None:
    where = of_target(target, name)
    truth = by_jax(target)
    assert main(["inspect", STEPS, "--json", "--top", "0", *where, "--args", name]) == 0
    told = json.loads(capsys.readouterr().out)
    assert figures(told["step"]) == truth["x64" if name == "thread" else name]
    if name not in ALIKE | {"nothing", "thread", *(["precision"] if not target else [])}:
        assert figures(told["step"]) != truth["nothing"], "another program, so that a plain trace would be seen"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "name", ["set_mesh", "old mesh", "explicit mesh", "logical rules", "x64", "a global", *WATCHES]
)
def test_a_plan_is_made_in_the_context(name: str, target: str, by_jax: Any, capsys: Any) -> None:
    where = of_target(target, name)
    truth = by_jax(target)
    assert main(["plan", STEPS, "--json", *where, "--args", name]) == 0
    made = json.loads(capsys.readouterr().out)
    (plain,) = [each for each in made["candidates"] if each["policy"]["remat"] == "none"]
    assert figures(plain) == truth[name]
    assert len(made["candidates"]) > 1
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
