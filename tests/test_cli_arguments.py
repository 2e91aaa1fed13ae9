"""What is typed for `jaxmem`: mistakes are answered at once and without JAX, and a script's own arguments reach it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmem_callbacks.cli.main import main
from tests.pasting import pasted

TRIES = 4
# Of the processor time that a start with `import jax` takes on this machine.
AT_MOST = 0.5
# Runs the command, then says which of these were imported.
PROGRAM = """
import sys
from jaxmem_callbacks.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as error:
    code = error.code
sys.stderr.write("\\nIMPORTED " + " ".join(name for name in ("jax", "numpy", "pydantic") if name in sys.modules))
sys.exit(code)
"""
MISTAKES = {
    "a command": (["plam", "train.py"], "unknown command 'plam'. Did you mean `plan`?"),
    "an option": (
        ["plan", "train.py", "--bugdet", "3GiB"],
        (
            "unrecognized arguments: --bugdet 3GiB. Did you mean `--budget`? A script's own come last: "
            "jaxmem plan train.py -- --bugdet 3GiB"
        ),
    ),
    "an option with one letter too many": (["plan", "--stepp", "train_step", "train.py"], "Did you mean `--step`?"),
    "an option with its value": (["inspect", "train.py", "--taget=h100_sxm"], "Did you mean `--target`?"),
    "an option that is the script's own": (
        ["plan", "train.py", "--learning-rate", "1e-3"],
        "unrecognized arguments: --learning-rate 1e-3. A script's own come last: jaxmem plan train.py -- --learning-rate 1e-3",
    ),
    "an option of a command without a script": (["oom", "run.log", "--jsonn"], "Did you mean `--json`?"),
    "an option of none": (["--vesrion"], "Did you mean `--version`?"),
    "no script": (["plan"], "expected SCRIPT"),
    "a script that is not there": (["plan", "trian.py"], "No such script: trian.py"),
    "a module that is not there": (["inspect", "-m", "nowhere.train"], "No module named nowhere"),
    "a budget": (["plan", "train.py", "--budget", "lots"], "--budget lots: expected a size with its unit"),
    "a budget without a unit": (["plan", "train.py", "--budget", "72"], "Type --budget 72GiB."),
    "a target": (["plan", "train.py", "--target", "h101_sxm"], "Did you mean `h100_sxm`?"),
    "a target's size": (["inspect", "train.py", "--target", "v5e:3x5x7"], "Target 'v5e:3x5x7'"),
    "a mesh": (["plan", "train.py", "--target", "h100_sxm:8", "--mesh", "data=3"], "does not make up the 8 devices"),
    "a mesh of one device": (["plan", "train.py", "--target", "h100_sxm", "--mesh", "data=2"], "is one"),
    "axes": (["plan", "train.py", "--target", "h100_sxm:8", "--mesh", "data"], "expected axes with sizes"),
    "a file to save": (["plan", "train.py", "--save", "plan.txt"], "expected a name that ends in"),
    "a picture": (["plan", "train.py", "--figure", "plan.gif"], "expected a name that ends in"),
    "resident bytes": (["plan", "train.py", "--resident", "2"], "--resident 2: expected a size with its unit"),
    "a key to search": (["plan", "train.py", "--search", "microbatch=2"], "Did you mean `microbatches`?"),
    "a program beside": (["plan", "train.py", "--beside", "eval.py"], "expected a file and the function in it"),
    "buffers": (["inspect", "train.py", "--top", "all"], "expected a whole number of buffers"),
    "a preset": (["presets", "ful_remat"], "Did you mean `full_remat`?"),
    "a preset's file": (["presets", "./nothing.yaml"], "the file cannot be read"),
    "a trace": (["simulate", "losses_in_a_lits"], "losses_in_a_list"),
    "a device's memory": (["simulate", "losses_in_a_list", "--device-memory", "80"], "80GiB"),
    "a log": (["oom", "nothing.log"], "nothing.log"),
    "runs to compare": (["compare", "a.json", "b.json"], "a.json"),
    "a run": (["report", "nothing"], "nothing"),
    "a run's empty name": (["report", ""], "got ''. Is a variable of the shell not set?"),
    "a page's empty name": (
        ["report", "runs", "-o", ""],
        "argument -o/--output: expected the path of a file or folder",
    ),
    "an empty name to compare": (["compare", "", "b.json"], "argument A: expected the path of a file or folder"),
    "a log's empty name": (["oom", ""], "argument LOG: expected the path of a file or folder"),
    "a trace's empty name": (["simulate", " "], "argument TRACE: expected the path of a file or folder"),
    "a plan's empty name": (
        ["plan", "train.py", "--save", ""],
        "argument --save: expected the path of a file or folder",
    ),
    "a script's empty name": (["inspect", ""], "argument SCRIPT: expected the path of a file or folder"),
    "buffers in wide digits": (["inspect", "train.py", "--top", "\uff12"], "expected a whole number of buffers"),
    "a step in wide digits": (["simulate", "x", "--defragment-at", "\uff12"], "expected a whole number of steps"),
    "axes in wide digits": (["plan", "train.py", "--target", "h100_sxm:8", "--mesh", "data=\uff18"], "expected axes"),
    "rows in wide digits": (["plan", "train.py", "--search", "batch.at_most=\uff12"], "batch.at_most"),
    "GPUs in wide digits": (["plan", "train.py", "--target", "h100_sxm:\uff12"], "expected a number of GPUs"),
    "a share in wide digits": (["plan", "train.py", "--budget", "0.\uff15"], "expected a size with its unit"),
}


def timed(program: str, *typed: str, cwd: Path) -> tuple[subprocess.CompletedProcess[str], float]:
    """How a program of Python's ended, and the processor seconds it took."""
    before = os.times()
    done = subprocess.run([sys.executable, "-c", program, *typed], cwd=cwd, capture_output=True, text=True, check=False)
    after = os.times()
    return done, after.children_user + after.children_system - before.children_user - before.children_system


