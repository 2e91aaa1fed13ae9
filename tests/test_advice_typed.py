"""What is typed on a command line as it was printed: options, commands, and an environment that is applied."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.environment.apply import require_applied
from jaxmem_callbacks.records.errors import EnvironmentSettingError
from tests.pasting import pasted

# What was typed -> where in the answer the option is that is to be typed instead.
WRONG = {
    "a mesh of no axes": (["plan", "--target", "h100_sxm:8", "--mesh", "data"], "Type "),
    "a mesh of other devices": (["plan", "--target", "h100_sxm:8", "--mesh", "data=3,fsdp=2"], "Type "),
    "a mesh and one device": (["plan", "--target", "h100_sxm", "--mesh", "fsdp=8"], "as in "),
    "a mesh and no devices": (["plan", "--mesh", "fsdp=8"], "as in "),
    "a budget without a unit": (["plan", "--budget", "72"], "Type "),
    "residents without a unit": (["plan", "--resident", "3"], "Type "),
    "an empty folder": (["plan", "--logdir", ""], "Type "),
    "rows that contradict": (
        ["plan", "--search", "batch.multiple_of=8", "--search", "batch.at_most=4"],
        "Type ",
    ),
    "a word that is no number": (["plan", "--search", "batch.at_most=x"], "Type "),
    "a key that is none": (["plan", "--search", "rows=4"], "Type for example "),
    "a file that is none": (["plan", "--beside", "elsewhere.py:make_eval"], "as in: "),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_option_is_typed_as_printed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With it the command goes on to the script, which has no step."""
    monkeypatch.chdir(tmp_path)
    script = "train.py"
    Path(script).write_text("def make_eval():\n    return len, ([],)\n")
    typed, before = WRONG[kind]
    assert main([*typed, script]) == 2
    told = capsys.readouterr().err
    assert "ran to its end" not in told, "it is answered before the script runs"
    option, value = pasted("option.typed", told.partition(before)[2]).split(" ", 1)
    mended = list(typed)
    if option in mended:
        last = len(mended) - 1 - mended[::-1].index(option)
        mended[last + 1] = value
    else:
        mended += [option, value]
    assert main([*mended, script]) == 2
    again = capsys.readouterr().err
    assert told not in again
    on = ("ran to its end and never called a jitted function that takes a gradient", "needs a compiler that is not")
    assert any(words in again for words in on)


COMMANDS = {
    "presets that there are": ("presets", lambda: jm.load_preset("nothing"), "gpu_preallocate"),
    "a preset or policy": ("presets", lambda: jm.jit_step(len, "nothing"), "gpu_preallocate"),  # type: ignore[arg-type]
    "a preset without an environment": ("presets", lambda: jm.apply_environment("full_remat"), "gpu_preallocate"),
    "traces": ("simulate --list", lambda: main(["simulate"]), "train_and_evaluate"),
    "a whole preset": ("presets full_remat", lambda: jm.load_preset("./odd.yaml"), "remat: full"),
    "presets that compose": ("presets donate full_remat", lambda: main(["presets"]), "remat: full"),
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_command_is_typed_as_printed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd.yaml").write_text("odd: 1\n")
    expected, ask, shown = COMMANDS[kind]
    told = ""
    try:
        ask()
    except Exception as error:  # noqa: BLE001 - whichever it is, it says what to type
        told = str(error)
    printed = capsys.readouterr()
    told = " ".join((told + printed.out + printed.err).split())
    commands = [f"jaxmem {each}" for each in told.split("jaxmem ")[1:]]
    line = next(
        each for each in (pasted("command.typed", f"    {one}") for one in _shortest(commands, expected)) if each
    )
    main(shlex.split(line)[1:])
    assert shown in capsys.readouterr().out


def _shortest(commands: list[str], expected: str) -> list[str]:
    """The commands as they are printed: up to the backtick, or the words that are expected of one in a sentence."""
    whole = [each.partition("`")[0] for each in commands]
    found = [f"jaxmem {expected}" for each in whole if each.startswith(f"jaxmem {expected}")]
    assert found, f"jaxmem {expected} was not printed: {whole}"
    return found


APPLIED = {
    "a step": (lambda: require_applied(jm.load_preset("gpu_growth")), "gpu_growth"),
    "two presets": (lambda: require_applied(jm.load_preset("full_remat", "gpu_async")), "full_remat+gpu_async"),
    "no preset": (lambda: jm.apply_environment(3), "gpu_growth"),  # type: ignore[arg-type]
    "too late": (lambda: jm.apply_environment("gpu_preallocate"), "gpu_preallocate"),
    "nothing to apply": (lambda: jm.apply_environment("donate"), "donate+gpu_growth"),
}
AGAIN = """
import sys
import jaxmem_callbacks as jm
from jaxmem_callbacks.environment.apply import require_applied
applied = {line}
require_applied(jm.load_preset(*applied.preset.split("+")))
print(applied.preset, "jax" in sys.modules)
"""


@pytest.mark.parametrize("kind", APPLIED)
def test_an_environment_is_applied_as_printed(kind: str) -> None:
    import jax

    jax.devices()  # which a process that asks too late has done
    ask, name = APPLIED[kind]
    with pytest.raises((EnvironmentSettingError, TypeError)) as refused:
        ask()
    line = pasted("environment.apply", refused.value)
    kept: dict[str, Any] = {key: text for key, text in os.environ.items() if not key.startswith("XLA_")}
    done = subprocess.run(
        [sys.executable, "-c", AGAIN.format(line=line)],
        env=kept | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [name, "False"]
