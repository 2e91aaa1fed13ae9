"""The cache of absent compilers' answers, by a program's fingerprint."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.resources
import json
import os
import pathlib
import re
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.export
import jaxlib

from jaxmem_callbacks.programs.reading.buffer_assignment import dump_file
from jaxmem_callbacks.programs.reading.hlo import user_source
from jaxmem_callbacks.programs.targets.compilers import user_cache
from jaxmem_callbacks.programs.targets.worker import usable_answer
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.terminal import print_line
from jaxmem_callbacks.records.units import GIB, MIB

# A program with larger constants is hashed as it is, lines and all: its text would take several times its size.
_LARGE_BYTES = 16 * MIB
# `#loc27 = loc("jit(step)/blk/dot_general"(#loc22))` defines what `loc(#loc27)` refers to.
_DEFINITION = re.compile(r"^#loc(\d*) = loc\((.*)\)\n", re.MULTILINE)
_REFERENCE = re.compile(r"#loc(\d*)")
# An operation refers to its location; an argument of a body in it, such as the sum of a scatter, names itself as well, and one of
# a function that JAX makes, such as of random numbers, has where that is called.
_USE = re.compile(r'loc\((?:#loc(\d*)|"((?:[^"\\]|\\.)*)"\(#loc\d*\)|callsite\(#loc\d* at #loc\d*\))\)')
_NAME = re.compile(r'"((?:[^"\\]|\\.)*)"(?:\(|$)')  # a file's name is followed by a colon
_FILE = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+):')


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """What identifies a traced program.

    Attributes:
        program: Hash of its operations, their names, constants, shapes, dtypes and shardings, without source lines.
        lines: Hash of the user's innermost source line of each operation: the line that is reported of a buffer.
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
    source = functools.cache(lambda use: user_source(_frames(use, locations)))
    body = _DEFINITION.sub("", text)
    bare = _USE.sub(lambda use: f'loc("{use[2] or names.get(use[1], "")}")', body)
    return Fingerprint(
        program=_hash(repr(facts) + bare),
        lines=_hash("\n".join(str(source(use[0])) for use in _USE.finditer(body))),
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


_VARIABLE = "JAXMEM_CACHE_DIR"
_FORMAT = 1  # of an entry; the code that makes answers is part of the key by itself
_LIMIT_BYTES = GIB
_HOUR_S = 3600
_ENTRY = re.compile(r"[0-9a-f]{64}-[0-9a-f]{16}\.zip")
_TEMPORARY = ".jaxmem-"
_ANSWER, _PROGRAM, _ABOUT, _DUMPS = "answer.json", "optimised.hlo", "about.json", "dump/"
_DUMP_ENDINGS = (".txt", "-buffer-assignment.txt", "-live-range.txt")
# Variables of the worker that its compiler reads.
_READ_BY_COMPILERS = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "TF_XLA_", "NVIDIA_TF32_OVERRIDE")
_NAMES_FILES = re.compile(r"xla_dump|--\w*(?:file|path|dir|_from|_to)(?:_\w*)?=|=\S*/")
_TOOLS = re.compile(r"--xla_gpu_cuda_data_dir=\S+")  # where CUDA's tools are, which come with the versions
# Modules of reading/ whose code makes figures of an answer.
_FIGURES_IN = ("buffer_assignment",)
# What an entry that is truncated, foreign or made by other code raises when it is read.
_BROKEN = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    RuntimeError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)
_TABLES = re.compile(r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*\n?", re.MULTILINE)
_LINE = re.compile(r' ?(?:stack_frame_id=\d+|source_file="[^"]*"|source_(?:end_)?(?:line|column)=\d+)')


def cache_folder() -> pathlib.Path | None:
    """Where answers are kept: ``JAXMEM_CACHE_DIR``, else the user's own cache; None where that is empty or ``off``."""
    given = os.environ.get(_VARIABLE)
    if given is not None and given.strip().lower() in {"", "off"}:
        return None
    try:
        cache = user_cache()
        place = None if cache is None else cache / "compiles"
        return place if given is None else pathlib.Path(given).expanduser()
    except RuntimeError:  # `~` of a user without a home folder
        return None


def cache_entry(
    blob: bytes, request: Mapping[str, Any], versions: Mapping[str, str], environment: Mapping[str, str]
) -> Entry | None:
    """Where the answer to one request is kept.

    Args:
        blob: The serialised program.
        request: All else that the worker is given, without the folders of this one compile.
        versions: Package -> version of the compiler.
        environment: The worker's environment.

    Returns:
        The entry, which need not exist; None where nothing is to be kept: the cache is off, or the user's flags are in a
        file or ask the compiler for files of its own.
    """
    folder = cache_folder()
    if folder is None and os.environ.get(_VARIABLE, "on").strip().lower() not in {"", "off"}:
        _note("this user has no home folder")
    if folder is None or _wants_a_real_compile(request["compiler_options"], environment):
        return None
    fingerprint = program_fingerprint(blob)
    parts = {
        "format": _FORMAT,
        "program": fingerprint.program,
        "request": dict(request),
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, **versions},
        "environment": {name: value for name, value in environment.items() if name.startswith(_READ_BY_COMPILERS)},
        "worker": _worker_code(),
    }
    key = hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()
    return Entry(folder=folder, key=replace(fingerprint, program=key))


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The place of one answer.

    Attributes:
        folder: The cache.
        key: What the answer depends on, as ``program``; its source lines; its call stacks.
        limit_bytes: How large the whole folder may grow.
    """

    folder: pathlib.Path
    key: Fingerprint
    limit_bytes: int = _LIMIT_BYTES

    @property
    def path(self) -> pathlib.Path:
        """The entry's own file."""
        return self.folder / f"{self.key.program}-{self.key.lines[:16]}.zip"

    def load(self, place: pathlib.Path, *, want_buffers: bool, need_lines: bool = True) -> dict[str, Any] | None:
        """Put the answer's files where a worker would have put them.

        The same program traced from other source lines has the same figures: its answer is taken with the lines removed
        from its texts, unless buffers are wanted with their lines. Where only callers moved, what is reported of buffers holds;
        the program's text, which has the callers too, still loses its lines.

        Args:
            place: The compile's folder.
            want_buffers: Whether the compiler's dumps are needed too.
            need_lines: Whether dumps without source lines are no use.

        Returns:
            The worker's answer, or None where it is not known.
        """
        for path in self._candidates(own_only=want_buffers and need_lines):
            try:
                files = _read(path, self.key.program, want_buffers=want_buffers)
                answer = usable_answer(files.pop(_ANSWER))
                if json.loads(files.pop(_ABOUT))["stacks"] != self.key.stacks:
                    _forget_lines(answer, "error")
                    _forget_lines(files, _PROGRAM)
                if path != self.path:
                    for name in [name for name in files if name.startswith(_DUMPS)]:
                        _forget_lines(files, name)
                _lay_out(files, place)
            except _BROKEN:
                continue
            with contextlib.suppress(OSError):
                os.utime(path)  # the least recently used is removed first
            return answer
        return None

    def keep(self, place: pathlib.Path, *, want_buffers: bool) -> None:
        """Keep the answer that is in a compile's folder. A folder that cannot be written is no error."""
        try:
            self._write(place, want_buffers=want_buffers)
            _prune(self.folder, self.limit_bytes)
        except OSError as error:
            _note(f"{self.folder} cannot be written ({error.strerror or error})")

    def _candidates(self, *, own_only: bool) -> Iterator[pathlib.Path]:
        yield self.path
        if not own_only:
            others = self.folder.glob(f"{self.key.program}-*.zip")
            yield from (path for path in sorted(others) if path != self.path)

    def _write(self, place: pathlib.Path, *, want_buffers: bool) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=self.folder)
        temporary = pathlib.Path(name)
        try:
            with (
                os.fdopen(number, "wb") as file,
                zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as entry,
            ):
                entry.writestr(
                    _ABOUT, json.dumps({"format": _FORMAT, "key": self.key.program, "stacks": self.key.stacks})
                )
                for path, inside in _answer_files(place, want_buffers=want_buffers):
                    entry.write(path, inside)
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)


