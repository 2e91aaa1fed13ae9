"""Lines that `jaxmem doctor` prints about the settings of XLA's client, pasted into a shell or a script as they stand.

A training runs with them in a process of its own. There JAX's own function reads the settings, and the doctor finds nothing more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from jaxmem_callbacks.environment.findings import findings
from jaxmem_callbacks.records.environment import ProcessFacts
from tests import forked
from tests.pasting import pasted

NEW, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
ALLOCATOR, PREALLOCATE = "XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_PREALLOCATE"
POOL, HOST = "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
OPTIONS = "jax_pjrt_client_create_options"
TRAINING = """
import json, jax, jax.numpy as jnp
{line}
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options
from jaxmem_callbacks.environment.process import process_facts
from jaxmem_callbacks.environment.findings import findings
step = jax.jit(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w))
w = jnp.zeros(3)
for _ in range(20):
    w = step(w, jnp.eye(3))
read = generate_pjrt_gpu_plugin_options() | (jax.config.jax_pjrt_client_create_options or {{}})
print(json.dumps([read, [each.kind for each in findings(process_facts(started=False))], float(jnp.sum(w))]))
"""


def trained(shell: str = "", line: str = "", **variables: str) -> tuple[dict[str, object], list[str]]:
    """What JAX hands its GPU plugin, and what is still found, in a process that typed this and then trained."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("XLA_", "TF_", "CUDA_"))}
    typed = kept | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"} | variables
    asked = subprocess.run(["bash", "-c", f"{shell}\nenv -0"], env=typed, capture_output=True, text=True, check=True)
    in_shell = dict(each.split("=", 1) for each in asked.stdout.split("\0") if each)
    command = [sys.executable, "-c", TRAINING.format(line=line)]
    done = forked.run(command, env=in_shell, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    read, kinds, total = json.loads(done.stdout.splitlines()[-1])
    assert total == pytest.approx(2.3, abs=0.7)  # it went towards 3
    return read, kinds


def told(kind: str, **seen: object) -> str:
    found = {each.kind: each for each in findings(ProcessFacts(jax="0.12.0", jaxlib="0.12.0", **seen))}  # type: ignore[arg-type]
    return str(found[kind])


@pytest.mark.parametrize(
    ("variables", "kind", "key", "value"),
    [
        ({NEW: "1.0"}, "nothing left for CUDA", "memory_fraction", 0.9),
        ({OLD: "75"}, "fraction out of range", "memory_fraction", 0.75),
        ({PREALLOCATE: "no"}, "false that is true", "preallocate", False),
        ({ALLOCATOR: "BCF"}, "unknown allocator", "allocator", "bfc"),
        ({POOL: "512MiB"}, "no whole number", "collective_memory_size", 2**29),
        ({HOST: "64GB"}, "no number of GB", None, None),
    ],
)
def test_a_variable_that_is_set_as_printed(variables, kind, key, value):
    line = pasted("environment.set", told(kind, variables=variables))
    read, kinds = trained(line, **variables)
    assert kinds == []
    assert key is None or read[key] == value


@pytest.mark.parametrize(
    ("variables", "kind", "gone"),
    [
        ({NEW: "0.8", OLD: "0.8"}, "both fractions", OLD),
        ({ALLOCATOR: "platform", PREALLOCATE: "true"}, "no pool", PREALLOCATE),
        ({"CUDA_VISIBLE_DEVICES": "-1", NEW: "0.5"}, "GPU hidden", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_variable_that_is_unset_as_printed(variables, kind, gone):
    line = pasted("environment.unset", told(kind, variables=variables, plugins={"cuda": "jax-cuda12-plugin 0.12.0"}))
    assert line == f"unset {gone}"
    read, kinds = trained(line, **variables)
    assert set(kinds) <= {"platform that is not"}  # of jaxlib 0.10, whatever else is set
    assert read.get("memory_fraction") == (float(variables[NEW]) if NEW in variables else None)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"memory_fraction": 75}, "value of an option"),
        ({"preallocate": "no"}, "value of an option"),
        ({"memory_fraction": 1.0}, "nothing left for CUDA"),
    ],
)
def test_an_option_that_is_set_as_printed(options, kind):
    line = pasted("environment.option", told(kind, options=options))
    read, kinds = trained(line=line)
    assert kinds == []
    (key,) = options
    assert (read[key] == 0.9) if key == "memory_fraction" else (read[key] is False)


POPPED = """
import os
{line}
import jaxmem_callbacks as jm
jm.apply_environment("{preset}")
"""


@pytest.mark.parametrize(
    ("preset", "variables"),
    [
        ("gpu_growth", {PREALLOCATE: "true"}),
        ("gpu_shared", {NEW: "0.8"}),
        ("gpu_shared", {OLD: "0.8", PREALLOCATE: "false"}),
    ],
)
def test_a_variable_that_is_popped_as_printed(preset, variables):
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("XLA_", "TF_", "CUDA_"))}

    def applied(line: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", POPPED.format(line=line, preset=preset)],
            env=kept | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"} | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    refused = applied()
    assert "nothing was set, because this process is set otherwise already" in refused.stderr
    (line,) = [each for each in refused.stderr.splitlines() if each.endswith("# or so, above this call")]
    assert pasted("environment.pop", line.partition(";")[0].partition("#")[0])
    done = applied(line.strip())
    assert done.returncode == 0, done.stderr
