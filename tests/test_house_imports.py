"""`import jaxmem_callbacks` has no effect and costs little. Each claim is checked in a fresh interpreter, and each check is
shown to fail on code that breaks it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 0.3  # beyond JAX's own import
HEAVY = ["matplotlib", "flax", "pydantic", "tensorboardX", "rich", "optax", "orbax", "equinox", "psutil"]

# What a process looks like, before and after the code under test. JAX itself is imported first: its effects are its own.
SNAPSHOT = """
import json, logging, os, signal, sys, threading, warnings
import jax
from jax._src import xla_bridge  # a test may look where the library may not

def look():
    loggers = {name: (log.level, len(log.handlers)) for name, log in logging.Logger.manager.loggerDict.items()
               if isinstance(log, logging.Logger) and (log.level or log.handlers)}
    return {
        "backends": xla_bridge.backends_are_initialized(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "environment": dict(os.environ),
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "warnings": [str(entry) for entry in warnings.filters],
        "config": {name: str(value) for name, value in sorted(jax.config.values.items())},
        "logging": [logging.root.level, len(logging.root.handlers), logging.root.manager.disable, loggers],
        "hooks": [str(sys.excepthook), str(threading.excepthook), str(sys.unraisablehook), str(sys.displayhook)],
        "recursion": sys.getrecursionlimit(),
    }

before, modules = look(), set(sys.modules)
exec(sys.argv[1])
after = look()
changed = [name for name in before if before[name] != after[name]]
arrived = sorted({name.split(".")[0] for name in set(sys.modules) - modules})
print(json.dumps({"changed": changed, "arrived": arrived}))
"""


def effects(code: str) -> dict[str, list[str]]:
    """What running ``code`` changes in a fresh interpreter that has only JAX."""
    return json.loads(run(SNAPSHOT, textwrap.dedent(code)).splitlines()[-1])


def run(program: str, *arguments: str) -> str:
    variables = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
    command = [sys.executable, "-c", program, *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    return effects("import jaxmem_callbacks")


def test_import_changes_nothing(imported):
    assert imported["changed"] == []


def test_import_loads_nothing_heavy(imported):
    assert sorted(set(HEAVY) & set(imported["arrived"])) == []


def test_rooms_that_need_no_jax_have_no_effect_either():
    """Records, presets and their schema are read by editors and launchers, before anybody decided on a backend."""
    seen = effects("""
        import jaxmem_callbacks as jm
        jm.StepPolicy, jm.Preset, jm.load_preset, jm.list_presets, jm.CollectingWriter, jm.apply_environment
    """)
    assert set(seen["changed"]) <= {"recursion"}


def test_touching_every_public_name_starts_no_backend():
    seen = effects("""
        import jaxmem_callbacks as jm
        for name in jm.__all__:
            if name not in ("linen", "nnx"):  # these load Flax, whose own import effects are not ours
                getattr(jm, name)
    """)
    assert seen["changed"] == []
    assert sorted({"flax", "matplotlib", "orbax", "equinox"} & set(seen["arrived"])) == []


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("backends", "import jax; jax.devices()"),
        ("threads", "import threading, time; threading.Thread(target=time.sleep, args=(5,), daemon=True).start()"),
        ("environment", "import os; os.environ['XLA_FLAGS'] = '--xla_dump_to=nowhere'"),
        ("signals", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"),
        ("warnings", "import warnings; warnings.simplefilter('ignore')"),
        ("config", "import jax; jax.config.update('jax_enable_x64', True)"),
        ("logging", "import logging; logging.getLogger('jax').setLevel('DEBUG')"),
        ("hooks", "import sys; sys.excepthook = print"),
    ],
)
def test_each_effect_would_be_seen(name, code):
    assert name in effects(code)["changed"]


def test_a_heavy_import_would_be_seen():
    assert "psutil" in effects("import psutil")["arrived"]


IMPORT_TIME = """
import sys, time
import jax
start = time.perf_counter()
exec(sys.argv[1])
print(time.perf_counter() - start)
"""


def import_seconds(code: str) -> float:
    """Median of five fresh interpreters, JAX already imported."""
    return statistics.median(float(run(IMPORT_TIME, code)) for _ in range(5))


def test_import_is_quick():
    assert import_seconds("import jaxmem_callbacks") < LIMIT_S


def test_a_slow_import_would_be_seen():
    assert import_seconds(f"import time; time.sleep({LIMIT_S})") >= LIMIT_S
