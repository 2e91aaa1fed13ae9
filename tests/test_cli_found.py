"""What is a training step in scripts that do not know this library: in packages, loops, under `jax.pmap`, and what is none."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.jit_hook import as_written
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.cli.script import Reached, reach_step
from jaxmem_callbacks.cli.trace_log import TraceLog
from jaxmem_callbacks.records.advice import ADVICE
from tests import forked
from tests.pasting import pasted, run, value
from tests.target_step import needs_compiler
from tests.unedited_scripts import LAYERS, written

HEAD = "import functools, jax, jax.numpy as jnp\n" + LAYERS
END = "\nraise SystemExit('went on')\n"


def reached(tmp_path: Path, text: str, *, step: str | None = None) -> tuple[Reached, TraceLog]:
    script = written(tmp_path, HEAD + textwrap.dedent(text) + END)
    with as_written(script, step=step) as seen:
        return reach_step(script, step=step, seen=seen), seen


# Each calls train_step first where a gradient is taken; what comes before is none.
STEPS = {
    "a variable of the script's own is called as a function of this library": """
        def train_step(params, batch):
            return [p - 0.1 * g for p, g in zip(params, jax.grad(loss)(params, batch))]

        jit_step = jax.jit(train_step)
        jit_step(params, batch)
    """,
    "a function and a method of the script's own are called as functions of this library": """
        def apply_policy(params, x):
            return jnp.tanh(x @ params[0])

        class Agent:
            def __init__(self):
                self.jit_step = jax.jit(self.train_step)

            def train_step(self, params, batch):
                return jax.grad(lambda params: (apply_policy(params, batch) ** 2).mean())(params)

        Agent().jit_step(params, batch)
    """,
    "a gradient for the model's first call is thrown away": """
        def forces(weights, x):
            return -jax.grad(lambda x: jnp.tanh(x @ weights).sum())(x)

        @jax.jit
        def init(key, x):
            weights = jax.random.normal(key, (32, 32))
            forces(weights, x)
            return weights

        @jax.jit
        def train_step(weights, x):
            return weights - jax.grad(lambda w: (forces(w, x) ** 2).mean())(weights)

        train_step(init(jax.random.key(0), batch), batch)
    """,
    "a loop of training under one jit": """
        step = jax.jit(lambda params: [p - g for p, g in zip(params, jax.grad(loss)(params, batch))])

        @functools.partial(jax.jit, static_argnums=1)
        def train_step(params, steps):
            return jax.lax.fori_loop(0, steps, lambda _, p: step(p), params)

        train_step(params, 3)
    """,
    "several gradients": """
        @jax.jit
        def train_step(actor, critic):
            value, first = jax.value_and_grad(loss)(critic, batch)
            _, second = jax.value_and_grad(lambda a: loss(a, batch) * value)(actor)
            return first, second

        train_step(params, params)
    """,
    "a factory of decorated functions": """
        def logged(function):
            @functools.wraps(function)
            def called(*args):
                return function(*args)
            return called

        def make(rate):
            @jax.jit
            @logged
            def train_step(params):
                return [p - rate * g for p, g in zip(params, jax.grad(loss)(params, batch))]
            return train_step

        make(0.1)(params)
    """,
    "a class of its own": """
        import dataclasses

        @jax.tree_util.register_dataclass
        @dataclasses.dataclass
        class State:
            params: list

            @jax.jit
            def train_step(self, batch):
                return State([p - g for p, g in zip(self.params, jax.jacrev(loss)(self.params, batch))])

        State(params).train_step(batch)
    """,
    "Flax's dynamic scale": """
        from flax.training.dynamic_scale import DynamicScale

        @jax.jit
        def train_step(scale, params):
            scale, is_finite, value, gradients = scale.value_and_grad(loss)(params, batch)
            return scale, [jnp.where(is_finite, p - g, p) for p, g in zip(params, gradients)]

        train_step(DynamicScale(), params)
    """,
    "NNX's state under JAX's gradient": """
        from flax import nnx
        model = nnx.Linear(32, 32, rngs=nnx.Rngs(0))

        @jax.jit
        def train_step(state, rngs):
            graph = nnx.graphdef(model)
            return jax.grad(lambda s, rngs: (nnx.merge(graph, s)(batch) ** 2).mean())(state, rngs)

        train_step(nnx.state(model), nnx.Rngs(0))
    """,
    "a gradient by hand": """
        @jax.jit
        def train_step(params):
            value, pullback = jax.vjp(lambda p: loss(p, batch), params)
            return pullback(value)

        train_step(params)
    """,
    "an evaluation first": """
        evaluate = jax.jit(loss)
        evaluate(params, batch)

        @jax.jit
        def train_step(params):
            return jax.grad(loss)(params, batch)

        jax.vmap(train_step)([p[None] for p in params])
        train_step(params)
    """,
}


@pytest.mark.core
@pytest.mark.parametrize("kind", STEPS)
def test_the_step_is_the_outermost_call_whose_results_depend_on_a_gradient(kind: str, tmp_path: Path) -> None:
    assert reached(tmp_path, STEPS[kind])[0].step.name == "train_step"


# A trainer of a package: how it jits its step, which is called by `fit`.
TRAINERS = {
    "a method": """
        class Trainer:
            def __init__(self, loss):
                self.loss = loss

            @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
            def train_step(self, state, batch):
                return update(state, jax.value_and_grad(self.loss)(state, batch)[1])

            def fit(self, state, batch):
                state = first(state)
                norm(state)
                return self.train_step(state, batch)
    """,
    "made in fit, by names from JAX": """
        from jax import jit, value_and_grad

        class Trainer:
            def __init__(self, loss):
                self.loss = loss

            def fit(self, state, batch):
                def train_step(state, batch):
                    return update(state, value_and_grad(self.loss)(state, batch)[1])

                step = jit(train_step, donate_argnums=0)
                norm(state)
                return step(first(state), batch)
    """,
    "Equinox": """
        import equinox as eqx

        class Trainer:
            def __init__(self, loss):
                self.loss = loss

            def fit(self, state, batch):
                @eqx.filter_jit
                def train_step(state, batch):
                    return update(state, eqx.filter_grad(self.loss)(state, batch))

                norm(state)
                return train_step(first(state), batch)
    """,
    "NNX": """
        from flax import nnx

        class Trainer:
            def __init__(self, loss):
                self.loss = loss

            @nnx.jit(static_argnums=0)
            def train_step(self, model, batch):
                gradients = nnx.grad(lambda model: self.loss([model.kernel[...]], batch))(model)
                nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model, nnx.Param), gradients))

            def fit(self, state, batch):
                norm(state)
                self.train_step(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), batch)
    """,
    "compiled ahead, in a thread": """
        import concurrent.futures

        class Trainer:
            def __init__(self, loss):
                self.loss = loss

            def fit(self, state, batch):
                def train_step(state, batch):
                    return update(state, jax.grad(self.loss)(state, batch))

                with concurrent.futures.ThreadPoolExecutor() as pool:
                    pool.submit(jax.jit(train_step).lower, first(state), batch).result()
    """,
}
PACKAGE = """
import functools, jax, jax.numpy as jnp

