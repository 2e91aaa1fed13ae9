"""The gallery of public programs: its list, its page, and how printed lines are pasted. The programs run by `make gallery`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gallery import estimator, memory_viewer, remat_policies, two_hosts
from benchmarks.gallery.__main__ import Trial
from benchmarks.gallery.environment import folder_of
from benchmarks.gallery.pasting import CannotPasteError, paste, printed_lines
from benchmarks.gallery.programs import LINES, PROGRAMS, SCRIPTS
from benchmarks.gallery.result import estimator_table, file_of, hosts_table, read, table
from benchmarks.sources import ROOT

LEAST, LEAST_PACKAGED = 15, 10


def test_the_list_is_long_enough_and_each_program_has_its_file():
    assert len(PROGRAMS) >= LEAST
    assert sum(program.packaged for program in PROGRAMS.values()) >= LEAST_PACKAGED
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(PROGRAMS)
    assert {program.line for program in PROGRAMS.values()} == set(LINES)


def test_no_program_uses_the_library_itself():
    for path in SCRIPTS.glob("*.py"):
        text = path.read_text()
        assert "import jaxmem_callbacks" not in text, path.name
        assert "jit_step" not in text, path.name


@pytest.mark.parametrize("name", PROGRAMS)
def test_compilers_are_those_of_the_programs_own_jax(name, monkeypatch, tmp_path):
    """`make` names those that tests use, of another JAX."""
    monkeypatch.setattr("benchmarks.gallery.__main__.WORK", tmp_path)
    monkeypatch.setenv("JAXMEM_TARGET_PATH", str(ROOT / ".venv" / "targets"))
    program = PROGRAMS[name]._replace(examples="")
    folder = folder_of(program.line)
    assert Trial(name, program).variables()["JAXMEM_TARGET_PATH"] == str(folder / "targets")


def test_the_page_has_the_table_of_the_result_file():
    page = (ROOT / "docs" / "gallery.md").read_text()
    assert "\n".join(table(read())) in page


def test_a_row_that_passed_has_kept_what_was_promised():
    for row in json.loads(file_of().read_text())["rows"]:
        if row["passed"]:
            promised = row["plans"]["h100_sxm:8" if row["devices"] > 1 else "h100_sxm"]["chosen_bytes"]
            assert row["pasted_needs_bytes"] <= 1.01 * promised, row["program"]
            assert row["largest_difference_of_losses"] <= 1e-3, row["program"]
            assert row["monitor_lines"] > 0, row["program"]
        else:
            assert row["why"], row["program"]


def test_the_page_has_the_table_of_the_memory_viewer():
    page = (ROOT / "docs" / "gallery.md").read_text()
    assert "\n".join(memory_viewer.table(viewed())) in page


def viewed() -> list[dict[str, Any]]:
    return json.loads(memory_viewer.RESULT.read_text())["rows"]


def test_xprof_shows_the_same_ten_buffers():
    assert len(viewed()) >= 3
    for row in viewed():
        assert len(row["ten_largest"]) == 10
        assert row["ten_largest"] == row["ten_largest_xprof"], row["program"]
        assert row["program_bytes"] == row["program_bytes_xprof"], row["program"]


def test_a_buffer_that_one_alone_shows_is_counted():
    ours = [(64, "f32[4,4]"), (32, "f32[8]"), (4, "s32[]")]
    theirs = [(64, "f32[4,4]"), (32, "s32[8]"), (4, "")]
    shown = {"program_bytes": 110, "peak_bytes": 100}
    row = memory_viewer.compared(ours, theirs, 10, 110, shown)
    assert (row["buffers"], row["smaller_buffers"], row["shown_by_one_alone"]) == (2, 1, [1, 1])
    assert row["peak_bytes"] == row["peak_bytes_xprof"]


# What docs/frameworks.md calls a program -> its name, and the package whose version counts.
LOOPS = {
    "flowjax: `fit_to_data`": ("flowjax_fit", "flowjax"),
    "MaxText: pre-training": ("maxtext_pretrain", "maxtext"),
}


def test_the_loops_of_the_page_on_frameworks_were_trained_with_its_lines():
    """Each line is in the program's file, and the version is the one that was trained under the monitor."""
    page = (ROOT / "docs" / "frameworks.md").read_text()
    section = page.partition("## A loop without hooks")[2].partition("\n## ")[0]
    found = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    rows = {name: (line.strip("`"), tried) for name, line, tried in found[2:]}
    assert rows.keys() == LOOPS.keys()
    for name, (program, package) in LOOPS.items():
        row = read()[program]
        assert rows[name][0] in (SCRIPTS / f"{program}.py").read_text(), name
        assert rows[name][1] == f"{row['versions'][package]} on jax {row['versions']['jax']}"
        assert row["monitor_lines"] > 0, name


