"""`jaxmem compare`: runs, plans and saved step memories; what grew, the gate's exit code, and what is no comparison."""

from __future__ import annotations

import dataclasses
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import jaxmem_callbacks as jm
from jaxmem_callbacks.analysis.comparing import growth, parse_share
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.readers.decoding import record_from
from jaxmem_callbacks.records.accounts import Account
from jaxmem_callbacks.records.errors import ComparisonError, RunFileError
from tests import sample_plans
from tests.sample_runs import MIB, write_run

SCRIPT = """
import sys
import jax, jax.numpy as jnp
import jaxmem_callbacks as jm

def loss_fn(params, batch):
    hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, params)
    return (hidden**2).mean()

def train_step(params, batch):
    loss, grads = jm.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

def make(remat="full", rows=512):
    step = jm.jit_step(train_step, jm.StepPolicy(remat=remat))
    return step, (jnp.ones((6, 64, 64)), jnp.ones((rows, 64)))

def plain():
    return make("none")

def smaller():
    return make(rows=256)
"""


def compared(capsys, *arguments) -> tuple[int, str, str]:
    code = main(["compare", *map(str, arguments)])
    return code, *capsys.readouterr()


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each line of a table, by their first."""
    found = [re.split(r" {2,}", line.strip()) for line in text.splitlines() if line.startswith("  ")]
    return {cells[0]: cells[1:] for cells in found}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What `jaxmem inspect --json` printed for three steps, saved: folder/full.json, plain.json, smaller.json."""
    import contextlib
    import io

    folder = tmp_path_factory.mktemp("saved")
    (folder / "train.py").write_text(SCRIPT)
    for name in ("make", "plain", "smaller"):
        peak = [] if name != "smaller" else ["--top", "0"]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(["inspect", f"{folder / 'train.py'}:{name}", "--json", *peak]) == 0
        (folder / f"{name}.json").write_text(out.getvalue())
    return folder


# Saved step memories


@pytest.mark.core
def test_a_step_that_grew_fails_the_gate_and_says_by_what(saved, capsys):
    code, out, _ = compared(capsys, saved / "make.json", saved / "plain.json", "--max-regress", "2%")
    assert code == 1
    before, after = (json.loads((saved / name).read_text()) for name in ("make.json", "plain.json"))
    grown = after["step"]["step_bytes"] - before["step"]["step_bytes"]
    assert grown > 0.02 * before["step"]["step_bytes"]
    assert rows(out)["one step"][-1] == "too much"
    assert rows(out)["peak: saved activations"][2].startswith("+")
    assert "! policy: full -> none." in out
    assert out.splitlines()[-1].startswith("Grew more than 2%: one step by ")


def test_what_shrank_and_what_is_allowed_passes(saved, capsys):
    assert compared(capsys, saved / "plain.json", saved / "make.json", "--max-regress", "0%")[0] == 0
    code, out, _ = compared(capsys, saved / "make.json", saved / "plain.json", "--max-regress", "900%")
    assert (code, out.splitlines()[-1]) == (0, "Nothing that is judged grew more than 900%.")
    code, out, _ = compared(capsys, saved / "make.json", saved / "plain.json")
    assert (code, out.splitlines()[-1]) == (0, "Nothing was judged. Pass --max-regress 2% to fail on growth.")


def test_json_has_bytes_as_integers(saved, capsys):
    code, out, _ = compared(capsys, saved / "make.json", saved / "plain.json", "--max-regress", "2%", "--json")
    told = json.loads(out)
    assert code == 1
    assert told["too_much"] == ["one step"]
    (first, *_) = told["changes"]
    assert first["bytes"] == first["after"] - first["before"] > 0
    assert told["max_regress"] == 0.02


def test_another_batch_is_refused(saved, capsys):
    code, out, error = compared(capsys, saved / "make.json", saved / "smaller.json", "--max-regress", "2%")
    assert (code, out) == (2, "")
    assert error == (
        "jaxmem: These cannot be compared: the batches differ: batch: float32[512,64] -> float32[256,64]. Expected the same "
        "batch: otherwise a difference in bytes means nothing.\n"
    )