@jax.jit
def first(state):
    return [jnp.zeros_like(each) for each in state]

@jax.jit
def norm(state):
    return jnp.sqrt(sum((each**2).sum() for each in state))

@jax.jit
def update(state, gradients):
    norm(gradients)
    return [p - 0.1 * g for p, g in zip(state, gradients)]

"""


@pytest.fixture(params=["an environment", "a folder of --target"])
def installed(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Path]:
    """A folder of installed packages."""
    folder = tmp_path / ("site-packages" if request.param == "an environment" else "vendored")
    (folder / "small_trainer-1.0.dist-info").mkdir(parents=True)
    (folder / "small_trainer-1.0.dist-info/METADATA").write_text("Name: small_trainer\nVersion: 1.0\n")
    (folder / "small_trainer-1.0.dist-info/RECORD").write_text("small_trainer.py,,\n")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("small_trainer", None)


@pytest.mark.core
@pytest.mark.parametrize("kind", TRAINERS)
def test_the_step_of_an_installed_trainer_is_found(kind: str, installed: Path, tmp_path: Path) -> None:
    (installed / "small_trainer.py").write_text(PACKAGE + textwrap.dedent(TRAINERS[kind]))
    found, seen = reached(tmp_path, "import small_trainer\nsmall_trainer.Trainer(loss).fit(params, batch)\n")
    assert found.step.name == "train_step"
    assert "train_step" not in seen.jitted, "the user did not jit it, so it is no name to choose from"


# How a script calls a trainer of a package.
CALLED = {
    "a method": "trainer.fit(params, batch)",
    "a function": "small_trainer.fit(loss, params, batch)",
    "a name": "fit_it(\n    loss,\n    params,\n    batch,\n)",
}
FIT = """
import functools, jax