@functools.cache
def _note(why: str) -> None:
    """Say once why nothing is kept: only compiles are lost by it."""
    folder = advise("environment.set", name=_VARIABLE, value="/a/folder")
    print_line(f"compilers' answers are not kept, since {why}. Name a folder for them: {folder}")


def without_source_lines(text: str) -> str:
    """HLO text, or a compiler's message, without the source lines in it; the operations' names stay."""
    return _LINE.sub("", _TABLES.sub("", text))


def _forget_lines(texts: dict[str, Any], name: str) -> None:
    if name in texts:
        texts[name] = without_source_lines(texts[name])


def _answer_files(place: pathlib.Path, *, want_buffers: bool) -> Iterator[tuple[pathlib.Path, str]]:
    """The files that make an answer, with their names inside an entry. A refusal has no program."""
    yield place / _ANSWER, _ANSWER
    if (place / _PROGRAM).exists():
        yield place / _PROGRAM, _PROGRAM
        for ending in _DUMP_ENDINGS if want_buffers else ():
            dump = dump_file(place / _DUMPS, ending)
            yield dump, _DUMPS + dump.name


def _read(path: pathlib.Path, key: str, *, want_buffers: bool) -> dict[str, str]:
    """An entry's files by name; checksums are compared while they are read."""
    with zipfile.ZipFile(path) as entry:
        about = json.loads(entry.read(_ABOUT))
        ours = about["format"] == _FORMAT and about["key"] == key
        names = set(entry.namelist())
        dumps = sorted(name for name in names if name.startswith(_DUMPS) and pathlib.PurePath(name).name)
        complete = _PROGRAM not in names or not want_buffers or len(dumps) == len(_DUMP_ENDINGS)
        if not ours or not complete:
            msg = f"{path} holds another answer"
            raise ValueError(msg)
        wanted = [_ABOUT, _ANSWER, *({_PROGRAM} & names), *(dumps if want_buffers else ())]
        return {name: entry.read(name).decode("utf-8") for name in wanted}


