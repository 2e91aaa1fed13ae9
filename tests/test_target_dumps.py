"""XLA's dumps: what this library reads is whole whatever the user's flags narrow down, and what the user asked for is theirs."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import jax.numpy as jnp
import pytest

from jaxmem_callbacks.programs.reading.buffer_assignment import assigned_by_kind, dump_options, user_dump_folder
from jaxmem_callbacks.programs.targets.compile import compile_for_target
from jaxmem_callbacks.records.errors import CompileError
from tests import forked
from tests.target_step import SMALL_ARGS, needs_compiler, small_step

NARROW = {"xla_dump_hlo_module_re": "nothing", "xla_dump_max_hlo_modules": 1}
FLAGS = " ".join(f"--{name}={value}" for name, value in NARROW.items())
SCRIPT = """
import json, sys
import jax
sys.path.insert(0, sys.argv[1])
import target_step as t
from jaxmem_callbacks.programs.targets.compile import compile_for_target
jax.jit(lambda x: x + 1).lower(1.0).compile()  # XLA has read the flags
found = compile_for_target(t.small_step, t.SMALL_ARGS, target="cpu", want_buffers=True, cache=False)
print(json.dumps(found.peak.bytes))
"""
# As libtpu writes it, for a program with two temporary allocations on the device and one in the host's memory.
ASSIGNMENT = """BufferAssignment:
allocation 0: size 4096, parameter 0, shape |f32[1024]| at ShapeIndex {}:
 value: <1 p @0> (size=4096,offset=0): f32[1024]{0}
allocation 1: size 1000, preallocated-temp:
 value: <2 a @0> (size=1000,offset=0): f32[250]{0}
allocation 2: size 300, color 5, preallocated-temp:
 value: <3 h @0> (size=300,offset=0): f32[75]{0:S(5)}
allocation 3: size 50, preallocated-temp:
 value: <4 b @0> (size=50,offset=0): s8[50]{0}

Total bytes used: 5446
"""


def assignments(folder):
    return list(folder.glob("*after_optimizations-buffer-assignment.txt"))


def test_flags_of_the_process_neither_narrow_what_is_read_nor_lose_their_own(tmp_path):
    asked = tmp_path / "asked"
    environment = os.environ | {"XLA_FLAGS": f"--xla_dump_to={asked} {FLAGS}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SCRIPT, str(pathlib.Path(__file__).parent)]
    answer = forked.run(command, env=environment, capture_output=True, text=True, check=True)
    here = compile_for_target(small_step, SMALL_ARGS, target="cpu", want_buffers=True, cache=False)
    assert json.loads(answer.stdout) == here.peak.bytes
    assert assignments(asked), answer.stderr


@pytest.mark.targets
def test_options_of_a_compile_do_neither(tmp_path, monkeypatch):
    target = needs_compiler("v5e:1x1")
    plain = compile_for_target(small_step, SMALL_ARGS, target=target, cache=False)
    for want_buffers, options in ((True, {"xla_dump_to": str(tmp_path / "by option")}), (False, {})):
        if not options:
            monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path / 'by_flag'} {FLAGS}")
        found = compile_for_target(
            small_step,
            SMALL_ARGS,
            target=target,
            compiler_options={**NARROW, **options},
            want_buffers=want_buffers,
            cache=False,
        )
        assert found.memory.temp_bytes == plain.memory.temp_bytes
        assert assignments(tmp_path / ("by option" if options else "by_flag"))


def test_dumps_that_cannot_be_handed_over_are_told_and_the_answer_stands(tmp_path):
    (tmp_path / "a file").write_text("")
    options = {"xla_dump_to": str(tmp_path / "a file")}
    with pytest.warns(UserWarning, match="XLA's dumps could not be put into '.*a file'"):
        found = compile_for_target(
            lambda x: jnp.tanh(x).sum(),
            (jnp.ones(8),),
            target="cpu",
            compiler_options=options,
            want_buffers=True,
            cache=False,
        )
    assert found.peak is not None


@pytest.mark.parametrize(
    ("flags", "options", "folder"),
    [
        ("--xla_dump_to=/a --xla_dump_to=/b --xla_x=1", {}, "/b"),
        ("--xla_dump_to=/a", {"xla_dump_to": "/c"}, "/c"),
        ("--xla_dump_to=-", {}, None),
        ("--xla_dump_to=sponge", {}, None),
        ("--xla_dump_to=gs://bucket/a", {}, None),
        ("--xla_dump_hlo_as_text", {}, None),
    ],
)
def test_the_folder_that_was_asked_for(flags, options, folder, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert user_dump_folder(options) == (folder and pathlib.Path(folder))


def test_assigned_bytes_are_the_devices_and_an_unknown_form_is_no_zero(tmp_path):
    dump = tmp_path / "module_0001.f.tpu_comp_after_optimizations-buffer-assignment.txt"
    dump.write_text(ASSIGNMENT)
    assert assigned_by_kind(tmp_path, "tpu")["temporary"] == 1000 + 50
    dump.write_text("BufferAssignment: in another form\n")
    with pytest.raises(CompileError, match=r"has an unknown form\. Expected 'allocation N: size"):
        assigned_by_kind(tmp_path, "tpu")
    dump.unlink()
    with pytest.raises(CompileError, match="wrote no"):
        assigned_by_kind(tmp_path, "tpu")


def test_dump_options_name_the_folder_alone(tmp_path):
    assert [value for value in dump_options(tmp_path).values() if isinstance(value, str)] == [str(tmp_path), ".*"]