@pytest.fixture(scope="module")
def of_jax(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Processor seconds of a start with `import jax`: the fewer of two, for the first may read its files from a disk."""
    folder = tmp_path_factory.mktemp("start")
    return min(timed("import jax", cwd=folder)[1] for _ in range(2))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_at_once(mistake: str, of_jax: float, tmp_path: Path) -> None:
    typed, answer = MISTAKES[mistake]
    (tmp_path / "train.py").write_text("raise SystemExit('the script ran')")
    shares: list[float] = []
    while len(shares) < TRIES and not (shares and min(shares) < AT_MOST):  # a busy machine's times vary
        done, spent = timed(PROGRAM, *typed, cwd=tmp_path)
        shares.append(spent / of_jax)
        words, _, imported = done.stderr.rpartition("\nIMPORTED")
        assert done.returncode == 2, done.stderr
        assert answer in words
        assert "the script ran" not in words
        assert imported == " "
    assert min(shares) < AT_MOST


TRAIN = """
{imports}
import jax, jax.numpy as jnp

def train(rows):
    @jax.jit
    def train_step(w, x):
        return w - jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
    train_step(jnp.ones((8, 8)), jnp.ones((rows, 8)))
    raise SystemExit("went on")

if __name__ == "__main__":
    {start}
"""
BY_ARGPARSE = TRAIN.replace("{imports}", "import argparse").replace(
    "{start}",
    "asked = argparse.ArgumentParser(); asked.add_argument('--steps', type=int, required=True); train(asked.parse_args().steps)",
)
BY_ARGV = TRAIN.replace("{imports}", "import sys").replace("{start}", "train(int(sys.argv[2]))")
BY_ABSL = TRAIN.replace(  # the flag may be defined again, for the test runs the script several times in one process
    "{imports}",
    "from absl import app, flags\nROWS = flags.DEFINE_integer('steps', None, '', required=True, allow_override=True)",
).replace("{start}", "app.run(lambda argv: train(ROWS.value))")
BY_WORDS = TRAIN.replace("{imports}", "import sys").replace(
    "{start}", "len(sys.argv) > 1 or sys.exit('usage: train.py --steps N'); train(int(sys.argv[2]))"
)


def jaxmem(*typed: str, folder: Path, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "jaxmem_callbacks", *typed]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "own", "ended"),
    [
        (BY_ARGPARSE, ["--steps", "24"], "train.py ended by itself with exit code 2, before its first step."),
        (BY_ABSL, ["--steps=24"], "train.py ended by itself with exit code 1, before its first step."),
        (
            BY_WORDS,
            ["--steps", "24"],
            "train.py ended by itself with the words usage: train.py --steps N, before its first step.",
        ),
        (BY_ARGV, ["--steps", "24"], "train.py failed before its first step; its own traceback is above."),
    ],
    ids=["argparse", "absl", "words", "argv"],
)
def test_a_script_without_its_arguments_ends_with_how_to_give_them(
    text: str, own: list[str], ended: str, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (in_folder / "train.py").write_text(text)
    assert main(["inspect", "train.py"]) == 1
    printed = capsys.readouterr().err
    how = "Its arguments follow a bare --, as in: jaxmem inspect train.py -- --steps 10\n"
    told = f"{ended} It was given no arguments of its own. {how}"
    assert printed.endswith(told)
    assert main(shlex.split(pasted("script.arguments", printed))[1:]) == 0
    assert "320 B" in capsys.readouterr().out
    assert main(["inspect", "train.py", "--top", "0", "--args", *own]) == 0
    assert "768 B" in capsys.readouterr().out
    if "argparse" in text:
        assert main(["inspect", "train.py", "--", "--stepz"]) == 1
        assert " It was given: --stepz. Its arguments follow" in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed", [["plan"], ["inspect", "--top", "3"], ["plan", "--target", "cpu", "--budget", "2GiB"]]
)
def test_what_is_typed_for_want_of_a_script_works(
    typed: list[str], in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TRAIN.replace("{imports}", "").replace("{start}", "train(24)")
    (in_folder / "package").mkdir()
    for place in (in_folder, in_folder / "package"):
        (place / "train.py").write_text(text)
    with pytest.raises(SystemExit):
        main(typed)
    for line in pasted("script.either", capsys.readouterr().err).split(", or "):
        assert main(shlex.split(line)[1:]) == 0
        assert "train_step" in capsys.readouterr().out


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in a folder, with a relative import and an ``__init__`` that jits."""
    inner = tmp_path / "recipes" / "small"
    inner.mkdir(parents=True)
    (tmp_path / "recipes" / "__init__.py").write_text("import jax\nfrom jax import jit\n")
    (inner / "__init__.py").write_text("from recipes import jit\n")
    (inner / "losses.py").write_text(
        "import jax.numpy as jnp\ndef loss(w, x):\n    return (jnp.tanh(x @ w) ** 2).mean()\n"
    )
    (inner / "train.py").write_text(
        BY_ARGPARSE.replace("import argparse", "import argparse, sys\nfrom . import jit\nfrom .losses import loss\n")
        .replace("@jax.jit", "@jit")
        .replace("lambda w: (jnp.tanh(x @ w) ** 2).mean()", "loss")
        .replace("(w)\n", "(w, x)\n")
        + "\ndef made():\n    return (lambda w, x: w - jax.grad(loss)(w, x)), (jnp.ones((8, 8)), jnp.ones((24, 8)))\n"
    )
    (inner / "__main__.py").write_text("from .train import train\ntrain(24)\n")
    return tmp_path


@pytest.mark.core
@pytest.mark.parametrize(
    "typed",
    [
        ["-m", "recipes.small.train", "--", "--steps", "24"],
        ["-m", "recipes.small.train", "--args", "--steps", "24"],
        ["-m", "recipes.small"],
        ["-m", "recipes.small.train:made"],
    ],
)
def test_a_module_is_reached_as_python_runs_it(typed: list[str], package: Path) -> None:
    done = jaxmem("inspect", "--top", "0", *typed, folder=package)
    assert done.returncode == 0, done.stderr
    assert "768 B" in done.stdout


def test_a_module_that_cannot_be_run_is_refused_with_what_to_type(package: Path) -> None:
    (package / "recipes" / "data").mkdir()
    for name, answer in (
        (
            "recipes",
            "-m recipes is a package without __main__. Name a module in it, as in: jaxmem plan -m recipes.train.",
        ),
        ("recipes.small.trian", f"No module named recipes.small.trian, looked for from {package} as `python -m "),
        ("recipes.small.train.loss", "Expected one as in: jaxmem plan -m package.train."),
        ("recipes.data", "is a package without __main__"),
        ("train.py", "A file is typed without -m: jaxmem plan train.py."),
    ):
        done = jaxmem("plan", "-m", name, folder=package)
        assert (done.returncode, done.stdout) == (2, "")
        assert answer in done.stderr
    both = jaxmem("plan", "-m", "recipes.small", "24", folder=package)
    assert (
        "expected one of SCRIPT and -m MODULE, got 24 and -m recipes.small. Arguments of the module come last: jaxmem plan "
        in (both.stderr)
    )
    assert both.stderr.endswith("-m recipes.small -- 24\n")


@pytest.mark.parametrize(
    "before", [("timeout", "100"), ("timeout", "--foreground", "100"), ("nohup",), ("setsid", "--wait")]
)
def test_it_runs_under_other_launchers(before: tuple[str, ...], tmp_path: Path) -> None:
    if shutil.which(before[0]) is None:
        pytest.skip(f"there is no {before[0]}")
    (tmp_path / "train.py").write_text(BY_ARGPARSE)
    done = jaxmem("inspect", "train.py", "--top", "0", "--", "--steps", "24", folder=tmp_path, before=before)
    assert done.returncode == 0, done.stderr
    assert "768 B" in done.stdout


def test_a_notebook_is_planned_by_its_code_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [
        ("markdown", ["# A title\n", "jm.jit_step is not code here"]),
        ("code", ["%matplotlib inline\n", "!pip install nothing\n", "import jax, jax.numpy as jnp\n", "jax.jit?"]),
        ("code", "%%bash\nls *"),
        (
            "code",
            [
                *("%%time\n", "files = !ls\n", "for _ in range(1):\n", "    %cd .\n", "x = 7 %3\n", "@jax.jit\n"),
                *("def train_step(w, x):\n", "    return w - jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)\n"),
                "display(x)",
            ],
        ),
        ("code", ["train_step(jnp.ones((8, 8)), jnp.ones((24, 8)))\n", "raise SystemExit('went on')"]),
    ]
    notebook = tmp_path / "train.ipynb"
    notebook.write_text(
        json.dumps({"nbformat": 4, "cells": [{"cell_type": kind, "source": text} for kind, text in cells]})
    )
    assert main(["inspect", str(notebook), "--top", "0"]) == 0
    assert "What one step of train_step needs" in capsys.readouterr().out
    notebook.write_text(json.dumps({"nbformat": 4, "cells": [{"cell_type": "code", "source": "a = 1\na.missing"}]}))
    assert main(["inspect", str(notebook)]) == 1
    assert 'train.ipynb", line 2, in <module>\n    a.missing\n' in capsys.readouterr().err
    notebook.write_text("{}")
    assert main(["inspect", str(notebook)]) == 1
    assert "ValueError: " in (error := capsys.readouterr().err)
    assert "train.ipynb is no notebook of Jupyter's form 4: KeyError: 'cells'" in error


def forget_package() -> None:
    for name in [each for each in sys.modules if each.split(".")[0] == "package"]:
        del sys.modules[name]


@pytest.mark.filterwarnings("ignore::ImportWarning")  # Python's own, of a script that imports relatively
@pytest.mark.parametrize(
    "line", ["from .parts import WIDTH", "from ..shared import WIDTH", "from package.sub.parts import WIDTH"]
)
@pytest.mark.parametrize("place", [".", "package", "package/sub", "elsewhere"])
def test_a_module_of_a_package_that_is_typed_by_its_path_is_named(
    line: str,
    place: str,
    in_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = TRAIN.replace("{imports}", f"{line}\nimport sys").replace(
        "{start}", "assert sys.argv[1:] == OWN\ntrain(WIDTH)"
    )
    forget_package()
    own = [] if place == "." else ["--note", "two words"]
    for folder in ("package/sub", "elsewhere"):
        (in_folder / folder).mkdir(parents=True)
    for file in ("package/__init__.py", "package/shared.py", "package/sub/__init__.py", "package/sub/parts.py"):
        (in_folder / file).write_text("WIDTH = 24\n")
    script = in_folder / "package/sub/train.py"
    script.write_text(text.replace("OWN", repr(own)))
    monkeypatch.chdir(in_folder / place)
    typed = os.path.relpath(script)
    assert main(["inspect", typed, *(["--", *own] if own else [])]) == 1
    printed = capsys.readouterr().err
    assert f"{typed} failed before its first step" in printed
    pasted_line = pasted("script.module" if place == "." else "script.module_elsewhere", printed)
    there, _, command = pasted_line.rpartition(" && ")
    forget_package()
    if there:
        monkeypatch.chdir(shlex.split(there)[1])
    assert main(shlex.split(command)[1:]) == 0
    assert "768 B" in capsys.readouterr().out


def test_another_import_that_fails_is_no_module_of_a_package(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (in_folder / "broken").mkdir()
    (in_folder / "broken/__init__.py").write_text("from .inner import nothing_like_it\n")
    (in_folder / "broken/inner.py").write_text("")
    lines = ("import nowhere_at_all", "from jax import nothing_like_it", "from json.nowhere import x", "import broken")
    for line in lines:
        (in_folder / "train.py").write_text(line + "\n")
        assert main(["inspect", "train.py"]) == 1
        assert capsys.readouterr().err.endswith("its own traceback is above.\n")
