"""`jaxmem inspect`: a real script run up to its first step, its figures printed, nothing of it executed."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.cli.script import reach_step
from jaxmem_callbacks.planning.interrupts import command_interrupted
from jaxmem_callbacks.records.errors import ScriptError
from tests import forked
from tests.pasting import pasted
from tests.target_step import needs_compiler

TRAIN = '''
"""A training script as users write them."""
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxmem_callbacks as jm
import beside


def loss_fn(params, batch):
    hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, params["w"])
    return (hidden**2).mean()


def train_step(params, batch):
    loss, grads = jm.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def make():
    params = {"w": jnp.ones((beside.LAYERS, 32, 32)), "b": jnp.zeros(3)}
    return train_step, (params, jnp.ones((64, 32)))


def main():
    step = jm.jit_step(train_step, jm.StepPolicy(remat="full"))
    _, (params, batch) = make()
    with open(sys.argv[1], "w") as log:
        log.write("started ")
        try:
            params, loss = step(params, batch)
        except Exception:
            log.write("swallowed ")
        log.write("stepped ")


if __name__ == "__main__":
    main()
'''


@pytest.fixture
def script(tmp_path):
    (tmp_path / "beside.py").write_text("LAYERS = 6\n")
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    yield path
    sys.modules.pop("beside", None)


def write(tmp_path: Path, source: str) -> str:
    path = tmp_path / "other.py"
    path.write_text(textwrap.dedent(source))
    return str(path)


@pytest.mark.core
def test_a_script_is_stopped_at_its_first_step_and_told(script, capsys):
    log = script.parent / "log"
    assert main(["inspect", str(script), "--top", "3", "--args", str(log)]) == 0
    assert log.read_text() == "started "
    out = capsys.readouterr().out
    assert "What one step of train_step needs, in bytes on one device (source: the compiler for attached cpu)" in out
    assert "params    parameters" in out
    assert "Against the plain step, without remat and donation (policy: remat=full, donated 24.0 KiB)" in out
    assert f"{script}:14" in out
    table, _, peak = out.partition("The peak of ")
    assert "saved activations" in peak
    assert "Its largest buffers" in peak
    largest = peak.partition("Its largest buffers")[2]
    assert "transpose(jvp())/" in largest
    assert [word for word in ("jit(train_step)", "closed_call", "eval_jaxpr", "{1,0}") if word in largest] == []
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines() if line.startswith("  ")}
    assert rows["aliased"][:4] == ["0", "B", "24.0", "KiB"]
    plain, cheaper = float(rows["temporaries"][0]), float(rows["temporaries"][2])
    assert cheaper < plain


@pytest.mark.core
def test_a_named_function_gives_step_and_arguments_as_json(script, capsys):
    assert main(["inspect", f"{script}:make", "--json", "--top", "0"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["policy"]["remat"] == "none"
    assert told["step"]["alias_bytes"] == told["step"]["donated_bytes"] == 6 * 32 * 32 * 4 + 12
    assert told["plain_step"]["alias_bytes"] == 0
    assert [row["name"] for row in told["step"]["arguments"]] == ["params", "batch"]
    assert told["top_buffers"] == []


@pytest.mark.targets
def test_a_plain_step_that_fits_nowhere_is_an_answer_too(tmp_path, capsys):
    needs_compiler("v5e:1x1")
    source = """
        import jax, jax.numpy as jnp
        import jaxmem_callbacks as jm

        def train_step(params, batch):
            return jax.tree.map(lambda p: p * batch.sum(), params), 0.0

        def make():
            params = {name: jax.ShapeDtypeStruct((2**14, 2**16), jnp.float32) for name in ("a", "b")}
            return jm.jit_step(train_step), (params, jax.ShapeDtypeStruct((8,), jnp.float32))
    """
    assert main(["inspect", f"{write(tmp_path, source)}:make", "--target", "v5e:1x1", "--top", "0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert 8 * 2**30 <= told["step"]["step_bytes"] < 9 * 2**30
    assert told["plain_step"] is None
    assert "train_step does not fit into one device of v5e:1x1: its compiler needs" in told["plain_step_refused"]


def test_it_runs_as_a_command_of_its_own(script):
    log = script.parent / "log"
    command = [
        sys.executable,
        "-m",
        "jaxmem_callbacks.cli.main",
        "inspect",
        str(script),
        "--json",
        "--top",
        "1",
        "--args",
        str(log),
    ]
    done = forked.run(command, check=False, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["policy"]["remat"], len(told["top_buffers"])) == ("full", 1)
    assert log.read_text() == "started "


def test_a_script_without_a_step_is_told_what_is_missing_and_no_invented_name(tmp_path, capsys):
    for text, never in (
        ("print('no step here')", "a jitted function that takes a gradient. Jit the whole step."),
        ("step = jm.jit_step(lambda x: x)", "a step of jm.jit_step. Is the step of its loop made by it?"),
    ):
        script = write(tmp_path, f"import jaxmem_callbacks as jm; {text}")
        assert main(["inspect", script]) == 2
        error = capsys.readouterr().err
        assert f"{script} ran to its end and never called {never}" in error
        assert "train_step" not in error


NEVER_CALLED = {
    "a decorator": "@jax.jit\ndef update(state, batch):\n    return state - jax.grad(loss)(state, batch)\n",
    "of this library": "def update(state, batch):\n    return state - jm.grad(loss)(state, batch)\nrun = jm.jit_step(update)\n",
    "a loop over nothing": (
        "def update(state, batch):\n    return state - jax.grad(loss)(state, batch)\nrun = jax.jit(update)\n"
        "for each in []:\n    run(each, each)\n"
    ),
}


@pytest.mark.parametrize("kind", NEVER_CALLED)
def test_a_step_that_is_never_called_is_named_with_what_to_add(kind, tmp_path, capsys):
    head = "import jax, jax.numpy as jnp, jaxmem_callbacks as jm\ndef loss(p, x): return jnp.sum(jnp.tanh(x @ p))\n"
    script = write(tmp_path, head + NEVER_CALLED[kind])
    assert main(["inspect", script]) == 2
    error = capsys.readouterr().err
    line = (head + NEVER_CALLED[kind])[: (head + NEVER_CALLED[kind]).index("def update")].count("\n") + 1
    assert f"{script} ran to its end and never called its step: update (line {line}). Let it call it once" in error
    add = textwrap.dedent("    " + pasted("script.maker", error))
    arrays = "state = batch = jax.ShapeDtypeStruct((8, 8), 'float32')\n"
    script = write(tmp_path, head + NEVER_CALLED[kind] + arrays + add)
    assert main(["inspect", f"{script}:make"]) == 0
    assert "What one step of update needs" in capsys.readouterr().out


def test_a_setting_that_a_script_makes_too_late_here_is_told(script, capsys, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "0")
    script.write_text("import os\nos.environ['JAX_ENABLE_X64'] = '1'\n" + TRAIN)
    assert main(["inspect", str(script), "--args", str(script.parent / "log")]) == 0
    error = capsys.readouterr().err
    assert f"jaxmem: {script} sets JAX_ENABLE_X64, which JAX reads when it is imported" in error
    assert f"Type: JAX_ENABLE_X64=1 jaxmem inspect {script}\n" in error


def test_a_script_that_fails_shows_its_own_traceback(tmp_path, capsys):
    script = write(tmp_path, "def broken():\n    return {}['missing']\n\nbroken()\n")
    assert main(["inspect", script]) == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback (most recent call last):")
    assert "KeyError: 'missing'" in error
    assert "jaxmem_callbacks" not in error.partition("KeyError")[0]
    assert "its own traceback is above" in error


def test_a_script_that_does_not_parse_or_exits_by_itself_has_failed(tmp_path, capsys):
    script = write(tmp_path, "def broken(:\n")
    assert main(["inspect", script]) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        f'  File "{script}", line 1\n    def broken(:\n'
    )  # as Python itself shows it, no frame of ours
    assert "SyntaxError: " in error
    assert main(["inspect", write(tmp_path, "import sys; sys.exit(3)")]) == 1
    assert "ended by itself with exit code 3, before its first step" in capsys.readouterr().err
    assert main(["inspect", write(tmp_path, "import sys; sys.exit('no data here')")]) == 1
    assert "ended by itself with the words no data here, before its first step" in capsys.readouterr().err
    assert main(["inspect", write(tmp_path, "import sys; sys.exit()")]) == 2
    capsys.readouterr()


def test_scripts_and_names_that_do_not_exist(tmp_path, script):
    with pytest.raises(ScriptError, match=r"No such script: .*nothing\.py"):
        reach_step(str(tmp_path / "nothing.py"))
    with pytest.raises(ScriptError, match=r"has no function 'mak'\. Did you mean `make`\?"):
        reach_step(f"{script}:mak")
    wrong = write(tmp_path, "def make():\n    return 3\n")
    with pytest.raises(
        ScriptError, match=r"make\(\) returned int\. Expected a function and its arguments: \(train_step, \(state, "
    ):
        reach_step(f"{wrong}:make")


def test_what_python_sets_for_a_script_is_put_back(script, tmp_path):
    before = (sys.argv, list(sys.path), sys.modules["__main__"])
    reached = reach_step(str(script), [str(tmp_path / "log")])
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before
    assert reached.step.name == "train_step"
    assert set(reached.args[0]) == {"w", "b"}


def test_a_script_that_swallows_even_the_stop_is_stopped_again(tmp_path):
    source = """
        import jax.numpy as jnp
        import jaxmem_callbacks as jm
        step = jm.jit_step(lambda state, batch: (state + batch.sum(), 0.0))
        for _ in range(3):
            try:
                step(jnp.ones(4), jnp.ones(2))
            except BaseException:
                continue
    """
    assert len(reach_step(write(tmp_path, source)).args) == 2


def test_a_wrong_number_of_buffers_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["inspect", "train.py", "--top", "-1"])
    assert "expected a whole number of buffers" in capsys.readouterr().err


def test_a_target_that_is_none_is_refused_before_the_script_runs(capsys):
    assert main(["inspect", "a_script_that_is_never_read.py", "--target", "h101_sxm"]) == 2
    assert "Unknown target 'h101_sxm'. Did you mean `h100_sxm`?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_arguments_of_the_script_are_told_from_the_commands_own(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "train.py", "--target", "cpu", "--lr", "3"])
    told = capsys.readouterr().err
    assert "unrecognized arguments: --lr 3. A script's own come last: " in told
    assert f"jaxmem {command} train.py --target cpu -- --lr 3" in told


def lines_of_a_traced_thread():
    """The lines that a new thread runs under a trace of its own; fails where it does not end."""
    lines = []

    def trace(frame, *_):
        lines.append(frame.f_lineno)
        return trace

    def work():
        sys.settrace(trace)
        return sum(range(10))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive()
    return lines


def test_a_command_leaves_threads_that_can_be_traced(script, capsys):
    """A debugger's or a coverage tool's trace in the same process, as in a notebook, goes on after a command."""
    assert main(["inspect", "--top", "0", str(script), "--args", str(script.parent / "log")]) == 0
    capsys.readouterr()
    assert lines_of_a_traced_thread()


@pytest.mark.parametrize("is_early", [True, False], ids=["while it works", "as it ends"])
def test_an_interrupt_sent_to_a_thread_leaves_threads_that_can_be_traced(is_early):
    raised = []

    def work():
        try:
            with command_interrupted(lambda _: None) as interruption:
                sender = threading.Thread(target=interruption, args=(signal.SIGINT,))
                sender.start()
                while is_early:
                    time.sleep(0.001)
        except KeyboardInterrupt as error:
            raised.append(type(error))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join(20.0)
    assert not worker.is_alive()
    assert set(raised) <= {KeyboardInterrupt}, "nothing else comes out of it"
    assert lines_of_a_traced_thread()


TRAINS_NOTHING = {
    # Under jax.jit what changes in a module is lost, of which Flax gives no warning.
    "a module": (
        "from flax import nnx\nimport optax\nmodel = nnx.Linear(4, 4, rngs=nnx.Rngs(0))\n"
        "optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)\n"
        "@jax.jit\ndef update(model, optimizer, x):\n"
        "    optimizer.update(model, {gradient}(lambda m: jnp.sum(m(x)))(model))\n"
        "update(model, optimizer, jnp.ones((2, 4)))\n"
    ),
    "a dictionary": (
        "@jax.jit\ndef update(params, x):\n"
        "    params['w'] -= {gradient}(lambda p: jnp.sum(x @ p['w']))(params)['w']\n"
        "update(dict(w=jnp.ones((4, 4))), jnp.ones((2, 4)))\n"
    ),
    "a value alone": (
        "@jax.jit\ndef update(w, x):\n    value = jnp.sum(x @ w)\n    w -= {gradient}(lambda w: jnp.sum(x @ w))(w)\n"
        "    return value\nupdate(jnp.ones((4, 4)), jnp.ones((2, 4)))\n"
    ),
}
STEP_AFTER = (
    "@jax.jit\ndef train(w, x):\n    return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)\n"
    "train(jnp.ones((4, 4)), jnp.ones((2, 4)))\n"
)


@pytest.mark.parametrize("kind", TRAINS_NOTHING)
def test_a_step_whose_gradient_reaches_no_result_is_named(kind, tmp_path, capsys):
    head = "import jax, jax.numpy as jnp\n"
    gradient = "nnx.grad" if kind == "a module" else "jax.grad"
    text = head + TRAINS_NOTHING[kind].replace("{gradient}", gradient)
    assert main(["inspect", write(tmp_path, text)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxmem: update takes a gradient, and none of its results depends on it.")
    assert "trained nothing: no result of update depends on the gradient taken there" in error
    assert main(["inspect", write(tmp_path, text + STEP_AFTER)]) == 0
    assert "What one step of train needs" in capsys.readouterr().out
