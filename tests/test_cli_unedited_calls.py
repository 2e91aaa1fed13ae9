"""Steps of scripts that say nothing of this library, found however they are called and whatever their models hold."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxmem_callbacks.cli.jit_hook import as_written
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.cli.script import reach_step
from tests.unedited_scripts import LAYERS, SCRIPTS, TWO, written

# After the models and data of LAYERS; each step is found before the script says that it went on.
FOUND = {
    "called first without its gradient": """
        @functools.partial(jax.jit, static_argnames="train")
        def train_step(params, batch, train):
            return jax.grad(loss)(params, batch) if train else loss(params, batch)

        train_step(params, batch, train=False)
        train_step(params, batch, train=True)
    """,
    "another branch for another shape": """
        @jax.jit
        def train_step(params, batch):
            return jax.grad(loss)(params, batch) if len(batch) > 8 else loss(params, batch)

        train_step(params, batch[:8])
        train_step(params, batch)
    """,
    "a first batch that does not fit": """
        @jax.jit
        def train_step(params, batch):
            return jax.grad(loss)(params, batch)

        try:
            train_step(params, batch[:, :3])
        except TypeError:
            pass
        train_step(params, batch)
    """,
    "compiled by hand": """
        def train_step(params, batch):
            return jax.grad(loss)(params, batch)

        compiled = jax.jit(train_step).lower(params, batch).compile()
    """,
    "traced by hand": """
        @jax.jit
        def train_step(params, batch):
            return jax.grad(loss)(params, batch)

        train_step.trace(params, batch)
    """,
    "asked for shapes first": """
        @jax.jit
        def train_step(params, batch):
            return jax.grad(loss)(params, batch)

        assert jax.eval_shape(train_step, params, batch)[0].shape == (32, 32)
        train_step(params, batch)
    """,
    "copied": """
        @jax.jit
        def train_step(params, batch):
            return jax.grad(loss)(params, batch)

        assert isinstance(train_step, jax.stages.Wrapped)
        copy.deepcopy({"step": copy.copy(train_step)})["step"](params, batch)
    """,
    "a vector-Jacobian product": """
        @jax.jit
        def train_step(params, batch):
            value, back = jax.vjp(loss, params, batch)
            return back(jnp.ones_like(value))

        train_step(params, batch)
    """,
    "gradients of a package": """
        value_and_grad = optax.value_and_grad_from_state(loss)
        solver = optax.lbfgs()

        @jax.jit
        def train_step(params, state, batch):
            value, gradients = value_and_grad(params, batch, state=state)
            return solver.update(gradients, state, params, value=value, grad=gradients, value_fn=lambda p: loss(p, batch))

        train_step(params, solver.init(params), batch)
    """,
    "gradients of this library without a step of it": """
        @jax.jit
        def train_step(params, batch):
            return jm.value_and_grad(loss)(params, batch)

        train_step(params, batch)
    """,
    "the function by its keyword": """
        @jax.jit
        def train_step(params, batch):
            first = jax.value_and_grad(fun=lambda w: w**2.0)(3.0)
            second = jax.grad(lambda w: w * w, 0, False, False)(3.0)
            return first, second

        train_step(params, batch)
    """,
}


@pytest.mark.parametrize("kind", FOUND)
def test_a_step_is_found_however_it_is_called(kind: str, tmp_path: Path, capsys: Any) -> None:
    imports = "import copy, functools, jax, optax\nimport jax.numpy as jnp, jaxmem_callbacks as jm  # jaxmem plan, jm.jit_step\n"
    body = textwrap.dedent(FOUND[kind]) + "\nraise SystemExit('went on')\n"
    script = written(tmp_path, imports + LAYERS + body)
    with as_written(script) as seen:
        reached = reach_step(script, seen=seen)
    assert reached.step.name == "train_step"
    assert set(seen.jitted) == {"train_step"}
    assert "no step is seen" not in capsys.readouterr().err


def test_a_script_that_swallows_the_stop_is_stopped_at_each_step(tmp_path: Path, capsys: Any) -> None:
    body = """
        for at in range(3):
            try:
                params = train_step(params, batch)
                print("trained")
            except BaseException as error:
                print("swallowed", at)
    """
    head = SCRIPTS["a decorator of JAX"].partition("params, value = train_step(")[0]
    assert main(["inspect", written(tmp_path, textwrap.dedent(head) + textwrap.dedent(body)), "--json"]) == 0
    printed = capsys.readouterr()
    assert [f"swallowed {at}" in printed.out + printed.err for at in range(3)] == [True] * 3
    assert "trained" not in printed.out + printed.err


DROPOUT = """
    import equinox as eqx, jax, jax.numpy as jnp

    class Net(eqx.Module):
        layers: list
        dropout: eqx.nn.Dropout
        scale: float
        places: jax.Array

        def __call__(self, x, key):
            for layer in self.layers:
                x = jnp.tanh(self.dropout(layer(x), key=key)) * self.scale + x
            return x[self.places]

    def loss(model, batch, keys):
        return (jax.vmap(model)(batch, keys) ** 2).mean()

    {jit}
    def train_step(model, batch, keys):
        value, gradients = {gradient}(loss)(model, batch, keys)
        assert gradients.scale is None and gradients.places is None and gradients.dropout.p is None
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients)), value

    def make():
        layers = [eqx.nn.Linear(32, 32, key=key) for key in jax.random.split(jax.random.key(0), 4)]
        model = Net(layers, eqx.nn.Dropout(0.5), 0.5, jnp.arange(16))
        return train_step, (model, jnp.ones((4096, 32)), jax.random.split(jax.random.key(1), 4096))

    if __name__ == "__main__":
        step, arguments = make()
        step(*arguments)
        raise SystemExit("went on")