def fit(loss, params, batch):
    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return [p - 0.01 * g for p, g in zip(params, gradients)], value
    return train_step(jax.tree.map(lambda p: p + 0, params), batch)

class Trainer:
    def __init__(self, loss):
        self.fit = functools.partial(fit, loss)
"""


@pytest.mark.parametrize("kind", CALLED)
def test_the_step_of_a_package_is_planned_and_trained_by_the_printed_line(
    kind: str, installed: Path, tmp_path: Path, capsys: Any
) -> None:
    (installed / "small_trainer.py").write_text(FIT)
    begin = (
        HEAD + "import small_trainer\nfrom small_trainer import fit as fit_it\ntrainer = small_trainer.Trainer(loss)\n"
    )
    saved = tmp_path / "chosen.yaml"
    script = written(tmp_path, begin + CALLED[kind] + END)
    assert main(["plan", script, "--target", "cpu", "--save", str(saved)]) == 0
    printed = capsys.readouterr().out
    assert "full" in printed.partition("What makes its peak")[0], "a package's gradient obeys the policies"
    saved.write_text("policy:\n  remat: full\n")  # the cheapest here is none: what the line says is loaded all the same
    names = run(begin)
    names |= run(f"import jaxmem_callbacks as jm\n{pasted('train.around', printed)}", **names)
    function, _, arguments = CALLED[kind].partition("(")
    assert f"# and call trained in place of {function}" in printed
    ours, theirs = (value(f"{each}({arguments}", **names) for each in ("trained", function))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), ours, theirs)
    text = str(jax.make_jaxpr(lambda: value(f"trained({arguments}", **names))())
    assert "checkpoint" in text or "remat" in text, "its own step is recomputed"


# Whose remat no compiler undoes.
SCANNED = """
import jaxmem_callbacks as jm

def loss(params, batch):
    def layer(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w), None
    return (jax.lax.scan(layer, batch, jnp.stack(params))[0] ** 2).mean()
"""
# How a script puts a policy around what it calls: each is found and looked at under that policy.
EDITED = {
    "around a trainer of a package": """
        import small_trainer
        trained = jm.apply_policy(small_trainer.fit, "full_remat", gradients="all")
        trained(loss, params, batch)
    """,
    "inside the script's own jit": """
        def train_step(params, batch):
            value, gradients = jm.value_and_grad(loss)(params, batch)
            return [p - 0.01 * g for p, g in zip(params, gradients)], value

        jax.jit(jm.apply_policy(train_step, "full_remat"), donate_argnums=0)(params, batch)
    """,
    "around a method that jits": """
        class Agent:
            def learn(self, params, batch):
                @functools.partial(jax.jit, donate_argnums=0)
                def train_step(params, batch):
                    value, gradients = jax.value_and_grad(loss)(params, batch)
                    return [p - 0.01 * g for p, g in zip(params, gradients)], value
                return train_step(params, batch)

        jm.apply_policy(Agent().learn, "full_remat", gradients="all")(params, batch)
    """,
}


@pytest.mark.core
@pytest.mark.parametrize("kind", EDITED)
def test_a_script_with_a_policy_around_what_it_calls_is_inspected_under_it(
    kind: str, installed: Path, tmp_path: Path, capsys: Any
) -> None:
    (installed / "small_trainer.py").write_text(FIT)
    begin = HEAD + SCANNED
    script = written(tmp_path, begin + textwrap.dedent(EDITED[kind]) + END)
    assert main(["inspect", script, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["step"]["step_bytes"]
    names = run(begin)

    def train_step(params: Any, batch: Any) -> Any:
        value, gradients = jm.value_and_grad(names["loss"])(params, batch)
        return [p - 0.01 * g for p, g in zip(params, gradients, strict=True)], value

    plain, full = (
        jm.step_memory(jm.jit_step(train_step, policy, donate_argnames="params"), names["params"], names["batch"])
        for policy in (None, "full_remat")
    )
    assert found == full.step_bytes < plain.step_bytes


# A loop of jax.lax around which nothing is jitted -> the same in Python.
BODY = """
    def train(params, _=None):
        return [p - 0.1 * g for p, g in zip(params, jax.grad(loss)(params, batch))]

    def train_step(params, x):
        return train(params), x
