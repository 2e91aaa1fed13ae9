"""The numbers that plans rest on: each that was tuned is marked, with where it is from, and there are few of them.

A number is *tuned* where another would do, and plans would differ. It is a constant of a module with a comment above it or behind
it that begins with ``Tuned:``. All others are given: by a format, a data sheet, a compiler, a definition or a documented promise.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "jaxmem_callbacks"
ROOMS = ("planning", "transforms")
MOST_TUNED = 30
# Fewest words of where a number is from.
WORDS = 8

PROMISED, SHOWN, ARRAYS = "a documented limit", "how much a message shows", "shapes, bits and columns"
SHEET, PERCENT, WAITED, FORMULA = "data sheets", "a percentage", "seconds of a wait", "a definition"
#: File -> constant or function -> its numbers, and what they are given by. Data sheets may have any.
GIVEN: dict[str, dict[str, tuple[tuple[float, ...], str]]] = {
    "planning/chunk_candidates.py": {"MOST_CHUNKS": ((6,), PROMISED)},
    "planning/compiles.py": {
        "(MOST_OF_REMAT, MOST)": ((8, 16), PROMISED),
        "SHARE_DIGITS": ((5,), SHOWN),
        "_LEAST_SHARE": ((10,), "the decimal system"),
        "_SHOWN": ((4,), SHOWN),
        "_POLL_S": ((0.25,), WAITED),
    },
    "planning/option_candidates.py": {
        "_MOST": ((4,), PROMISED),
        "_DEFAULT_SLOP": ((95,), "XLA's own default"),
        "slop_for_budget": ((100,), PERCENT),
        "note_limit": ((100,), PERCENT),
        "_avoiding": ((100, 100, 100, 100), PERCENT),
    },
    "planning/plan.py": {"_SHOWN": ((4,), SHOWN)},
    "planning/request.py": {
        "_MOST_GIB": ((4096,), "what no device has: which unit a number without one is meant in"),
        "share_for": ((100, 100), PERCENT),
    },
    "planning/search.py": {
        "MOST_POLICIES": ((4,), "how many policies a function returns"),
        "_offer": ((10, 10), "the decimal system"),
    },
    "planning/state_candidates.py": {"MOST_OF_STATE": ((4,), "two policies under two sets of options")},
    "planning/step_time.py": {
        "(_PCIE3, _PCIE4, _PCIE5, _C2C, _TPU, _TPU_V6E)": ((), SHEET),
        "_SPEEDS": ((), SHEET),
    },
    "planning/verdict.py": {"_CPU_KEEPS_REMAT": ((12,), "a version of JAX")},
    "transforms/accumulation/batch.py": {
        "_RAW_KEYS": ((4,), ARRAYS),
        "find_batch": ((6,), SHOWN),
        "_by_shape": ((3,), SHOWN),
        "_UINTS": ((8, 16, 32, 64), ARRAYS),
        "shared_key": ((3,), ARRAYS),
        "_implementation": ((4,), ARRAYS),
        "_mix": ((2146121005, 2221713035, 16, 16, 15), "a published hash"),
        "_seed": ((3, 4), ARRAYS),
        "_fold_in": ((3, 3), ARRAYS),
        "_split": ((3, 7, 3, 3), ARRAYS),
        "_bits": ((64, 32, 3), ARRAYS),
        "_MASKS": ((100,), "what frameworks mark left-out labels with"),
    },
    "transforms/accumulation/equivalence_check.py": {
        "_STAND_IN": ((3,), "any number does"),
        "_FLOAT32_BITS": ((32,), ARRAYS),
        "_PERCENT": ((0.01,), PERCENT),
        "compare": ((8,), ARRAYS),
        "_percent": ((100,), PERCENT),
    },
    "transforms/accumulation/microbatch.py": {"_SHOWN": ((4,), SHOWN)},
    "transforms/arg_roles.py": {"_scope": ((4096,), "answers that are kept")},
    "transforms/chunks.py": {"_REASONS": ((3,), SHOWN)},
    "transforms/costs.py": {
        "_cholesky_flops": ((3,), FORMULA),
        "array_bytes": ((16,), ARRAYS),
        "LINK_BYTE": ((2000,), SHEET),
    },
    "transforms/cut_moves.py": {"__init__": ((3,), ARRAYS)},
    "transforms/loss_profile.py": {
        "uses": ((5,), ARRAYS),
        "value_uses": ((5,), ARRAYS),
        "backward_bytes": ((3,), ARRAYS),
        "gradient_spans": ((3,), ARRAYS),
        "residual_rows": ((3,), ARRAYS),
        "profile_loss": ((4,), ARRAYS),
    },
    "transforms/own_checkpoints.py": {"_code": ((8,), "answers that are kept")},
    "transforms/prefetch.py": {"_JOIN_S": ((5.0,), WAITED)},
    "transforms/remat.py": {"_refuse_no_checkpoint": ((3,), SHOWN)},
    "transforms/save_frontier.py": {"_ENDLESS": ((31,), ARRAYS), "within": ((0.5,), "rounding")},
    "transforms/sharding/infer.py": {"_MATRIX_STACK": ((3,), ARRAYS)},
}


def files() -> Iterator[tuple[str, str]]:
    for room in ROOMS:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            yield str(path.relative_to(PACKAGE)), path.read_text("utf-8")


def owners(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """The statements of a module, and of its classes, by the name of what they define."""
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        for each in inner:
            if isinstance(each, ast.FunctionDef):
                yield each.name, each
            elif isinstance(each, ast.Assign):
                yield ast.unparse(each.targets[0]), each
            elif isinstance(each, ast.AnnAssign):
                yield ast.unparse(each.target), each
            else:
                yield "", each


def numbers(node: ast.AST) -> list[float]:
    """Numbers of a statement without 0, 1, 2, powers of 1024, and rows and columns of arrays as they are counted from 0."""
    units = {
        id(each.right)
        for each in ast.walk(node)
        if isinstance(each, ast.BinOp)
        and isinstance(each.op, ast.Pow)
        and isinstance(each.left, ast.Constant)
        and each.left.value == 2
        and isinstance(each.right, ast.Constant)
        and each.right.value % 10 == 0
    }
    return [
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant)
        and isinstance(each.value, (int, float))
        and not isinstance(each.value, bool)
        and each.value not in {0, 1, 2}
        and id(each) not in units
    ]


def comment_of(text: str, node: ast.stmt) -> str:
    """The comment in the lines directly above a statement, and the one behind it."""
    lines = text.splitlines()
    above = itertools.takewhile(lambda line: line.startswith("#"), reversed(lines[: node.lineno - 1]))
    behind = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2]
    return " ".join([line.lstrip("#: ") for line in reversed(list(above))] + [behind])


def found() -> tuple[dict[str, list[float]], dict[str, dict[str, list[float]]]]:
    """The tuned numbers by their places, and the others by file and owner."""
    tuned: dict[str, list[float]] = {}
    others: dict[str, dict[str, list[float]]] = {}
    for name, text in files():
        for owner, node in owners(ast.parse(text)):
            some = numbers(node)
            if "Tuned: " in (comment := comment_of(text, node)) and not isinstance(node, ast.FunctionDef):
                values = [each for key in ast.walk(node) if isinstance(key, ast.Dict) for each in key.keys if each]
                keys = [number for each in values for number in numbers(each)]
                for number in keys:
                    some.remove(number)
                assert len(re.findall(r"\w+", comment.partition("Tuned: ")[2])) >= WORDS, f"{name}: {owner}"
                tuned[f"{name}: {owner}"] = some or [0]
            elif some:
                others.setdefault(name, {}).setdefault(owner, []).extend(some)
    return tuned, others


def test_every_number_is_marked_as_tuned_or_known_to_be_given() -> None:
    _, others = found()
    given = {name: {owner: list(each) for owner, (each, _) in some.items() if each} for name, some in GIVEN.items()}
    sheets = {(name, owner) for name, some in GIVEN.items() for owner, (each, _) in some.items() if not each}
    there = {
        name: {owner: each for owner, each in some.items() if (name, owner) not in sheets}
        for name, some in others.items()
    }
    for name in sorted({*given, *there}):
        assert there.get(name, {}) == given.get(name, {}), name


def test_few_numbers_are_tuned() -> None:
    tuned, _ = found()
    count = sum(map(len, tuned.values()))
    assert count <= MOST_TUNED, tuned