"""


def test_an_equinox_model_with_switches_numbers_and_tables_is_planned(tmp_path: Path, capsys: Any) -> None:
    """As it is, by a function of the script, beside another program, and edited."""
    plain = DROPOUT.replace("{jit}", "@eqx.filter_jit").replace("{gradient}", "eqx.filter_value_and_grad")
    found = []
    for name, options in (("", []), (":make", []), ("", ["--beside", str(tmp_path / "train.py:make")])):
        script = written(tmp_path, plain) + name
        assert main(["plan", script, "--target", "cpu", "--json", *options]) == 0
        printed = capsys.readouterr()
        found.append(json.loads(printed.out)["candidates"])
        assert "no step is seen" not in printed.err
    edited = plain.replace("eqx.filter_value_and_grad", "jm.value_and_grad").replace(
        "@eqx.filter_jit", "@jm.jit_step\n    @eqx.filter_jit"
    )
    script = written(tmp_path, edited.replace("import equinox", "import jaxmem_callbacks as jm, equinox"))
    assert main(["plan", script.replace("scale is None and", ""), "--target", "cpu", "--json"]) == 0
    found.append(json.loads(capsys.readouterr().out)["candidates"])
    first, *others = ([(each["policy"], each["step_bytes"], each["flops"]) for each in some] for some in found)
    assert len(first) > 2
    assert all(other == first for other in others)


def test_a_step_of_this_library_in_another_file_keeps_its_jit(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "steps.py").write_text(
        "import jaxmem_callbacks as jm\nfrom flax import nnx\nimport jax.numpy as jnp\n"
        "@nnx.jit\ndef inner(model, x):\n"
        "    value, gradients = jm.nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)\n"
        "    nnx.update(model, jax_free(model, gradients))\n    return value\n"
        "def jax_free(model, gradients):\n    import jax\n"
        "    return jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradients)\n"
        "train_step = jm.jit_step(inner)\n"
    )
    text = "from flax import nnx\nimport jax.numpy as jnp\nfrom steps import train_step\n"
    script = written(tmp_path, text + "train_step(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((64, 8)))\n")
    assert main(["inspect", script]) == 0
    assert "Write donate_argnames=('model',) in the nnx.jit of inner." in capsys.readouterr().out.replace("\n", " ")


def test_a_step_that_runs_and_does_not_trace_is_told(tmp_path: Path, capsys: Any) -> None:
    text = TWO.replace(
        "    @jax.jit\n    def warm_up", "    jax.config.update('jax_disable_jit', True)\n    @jax.jit\n    def warm_up"
    )
    text = text.replace(
        "return jax.grad(loss)(params, batch)", "return jax.grad(loss)(params, batch) if batch.sum() > 0 else 0"
    )
    try:
        assert main(["inspect", written(tmp_path, text)]) == 2
    finally:
        jax.config.update("jax_disable_jit", False)
    assert (
        "jaxmem: warm_up takes a gradient, but does not trace (TracerBoolConversionError: " in capsys.readouterr().err
    )


def test_what_is_jitted_is_written_as_it_can_be_pasted(tmp_path: Path) -> None:
    head = (
        "import jax, jax.numpy as jnp\nfrom flax import nnx\n"
        + LAYERS
        + "\nfunction = lambda p, b: jax.grad(loss)(p, b)\n"
    )
    for function, expected in (
        ("jax.value_and_grad(loss)", "jm.value_and_grad(loss)"),
        ("function", ""),
        ("nnx.grad(lambda p, b: loss(p, b))", ""),  # whose counterpart is told in words
        (
            "jax.shard_map(function, mesh=jax.make_mesh((1,), ('x',)), in_specs=(jax.P(), jax.P()), out_specs=jax.P())",
            "",
        ),
    ):
        with as_written(written(tmp_path, f"{head}\njax.jit({function})(params, batch)\n")) as seen:
            reach_step(str(tmp_path / "train.py"), seen=seen)
        assert seen.step == expected


def test_a_framework_that_does_not_import_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "equinox.py").write_text("raise AttributeError('made for another JAX')")
    monkeypatch.syspath_prepend(str(broken))
    monkeypatch.delitem(sys.modules, "equinox")
    script = written(tmp_path, SCRIPTS["names from JAX"])
    with as_written(script) as seen:
        assert reach_step(script, seen=seen).step.name == "train_step"