"""
LOOPS = {
    "jax.lax.scan(train_step, params, None, 3)": "train_step",
    "jax.lax.scan(train_step, params, jnp.arange(3.0), reverse=True)": "train_step",
    "jax.lax.fori_loop(0, 3, by_number, params)": "by_number",
    "jax.lax.while_loop(is_on, train_once, (0, params))": "train_once",
    "jax.lax.map(gradient_of, jnp.stack([batch[:16], batch[16:32]]))": "gradient_of",
}
REST = """
    def by_number(_, params):
        return train(params)

    def is_on(carry):
        return carry[0] < 3

    def train_once(carry):
        return carry[0] + 1, train(carry[1])

    def gradient_of(x):
        return jax.grad(loss)(params, x)

    jax.lax.scan(lambda c, x: (c, loss(params, batch)), 0.0, None, 2)  # takes no gradient
"""


@pytest.mark.parametrize("call", LOOPS)
def test_a_loop_that_runs_by_itself_is_the_step_and_is_written_as_it_can_be_jitted(call: str, tmp_path: Path) -> None:
    body = textwrap.dedent(BODY) + textwrap.dedent(REST)
    found, seen = reached(tmp_path, f"{body}\n{call}\n")
    assert found.step.name == LOOPS[call]
    names = run(HEAD + body)
    line = pasted("step.loop", seen.step)
    jitted = jm.jit_step(value(line, **names))
    given = jax.tree.map(jnp.copy, found.args)
    ours, theirs = jitted(*found.args), eval(call, names)  # noqa: S307 - the script's own call
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), ours, theirs)
    warnings = [each for each in jm.step_memory(found.step, *found.args).warnings if "returned updated" in each]
    assert bool(warnings) == ("lax.map" not in call)
    for warning in warnings:
        option, line = re.search(r"Write (donate_argnames=.*?\)) in a jax\.jit of (.*)\.$", warning).groups()
        again = value(f"jax.jit({line}, {option})", **names)(*given)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), again, theirs)
        assert all(each.is_deleted() for each in jax.tree.leaves(given[0]) if each.ndim)


def test_a_loop_with_what_has_no_name_is_not_written(tmp_path: Path) -> None:
    found, seen = reached(tmp_path, "jax.lax.scan(lambda p, x: (jax.grad(loss)(p, batch), x), params, None, 3)\n")
    assert found.step.name == "<lambda>"
    assert seen.step == ""


TRAIN = """
    def train_step(state, batch, *, rate=0.1):
        def mean(w):
            return (jnp.tanh(batch @ w) ** 2).mean()
        value, gradient = jax.value_and_grad(mean)(state["w"])
        return {"w": state["w"] - rate * jax.lax.pmean(gradient, AXIS)}, jax.lax.pmean(value, AXIS)

    def with_config(state, config, batch):
        return train_step(state, batch, rate=0.2 if config == "fast" else 0.1)

    class Model:
        def train_step(self, state, batch):
            return train_step(state, batch)