def test_the_line_for_a_learner_of_tunix_was_trained_with():
    line = "cluster.actor_trainer.with_training_hooks(MemoryHooks(monitor, cluster.actor_trainer.training_hooks))"
    assert f"`{line}`" in (ROOT / "docs" / "frameworks.md").read_text()
    assert line in (SCRIPTS / "tunix_grpo.py").read_text()
    assert read()["tunix_grpo"]["monitor_lines"] > 0


def hosts() -> list[dict[str, Any]]:
    return sorted(json.loads(two_hosts.RESULT.read_text())["rows"], key=lambda row: row["scenario"])


def test_the_page_has_the_table_of_two_hosts():
    assert "\n".join(hosts_table(hosts())) in (ROOT / "docs" / "gallery.md").read_text()


def test_what_happened_to_one_process_is_on_the_pages_of_both():
    event, failure = hosts()
    assert (event["scenario"], event["exit_codes"]) == ("event", [0, 0])
    first, second = event["ended"]
    assert first["losses"] == second["losses"]
    assert (first["events"], [kind for kind, _ in second["events"]]) == ([], ["near_oom"])
    step = second["events"][0][1]
    assert event["pages"]["process 0"]["sentence"].endswith(
        f"other processes reported near out of memory at step {step} (process 1)."
    )
    ((kind, step),) = [(each["event"], each["step"]) for each in failure["events"]]
    assert kind == "out_of_memory"
    assert failure["pages"]["process 0"]["verdict"] == f"It does not fit: memory ran out at step {step} on process 1."
    assert failure["pages"]["process 1"]["verdict"] == f"It does not fit: memory ran out at step {step}."
    assert "jit_train_step" in failure["events"][0]["message"]
    assert all(failure["exit_codes"]), "the one that waited for the other did not stay"
    assert failure["reports"] == ["oom-*-process1-*"]


def policies() -> dict[str, Any]:
    return json.loads(remat_policies.RESULT.read_text())


def test_the_page_has_the_table_of_maxtexts_policies():
    assert "\n".join(remat_policies.table(policies())) in (ROOT / "docs" / "gallery.md").read_text()


def test_no_policy_of_maxtext_is_better_than_all_of_a_plan():
    result = policies()
    assert list(result["policies"]) == list(remat_policies.POLICIES)
    assert len(result["candidates"]) < len(result["policies"])
    plans = {False: result["candidates"], True: result["candidates_with_offload"]}
    assert result["nearest"] == remat_policies.held_against(result["policies"], plans)
    assert sum(name.endswith(remat_policies.OFFLOADED) for name in result["nearest"]) == 2
    assert max(max(each) for each in result["nearest"].values()) <= remat_policies.SAME


def test_a_plan_computes_no_more_than_the_policy_of_maxtexts_estimator():
    result = json.loads(estimator.RESULT.read_text())
    assert "\n".join(estimator_table(result)) in (ROOT / "docs" / "gallery.md").read_text()
    theirs, ours = result["estimator"], result["plan"]
    assert theirs["budget_bytes"] == ours["budget_bytes"]
    assert theirs["fits"]
    assert ours["fits"]
    assert ours["flops"] <= theirs["flops"]


PLAN = """
To train so:
    import jaxmem_callbacks as jm
    # train.py:6: jm.grad in place of jax.grad
    # above train.py:10
    step = jm.jit_step(step, plan.policy)

The whole plan ...
"""
SCRIPT = '''"""A program."""

import jax

def step(w):
    return w - jax.grad(lambda w: w * w)(w)

w = 1.0
if w:
    for _ in range(3):
        w = step(w)
'''


def test_lines_go_where_they_say(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert paste(printed_lines(PLAN), script) == [
        "train.py:6: jm.grad in place of jax.grad",
        "above train.py:10: step = jm.jit_step(step, plan.policy)",
    ]
    text = script.read_text()
    assert '"""A program."""\nimport jaxmem_callbacks as jm\n' in text
    assert "return w - jm.grad(" in text
    assert "if w:\n    step = jm.jit_step(step, plan.policy)\n    for _" in text


def test_a_trainer_is_called_under_its_policy(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("model = make()\nfound = [\n    model.fit(1)\n]\n")
    lines = ["trained = jm.apply_policy(model.fit, p)", "# and call trained in place of model.fit"]
    paste(lines, script)
    assert script.read_text().splitlines()[2:] == [
        "trained = jm.apply_policy(model.fit, p)",
        "found = [",
        "    trained(1)",
        "]",
    ]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["policy = 1"], "do not say where they go: policy = 1"),
        (["# other.py:3: jm.grad in place of jax.grad"], r"other\.py is no file of the program"),
        (["# train.py:3: jm.grad in place of jax.vjp"], "holds no jax.vjp"),
        (["# and call trained in place of model.fit"], "no call of model.fit"),
    ],
)
def test_lines_that_cannot_be_pasted_fail(lines: list[str], why: str, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with pytest.raises(CannotPasteError, match=why):
        paste(lines, script)
