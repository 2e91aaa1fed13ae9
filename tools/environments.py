"""Environments for make: finds Python interpreters, builds virtual environments, runs commands in them.

Enters: pyproject.toml and whatever interpreters this machine has. Leaves: `.venv` (and `.venv-3.12` and so on), each
with one stamp file a part, written only after the part was installed. Standard library only, and runs on old Pythons
too, so that they get a sentence instead of a traceback.

    python3 tools/environments.py find
    python3 tools/environments.py run  PARTS COMMAND...      # in .venv, made from the python3 that runs this file
    python3 tools/environments.py each PARTS COMMAND...      # once for every supported Python found
    python3 tools/environments.py other PARTS COMMAND...     # on the JAX line that .venv does not have
    python3 tools/environments.py apart PARTS COMMAND...     # in .venv-3.12-apart, for what COMMAND installs itself
    python3 tools/environments.py newest PARTS COMMAND...    # in .venv-3.12-newest, its requirements without upper bounds
PARTS is a comma list of: project, demo, test, docs, targets, compared, adapters, lint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator  # noqa: UP035 - this file also runs on Python 3.8

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 11), (3, 13)
PREFERRED = ("3.12", "3.11", "3.13")
PARTS = ("project", "demo", "test", "docs", "targets", "compared", "adapters", "lint")
PROBE = """
import json, ssl, sys, venv, ensurepip
print(json.dumps([list(sys.version_info[:2]), sys.executable]))
"""


class SetupError(Exception):
    """Something this machine lacks, in words for the person at the keyboard."""


def jax_line(minor: str) -> str:
    """The JAX line that pip resolves to on Python ``minor``: 0.11 of JAX dropped Python 3.11."""
    return "0.10" if minor == "3.11" else "0.12"


def probe(command: str) -> tuple[str, str] | None:
    """``("3.12", path)`` when ``command`` really runs, is supported, and can make environments; else None.

    Shims of version managers exist on PATH for versions that are not active, so only running it shows.
    """
    try:
        answer = subprocess.run([command, "-c", PROBE], capture_output=True, text=True, timeout=30, check=False)
        version, path = json.loads(answer.stdout.strip().splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None
    if not OLDEST <= tuple(version) <= NEWEST:
        return None
    return f"{version[0]}.{version[1]}", path


def places(minor: str) -> list[str]:
    """Where Python ``minor`` may be: PATH, then pyenv's and uv's folders, newest patch release first."""
    pyenv = Path(os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv"))) / "versions"
    data = os.environ.get("XDG_DATA_HOME", str(Path.home() / ".local" / "share"))
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", str(Path(data) / "uv" / "python")))
    kept = [*pyenv.glob(f"{minor}*/bin/python{minor}"), *uv.glob(f"cpython-{minor}*/bin/python{minor}")]
    on_path = shutil.which(f"python{minor}")
    return ([on_path] if on_path else []) + [str(path) for path in sorted(kept, reverse=True)]


def interpreters() -> dict[str, str]:
    """Minor version -> interpreter, one for each supported version found; the running one wins for its version."""
    found = {}
    running = probe(sys.executable)
    if running:
        found[running[0]] = running[1]
    for minor in PREFERRED:
        answers = (probe(place) for place in places(minor) if minor not in found)
        for answer in answers:
            if answer and answer[0] == minor:
                found[minor] = answer[1]
                break
    return found


def default_interpreter() -> tuple[str, str]:
    """The running interpreter if it is supported, else the first of the preferred versions found on this machine.

    Raises:
        SetupError: there is none; the message names what to install.
    """
    running = probe(sys.executable)
    if running:
        return running
    found = interpreters()
    for minor in PREFERRED:
        if minor in found:
            return minor, found[minor]
    version = "{}.{}".format(*sys.version_info[:2])
    msg = (
        f"No usable Python found. python3 is {version} at {sys.executable}; needed is 3.11, 3.12 or 3.13 with the "
        "modules venv, ensurepip and ssl.\nLooked on PATH and where pyenv and uv keep theirs.\n"
        "Install one, for example: apt-get install python3 python3-venv   or   uv python install 3.12"
    )
    raise SetupError(msg)


def venv_python(folder: Path) -> Path:
    """The interpreter inside a virtual environment."""
    return folder / "bin" / "python"


def environment(folder: Path, minor: str, interpreter: str, parts: list[str]) -> Path:
    """A virtual environment with ``parts`` installed; does nothing when all stamps are fresh.

    Args:
        folder: Where it lives; built anew when it is broken or of another Python version.
        minor: Version that it must have.
        interpreter: What to make it from.
        parts: Names out of ``PARTS``.

    Returns:
        The environment's interpreter.

    Raises:
        SetupError: pip failed; its output has been printed.
    """
    python = venv_python(folder)
    known = probe(str(python)) if python.exists() else None
    if known is None or known[0] != minor:
        with phase(f"{folder.name}: making it from Python {minor}"):
            shutil.rmtree(folder, ignore_errors=True)
            run_quietly([interpreter, "-m", "venv", str(folder)])
            run_quietly([str(python), "-m", "pip", "install", "--quiet", "--upgrade", "pip>=25.1"])
    for part in parts:
        install(folder, python, part)
    return python


def install(folder: Path, python: Path, part: str) -> None:
    """One part, unless its stamp shows that it is there as pyproject.toml wants it."""
    stamp = folder / f".installed-{part}"
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if part == "targets" and (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print(
            "[environment] the compilers of absent GPUs and TPUs exist for Linux on x86-64 only; their tests are skipped"
        )
        return
    stamp.unlink(missing_ok=True)
    with phase(f"{folder.name}: installing {part}"):
        for arguments in pip_arguments(folder, python, part):
            run_quietly([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments])
    stamp.write_text(wanted)  # last: an interrupted install leaves no stamp


def pip_arguments(folder: Path, python: Path, part: str) -> list[list[str]]:
    """What ``pip install`` is called with for one part, call by call."""
    if part == "project":
        return [["--editable", str(ROOT)]]
    if part == "targets":
        # Apart from the environment: JAX would load them in every process. Their versions must fit the JAX beside them.
        aside = targets_folder(folder)
        shutil.rmtree(aside, ignore_errors=True)
        return [["--no-deps", "--target", str(aside), *target_compilers(python)]]
    alone = ["--no-deps"] if part == "compared" else []
    return [[*alone, "--group", f"{ROOT / 'pyproject.toml'}:{part}"]]


def targets_folder(folder: Path) -> Path:
    """Where compilers of absent hardware are kept; only the library's compile worker puts it on its path."""
    return folder / "targets"