"""
# How the pmapped function is made, its axis, and what it is called with.
PMAPPED = {
    "a call": ("jax.pmap(train_step, axis_name='batch')", "batch", "state, rows"),
    "a partial that donates": (
        "jax.pmap(functools.partial(train_step, rate=0.5), 'i', donate_argnums=(0,))",
        "i",
        "state, rows",
    ),
    "a static argument": (
        "jax.pmap(with_config, 'batch', static_broadcasted_argnums=1, donate_argnums=0)",
        "batch",
        "state, 'fast', rows",
    ),
    "an argument that is not divided": (
        "functools.partial(jax.pmap, axis_name='data', in_axes=(None, 0), out_axes=None)(train_step)",
        "data",
        "{'w': jnp.eye(8)}, rows",
    ),
}


INSIDE = {
    "a call": ["step.pmap.divided"],
    "a partial that donates": ["step.pmap.divided", "step.pmap.partial"],
    "a static argument": ["step.pmap.divided", "step.pmap.static"],
    "an argument that is not divided": ["step.pmap.divided"],
}


@pytest.mark.core
@pytest.mark.parametrize("kind", PMAPPED)
def test_a_pmapped_step_is_stopped_with_the_jit_to_write(kind: str, tmp_path: Path, capsys: Any) -> None:
    made, axis, arguments = PMAPPED[kind]
    body = textwrap.dedent(TRAIN).replace("AXIS", repr(axis))
    data = (
        "state = {'w': jnp.stack([jnp.eye(8)] * jax.device_count())}\nrows = jnp.arange(jax.device_count() * 16.0 * 8)"
    )
    data += ".reshape(jax.device_count(), 16, 8) / 1e3\n"
    rest = f"warm = jax.pmap(lambda x: x * 2)(rows)\np_step = {made}\np_step({arguments})\n"
    script = written(tmp_path, "import functools, jax, jax.numpy as jnp\n" + body + data + rest + END)
    assert main(["plan", script, "--target", "cpu"]) == 2
    printed = capsys.readouterr()
    assert "went on" not in printed.out + printed.err
    assert "takes a gradient under jax.pmap, and no plan is made of it" in printed.err
    names = run("import functools, jax, jax.numpy as jnp\n" + body + data)
    theirs = jax.tree.map(np.asarray, eval(f"({made})({arguments})", names))  # noqa: S307 - the script's own call
    lines = textwrap.dedent(pasted("step.pmap", printed.err))
    for part in INSIDE[kind]:
        assert re.search(ADVICE[part].pattern, lines)
    step = run(lines, **names)["step"]
    ours = step({"w": jnp.eye(8)}, names["rows"].reshape(-1, 8))
    for mine, pmapped in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, pmapped[0] if pmapped.ndim > mine.ndim else pmapped, rtol=1e-5)


METHODS = """
    class Base:
        rate = 0.1
        def train_step(self, state, batch, double=False):
            def mean(w):
                return (jnp.tanh(batch @ w) ** 2).mean()
            value, gradient = jax.value_and_grad(mean)(state["w"])
            rate = self.rate * (2 if double else 1)
            return {"w": state["w"] - rate * jax.lax.pmean(gradient, "batch")}, jax.lax.pmean(value, "batch")

    class Trainer(Base):
        def __init__(self):
            self.p_step = jax.pmap(self.train_step, axis_name="batch", donate_argnums=0)
        def fit(self, state, rows):
            return self.p_step(state, rows)

    class Decorated(Base):
        train_step = jax.pmap(Base.train_step, axis_name="batch", static_broadcasted_argnums=(0, 3))
        def fit(self, state, rows):
            return self.train_step(state, rows, True)
