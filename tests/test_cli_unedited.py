"""Scripts that say nothing of this library: their step is found, and planned with the gradients that they take."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.jit_hook import as_written
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.cli.script import reach_step
from jaxmem_callbacks.cli.source import is_unedited
from jaxmem_callbacks.records.errors import ScriptError
from tests import forked
from tests.pasting import pasted, run
from tests.processes import EMITTED_QUICKLY
from tests.target_step import needs_compiler
from tests.unedited_scripts import SCRIPTS, TWO, written

INSTEAD = {
    "a decorator of JAX": "jm.value_and_grad in place of jax.value_and_grad",
    "names from JAX": "jm.grad in place of jax.grad",
    "a method": "jm.grad in place of jax.grad",
    "NNX": "jm.nnx.value_and_grad in place of nnx.value_and_grad",
    "Equinox": "jm.eqx.value_and_grad in place of eqx.filter_value_and_grad",
}


def jax_functions() -> list[Any]:
    return [
        getattr(module, name) for module in (jax, nnx, eqx) for name in dir(module) if "grad" in name or "jit" in name
    ]


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_step_is_found_and_planned_as_it_is_written(kind: str, tmp_path: Path, capsys: Any) -> None:
    script = written(tmp_path, SCRIPTS[kind])
    before = jax_functions()
    assert main(["plan", script, "--target", "cpu", "--budget", "2MiB"]) in (0, 3)
    told = capsys.readouterr().out
    assert "Plan of train_step for the attached devices" in told
    assert "Remat was not tried" not in told
    assert "full" in told.partition("What makes its peak")[0], "remat is among what was compiled"
    if "To train so:" in told:
        word = INSTEAD[kind].rpartition(" ")[2] if kind != "names from JAX" else "grad"
        line = next(at for at, text in enumerate(Path(script).read_text().splitlines(), 1) if f"{word}(" in text)
        assert f"    import jaxmem_callbacks as jm\n    # {script}:{line}: {INSTEAD[kind]}\n    " in told
        assert re.search(r"\n    ([\w.]+) = jm\.jit_step\(\1, ", told) or kind == "NNX", "around what the script calls"
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


def test_one_of_several_is_named(tmp_path: Path, capsys: Any) -> None:
    script = written(tmp_path, TWO)
    for options, name in (([], "warm_up"), (["--step", "finetune"], "finetune")):
        assert main(["inspect", script, "--json", *options]) == 0
        assert json.loads(capsys.readouterr().out)["account"]["name"] == name
    assert main(["inspect", script, "--step", "finetun"]) == 2
    printed = capsys.readouterr()
    assert "went on" in printed.out
    told = "jaxmem: warm_up takes a gradient; the script goes on to finetun."
    assert printed.err.startswith(told), "said at once: training to the end may take days"
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
    assert re.search(
        r"never called its step: warm_up \(line \d+\)\. Jitted functions that it called: finetune\.", error
    )
    assert main(["plan", written(tmp_path, TWO), "--target", "cpu"]) == 0
    assert "no step is seen" not in capsys.readouterr().err


EAGER = """
import jax, jax.numpy as jnp, optax

@jax.jit
def loss(w, x):
    return jnp.square(jnp.tanh(x @ w)).mean()

@jax.jit
def mean(x):
    return x.mean()

optimizer = optax.adam(1e-3)
w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
state = optimizer.init(w)
for _ in range(2):
    value, gradients = jax.value_and_grad(loss)(w, x)  # here
    updates, state = jax.jit(optimizer.update)(gradients, state)
    w = optax.apply_updates(w, updates)
