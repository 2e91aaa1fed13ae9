"""A hash of what code does, blind to where it stands, to the names that this repository gave, and to its words.

A figure that was measured stays true when a function is renamed, moved to another file or explained in other words, and not when
it computes something else. So the hash is made of definitions (functions, methods, classes, module variables): those that a
starting file reaches through the names that it uses, a method where its class is reached too. Each is its syntax tree without
docstrings, annotations, imports and what an error's or a formatted sentence reads. A name that is defined here stands for the
definitions that bear it, as colour refinement of graphs does it (Weisfeiler and Leman, 1968): first it counts by its order within
a definition, as parameters and fields do, and in each further round it is the hash of its definitions as the round before had
them. Names of other libraries stay.
"""

from __future__ import annotations

import ast
import collections
import functools
import hashlib
import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "jaxmem_callbacks"
_FOLDERS = (PACKAGE, "benchmarks", "examples")
_ROUNDS = 3
_MODULE = re.compile(rf"\b(?:{'|'.join(_FOLDERS)})(?:\.\w+)+")
_OF_PACKAGE = re.compile(r"\bjm\.(\w+)")  # in programs that are texts
_LEFT_OUT = ("annotation", "returns", "type_params", "type_comment", "simple", "kind")


@dataclass(frozen=True)
class Name:
    """A name within a definition's tokens, where it may be this repository's."""

    name: str
    is_ours: bool  # a parameter, a field, or imported from here


@dataclass(eq=False)
class Definition:
    """A function, a method, a class without its methods, or what a module does besides.

    Attributes:
        module: Where it stands.
        names: Those that it defines.
        owner: A method's class.
        tokens: Its syntax tree, in order.
        names_used: Of functions, classes and variables, with their modules.
        attributes_used: Of whatever object.
        modules_used: In whole, by their names in a text.
    """

    module: str
    names: tuple[str, ...]
    owner: Definition | None = None
    tokens: list[str | Name] = field(default_factory=list[str | Name])
    names_used: set[str] = field(default_factory=set[str])
    attributes_used: set[str] = field(default_factory=set[str])
    modules_used: set[str] = field(default_factory=set[str])


class Code:
    """The definitions of a repository.

    Args:
        root: The repository's folder.
        paths: Its files.
    """

    def __init__(self, root: Path, paths: Iterable[Path]) -> None:
        self._modules = {
            _module(path, root): _definitions(_module(path, root), path.read_text("utf-8")) for path in paths
        }
        self._root = root
        self._all = [each for several in self._modules.values() for each in several]
        self._methods: dict[str, list[Definition]] = collections.defaultdict(list)
        self._at: dict[str, list[Definition]] = collections.defaultdict(list)
        for each in self._all:
            for name in each.names:
                if each.owner is not None:
                    self._methods[name].append(each)
                else:
                    self._at[f"{each.module}.{name}"].append(each)
                    self._at[f"{PACKAGE}.{name}"].append(each)  # a public name, wherever it stands

    @staticmethod
    def files(root: Path) -> list[Path]:
        """The Python files of the package, the benchmarks and the examples."""
        return [path for folder in _FOLDERS for path in sorted((root / folder).rglob("*.py"))]

    def reached(self, starts: Iterable[Path]) -> set[Definition]:
        """The definitions of some files, and those that they use, and so on."""
        found: set[Definition] = set()
        attributes: set[str] = set()
        waiting = {each for path in starts for each in self._modules.get(_module(path, self._root), ())}
        while waiting:
            found |= waiting
            attributes |= {name for each in waiting for name in each.attributes_used}
            used = [self._at[name] for each in waiting for name in each.names_used]
            used += [self._modules.get(module, ()) for each in waiting for module in each.modules_used]
            used += [
                [each for each in self._modules[module] if not each.names] for module in {e.module for e in waiting}
            ]
            used += [
                [each for each in methods if each.owner in found]
                for name, methods in self._methods.items()
                if name in attributes or name.startswith("__")
            ]
            waiting = {each for several in used for each in several} - found
        return found


def code_hash(reached: Iterable[Definition], counted: Collection[Definition]) -> str:
    """Of some definitions, in any order; of the others that a file reaches, names count as parameters' do."""
    ours = {token.name for each in reached for token in each.tokens if isinstance(token, Name) and token.is_ours}
    ours |= {name for each in reached for name in each.names}
    of_names: dict[str, str] = {}
    labels: list[str] = []
    for _ in range(_ROUNDS):
        labels = [_label(each, of_names, ours) for each in counted]
        bearers: dict[str, list[str]] = collections.defaultdict(list)
        for each, label in zip(counted, labels, strict=True):
            for name in each.names:
                bearers[name].append(label)
        of_names = {name: _digest(sorted(several)) for name, several in bearers.items()}
    return _digest(sorted(labels))


def _label(definition: Definition, of_names: Mapping[str, str], ours: Collection[str]) -> str:
    """A definition's hash: a name that is only a parameter or a field counts by its order here."""
    order: dict[str, str] = {}
    words: list[str] = []
    for token in definition.tokens:
        if isinstance(token, str):
            words.append(token)
        elif token.name in of_names:
            words.append(of_names[token.name])
        elif token.name in ours:
            words.append(order.setdefault(token.name, f"own {len(order)}"))
        else:
            words.append(token.name)
    return _digest(words)


