"""Answers of absent targets' compilers on disk: what they depend on, how they are kept, and what is no answer.

All without a compiler; `test_targets_twice.py` asks real ones.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
import time
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxmem_callbacks.programs.reading.hlo import parse_module
from jaxmem_callbacks.programs.targets.cache import (
    Entry,
    Fingerprint,
    cache_entry,
    program_fingerprint,
    without_source_lines,
)
from jaxmem_callbacks.programs.targets.exporting import export_program, flatten_program
from jaxmem_callbacks.programs.targets.worker import worker_environment
from tests import target_step as step_of_others
from tests.target_step import shape

# What is compiled: hash of the program, and of its source lines.

STEP = """
import jax, jax.numpy as jnp, numpy as np
TABLE = np.arange(5000, dtype=np.float32)

@jax.jit
def inner(x):
    return jnp.where(x > 0, x, 0.0)

def step(w, x):
    with jax.named_scope("block"):
        out = inner(jnp.tanh(x @ w)).at[jnp.array([1, 1])].add(1.0)
    return (out * TABLE[: out.size].reshape(out.shape)).sum(), w
"""


STEP_ARGS = (shape(8, 40), shape(100, 8))


def fingerprint(source=STEP, *, file="step.py", args=STEP_ARGS, platform="cuda"):
    names = {}
    exec(compile(source, file, "exec"), names)  # noqa: S102 - the same source in other places
    return program_fingerprint(export_program(flatten_program(names["step"], args, {}), platform).blob)


@pytest.mark.core
def test_moved_source_lines_are_the_same_program_with_other_lines():
    plain, again = [fingerprint() for _ in range(2)]
    assert again == plain
    caller = fingerprint()
    assert (caller.program, caller.lines) == (plain.program, plain.lines)
    assert caller.stacks != plain.stacks
    for moved in (fingerprint("# a comment\n" * 7 + STEP), fingerprint(file="<a notebook's cell>")):
        assert moved.program == plain.program
        assert moved.lines != plain.lines
        assert moved.stacks != plain.stacks
    deeper = STEP.replace("def step(w, x):", "def step(w, x):\n    return body(w, x)\n\ndef body(w, x):")
    assert fingerprint(deeper).program == plain.program  # with more lines, from which on the others are numbered
    between = fingerprint(STEP.replace("    return (out", "\n\n    # why\n    return (out"))
    assert between.program == plain.program
    assert between.lines != plain.lines


@pytest.mark.core
def test_functions_that_jax_makes_are_the_same_program_wherever_they_are_called():
    """Their arguments tell where: JAX numbers those places."""
    split = STEP.replace(
        "    with", "    w = w + jax.random.key_data(jax.random.split(jax.random.key(0), 4)).sum()\n    with"
    )
    assert split != STEP
    deeper = split.replace("def step(w, x):", "def step(w, x):\n    return body(w, x)\n\ndef body(w, x):")
    assert fingerprint(deeper).program == fingerprint(split).program


@pytest.mark.core
@pytest.mark.parametrize(
    "changed",
    [
        {"source": STEP.replace("jnp.tanh", "jnp.sin")},
        {"source": STEP.replace('"block"', '"other"')},
        {"source": STEP.replace("def step", "def stop").replace("w\n", "w\nstep = stop\n")},
        {"source": STEP.replace("dtype=np.float32)", "dtype=np.float32) + (np.arange(5000) == 77)")},
        {"args": (shape(8, 40), shape(50, 8))},
        {"args": (shape(8, 40, dtype=jnp.bfloat16), shape(100, 8))},
        {"platform": "tpu"},
    ],
    ids=["operation", "scope", "name", "constant", "shape", "dtype", "platform"],
)
def test_another_program_has_another_hash(changed):
    assert fingerprint(**changed).program != fingerprint().program


@pytest.mark.core
def test_a_program_with_large_constants_is_hashed_as_it_is():
    table = np.random.default_rng(0).random(5 * 2**20, np.float32)

    def found():
        return program_fingerprint(export_program(flatten_program(lambda x: x + table, (shape(1),), {}), "cuda").blob)

    one, again = [found() for _ in range(2)]
    assert one == again
    assert one.program == one.lines == one.stacks
    table[-1] += 1
    assert found().program != one.program


IN_ANOTHER_PROCESS = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
sys.path.insert(0, sys.argv[1])
import target_step as t
from jaxmem_callbacks.programs.targets.exporting import export_program, flatten_program
from jaxmem_callbacks.programs.targets.cache import program_fingerprint
found = program_fingerprint(export_program(flatten_program(t.train_step, t.ARGS, {}), "cuda").blob)
print(json.dumps([found.program, found.lines, found.stacks]))
"""