def target_compilers(python: Path) -> list[str]:
    """Requirements of the compilers of absent hardware, as `jaxmem targets --install` takes them for the installed JAX."""
    code = "from jaxmem_callbacks.programs.targets.compilers import requirements as r; print(*r('tpu'), *r('cuda'))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.split()


def jax_version(python: Path) -> str:
    """The version of jax installed beside ``python``."""
    code = "from importlib.metadata import version; print(version('jax'))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def phase(what: str) -> Iterator[None]:
    """Prints what is being done, and how long it took."""
    start = time.monotonic()
    print(f"[environment] {what} ...", flush=True)
    state = "FAILED"
    try:
        yield
        state = "done"
    finally:
        print(f"[environment] {what}: {state} in {time.monotonic() - start:.0f} s", flush=True)


def run_quietly(command: list[str]) -> None:
    """Run a command; show its output only when it fails.

    Raises:
        SetupError: it failed.
    """
    answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, check=False)
    if answer.returncode:
        print(answer.stdout)
        msg = f"This command failed with exit code {answer.returncode}: {' '.join(command)}"
        raise SetupError(msg)


def call(folder: Path, command: list[str]) -> int:
    """Run ``command`` with the environment first on PATH; its exit code."""
    variables = dict(os.environ, VIRTUAL_ENV=str(folder))
    variables["PATH"] = f"{folder / 'bin'}{os.pathsep}{variables.get('PATH', '')}"
    variables.pop("PYTHONHOME", None)
    variables.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # else each of the suite's many interpreters compiles every module again
    if (folder / ".installed-targets").exists():
        variables.setdefault("JAXMEM_TARGET_PATH", str(targets_folder(folder)))
        variables.setdefault("JAXMEM_REQUIRE_TARGETS", "1")  # they are there, so no test may skip them
    program = shutil.which(command[0], path=variables["PATH"]) or command[0]
    return subprocess.call([program, *command[1:]], cwd=ROOT, env=variables)


