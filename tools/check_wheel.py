"""The wheel and the sdist as users get them: built, installed with what they depend on, and used. Downloads; minutes.

    make check-wheel                       # every supported Python found, every extra; writes results/check_wheel.json
    make check-wheel ARGS="--python 3.12 --extra nvidia"     # some of it; writes nothing

Interpreters enter (`environments.py` finds them); for each and each extra a clean environment is made, ``tools/wheel_use.py``
runs in it from an empty folder, and what it found leaves, with versions. So it goes with the sdist, without an extra: pip builds
it there by the backend that it fetches itself. The environments are deleted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.sources import RESULTS, ROOT, check_hash
from tools import environments

OUT = RESULTS / "check_wheel.json"
USE = ROOT / "tools" / "wheel_use.py"


def build(folder: Path, source: Path = ROOT, kinds: tuple[str, ...] = ("sdist", "wheel")) -> list[Path]:
    """Build those kinds from a source tree into a folder; their files.

    Raises:
        RuntimeError: the build failed; its output is the message.
    """
    targets = [word for kind in kinds for word in ("-t", kind)]
    command = [sys.executable, "-m", "hatchling", "build", *targets, "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    patterns = {"sdist": "*.tar.gz", "wheel": "*.whl"}
    return [next(folder.glob(patterns[kind])) for kind in kinds]


def wheel_of_sdist(sdist: Path, folder: Path) -> Path:
    """The wheel that is built from an unpacked sdist alone."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    (wheel,) = build(folder / "built", source, ("wheel",))
    return wheel


def extras() -> list[str]:
    """Those of pyproject.toml; the empty one, which is none, first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return ["", *project["optional-dependencies"]]


def use(python: Path, folder: Path, extra: str) -> dict[str, Any]:
    """What ``wheel_use.py`` finds, run by an installed Python from an empty folder.

    Raises:
        RuntimeError: it failed; what it wrote is the message.
    """
    hidden = ("PYTHON", "JAXMEM_", "XLA_", "LIBTPU", "VIRTUAL_ENV")
    variables = {name: text for name, text in os.environ.items() if not name.startswith(hidden)}
    variables |= {"JAX_PLATFORMS": "cpu", "JAXMEM_CACHE_DIR": "off", "JAXMEM_TARGET_PATH": str(folder / "none")}
    script = folder / "use.py"
    script.write_text(USE.read_text("utf-8"), "utf-8")
    command = [str(python), "-P", str(script), *([extra] if extra else [])]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def check(minor: str, interpreter: str, package: Path, extra: str) -> dict[str, Any]:
    """One clean environment: the wheel or the sdist with one extra, installed and used."""
    wanted = f"{package}[{extra}]" if extra else str(package)
    kind = "wheel" if package.suffix == ".whl" else "sdist"
    what = f"Python {minor}, {kind}, {extra or 'no extra'}"
    with tempfile.TemporaryDirectory() as name, environments.phase(what):
        folder = Path(name).resolve()
        environments.run_quietly([interpreter, "-m", "venv", str(folder / "venv")])
        python = environments.venv_python(folder / "venv")
        environments.run_quietly(
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted]
        )
        (folder / "away").mkdir()
        answer = use(python, folder / "away", extra)
        inside = answer["found"].pop("package", None)
        assert inside is None or Path(inside).is_relative_to(folder / "venv"), inside
    return {"installed": kind, "extra": extra or None, **answer}


def main() -> int:
    """The command line; see the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", help="only this version, such as 3.12")
    parser.add_argument("--extra", action="append", choices=extras(), help="only this extra; '' is none")
    options = parser.parse_args()
    found = environments.interpreters()
    with tempfile.TemporaryDirectory() as name:
        sdist, wheel = build(Path(name) / "dist")
        again = wheel_of_sdist(sdist, Path(name) / "unpacked")
        assert again.read_bytes() == wheel.read_bytes(), "the sdist builds another wheel"
        asked = options.extra or extras()
        packages = [(wheel, extra) for extra in asked] + [(sdist, "")] * ("" in asked)
        rows = [
            check(minor, found[minor], *package) for minor in sorted(options.python or found) for package in packages
        ]
        result = {
            "command": "make check-wheel",
            "sources": check_hash(OUT.stem),
            "wheel": {"name": wheel.name, "same_from_sdist": True},
            "rows": rows,
        }
    print(json.dumps(result, indent=1))
    if not (options.python or options.extra):
        OUT.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        print(f"wrote {OUT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except environments.SetupError as error:
        sys.exit(f"{error}")