"""
PMAPPED_METHODS = {
    "of a variable": ("jax.pmap(trainer.train_step, 'batch')(state, rows)", "Base", "trainer"),
    "of the object itself": ("trainer.fit(state, rows)", "Trainer", "self"),
    "of a class": ("trainer.fit(state, rows)", "Decorated", "self"),
}


@pytest.mark.core
@pytest.mark.parametrize("kind", PMAPPED_METHODS)
def test_a_pmapped_method_is_stopped_with_the_jit_to_write(kind: str, tmp_path: Path, capsys: Any) -> None:
    call, made, holder = PMAPPED_METHODS[kind]
    body = "import functools, jax, jax.numpy as jnp\n" + textwrap.dedent(METHODS)
    body += f"trainer = {made}()\nstate = {{'w': jnp.stack([jnp.eye(8)] * jax.device_count())}}\n"
    body += "rows = jnp.arange(jax.device_count() * 16.0 * 8).reshape(jax.device_count(), 16, 8) / 1e3\n"
    assert main(["plan", written(tmp_path, f"{body}{call}\n{END}"), "--target", "cpu"]) == 2
    printed = capsys.readouterr()
    assert "went on" not in printed.out + printed.err
    lines = textwrap.dedent(pasted("step.pmap", printed.err))
    assert f"{holder}.train_step(" in lines or f"{holder}.train_step," in lines
    names = run(body)
    theirs = jax.tree.map(np.asarray, value(call, **names))
    step = run(lines, **names | {holder: names["Base"]()})["step"]  # jax.pmap is off the method
    ours = step({"w": jnp.eye(8)}, names["rows"].reshape(-1, 8))
    for mine, pmapped in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, pmapped[0], rtol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize("ahead", ["p_step.lower(state, rows).compile()", "p_step.lower(*(state, rows))"])
def test_a_pmapped_step_that_is_compiled_by_hand_is_found(ahead: str, tmp_path: Path, capsys: Any) -> None:
    body = textwrap.dedent(TRAIN).replace("AXIS", "'batch'") + "p_step = jax.pmap(train_step, axis_name='batch')\n"
    data = "state = {'w': jnp.stack([jnp.eye(8)] * jax.device_count())}\nrows = jnp.ones((jax.device_count(), 16, 8))\n"
    script = written(tmp_path, "import jax, jax.numpy as jnp\n" + body + data + f"made = {ahead}\n" + END)
    assert main(["plan", script, "--target", "cpu"]) == 2
    printed = capsys.readouterr()
    assert "train_step takes a gradient under jax.pmap, and no plan is made of it" in printed.err
    assert "went on" not in printed.out + printed.err


NAMED = {
    "by its function": ("made", "p_step, (state, rows)"),
    "by its function, of jit_step": ("made", "jm.jit_step(p_step), (state, rows)"),
    "of jit_step, with a policy": ("", "jm.jit_step(p_step, 'full_remat')(state, rows)"),
    "beside a step that is none": ("", "jm.jit_step(lambda x: x * 2)(rows), jm.jit_step(p_step)(state, rows)"),
}


@pytest.mark.core
@pytest.mark.parametrize("command", ["inspect", "plan"])
@pytest.mark.parametrize("way", NAMED)
def test_a_pmapped_step_that_the_script_names_is_answered_alike(
    way: str, command: str, tmp_path: Path, capsys: Any
) -> None:
    function, called = NAMED[way]
    body = textwrap.dedent(TRAIN).replace("AXIS", "'batch'") + "p_step = jax.pmap(train_step, axis_name='batch')\n"
    body += "state = {'w': jnp.stack([jnp.eye(8)] * jax.device_count())}\n"
    body += "rows = jnp.ones((jax.device_count(), 16, 8))\n"
    called = f"def {function}(): return {called}\n" if function else f"{called}\n{END}"
    script = written(tmp_path, "import jax, jax.numpy as jnp\nimport jaxmem_callbacks as jm\n" + body + called)
    named = ["--step", "train_step"] if way.startswith("beside") else []
    assert main([command, f"{script}:{function}" if function else script, *named]) == 2
    printed = capsys.readouterr()
    assert "train_step takes a gradient under jax.pmap, and no plan is made of it" in printed.err
    assert "went on" not in printed.out + printed.err
    names = run("import jax, jax.numpy as jnp\n" + body)
    step = run(textwrap.dedent(pasted("step.pmap", printed.err)), **names)["step"]
    ours = step({"w": jnp.eye(8)}, names["rows"].reshape(-1, 8))
    theirs = names["p_step"](names["state"], names["rows"])
    for mine, pmapped in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, pmapped[0] if pmapped.ndim > mine.ndim else pmapped, rtol=1e-5)


@pytest.mark.core
def test_a_pmapped_function_that_jm_plan_is_given_is_named() -> None:
    step = jax.pmap(lambda w, x: w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))
    for given in (step, jm.jit_step(step)):
        with pytest.raises(jm.PlanError, match=r"is under jax\.pmap, and no plan is made of it"):
            jm.plan(given, jnp.ones((2, 8, 8)), jnp.ones((2, 4, 8)))


def test_a_pmapped_step_without_a_name_is_asked_about(tmp_path: Path, capsys: Any) -> None:
    text = textwrap.dedent(TRAIN).replace("AXIS", "'i'") + "\nstate = {'w': jnp.ones((jax.device_count(), 8, 8))}\n"
    text += "jax.pmap(Model().train_step, axis_name='i')(state, jnp.ones((jax.device_count(), 4, 8)))\n"
    assert main(["inspect", written(tmp_path, HEAD + text + END)]) == 2
    assert "Can it run under jax.shard_map inside of jax.jit, over a mesh of all devices?" in capsys.readouterr().err


# A mesh of the devices that are here, in three ways.
MESHES = {
    "shardings of a jit": """
        step = jax.jit(train_step, in_shardings=(whole, rows), out_shardings=(whole, None), donate_argnums=0)
        step(jax.device_put(jnp.ones((64, 64)), whole), jnp.ones((64, 64)))
    """,
    "a constraint": """
        step = jax.jit(lambda w, x: train_step(w, jax.lax.with_sharding_constraint(x, rows)), donate_argnums=0)
        step(jax.device_put(jnp.ones((64, 64)), whole), jax.device_put(jnp.ones((64, 64)), rows))
    """,
    "a shard_map": """
        shared = lambda w, x: jax.tree.map(lambda y: jax.lax.pmean(y, "data"), train_step(w, x))
        step = jax.shard_map(shared, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P(), check_vma=False)
        jax.jit(step, donate_argnums=0)(jax.device_put(jnp.ones((64, 64)), whole), jnp.ones((64, 64)))
    """,
}
OVER_MESH = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding

mesh = Mesh(np.array(jax.devices()), ("data",))
whole, rows = NamedSharding(mesh, jax.P()), NamedSharding(mesh, jax.P("data"))

def train_step(w, x):
    value, gradient = jax.value_and_grad(lambda w: (jnp.tanh(jnp.tanh(x @ w) @ w) ** 2).mean())(w)
    return w - 0.1 * gradient, value
"""


