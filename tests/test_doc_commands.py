"""Every shell line of a document is run by a test, or stands in a table with the reason why it is not.

Each `jaxmem ...` is run here, by a reader who has a training, two runs and the log of one that failed.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import io
import re
import shlex
import shutil
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from jaxmem_callbacks.cli.main import main
from tests.test_docs import DOCUMENTS, GATES, ROOT, blocks, pytest_lines
from tests.unedited_scripts import GAN

TRAIN = """
import jax.numpy as jnp, optax
import jaxmem_callbacks as jm

optimizer = optax.adam(1e-3)

def loss(params, batch):
    return jnp.square(jnp.tanh(jnp.tanh(batch["x"] @ params["w"]) @ params["v"])).mean()

def train_step(params, opt_state, batch):
    value, grads = jm.value_and_grad(loss)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, {"loss": value}

step = jm.jit_step(train_step)
params = {"w": jnp.ones((64, 256)), "v": jnp.ones((256, 64))}
opt_state, batch = optimizer.init(params), {"x": jnp.ones((64, 64))}
with jm.MemoryMonitor(jm.load_preset("monitor_only", monitor={"trace_steps": 8}), logdir="runs/a") as monitor:
    for i in range(8):
        params, opt_state, metrics = step(params, opt_state, batch)
        monitor(i, metrics)
"""
FAILED = "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes.\n"
# The documents name hardware that is not there; the tests' own CPU, of eight devices, answers in its place.
HERE = {"h100_sxm": "cpu", "h100_sxm:8": None}
NEEDS_NO_COMPILER = {"simulate"}

PAGES = [*DOCUMENTS, ROOT / "examples" / "README.md", ROOT / "CONTRIBUTING.md"]
# Which test runs a line that begins so.
RUN_BY = {
    "jaxmem ": "test_doc_commands.py::test_the_commands_of_the_documents_run",
    "pytest ": "test_docs.py::test_the_pytest_lines_of_a_gate_hold",
    # As long as a test has time for; that these flags exist is looked at below.
    "python train.py": "test_quickstart.py::test_the_quickstart_runs_as_it_stands",
    "python examples/lora.py ": "test_examples.py::test_frozen_weights_cost_neither_state_nor_donation",
    "python examples/mixed_precision.py ": "test_examples.py::test_both_precisions_are_told_with_one_float32_state",
    "python examples/nnx_transformer.py ": "test_examples.py::test_the_loss_falls",
    "python examples/plan_a_pod.py": "test_examples.py::test_a_pod_is_planned_on_a_laptop",
    "python examples/sharded_transformer.py ": "test_examples.py::test_each_device_keeps_its_share",
}
_DOWNLOADS = "installs from the network; `make check-wheel` does it, with each extra"
_ENVIRONMENTS = "makes environments from the network"
# Which are run by no test, and why.
NOT_RUN = {
    "pip install path/to/jaxmem_callbacks": _DOWNLOADS,
    "pip install tensorboard": "installs from the network; `make demo` and `make test` do it",
    "jaxmem targets --install tpu gpu": "installs from the network; test_cli_targets.py does it from wheels of its own",
    "tensorboard --logdir runs": "a server that does not end; test_tensorboard_page.py starts one and looks at its pages",
    "make demo": "test_demo.py runs what it calls, examples/demo.py",
    "make test": "what runs this test",
    "make lint format-check types": "what continuous integration runs beside the tests",
    "make quick": "a part of this suite",
    "make docs": "test_docs_site.py runs what it calls, mkdocs build --strict",
    "make core": "what continuous integration runs beside the tests",
    "make test-adapters": _ENVIRONMENTS,
    "make gallery": _ENVIRONMENTS,
    "make newest": _ENVIRONMENTS,
    "make mutants": "runs parts of this suite many times over",
    "make check-wheel": _ENVIRONMENTS,
}


def shell_lines() -> list[tuple[Path, str]]:
    """Every line of a shell block with the page that it stands on, without its comment."""
    lines = [(path, line) for path in PAGES for block in blocks(path.read_text(), "sh") for line in block.splitlines()]
    bare = [(path, re.sub(r"(^|\s+)#.*", "", line).rstrip()) for path, line in lines]
    return [(path, line) for path, line in bare if line]


def command_lines() -> list[tuple[str, ...]]:
    """Every ``jaxmem ...`` of a shell block, as its words."""
    lines = [line for _, line in shell_lines() if line.startswith("jaxmem ") and line not in NOT_RUN]
    words = [tuple(shlex.split(line)[1:]) for line in lines]
    return list(dict.fromkeys(words))


def test_every_shell_line_is_run_or_has_a_reason() -> None:
    lines = {line for _, line in shell_lines()}
    run_here = {line for line in lines if line.startswith(tuple(RUN_BY))} - NOT_RUN.keys()
    assert lines - run_here == NOT_RUN.keys(), "each is run by a test or has its reason, and no reason is left over"
    assert [start for start in RUN_BY if not any(line.startswith(start) for line in lines)] == []
    for place in RUN_BY.values():
        file, name = place.split("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), place
    fences = {name for path in PAGES for name in re.findall(r"^ *```(\w+)", path.read_text(), re.MULTILINE)}
    assert fences <= {"python", "sh", "text", "yaml"}, "a shell block of another name would be seen by nobody"


def test_the_lines_that_other_tests_run_are_those_that_they_look_for() -> None:
    assert {path for path, line in shell_lines() if line.startswith("pytest ")} == set(GATES)
    assert all(pytest_lines(path) for path in GATES)


def named_flags(path: Path) -> set[str]:
    """The flags that a script's parser is given, by its source."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    added = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    return {str(word.value) for call in added for word in call.args if isinstance(word, ast.Constant)}