def folder_for(minor: str) -> Path:
    """``.venv`` when that has this version already, else ``.venv-3.12``."""
    first = ROOT / ".venv"
    known = probe(str(venv_python(first))) if first.exists() else None
    return first if known and known[0] == minor else ROOT / f".venv-{minor}"


def run_in(folder: Path, minor: str, interpreter: str, parts: list[str], command: list[str]) -> int:
    """Make the environment, then run the command in it; the command's exit code."""
    python = environment(folder, minor, interpreter, parts)
    print(f"[environment] {folder.name}: Python {minor}, jax {jax_version(python)}", flush=True)
    return call(folder, command)


def run_each(parts: list[str], command: list[str]) -> int:
    """Run the command on every supported Python found; the first exit code that is not 0."""
    found = interpreters()
    results = {}
    for minor in sorted(found):
        results[minor] = run_in(folder_for(minor), minor, found[minor], parts, command)
    print("\n[environment] summary")
    for minor in sorted(PREFERRED):
        state = "not proved, no such interpreter found"
        if minor in results:
            state = "passed" if results[minor] == 0 else f"FAILED with exit code {results[minor]}"
        print(f"  Python {minor}, JAX line {jax_line(minor)}: {state}")
    return next((code for code in results.values() if code), 0 if results else 1)


def run_other(parts: list[str], command: list[str]) -> int:
    """Run the command on the JAX line that the default environment does not have; print a line when there is none."""
    first, _ = default_interpreter()
    found = interpreters()
    others = [minor for minor in PREFERRED if jax_line(minor) != jax_line(first)]
    line = jax_line(others[0])
    for minor in others:
        if minor in found:
            print(f"[environment] second JAX line: {line}, on Python {minor}", flush=True)
            return run_in(folder_for(minor), minor, found[minor], parts, command)
    print(f"JAX line {line} (Python {' or '.join(sorted(others))}): not proved, no such interpreter found")
    return 0


def run_newest(parts: list[str], command: list[str]) -> int:
    """Run the command with the newest of all that the project needs, pre-releases too, whatever its own upper bounds."""
    import tomllib  # not on the old Pythons, which get a sentence

    found = interpreters()
    minor = next((each for each in PREFERRED if each in found and jax_line(each) == jax_line(PREFERRED[0])), None)
    if minor is None:
        print(f"the newest JAX (Python {PREFERRED[0]}): not proved, no such interpreter found")
        return 0
    folder = ROOT / f".venv-{minor}-newest"
    python = environment(folder, minor, found[minor], parts)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = list(declared["project"]["dependencies"])
    for part in parts:
        needed += declared["dependency-groups"].get(part, [])
    unbounded = [",".join(part for part in each.split(",") if not part.startswith("<")) for each in needed]
    with phase(f"{folder.name}: installing the newest of {len(unbounded)} packages"):
        run_quietly([str(python), "-m", "pip", "install", "--quiet", "--upgrade", "--pre", *unbounded])
    print(f"[environment] {folder.name}: Python {minor}, jax {jax_version(python)}", flush=True)
    return call(folder, command)


def main(arguments: list[str]) -> int:
    """The command line; see the top of this file."""
    if arguments == ["find"]:
        for minor, path in sorted(interpreters().items()):
            print(f"Python {minor} (JAX line {jax_line(minor)}): {path}")
        return 0
    if len(arguments) < 3 or arguments[0] not in ("run", "each", "other", "apart", "newest"):  # noqa: PLR2004 - verb, parts, command
        print(__doc__)
        return 2
    verb, parts, command = arguments[0], arguments[1].split(","), arguments[2:]
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        msg = f"Unknown part {unknown[0]!r}. Expected some of: {', '.join(PARTS)}."
        raise SetupError(msg)
    several = {"each": run_each, "other": run_other, "newest": run_newest}
    if verb in several:
        return several[verb](parts, command)
    if verb == "apart":
        minor, interpreter = default_interpreter()
        return run_in(ROOT / f".venv-{minor}-apart", minor, interpreter, parts, command)
    return run_in(ROOT / ".venv", *default_interpreter(), parts, command)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SetupError as error:
        sys.exit(f"{error}")
    except KeyboardInterrupt:
        sys.exit(130)
