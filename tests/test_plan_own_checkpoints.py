"""Plans of losses with checkpoints of their own: what stops the saving leads, and the author's policy is a row of the table."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.readers.decoding import plan_from
from jaxmem_callbacks.transforms.costs import jaxpr_flops
from tests.checkpointed_losses import FORMS, STACK, in_a_scan
from tests.pasting import pasted
from tests.target_step import needs_compiler
from tests.test_own_checkpoints import step_of

ROWS = 2048
X = jax.ShapeDtypeStruct((ROWS, 16), jnp.float32)
SEARCH = {"own_checkpoints": True}
PLACE = r"tests/checkpointed_losses\.py:\d+, 4 times"


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def planned(loss: Any, params: Any = STACK, **options: Any) -> jm.Plan:
    return jm.plan(step_of(loss), abstract(params), X, **options)


def figures(plan: jm.Plan) -> dict[str, tuple[Any, ...]]:
    """Bytes and operations of every candidate but the author's, by its policy."""
    return {
        str(dataclasses.replace(each.policy, own_checkpoints="keep")): (
            each.step_bytes, each.flops, each.extra_flops, each.plain_flops,
        )
        for each in plan.candidates
        if not plan.record.is_as_written(each)
    }  # fmt: skip


@pytest.fixture(scope="module")
def stopped() -> jm.Plan:
    """A budget that the step does not fit, whatever acts on what is beside its checkpoints."""
    return planned(in_a_scan(jax.checkpoint), budget="100KiB")


@pytest.fixture(scope="module")
def replaced() -> jm.Plan:
    return planned(in_a_scan(jax.checkpoint), search=SEARCH)


@pytest.mark.core
def test_the_verdict_leads_with_what_stops_the_saving(stopped: jm.Plan) -> None:
    (own,) = stopped.record.own_checkpoints
    assert re.fullmatch(PLACE, own.words)
    verdict = " ".join(str(stopped).partition("\n-> ")[2].split())
    assert re.match(
        rf"none: The loss has its own checkpoints \({PLACE}\), and they are left alone: nothing else can be cut\. .*"
        r"Nothing fits, by ",
        verdict,
    )
    assert "Remat was not tried: nothing but the loss's own checkpoints could be cut." in " ".join(str(stopped).split())
    with pytest.raises(jm.PlanError, match=rf"Nothing fits: .*The loss has its own checkpoints \({PLACE}\)"):
        jm.jit_step(step_of(in_a_scan(jax.checkpoint)), stopped.policy)
    fitting = str(planned(in_a_scan(jax.checkpoint), budget="1GiB"))
    words = r"-> none: the plain step fits\. The loss has its own checkpoints"
    assert re.search(words, " ".join(fitting.split())), "nothing had to be saved, and they may cost time for nothing"


@pytest.mark.core
def test_the_authors_own_policy_is_a_row_with_its_real_bytes_and_operations(replaced: jm.Plan) -> None:
    written, without = in_a_scan(jax.checkpoint), in_a_scan(lambda f: f)
    (own,) = (each for each in replaced.candidates if replaced.record.is_as_written(each))
    assert own.policy == jm.StepPolicy()
    assert own.step_bytes == jm.step_memory(jm.jit_step(step_of(written)), abstract(STACK), X).program.step_bytes
    plain, by_hand = (
        jaxpr_flops(jax.make_jaxpr(step_of(loss, jax.value_and_grad))(STACK, X)) for loss in (without, written)
    )
    assert (own.flops, own.plain_flops, own.extra_flops) == (by_hand, plain, by_hand - plain)
    assert own.extra_flops > 0.15 * plain
    assert re.search(r"the author's own checkpoints +[\d.]+ [KM]iB", str(replaced))
    assert replaced.policy == jm.StepPolicy(own_checkpoints="replace"), "no limit: nothing is worth computing twice"
    assert replaced.record.own_checkpoints == ()


@pytest.mark.core
def test_a_plan_without_them_is_the_plan_of_the_loss_written_without(replaced: jm.Plan) -> None:
    assert figures(replaced) == figures(planned(in_a_scan(lambda f: f)))
    with_budget = planned(in_a_scan(jax.checkpoint), search=SEARCH, budget="1MiB")
    assert figures(with_budget) == figures(planned(in_a_scan(lambda f: f), budget="1MiB"))