def test_examples_know_the_flags_that_documents_give_them() -> None:
    lines = [shlex.split(line) for _, line in shell_lines() if line.startswith("python examples/")]
    assert lines
    for _, script, *words in lines:
        assert {word for word in words if word.startswith("--")} <= named_flags(ROOT / script), (script, words)
    assert named_flags(ROOT / "examples" / "recover.py") == {"--without"}


def test_make_knows_what_documents_ask_of_it() -> None:
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {word for _, line in shell_lines() if line.startswith("make ") for word in line.split()[1:]}
    asked |= {name for path in PAGES for name in re.findall(r"`make ([a-z-]+)[` ]", path.read_text())}
    assert asked - rules == set()


_PIP = re.compile(r"pip install ((?:--[\w-]+ )*)(?:\"([^\"]+)\"|([^\s`'\")]+))")


def packages_asked_for(path: Path) -> set[str]:
    """What a file has pip install, without versions."""
    found = {quoted or word for _, quoted, word in _PIP.findall(path.read_text())}
    return {re.split(r"[=<>]=|[<>]", each)[0] for each in found}


def test_packages_are_installed_by_names_that_an_index_has() -> None:
    """The project's own only from a checkout; the extras' packages by their own names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = [each for lines in project["project"]["optional-dependencies"].values() for each in lines]
    groups = [each for lines in project["dependency-groups"].values() for each in lines]
    names = {re.match(r"[\w-]+", each)[0] for each in (*project["project"]["dependencies"], *extras, *groups)}
    of_jax = set(importlib.metadata.metadata("jax").get_all("Provides-Extra", []))
    printing = [*(ROOT / "jaxmem_callbacks").rglob("*.py"), *(ROOT / "examples").glob("*.*")]
    asked = {each for path in (*PAGES, *printing) for each in packages_asked_for(path)}
    assert {re.split(r"[<>=]", each)[0] for each in extras} <= {
        each for path in PAGES for each in packages_asked_for(path)
    }
    for each in asked - {"path/to/jaxmem_callbacks", "."}:  # the folder, and the folder in which one is
        name, _, extra = each.removesuffix("]").partition("[")
        assert name in names, each
        assert not extra or (name == "jax" and (extra in of_jax or extra == "{extra}")), each


def on_this_machine(words: tuple[str, ...]) -> list[str]:
    """The same for what is attached."""
    if words[0] in NEEDS_NO_COMPILER:
        return list(words)
    found: list[str] = []
    for word in words:
        here = HERE.get(word, word)
        if here is None:
            found.pop()  # --target
        else:
            found.append(here)
    return found


def run(words: list[str]) -> tuple[int, str]:
    """The exit code, and what was printed; a redirection is obeyed."""
    words, file = (words[:-2], words[-1]) if words[-2:-1] == [">"] else (words, None)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(words)
    if file is not None:
        Path(file).write_text(out.getvalue())
    return code, out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the reader has."""
    place = tmp_path_factory.mktemp("reader")
    with contextlib.chdir(place):
        Path("train.py").write_text(TRAIN)
        Path("gan.py").write_text(textwrap.dedent(GAN))
        Path("train.log").write_text(FAILED)
        Path("mine.yaml").write_text("policy: {remat: full}\n")
        exec(compile(TRAIN, "train.py", "exec"), {"__name__": "__main__"})  # noqa: S102 - the reader trains
        for name in ("old", "new"):  # environments with a Python each
            python = Path(name, "bin", "python")
            python.parent.mkdir(parents=True)
            python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
            python.chmod(0o755)
        for name in ("b", "main", "branch"):
            shutil.copytree("runs/a", f"runs/{name}")
        assert run([*shlex.split("inspect train.py --target cpu --json"), ">", "base.json"])[0] == 0
        assert run([*shlex.split("plan train.py --target cpu --json"), ">", "base_plan.json"])[0] == 0
        shutil.copy("base.json", "now.json")
        shutil.copy("base_plan.json", "plan.json")
    return place


@pytest.mark.parametrize("words", command_lines(), ids=" ".join)
def test_the_commands_of_the_documents_run(words: tuple[str, ...], folder: Path) -> None:
    with contextlib.chdir(folder):
        code, printed = run(on_this_machine(words))
    assert code == 0
    assert printed or ">" in words
