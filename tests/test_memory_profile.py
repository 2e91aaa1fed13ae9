"""JAX's device memory profile with names: its file, its sums, `jaxmem profile`, and captures near OOM."""

from __future__ import annotations

import gzip
import json
import logging
import textwrap
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.probes.memory_profile import NO_ARRAY, OTHER_ARRAYS, memory_profile
from jaxmem_callbacks.records.pprof import profile_bytes, profile_from
from jaxmem_callbacks.records.presets import MonitorSettings

SETTINGS = MonitorSettings(window_s=0.05, scan_s=0.05, on_error="raise")
WIDTH = 1031  # no other test has arrays of this size
# Of github.com/google/pprof/proto/profile.proto: number, name, message, repeated.
SCHEMA = {
    "Profile": [
        *((1, "sample_type", "ValueType", True), (2, "sample", "Sample", True), (4, "location", "Location", True)),
        *((5, "function", "Function", True), (6, "string_table", str, True), (9, "time_nanos", int, False)),
        (13, "comment", int, True),
    ],
    "ValueType": [(1, "type", int, False), (2, "unit", int, False)],
    "Sample": [(1, "location_id", int, True), (2, "value", int, True), (3, "label", "Label", True)],
    "Label": [(1, "key", int, False), (2, "str", int, False), (3, "num", int, False)],
    "Location": [(1, "id", int, False), (4, "line", "Line", True)],
    "Line": [(1, "function_id", int, False), (2, "line", int, False)],
    "Function": [
        (1, "id", int, False),
        (2, "name", int, False),
        (3, "system_name", int, False),
        (4, "filename", int, False),
    ],
}


def pprof():
    """The class of pprof's messages, made by protobuf of the schema."""
    file = descriptor_pb2.FileDescriptorProto(name="profile.proto", package="perftools", syntax="proto3")
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for number, field, kind, repeated in fields:
            added = message.field.add(name=field, number=number, label=3 if repeated else 1)
            added.type = {int: 3, str: 9}.get(kind, 11)
            if isinstance(kind, str):
                added.type_name = f".perftools.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("perftools.Profile"))


def parsed(data):
    return pprof().FromString(gzip.decompress(data))