"""


@pytest.mark.parametrize("own", ["", "mean(x)"])
def test_a_gradient_of_a_jitted_loss_is_told_by_its_line_and_only_the_scripts_own_functions(
    own: str, tmp_path: Path, capsys: Any
) -> None:
    script = written(tmp_path, EAGER + own)
    line = next(at for at, text in enumerate(Path(script).read_text().splitlines(), 1) if "# here" in text)
    assert main(["inspect", script]) == 2
    at_once, _, at_end = capsys.readouterr().err.partition(". The script goes on")
    assert at_once.endswith(f"train.py:{line})")
    assert re.search(rf"took its gradient outside of jit, at \S*train\.py:{line}\.", at_end)
    assert "update_fn" not in at_end
    assert "train_step" not in at_end
    assert ("--step NAME" in at_end) == ("Jitted functions that it called: mean." in at_end) == bool(own)


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
        assert not seen.edits
        assert jax.grad(lambda x: x * x)(3.0) == 6
        assert [(each.old, each.new) for each in seen.edits] == [("jax.grad", "jm.grad")]
        assert all(
            Path(__file__).read_text().splitlines()[int(each.where.rpartition(":")[2]) - 1].count("jax.grad(")
            for each in seen.edits
        )
        # Nor is this library's own use of JAX.
        assert jm.value_and_grad(lambda x: x * x)(3.0)[1] == 6
    assert jax.value_and_grad is real


NAMED_ALIKE = {
    "a function": "import jaxmem_callbacks as jm\ndef jit_step(f): return jax.jit(f)\nmake = jit_step",
    "a method": "import jaxmem_callbacks as jm\nclass T:\n    def jit_step(self, f): return jax.jit(f)\nmake = T().jit_step",
    "another module's": "from jaxmem_callbacks import MemoryMonitor\nfrom types import ModuleType\nother = ModuleType('other')\n"
    "other.apply_policy = jax.jit\nmake = other.apply_policy",
    "a variable": "import jaxmem_callbacks.records as ours\napply_policy = jit_step = jax.jit\nmake = apply_policy",
}


@pytest.mark.parametrize("kind", NAMED_ALIKE)
def test_a_users_own_function_of_our_name_is_no_step_of_ours(kind: str, tmp_path: Path) -> None:
    text = f"import jax\n{NAMED_ALIKE[kind]}\ndef f(w, x): return w - jax.grad(lambda w: (w * x).sum())(w)\nmake(f)(1.0, 2.0)\n"
    script = written(tmp_path, text)
    with as_written(script) as seen:
        assert reach_step(script, seen=seen).step.name == "f"


@pytest.mark.parametrize(
    "text",
    [
        "import jaxmem_callbacks as jm\nstep = jm.jit_step(f)",
        "import jaxmem_callbacks\n@jaxmem_callbacks.jit_step\ndef f(): ...",
        "from jaxmem_callbacks import jit_step as under\nstep = under(f, 'full_remat')",
        "import jaxmem_callbacks.programs.steps.step as s\ns.jit_step(f)",
        "def make(f):\n    import jaxmem_callbacks as jm\n    return jm.jit_step(f, 'full_remat')",
    ],
)
def test_a_step_of_ours_is_seen_by_whatever_name(text: str, tmp_path: Path) -> None:
    script = tmp_path / "edited.py"
    script.write_text(text)
    assert not is_unedited(script)


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
            assert len(seen.edits) == 1
            assert len(theirs) == len(ours)
            assert all((a == b).all() for a, b in zip(theirs, ours, strict=True))


ATTENTION = """
import jax, jax.numpy as jnp

def loss(weights, x):
    heads = (x @ weights).reshape(2, 64, 4, 64)
    return jax.nn.dot_product_attention(heads, heads, heads, implementation="cudnn").astype(jnp.float32).sum()

@jax.jit
def train_step(weights, x):
    return weights - jax.grad(loss)(weights, x)

weights = jnp.ones((256, 256), jnp.bfloat16)
weights = train_step(weights, jnp.ones((128, 256), jnp.bfloat16))
raise SystemExit("went on")
"""
INSTEAD_OF_CUDNN = (
    "it asks for a cuDNN kernel, and cuDNN is not there to choose one. Use implementation='xla' of "
    "jax.nn.dot_product_attention for the estimate."
)


@pytest.mark.targets
@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_a_step_with_a_kernel_of_cudnn_is_refused_with_what_to_write(command: str, tmp_path: Path, capsys: Any) -> None:
    needs_compiler("h100_sxm")
    assert main([command, written(tmp_path, ATTENTION), "--target", "h100_sxm"]) == 2
    refused = capsys.readouterr().err
    assert refused == f"jaxmem: train_step cannot be compiled for an absent cuda: {INSTEAD_OF_CUDNN}\n"


@pytest.mark.parametrize("text", [ATTENTION, ATTENTION.replace("@jax.jit", "")], ids=["the step", "before any step"])
def test_a_script_that_fails_for_want_of_cudnn_shows_where_and_says_what_to_write(
    text: str, tmp_path: Path, capsys: Any
) -> None:
    assert main(["plan", written(tmp_path, text)]) == 1
    error = capsys.readouterr().err
    assert 'implementation="cudnn")' in error, "the script's own line"
    assert f"failed before its first step: {INSTEAD_OF_CUDNN} Its own traceback is above." in error


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "jax.distributed.initialize()",
            "jax.distributed.initialize() found no cluster here, and a plan needs none. Put",
        ),
        (
            "jax.make_mesh((4096,), ('data',))",
            "its mesh has more devices than are here, and a plan needs none of them. Put",
        ),
    ],
)
def test_a_script_for_a_pod_is_told_how_it_is_planned_elsewhere(
    line: str, why: str, tmp_path: Path, capsys: Any
) -> None:
    script = written(
        tmp_path,
        f"""
        import jax, jax.numpy as jnp

        def step(w, x):
            value, gradient = jax.value_and_grad(lambda w, x: (jnp.tanh(x @ w) ** 2).mean())(w, x)
            return w - gradient, value

        def planned():
            return step, (jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32))

        if __name__ == "__main__":
            {line}
    """,
    )
    # In a process of its own: a cluster is looked for before anything of JAX is used.
    command = [sys.executable, "-m", "jaxmem_callbacks.cli.main", "plan", script]
    ran = forked.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    assert f"failed before its first step: {why}" in ran.stderr
    assert "name it behind the script: SCRIPT.py:function" in ran.stderr
    assert main(["plan", f"{script}:planned"]) == 0
    assert capsys.readouterr().out.startswith("Plan of step for the attached devices")


METHOD = """
import equinox as eqx
import jax
import jax.numpy as jnp

