"""An environment for each JAX line of the gallery: this project, compilers of absent hardware, and all packages together."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

from benchmarks.gallery.programs import LINES
from benchmarks.sources import ROOT
from tools.environments import environment, install, interpreters, phase, run_quietly, venv_python


def folder_of(line: str) -> Path:
    """The environment of a JAX line."""
    return ROOT / f".venv-gallery-{line}"


def made(line: str) -> Path:
    """The interpreter of a line's environment, which is made first where it is not there as `LINES` wants it.

    Raises:
        SetupError: something could not be installed; its output has been printed.
    """
    wanted, folder = LINES[line], folder_of(line)
    python = environment(folder, wanted.python, interpreters()[wanted.python], ["project"])
    stamp, state = folder / ".installed-gallery", hashlib.sha256(repr(wanted).encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != state:
        stamp.unlink(missing_ok=True)
        (folder / ".installed-targets").unlink(missing_ok=True)  # they must fit the JAX that the packages agree on
        with phase(f"{folder.name}: installing {', '.join(wanted.packages)}"):
            # pip takes a quarter of an hour to find versions of several hundred packages that agree; uv takes seconds.
            run_quietly([str(python), "-m", "pip", "install", "--quiet", "uv"])
            agreed = ["--editable", str(ROOT), *wanted.packages]
            run_quietly([str(python), "-m", "uv", "pip", "install", "--quiet", "--python", str(python), *agreed])
        for package in wanted.sources:
            with phase(f"{folder.name}: the sources of {package}"):
                unpacked(python, package, folder / "sources")
        stamp.write_text(state)
    install(folder, python, "targets")
    return python


def unpacked(python: Path, package: str, folder: Path) -> None:
    """The published sources of a package, in `folder`, without what they depend on."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as downloads:
        alone = ["--no-deps", "--no-binary", package.partition("=")[0]]
        run_quietly([str(python), "-m", "pip", "download", "--quiet", *alone, "--dest", downloads, package])
        (archive,) = Path(downloads).glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")


def versions(line: str) -> dict[str, str]:
    """Versions of what a line's programs rest on, by package."""
    names = [
        "jax",
        "jaxlib",
        "flax",
        "optax",
        *(each.partition("=")[0].partition(">")[0] for each in LINES[line].packages),
    ]
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    command = [str(venv_python(folder_of(line))), "-c", code, *dict.fromkeys(names)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)  # noqa: S603 - as above
