"""What a script holds beside the step that is planned, and its other steps: told, and counted once it is said."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxmem_callbacks.cli.live_arrays import alive_beside, alive_words
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.cli.script import other_steps
from jaxmem_callbacks.records.arrays import ArrayCensus, ArrayGroup
from jaxmem_callbacks.records.units import MIB
from tests import forked
from tests.pasting import pasted
from tests.sample_plans import sentences
from tests.unedited_scripts import GAN, written


def told(capsys: Any, script: str, width: int, *words: str) -> tuple[str, bool]:
    """What a command says of the script, and whether it names the maker's two arrays, whose shape no other run has."""
    text = Path(script).read_text("utf-8")
    Path(script).write_text(
        re.sub(r"\(1024, \d+\)\), jnp.ones\(\(\d+", f"(1024, {width})), jnp.ones(({width}", text), "utf-8"
    )
    assert main([*words, script]) == 0
    said = sentences(capsys.readouterr().out)
    return said, f"2 of float32[1024,{width}] from train.py:" in said


def test_the_other_steps_state_is_told_until_it_is_counted(tmp_path: Path, capsys: Any) -> None:
    script, plan = written(tmp_path, GAN), ("plan", "--target", "cpu", "--search", "donate")
    for width, command in ((4093, ("inspect", "--top", "0")), (4099, plan)):
        words, is_named = told(capsys, script, width, *command)
        assert "critic_step is the first step that train.py calls. Another one by its name: --step maker_step." in words
        assert is_named
        assert "is counted by the option --resident" in words
    words, is_named = told(capsys, script, 4111, *plan, "--resident", "2GiB")
    assert "Beside the step stay 2.0 GiB" in words
    assert not is_named
    words, is_named = told(capsys, script, 4127, "inspect", "--top", "0", "--step", "maker_step")
    assert "What one step of maker_step needs" in words
    assert "is the first step" not in words
    assert not is_named, "its own state is its arguments"
    assert main(["inspect", "--json", script]) == 0
    assert json.loads(capsys.readouterr().out)["alive_beside_bytes"] >= 2 * 4 * 1024 * 4127


def test_arguments_of_a_step_are_not_beside_it() -> None:
    before = alive_beside((), {}).bytes
    mine = nnx.Linear(1024, 1009, rngs=nnx.Rngs(0)), {"w": jnp.ones((3000, 1013))}
    jax.block_until_ready(mine[1])
    beside = alive_beside(mine, {"more": (rows := jnp.ones((2000, 1019)))})
    shapes = [group.shape for group in beside.groups]
    assert not {(1024, 1009), (3000, 1013), rows.shape} & set(shapes)
    assert beside.bytes - before < 4 * 1009
    assert (3000, 1013) in [group.shape for group in alive_beside((), {}).groups]