def test_another_step_target_or_kind_is_refused(saved, capsys, tmp_path):
    for change, words in (
        ({"name": "eval_step"}, "one is of train_step, the other of eval_step. Expected the same step twice"),
        ({"hardware": "v5e:2x2"}, "one is for the attached cpu, the other for v5e:2x2. Expected the same hardware"),
        ({"judged": {"x": 1}}, "one has one step, the other x. Expected at least one figure that both have"),
    ):
        data = json.loads((saved / "make.json").read_text())
        data["account"].update(change)
        (tmp_path / "other.json").write_text(json.dumps(data))
        code, _, error = compared(capsys, saved / "make.json", tmp_path / "other.json")
        assert code == 2
        assert words in error
    (tmp_path / "plan.json").write_text(jm.Plan(sample_plans.six()).to_json())
    code, _, error = compared(capsys, saved / "make.json", tmp_path / "plan.json")
    assert code == 2
    assert "one is a step memory, the other a plan. Expected two of a kind, such as a step memory of today" in error


# Plans


def plan_file(path, **fields):
    plan = sample_plans.six(**fields)
    path.write_text(jm.Plan(plan).to_json())
    return path


def test_plans_are_compared_by_what_they_chose(tmp_path, capsys):
    signature = (("params", "float32[8]"), ("batch['x']", "float32[8,128]"))
    usual = {"signature": signature, "versions": {"jax": "0.12.0"}}
    before = plan_file(tmp_path / "a.json", **usual)
    after = plan_file(tmp_path / "b.json", budget=93 * MIB, **{**usual, "versions": {"jax": "0.12.1"}})
    code, out, _ = compared(capsys, before, after, "--max-regress", "2%")
    assert code == 1
    assert rows(out)["one step"] == ["71.6 MiB", "92.6 MiB", "+21.0 MiB", "+29.3%", "too much"]
    assert "Bytes of train_step on one device of h100_sxm, by its compiler" in out
    assert "! jax: 0.12.0 -> 0.12.1." in out
    assert "! policy: full, keep 0.341 -> full, keep 1." in out
    other = plan_file(tmp_path / "c.json", **{**usual, "signature": (signature[0], ("batch['x']", "float32[9,128]"))})
    assert compared(capsys, before, other)[0] == 2
    elsewhere = plan_file(tmp_path / "d.json", **usual, target="v5e:2x2")
    assert compared(capsys, before, elsewhere)[0] == 2


def test_plans_of_different_rows_and_without_a_figure_are_refused(tmp_path, capsys):
    plan = sample_plans.six()
    for number, change in enumerate(({"batch_rows": 64}, {"batch_rows": 48}, {"step_bytes": None})):
        candidates = tuple(dataclasses.replace(each, **change) for each in plan.candidates)
        changed = dataclasses.replace(plan, candidates=candidates)
        (tmp_path / f"{number}.json").write_text(jm.Plan(changed).to_json())
    code, _, error = compared(capsys, tmp_path / "0.json", tmp_path / "1.json")
    assert code == 2
    assert "the batches differ: rows: 64 -> 48" in error
    code, _, error = compared(capsys, tmp_path / "0.json", tmp_path / "2.json")
    assert code == 2
    assert "2.json: the compiler refused the chosen step without a figure, so there is nothing to compare." in error


@pytest.mark.core
def test_what_the_device_must_hold_is_judged_too(tmp_path, capsys):
    for name, resident in (("a", 0), ("b", 50), ("c", 60)):
        plan = sample_plans.six()
        candidates = tuple(
            dataclasses.replace(each, need_bytes=(each.step_bytes or 0) + resident * MIB) for each in plan.candidates
        )
        changed = dataclasses.replace(plan, candidates=candidates, resident_bytes=resident * MIB)
        (tmp_path / f"{name}.json").write_text(jm.Plan(changed).to_json())
    code, out, _ = compared(capsys, tmp_path / "b.json", tmp_path / "c.json", "--max-regress", "1%")
    assert code == 1
    assert rows(out)["the device must hold"][2:] == ["+10.0 MiB", "+8.2%", "too much"]
    _, out, _ = compared(capsys, tmp_path / "a.json", tmp_path / "b.json", "--max-regress", "1%")
    assert "! the device must hold: in one of the two only, so it is not judged." in out


