"""Every `jaxmem ...` of a document is run, by a reader who has a training, two runs and the log of one that failed."""

from __future__ import annotations

import contextlib
import io
import shlex
import shutil
from pathlib import Path

import pytest

from jaxmem_callbacks.cli.main import main
from tests.test_docs import DOCUMENTS, blocks

TRAIN = """
import jax.numpy as jnp, optax
import jaxmem_callbacks as jm

optimizer = optax.adam(1e-3)

def loss(params, batch):
    return jnp.square(jnp.tanh(jnp.tanh(batch["x"] @ params["w"]) @ params["v"])).mean()

def train_step(params, opt_state, batch):
    value, grads = jm.value_and_grad(loss)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, {"loss": value}

step = jm.jit_step(train_step)
params = {"w": jnp.ones((64, 256)), "v": jnp.ones((256, 64))}
opt_state, batch = optimizer.init(params), {"x": jnp.ones((64, 64))}
with jm.MemoryMonitor(jm.load_preset("monitor_only", monitor={"trace_steps": 8}), logdir="runs/a") as monitor:
    for i in range(8):
        params, opt_state, metrics = step(params, opt_state, batch)
        monitor(i, metrics)
"""
FAILED = "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes.\n"
# The documents name hardware that is not there; the tests' own CPU, of eight devices, answers in its place.
HERE = {"h100_sxm": "cpu", "h100_sxm:8": None}
NEEDS_NO_COMPILER = {"simulate"}


def command_lines() -> list[tuple[str, ...]]:
    """Every ``jaxmem ...`` of a shell block, as its words."""
    lines = [line for path in DOCUMENTS for block in blocks(path.read_text(), "sh") for line in block.splitlines()]
    words = [tuple(shlex.split(line, comments=True)[1:]) for line in lines if line.startswith("jaxmem ")]
    return list(dict.fromkeys(words))


def on_this_machine(words: tuple[str, ...]) -> list[str]:
    """The same for what is attached."""
    if words[0] in NEEDS_NO_COMPILER:
        return list(words)
    found: list[str] = []
    for word in words:
        here = HERE.get(word, word)
        if here is None:
            found.pop()  # --target
        else:
            found.append(here)
    return found


def run(words: list[str]) -> tuple[int, str]:
    """The exit code, and what was printed; a redirection is obeyed."""
    words, file = (words[:-2], words[-1]) if words[-2:-1] == [">"] else (words, None)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(words)
    if file is not None:
        Path(file).write_text(out.getvalue())
    return code, out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the reader has."""
    place = tmp_path_factory.mktemp("reader")
    with contextlib.chdir(place):
        Path("train.py").write_text(TRAIN)
        Path("train.log").write_text(FAILED)
        Path("mine.yaml").write_text("policy: {remat: full}\n")
        exec(compile(TRAIN, "train.py", "exec"), {"__name__": "__main__"})  # noqa: S102 - the reader trains
        for name in ("b", "main", "branch"):
            shutil.copytree("runs/a", f"runs/{name}")
        assert run([*shlex.split("inspect train.py --target cpu --json"), ">", "base.json"])[0] == 0
        assert run([*shlex.split("plan train.py --target cpu --json"), ">", "base_plan.json"])[0] == 0
        shutil.copy("base.json", "now.json")
        shutil.copy("base_plan.json", "plan.json")
    return place


@pytest.mark.parametrize("words", command_lines(), ids=" ".join)
def test_the_commands_of_the_documents_run(words: tuple[str, ...], folder: Path) -> None:
    with contextlib.chdir(folder):
        code, printed = run(on_this_machine(words))
    assert code == 0
    assert printed or ">" in words