@functools.cache
def _definitions(module: str, text: str) -> list[Definition]:
    """Those of a file."""
    tree = ast.parse(text)
    aliases = _aliases(tree)
    besides = Definition(module, ())
    found: list[Definition] = []
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.append(_read(Definition(module, (name,)), statement, aliases))
            case ast.ClassDef(name=name, body=body):
                methods = [each for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
                statement.body = [each for each in body if each not in methods]
                whole = _read(Definition(module, (name,)), statement, aliases)
                found += [whole, *(_read(Definition(module, (each.name,), whole), each, aliases) for each in methods)]
            case ast.Assign(targets=targets):
                names = tuple(each.id for to in targets for each in ast.walk(to) if isinstance(each, ast.Name))
                found.append(_read(Definition(module, names), statement.value, aliases))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found.append(_read(Definition(module, (name,)), value, aliases))
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case _:
                _read(besides, statement, aliases)
    if besides.tokens:
        found.append(besides)
    for each in found:
        each.tokens = _joined(each.tokens)
    return found


def _joined(tokens: Iterable[str | Name]) -> list[str | Name]:
    """The same with each stretch of words in one: a hash is of the words joined alike, and only the names change by the round."""
    stretches = (list(each) for _, each in itertools.groupby(tokens, type))
    return [
        each
        for words in stretches
        for each in ([*words] if isinstance(words[0], Name) else ["\0".join(map(str, words))])
    ]


def _read(definition: Definition, tree: ast.AST, aliases: dict[str, str]) -> Definition:
    """The definition with the tokens and uses of a tree added."""
    aliases = aliases | _aliases(tree)
    local: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                local.setdefault(name, f"local {len(local)}")
            case ast.Name(id=name, ctx=ast.Store()) if not isinstance(tree, ast.ClassDef):
                local.setdefault(name, f"local {len(local)}")
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if node is not tree:
                local.setdefault(name, f"local {len(local)}")
            case _:
                pass
    _Reader(definition, local, aliases).visit(tree)
    return definition


class _Reader(ast.NodeVisitor):
    """Adds the tokens and uses of a syntax tree to a definition.

    Args:
        definition: It.
        local: Names of the tree's own -> their tokens.
        aliases: Names that an import gives -> what they are.
    """

    def __init__(self, definition: Definition, local: dict[str, str], aliases: dict[str, str]) -> None:
        self._into, self._local, self._aliases = definition, local, aliases
        self._is_package = definition.module.startswith(PACKAGE)

    def generic_visit(self, node: ast.AST) -> None:
        self._into.tokens.append(type(node).__name__)
        for name, child in ast.iter_fields(node):
            if name not in _LEFT_OUT:
                for each in child if isinstance(child, list) else [child]:
                    if isinstance(each, ast.AST):
                        self.visit(each)
        self._into.tokens.append("end")

    def visit_Import(self, node: ast.Import) -> None:
        """Where something stands is no part of what it does."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Likewise."""

    def visit_Expr(self, node: ast.Expr) -> None:
        """A statement that is no docstring."""
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """What it stands for: a local variable by its number, another library's by its whole name."""
        place = self._aliases.get(node.id, f"{self._into.module}.{node.id}")
        if node.id in self._local and node.id not in self._aliases:
            self._into.tokens.append(self._local[node.id])
        elif place.partition(".")[0] in (*_FOLDERS, "tests"):
            self._into.names_used.add(place)
            self._name(place.rpartition(".")[2], is_ours=node.id in self._aliases or isinstance(node.ctx, ast.Store))
        else:
            self._into.tokens.append(place)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Of an object, or of a module of this repository."""
        self.visit(node.value)
        place = self._aliases.get(node.value.id, "") if isinstance(node.value, ast.Name) else ""
        if place.partition(".")[0] in _FOLDERS:
            self._into.names_used.add(f"{place}.{node.attr}")
        self._into.attributes_used.add(node.attr)
        self._name(node.attr, is_ours=isinstance(node.ctx, ast.Store))

    def visit_keyword(self, node: ast.keyword) -> None:
        """A parameter's name and its argument."""
        if node.arg is not None:
            self._name(node.arg)
        self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        """A parameter, which callers may name."""
        self._name(node.arg, is_ours=True)

    def visit_Constant(self, node: ast.Constant) -> None:
        """A figure or a text, which may be a program."""
        text = node.value if isinstance(node.value, str) else ""
        self._into.modules_used |= set(_MODULE.findall(text))
        if not self._is_package:  # there it is a sentence to a user
            self._into.names_used |= {f"{PACKAGE}.{name}" for name in _OF_PACKAGE.findall(text)}
        self._into.tokens.append(repr(_MODULE.sub("module", text) or node.value))

    def visit_Raise(self, node: ast.Raise) -> None:
        """An error, by its kind."""
        if isinstance(node.exc, ast.Call):
            self.visit(node.exc.func)
        else:
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A sentence with values in it, or a pattern or a key."""
        texts = [each.value for each in node.values if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        if self._is_package and any(" " in text.strip() for text in texts) and "\\" not in "".join(texts):
            self._into.tokens.append("sentence")
        else:
            self.generic_visit(node)

    def _name(self, name: str, *, is_ours: bool = False) -> None:
        self._into.tokens.append(Name(name, is_ours))


def _aliases(tree: ast.AST) -> dict[str, str]:
    """A name that an import gives -> what it is."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.asname or each.name.partition(".")[0]: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def _module(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts)


def _digest(words: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
