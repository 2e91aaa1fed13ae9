"""What the repository says of itself is true: commands and files that documents name, paths of pyproject.toml, golden files;
and it names no machine and no registry.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tomllib
from pathlib import Path

import jaxmem_callbacks as jm

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
TAGS = ("memory/", "plan/", "train/", "window/")  # what TensorBoard shows, no files
WRITTEN_BY_RUNS = ("runs/", "results/gpu_check.json")  # the second needs a GPU
# Put together here, so that this file does not contain what it looks for.
MACHINE_PATHS = [f"/{name}/".replace("_", "") for name in ("ho_me", "ro_ot", "wo_rk", "Us_ers")]
REGISTRIES = [
    name.replace("_", "") for name in ("py_pi.org", "python_hosted", "npm_js.", "debi_an.org", "ana_conda.org")
]
NEIGHBOURS = ["../sha_red".replace("_", "")]
FORBIDDEN = re.compile(
    "|".join(
        [rf"(?<![\w.~$}}]){path}" for path in MACHINE_PATHS] + [re.escape(text) for text in REGISTRIES + NEIGHBOURS]
    )
)


def tracked() -> list[str]:
    """Every file that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]


def documents() -> list[Path]:
    """The project's own prose."""
    return [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").glob("*.md")),
    ]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def commands(text: str) -> set[str]:
    """The targets of every ``make ...`` that stands in code."""
    code = re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL)
    lines = [line.strip("`").split("#")[0].split() for block in code for line in block.splitlines()]
    calls = [line[1:] for line in lines if line[:1] == ["make"]]
    return {word for call in calls for word in call if re.fullmatch(r"[a-z][a-z-]*", word)}


def named_files(path: Path) -> set[str]:
    """Files and folders that a document links to or names in code: what has a slash, or is a document's own name."""
    text = path.read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    code = re.findall(r"`([\w.-]+/[\w./-]*|[A-Z]+\.md)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return {name for name in links + code if not name.startswith((*WRITTEN_BY_RUNS, *TAGS))}


def exists(name: str, document: Path) -> bool:
    """As the document sees it, from the root, or as a room or file of the package."""
    return any((base / name).exists() for base in (document.parent, ROOT, ROOT / "jaxmem_callbacks"))


def test_the_readme_shows_two_commands_and_every_command_exists():
    assert {"demo", "test"} <= commands((ROOT / "README.md").read_text())
    for document in documents():
        assert commands(document.read_text()) <= make_targets(), document
    assert commands("Type `make nothing` or\n```sh\nmake lint format-check # both\n```") == {
        "nothing",
        "lint",
        "format-check",
    }


def test_the_readme_starts_with_what_to_do_in_ones_own_project():
    readme = (ROOT / "README.md").read_text()
    steps = [
        "\npip install path/to/jaxmem_callbacks ",
        "\njaxmem inspect train.py",
        "\njaxmem plan train.py --target",
        "no package index has it",
        "with jm.MemoryMonitor(",
        "make demo",
    ]
    places = [readme.find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)


def test_the_readme_is_short_and_leads_to_every_document_and_every_example():
    """By the index of docs/, whose pages test_doc_pages.py looks for, and by that of examples/."""
    readme = (ROOT / "README.md").read_text()
    assert readme.count("\n") <= 120
    assert {"docs/README.md", "docs/quickstart.md", "examples/README.md"} <= named_files(ROOT / "README.md")
    scripts = [path for path in (ROOT / "examples").glob("*.py") if "__main__" in path.read_text()]
    assert len(scripts) > 3
    listed = named_files(ROOT / "examples" / "README.md")
    assert [path.name for path in scripts if path.name not in listed] == []


def test_no_allocator_statistics_are_claimed_that_no_device_has_shown():
    rows = re.findall(r"^\| (NVIDIA GPU|TPU) \| (.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == ["NVIDIA GPU", "TPU"]
    unproved = [name for name, _ in rows if name == "TPU" or not (ROOT / "results" / "gpu_check.json").exists()]
    assert [name for name, said in rows if "not run yet" in said] == unproved


def test_continuous_integration_calls_commands_that_exist():
    called = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / ".ci" / "run").read_text()))
    assert {"test", "docs", "lint", "format-check", "types", "core"} <= called <= make_targets()


def test_every_file_that_a_document_names_exists(tmp_path):
    missing = [
        f"{path.name}: {name}" for path in documents() for name in sorted(named_files(path)) if not exists(name, path)
    ]
    assert missing == []
    toy = tmp_path / "TOY.md"
    toy.write_text(
        "[a](absent.md) ![b](docs/c.png) `tools/absent.py` `GONE.md` `runs/demo` `memory/x` `jm.plan` [x](https://a.b/c)"
    )
    assert named_files(toy) == {"absent.md", "docs/c.png", "tools/absent.py", "GONE.md"}


def test_no_machine_registry_or_neighbour_is_named():
    found = []
    for name in tracked():
        try:
            text = (ROOT / name).read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{name}:{n}: {line.strip()[:90]}" for n, line in enumerate(text.splitlines(), 1) if FORBIDDEN.search(line)
        ]
    assert found == []
    assert FORBIDDEN.search("see " + MACHINE_PATHS[0] + "someone")
    assert FORBIDDEN.search("https://" + REGISTRIES[0] + "/simple")
    assert not FORBIDDEN.search("a framework/room and ~/" + "work/x")


def test_every_golden_file_is_used():
    """By its name in a test, or as the resolved text of presets that exist."""
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    presets = set(jm.list_presets())
    golden = [path for path in (ROOT / "tests" / "golden").rglob("*") if path.is_file()]
    assert golden
    assert [path.name for path in golden if path.name not in tests and not set(path.stem.split("+")) <= presets] == []


def test_paths_of_pyproject_exist():
    project, tool = SETTINGS["project"], SETTINGS["tool"]
    wheel = tool["hatch"]["build"]["targets"]["wheel"]
    paths = [project["readme"], *project["license-files"], *tool["pytest"]["ini_options"]["testpaths"]]
    paths += [
        *wheel["packages"],
        *wheel["force-include"],
        tool["hatch"]["version"]["path"],
        *tool["pyright"]["include"],
    ]
    paths += [path.lstrip("/") for path in tool["hatch"]["build"]["targets"]["sdist"]["include"]]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    patterns = tool["ruff"]["lint"]["per-file-ignores"]
    assert [pattern for pattern in patterns if not any(ROOT.glob(pattern))] == []


def test_the_command_line_that_pyproject_names_exists():
    for entry in SETTINGS["project"]["scripts"].values():
        module, _, function = entry.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_every_marker_is_used():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    markers = [line.split(":")[0] for line in SETTINGS["tool"]["pytest"]["ini_options"]["markers"]]
    assert [marker for marker in markers if f"mark.{marker}" not in tests] == []


def test_the_changelog_speaks_of_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{jm.__version__}]" in changelog or "## [Unreleased]" in changelog
