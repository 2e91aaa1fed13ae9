"""The public names: one sorted table of at most forty, each loadable, documented, and documented as it is."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks import records
from jaxmem_callbacks.records import errors

# The table, written a second time on purpose: a name that users type neither comes nor goes unnoticed.
PUBLIC = [
    "CollectingWriter",
    "CsvWriter",
    "MemoryMonitor",
    "Plan",
    "Preset",
    "PrometheusWriter",
    "Recovery",
    "ScriptedProbe",
    "StepMemory",
    "StepPolicy",
    "apply_environment",
    "apply_policy",
    "as_writer",
    "defragment",
    "eqx",
    "grad",
    "infer_shardings",
    "jit_step",
    "linen",
    "list_presets",
    "load_plan",
    "load_preset",
    "make_mesh",
    "nnx",
    "oom_guard",
    "parse_oom",
    "place_state",
    "plan",
    "prefetch",
    "remat",
    "simulate_allocator",
    "step_memory",
    "value_and_grad",
    "weighted",
]
# What users may catch; beside the names above, since nobody reads them before one of them is raised.
ERRORS = [
    "CompileError",
    "CompileTimeoutError",
    "ComparisonError",
    "DefragmentError",
    "DonationError",
    "DonationWarning",
    "EnvironmentSettingError",
    "JaxmemError",
    "LossRefusedError",
    "PatternError",
    "PlanError",
    "PolicyError",
    "PresetError",
    "RecoveryError",
    "RecoveryWarning",
    "RunFileError",
    "SimulationError",
    "TargetError",
]
MOST_NAMES = 40
MODULES = ("eqx", "linen", "nnx")  # public names that are modules; their own functions are held to the same rules


@pytest.mark.core
def test_the_public_names_are_the_agreed_ones():
    assert sorted(jm.__all__) == sorted([*PUBLIC, *ERRORS]) == jm.__all__ == list(jm._EXPORTS)
    assert len(PUBLIC) <= MOST_NAMES
    assert set(jm.__all__) <= set(dir(jm))


@pytest.mark.core
def test_every_error_that_a_call_can_raise_is_caught_by_its_public_name():
    """All of the library's own errors and warnings but the one that only the command line raises."""
    found = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == errors.__name__
    }
    assert found - {"ScriptError"} == set(ERRORS)
    assert all(getattr(jm, name) is getattr(errors, name) for name in ERRORS)
    with pytest.raises(jm.PolicyError, match="Unknown remat policy"):
        jm.StepPolicy(remat="fulll")
    with pytest.raises(jm.PresetError, match="Unknown preset"):
        jm.load_preset("fulll_remat")


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(
        AttributeError,
        match=r"no attribute 'value_and_gard'\. Did you mean `value_and_grad`\? Public names: .*value_and_grad",
    ):
        _ = jm.value_and_gard


