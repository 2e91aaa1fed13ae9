"""`jaxmem compare --jax A --jax B SCRIPT`: which buffers of a step are new under another interpreter, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jaxmem_callbacks.analysis.comparing import buffer_changes, changes_document
from jaxmem_callbacks.cli import compare
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.records.documents import as_text
from jaxmem_callbacks.records.peaks import UNKNOWN, Buffer

pytestmark = pytest.mark.slow  # interpreters are started
OTHER = Path(__file__).parent.parent / ".venv-3.12" / "bin" / "python"
# What an upgrade of JAX changes of a step, made on purpose by a variable that only one of two interpreters has.
SCRIPT = """
import os
import jax, jax.numpy as jnp
import jaxmem_callbacks as jm

CHANGE = os.environ.get("CHANGE", "")

def loss_fn(params, batch):
    hidden = batch
    for w in params:
        hidden = jnp.tanh(hidden @ w)
    loss = (hidden**2).mean()
    if CHANGE == "kept":
        kept = jax.lax.optimization_barrier(jnp.exp(batch @ params[0]))  # CHANGED
        loss += (kept * jnp.sin(kept)).mean()  # CHANGED
    if CHANGE == "wide":
        loss += jnp.exp(jnp.concatenate([batch] * 16, 1) @ jnp.tile(params[0], (16, 16))).mean()  # CHANGED
    if CHANGE == "broadcast":
        spread = jax.lax.optimization_barrier(batch[:, None, :] * params[0][:16])  # CHANGED
        loss += jnp.sin(spread).mean()  # CHANGED
    return loss

def train_step(params, batch):
    loss, grads = jm.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

def make():
    return jm.jit_step(train_step), ([jnp.ones((256, 256))] * 3, jnp.ones((4096, 256)))
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def interpreter(folder: Path, change: str) -> Path:
    """This Python, under which the script is another one."""
    made = folder / f"python_{change}"
    made.write_text(f'#!/bin/sh\nCHANGE={change} exec "{sys.executable}" "$@"\n')
    made.chmod(0o755)
    return made


def compared(capsys, first, second, script, *more) -> tuple[int, str, str]:
    code = main(["compare", "--jax", str(first), "--jax", str(second), str(script), *more])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("change", ["kept", "wide", "broadcast"])
def test_what_a_change_adds_is_named_with_its_line(change, script, capsys):
    code, out, _ = compared(capsys, sys.executable, interpreter(script.parent, change), f"{script}:make", "--json")
    found = json.loads(out)
    grown = next(each["bytes"] for each in found["changes"] if each["judged"])
    assert code == 0
    assert grown > 2**20
    assert found["added_bytes"] == pytest.approx(grown, rel=0.1)
    lines, only_there = SCRIPT.splitlines(), {"wide": "f32[4096,4096]"}.get(change, "no shape")

    def is_of_the_change(each) -> bool:
        """By its line; what the compiler joins of several operations of the backward pass has none, and a shape of its own."""
        line = int(each["source"].rpartition(":")[2]) if each["source"] else 0
        return "CHANGED" in lines[line - 1] if line else each["operation"] and each["shape"].startswith(only_there)

    named = [each["bytes"] for each in found["new_buffers"] if is_of_the_change(each)]
    assert sum(named) >= 0.9 * found["added_bytes"]
    assert found["named_share"] >= 0.9


@pytest.mark.skipif(not OTHER.exists(), reason="the other JAX line is not installed")
def test_two_jax_lines_are_compared(script, capsys):
    code, out, _ = compared(capsys, sys.executable, OTHER, f"{script}:make", "--max-regress", "1000%")
    assert code == 0
    assert "! jax: " in out
    assert "under jax 0.12" in out


def test_a_table_has_the_new_buffers_of_one_line_together(script, capsys):
    code, out, _ = compared(
        capsys, sys.executable, interpreter(script.parent, "kept"), f"{script}:make", "--max-regress", "1%"
    )
    assert code == 1
    assert "Grew more than 1%" in out
    assert "f32[4096,256]" in out
    assert f"{script}:" in out
    assert "Operation or line are known of 100.0% of the new bytes." in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--jax", "a", "train.py"], "got 1 interpreter and 1 paths"),
        (["--jax", "a", "--jax", "b", "train.py", "other.py"], "got 2 interpreters and 2 paths"),
        (["one.json"], "There is nothing to compare one.json with"),
        (["one.json", "two.json", "--target", "h100_sxm"], "A target belongs to a comparison of two interpreters"),
        (["--jax", "/no/python", "--jax", "b", "train.py"], "/no/python cannot be run: No such file"),
        (["--jax", "/bin/true", "--jax", "b", "train.py"], "What /bin/true printed is no step's memory"),
    ],
)
def test_what_is_no_comparison_is_named(arguments, expected, capsys):
    assert main(["compare", *arguments]) == 2
    assert expected in " ".join(capsys.readouterr().err.split())


def test_what_is_installed_beside_the_library_is_not_the_interpreters(script, tmp_path, monkeypatch, capsys):
    """An installed library is beside a JAX, which is not the one that is asked for."""
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / compare._PACKAGE.name).symlink_to(compare._PACKAGE)
    (site / "jax.py").write_text("raise ImportError('the JAX beside the library')")
    monkeypatch.setattr(compare, "_PACKAGE", site / compare._PACKAGE.name)
    code, _, err = compared(capsys, sys.executable, sys.executable, f"{script}:make")
    assert code == 0, err


def test_an_interpreter_that_fails_shows_the_end_of_its_words(script, capsys):
    script.write_text("raise RuntimeError('no data here')\n")
    code, _, err = compared(capsys, sys.executable, sys.executable, script)
    assert code == 2
    assert "nothing is installed into it" in " ".join(err.split())
    assert "no data here" in err


def buffer(mebibytes: int, shape: str, operation: str | None, source: str | None, group: str = "temporaries") -> Buffer:
    return Buffer(
        bytes=mebibytes * 2**20, shape=shape, kind="temporary", operation=operation, source=source, group=group
    )


def test_buffers_are_matched_with_what_is_most_like_them():
    same = buffer(4, "f32[1024,1024]{1,0}", "jit(step)/tanh", "train.py:3")
    fused = buffer(4, "f32[1024,1024]{0,1}", "jit(step)/fusion", "train.py:3")  # other layout and name
    new = buffer(4, "f32[1024,1024]{1,0}", "jit(step)/exp", "train.py:9")
    gone = buffer(2, "f32[512,1024]{1,0}", "jit(step)/sin", "train.py:5")
    found = buffer_changes([same, gone], [new, fused])
    assert (found.new, found.gone) == ((new,), (gone,))
    assert found.added_bytes == 2 * 2**20
    unknown = buffer(1, "u8[1048576]", None, None, UNKNOWN)
    assert buffer_changes([], [unknown, new]).named_share == 0.8
    shown = as_text(changes_document(buffer_changes([same], [same]), "jax 1", "jax 2", 10))
    assert "No buffer of the peak is new under jax 2, and none is gone." in shown