def group(size: int, *devices: str, site: str = "train.py:3 (main)") -> ArrayGroup:
    return ArrayGroup(
        shape=(size // 4,), dtype="float32", placement="", devices=devices or ("cpu:0",), spread=1, replicated=False, count=1,
        bytes=size, site=site,
    )  # fmt: skip


def words_of(groups: list[ArrayGroup], step_bytes: int, **counted: int) -> str:
    census = ArrayCensus(step=-1, time_s=0.0, groups=tuple(groups))
    return alive_words(census, "when the script called it", step_bytes, **counted)


@pytest.mark.core
def test_little_and_what_is_counted_is_no_word() -> None:
    words = words_of([group(10 * MIB)], 20 * MIB)
    assert words.startswith(
        "Beside the step's arguments 10.0 MiB of arrays were alive on one device when the script called it, "
    )
    assert "the most of them 1 of float32[2621440] from train.py:3 (main). " in words
    assert words.endswith("--resident 10MiB.")
    assert words_of([group(10 * MIB)], 2000 * MIB) == "", "a hundredth of the step"
    assert words_of([group(MIB // 2)], MIB) == ""
    assert words_of([group(10 * MIB)], MIB, resident_bytes=10 * MIB) == ""
    assert "--resident 10MiB" in words_of([group(10 * MIB)], MIB, resident_bytes=10 * MIB - 1)
    assert "10.0 MiB" in words_of([group(10 * MIB, f"cpu:{place}") for place in range(4)], MIB), (
        "of each device its own"
    )
    assert "of float32[2621440]. " in words_of([group(10 * MIB, site="unknown, because nobody said it")], MIB)
    assert alive_words(None, "when the script called it", MIB) == ""


# In place of GRAD stands the line that takes the gradient.
OURS = "import jaxmem_callbacks as jm\n"
STEPS = {
    "a decorator": ("@jax.jit\ndef other(p): GRAD", ["other"]),
    "an asked decorator": ("@functools.partial(jax.jit, donate_argnums=0)\ndef other(p): GRAD", ["other"]),
    "a method": ("class T:\n    @eqx.filter_jit\n    def other(self, p): GRAD", ["other"]),
    "by name": ("run = nnx.jit(other)\ndef other(p): GRAD", ["other"]),
    "by a partial": ("run = jax.jit(functools.partial(other, 2))\ndef other(n, p): GRAD", ["other"]),
    "two of one name": ("@jax.jit\ndef other(p): GRAD\n" * 2, ["other"]),
    "no gradient": ("@jax.jit\ndef evaluate(p): return p", []),
    "no jit": ("def helper(p): GRAD", []),
    "what makes a step": ("run = jax.jit(make(2))\ndef make(n):\n    def inside(p): GRAD\n    return inside", []),
    "in a lambda": ("run = jax.jit(lambda p: helper(p))\ndef helper(p): GRAD", []),
    "what another step calls": ("@jax.jit\ndef inner(p): GRAD\n@jax.jit\ndef other(p): return jax.grad(f)(inner(p))", ["other"]),
    "no step of this library": (f"{OURS}run = jm.jit_step(main_step)\n@jax.jit\ndef critic(p): GRAD", []),
    "two of this library": (f"{OURS}a, b = jm.jit_step(main_step), jm.jit_step(other)\ndef other(p): GRAD", ["other"]),
    "a jit_step of somebody else's": ("run = jm.jit_step(main_step)\n@jax.jit\ndef critic(p): GRAD", ["critic"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", STEPS)
def test_other_steps_are_those_that_can_be_named(kind: str, tmp_path: Path) -> None:
    text, names = STEPS[kind]
    text = text.replace("GRAD", "return jax.value_and_grad(loss)(p)")
    script = tmp_path / "train.py"
    script.write_text(f"@jax.jit\ndef main_step(p): return jax.grad(loss)(p)\n{text}\n", "utf-8")
    told = (
        f"main_step is the first step that train.py calls. Another one by its name: --step {' or --step '.join(names)}."
    )
    assert other_steps(script, "main_step") == (told if names else "")


def test_a_script_that_cannot_be_read_has_no_other_steps(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text("def broken(:\n", "utf-8")
    assert other_steps(script, "train_step") == other_steps(tmp_path / "none.py", "train_step") == ""


def test_of_a_step_that_is_returned_it_is_said_when(tmp_path: Path, capsys: Any) -> None:
    held = "\nheld = jnp.ones((1024, 1061))\ndef make():\n    return critic_step, (critic, of_critic, jnp.ones((16, 1031)))\n"
    script = written(tmp_path, GAN.split("    for _ in range", maxsplit=1)[0])
    Path(script).write_text(Path(script).read_text("utf-8") + held, "utf-8")
    assert main(["inspect", "--top", "0", f"{script}:make"]) == 0
    assert re.search(r"were alive on one device when make\(\) returned it, ", sentences(capsys.readouterr().out))


def test_where_jax_does_not_start_nothing_is_alive(tmp_path: Path) -> None:
    program = "from jaxmem_callbacks.cli.live_arrays import alive_beside; assert alive_beside((), {}) is None"
    environment = {**os.environ, "JAX_PLATFORMS": "cuda"}
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=tmp_path, check=True, capture_output=True)


RESTORED = {
    "a state in a function": ("""
from flax.training.train_state import TrainState
@jax.jit
def train_step(state, batch):
    return state.apply_gradients(grads=jax.grad(loss)(state.params, batch))
def make():
    return TrainState.create(apply_fn=None, params={"w": jnp.ones((W, W))}, tx=optax.adam(1e-3))
def main():
    template = make()
    state = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), template)
    for _ in range(2):  # first step
        state = train_step(state, jnp.ones((8, W)))
main()
""", "template", "state", 3),
    "a tree in the script": ("""
@jax.jit
def update(weights, batch):
    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights, batch))
fresh = {"w": jnp.ones((W, W))}
np.save("/dev/null", fresh["w"])
weights = {"w": jnp.zeros((W, W))}
update(weights, jnp.ones((8, W)))  # first step
""", "fresh", "weights", 1),
    "more shapes than a census of a run keeps": ("""
def fresh(): return {"w": jnp.ones((W, W)), "many": [jnp.zeros((W, each)) for each in range(2, 62)]}
initial, params = fresh(), fresh()
step = jax.jit(lambda params, batch: jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, batch)))
step(params, jnp.ones((8, W)))  # first step
""", "initial", "params", 1),
    "a method of a class": ("""
class Run:
    def __init__(self):
        self.weights = {"w": jnp.ones((W, W)), "b": jnp.zeros((W, 2))}
    def fit(self):
        loaded = jax.tree.map(lambda a: a + 1, self.weights)
        step = jax.jit(self.step)
        step(self.weights, jnp.ones((8, W)))  # first step
    def step(self, params, batch):
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, batch))
Run().fit()
""", "loaded", "params", 1),
}  # fmt: skip
HEAD = """import types, jax, jax.numpy as jnp, numpy as np, optax
W = {width}
def loss(p, batch): return jnp.mean(jnp.tanh(batch @ p["w"]) ** 2)
"""


@pytest.mark.parametrize("kind", RESTORED)
def test_a_second_copy_of_the_state_is_named(kind: str, tmp_path: Path, capsys) -> None:
    text, name, argument, copies = RESTORED[kind]
    width = 1021 + 2 * [*RESTORED].index(kind)  # so that no other test's arrays are alike
    (script := tmp_path / "train.py").write_text(HEAD.format(width=width) + text, "utf-8")

    def seen() -> tuple[str, int]:
        assert main(["inspect", "--top", "0", str(script)]) == 0
        words = " ".join(capsys.readouterr().out.split())
        assert main(["inspect", "--json", "--top", "0", str(script)]) == 0
        return words, json.loads(capsys.readouterr().out)["alive_beside_bytes"]

    words, before = seen()
    assert f"{name} holds as many arrays of the same shapes as {argument} (" in words
    line = pasted("alive.let_go", words)
    lines = script.read_text("utf-8").splitlines()
    at = int(re.search(r"write above \S*train\.py:(\d+): ", words)[1]) - 1
    assert "# first step" in lines[at]
    indent = len(lines[at]) - len(lines[at].lstrip())
    script.write_text("\n".join([*lines[:at], " " * indent + line, *lines[at:]]), "utf-8")
    words, after = seen()
    assert "of the same shapes" not in words
    assert before - after >= copies * 4 * width**2


HELD_TWICE = {
    "a parameter that is read above the loop": """
def fit(initial):
    params = jax.tree.map(lambda a: a + 1, initial)
    for _ in range(2):
        params = step(params, jnp.ones((8, W)))
fit({"w": jnp.ones((W, W))})
""",
    "a parameter": """
def fit(initial):
    step(jax.tree.map(lambda a: a + 1, initial), jnp.ones((8, W)))
fit({"w": jnp.ones((W, W))})
""",
    "another variable": """
first = {"w": jnp.ones((W, W))}
kept = {"best": first["w"]}
step(jax.tree.map(lambda a: a + 1, first), jnp.ones((8, W)))
print(kept)
""",
    "an outer function": """
def fit(params):
    step(params, jnp.ones((8, W)))
def main():
    first = {"w": jnp.ones((W, W))}
    fit(jax.tree.map(lambda a: a + 1, first))
main()
""",
    "a closure": """
def make():
    first = {"w": jnp.ones((W, W))}
    def fit():
        params = jax.tree.map(lambda a: a + 1, first)
        step(params, jnp.ones((8, W)))
    return fit
make()()
""",
    "arguments without names": """
def fit(*states):
    step(jax.tree.map(lambda a: a + 1, states[0]), jnp.ones((8, W)))
run = types.SimpleNamespace(state={"w": jnp.ones((W, W))})
fit(run.state)
""",
    "an object": """
run = types.SimpleNamespace()
first = {"w": jnp.ones((W, W))}
run.best = first
params = jax.tree.map(lambda a: a + 1, first)
step(params, jnp.ones((8, W)))
""",
    "an object that has one of its arrays": """
first = {"w": jnp.ones((W, W))}
run = types.SimpleNamespace(best=types.SimpleNamespace(w=first["w"]))
params = jax.tree.map(lambda a: a + 1, first)
step(params, jnp.ones((8, W)))
""",
    "a copy that the next line reads": """
def main():
    params = {"w": jnp.ones((W, W))}
    average = jax.tree.map(lambda a: a * 0.5, params)
    for _ in range(2):
        params = step(params, jnp.ones((8, W)))
        average = jax.tree.map(lambda a, b: a + b, average, params)
main()
""",
    "a global that a function reads": """
first = {"w": jnp.ones((W, W))}
def difference(params): return params["w"] - first["w"]
params = jax.tree.map(lambda a: a + 1, first)
step(params, jnp.ones((8, W)))
""",
}
# Variables that JAX cannot flatten, beside the copy.
ODD = """
class Odd:
    @property
    def __class__(self): raise RuntimeError
odd, config = Odd(), {1: "a", "b": 2}
first = {"w": jnp.ones((W, W))}
params = jax.tree.map(lambda a: a + 1, first)
step(params, jnp.ones((8, W)))
"""


def test_variables_that_cannot_be_flattened_are_passed_by(tmp_path: Path) -> None:
    step = "@jax.jit\ndef step(params, batch):\n    return jax.grad(loss)(params, batch)\n"
    (script := tmp_path / "train.py").write_text(HEAD.format(width=1201) + step + ODD, "utf-8")
    command = [sys.executable, "-m", "jaxmem_callbacks", "inspect", "--top", "0", str(script)]
    words = " ".join(forked.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert "first holds as many arrays of the same shapes as params (5.5 MiB)" in words
    assert "Beside the step's arguments" not in words, "the same bytes are not told twice"


@pytest.mark.parametrize("kind", HELD_TWICE)
def test_what_no_line_gives_back_is_asked(kind: str, tmp_path: Path, capsys) -> None:
    width = 1039 + 2 * [*HELD_TWICE].index(kind)
    step = "@jax.jit\ndef step(params, batch):\n    return jax.grad(loss)(params, batch)\n"
    (script := tmp_path / "train.py").write_text(HEAD.format(width=width) + step + HELD_TWICE[kind], "utf-8")
    assert main(["inspect", "--top", "0", str(script)]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "as many arrays of the same shapes as params (" in words
    assert "Is it needed while the step runs?" in words
    assert "del " not in words