# Runs


@pytest.mark.core
def test_runs_are_compared_by_compiled_needs_and_measured_highs(tmp_path, capsys):
    before = write_run(tmp_path / "a")
    after = write_run(tmp_path / "b", temp=303 * MIB, peak=985 * MIB)
    code, out, _ = compared(capsys, before, after, "--max-regress", "1%")
    assert code == 1
    assert rows(out)["train_step, one step"] == ["500 MiB", "503 MiB", "+3.0 MiB", "+0.6%", "ok"]
    assert rows(out)["highest bytes in use"] == ["970 MiB", "985 MiB", "+15.0 MiB", "+1.5%", "too much"]
    assert rows(out)["train_step: temporaries"] == ["300 MiB", "303 MiB", "+3.0 MiB", "+1.0%"]
    assert compared(capsys, before, after, "--max-regress", "1.6%")[0] == 0
    assert compared(capsys, before / "memory.jsonl", before, "--max-regress", "0%")[0] == 0


def test_of_several_runs_the_newest_counts_and_is_named(tmp_path, capsys):
    write_run(tmp_path / "a", run="old", peak=500 * MIB)
    path = write_run(tmp_path / "a", run="new", close=False) / "memory.jsonl"
    lines = path.read_text().splitlines()
    later = [line.replace(":17000000", ":17000009") if '"run":"new"' in line else line for line in lines]
    path.write_text("\n".join(later) + "\n")
    _, out, _ = compared(capsys, tmp_path / "a", write_run(tmp_path / "b"))
    assert f"! {tmp_path / 'a'} holds 2 runs; this is the newest, new." in out
    assert "! Run new was not closed." in out
    assert rows(out)["highest bytes in use"][0] == "970 MiB"


def test_runs_on_other_hardware_or_with_another_batch_are_refused(tmp_path, capsys):
    before = write_run(tmp_path / "a")
    code, _, error = compared(capsys, before, write_run(tmp_path / "b", kind="NVIDIA A100"))
    assert code == 2
    assert "one is for 2 x NVIDIA H100, the other for 2 x NVIDIA A100" in error
    code, _, error = compared(capsys, before, write_run(tmp_path / "c", rows=16))
    assert code == 2
    assert "the batches differ: train_step: batch['x']: float32[8,128] -> float32[16,128]" in error


# What cannot be read, and shares


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "other.json cannot be read: No such file or directory. Expected a monitor's logdir"),
        ("oops", "other.json is no JSON: Expecting value: line 1 column 1"),
        ("[]", "other.json is neither a plan nor a step's memory. Expected a monitor's logdir"),
        ('{"account": {}}', "other.json: `account.form` is missing."),
        ('{"candidates": 3}', "other.json: `step` is missing."),
    ],
)
def test_other_files_are_refused_with_what_is_expected(tmp_path, capsys, text, words):
    if text is not None:
        (tmp_path / "other.json").write_text(text)
    code, _, error = compared(capsys, tmp_path / "other.json", tmp_path / "other.json")
    assert code == 2
    assert words in error


@pytest.mark.parametrize(
    "text", ["2", "two%", "-1%", "", "%", "1/0%", "nan%", "1e400%", "1e-999999999%", "9" * 400 + "%"]
)
def test_shares_have_a_percent_sign(text, tmp_path, capsys):
    code, _, error = compared(capsys, tmp_path, tmp_path, f"--max-regress={text}")
    assert code == 2
    assert (
        f"{text!r} is no share that memory may grow by. Expected a number with its percent sign, such as 2% or 0%."
        in error
    )


def test_shares_are_exact():
    assert parse_share(" 0.1 %") == Fraction(1, 1000)
    before, after = (Account(form="run", name="r", hardware="h", judged={"x": size}) for size in (1000, 1001))
    assert growth(before, after, parse_share("0.1%")).too_much == ()
    assert [change.bytes for change in growth(before, after, parse_share("0.09%")).too_much] == [1]


SIZES = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2**50), min_size=1)


