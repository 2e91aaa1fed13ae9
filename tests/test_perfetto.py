"""Traces for Perfetto: the format, the bytes of a real step, lanes without overlap, and the two commands that write them.

The format is Chrome's trace event format as Perfetto documents it for JSON: https://perfetto.dev/docs/getting-started/other-formats.
"""

from __future__ import annotations

import itertools
import json
import textwrap

import jax.numpy as jnp
import jsonschema
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.records.peaks import Buffer, StepBlock, StepSchedule
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.writers.jsonl import JsonlWriter
from jaxmem_callbacks.writers.perfetto import trace_of_steps
from tests.steps import SCRIPT

WHOLE = {"type": "integer", "minimum": 0}
FORMAT = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["ph", "name", "pid", "tid"],
                "properties": {"pid": WHOLE, "tid": WHOLE, "name": {"type": "string", "minLength": 1}},
                "oneOf": [
                    {
                        "properties": {
                            "ph": {"const": "M"},
                            "name": {"enum": ["process_name", "thread_name"]},
                            "args": {"required": ["name"], "properties": {"name": {"type": "string"}}},
                        },
                        "required": ["args"],
                    },
                    {
                        "properties": {
                            "ph": {"const": "C"},
                            "ts": WHOLE,
                            "args": {"minProperties": 1, "additionalProperties": {"type": "number"}},
                        },
                        "required": ["ts", "args"],
                    },
                    {
                        "properties": {"ph": {"const": "i"}, "ts": WHOLE, "s": {"enum": ["g", "p", "t"]}},
                        "required": ["ts", "s"],
                    },
                    {
                        "properties": {
                            "ph": {"const": "X"},
                            "ts": WHOLE,
                            "dur": {"type": "integer", "minimum": 1},
                            "args": {"type": "object"},
                        },
                        "required": ["ts", "dur"],
                    },
                ],
            },
        },
    },
}


def checked(trace):
    """The events of a trace that is right: by its format, and no two slices of a thread overlap."""
    jsonschema.validate(trace, FORMAT)
    events = trace["traceEvents"]
    key = lambda event: (event["pid"], event["tid"])  # noqa: E731
    slices = sorted((each for each in events if each["ph"] == "X"), key=lambda each: (*key(each), each["ts"]))
    for _, group in itertools.groupby(slices, key=key):
        for before, after in itertools.pairwise(group):
            assert before["ts"] + before["dur"] <= after["ts"]
    for _, group in itertools.groupby((each for each in events if each["ph"] == "C"), key=key):
        times = [each["ts"] for each in group]
        assert times == sorted(times)
    return events


def train_step(params, batch):
    hidden = jnp.tanh(batch @ params["a"])
    loss, grads = jm.value_and_grad(lambda p: jnp.mean((jnp.tanh(batch @ p["a"]) @ p["b"]) ** 2))(params)
    return {name: params[name] - 0.1 * grads[name] for name in params}, loss + hidden.sum()


ARGS = ({"a": jnp.ones((256, 512)), "b": jnp.ones((512, 64))}, jnp.ones((128, 256)))


@pytest.mark.core
def test_a_real_steps_bytes_and_blocks_are_in_its_trace():
    memory = jm.step_memory(jm.jit_step(train_step), *ARGS)
    events = checked(trace_of_steps({"train_step": memory.schedule}))
    counters = [each["args"]["bytes"] for each in events if each["ph"] == "C"]
    assert max(counters) == pytest.approx(memory.step_bytes, rel=0.02)
    (held,) = (each for each in events if each["name"] == "held throughout")
    assert held["args"]["bytes"] == memory.schedule.held_bytes
    slices = [each for each in events if each["ph"] == "X" and each is not held]
    assert slices
    assert any(str(each["args"].get("source")).partition(":")[0].endswith("test_perfetto.py") for each in slices)
    (peak,) = (each for each in events if each["ph"] == "i")
    alive = sum(each["args"]["bytes"] for each in slices if each["ts"] <= peak["ts"] < each["ts"] + each["dur"])
    assert held["args"]["bytes"] + alive == pytest.approx(max(counters), rel=0.02)


def test_blocks_at_once_are_in_lanes_and_those_after_another_in_one():
    def block(first, last, group="temporaries"):
        return StepBlock(
            first=first, last=last, base=0, buffer=Buffer(bytes=8, shape="f32[2]{0}", kind="temporary", group=group)
        )

    blocks = (block(0, 3), block(2, 5), block(4, 6), block(1, 1, "gradients"))
    schedule = StepSchedule(length=8, peak_at=2, held_bytes=16, curve=((0, 24),), blocks=blocks)
    events = checked(trace_of_steps({"a": schedule, "b": schedule}))
    lanes = {}
    for each in events:
        if each["ph"] == "X" and each["pid"] == 1 and each.get("cat") == "temporaries":
            lanes.setdefault(each["tid"], []).append((each["ts"], each["dur"]))
    assert list(lanes.values()) == [[(0, 4), (4, 3)], [(2, 4)]]
    names = {each["args"]["name"] for each in events if each["ph"] == "M"}
    assert names == {"a", "b", "temporaries", "gradients", "arguments, results and constants"}


def test_a_program_without_blocks_has_a_trace():
    checked(trace_of_steps({"a": StepSchedule(length=1, peak_at=0, held_bytes=16, curve=())}))


@pytest.mark.core
def test_jaxmem_report_writes_the_programs_of_a_run(tmp_path, capsys):
    with jm.MemoryMonitor(MonitorSettings(tensorboard=False), logdir=tmp_path / "a") as monitor:
        step = jm.jit_step(train_step)
        step(*[{name: value + 1 for name, value in ARGS[0].items()}, ARGS[1]])
        monitor(0)
        monitor.flush()
    assert main(["report", str(tmp_path / "a"), "--perfetto", str(tmp_path / "step.json")]) == 0
    assert f"wrote {tmp_path / 'step.json'}, of train_step" in capsys.readouterr().out
    events = checked(json.loads((tmp_path / "step.json").read_text()))
    assert any("test_perfetto.py:" in str(each.get("args", {}).get("source")) for each in events)
    assert main(["report", str(tmp_path / "a"), "--perfetto", str(tmp_path / "none" / "step.json")]) == 2
    assert "step.json cannot be written" in capsys.readouterr().err


def test_a_run_without_a_schedule_is_refused_in_a_sentence(tmp_path, capsys):
    JsonlWriter(tmp_path / "memory.jsonl", "a").close()
    assert main(["report", str(tmp_path), "--perfetto", str(tmp_path / "step.json")]) == 2
    assert "No program of these runs has its bytes within the step recorded." in capsys.readouterr().err
    assert not (tmp_path / "step.json").exists()


@pytest.mark.core
def test_jaxmem_inspect_writes_a_step_before_it_has_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    assert main(["inspect", "train.py", "--top", "0", "--perfetto", "step.json"]) == 0
    assert capsys.readouterr().out.endswith("wrote step.json\n")
    events = checked(json.loads((tmp_path / "step.json").read_text()))
    assert {each["args"]["name"] for each in events if each["name"] == "process_name"} == {"train_step"}
    assert main(["inspect", "train.py", "--top", "0", "--json", "--perfetto", "none/step.json"]) == 2
    assert "none/step.json cannot be written" in capsys.readouterr().err
