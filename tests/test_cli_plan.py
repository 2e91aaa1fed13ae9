"""`jaxmem plan`: what it refuses before anything is compiled, and the lines that it says to paste."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.cli.plan import EXPECTED, search_of
from jaxmem_callbacks.cli.trace_log import Edit, TraceLog
from jaxmem_callbacks.cli.train_lines import lines_to_train
from jaxmem_callbacks.planning.request import Space
from tests import sample_plans as samples
from tests.target_step import needs_compiler


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--save", "plan.txt"],
            "--save plan.txt: expected a name that ends in .yaml or .yml or .json. Type --save plan.yaml.",
        ),
        (["--save", "missing/plan.yaml"], "there is no folder missing. Make it first: mkdir -p missing."),
        (["--figure", "plan.xyz"], "--figure plan.xyz: expected a name that ends in .png or .svg or .pdf."),
        (["--budget", "1.5"], "--budget 1.5: expected a size with its unit, such as 72GiB, or a share"),
        (["--budget", "0"], "Type --budget 72GiB."),
        (["--budget", "-3"], "Type --budget 72GiB."),
        (["--budget", "72"], "Type --budget 72GiB."),
        (["--budget", "500000"], "Type --budget 500000B."),
        (
            ["--save", "a_folder.yaml"],
            "--save a_folder.yaml: expected a file that can be written: Is a directory. Type",
        ),
        (["--save", "/proc/plan.yaml"], "expected a file that can be written: No such file or directory. Type another"),
        (["--logdir", ""], "--logdir '': expected a folder for the plan's page. Type --logdir runs/plan."),
        (["--budget", "1.5"], "Type --budget 1.5GiB."),
        (["--budget", "inf"], "Type --budget 72GiB."),
        (["--budget", "much"], "--budget much: expected a size with its unit, such as 72GiB, or a share"),
        (["--budget", "0GiB"], "such as 0.9. Type --budget 72GiB."),
        (
            ["--resident", "1GiB", "--resident", "foo"],
            "--resident foo: expected a size with its unit. Type --resident 2GiB.",
        ),
        (["--resident", "1.5"], "Type --resident 1.5GiB."),
        (["--target", "h101_sxm"], "Unknown target 'h101_sxm'. Did you mean `h100_sxm`?"),
        (
            ["--search", "microbatch=2"],
            "there is no key 'microbatch'. Did you mean `microbatches`? Expected one of: remat, ",
        ),
        (
            ["--search", "microbatches=two"],
            "--search microbatches=two: expected whole numbers of at least 1 with commas",
        ),
        (
            ["--search", "sharding=zero1,fspd"],
            "for all. Did you mean `fsdp`? Type --search sharding=zero1,fsdp.",
        ),
        (["--search", "donate=perhaps"], "expected the key alone, yes or no. Type --search donate."),
        (["--search", "offload=2"], "expected the key alone, yes or no. Type --search offload."),
        (["--search", "remat=2"], "--search remat=2: expected yes or no. Type --search remat=no."),
        (["--search", "batch.at_most=x"], "--search batch.at_most=x: expected batch=largest, or batch.multiple_of and"),
        (["--search", "batch=5"], "Type --search batch.at_most=512."),
        (
            ["--search", "batch.at_most=4", "--search", "batch.multiple_of=8"],
            "batch.at_most=4 is below batch.multiple_of=8, so no batch is left. Type --search batch.at_most=8,",
        ),
        (["--search", "offload", "--search", "remat=no"], "nothing to move. Take remat=no out"),
        (["--logdir", "a_file/plan"], "a_file/plan'): expected a folder that can be written: Not a directory."),
        (["--logdir", "gs://a/b"], "logdir='gs://a/b'): expected a local folder."),
        (
            ["--mesh", "data2"],
            "--mesh data2: expected axes with sizes of at least 1; one may be -1. Type --mesh data=",
        ),
        (["--mesh", "fsdp=0"], "--mesh fsdp=0: expected axes with sizes of at least 1"),
        (
            ["--mesh", "fsdp=4"],
            "and none are named. Name a target of several, as in --target h100_sxm:8, or add --search",
        ),
        (
            ["--beside", "train.py"],
            "--beside train.py: expected a file and the function in it that returns (function, args)",
        ),
        (
            ["--beside", "eval.py:make"],
            "there is no file eval.py. Expected one as in: --beside train.py:make.",
        ),
        ([], "No such script: a_script_that_is_never_read.py. Expected a Python file, as in: jaxmem plan train.py "),
    ],
)
def test_what_could_not_be_written_or_meant_is_refused_first(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").touch()
    (tmp_path / "a_folder.yaml").mkdir()
    assert main(["plan", "a_script_that_is_never_read.py", *options]) == 2
    told_on = capsys.readouterr().err
    assert told in told_on
    assert "search=" not in told_on, "that is for Python"


@pytest.mark.targets
@pytest.mark.parametrize(("target", "several"), [("h100_sxm", "h100_sxm:8"), ("v5e:1x1", "v5e:2x2")])
def test_shardings_for_one_device_are_refused_before_the_script_is_read(
    target: str, several: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_compiler(target)
    ask = ["plan", "a_script_that_is_never_read.py", "--target", target]
    for option in ("--search sharding", "--mesh fsdp=-1"):
        assert main([*ask, *option.split()]) == 2
        told = f"and {target} is one. Name several, as in --target {several}, or leave {option} out."
        assert told in capsys.readouterr().err


@pytest.mark.targets
@pytest.mark.parametrize(
    ("typed", "fitting"),
    [("fsdp=8", "fsdp=4"), ("data=3,fsdp=-1", "data=1,fsdp=4"), ("data=2,fsdp=4", "data=2,fsdp=2")],
)
def test_a_mesh_of_another_size_than_the_target_is_refused_with_one_that_fits(
    typed: str, fitting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_compiler("v5e:2x2")
    ask = ["plan", "a_script_that_is_never_read.py", "--target", "v5e:2x2", "--mesh"]
    assert main([*ask, typed]) == 2
    told = f"--mesh {typed} does not make up the 4 devices of v5e:2x2. Type --mesh {fitting}."
    assert told in capsys.readouterr().err
    assert main([*ask, fitting]) == 2
    assert "No such script" in capsys.readouterr().err, "what was said to be typed is no mesh"


@pytest.mark.core
def test_every_example_of_a_search_is_one() -> None:
    for key, (_, example) in EXPECTED.items():
        assert list(search_of([example]) or {}) == [key]
    assert set(EXPECTED) == {field.name for field in dataclasses.fields(Space)}


def test_ctrl_c_before_the_first_compile_is_told_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("def train_step", INTERRUPTED + "\ndef train_step"))
    for command, told in (("plan", " before the first compile ended, so there is no plan"), ("inspect", "")):
        assert main([command, str(script)]) == 130
        printed = capsys.readouterr()
        assert (printed.out, printed.err.splitlines()[-1]) == ("", f"jaxmem: stopped by Ctrl-C{told}.")
        assert "Traceback" not in printed.err


# Ends the tracing of the step.
INTERRUPTED = """
import signal
loss = lambda params, batch: signal.raise_signal(signal.SIGINT)
"""
SCRIPT = """
import jax, jax.numpy as jnp
import jaxmem_callbacks as jm

