"""A serialised program enters; hashes leave that are the same in every process: what it computes, and where its lines are.

`jax.export` writes the same trace as the same bytes in two processes, but these bytes hold the call stack of every operation.
A comment added above the step, the line that asks, or a notebook's new process (whose cells are files named after it) changes
them and not what is compiled. So one hash has no lines, one the lines that are told of operations, one whole call stacks.
A Pallas kernel is the exception: JAX hands it on with its lines inside, and where these move it counts as another program.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax.export

from jaxmem_callbacks.programs.reading.hlo import user_source
from jaxmem_callbacks.records.units import MIB

# A program with larger constants is hashed as it is, lines and all: its text would take several times its size.
_LARGE_BYTES = 16 * MIB
# `#loc27 = loc("jit(step)/blk/dot_general"(#loc22))` defines what `loc(#loc27)` refers to.
_DEFINITION = re.compile(r"^#loc(\d*) = loc\((.*)\)\n", re.MULTILINE)
_REFERENCE = re.compile(r"#loc(\d*)")
# An operation refers to its location; an argument of a body in it, such as the sum of a scatter, names itself as well.
_USE = re.compile(r'loc\((?:#loc(\d*)|"((?:[^"\\]|\\.)*)"\(#loc(\d*)\))\)')
_NAME = re.compile(r'"((?:[^"\\]|\\.)*)"(?:\(|$)')  # a file's name is followed by a colon
_FILE = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+):')


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """What identifies a traced program.

    Attributes:
        program: Hash of its operations, their names, constants, shapes, dtypes and shardings, without source lines.
        lines: Hash of the user's innermost source line of each operation: the line that is told of a buffer.
        stacks: Hash of all that with every caller's line.
    """

    program: str
    lines: str
    stacks: str


def program_fingerprint(blob: bytes) -> Fingerprint:
    """The hashes of a program that `jax.export` serialised.

    Args:
        blob: What ``exported.serialize()`` gave.
    """
    if len(blob) > _LARGE_BYTES:
        whole = hashlib.sha256(blob).hexdigest()
        return Fingerprint(program=whole, lines=whole, stacks=whole)
    exported = jax.export.deserialize(bytearray(blob))
    text = exported.mlir_module()
    facts = (
        exported.fun_name,
        exported.in_avals,
        exported.out_avals,
        exported.platforms,
        exported.nr_devices,
        exported.module_kept_var_idx,
        exported.calling_convention_version,
    )
    locations = {match[1]: match[2] for match in _DEFINITION.finditer(text)}
    names = {number: _name(location, locations) for number, location in locations.items()}
    sources = {number: user_source(_frames(location, locations)) for number, location in locations.items()}
    body = _DEFINITION.sub("", text)
    bare = _USE.sub(lambda use: f'loc("{use[2] or names.get(use[1], "")}")', body)
    return Fingerprint(
        program=_hash(repr(facts) + bare),
        lines=_hash("\n".join(str(sources.get(use[3] if use[1] is None else use[1])) for use in _USE.finditer(body))),
        stacks=_hash(text),
    )


def _name(location: str, locations: Mapping[str, str]) -> str:
    """The operation's own name in a location; the names of functions that called it are left out."""
    if match := _NAME.match(location):
        return match[1]
    if location.startswith("fused"):
        return "+".join(_name(locations.get(part[1], ""), locations) for part in _REFERENCE.finditer(location))
    return ""


def _frames(location: str, locations: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Files and lines of a location, the innermost first: ``callsite(callee at caller)`` names them in this order."""
    if match := _FILE.match(location):
        yield match[1], int(match[2])
        return
    for part in _REFERENCE.finditer(location):
        yield from _frames(locations.get(part[1], ""), locations)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
