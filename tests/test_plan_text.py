"""What a plan and a peak print: sentences within the console, shares that tell what fits, operations that a row has room for."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.config.presets import parse_preset
from jaxmem_callbacks.planning.verdict import unfit_reason
from jaxmem_callbacks.records.peaks import Buffer, Peak, peak_of, short_operation, short_shape
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.writers.plan_table import plan_rows
from tests import sample_plans as samples
from tests.sample_plans import GIB, MIB, sentences

NOTE = "Remat was not tried: " + "so many words that no console has room for them in one line " * 4
CODE = "    step = jm.jit_step(train_step, jm.StepPolicy(remat='full', segments=24, keep=0.25, microbatches=4, donate=None))"


def peak() -> Peak:
    path = "jit(train_step)/transpose(jvp(Encoder/Block_3))/while/body/closed_call/checkpoint/rematted_computation/exp"
    temporary = Buffer(bytes=800, shape="f32[512,256]{1,0}", kind="temporary", group="temporaries", operation=path)
    parts = ", ".join(["(s32[], f32[8]{0})", *["f32[256,64]{1,0:T(8,128)}"] * 7, "/*index=8*/f32[2]{0}"])
    results = Buffer(bytes=100, shape=f"({parts})", kind="output", group="results")
    return peak_of([temporary, results], moment=f"{path} (train.py:10)")


@pytest.mark.parametrize(("columns", "width"), [(None, 100), ("72", 72), ("9", 40)])
def test_sentences_stay_within_the_console_and_code_stays_whole(
    columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    record = dataclasses.replace(samples.unfit(), notes=(f"{NOTE}\n{CODE}",))
    text = str(jm.Plan(record))
    assert CODE in text.splitlines()
    table = [line for line in text.splitlines() if line.startswith(("   ", "  ->"))]
    assert len(table) == len(record.candidates) + 2, "its head, and the code"
    assert max(len(line) for line in text.splitlines() if line not in table) <= width
    assert NOTE.strip() in sentences(text)


def test_a_row_of_a_peak_is_shortened_from_the_middle_of_its_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    temporary = next(line for line in str(peak()).splitlines() if "temporaries" in line)
    assert temporary.endswith("f32[512,256] jit(train_step)/.../exp")
    assert len(temporary) <= 100
    monkeypatch.setenv("COLUMNS", "400")
    assert str(peak()).splitlines()[3].endswith(f"f32[512,256] {peak().buffers[0].operation}")


@pytest.mark.core
def test_a_tuple_is_told_whole_or_by_its_parts() -> None:
    assert "(...) of 9 parts" in str(peak())
    assert short_shape("(s32[], f32[256,64]{1,0})") == "(s32[], f32[256,64])"
    assert short_shape("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}") == "bf16[8,128]"
    assert short_shape("memory between the buffers") == "memory between the buffers"


@pytest.mark.core
@pytest.mark.parametrize(
    ("room", "told"),
    [
        (34, "jit(step)/while/jvp(A/B)/Block/exp"),
        (33, "jit(step)/.../jvp(A/B)/Block/exp"),
        (28, "jit(step)/.../Block/exp"),
        (3, "jit(step)/.../exp"),
    ],
)
def test_an_operation_keeps_as_many_parts_as_there_is_room_for(room: int, told: str) -> None:
    assert short_operation("jit(step)/while/jvp(A/B)/Block/exp", room) == told


@pytest.mark.core
def test_the_path_of_an_argument_is_not_cut() -> None:
    for name in ("state['params']['layer_0']['attention']", "jit(step)/exp", ""):
        assert short_operation(name, 5) == name


def shares(record: PlanRecord) -> list[str]:
    return [row[4] for row in plan_rows(record, ())]


@pytest.mark.core
def test_a_share_says_why_it_fits_or_not() -> None:
    def of(budget: int) -> list[str]:
        sizes = (4 * GIB, 4 * MIB + 1, 4 * MIB, 4 * MIB - 100, 3 * MIB)
        return shares(
            samples.record([samples.candidate(size / MIB, 0, fits=size <= budget) for size in sizes], 4, budget)
        )

    assert of(4 * MIB) == ["1,024x, too much", "100.00002%, too much", "100%", "99.998%", "75%"]
    refused = dataclasses.replace(samples.candidate(16 * 1024, 0, fits=False), refusal="Used 16.00G of 15.75G hbm")
    assert shares(samples.record([refused], 0, 20 * GIB)) == ["80%, refused"]


@pytest.mark.core
def test_what_a_refused_program_would_compute_again_is_unknown_and_never_free() -> None:
    unknown = {"compiler_remat": None, "modelled_s": None}
    refused = dataclasses.replace(samples.candidate(33, 0, fits=False), refusal="Used 33M", **unknown)
    full = samples.candidate(37, 300, fits=False, remat="full")
    plan = jm.Plan(samples.record([refused, full], 0, MIB))
    (mark, _, needs, _, _, extra, modelled, own), _ = plan_rows(plan.record, plan.frontier)
    assert (mark, needs, extra, modelled, own) == ("->", "33.0 MiB", "+0.0% or more", "unknown", "unknown")
    assert plan.frontier == (full,)
    assert json.loads(plan.to_json())["candidates"][0]["compiler_remat"] is None


def unfit(size: float | None, budget: int, limit: int) -> PlanRecord:
    return samples.record([samples.candidate(size, 0, fits=False)], 0, budget, limit_bytes=limit, least_bytes=MIB)


@pytest.mark.core
def test_what_does_not_fit_says_by_how_much_where_that_is_known() -> None:
    unknown = unfit(None, 8 * GIB, 60 * GIB)
    for text in (str(jm.Plan(unknown)), unfit_reason(unknown)):
        assert "unknown, because" in sentences(text)
        assert "refused it without a figure" in sentences(text)
        assert "by unknown" not in text
        assert "needs unknown" not in text
    above = unfit(10 * 1024, 8 * GIB, 60 * GIB)
    assert "nothing fits, by 2.0 GiB; this comes nearest.\n" in str(jm.Plan(above))
    assert "2.0 GiB more than the budget of 8.0 GiB allows" in unfit_reason(above)
    assert "Try a smaller batch, more devices or a larger one." in sentences(str(jm.Plan(above)))
    may_help = replace(above, searches=("--search microbatches=2,4", "--search offload"))
    next_steps = "Try --search microbatches=2,4 and --search offload (search= of jm.plan), or a smaller batch, more"
    assert next_steps in sentences(str(jm.Plan(may_help)))
    hopeless = replace(above, least_bytes=9 * GIB)
    assert "No policy makes that fit: split it over more devices" in sentences(str(jm.Plan(hopeless)))
    beside = replace(above, least_bytes=GIB, resident_bytes=8 * GIB)
    told = "No policy makes that fit beside the 8.0 GiB that stay: split it over more devices"
    assert told in sentences(str(jm.Plan(beside)))
    # A step without parameters, and one whose results alone are too large.
    figures = {"argument_bytes": GIB, "output_bytes": 10 * GIB, "alias_bytes": GIB}
    large = [dataclasses.replace(each, **figures) for each in above.candidates]
    for least in (0, None, MIB):
        returning = replace(above, candidates=large, least_bytes=least)
        told = "The step's results alone are 10.0 GiB. No policy makes that fit: try a smaller batch, more"
        assert told in sentences(str(jm.Plan(returning)))
        assert "(the step's results alone are 10.0 GiB)" in unfit_reason(returning)
    # A state that is given and returned, and could be donated.
    figures = {"argument_bytes": 6 * GIB, "output_bytes": 6 * GIB, "alias_bytes": 0}
    kept = [dataclasses.replace(each, **figures) for each in above.candidates]
    undonated = replace(above, candidates=kept, least_bytes=5 * GIB)
    assert "No policy makes that fit" not in sentences(str(jm.Plan(undonated)))
    # A budget beyond the hardware: what its compiler refused is within the budget, and above the limit.
    beyond = unfit(10 * 1024, 12 * GIB, 8 * GIB)
    assert "nothing fits, by 2.0 GiB; this comes nearest.\n" in str(jm.Plan(beyond))
    assert "2.0 GiB more than the 8.0 GiB that can be used there" in unfit_reason(beyond)


@pytest.mark.core
def test_a_preset_without_a_budget_names_none() -> None:
    free, bound = (jm.Plan(record).to_yaml() for record in (samples.without_limit(), samples.six()))
    assert "none for train_step on the attached devices: 134 MiB (;" in sentences(free)
    assert "71.6 MiB of 72.0 MiB" in sentences(bound)
    assert parse_preset(free, source="plan").description.startswith("none for train_step")