params, momentum = jnp.ones((64, 64)), jnp.ones((64, 64))
batch = jnp.ones((32, 64))

def loss(params, batch):
    return jnp.square(jnp.tanh(batch @ params)).mean()

def train_step(params, momentum, batch):
    momentum = momentum + jm.grad(loss)(params, batch)
    return params - momentum, momentum

def make_eval():
    return loss, (params, jnp.ones((4096, 64)))

def make_number():
    return 1

if __name__ == "__main__":
    step = jm.jit_step(train_step)
    step(params, momentum, batch)
"""


@pytest.mark.parametrize("size", ["1KiB", "4096B", "0.5MiB"])
def test_a_small_budget_with_its_unit_is_a_budget(size: str, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    main(["plan", "--json", "--search", "remat=no", "--budget", size, str(script)])
    assert json.loads(capsys.readouterr().out)["budget_bytes"] == {"1KiB": 2**10, "4096B": 2**12, "0.5MiB": 2**19}[size]


def test_a_program_beside_the_step_is_named_by_its_file_and_function(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ask = ["plan", "--json", "--search", "remat=no", "--budget", "1MiB", "--beside"]
    preset = tmp_path / "plan.yaml"
    saving = ["--save", str(preset), str(script)]
    assert main([*ask, f"{script}:make_eval", *saving]) == 3, "the evaluation does not fit, the step would"
    printed = capsys.readouterr()
    assert f"nothing fits, so {preset} was not written" in printed.err
    assert not preset.exists()
    made = json.loads(printed.out)
    chosen = made["candidates"][made["chosen"]]
    (beside,) = chosen["beside"]
    assert (beside["name"], beside["fits"], beside["held_bytes"]) == ("loss", False, 64 * 64 * 4)  # momentum stays
    assert beside["program_bytes"] > 4096 * 64 * 4
    assert chosen["step_bytes"] < 2**20
    assert main([*ask, f"{script}:make_number", str(script)]) == 2
    assert "make_number() returned int. Expected a function and its arguments" in capsys.readouterr().err


def test_a_step_is_planned_on_the_axes_that_were_typed(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ask = ["plan", str(script), "--search", "remat=no", "--search", "sharding=fsdp"]
    assert main([*ask, "--mesh", "data=2,fsdp=-1"]) == 0
    printed = capsys.readouterr().out
    assert "jax.set_mesh(jm.make_mesh({'data': 2, 'fsdp': 4}))" in printed
    assert main([*ask, "--json", "--mesh", "data=4,fsdp=2"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["mesh"], made["device_count"]) == ({"data": 4, "fsdp": 2}, 8)


WANDERING = (
    SCRIPT.replace("import ", "import io, os, sys, threading\nimport ", 1).replace(
        "    momentum = momentum +", "    os.path.getsize('read_while_traced.txt')\n    momentum = momentum +"
    )
    + """
    os.makedirs("elsewhere")
    os.chdir("elsewhere")
    sys.stdout = io.StringIO()
    print("to a log of its own")
    open("read_while_traced.txt", "w").close()
    results = []
    in_thread = threading.Thread(target=lambda: results.append(step(params, momentum, batch)))
    in_thread.start()
    in_thread.join()
    print(results[0])