def adam_step(width=WIDTH):
    """A step under Adam that has run, its state and batch."""
    optimizer = optax.adam(1e-3)

    def train_step(params, opt_state, batch):
        loss, grads = jm.value_and_grad(lambda p: jnp.mean((batch @ p["kernel"] + p["bias"]) ** 2))(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    step = jm.jit_step(train_step)
    params = {"kernel": jnp.zeros((width, 64)), "bias": jnp.zeros(width * 3 + 64)[:64]}
    opt_state, batch = optimizer.init(params), jnp.ones((32, width))
    params, opt_state, loss = step(params, opt_state, batch)
    jax.block_until_ready(loss)
    return step, params, opt_state, batch


def held(profile, shape):
    """What holds the buffers of a shape -> allocations and bytes."""
    found = Counter()
    for sample in profile.samples:
        if sample.labels.get("shape") == shape:
            found[sample.labels["holds"], sample.count, sample.bytes] += 1
    return set(found)


@pytest.mark.core
def test_results_of_one_call_are_told_apart_by_what_the_step_takes():
    alive = adam_step()
    profile = memory_profile(step=7)
    size = WIDTH * 64 * 4
    kernels = f"float32[{WIDTH},64]"
    assert held(profile, kernels) == {("parameters", 1, size), ("optimizer state", 2, 2 * size)}
    assert held(profile, f"float32[32,{WIDTH}]") == {("batch", 1, 32 * WIDTH * 4)}
    by_path = {sample.labels.get("path") for sample in profile.samples}
    assert {"params['kernel']", "batch"} <= by_path
    assert any(str(path).startswith("opt_state[0].mu") and "or 1 more of its shape" in path for path in by_path if path)
    moments = {"holds": "optimizer state", "shape": kernels}
    frames = next(each.frames for each in profile.samples if moments.items() <= each.labels.items())
    assert frames[1].function == "optimizer state"
    assert any(frame.file.endswith("test_memory_profile.py") for frame in frames), "the call that made them stays"
    del alive


@pytest.mark.core
def test_nothing_of_jaxs_own_profile_is_lost():
    alive = adam_step()
    before = profile_from(jax.profiler.device_memory_profile())
    named = memory_profile()
    for what in ("buffer", "executable"):
        sums = [
            (sum(each.count for each in kept), sum(each.bytes for each in kept))
            for profile in (before, named)
            for kept in [[each for each in profile.samples if each.labels["kind"] == what]]
        ]
        assert sums[0] == sums[1]
    del alive


@pytest.mark.core
def test_names_of_a_call_are_exact_and_what_it_does_not_take_is_named_so():
    from jaxmem_callbacks.programs.steps.leaves import user_leaves

    mine, beside = jnp.zeros((WIDTH, 7)), jnp.zeros((WIDTH, 9))
    profile = memory_profile(leaves=user_leaves("params", {"w": mine}))
    assert held(profile, f"float32[{WIDTH},7]") == {("parameters", 1, mine.nbytes)}
    assert held(profile, f"float32[{WIDTH},9]") == {(OTHER_ARRAYS, 1, beside.nbytes)}


def test_more_arrays_than_the_step_takes_are_not_called_parameters_alone():
    step, params, opt_state, batch = adam_step(WIDTH + 2)
    copies = [params["kernel"] + 1 for _ in range(3)]
    profile = memory_profile()
    holds = {name for name, _, _ in held(profile, f"float32[{WIDTH + 2},64]")}
    assert holds == {"parameters or optimizer state or other arrays"}
    del step, opt_state, batch, copies


def test_what_is_alive_without_a_live_array_is_named_so():
    array = jnp.zeros((WIDTH, 11))
    data = profile_from(jax.profiler.device_memory_profile())
    from jaxmem_callbacks.probes import memory_profile as probe

    parts = [part for sample in data.samples for part in probe._divided(sample, {})]
    assert {part.labels.get("holds") for part in parts if part.labels["kind"] == "buffer"} == {NO_ARRAY}
    del array


@pytest.mark.core
def test_the_file_is_what_pprofs_schema_says():
    alive = adam_step()
    profile = memory_profile(step=7)
    message = parsed(profile_bytes(profile))
    texts = list(message.string_table)
    assert texts[0] == ""
    assert [(texts[each.type], texts[each.unit]) for each in message.sample_type] == [
        ("allocations", "count"),
        ("space", "bytes"),
    ]
    locations = {each.id: each for each in message.location}
    functions = {each.id: each for each in message.function}
    assert 0 not in locations, "pprof refuses a location without a number"
    read = []
    for sample in message.sample:
        frames = tuple(
            (texts[functions[line.function_id].name], texts[functions[line.function_id].filename], line.line)
            for at in sample.location_id
            for line in locations[at].line
        )
        labels = {texts[label.key]: texts[label.str] if label.str else label.num for label in sample.label}
        read.append((frames, tuple(sample.value), labels))
    assert read == [(each.frames, (each.count, each.bytes), dict(each.labels)) for each in profile.samples]
    assert all(labels["step"] == 7 for _, _, labels in read)
    assert texts[message.comment[0]].startswith("Device memory after step 7, by jaxmem_callbacks ")
    again = profile_from(profile_bytes(profile))
    assert (again.samples, again.comments) == (profile.samples, profile.comments)
    del alive


@pytest.mark.parametrize("data", [b"", b"text", gzip.compress(b"\x0a", mtime=0), b"\x1f\x8b\x00", b"\x08\x01"])
def test_what_is_no_profile_is_refused(data):
    with pytest.raises(ValueError, match=r"no memory profile in pprof's format"):
        profile_from(data)


def limited(logdir, profiles, *, pause=None):
    """A run whose limit is under what it holds at once, and again after a pause."""
    settings = replace(SETTINGS, limit_bytes=2**20, near_oom_profiles=profiles)
    with jm.MemoryMonitor(settings, logdir=logdir) as monitor:
        held = jnp.zeros((WIDTH, 1024))
        monitor(0)
        monitor.flush()
        for step in range(1, 4 if pause else 1):
            monitor.tell(replace(monitor.events[0], step=step))
            monitor.flush()
    del held
    return monitor


@pytest.mark.core
def test_a_profile_is_kept_near_oom_where_it_was_asked_for(tmp_path, capfd, caplog):
    with caplog.at_level(logging.INFO, logger="jaxmem_callbacks"):
        limited(tmp_path, 1)
    (path,) = tmp_path.glob("*.pb.gz")
    assert path.name == "near_oom.step-0.pb.gz"
    assert f"`jaxmem profile {path}` shows it." in caplog.text
    profile = profile_from(path.read_bytes())
    assert held(profile, f"float32[{WIDTH},1024]") == {(OTHER_ARRAYS, 1, WIDTH * 4096)}
    assert path.stat().st_mode & 0o077 == 0
    assert main(["profile", str(path)]) == 0
    assert "test_memory_profile.py:" in capfd.readouterr().out


def test_no_more_profiles_are_kept_than_were_asked_for(tmp_path):
    limited(tmp_path, 2, pause=True)
    assert len(list(tmp_path.glob("*.pb.gz"))) == 2


def test_no_profile_is_kept_unasked(tmp_path):
    assert limited(tmp_path, 0).events
    assert not list(tmp_path.glob("*.pb.gz"))


SCRIPT = """
import jax, jax.numpy as jnp
import jaxmem_callbacks as jm

def train_step(params, batch):
    loss, grads = jm.value_and_grad(lambda p: jnp.mean((batch @ p["w"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), loss

params = {"w": jnp.ones((1033, 17))}
kept = jnp.ones((1033, 19))
step = jm.jit_step(train_step)
step(params, jnp.ones((5, 1033)))
raise SystemExit("the step must not run")
"""


@pytest.mark.core
def test_jaxmem_profile_shows_what_is_alive_when_a_script_calls_its_step(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    assert main(["profile", "train.py", "--top", "2000"]) == 0
    out = capsys.readouterr().out
    (weights,) = (line for line in out.splitlines() if "params['w'] float32[1033,17]" in line)
    assert weights.split()[:4] == ["68.6", "KiB", "1", "parameters"]
    assert "train.py:9 (<module>)" in weights
    assert any("batch float32[5,1033]" in line for line in out.splitlines())
    assert any("other arrays" in line and "float32[1033,19]" in line for line in out.splitlines())
    assert out.endswith("wrote memory.pb.gz\n")
    profile = profile_from((tmp_path / "memory.pb.gz").read_bytes())
    assert held(profile, "float32[1033,17]") == {("parameters", 1, 1033 * 17 * 4)}
    assert main(["profile", "memory.pb.gz", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["bytes"] == sum(row["bytes"] for row in read["rows"])
    assert {"holds", "path", "shape", "device", "made_at", "count", "bytes"} == set(read["rows"][0])
    assert main(["profile", "memory.pb.gz", "--top", "1"]) == 0
    assert f"--top {len(read['rows'])}." in capsys.readouterr().out


def test_a_profile_of_jaxs_own_is_shown_without_names(tmp_path, capsys):
    array = jnp.ones((WIDTH, 21))
    jax.profiler.save_device_memory_profile(str(tmp_path / "own.pb.gz"))
    assert main(["profile", str(tmp_path / "own.pb.gz")]) == 0
    assert "not named" in capsys.readouterr().out
    del array


def test_what_cannot_be_read_or_written_is_refused_in_a_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pb.gz").write_bytes(b"text")
    assert main(["profile", "a.pb.gz"]) == 2
    assert "a.pb.gz cannot be read: it is no memory profile" in capsys.readouterr().err
    assert main(["profile", "none.pb.gz"]) == 2
    assert "none.pb.gz cannot be read: No such file or directory." in capsys.readouterr().err
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    assert main(["profile", "train.py", "-o", "none/a.pb.gz"]) == 2
    assert "none/a.pb.gz cannot be written" in capsys.readouterr().err
