"""Each field of each record as each type of JSON: the record of just that, or an error with file, line and field."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.readers import runs, traces
from jaxmem_callbacks.readers.accounts import read_account
from jaxmem_callbacks.readers.decoding import record_from
from jaxmem_callbacks.readers.runs import read_lines
from jaxmem_callbacks.readers.traces import read_trace
from jaxmem_callbacks.records.accounts import Account
from jaxmem_callbacks.records.errors import RunFileError, SimulationError
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.traces import TraceHead
from tests import sample_plans
from tests.sample_runs import write_run


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


# Every type that JSON has, and of each what is likely to be mistaken for something else.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**62, 10**400, 0.5, 1e308, math.nan, math.inf, -math.inf),
    *("", "inf", "nan", "text", "\ud800", [], [1], [[]], ["a", 1], nested(60), {}, {"a": 1}, {"kind": []}),
)
RECORDS = {**runs.KINDS, **{f"trace's {name}": kind for name, kind in traces.KINDS.items()}}
RECORDS |= {"head": TraceHead, "account": Account}


def sample(hint: Any) -> Any:  # noqa: PLR0911 - one a kind of type
    """JSON that a field of this type takes, with something in every part."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is StepPolicy:
        return dataclasses.asdict(StepPolicy(remat="full", save=("out",)))
    if dataclasses.is_dataclass(hint):
        return {field.name: sample(get_type_hints(hint)[field.name]) for field in dataclasses.fields(hint)}
    if origin in (Union, types.UnionType):
        return sample(next(each for each in inner if each is not type(None)))
    if origin is Literal:
        return inner[0]
    if origin in (Mapping, dict):
        return {"name": sample(inner[1])}
    if origin in (tuple, Sequence, list):
        return [sample(each) for each in (inner[:1] if inner[-1] is Ellipsis else inner)]
    return {int: 3, float: 2.5, bool: True, str: "text"}.get(hint, "anything")


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in pairs:
        yield from places(each, (*at, name))


def put(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    changed = value.copy()
    changed[at[0]] = put(value[at[0]], at[1:], new)
    return changed


def outcome(kind: type[Any], data: Any) -> tuple[Any, str]:
    """The record, or what is said against it."""
    try:
        return record_from(kind, data), ""
    except ValueError as error:
        return None, str(error)


def same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)  # NaN is not itself


@pytest.mark.parametrize("kind", RECORDS.values(), ids=RECORDS)
def test_each_field_takes_its_type_and_refuses_every_other_by_name(kind):
    whole = sample(kind)
    assert dataclasses.is_dataclass(record_from(kind, whole))
    refused = accepted = 0
    for at in places(whole):
        for new in VALUES:
            record, said = outcome(kind, put(whole, at, new))
            if record is None:
                refused += 1
                assert f"`{at[0]}" in said or "`StepPolicy`" in said
                assert len(said) < 500
            else:
                accepted += 1
                again = record_from(kind, json.loads(json.dumps(dataclasses.asdict(record), default=dict)))
                assert same(again, record)
    assert refused > 0
    assert accepted > 0


@pytest.mark.parametrize(
    "new", [v for v in VALUES if v not in ("text", "nan", "inf", "")], ids=lambda new: repr(new)[:20]
)
def test_a_line_of_a_run_is_refused_with_file_line_and_field(new, tmp_path):
    write_run(tmp_path)
    file = tmp_path / "memory.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    number = next(n for n, line in enumerate(lines) if line["kind"] == "event")
    lines[number]["message"] = new
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if isinstance(new, str):
        assert list(read_lines([file]))[number].record.message == new
        return
    with pytest.raises(
        RunFileError, match=rf"memory\.jsonl:{number + 1}: a line of kind 'event' whose `message` is .*expected a text"
    ):
        list(read_lines([file]))


TIMES = ["inf", "-inf", "nan", math.inf, math.nan, 1e30, -1e30, 10**400, [], {}, None, True]


@pytest.mark.parametrize("new", TIMES, ids=lambda new: repr(new)[:20])
def test_a_time_is_one_of_a_calendar(new, tmp_path, capsys):
    write_run(tmp_path)
    file = tmp_path / "memory.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    number = next(n for n, line in enumerate(lines) if "time_s" in line)
    lines[number]["time_s"] = new
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"memory.jsonl:{number + 1}: a line of kind 'run' whose `time_s` is " in said


PLAN = json.loads(jm.Plan(sample_plans.six(mesh={"data": 2}, signature=(("x", "f32[8]"),))).to_json())


@pytest.mark.parametrize(
    ("at", "new", "words"),
    [
        (("candidates", 0, "modelled_s"), [1.0], r"`candidates\[0\].modelled_s` is \[1.0\], expected a number"),
        (("candidates", 0, "modelled_s"), {"a": 1}, r"`candidates\[0\].modelled_s` is \{'a': 1\}, expected a number"),
        (
            ("candidates", 1, "step_bytes"),
            10**400,
            r"`candidates\[1\].step_bytes` is 1000.*expected a number below 2\*\*127",
        ),
        (("candidates", 1, "step_bytes"), True, r"`candidates\[1\].step_bytes` is True, expected a whole number"),
        (("candidates", 0, "policy", "keep"), {"a": 1}, r"`candidates\[0\].policy.keep`"),
        (("mesh",), {"data": "2"}, r"`mesh.data` is '2', expected a whole number"),
        (("signature",), [["x"]], r"`signature\[0\]` is \['x'\], expected a list of 2"),
        (("notes",), "one", r"`notes` is 'one', expected a list"),
        (("chosen",), 99, r"`chosen` is 99, expected the place of one of"),
        (("chosen",), -1, r"`chosen` is -1, expected the place of one of"),
        (("reason",), nested(60), r"`reason` is \[\[.*expected a text"),
    ],
)
def test_a_plan_with_another_type_is_refused_by_its_field_and_file(at, new, words, tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(put(PLAN, at, new)))
    with pytest.raises(RunFileError, match=rf"plan\.json is no plan: {words}"):
        jm.load_plan(path)
    with pytest.raises(RunFileError, match=rf"plan\.json: {words}"):
        read_account(path)
    assert main(["compare", str(path), str(path)]) == 2
    assert "plan.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "", "null", "[]", '"x"', "\x00", "{", "NaN"]
)
def test_what_is_no_object_is_refused_by_every_reader(text, tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(text)
    for read in (jm.load_plan, read_account):
        with pytest.raises(RunFileError, match=r"plan\.json"):
            read(path)
    with pytest.raises(SimulationError, match=r"plan\.json"):
        read_trace(path)
    (tmp_path / "memory.jsonl").write_text(f"{text}\n{{}}\n")
    assert main(["report", str(tmp_path)]) == 2
    assert "memory.jsonl:" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [[], {}, None, 1, "nothing", 10**400])
def test_a_kind_of_a_trace_is_a_word(kind, tmp_path):
    path = tmp_path / "trace.jsonl"
    head = {"kind": "trace", "form": 1, **sample(TraceHead)}
    path.write_text(f"{json.dumps(head)}\n{json.dumps({'kind': kind})}\n")
    with pytest.raises(SimulationError, match=r"trace\.jsonl:2: .*`kind` is .*expected one of alloc, free"):
        read_trace(path)
