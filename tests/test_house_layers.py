"""The house's order, read from the imports: rooms import up only, third parties stay where they belong, files stay small.

Each rule is a function of a source tree; the last test runs all of them on a toy tree that breaks every one.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "jaxmem_callbacks"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE
ORDER = [
    *("records", "config", "environment", "simulator", "_compat", "transforms", "programs", "planning", "probes"),
    *("analysis", "readers", "writers", "recovery", "callbacks", "integrations", "api", "cli"),
]
FRAMEWORKS = {
    "flax",
    "keras",
    "orbax",
    "equinox",
    "tensorflow",
    "haiku",
    "penzai",
    "pytest",
    "clu",
    "grain",
    "tunix",
    "kauldron",
}
JAX = {"jax", "jaxlib"}
# Rooms that may import these third parties and no others; the rest of the rooms choose freely beside the frameworks.
ONLY = {
    "records": set(),
    "environment": set(),
    "simulator": set(),
    "analysis": {"numpy"},
    "readers": {"pydantic", "pydantic_core"},
}
NEVER = {"config": JAX | FRAMEWORKS, "writers": JAX | FRAMEWORKS}
# One public door to each framework by name: the registry that loads an integration when its objects arrive.
LAZY_DOORS = {"transforms/frameworks.py"}
# Folders of a room that no other room imports: it calls the files beside them.
INNER = {"recovery": {"failure", "reports", "moving", "ladder"}}
LINES = 800  # a concept larger than that is two; functions are bounded by their complexity, in ruff


def sources(root: Path) -> Iterator[tuple[str, Path, ast.Module]]:
    """Room, file and syntax tree of every module in a room."""
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root).parts
        if len(place) > 1:
            yield place[0], path, ast.parse(path.read_text())


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported; relative imports as names that begin with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            head = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{head}.{alias.name}") for alias in node.names)


def room_of(name: str) -> str | None:
    """The room that a dotted name is in, or None for third parties and the package itself."""
    parts = name.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else None


def misplaced(root: Path) -> list[str]:
    """Rooms that the order does not name, and modules beside the package's own ``__init__``."""
    found = [f"{path.name}: room is not in the order" for path in root.iterdir() if path.is_dir()]
    allowed = {f"{room}: room is not in the order" for room in [*ORDER, "__pycache__"]}
    beside = {"__init__.py", "__main__.py"}
    loose = [f"{path.name}: modules live in rooms" for path in root.glob("*.py") if path.name not in beside]
    return sorted(set(found) - allowed) + loose


def downward(root: Path) -> list[str]:
    """Imports that point down the order, or are relative so that nobody can tell."""
    found = []
    for room, path, tree in sources(root):
        for line, name in imported(tree):
            target = room_of(name)
            if name.startswith("."):
                found.append(f"{path}:{line}: relative import; write {PACKAGE}. in full")
            elif target in ORDER and room in ORDER and ORDER.index(target) > ORDER.index(room):
                found.append(f"{path}:{line}: `{room}` imports `{target}`, which comes after it")
    return found


def downward_by_text(root: Path) -> list[str]:
    """Module names in strings that would load a later room, outside the sanctioned doors."""
    found = []
    for room, path, tree in sources(root):
        if path.relative_to(root).as_posix() in LAZY_DOORS or room not in ORDER:
            continue
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            target = room_of(text) if text.replace(".", "").isidentifier() else None
            if target in ORDER and ORDER.index(target) > ORDER.index(room):
                found.append(f"{path}:{node.lineno}: `{room}` names `{text}`, which comes after it")
    return found


def strangers(root: Path) -> list[str]:
    """Third parties in a room that may not import them."""
    found = []
    for room, path, tree in sources(root):
        for line, name in imported(tree):
            head = name.split(".")[0]
            if not head or head == PACKAGE or head in sys.stdlib_module_names:
                continue
            closed = room in ONLY and head not in ONLY[room]
            framework = head in FRAMEWORKS and room != "integrations"
            if closed or framework or head in NEVER.get(room, ()):
                found.append(f"{path}:{line}: `{room}` may not import `{head}`")
    return found


