"""Scripts that say nothing of this library: their step is found, and planned with the gradients that they take."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.cli.script import reach_step
from jaxmem_callbacks.cli.unedited import as_written
from jaxmem_callbacks.records.errors import ScriptError

LAYERS = """
def loss(params, batch):
    for weight in params:
        batch = jnp.tanh(batch @ weight) + batch
    return (batch**2).mean()

params, batch = [jnp.ones((32, 32)) + at for at in range(8)], jnp.ones((4096, 32))
"""
# Each ends by saying that it went on after its step, which none may.
SCRIPTS = {
    "a decorator of JAX": """
        import functools
        import jax, jax.numpy as jnp
        {layers}
        @jax.jit
        def initial(key):
            return [jax.random.normal(key, weight.shape) / 9 for weight in params]

        @functools.partial(jax.jit, donate_argnums=0)
        def train_step(params, batch):
            value, gradients = jax.value_and_grad(loss)(params, batch)
            return [p - 0.1 * g for p, g in zip(params, gradients)], value

        params, value = train_step(initial(jax.random.key(0)), batch)
        raise SystemExit("went on")
    """,
    "names from JAX": """
        import jax.numpy as jnp
        from jax import grad, jit
        {layers}
        gradient = grad(loss)

        def train_step(params, batch):
            return [p - 0.1 * g for p, g in zip(params, gradient(params, batch))]

        step = jit(train_step)
        for _ in range(3):
            params = step(params, batch)
        raise SystemExit("went on")
    """,
    "a method": """
        import jax, jax.numpy as jnp
        from functools import partial
        {layers}
        class Trainer:
            @partial(jax.jit, static_argnums=0)
            def train_step(self, params, batch):
                gradients, value = jax.grad(self.both, has_aux=True)(params, batch)
                return [p - 0.1 * g for p, g in zip(params, gradients)], value

            def both(self, params, batch):
                value = loss(params, batch)
                return value, value

        Trainer().train_step(params, batch)
        raise SystemExit("went on")
    """,
    "NNX": """
        import jax.numpy as jnp, optax
        from flax import nnx

        class Net(nnx.Module):
            def __init__(self, rngs):
                self.layers = nnx.List(nnx.Linear(32, 32, rngs=rngs) for _ in range(8))

            def __call__(self, x):
                for layer in self.layers:
                    x = nnx.tanh(layer(x)) + x
                return x

        @nnx.jit
        def train_step(model, optimizer, batch):
            @nnx.value_and_grad(has_aux=True)
            def gradient(model):
                value = (model(batch) ** 2).mean()
                return value, value

            (value, _), gradients = gradient(model)
            optimizer.update(model, gradients)
            return value

        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        nnx.cached_partial(train_step, model, optimizer)(jnp.ones((4096, 32)))
        raise SystemExit("went on")
    """,
    "Equinox": """
        import equinox as eqx, jax, jax.numpy as jnp

        @eqx.filter_jit(donate="all-except-first")
        def train_step(batch, model):
            value, gradients = eqx.filter_value_and_grad(loss)(model, batch)
            return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients)), value

        def loss(model, batch):
            return (jax.vmap(model)(batch) ** 2).mean()

        model = eqx.nn.MLP(32, 32, 32, 8, key=jax.random.key(0))
        train_step(jnp.ones((4096, 32)), model)
        raise SystemExit("went on")
    """,
}
INSTEAD = {
    "a decorator of JAX": "jm.value_and_grad in place of jax.value_and_grad",
    "names from JAX": "jm.grad in place of jax.grad",
    "a method": "jm.grad in place of jax.grad",
    "NNX": "jm.nnx.value_and_grad in place of nnx.value_and_grad",
    "Equinox": "jm.value_and_grad in place of eqx.filter_value_and_grad",
}


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text).replace("{layers}", LAYERS))
    return str(path)


def jax_functions() -> list[Any]:
    return [
        getattr(module, name) for module in (jax, nnx, eqx) for name in dir(module) if "grad" in name or "jit" in name
    ]


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_step_is_found_and_planned_as_it_is_written(kind: str, tmp_path: Path, capsys: Any) -> None:
    script = written(tmp_path, SCRIPTS[kind])
    before = jax_functions()
    assert main(["plan", script, "--target", "cpu", "--budget", "2MiB"]) in (0, 2)
    told = capsys.readouterr().out
    assert "Plan of train_step for attached" in told
    assert "Remat was not tried" not in told
    assert "full" in told.partition("What makes its peak")[0], "remat is among what was compiled"
    if "To train so:" in told:
        assert f"    import jaxmem_callbacks as jm\n    # in the step: {INSTEAD[kind]}\n    step = jm.jit_step(" in told
    assert jax_functions() == before


def test_what_is_planned_is_what_the_edited_script_compiles(tmp_path: Path, capsys: Any) -> None:
    plain = SCRIPTS["a decorator of JAX"]
    edited = plain.replace("import functools\n", "import functools, jaxmem_callbacks as jm\n", 1)
    edited = edited.replace("jax.value_and_grad", "jm.value_and_grad").replace(
        "value = train_step(", "value = jm.jit_step(train_step)("
    )
    found = []
    for text in (plain, edited):
        assert main(["plan", written(tmp_path, text), "--target", "cpu", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["candidates"])
    ours, theirs = ([(each["policy"], each["step_bytes"], each["flops"]) for each in some] for some in found)
    assert ours == theirs
    assert len(ours) > 2


TWO = """
    import jax, jax.numpy as jnp
    {layers}
    @jax.jit
    def warm_up(params, batch):
        return jax.grad(loss)(params, batch)

    @jax.jit
    def finetune(params, batch):
        return loss(params, batch)

    warm_up(params, batch)
    finetune(params, batch)
    print("went on")
