"""`jaxmem` and `jaxmem presets` as a user types them."""

import json
import subprocess
import sys

import pytest

import jaxmem_callbacks
from jaxmem_callbacks.cli import main as cli
from jaxmem_callbacks.config.presets import list_presets, load_preset, parse_preset


def typed(capsys, *argv):
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_list_describes_every_part_in_80_plain_columns(capsys):
    code, out, err = typed(capsys, "presets")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert not any(line != line.rstrip() for line in out.splitlines())
    rows = [line.split()[0] for line in out.splitlines() if line[:1].strip() and not line.startswith(("They", "and "))]
    assert tuple(rows) == list_presets()
    for name in list_presets():
        assert " ".join(load_preset(name).description.split()[:4]) in out


def test_the_list_folds_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = typed(capsys, "presets")
    table = out.partition("\nThey compose")[0]
    assert max(map(len, table.splitlines())) <= 60
    assert "quiet_monitor" in table


def test_names_show_the_resolved_composition(capsys):
    code, out, _ = typed(capsys, "presets", "donate", "full_remat")
    assert code == 0
    assert out.startswith("# donate+full_remat\ndescription: >-\n")
    assert "  donate: auto\n" in out
    assert "  every_steps: 1  # default\n" in out
    assert parse_preset(out).policy == load_preset("donate", "full_remat").policy
    assert max(map(len, out.splitlines())) <= 80


def test_a_wrong_name_exits_2_without_a_traceback(capsys):
    code, out, err = typed(capsys, "presets", "ful_remat")
    assert (code, out) == (2, "")
    assert err.startswith("jaxmem: Unknown preset 'ful_remat'. Did you mean `full_remat`?")
    assert "Traceback" not in err


def test_check_looks_at_every_file(capsys, tmp_path):
    good, bad, bare = (tmp_path / name for name in ("good.yaml", "bad.yaml", "bare"))
    good.write_text("policy: {remat: full}\nmonitor: {limit: 1GiB}\n")
    bad.write_text("policy: {rematt: full}\n")
    bare.write_text("{}\n")
    code, out, err = typed(capsys, "presets", "--check", str(bad), str(good), str(bare))
    assert code == 2
    assert out == f"{good}: ok, sets policy.remat, monitor.limit_bytes\n{bare}: ok, sets nothing\n"
    assert err.startswith(f"{bad}:1:10: unknown key 'rematt' in `policy`. Did you mean `remat`?")
    assert typed(capsys, "presets", "--check", str(good))[0] == 0


def test_an_unknown_command_is_answered_with_the_nearest(capsys):
    code, out, err = typed(capsys, "preset")
    assert (code, out) == (2, "")
    assert err.startswith("jaxmem: unknown command 'preset'. Did you mean `presets`? Commands: ")
    assert "presets" in err.partition("Commands:")[2]


@pytest.mark.core
def test_help_lists_every_command_of_the_table(capsys):
    code, out, _ = typed(capsys)
    assert code == 0
    assert {line.split()[0] for line in out.partition("COMMAND\n")[2].splitlines() if line[4:5].strip()} == set(
        cli.COMMANDS
    )
    with pytest.raises(SystemExit) as stopped:
        cli.main(["presets", "--help"])
    assert stopped.value.code == 0
    assert "--check FILE [FILE ...]" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"jaxmem_callbacks {jaxmem_callbacks.__version__}\n"


def test_a_wrong_option_exits_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["presets", "--chekc"])
    assert stopped.value.code == 2
    assert "unrecognized arguments: --chekc" in capsys.readouterr().err


PROBE = """
import json, sys
{call}
print(json.dumps(sorted({{'jax', 'jaxlib', 'flax', 'rich'}} & set(sys.modules))))
"""


def loaded_after(call):
    done = subprocess.run([sys.executable, "-c", PROBE.format(call=call)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.core
@pytest.mark.parametrize(("argv", "loaded"), [(["presets"], []), (["presets", "full_remat"], []), ([], [])])
def test_only_the_command_asked_for_is_imported_and_presets_need_no_jax(argv, loaded):
    assert loaded_after(f"from jaxmem_callbacks.cli.main import main\nmain({argv!r})") == loaded


def test_the_import_probe_can_fail():
    assert "jax" in loaded_after("import jax")


def test_a_reader_that_goes_away_is_no_traceback():
    call = [sys.executable, "-m", "jaxmem_callbacks.cli.main", "presets"]
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.returncode == 141