def jaxmem(*typed: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command on a machine with one CPU."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    command = [sys.executable, "-m", "jaxmem_callbacks", *typed]
    variables = inherited | {"JAX_PLATFORMS": "cpu"} | variables
    return forked.run(command, capture_output=True, text=True, check=False, env=variables)


FRAMEWORK = """
import sys
assert not {"flax", "equinox"} & sys.modules.keys(), "of frameworks only what a script imports is imported"
import jax, jax.numpy as jnp
import jax.experimental.pjit  # whose names are deprecated, and are looked at as well
from flax import nnx

@nnx.jit
def train_step(model, batch):
    gradients = nnx.grad(lambda model: (jnp.tanh(model(batch)) ** 2).mean())(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model, nnx.Param), gradients))

train_step(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), jnp.ones((64, 32)))
"""


def test_a_framework_is_looked_at_when_the_script_imports_it(tmp_path: Path) -> None:
    words = ("inspect", written(tmp_path, FRAMEWORK), "--top", "0")
    done = jaxmem(*words, PYTHONWARNINGS="error:jax.experimental.pjit:DeprecationWarning")
    assert done.returncode == 0, done.stderr
    assert "train_step" in done.stdout


def test_a_framework_that_is_not_to_be_imported_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "equinox", None)
    found, _ = reached(
        tmp_path,
        """
        @jax.jit
        def train_step(w):
            return w - jax.grad(lambda w: (batch @ w).sum())(w)

        train_step(jnp.ones((32, 8)))
        """,
    )
    assert found.step.name == "train_step"


