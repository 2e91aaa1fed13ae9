"""What every command has in common: exit codes in its help, colours, --quiet, and the shells' completion."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys

import pytest

from jaxmem_callbacks.cli.exit_codes import exit_codes_text
from jaxmem_callbacks.cli.main import COMMANDS, main
from jaxmem_callbacks.records.documents import Bullets, Code, Document, Section, Table, as_text, put_document
from jaxmem_callbacks.records.terminal import put, quietly
from tests.steps import SCRIPT

PAGE = Document([Section("A heading", ["words", Bullets(["look"], mark="!"), Code(["jm.plan()"])])])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch):
    """Stdout as a terminal; within a test, since pytest sets streams of its own before one."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", stream := Terminal())
    return stream


@pytest.mark.parametrize("command", COMMANDS)
def test_each_help_states_the_exit_codes(command, capsys):
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert exit_codes_text(command) in printed
    assert "  2    wrong arguments" in printed
    assert ("  3    nothing fits" in printed) == (command == "plan")


def test_a_terminal_has_colours_and_the_text_is_the_same(monkeypatch):
    terminal = terminal_of(monkeypatch)
    put_document(PAGE)
    printed = terminal.getvalue()
    assert "\x1b[1mA heading\x1b[0m" in printed
    assert "\x1b[36m" in printed
    plain = printed
    for code in ("1", "33", "36", "0"):
        plain = plain.replace(f"\x1b[{code}m", "")
    assert plain == as_text(PAGE) + "\n"


WIDE = Table(
    ("size", "policy", "from"),
    [
        ("1 GiB", "remat full, 4 microbatches, donated, offload of saved activations", "jit(step)/Block_3/" + "x" * 60),
        ("2 MiB", "none", "y"),
    ],
    ("right", "left", "left"),
)


def test_a_table_is_fitted_to_a_terminal_and_nowhere_else(monkeypatch, capsys):
    put_document(Document([WIDE]), width=60)
    assert capsys.readouterr().out == as_text(Document([WIDE])) + "\n", "a file has each row in one line"
    terminal = terminal_of(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    put_document(Document([WIDE, Section("below", [WIDE])]), width=60)
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    assert all(line.startswith(("   size", "  1 GiB", "  2 MiB", "   ", "below")) for line in lines if line)
    assert terminal.getvalue().count("x") == 2 * 60, "nothing is cut off"
    assert "microbatches" in terminal.getvalue()


def test_what_fits_a_terminal_is_as_it_is_in_a_file(monkeypatch):
    terminal = terminal_of(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    put_document(Document([WIDE]), width=200)
    assert terminal.getvalue() == as_text(Document([WIDE]), width=200) + "\n"


def test_a_table_of_numbers_is_never_broken(monkeypatch):
    terminal = terminal_of(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    numbers = Document([Table(("bytes", "count"), [("1" * 50, "2" * 50)], ("right", "right"))])
    put_document(numbers, width=60)
    assert terminal.getvalue() == as_text(numbers) + "\n"


def test_documents_stand_apart_and_empty_ones_are_left_out(capsys):
    put_document(Document(["a"]), Document([]), "", "b  stays", Document(["c", "d"]))
    assert capsys.readouterr().out == "a\n\nb  stays\n\nc\nd\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", [("inspect", "--top", "2"), ("plan", "--budget", "1GiB")])
def test_inspect_and_plan_have_colours_on_a_terminal_and_the_same_text(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(SCRIPT)
    typed = [command[0], str(tmp_path / "train.py"), *command[1:]]
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(typed) == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(typed) == 0
    coloured = capsys.readouterr().out
    assert "\x1b[1m" in coloured
    without = re.sub(r"\x1b\[\d+m", "", coloured)
    figures = lambda text: re.sub(r"\d+ of them from the cache|[\d.]+ ms", "", text)  # noqa: E731
    assert figures(without) == figures(plain)
    monkeypatch.setenv("NO_COLOR", "1")
    assert main([*typed, "--quiet"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_what_forbids_colours_is_obeyed(name, value, monkeypatch):
    terminal = terminal_of(monkeypatch)
    monkeypatch.setenv(name, value)
    put_document(PAGE)
    assert "\x1b" not in terminal.getvalue()


def test_a_file_has_colours_only_where_they_are_forced(capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    put_document(PAGE)
    assert capsys.readouterr().out == as_text(PAGE) + "\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    put_document(PAGE)
    assert "\x1b[1m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    put_document(PAGE)
    assert "\x1b" not in capsys.readouterr().out


def test_a_texts_own_control_sequences_stay_harmless_in_colours(monkeypatch):
    terminal = terminal_of(monkeypatch)
    put("\x1b]0;title\x07 head\nrest\n", styles=["1", ""])
    assert terminal.getvalue() == "\x1b[1m\\x1b]0;title\\x07 head\x1b[0m\nrest\n"


def test_lines_that_cleaning_took_leave_no_style_on_others(monkeypatch):
    terminal = terminal_of(monkeypatch)
    key = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\n-----END PRIVATE KEY-----"
    put(f"head\n{key}\nrest\n", styles=["", "", "", "", "1"])
    assert "MIIEv" not in terminal.getvalue()
    assert terminal.getvalue().endswith("rest\n")


def test_quiet_leaves_the_exit_code_and_json(tmp_path, capsys):
    log = tmp_path / "log.txt"
    log.write_text("all is well\n")
    assert main(["oom", str(log), "--quiet"]) == 1
    assert capsys.readouterr() == ("", "")
    assert main(["oom", str(log), "--quiet", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"found": False}
    assert main(["oom", str(tmp_path / "none.txt"), "--quiet"]) == 2
    assert "none.txt" in capsys.readouterr().err
    assert main(["oom", str(log)]) == 1
    assert capsys.readouterr().out, "only where it was asked for"


def test_quiet_ends_with_the_command(capsys):
    with quietly(True):
        put("nothing\n")
    put("something\n")
    assert capsys.readouterr().out == "something\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_has_every_command_and_its_options(shell, capsys):
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in COMMANDS)
    assert "max-regress" in printed


@pytest.mark.slow
def test_bash_completes_by_the_script(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "jaxmem.bash").write_text(capsys.readouterr().out)
    typed = "COMP_WORDS=(jaxmem comp) COMP_CWORD=1; _shtab_jaxmem comp; echo ${COMPREPLY[@]}"
    asked = f"source {tmp_path}/jaxmem.bash; {typed}"
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["compare", "completion"], done.stderr


def test_without_the_package_completion_names_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "the package shtab, which writes such scripts, is not installed here" in capsys.readouterr().err
