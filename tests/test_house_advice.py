"""The sixth promise: no line to paste stands outside the table of advice, and each row names tests that paste it.

A line to paste is code with a call, a command, a setting of the environment, or an option that a sentence asks for. The values
that an error expects of an argument (``segments=3``) are the argument's form, not a line: its own test matches that text.
What a docstring or the help of an option says is documentation: the tests of the docs run it.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxmem_callbacks.records.advice import ADVICE, TABLE, Advice, Proof

HERE = Path(__file__).resolve().parent.parent
PACKAGE = HERE / "jaxmem_callbacks"
THE_TABLE = "records/advice.py"
TRIGGERS = 3
LINE = re.compile(
    r"""
    \b(?:jm|jax|jnp|np|numpy|nnx|nn|flax|eqx|optax|ocp|orbax|keras|functools|os|gc|pl|pltpu)
    (?:\.\w+)+\([^)] |                                             # a call of a library; with () it is a function's name
    \bwith\ jm\. | \}\([^)] |                                      # a context manager; a call of what a field names
    ^\s*[a-z_]\w*(?:,\ ?\w+)*\ =\ \S |                             # a statement
    \bjaxmem\ [a-z]+\ [-A-Z{] | `jaxmem\ [^`]* | [Tt]ype\ jaxmem\b | \bjaxmem\ [a-z]+\ --\w |   # a command of ours
    \bpip\ install\b | \bexport\ [A-Z{] | \bunset\ [A-Z{] |         # of others
    \b[A-Z][A-Z0-9]*_[A-Z0-9_]+=[\w"'{-] |                          # a setting
    ^--[a-z][\w-]*\ \{ |                                           # an option
    \b(?:[Tt]ype|[Aa]dd|[Nn]ame|[Pp]ass|[Gg]ive|[Uu]se|[Tt]ry|[Ww]rite|[Ss]ay|[Ll]eave\ out|by|as\ in)\b[^.]*?\s--[a-z]
    """,
    re.VERBOSE | re.MULTILINE,
)
_SEARCHED = re.compile(r"\\[dwsb]|\(\?")  # a regular expression: it is searched for, not printed
_HELP = ("help", "description", "epilog", "usage", "metavar")


def printed_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each string that may be printed, fields as ``{name}``; no docstrings and no help of options."""
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside.add(id(node.value))
        elif isinstance(node, ast.keyword) and node.arg in _HELP:
            inside |= {id(each) for each in ast.walk(node.value)}
        elif isinstance(node, ast.FunctionDef) and node.name == "__repr__":
            inside |= {id(each) for each in ast.walk(node)}
        elif isinstance(node, ast.JoinedStr) and id(node) not in inside:
            inside |= {id(each) for each in node.values}
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(_part(value) for value in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _part(value: ast.expr) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    assert isinstance(value, ast.FormattedValue)
    is_named = isinstance(value.value, ast.Name | ast.Attribute)
    return f"{{{ast.unparse(value.value)}}}" if is_named else "{}"


def lines_to_paste(tree: ast.Module) -> list[tuple[int, str]]:
    """Those of them that hold a line to paste."""
    return [(number, text) for number, text in printed_texts(tree) if LINE.search(text) and not _SEARCHED.search(text)]


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Each use of a row."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "advise":
            yield node


@functools.cache
def package() -> dict[str, ast.Module]:
    found = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: ast.parse(path.read_text()) for name, path in found.items() if name != THE_TABLE}


def outside(trees: dict[str, ast.Module], allowed: dict[str, int]) -> list[str]:
    """Lines to paste of files that hold more of them outside the table than is allowed."""
    found = {name: lines_to_paste(tree) for name, tree in trees.items()}
    return [
        f"{name}:{number}: {text}"
        for name, lines in found.items()
        if len(lines) > allowed.get(name, 0)
        for number, text in lines
    ]


def test_no_line_to_paste_stands_outside_the_table():
    assert not outside(package(), {}), f"give each a row of {THE_TABLE}, or word it as a question"


def test_a_line_outside_the_table_is_found():
    trees = {"cli/a.py": ast.parse('print("Type jm.plan(step, state)")'), "cli/b.py": ast.parse('print("nothing")')}
    assert outside(trees, {}) == ["cli/a.py:1: Type jm.plan(step, state)"]
    assert not outside(trees, {"cli/a.py": 1})


def test_a_row_is_filled_in_with_its_own_fields():
    row = Advice(key="a", trigger="b", text="{step} = jm.jit_step({step}, {{{name}}})", proof=Proof.TRAINED, tests=())
    assert row.filled(step="f", name="'x'") == "f = jm.jit_step(f, {'x'})"
    assert re.fullmatch(row.pattern, "f = jm.jit_step(f, {'x'})")
    assert not re.fullmatch(row.pattern, "f = jm.jit_step(g, {'x'})"), "a field that comes twice is the same twice"
    with pytest.raises(TypeError, match=r"The advice a has the fields \['name', 'step'\], got \['step'\]"):
        row.filled(step="f")


def test_each_row_is_printed_with_its_fields():
    used: set[str] = set()
    for name, tree in package().items():
        for call in calls(tree):
            where = f"{name}:{call.lineno}"
            key = call.args[0]
            assert isinstance(key, ast.Constant), f"{where}: name the row by a literal"
            assert key.value in ADVICE, f"{where}: {key.value!r} is no row"
            given = {word.arg for word in call.keywords}
            assert given == ADVICE[str(key.value)].fields, f"{where}: {key.value} has other fields"
            used.add(str(key.value))
    assert used == ADVICE.keys(), "rows that nothing prints"
    assert len(TABLE) == len(ADVICE), f"twice: {[key for key, n in Counter(row.key for row in TABLE).items() if n > 1]}"


def test_the_tests_of_each_row_paste_it():
    for row in TABLE:
        triggers = 0
        for test in row.tests:
            file, _, name = test.partition("::")
            assert (HERE / file).is_file(), f"{row.key}: {test} is not there"
            tree = parsed(file)
            function = next(
                (each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name), None
            )
            assert function is not None, f"{row.key}: {test} is not there"
            assert pastes(tree, function, row.key), f"{test} does not paste {row.key}"
            triggers += cases(tree, function)
        assert triggers >= TRIGGERS, f"{row.key}: {triggers} triggers, expected {TRIGGERS}"
        asked = any(test.startswith("tools/gpu_questions.py::") for test in row.tests)
        assert asked == (row.proof is Proof.GPU_CHECK), f"{row.key}: its class is {row.proof.value}"


@functools.cache
def parsed(file: str) -> ast.Module:
    return ast.parse((HERE / file).read_text())


def pastes(tree: ast.Module, function: ast.FunctionDef, key: str) -> bool:
    """Whether a test names the row to `pasted`, itself, by its parameters, or by a helper of its file that it calls."""
    named = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    reached = [function, *(each for each in tree.body if _name(each) in named)]
    inside = [node for each in reached for node in ast.walk(each)]
    has_key = any(isinstance(node, ast.Constant) and node.value == key for node in inside)
    uses = any(isinstance(node, ast.Name) and node.id in ("pasted", "advise") for node in inside)
    return has_key and uses


def _name(node: ast.stmt) -> str:
    """What a function or an assignment of a module defines."""
    if isinstance(node, ast.FunctionDef):
        return node.name
    target = (
        node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
    )
    return target.id if isinstance(target, ast.Name) else ""


def cases(tree: ast.Module, function: ast.FunctionDef) -> int:
    """How many triggers a test has: the product of its parameters' cases."""
    count = 1
    for decorator in function.decorator_list:
        if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.parametrize"):
            continue
        values = decorator.args[1]
        if isinstance(values, ast.Name):
            values = next(each.value for each in tree.body if _name(each) == values.id)
        count *= len(values.keys if isinstance(values, ast.Dict) else values.elts)
    return count


def test_no_index_is_asked_for_this_project():
    """No index has its name: whoever took it there would own the machines of those who type such a line."""
    files = [
        *PACKAGE.rglob("*.py"),
        *(HERE / "docs").rglob("*.md"),
        *HERE.glob("*.md"),
        *(HERE / "examples").rglob("*.*"),
    ]
    by_name = re.compile(r"pip install [^`\n]*?(?<![/\w])jaxmem[_-]?callbacks")
    assert not [file for file in files if by_name.search(file.read_text(errors="ignore"))]
    extras = importlib.metadata.requires("jaxmem_callbacks") or []
    for line in ("nvidia-ml-py", "jax[tpu]", "jax[cuda12-local]"):
        assert any(line.replace("'", "") in each for each in extras), "the extras' packages by their own names"


def test_the_walk_sees_each_kind_of_line():
    lines = {
        'print("Type jm.plan(step, state)")': True,
        'print(f"{word}({name}, donate_argnums=0)")': True,
        'print("step = jm.jit_step(step)")': True,
        'print("Run jaxmem doctor --start")': True,
        'print("pip install equinox")': True,
        'print(f"export {NAME}=1", "XLA_FLAGS=--x")': True,
        'print("Add --search sharding to divide it")': True,
        'print("jax.live_arrays() counted them")': False,
        'raise ValueError("segments=0: expected a number of at least 1")': False,
        '"""Call jm.plan(step)."""': False,
        'parser.add_argument("--x", help="as jm.plan(step)")': False,
    }
    for code, is_line in lines.items():
        assert bool(lines_to_paste(ast.parse(code))) == is_line, code
