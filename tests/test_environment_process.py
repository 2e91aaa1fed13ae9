"""`jm.apply_environment` in real processes: before and after the backend, beside the user's settings, and what it verifies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jaxmem_callbacks.environment.apply import verify
from jaxmem_callbacks.probes.device_memory import devices_here
from jaxmem_callbacks.programs.targets.target import memory_of_kind
from jaxmem_callbacks.records.environment import DeviceFacts, ProcessFacts
from jaxmem_callbacks.records.presets import EnvironmentSettings

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
TRIED = """
import json, os, sys
import jaxmem_callbacks as jm
told = {}
def tried(name, call):
    try:
        told[name] = str(call())
    except Exception as error:
        told[name] = f"{type(error).__name__}: {error}"
"""


def process(code, **variables):
    """What a fresh interpreter tells, by name."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("XLA_", "JAX_", "TF_"))}
    environment = kept | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | variables
    command = [sys.executable, "-c", TRIED + textwrap.dedent(code) + "\nprint(json.dumps(told))"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def life():
    """One process from before `import jax` to after the start."""
    return process("""
        tried("first", lambda: jm.apply_environment("gpu_shared"))
        told["jax imported"] = "jax" in sys.modules
        told["variables"] = {name: text for name, text in os.environ.items() if name.startswith("XLA_")}
        tried("again", lambda: jm.apply_environment(jm.load_preset("donate", "gpu_shared")))
        tried("other", lambda: jm.apply_environment("gpu_preallocate"))
        told["unchanged"] = {name: text for name, text in os.environ.items() if name.startswith("XLA_")} == told["variables"]

        import jax
        from jaxmem_callbacks._compat import backends
        told["read before"] = [backends.settings_were_read(), backends.backend_refuses_settings()]
        told["devices asked for"] = jax.config.jax_num_cpu_devices
        tried("after import", lambda: jm.apply_environment("gpu_shared"))
        jax.numpy.ones(3)
        told["read after"] = [backends.settings_were_read(), backends.backend_refuses_settings()]
        tried("verified", lambda: jm.apply_environment("gpu_shared"))
        tried("late", lambda: jm.apply_environment("gpu_async"))
        tried("tpu", lambda: jm.apply_environment("tpu_default"))
        told["late set"] = "XLA_PYTHON_CLIENT_ALLOCATOR" in os.environ
        shared, growing = jm.load_preset("fsdp", "gpu_shared"), jm.load_preset("full_remat", "gpu_growth")
        step = lambda state, batch: state
        tried("step", lambda: type(jm.jit_step(step, shared)).__name__)
        tried("step of another", lambda: jm.jit_step(step, growing))
        tried("monitor", lambda: jm.MemoryMonitor(shared).close())
        tried("monitor of another", lambda: jm.MemoryMonitor(growing).close())
        tried("no preset", lambda: jm.apply_environment(jm.StepPolicy()))
    """)


def test_what_is_set_is_said_and_jax_is_not_imported_for_it(life):
    both = "XLA_PYTHON_CLIENT_PREALLOCATE=true, XLA_CLIENT_MEM_FRACTION=0.4"
    assert life["first"] == f"gpu_shared: set {both}; already so: nothing"
    assert life["variables"] == dict(part.split("=") for part in both.split(", "))
    assert life["jax imported"] is False
    assert life["again"] == f"donate+gpu_shared: set nothing; already so: {both}"
    assert life["after import"] == f"gpu_shared: set nothing; already so: {both}"


def test_another_preset_overwrites_nothing(life):
    assert "XLA_CLIENT_MEM_FRACTION is 0.4, and the preset has 0.9." in life["other"]
    assert life["unchanged"]


def test_both_ways_of_asking_know_whether_jax_was_started(life):
    assert (life["read before"], life["read after"]) == ([False, False], [True, True])
    assert life["devices asked for"] == -1  # the public way leaves the setting as it was


def test_after_the_start_it_verifies_and_sets_nothing(life):
    assert "environment: unknown, JAX runs on the CPU here, whose client has none of these settings" in life["verified"]
    assert life["late"].startswith("EnvironmentSettingError: gpu_async: too late for XLA_PYTHON_CLIENT_ALLOCATOR.")
    assert life["late set"] is False


def test_a_backend_that_does_not_obey_is_an_error(life):
    expected = "the backend does not obey.\n  platform: broken, JAX runs on cpu:0, and the preset is for tpu"
    assert life["tpu"] == f"EnvironmentSettingError: tpu_default: {expected}"


def test_a_preset_whose_environment_was_not_applied_is_refused_by_the_step_and_the_monitor(life):
    assert (life["step"], life["monitor"]) == ("JitStep", "None")
    for told in (life["step of another"], life["monitor of another"]):
        assert "has an environment that this process does not have: XLA_PYTHON_CLIENT_PREALLOCATE=false" in told
        assert "jm.apply_environment(jm.load_preset('full_remat', 'gpu_growth'))" in told


def test_no_preset_is_a_type_error_with_the_line(life):
    assert life["no preset"].startswith("TypeError: Expected a Preset or its name, got StepPolicy. Write jm.apply_env")


def test_settings_of_the_shell_and_of_jax_are_met_as_they_are():
    told = process(
        """
        tried("trap", lambda: jm.apply_environment("gpu_growth"))
        del os.environ["XLA_PYTHON_CLIENT_ALOCATOR"]
        tried("options of the shell", lambda: jm.apply_environment("gpu_growth"))
        import jax
        jax.config.update("jax_pjrt_client_create_options", {"preallocate": False, "memory_fraction": 0.4})
        tried("options", lambda: jm.apply_environment("gpu_growth"))
        tried("conflict", lambda: jm.apply_environment("gpu_preallocate"))
        jax.config.update("jax_pjrt_client_create_options", None)
        from jax._src import xla_bridge  # a test may look where the library may not
        xla_bridge._discover_and_register_pjrt_plugins()
        tried("plugins loaded", lambda: jm.apply_environment("gpu_growth"))
        """,
        XLA_PYTHON_CLIENT_ALOCATOR="hidden-value",
        JAX_PJRT_CLIENT_CREATE_OPTIONS="preallocate:false",
    )
    assert (
        "XLA_PYTHON_CLIENT_ALOCATOR is set. Nothing in JAX reads it. Did you mean `XLA_PYTHON_CLIENT_ALLOCATOR`?"
        in told["trap"]
    )
    assert "hidden-value" not in json.dumps(told)
    assert "has preallocate as text" in told["options of the shell"]
    assert told["options"] == "gpu_growth: set nothing; already so: jax_pjrt_client_create_options['preallocate']=False"
    assert "jax_pjrt_client_create_options['memory_fraction'] is 0.4, and the preset has 0.9" in told["conflict"]
    assert "too late for XLA_PYTHON_CLIENT_PREALLOCATE" in told["plugins loaded"]


# verification, of statistics in the shapes that the runtimes give
BFC = {"bytes_in_use": GIB, "peak_bytes_in_use": GIB, "bytes_limit": 60 * GIB, "pool_bytes": 60 * GIB}
ASYNC = {"bytes_in_use": GIB, "peak_bytes_in_use": GIB, "bytes_limit": 0}


def gpu(statistics, *, platform="cuda", total=80 * GIB):
    kind = "NVIDIA H100 80GB HBM3"
    return DeviceFacts(label="gpu:0", platform=platform, kind=kind, statistics=statistics, total_bytes=total)


def outcomes(device, **settings):
    """What is said of each setting; the platform must hold and is left out."""
    checks = verify(EnvironmentSettings(**settings), [device], ProcessFacts())
    assert (checks[0].setting, checks[0].outcome) == ("platform", "held")
    return {check.setting: check.outcome for check in checks[1:]}


@pytest.mark.parametrize(
    ("statistics", "settings", "expected"),
    [
        (BFC, {"fraction": 0.75}, {"fraction": "held"}),
        (BFC, {"fraction": 0.4}, {"fraction": "broken"}),
        (BFC | {"pool_bytes": GIB}, {"preallocate": True}, {"preallocate": "broken"}),
        (BFC, {"preallocate": True}, {"preallocate": "held"}),
        (BFC, {"preallocate": False}, {"preallocate": "broken"}),
        (BFC | {"pool_bytes": 2 * GIB}, {"preallocate": False}, {"preallocate": "held"}),
        (BFC | {"peak_bytes_in_use": 40 * GIB}, {"preallocate": False}, {"preallocate": "unknown"}),
        (BFC | {"pool_bytes": 0}, {"preallocate": True}, {"preallocate": "unknown"}),
        (
            BFC,
            {"allocator": "bfc", "collective_pool_bytes": 2**20},
            {"allocator": "held", "collective_pool": "unknown"},
        ),
        (BFC, {"allocator": "platform"}, {"allocator": "broken"}),
        (BFC, {"allocator": "cuda_async"}, {"allocator": "broken"}),
        (ASYNC, {"allocator": "cuda_async", "fraction": 0.9}, {"allocator": "held", "fraction": "unknown"}),
        (ASYNC, {"allocator": "bfc"}, {"allocator": "broken"}),
        (None, {"allocator": "vmm", "preallocate": True}, {"allocator": "held", "preallocate": "unknown"}),
        (None, {"allocator": "default"}, {"allocator": "broken"}),
    ],
)
def test_a_gpus_own_figures_verify_the_settings(statistics, settings, expected):
    assert outcomes(gpu(statistics), **settings) == expected


def test_a_fraction_of_an_unknown_whole_is_unknown():
    assert outcomes(gpu(BFC, total=None), fraction=0.75) == {"fraction": "unknown"}


def test_the_platform_is_verified():
    (cpu,) = devices_here()[:1]
    rocm, cuda = gpu(BFC, platform="rocm"), gpu(BFC)
    machine = ProcessFacts(hardware=("cuda",))
    for wanted, device, seen, outcome in [
        ("rocm", rocm, ProcessFacts(), "held"),
        ("rocm", cuda, ProcessFacts(), "broken"),
        ("tpu", cuda, ProcessFacts(), "broken"),
        (None, cpu, ProcessFacts(), "unknown"),
        (None, cpu, machine, "broken"),
        (None, cpu, ProcessFacts(hardware=("cuda",), platforms=("cpu",)), "unknown"),
        (None, cpu, ProcessFacts(plugins={"cuda": "for compiling only"}), "unknown"),
        ("cuda", cpu, ProcessFacts(platforms=("cpu",)), "broken"),
        ("tpu", cpu, machine, "broken"),
    ]:
        assert verify(EnvironmentSettings(platform=wanted), [device], seen)[0].outcome == outcome, (
            wanted,
            device.platform,
        )


def test_the_memory_of_a_gpu_by_its_makers_name():
    assert memory_of_kind("NVIDIA H100 80GB HBM3") == memory_of_kind("NVIDIA H100") == 84942979072
    assert memory_of_kind("NVIDIA H200") == memory_of_kind("NVIDIA H200 141GB HBM3e") is not None
    assert memory_of_kind("NVIDIA H20") is None
    assert memory_of_kind("cpu") is None
