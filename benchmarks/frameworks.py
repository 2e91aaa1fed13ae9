"""Training frameworks, each trained with the monitor in its place. Writes results/frameworks_jax_<version>.json.

    python -m benchmarks.frameworks [NAME ...]

Each is installed beside this project, by pip and within the project's own ranges, and its suite (marked `adapters`) is run. The
file has the version and how it went, or why it cannot be had here. `make test-adapters` does it in an environment of its own.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

from benchmarks.sources import ROOT, write_result

TENSORFLOW = (
    "tensorflow-cpu>=2.20"  # Keras's and clu's writers and data are TensorFlow's; by itself pip would take the GPU's
)
DOCUMENT = "tests/test_adapters_docs.py"


class Framework(NamedTuple):
    """A framework to try.

    Attributes:
        package: Whose version is printed.
        requirements: What pip is asked for.
        suite: The file of its tests.
        chosen: Which of them, by pytest's words, where `make test` has them too; else those that are marked `adapters`.
    """

    package: str
    requirements: tuple[str, ...]
    suite: str
    chosen: str = ""


FRAMEWORKS: dict[str, Framework] = {
    "flax": Framework("flax", ("flax>=0.12",), "tests/test_frameworks.py", "nnx or linen"),
    "equinox": Framework("equinox", ("equinox",), "tests/test_frameworks.py", "equinox"),
    "optax": Framework("optax", ("optax",), "tests/test_frameworks.py", "optax"),
    "orbax": Framework("orbax-checkpoint", ("orbax-checkpoint",), "tests/test_saves.py", "test_saves"),
    "keras": Framework("keras", ("keras>=3.15", TENSORFLOW), "tests/test_adapters_keras.py"),
    "clu": Framework("clu", ("clu>=0.0.12", TENSORFLOW), "tests/test_adapters_clu.py"),
    "grain": Framework("grain", ("grain>=0.2.18",), "tests/test_adapters_grain.py"),
    "tunix": Framework("google-tunix", ("google-tunix>=0.1.7",), "tests/test_adapters_tunix.py"),
    "kauldron": Framework(
        "kauldron",
        # The last three only spare pip a quarter of an hour of trying older versions of what xmanager brings.
        (
            *("kauldron>=1.4", TENSORFLOW),
            *("protobuf>=6.33,<7", "grpcio-status>=1.85", "google-cloud-aiplatform>=2.7"),
        ),
        "tests/test_adapters_kauldron.py",
    ),
    # One version: of its hundreds of nightly ones pip would try all before it gives up. Last: it takes an older JAX.
    "levanter": Framework(
        "marin-levanter", ("marin-levanter==0.2.227.dev40316220070",), "tests/test_adapters_levanter.py"
    ),
}
OTHERS = [name for name, each in FRAMEWORKS.items() if not each.chosen]  # in need of an environment of their own


def installed(requirements: tuple[str, ...]) -> str:
    """Why pip refuses, or nothing where it does not."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--editable", str(ROOT)]
    # The newest that this framework allows, whatever the one before it took.
    command += ["--upgrade", "jax", "jaxlib", "optax"]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)  # noqa: S603 - as written above
    return why(done.stdout + done.stderr) if done.returncode else ""


def why(output: str) -> str:
    """Of pip's output: the requirements that contradict each other, or the other Python that it wants, or its last words."""
    conflict = re.search(r"The conflict is caused by:\n((?: {4}\S.*\n)+)", output)
    if conflict:
        return "; ".join(line.strip() for line in conflict[1].splitlines())
    other_python = re.findall(r"([\w.]+) Requires-Python (\S+)", output)
    if other_python:
        return "version {} wants Python {}".format(*other_python[-1])
    return next((line for line in reversed(output.splitlines()) if line.startswith("ERROR: ")), "pip failed")


def tested(name: str, framework: Framework) -> dict[str, int | str]:
    """The numbers of its tests, and the first failure."""
    variables = {**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-k", framework.chosen or name]
        options += (
            ["-m", "core", framework.suite] if framework.chosen else ["-m", "adapters", framework.suite, DOCUMENT]
        )
        command = [sys.executable, "-m", "pytest", *options]
        subprocess.run(command, cwd=ROOT, env=variables, check=False)  # noqa: S603 - pytest
        cases = list(ET.parse(report).getroot().iter("testcase")) if report.exists() else []  # noqa: S314 - pytest wrote it
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    found: dict[str, int | str] = {"passed": len(cases) - len(failed) - len(skipped), "failed": len(failed)}
    good = cases and not failed and not skipped
    first = next((case.get("name") for case in failed + skipped), "no test ran")
    return {"outcome": "passed" if good else f"failed: {first}", **found}


def tried(name: str, framework: Framework) -> dict[str, int | str]:
    """One framework: installed, and its suite run."""
    print(f"{name}: installing {', '.join(framework.requirements)}", flush=True)
    refused = installed(framework.requirements)
    if refused:
        return {"version": framework.requirements[0], "outcome": f"not installable: {refused}"}
    versions = {"version": importlib.metadata.version(framework.package), "jax": importlib.metadata.version("jax")}
    return {**versions, **tested(name, framework)}


def main(names: list[str]) -> int:
    """Try each, print, write the result file; 1 when one failed."""
    unknown = sorted(set(names) - set(FRAMEWORKS))
    if unknown:
        sys.exit(f"Unknown framework {unknown[0]!r}. Expected some of: {', '.join(FRAMEWORKS)}.")
    wanted = [name for name in FRAMEWORKS if not names or name in names]
    # Backwards, so that the newest JAX is there at the end: the file is named by it.
    outcomes = {name: tried(name, FRAMEWORKS[name]) for name in reversed(wanted)}
    frameworks = {name: outcomes[name] for name in wanted}
    for name, each in frameworks.items():
        print(f"  {name:10} {each['version']:44} {each['outcome']}")
    if not names:  # a part of them proves nothing of the others
        write_result("frameworks", frameworks=frameworks)
    return int(any(str(each["outcome"]).startswith("failed") for each in frameworks.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