"""
).replace("    step(params, momentum, batch)\n", "", 1)


def test_a_script_that_goes_elsewhere_takes_neither_files_nor_words_along(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(WANDERING)
    ask = ["plan", "train.py", "--search", "remat=no", "--beside", "train.py:make_eval"]
    assert main([*ask, "--save", "plan.yaml", "--figure", "plan.png", "--logdir", "page"]) == 0
    printed = capsys.readouterr()
    assert "Plan of train_step" in printed.out
    made = 1 + WANDERING.splitlines().index("    step = jm.jit_step(train_step)")
    line = 'step = jm.jit_step(step, jm.load_preset("plan.yaml"))'
    assert f"To train so:\n    # below train.py:{made}\n    {line}\n" in printed.out
    assert "--save plan.json here, jm.MemoryMonitor(plan='plan.json') there." in samples.sentences(printed.out)
    assert "Traceback" not in printed.err
    assert "_StopScript" not in printed.err, "how a step called in a thread is stopped is nobody's concern"
    assert {each.name for each in tmp_path.iterdir()} >= {"plan.yaml", "plan.png", "page", "elsewhere"}
    assert [each.name for each in (tmp_path / "elsewhere").iterdir()] == ["read_while_traced.txt"]


def test_a_plan_that_can_no_longer_be_written_is_printed_all_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "out"
    folder.mkdir()
    script.write_text(SCRIPT.replace("    step(", f"    __import__('os').rmdir({str(folder)!r})\n    step("))
    assert main(["plan", str(script), "--search", "remat=no", "--save", str(folder / "plan.yaml")]) == 1
    printed = capsys.readouterr()
    assert "Plan of train_step" in printed.out
    assert (
        f"could not write {folder / 'plan.yaml'}: No such file or directory. The plan itself is above." in printed.err
    )


def planned(policy: jm.StepPolicy, **record: Any) -> jm.Plan:
    made = samples.record([dataclasses.replace(samples.candidate(5000, 0), policy=policy)], 0, None)
    return jm.Plan(dataclasses.replace(made, **record))


@pytest.mark.core
@pytest.mark.parametrize(
    "policy",
    [
        jm.StepPolicy(remat="full", levels=2),
        jm.StepPolicy(remat="full", keep=0.25, microbatches=4),
        jm.StepPolicy(remat="full", segments=3, offload=("cuts",)),
    ],
)
def test_the_line_to_paste_is_the_plans_policy(policy: jm.StepPolicy) -> None:
    (line,) = lines_to_train(planned(policy), None)
    said = line.removeprefix("step = jm.jit_step(train_step, ").removesuffix(")")
    assert eval(said, {"jm": jm}) == policy  # noqa: S307 - a line of ours that people run


def test_the_lines_to_paste_into_an_unedited_script_say_what_changes() -> None:
    plan = planned(jm.StepPolicy(remat="full"), step="update")
    edits = [Edit("gan.py:7", "jax.grad", "jm.grad"), Edit("gan.py:31", "jax.value_and_grad", "jm.value_and_grad")]
    assert lines_to_train(plan, None, TraceLog(edits=dict.fromkeys(edits))) == [
        "import jaxmem_callbacks as jm",
        "# gan.py:7: jm.grad in place of jax.grad",
        "# gan.py:31: jm.value_and_grad in place of jax.value_and_grad",
        "step = jm.jit_step(update, jm.StepPolicy(remat='full'))",
    ]
    for written, step in (("jm.grad(loss)", "jm.grad(loss)"), (None, "update")):
        *_, line = lines_to_train(plan, None, TraceLog(step=written))
        assert line == f"step = jm.jit_step({step}, jm.StepPolicy(remat='full'))"
    *_, policy, where = lines_to_train(plan, None, TraceLog(step=""))
    assert policy == "policy = jm.StepPolicy(remat='full')"
    assert where == "# Wrap the jit of update by jm.jit_step with this policy, where it is made", "no name is invented"


def test_the_lines_to_paste_tell_the_rows_that_were_planned() -> None:
    plan = planned(jm.StepPolicy(remat="full"))
    (chosen,) = plan.record.candidates
    of_batch = jm.Plan(dataclasses.replace(plan.record, candidates=(dataclasses.replace(chosen, batch_rows=34),)))
    assert lines_to_train(of_batch, None)[0] == "# the batch has 34 rows"


@pytest.mark.core
@pytest.mark.parametrize("saved", [None, "plan.yaml", "plan.json"])
def test_the_lines_to_paste_place_a_sharded_state(saved: str | None, tmp_path: Path) -> None:
    plan = planned(jm.StepPolicy(sharding="fsdp"), mesh={"fsdp": 8}, device_count=8)
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    (tmp_path / "plan.json").write_text(plan.to_json())
    lines = lines_to_train(plan, None if saved is None else tmp_path / saved)
    names: dict[str, Any] = {"jm": jm, "jax": jax, "state": {"w": jax.numpy.ones((512, 512))}}
    names["train_step"] = lambda state: {"w": state["w"] + 1}
    try:
        exec("\n".join(lines), names)  # noqa: S102 - lines of ours that people run
        assert names["step"](names["state"])["w"].sharding.spec == jax.sharding.PartitionSpec("fsdp")
    finally:
        jax.set_mesh(None)
        if "monitor" in names:
            names["monitor"].close()
    assert ("monitor" in names) is (saved == "plan.json")
