"""Lines to train by a plan: pasted into the script as printed and where it is said, they train the same in the bytes planned."""

from __future__ import annotations

import json
import re
import runpy
import textwrap
from pathlib import Path
from typing import Any

import pytest

from jaxmem_callbacks.cli.main import main
from tests.pasting import pasted

pytestmark = pytest.mark.core

LOSS = """
import functools
import jax, jax.numpy as jnp

def loss(w, batch):
    def layer(h, w):
        return jnp.tanh(jnp.tanh(h @ w["in"]) @ w["out"]) + h, None
    return (jax.lax.scan(layer, batch, w)[0] ** 2).mean()

w = {"in": jnp.ones((8, 32, 128)) * 0.01, "out": jnp.ones((8, 128, 32)) * 0.01}
batch = jnp.ones((1024, 32))
"""
SCRIPTS = {
    "a partial, made by a function": """
        def train_step(config, w, batch):
            value, gradients = jax.value_and_grad(loss)(w, batch)
            return jax.tree.map(lambda p, g: p - config["rate"] * g, w, gradients), value

        def jitted(step, config):
            bound = functools.partial(step, config)
            return jax.jit(bound, donate_argnums=(0,))

        def main(w):
            p_step = jitted(train_step, {"rate": 0.1})
            for _ in range(2):
                w, value = p_step(w, batch)
                print(value)

        main(w)
    """,
    "static arguments and donation": """
        @functools.partial(jax.jit, static_argnums=(2,), donate_argnums=0)
        def train_step(w, batch, rate, smoothing=0.0):
            value, gradients = jax.value_and_grad(loss)(w, batch)
            return jax.tree.map(lambda p, g: p - rate(0) * g, w, gradients), value

        def train(w, steps):
            for _ in range(steps):
                w, value = train_step(w, batch, schedule)
                print(value)

        schedule = lambda step: 0.1
        train(w, 2)
    """,
    "a method": """
        class Trainer:
            def __init__(self, rate):
                self.rate = rate

            @functools.partial(jax.jit, static_argnums=0)
            def train_step(self, w, batch):
                value, gradients = jax.value_and_grad(loss)(w, batch)
                return jax.tree.map(lambda p, g: p - self.rate * g, w, gradients), value

        trainer = Trainer(0.1)
        for _ in range(2):
            w, value = trainer.train_step(w, batch)
            print(value)
    """,
    "an attribute": """
        class Loop:
            def __init__(self):
                self.step = jax.jit(self.update, donate_argnames=("w",))

            def update(self, w, batch):
                gradients, value = jax.grad(lambda *given: 2 * (loss(*given),), has_aux=True)(w, batch)
                return jax.tree.map(lambda p, g: p - 0.01 * g, w, gradients), value

            def run(self, w):
                for _ in range(2):
                    w, value = self.step(w, batch)
                    print(value)

        loop = Loop()
        loop.run(w)
    """,
    "passed on": """
        def update(w, batch):
            value, gradients = jax.value_and_grad(loss)(w, batch)
            return jax.tree.map(lambda p, g: p - 0.01 * g, w, gradients), value

        def epoch(step, w):
            for _ in range(2):
                w, value = step(w, batch)
                print(value)
            return w

        fast = jax.jit(update)
        for _ in range(2):
            w = epoch(fast, w)
    """,
    "a step of this library": """
        import jaxmem_callbacks as jm

        def train_step(w, batch):
            value, gradients = jm.value_and_grad(loss)(w, batch)
            return jax.tree.map(lambda p, g: p - 0.01 * g, w, gradients), value

        step = jm.jit_step(train_step, donate_argnames=("w",))
        for _ in range(2):
            w, value = step(w, batch)
            print(value)
    """,
}


def edited(script: Path, printed: str) -> str:
    """The script with the lines to paste where they are said to go."""
    block = [line.strip() for line in printed.partition("To train so:\n")[2].partition("\n\n")[0].splitlines()]
    lines = script.read_text().splitlines()
    code = [line for line in block if not line.startswith("#") and line != "import jaxmem_callbacks as jm"]
    (where,) = (line for line in block if line.startswith("# above "))
    number = int(where.removeprefix(f"# above {script.name}:"))
    indent = lines[number - 1][: len(lines[number - 1]) - len(lines[number - 1].lstrip())]
    lines[number - 1 : number - 1] = [indent + line for line in code]
    text = "\n".join(lines)
    for line in block:
        for new, old in re.findall(r"(jm\.\S+) in place of (jax\.\w+)", line):
            text = text.replace(f"{old}(", f"{new}(")
    return "import jaxmem_callbacks as jm\n" + text if "import jaxmem_callbacks as jm" in block else text


def losses(script: Path, capsys: Any) -> list[float]:
    runpy.run_path(str(script), run_name="__main__")
    return [float(line) for line in capsys.readouterr().out.split()]


@pytest.mark.parametrize(
    ("kind", "saved"),
    [
        ("a partial, made by a function", ""),
        ("static arguments and donation", "plan.yaml"),
        ("a method", "plan.json"),
        ("an attribute", "plan.json"),
        ("passed on", "plan.yaml"),
        ("a step of this library", ""),
        ("a method", ""),
        ("a partial, made by a function", "plan.json"),
        ("a step of this library", "plan.yaml"),
    ],
)
def test_the_lines_to_train_are_pasted_as_printed(
    kind: str, saved: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(LOSS + textwrap.dedent(SCRIPTS[kind]))
    save = ["--save", saved] if saved else []
    assert main(["plan", str(script), "--target", "cpu", "--budget", "10MiB", *save]) == 0
    printed = capsys.readouterr().out
    pasted("train.wrap", printed)
    pasted({"": "train.policy", "plan.yaml": "train.preset", "plan.json": "train.load_plan"}[saved], printed)
    if saved == "plan.json":
        pasted("train.monitor", printed)
    plain = losses(script, capsys)
    assert len(plain) in (2, 4)
    script.write_text(edited(script, printed))
    assert losses(script, capsys) == pytest.approx(plain, rel=1e-6), "the same training"
    assert main(["inspect", str(script), "--json"]) == 0
    after = json.loads(capsys.readouterr().out)["account"]["judged"]["one step"]
    (planned,) = re.findall(r"^ *-> .*?([\d.]+) MiB", printed, re.MULTILINE)
    assert after / 2**20 == pytest.approx(float(planned), abs=0.06), "the bytes that the plan names"
    assert after < 10 * 2**20, "the budget"