@pytest.mark.core
def test_every_process_finds_the_same_hashes():
    def elsewhere(seed):
        environment = os.environ | {"PYTHONPATH": worker_environment("")["PYTHONPATH"], "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(pathlib.Path(__file__).parent)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    with elsewhere("1") as one, elsewhere("2") as two:
        answers = [json.loads(process.communicate()[0]) for process in (one, two)]
    assert answers[0] == answers[1]
    here = export_program(flatten_program(step_of_others.train_step, step_of_others.ARGS, {}), "cuda")
    assert program_fingerprint(here.blob).program == answers[0][0]  # though another caller traced it


# What an answer depends on.

REQUEST = {
    "name": "step",
    "platform": "cuda",
    "topology": "1x1x1",
    "topology_options": {},
    "target_config": "memory: 80",
    "device_count": 1,
    "shardings": [None],
    "out_shardings": None,
    "donated": [0],
    "compiler_options": {"xla_gpu_enable_triton_gemm": False},
    "jax_config": {"jax_compiler_enable_remat_pass": True},
}
VERSIONS = {"jax-cuda12-plugin": "0.12.0"}


@functools.cache
def blob(factor):
    return export_program(flatten_program(lambda x: x * factor, (shape(4),), {}), "cuda").blob


def key(factor=2, versions=VERSIONS, environment=None, **request):
    entry = cache_entry(blob(factor), REQUEST | request, versions, environment or {"PATH": "/bin"})
    return entry and entry.key.program


@pytest.mark.parametrize(
    "changed",
    [
        {"factor": 3},
        {"topology": "1x1x8"},
        {"topology_options": {"chip_config_name": "megacore"}},
        {"target_config": "memory: 40"},
        {"shardings": [{"axes": [["data", 4]], "spec": ["data"], "memory_kind": None}]},
        {"out_shardings": [None]},
        {"donated": []},
        {"compiler_options": {}},
        {"jax_config": {"jax_compiler_enable_remat_pass": False}},
        {"versions": {"jax-cuda12-plugin": "0.12.1"}},
        {"environment": {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true"}},
        {"environment": {"XLA_FLAGS": "--xla_gpu_cuda_data_dir=/opt/cuda"}},
        {"environment": {"LIBTPU_INIT_ARGS": "--xla_tpu_enable_latency_hiding_scheduler=true"}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_changes_an_answer_changes_its_key(changed):
    assert key(**changed) not in {key(), None}


def test_what_does_not_change_an_answer_does_not_change_its_key():
    assert key() == key(environment={"PATH": "/other", "TMPDIR": "/tmp", "CUDA_VISIBLE_DEVICES": "3"})  # noqa: S108


@pytest.mark.parametrize(
    "changed",
    [
        {"environment": {"XLA_FLAGS": "--xla_dump_to=/somewhere"}},
        {"environment": {"LIBTPU_INIT_ARGS": "--xla_dump_hlo_as_text"}},
        {"environment": {"XLA_FLAGS": "flags.txt"}},
        {"environment": {"XLA_FLAGS": "--xla_gpu_load_autotune_results_from=tuned.textproto"}},
        {"environment": {"XLA_FLAGS": "--xla_gpu_pgle_profile_file_or_directory_path=profile"}},
        {"environment": {"XLA_FLAGS": "--xla_gpu_something_new=results/tuned.bin"}},
        {"compiler_options": {"xla_dump_to": "somewhere"}},
    ],
)
def test_flags_that_want_files_or_lie_in_one_want_a_real_compile(changed):
    assert key(**changed) is None


# How answers are kept.

ANSWER = {"figures": {"temp_bytes": 12}, "kept": [0], "compile_seconds": 0.5, "warnings": []}
HLO = 'HloModule jit_step\n\nFileNames\n1 "step.py"\n\nStackFrames\n1 {file_location_id=1 parent_frame_id=1}\n\n\nENTRY %main\n'
DUMPS = {f"m.sm_90_gpu_after_optimizations{end}": end for end in ("-buffer-assignment.txt", "-live-range.txt", ".txt")}


def worked(place, *, dumps=False, answer=ANSWER):
    """A compile's folder as a worker leaves it."""
    (place / "dump").mkdir(parents=True)
    (place / "answer.json").write_text(json.dumps(answer))
    if "error" not in answer:
        (place / "optimised.hlo").write_text(HLO)
    for name, text in DUMPS.items() if dumps else ():
        (place / "dump" / name).write_text(text)
    return place


def entry_in(folder, program="a" * 64, lines="1" * 64, stacks="2" * 64, **options):
    return Entry(folder=folder, key=Fingerprint(program=program, lines=lines, stacks=stacks), **options)


def loaded(entry, place, *, want_buffers=False):
    place.mkdir(exist_ok=True)
    return entry.load(place, want_buffers=want_buffers)


@pytest.mark.core
def test_an_answer_comes_back_as_the_worker_left_it(tmp_path):
    entry = entry_in(tmp_path / "new" / "folder")
    assert loaded(entry, tmp_path / "none") is None
    entry.keep(worked(tmp_path / "made", dumps=True), want_buffers=True)
    assert loaded(entry, tmp_path / "again", want_buffers=True) == ANSWER
    assert (tmp_path / "again" / "optimised.hlo").read_text() == HLO
    assert {path.name: path.read_text() for path in (tmp_path / "again" / "dump").iterdir()} == DUMPS
    assert loaded(entry, tmp_path / "smaller") == ANSWER
    assert list((tmp_path / "smaller" / "dump").iterdir()) == []
    assert [path.name for path in entry.folder.iterdir()] == [entry.path.name]  # and nothing half written


def test_buffers_that_were_not_asked_for_are_not_there(tmp_path):
    entry = entry_in(tmp_path)
    entry.keep(worked(tmp_path / "made"), want_buffers=False)
    assert loaded(entry, tmp_path / "again", want_buffers=True) is None
    entry.keep(worked(tmp_path / "more", dumps=True), want_buffers=True)
    assert loaded(entry, tmp_path / "again", want_buffers=True) == ANSWER


BARE_HLO = "HloModule jit_step\n\n\nENTRY %main\n"


def test_moved_lines_keep_the_figures_and_lose_the_lines(tmp_path):
    entry_in(tmp_path).keep(worked(tmp_path / "made", dumps=True), want_buffers=True)
    moved = entry_in(tmp_path, lines="3" * 64, stacks="4" * 64)
    assert loaded(moved, tmp_path / "again") == ANSWER
    assert (tmp_path / "again" / "optimised.hlo").read_text() == BARE_HLO
    assert loaded(moved, tmp_path / "buffers", want_buffers=True) is None
    assert loaded(entry_in(tmp_path, program="b" * 64), tmp_path / "other") is None


def test_buffers_without_lines_do_where_nobody_needs_them(tmp_path):
    entry_in(tmp_path).keep(worked(tmp_path / "made", dumps=True), want_buffers=True)
    moved = entry_in(tmp_path, lines="3" * 64, stacks="4" * 64)
    place = tmp_path / "again"
    place.mkdir()
    assert moved.load(place, want_buffers=True, need_lines=False) == ANSWER
    assert {path.name for path in (place / "dump").iterdir()} == set(DUMPS)
    entry_in(tmp_path, program="d" * 64).keep(worked(tmp_path / "bare"), want_buffers=False)
    other = entry_in(tmp_path, program="d" * 64, lines="3" * 64)
    assert other.load(place, want_buffers=True, need_lines=False) is None


def test_a_moved_caller_keeps_the_buffers_too(tmp_path):
    entry_in(tmp_path).keep(worked(tmp_path / "made", dumps=True), want_buffers=True)
    assert loaded(entry_in(tmp_path, stacks="4" * 64), tmp_path / "again", want_buffers=True) == ANSWER
    assert (tmp_path / "again" / "optimised.hlo").read_text() == BARE_HLO
    assert {path.name: path.read_text() for path in (tmp_path / "again" / "dump").iterdir()} == DUMPS


def test_a_refusal_is_an_answer_and_has_no_program(tmp_path):
    words = 'RESOURCE_EXHAUSTED: (29.24G); %add, metadata={op_name="jit(step)/add" source_file="a.py" source_line=3}'
    refusal = {"error": words, "warnings": []}
    entry_in(tmp_path).keep(worked(tmp_path / "made", answer=refusal), want_buffers=True)
    assert loaded(entry_in(tmp_path), tmp_path / "again", want_buffers=True) == refusal
    moved = loaded(entry_in(tmp_path, lines="3" * 64, stacks="4" * 64), tmp_path / "moved")
    assert moved["error"] == 'RESOURCE_EXHAUSTED: (29.24G); %add, metadata={op_name="jit(step)/add"}'


@pytest.mark.core
def test_the_lines_of_a_real_program_go_and_its_names_stay():
    def step(x):
        with jax.named_scope("block"):
            return jnp.tanh(x @ x)

    text = jax.jit(step).lower(shape(8, 8)).compile().as_text()
    assert any(found.source for found in parse_module(text).instructions.values())
    bare = without_source_lines(text)
    assert pathlib.Path(__file__).name not in bare
    before, after = parse_module(text).instructions, parse_module(bare).instructions
    assert {name: found.op_name for name, found in after.items()} == {n: found.op_name for n, found in before.items()}
    assert not any(found.source for found in after.values())


def write_zip(path, **files):
    with zipfile.ZipFile(path, "w") as entry:
        for name, text in files.items():
            entry.writestr(name.replace("_", "."), text)


ABOUT = json.dumps({"format": 1, "key": "a" * 64, "stacks": "2" * 64})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-30]),
        lambda path: path.write_bytes(os.urandom(500)),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: write_zip(path, somebody_else="x"),
        lambda path: write_zip(path, about_json=ABOUT.replace("1", "0", 1), answer_json=json.dumps(ANSWER)),
        lambda path: write_zip(path, about_json=ABOUT.replace("aa", "bb"), answer_json=json.dumps(ANSWER)),
        lambda path: write_zip(path, about_json="[]", answer_json=json.dumps(ANSWER)),
        lambda path: write_zip(path, about_json=ABOUT, answer_json="{"),
        lambda path: write_zip(path, about_json=ABOUT, answer_json=json.dumps({"figures": {}})),
    ],
    ids=["empty", "truncated", "noise", "folder", "foreign", "format", "key", "about", "no JSON", "no answer"],
)
def test_what_is_no_answer_is_not_taken_and_is_replaced(tmp_path, spoil):
    entry = entry_in(tmp_path)
    entry.keep(worked(tmp_path / "made"), want_buffers=False)
    spoil(entry.path)
    assert loaded(entry, tmp_path / "again") is None
    assert not (tmp_path / "again" / "optimised.hlo").exists()
    entry.keep(tmp_path / "made", want_buffers=False)
    if entry.path.is_file():  # nothing is put in a folder's place: it is somebody's
        assert loaded(entry, tmp_path / "again") == ANSWER


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    entry = entry_in(tmp_path_factory.mktemp("kept"))
    entry.keep(worked(entry.folder / "made", dumps=True), want_buffers=True)
    return entry, entry.path.read_bytes()


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_wrong_bit_is_never_a_wrong_answer(kept, data):
    entry, whole = kept
    place = data.draw(st.integers(0, len(whole) * 8 - 1))
    spoilt = bytearray(whole)
    spoilt[place // 8] ^= 1 << place % 8
    entry.path.write_bytes(spoilt)
    answer = loaded(entry, entry.folder / "place", want_buffers=True)
    assert answer in (None, ANSWER)
    if answer:
        assert (entry.folder / "place" / "optimised.hlo").read_text() == HLO


def test_the_least_recently_used_goes_first(tmp_path):
    made = worked(tmp_path / "made")
    entries = [entry_in(tmp_path / "cache", program=letter * 64) for letter in "abc"]
    for age, entry in zip((300, 200, 100), entries, strict=True):
        entry.keep(made, want_buffers=False)
        os.utime(entry.path, (time.time() - age,) * 2)
    (tmp_path / "cache" / "thesis.zip").write_bytes(b"x" * 10_000)
    stale, fresh = tmp_path / "cache" / ".jaxmem-stale", tmp_path / "cache" / ".jaxmem-fresh"
    for path, age in ((stale, 7200), (fresh, 60)):
        path.write_bytes(b"")
        os.utime(path, (time.time() - age,) * 2)
    assert loaded(entries[0], tmp_path / "again") == ANSWER  # now used last
    size = entries[0].path.stat().st_size
    entry_in(tmp_path / "cache", program="d" * 64, limit_bytes=3 * size).keep(made, want_buffers=False)
    left = sorted(path.name[0] for path in (tmp_path / "cache").glob("*-*.zip"))
    assert left == ["a", "c", "d"]
    assert (tmp_path / "cache" / "thesis.zip").exists()  # only what bears our own names is removed
    assert (stale.exists(), fresh.exists()) == (False, True)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    entry = entry_in(tmp_path / "file" / "cache")
    assert loaded(entry, tmp_path / "again") is None
    entry.keep(worked(tmp_path / "made"), want_buffers=False)
    assert loaded(entry, tmp_path / "again") is None
    assert (tmp_path / "file").read_text() == "in the way"