def private_jax(root: Path) -> list[str]:
    """JAX's private modules and attributes outside ``_compat``."""
    found = []
    for room, path, tree in sources(root):
        if room == "_compat":
            continue
        found += [f"{path}:{line}: `{name}` is private" for line, name in imported(tree) if is_private_jax(name)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private_jax(ast.unparse(node)):
                found.append(f"{path}:{node.lineno}: `{ast.unparse(node)}` is private")
            # An integration may meet a framework's private attribute, with a default, since nobody else may import it.
            if isinstance(node, ast.Call) and room != "integrations" and hides_private_name(node):
                found.append(f"{path}:{node.lineno}: `{ast.unparse(node)}` is private")
    return found


def is_private_jax(name: str) -> bool:
    """Whether a dotted name starts at jax or jaxlib and passes through a part with an underscore."""
    head, *rest = name.split(".")
    return head in JAX and any(part.startswith("_") and not part.startswith("__") for part in rest)


def hides_private_name(call: ast.Call) -> bool:
    """``getattr(x, "_name")``: a private attribute that a reader of attributes does not see."""
    if ast.unparse(call.func) != "getattr":
        return False
    name = call.args[1].value if len(call.args) > 1 and isinstance(call.args[1], ast.Constant) else ""
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def cycles(root: Path) -> list[str]:
    """A ring of modules that import each other, lazily or not."""
    modules = {
        f"{PACKAGE}." + ".".join(path.relative_to(root).with_suffix("").parts): tree for _, path, tree in sources(root)
    }
    graph = {
        module: {known for _, name in imported(tree) for known in (name, name.rpartition(".")[0]) if known in modules}
        for module, tree in modules.items()
    }
    return [f"cycle: {ring}" for ring in ring_in(graph)]


def folder_cycles(root: Path) -> list[str]:
    """A ring of folders within rooms: files of each import files of the next."""
    graph: dict[str, set[str]] = {}
    for room, path, tree in sources(root):
        own = folder_of(f"{PACKAGE}." + ".".join(path.relative_to(root).parts), root)
        targets = {folder_of(name, root) for _, name in imported(tree) if room_of(name) == room}
        if own:
            graph.setdefault(own, set()).update({target for target in targets if target} - {own})
    return [f"folders: {ring}" for ring in ring_in(graph)]


def ring_in(graph: dict[str, set[str]]) -> list[str]:
    """The first ring of a graph in words, where there is one."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def folder_of(name: str, root: Path) -> str:
    """``recovery/ladder`` for a dotted name in a folder of a room; empty for files beside the folders."""
    parts = name.split(".")[1:3]
    return "/".join(parts) if name.startswith(f"{PACKAGE}.") and (root.joinpath(*parts)).is_dir() and parts[1:] else ""


def past_the_doors(root: Path) -> list[str]:
    """Imports of a room's inner folders from another room."""
    found = []
    for room, path, tree in sources(root):
        for line, name in imported(tree):
            target = room_of(name)
            if target != room and target in INNER and name.split(".")[2] in INNER[target]:
                found.append(f"{path}:{line}: `{name}` is inside of `{target}`; other rooms call the files beside it")
    return found


def untidy(root: Path) -> list[str]:
    """Files that are too long, have no opening words, or are named after nothing."""
    found = []
    for _, path, tree in sources(root):
        lines = len(path.read_text().splitlines())
        if lines > LINES:
            found.append(f"{path}: {lines} lines, the limit is {LINES}")
        if not ast.get_docstring(tree):
            found.append(f"{path}: no module docstring")
        if path.stem.strip("_") in {"utils", "util", "common", "helpers", "misc", "manager"}:
            found.append(f"{path}: a name that says nothing")
    return found


def test_every_room_is_in_the_order():
    assert misplaced(ROOT) == []


def test_imports_point_up_only():
    assert downward(ROOT) == []
    assert downward_by_text(ROOT) == []


def test_third_parties_stay_in_their_rooms():
    assert strangers(ROOT) == []


def test_private_jax_is_touched_in_compat_only():
    assert private_jax(ROOT) == []


def test_there_is_no_import_cycle():
    assert cycles(ROOT) == []
    assert folder_cycles(ROOT) == []


def test_inner_folders_are_called_through_their_rooms_doors():
    assert past_the_doors(ROOT) == []


def test_files_are_short_named_and_introduced():
    assert untidy(ROOT) == []


def test_each_rule_finds_its_breach(tmp_path):
    root = tmp_path / PACKAGE
    broken = {
        "records/a.py": '"""Doc."""\nfrom jaxmem_callbacks.writers import b\nimport numpy\n',
        "records/ring.py": '"""Doc."""\nfrom jaxmem_callbacks.records import ring2\n',
        "records/ring2.py": '"""Doc."""\ndef f():\n    from jaxmem_callbacks.records.ring import x\n',
        "recovery/texts/t.py": '"""Doc."""\nfrom jaxmem_callbacks.recovery.ladder import l\n',
        "recovery/ladder/l.py": '"""Doc."""\n',
        "recovery/ladder/m.py": '"""Doc."""\nfrom jaxmem_callbacks.recovery.texts import u\n',
        "cli/x.py": '"""Doc."""\nfrom jaxmem_callbacks.recovery.ladder.l import walk\n',
        "config/c.py": '"""Doc."""\nimport jax\n',
        "writers/b.py": '"""Doc."""\nfrom . import sink\nimport flax.nnx\n',
        "programs/p.py": '"""Doc."""\nimport importlib\nimportlib.import_module("jaxmem_callbacks.cli.main")\n',
        "probes/q.py": '"""Doc."""\nimport jax\njax.config._read("x")\nfrom jax._src import core\ngetattr(x, "_secret")\n',
        "probes/utils.py": "x = 1\n",
        "probes/long.py": '"""Doc."""\ndef f():\n' + "    x = 1\n" * 800,
        "kitchen/k.py": '"""Doc."""\n',
        "loose.py": '"""Doc."""\n',
    }
    for name, text in broken.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    def told(rule, *words):
        report = "\n".join(rule(root))
        return all(word in report for word in words)

    assert told(misplaced, "kitchen: room is not in the order", "loose.py: modules live in rooms")
    assert told(downward, "a.py:2: `records` imports `writers`", "b.py:2: relative import")
    assert told(downward_by_text, "p.py:3: `programs` names `jaxmem_callbacks.cli.main`")
    assert told(strangers, "a.py:3: `records` may not import `numpy`", "`config` may not import `jax`", "`flax`")
    assert told(private_jax, "`jax.config._read`", "`jax._src.core`", "_secret")
    assert told(cycles, "ring", "ring2")
    assert told(folder_cycles, "recovery/texts", "recovery/ladder")
    assert told(past_the_doors, "x.py:2: `jaxmem_callbacks.recovery.ladder.l.walk` is inside of `recovery`")
    assert told(untidy, "long.py: 802 lines", "utils.py: no module docstring", "utils.py: a name that says nothing")