"""


def test_one_of_several_is_named(tmp_path: Path, capsys: Any) -> None:
    script = written(tmp_path, TWO)
    for options, name in (([], "warm_up"), (["--step", "finetune"], "finetune")):
        assert main(["inspect", script, "--json", *options]) == 0
        assert json.loads(capsys.readouterr().out)["account"]["name"] == name
    assert main(["inspect", script, "--step", "finetun"]) == 2
    printed = capsys.readouterr()
    assert "went on" in printed.out
    assert (
        "never called a step named 'finetun'. Did you mean `finetune`? Jitted functions that it called: warm_up, finetune."
        in (printed.err)
    )


def test_a_script_whose_gradients_are_not_jitted_says_what_it_called(tmp_path: Path) -> None:
    script = written(tmp_path, TWO.replace("jax.grad(loss)(params, batch)", "loss(params, batch)"))
    with as_written(script) as seen, pytest.raises(ScriptError) as refused:
        reach_step(script, seen=seen)
    assert (
        "never called a jitted function that takes a gradient. Jitted functions that it called: warm_up, finetune."
        in (str(refused.value))
    )
    assert "--step NAME" in str(refused.value)


def test_a_gradient_outside_every_jit_is_told_at_once_and_one_inside_is_not(tmp_path: Path, capsys: Any) -> None:
    eager = TWO.replace(
        "warm_up(params, batch)\n    finetune", "[jax.grad(loss)(params, batch) for _ in range(3)]\n    finetune"
    )
    assert main(["inspect", written(tmp_path, eager)]) == 2
    error = capsys.readouterr().err
    assert (
        error.count("jaxmem: a gradient is taken where no step is seen: not in a function that the script itself calls")
        == 1
    )
    assert "never called a jitted function that takes a gradient. Jitted functions that it called: finetune." in error
    assert main(["plan", written(tmp_path, TWO), "--target", "cpu"]) == 0
    assert "no step is seen" not in capsys.readouterr().err


def test_a_step_of_an_edited_script_is_named_too(tmp_path: Path) -> None:
    text = TWO.replace("jax.numpy as jnp", "jax.numpy as jnp, jaxmem_callbacks as jm").replace(
        "@jax.jit", "@jm.jit_step"
    )
    script = written(tmp_path, text)
    assert reach_step(script).step.name == "warm_up"
    assert reach_step(script, step="finetune").step.name == "finetune"


def test_a_step_that_fails_in_its_trace_fails_as_python_shows_it(tmp_path: Path, capsys: Any) -> None:
    script = written(tmp_path, TWO.replace("jax.grad(loss)(params, batch)", "jax.grad(loss)(params, batch[:, :3])"))
    assert main(["inspect", script]) == 1
    assert "TypeError: dot_general requires contracting dimensions" in capsys.readouterr().err


def test_what_packages_call_stays_theirs_and_an_edited_script_is_left_alone(tmp_path: Path) -> None:
    plain, edited = tmp_path / "plain.py", tmp_path / "edited.py"
    plain.write_text("import jax")
    edited.write_text("from jaxmem_callbacks import jit_step")
    real = jax.value_and_grad
    with as_written(str(edited)):
        assert jax.value_and_grad is real
    with as_written(str(plain)) as seen:
        assert jax.value_and_grad is not real
        optax_like = {"__name__": "somewhere", "jax": jax}
        code = compile("def call(f): return jax.value_and_grad(f)", "/lib/site-packages/somewhere.py", "exec")
        exec(code, optax_like)  # noqa: S102 - a file that is not there
        assert optax_like["call"](lambda x: x * x)(3.0)[1] == 6
        assert not seen.instead
        assert jax.grad(lambda x: x * x)(3.0) == 6
        assert seen.instead == {"jax.grad": "jm.grad"}
        # Nor is this library's own use of JAX.
        assert jm.value_and_grad(lambda x: x * x)(3.0)[1] == 6
    assert jax.value_and_grad is real


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("is_decorator", [False, True])
def test_gradients_are_those_of_each_framework(tmp_path: Path, *, has_aux: bool, is_decorator: bool) -> None:
    (tmp_path / "plain.py").write_text("")

    def loss(model: Any, x: Any) -> Any:
        value = (model(x) ** 2).mean()
        return (value, x) if has_aux else value

    x = jnp.ones((4, 3))
    mlp = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    cases: list[tuple[Any, tuple[str, str], Any, Any]] = [
        (nnx, ("grad", "value_and_grad"), nnx.Linear(3, 2, rngs=nnx.Rngs(0)), loss),
        (eqx, ("filter_grad", "filter_value_and_grad"), mlp, lambda model, x: loss(jax.vmap(model), x)),
    ]
    for module, names, model, function in cases:
        for name in names:

            def found(module: Any = module, name: str = name, model: Any = model, function: Any = function) -> Any:
                make = getattr(module, name)
                taken = make(has_aux=has_aux)(function) if is_decorator else make(function, has_aux=has_aux)
                return jax.tree.leaves(taken(model, x))

            theirs = found()
            with as_written(str(tmp_path / "plain.py")) as seen:
                ours = found()
            assert len(seen.instead) == 1
            assert len(theirs) == len(ours)
            assert all((a == b).all() for a, b in zip(theirs, ours, strict=True))


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
        layers = [eqx.nn.Linear(32, 32, key=key) for key in jax.random.split(jax.random.key(0), 8)]
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
    assert "Write nnx.jit(inner, donate_argnames=('model',))" in capsys.readouterr().out.replace("\n", " ")


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
    head = "import jax, jax.numpy as jnp\n" + LAYERS + "\nfunction = lambda p, b: jax.grad(loss)(p, b)\n"
    for function, expected in (
        ("jax.value_and_grad(loss)", "jm.value_and_grad(loss)"),
        ("function", ""),
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
