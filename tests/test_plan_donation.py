"""What a plan says of donation, from the verdict to the edited script: typed, pasted, measured, and the same training."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxmem_callbacks.cli.main import main
from tests import forked
from tests.pasting import pasted

HEAD = """
import equinox as eqx, jax, jax.numpy as jnp, jaxmem_callbacks as jm

def loss(model, x):
    for weight in model:
        x = jnp.tanh(x @ weight) + x
    return (x ** 2).mean()

model, x = [jax.random.normal(jax.random.key(at), (256, 256)) / 16 for at in range(4)], jnp.ones((128, 256)) / 9
"""
LOOP = """
for _ in range(3):
    model = {called}(model, x)
print([float(each) for each in jax.tree.map(jnp.sum, model)])
"""
UPDATE = "[w - 0.1 * g for w, g in zip(model, {grad}(loss)(model, x))]"
# How the script makes its step, and what it calls. None of them donates the model, which each returns updated.
STEPS = {
    "Equinox's jit": (
        f"@eqx.filter_jit\ndef train_step(model, x):\n    return {UPDATE}\n",
        "eqx.filter_grad",
        "train_step",
    ),
    "Equinox's jit of a variable": (
        f"def train_step(model, x):\n    return {UPDATE}\n\nstep = eqx.filter_jit(train_step)\n",
        "eqx.filter_grad",
        "step",
    ),
    "a policy that donates nothing": (
        f"def train_step(model, x):\n    return {UPDATE}\n\nstep = jm.jit_step(train_step, jm.StepPolicy(donate=()))\n",
        "jm.grad",
        "step",
    ),
    "an option that donates nothing": (
        f"def train_step(model, x):\n    return {UPDATE}\n\nstep = jm.jit_step(train_step, donate_argnames=())\n",
        "jm.grad",
        "step",
    ),
}


def planned(capsys: Any, *typed: str) -> tuple[int, dict[str, Any], str]:
    """The exit code of a plan, what it saved and what it printed."""
    code = main(["plan", *typed])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if "--json" in typed else {}, printed.out


@pytest.mark.parametrize("kind", STEPS)
def test_what_a_plan_says_of_donation_is_typed_and_pasted(kind: str, tmp_path: Path, capsys: Any) -> None:
    made, grad, called = STEPS[kind]
    script = tmp_path / "train.py"
    script.write_text(HEAD + made.format(grad=grad) + LOOP.format(called=called))
    _, found, _ = planned(capsys, str(script), "--json")
    least = min(each["need_bytes"] for each in found["candidates"])
    budget = ["--budget", f"{(least - 1) // 1024}KiB"]
    code, _, printed = planned(capsys, str(script), *budget)
    assert code == 3
    option = pasted("plan.donate", " ".join(printed.split())).partition(" (")[0]
    assert "compiled, and it fits." in " ".join(printed.split())
    code, found, _ = planned(capsys, str(script), *budget, *shlex.split(option), "--json")
    assert code == 0
    need = found["candidates"][found["chosen"]]["need_bytes"]
    assert need < least
    _, _, printed = planned(capsys, str(script), *budget, *shlex.split(option))
    lines = [text[4:] for text in printed.partition("To train so:\n")[2].split("\n\n")[0].splitlines()]
    assert "donate='auto'" in lines[-1]
    edited = script.read_text().replace("eqx.filter_grad", "jm.eqx.grad").replace("\nfor _", f"\n{lines[-1]}\nfor _", 1)
    (tmp_path / "edited.py").write_text(edited)
    assert main(["inspect", str(tmp_path / "edited.py"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["account"]["judged"]["one step"] == need
    values = [
        forked.run([sys.executable, path], check=True, capture_output=True, text=True, cwd=tmp_path).stdout
        for path in ("train.py", "edited.py")
    ]
    assert values[0] == values[1]
