"""What a user does first with the installed package. The name of an extra enters, or none; what was found leaves, as JSON.

Run from a folder without the sources, by the Python that the wheel was installed for. Every step is asserted.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.targets.compilers import other_than_pinned
from jaxmem_callbacks.programs.targets.target import resolve_target

COMPILER_OF = {"tpu-targets": ("v5e", "libtpu"), "gpu-targets": ("h100_sxm", "jax-cuda12-plugin")}


def loss_fn(params: Any, batch: Any) -> Any:
    """A loss with a loop of layers."""
    hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, params)
    return (hidden**2).mean()


def train_step(params: Any, batch: Any) -> Any:
    """A step in plain JAX."""
    loss, grads = jm.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}


def plain() -> dict[str, Any]:
    """Presets, a monitored training of two steps, the command and the pytest plugin, all from the installed files."""
    package = Path(jm.__file__).parent
    assert (package / "py.typed").exists()
    assert (package / "config" / "shipped" / "preset.schema.json").exists()
    preset = jm.load_preset("donate", "full_remat")
    step, params = jm.jit_step(train_step, preset), jnp.full((4, 16, 16), 0.1)
    with tempfile.TemporaryDirectory() as logdir:
        with jm.MemoryMonitor(preset, logdir=logdir) as monitor:
            for i in range(2):
                params, metrics = step(params, jnp.ones((8, 16)))
                monitor(i, metrics)
        assert list(Path(logdir).glob("events.out.tfevents.*"))
    scripts = {each.name: each.value for each in importlib.metadata.entry_points(group="console_scripts")}
    plugins = {each.name: each.value for each in importlib.metadata.entry_points(group="pytest11")}
    command = [str(Path(sys.executable).with_name("jaxmem")), "presets", "full_remat"]
    answered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "  remat: full" in answered.splitlines()
    return {
        "package": str(package),
        "presets": list(jm.list_presets()),
        "step_bytes": jm.step_memory(step, params, jnp.ones((8, 16))).step_bytes,
        "command": scripts["jaxmem"],
        "plugin": plugins["jaxmem"],
    }


def plan(extra: str) -> dict[str, Any]:
    """A plan for hardware that is not here, by the compiler that the extra installed beside JAX."""
    target, compiler = COMPILER_OF[extra]
    shapes = jax.ShapeDtypeStruct((4, 128, 128), jnp.float32), jax.ShapeDtypeStruct((4096, 128), jnp.float32)
    found = jm.plan(train_step, *shapes, target=target)
    assert found.chosen.fits
    assert found.compiles >= 1
    assert not other_than_pinned(resolve_target(target).platform)
    return {
        "target": target,
        "compiler": f"{compiler} {importlib.metadata.version(compiler)}",
        "compiles": found.compiles,
        "largest_candidate_bytes": found.candidates[0].step_bytes,
    }


def nvidia() -> dict[str, Any]:
    """The driver's library is there; where it finds no driver, the probe answers in one line."""
    importlib.import_module("pynvml")
    driver = importlib.import_module("jaxmem_callbacks.probes.device_memory")
    (answer,) = driver.DriverProbe([SimpleNamespace(platform="gpu", id=0, local_hardware_id=0)]).read(0)
    answered = getattr(answer, "reason", "a reading")
    assert "\n" not in answered
    assert "not installed" not in answered
    return {"library": f"nvidia-ml-py {importlib.metadata.version('nvidia-ml-py')}", "driver": answered}


def main(extra: str) -> None:
    """Use it, and print what was found."""
    found = nvidia() if extra == "nvidia" else plan(extra) if extra in COMPILER_OF else plain()
    versions = {
        name: importlib.metadata.version(name) for name in ("jaxmem_callbacks", "jax", "jaxlib", "flax", "optax")
    }
    print(json.dumps({"python": platform.python_version(), "versions": versions, "found": found}))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