def _lay_out(files: Mapping[str, str], place: pathlib.Path) -> None:
    (place / _DUMPS).mkdir(exist_ok=True)
    for name, text in files.items():
        folder = place / _DUMPS if name.startswith(_DUMPS) else place
        (folder / pathlib.PurePath(name).name).write_text(text, "utf-8")


def _prune(folder: pathlib.Path, limit_bytes: int) -> None:
    """Remove the least recently used entries above the limit, and what a process that was killed left half written.

    Only files named as this module names them are ever removed.
    """
    entries: list[tuple[float, int, pathlib.Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process prunes too
            stat = path.stat()
            if _ENTRY.fullmatch(path.name):
                entries.append((stat.st_mtime, stat.st_size, path))
            elif path.name.startswith(_TEMPORARY) and time.time() - stat.st_mtime > _HOUR_S:
                path.unlink()
    excess = sum(size for _, size, _ in entries) - limit_bytes
    for _, size, path in sorted(entries):
        if excess <= 0:
            break
        path.unlink(missing_ok=True)
        excess -= size


def _wants_a_real_compile(options: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Whether flags have the compiler write or read files, or are in one: no key can know their contents."""
    flags = environment.get("XLA_FLAGS", "").strip()
    texts = [
        flags,
        environment.get("LIBTPU_INIT_ARGS", ""),
        *(f"--{name}={value}" for name, value in options.items()),
    ]
    return any(_NAMES_FILES.search(_TOOLS.sub("", text)) for text in texts) or (
        flags != "" and not flags.startswith("-")
    )


@functools.cache
def _worker_code() -> str:
    """A hash of the code that lowers, compiles and reads the figures: no version shows what it does to an answer."""
    package = importlib.resources.files("jaxmem_callbacks.programs")
    parts = (package / "targets" / "worker_main.py", *(package / "reading" / f"{name}.py" for name in _FIGURES_IN))
    return hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()