@pytest.mark.core
def test_nothing_to_replace_is_noted() -> None:
    plan = planned(in_a_scan(lambda f: f), search=SEARCH)
    assert plan.record.notes[0].startswith("No checkpoints were replaced: own_checkpoints='replace' would do nothing: ")
    assert all(each.policy.own_checkpoints == "keep" for each in plan.candidates)
    with pytest.raises(jm.PlanError, match=r'search\["own_checkpoints"\]=\'yes\': expected True or False'):
        planned(in_a_scan(lambda f: f), search={"own_checkpoints": "yes"})
    under = jm.jit_step(step_of(in_a_scan(jax.checkpoint)), jm.StepPolicy(own_checkpoints="replace"))
    with pytest.raises(
        jm.PlanError, match=r"already under own_checkpoints='replace'. Plan \w+, the function that you wrote"
    ):
        jm.plan(under, abstract(STACK), X)


def test_a_whole_plan_is_read_again_and_older_ones_too(stopped: jm.Plan, replaced: jm.Plan) -> None:
    for plan in (stopped, replaced):
        assert plan_from(json.loads(plan.to_json())) == plan.record
    older = json.loads(stopped.to_json())
    del older["own_checkpoints"]
    for each in older["candidates"]:
        del each["policy"]["own_checkpoints"]
    assert plan_from(older) == dataclasses.replace(stopped.record, own_checkpoints=())


@pytest.mark.targets
@pytest.mark.recorded
@pytest.mark.parametrize("name", ["by_block_named", "whole", "linen_scan", "equinox_scan"])
def test_public_forms_need_no_edit_on_an_h100(name: str) -> None:
    """`full` in the place of the author's checkpoints needs no more than `full` of the loss written without any."""
    needs_compiler("h100_sxm")
    written, without, params = FORMS[name]()
    ours = planned(written, params, search=SEARCH, target="h100_sxm", budget=1.0)
    theirs = planned(without, params, target="h100_sxm", budget=1.0)
    assert figures(ours) == figures(theirs)
    assert any(ours.record.is_as_written(each) for each in ours.candidates)


SCRIPT = """
import jax, jax.numpy as jnp

{body}

@jax.jit
def step(ws, x):
    value, g = jax.value_and_grad(loss)(ws, x)
    return ws - 0.1 * g, value

ws, x = jax.random.normal(jax.random.key(0), (6, 64, 64)) / 9, jnp.ones((4096, 64))
for _ in range(3):
    ws, value = step(ws, x)
print(f"{{value:.7f}}")
"""
BODIES = {
    "a scan": """
def loss(ws, x):
    body = jax.checkpoint(lambda x, w: (jnp.tanh(jnp.sin(x @ w) @ w.T), None))
    return (jax.lax.scan(body, x, ws)[0] ** 2).mean()
""",
    "a decorator": """
@jax.checkpoint
def layer(x, w):
    return jnp.tanh(jnp.sin(x @ w) @ w.T)

def loss(ws, x):
    return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2).mean()
""",
    "the whole loss": """
def forward(ws, x):
    return (jax.lax.scan(lambda x, w: (jnp.tanh(jnp.sin(x @ w) @ w.T), None), x, ws)[0] ** 2).mean()

loss = jax.checkpoint(forward)
""",
}


@pytest.mark.parametrize("kind", BODIES)
def test_what_a_plan_of_a_script_prints_is_pasted(kind: str, tmp_path: Path, capsys: Any) -> None:
    """From the verdict to the edited script: the option as printed, then the lines as printed, and the same training."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(body=BODIES[kind]))
    line = next(at for at, text in enumerate(script.read_text().splitlines(), 1) if "checkpoint" in text)
    assert main(["plan", str(script), "--budget", "4MiB"]) == 3
    told = " ".join(capsys.readouterr().out.split())
    place = rf"train\.py:{line}" if kind != "the whole loss" else r"train\.py:\d+ around forward"
    assert re.search(rf"-> none: The loss has its own checkpoints \([^ ]*{place}", told), told
    option = pasted("plan.own_checkpoints", told).partition(" (")[0]
    assert main(["plan", str(script), "--budget", "30MiB", *shlex.split(option)]) == 0
    told = capsys.readouterr().out
    lines = [text[4:] for text in told.partition("To train so:\n")[2].split("\n\n")[0].splitlines()]
    assert "own_checkpoints='replace'" in lines[-1]
    edited = script.read_text().replace("jax.value_and_grad", "jm.value_and_grad")
    edited = edited.replace("import jax,", f"{lines[0]}\nimport jax,", 1).replace("\nfor _", f"\n{lines[-1]}\nfor _", 1)
    (tmp_path / "edited.py").write_text(edited)
    values = []
    for name in ("train.py", "edited.py"):
        runpy.run_path(str(tmp_path / name))
        values.append(capsys.readouterr().out)
    assert values[0] == values[1] != ""