@given(before=SIZES, after=SIZES, percent=st.integers(0, 300))
def test_the_gate_is_what_it_says(before, after, percent):
    """Too much is exactly: judged in both, and more than the share above what it was; without a share nothing is."""
    first, second = (Account(form="plan", name="s", hardware="h", judged=sizes) for sizes in (before, after))
    if not before.keys() & after.keys():
        with pytest.raises(ComparisonError, match="at least one figure that both have"):
            growth(first, second, Fraction(percent, 100))
        return
    found = growth(first, second, Fraction(percent, 100))
    both = before.keys() & after.keys()
    assert {each.name for each in found.too_much} == {
        name for name in both if 100 * (after[name] - before[name]) > percent * before[name]
    }
    assert {each.name for each in found.changes} == before.keys() | after.keys()
    assert growth(first, second).too_much == growth(first, first, Fraction(0)).too_much == ()
    assert record_from(Account, json.loads(json.dumps(dataclasses.asdict(first)))) == first


def test_errors_of_files_are_the_librarys_own():
    assert issubclass(RunFileError, ValueError)
    assert issubclass(ComparisonError, ValueError)


# Markdown, a page, and the documents' workflow


def test_markdown_has_the_verdict_first_and_a_table(saved, capsys):
    code, out, _ = compared(capsys, saved / "make.json", saved / "plain.json", "--max-regress", "0%", "--markdown")
    assert code == 1
    heading, _, judgement, *rest = out.splitlines()
    assert heading == "### Device memory"
    assert judgement.startswith("Grew more than 0%: one step by ")
    assert "|  | before | after | change | share |  |" in rest
    assert sum(line.startswith("| one step |") and line.endswith("| too much |") for line in rest) == 1


def test_a_page_is_written_beside_what_is_printed(saved, capsys, tmp_path):
    page = tmp_path / "compared.html"
    code, out, _ = compared(capsys, saved / "make.json", saved / "plain.json", "--html", page)
    assert code == 0
    assert "one step" in out
    text = page.read_text()
    assert "<td>one step</td>" in text
    assert '<td class="right">' in text, "numbers, as a console has them"
    assert text.index("<p>") < text.index("<table"), "the verdict first"
    assert "@media screen and (prefers-color-scheme: dark) {\n  :root {" in text
    assert ":root[data-scheme" not in text, "which a script would set"
    assert "<script" not in text
    assert "default-src 'none'" in text


def test_a_page_that_cannot_be_written_is_refused(saved, capsys, tmp_path):
    code, _, err = compared(capsys, saved / "make.json", saved / "plain.json", "--html", tmp_path / "none" / "a.html")
    assert code == 2
    assert "cannot be written" in err


def test_only_one_form_is_printed(saved, capsys):
    with pytest.raises(SystemExit) as left:
        compared(capsys, saved / "make.json", saved / "plain.json", "--json", "--markdown")
    assert left.value.code == 2


def test_the_workflow_and_the_hook_of_the_documents_hold(capsys, tmp_path, monkeypatch):
    """Each line of the workflow that calls jaxmem is typed, on hardware that is here."""
    text = (Path(__file__).parent.parent / "docs" / "gate.md").read_text()
    workflow, hooks = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    lines = [step.get("run", "") for step in workflow["jobs"]["step"]["steps"]]
    asked = [line.removeprefix("uv run jaxmem ") for line in lines if "jaxmem " in line]
    assert len(asked) == 3
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    for folder, remat in ((tmp_path / "base", "full"), (tmp_path, "none")):
        (folder / "train.py").write_text(SCRIPT + f"step, given = make({remat!r})\nstep(*given)\n")
    codes = []
    for line in asked:
        typed, _, kept = line.partition(" > ")
        codes.append(main([word for word in typed.replace("--target h100_sxm", "").split() if word]))
        Path(kept).write_text(capsys.readouterr().out)
    assert codes == [0, 0, 1]
    assert Path("comment.md").read_text().startswith("### Device memory\n\nGrew more than 2%: one step by ")
    (hook,) = hooks["repos"][0]["hooks"]
    assert re.search(hook["files"], "train.py")
    assert not hook["pass_filenames"]