@pytest.mark.targets
@pytest.mark.parametrize("kind", MESHES)
def test_a_mesh_of_the_devices_that_are_here_is_one_of_the_targets(kind: str, tmp_path: Path) -> None:
    needs_compiler("h100_sxm")
    script = written(tmp_path, OVER_MESH + textwrap.dedent(MESHES[kind]) + END)
    done = jaxmem("inspect", script, "--target", "h100_sxm:2", "--json", "--top", "0")
    assert done.returncode == 0, done.stderr
    step = json.loads(done.stdout)["step"]
    if kind != "shardings of a jit":  # whose batch comes whole, as far as the arguments say
        assert step["argument_bytes"] == 64 * 64 * 4 + 32 * 64 * 4
    assert step["alias_bytes"] == 64 * 64 * 4


@pytest.mark.targets
def test_how_many_devices_a_script_sees_is_what_its_user_says(tmp_path: Path) -> None:
    needs_compiler("h100_sxm")
    script = written(tmp_path, "import jax\nraise SystemExit(f'{jax.device_count()} devices')\n")
    flag = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    for target, variables, count in (
        ("h100_sxm:4", {}, 4),
        ("h100_sxm", {}, 1),
        ("h100_sxm:4", flag, 3),
        ("h100_sxm:4", {"JAX_NUM_CPU_DEVICES": "5"}, 5),
    ):
        done = jaxmem("plan", script, "--target", target, **variables)
        assert f"with the words {count} devices, before" in done.stderr
    own = written(
        tmp_path,
        "import jax\njax.config.update('jax_num_cpu_devices', 6)\nraise SystemExit(f'{jax.device_count()} devices')\n",
    )
    assert "with the words 6 devices, before" in jaxmem("inspect", own, "--target", "h100_sxm:4").stderr


def test_a_pmapped_step_of_a_package_is_no_line_to_edit(installed: Path, tmp_path: Path, capsys: Any) -> None:
    """What stands in a package's file is asked about; its lines are nobody's to change."""
    trainer = PACKAGE + textwrap.dedent(
        """
        def fit(loss, params, batch):
            def train_step(params, batch):
                gradients = jax.lax.pmean(jax.grad(loss)(params, batch), "i")
                return [p - 0.1 * g for p, g in zip(params, gradients)]

            params, batch = jax.tree.map(lambda leaf: leaf[None], (params, batch))
            return jax.pmap(train_step, axis_name="i")(params, batch)
        """
    )
    (installed / "small_trainer.py").write_text(trainer)
    script = written(tmp_path, HEAD + "import small_trainer\nsmall_trainer.fit(loss, params, batch)\n" + END)
    assert main(["plan", script, "--target", "cpu"]) == 2
    printed = capsys.readouterr()
    assert "train_step takes a gradient under jax.pmap, and no plan is made of it" in printed.err
    assert "An installed package puts it under jax.pmap. Does that package, or a newer one" in printed.err
    assert "Take jax.pmap off" not in printed.err
    assert "went on" not in printed.out + printed.err


@pytest.mark.core
@pytest.mark.parametrize(("jit", "attribute"), [("nnx.jit", "jitted_fn"), ("nnx.jit", "in_shardings")])
def test_attributes_of_a_jit_reach_what_wraps_it(jit: str, attribute: str, tmp_path: Path) -> None:
    """A trainer that reads its jit's cache through `functools.wraps` does so under this library too."""
    text = f"""
        from flax import nnx

        step = {jit}(lambda params, batch: [p - 0.1 * g for p, g in zip(params, jax.grad(loss)(params, batch))])

        @functools.wraps(step)
        def train_step(*args):
            return step(*args)

        direct = step.{attribute}
        if "{jit}" == "nnx.jit":
            assert train_step.{attribute} is direct
        train_step(params, batch)
    """
    found, _ = reached(tmp_path, text)
    assert found.step.name == "<lambda>"