def test_what_type_checkers_see_is_what_loads():
    """The TYPE_CHECKING block of the package and the table of lazy names say the same."""
    tree = ast.parse(Path(jm.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    table = {
        name: f"jaxmem_callbacks.{place}{'.' + attr if attr else ''}" for name, (place, attr) in jm._EXPORTS.items()
    }
    assert seen == table


def test_every_public_name_is_used_under_a_strict_type_checker():
    """`make types` checks that file; without the package's marker no checker would look at its types."""
    text = (Path(__file__).parent / "typed_use.py").read_text()
    assert re.match("# pyright: strict, reportUnnecessaryTypeIgnoreComment=true\n", text)
    used = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    assert [name for name in (*PUBLIC, *ERRORS) if name not in used] == []
    assert [method for method in methods() if method.rpartition(".")[2] not in used] == []
    assert [
        f"{name}.{inner}"
        for name in MODULES
        for inner in getattr(jm, name).__all__
        if f"jm.{name}.{inner}(" not in text
    ] == []
    assert "tests/typed_use.py" in (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert (Path(jm.__file__).parent / "py.typed").exists()


def methods() -> Iterator[str]:
    """Methods and properties of the public classes, as ``Plan.policy``."""
    classes = {name: getattr(jm, name) for name in PUBLIC if inspect.isclass(getattr(jm, name))}
    assert len(classes) >= 8
    for name, value in classes.items():
        members = inspect.getmembers(value, lambda member: inspect.isfunction(member) or isinstance(member, property))
        yield from (f"{name}.{member}" for member, _ in members if not member.startswith("_"))


@pytest.mark.core
@pytest.mark.parametrize("name", [*PUBLIC, *ERRORS])
def test_public_name_loads_and_is_documented(name):
    value = getattr(jm, name)
    assert inspect.getdoc(value), f"{name} has no docstring"
    assert drift(value) == []


@pytest.mark.parametrize("name", MODULES)
def test_functions_of_public_modules_are_documented(name):
    module = getattr(jm, name)
    assert isinstance(module, ModuleType)
    assert module.__all__ == sorted(module.__all__) != []
    functions = [getattr(module, public) for public in module.__all__]
    assert [function.__name__ for function in functions if not inspect.getdoc(function)] == []
    assert [line for function in functions for line in drift(function)] == []


def test_every_record_documents_its_fields():
    seen = [value for value in record_classes() if not issubclass(value, Exception)]
    assert len(seen) >= 9
    assert [line for value in seen for line in drift(value)] == []


def record_classes() -> Iterator[type]:
    """Every class that the records room defines."""
    for info in pkgutil.iter_modules(records.__path__, f"{records.__name__}."):
        module = importlib.import_module(info.name)
        yield from (
            value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == info.name
        )


def drift(value: Any) -> list[str]:
    """Where a docstring and what it describes disagree; empty when they agree."""
    if inspect.isclass(value):
        own = inspect.get_annotations(value)  # what a base class has is documented there
        fields = (
            {f.name for f in dataclasses.fields(value) if f.name in own} if dataclasses.is_dataclass(value) else None
        )
        found = [] if fields is None else differences(value, "Attributes", fields)
        if fields is None and "__init__" in vars(value):
            found += differences(value, "Args", parameters(value.__init__))
        methods = (item for name, item in vars(value).items() if inspect.isfunction(item) and not name.startswith("_"))
        return found + [line for method in methods for line in drift_of_method(method)]
    return differences(value, "Args", parameters(value)) if callable(value) else []


def drift_of_method(method: Any) -> list[str]:
    """A method needs no ``Args:``, but one that it has must be true."""
    return differences(method, "Args", parameters(method)) if "Args:" in (inspect.getdoc(method) or "") else []


def parameters(function: Any) -> set[str]:
    """Parameter names as a docstring writes them; ``self`` is not one."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    signature = inspect.signature(function)
    return {
        stars.get(entry.kind, "") + name for name, entry in signature.parameters.items() if name not in ("self", "cls")
    }


def differences(value: Any, heading: str, expected: set[str]) -> list[str]:
    """One line each for a name that the section lacks or invents. One argument may be told in the first sentence."""
    documented = section(inspect.getdoc(value) or "", heading)
    if documented is None:
        few = len(expected) <= 1
        return [] if few else [f"{value.__qualname__}: no `{heading}:` section for {sorted(expected)}"]
    wrong = [f"{value.__qualname__}: `{name}` is not documented" for name in sorted(expected - documented)]
    return wrong + [f"{value.__qualname__}: `{name}` does not exist" for name in sorted(documented - expected)]


def section(doc: str, heading: str) -> set[str] | None:
    """The names that a Google-style section lists, or None when there is no such section."""
    match = re.search(rf"^{heading}:\n((?:    .*\n?|\n)+)", doc, flags=re.MULTILINE)
    if match is None:
        return None
    entries = re.findall(r"^ {4}([*\w][\w, *]*?)(?: \([^)]*\))?:", match[1], flags=re.MULTILINE)
    return {name.strip() for entry in entries for name in entry.split(",")}


def test_drift_is_found():
    def function(kept: int, renamed: int, *rest: int) -> None:
        """Do something.

        Args:
            kept: Still here.
            old_name: No longer here.
            *rest: Others,
                on two lines: really.
        """

    assert drift(function) == [
        "test_drift_is_found.<locals>.function: `renamed` is not documented",
        "test_drift_is_found.<locals>.function: `old_name` does not exist",
    ]

    def silent(one: int, two: int) -> None:
        """Do something."""

    assert drift(silent) == ["test_drift_is_found.<locals>.silent: no `Args:` section for ['one', 'two']"]

    @dataclasses.dataclass
    class Record:
        """A record.

        Attributes:
            gone: Removed.
        """

        here: int

    assert [line.split(": ")[1] for line in drift(Record)] == ["`here` is not documented", "`gone` does not exist"]