class Model(eqx.Module):
    layers: list
    def __init__(self, key):
        self.layers = [eqx.nn.MLP(64, 64, 256, 1, key=each) for each in jax.random.split(key, 3)]
    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.sum()

class Trainer(eqx.Module):
    rate: float
    @staticmethod
    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)
    @eqx.filter_jit(donate="all-except-first")
    def make_step(self, model, x):
        loss, gradients = eqx.filter_value_and_grad(self.loss)(model, x)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -self.rate * g, gradients)), loss

model, trainer = Model(jax.random.key(0)), Trainer(1e-3)
for at in range(3):
    model, loss = trainer.make_step(model, jnp.ones((512, 64)) * (at + 1) / 64)
    print(float(loss))
"""


def test_a_method_of_an_equinox_module_is_wrapped_where_it_is_defined(tmp_path: Path, capsys: Any) -> None:
    """Equinox hands the call on, so that its own frame is between the script and the step."""
    script = written(tmp_path, METHOD)
    assert main(["plan", script, "--budget", "4MiB", "--search", "microbatches=4"]) in (0, 3)
    told = capsys.readouterr().out
    (place, line) = re.search(
        r"# above \S*train\.py:(\d+)\n +(Trainer\.make_step = jm\.jit_step\(.*\))\n", told
    ).groups()
    lines = METHOD.replace("eqx.filter_value_and_grad", "jm.eqx.value_and_grad").splitlines()
    lines[int(place) - 1 : int(place) - 1] = ["import jaxmem_callbacks as jm", line]
    both = "\n".join(f"exec({text!r}, {{'__name__': '__main__'}})" for text in (METHOD, "\n".join(lines)))
    environment = os.environ | EMITTED_QUICKLY
    done = forked.run([sys.executable, "-c", both], env=environment, capture_output=True, text=True, check=True)
    losses = [float(each) for each in done.stdout.split()]
    assert len(losses) == 6
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-4)


DECORATED = """
import functools, jax, jax.numpy as jnp

def timed(function):
    @functools.wraps(function)
    def wrapper(*args):
        result = function(*args)
        print("called")
        return result
    return wrapper

def loss(params, batch):
    for w in params:
        batch = batch + jnp.tanh(batch @ w)
    return jnp.mean(batch**2)

@timed
@jax.jit
def train_step(params, batch):
    return [p - 0.1 * g for p, g in zip(params, jax.grad(loss)(params, batch))]

params = [jnp.eye(64) for _ in range(6)]
for _ in range(3):
    params = train_step(params, jnp.ones((1024, 64)))
"""


def test_a_decorator_above_a_jit_is_not_jitted(tmp_path: Path, capsys: Any) -> None:
    """Around it, a line would run its own work once, in the trace."""
    assert main(["plan", written(tmp_path, DECORATED), "--budget", "2MiB", "--search", "microbatches=4"]) in (0, 3)
    told = capsys.readouterr().out
    assert "jm.jit_step(" not in told.partition("To train so:")[2]
    assert "# Wrap the jit of train_step by jm.jit_step with this policy, where it is made" in told


@pytest.mark.parametrize(
    ("saved", "key"), [("", "train.policy"), ("plan.yaml", "train.preset"), ("plan.json", "train.load_plan")]
)
def test_the_policy_of_a_step_without_a_name_is_read_as_it_was_saved(
    saved: str, key: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    save = ["--save", saved] if saved else []
    microbatches = ["--budget", "2MiB", "--search", "microbatches=4"]
    assert main(["plan", written(tmp_path, DECORATED), *microbatches, *save]) == 0
    told = capsys.readouterr().out
    lines = textwrap.dedent(told.partition("To train so:\n")[2].partition("# Wrap the jit")[0])
    assert all(pasted(each, told) in lines for each in ("train.named", key))
    policy = run(lines)["policy"]
    edited = DECORATED.replace("@jax.jit", "@(lambda step: jm.jit_step(jax.jit(step), policy))")
    step, plain = run(edited.replace("jax.grad", "jm.grad"), jm=jm, policy=policy), run(DECORATED)
    assert jm.step_memory(step["train_step"].__wrapped__, step["params"], jnp.ones((1024, 64))).step_bytes < 2 * 2**20
    for ours, theirs in zip(step["params"], plain["params"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
