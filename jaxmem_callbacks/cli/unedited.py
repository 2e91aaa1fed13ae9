"""A script as its user has it enters, without a step of this library: its jitted step is found, and its gradients obey policies.

While such a script is looked at, JAX's own names stand for this library's: the gradient functions of JAX, Flax NNX and Equinox
for `jm.value_and_grad` and its like, and what their jits make announces the call that takes a gradient. No file is edited, and
the modules' names are put back at the end; what the script, or a package that it imports, took by ``from jax import grad`` stays
with it, and does for a package what JAX's does.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import types
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import jax

from jaxmem_callbacks.cli.pmapped import Named, Pmapped
from jaxmem_callbacks.cli.seen import AT_ONCE, GRADIENTS, JITS, LOOPS, Seen
from jaxmem_callbacks.cli.source import is_unedited, source_of
from jaxmem_callbacks.cli.stand_ins import StandIns
from jaxmem_callbacks.cli.watched import Watched, Watching
from jaxmem_callbacks.programs.targets.target import Target

_CPU_DEVICES = "xla_force_host_platform_device_count"
_MOST_DEVICES = 64  # a script may make a copy of its state for each
_MADE = {("jax", "pmap"): Pmapped}  # what makes other jitted functions -> what stands for them


@contextmanager
def as_written(script: str, *, step: str | None = None, target: Target | None = None) -> Generator[Seen]:
    """Inside, an unedited script's step is announced to `first_calls_seen_by`, and its gradients obey the policy of a step.

    Args:
        script: As typed: ``train.py``, or ``train.py:name``, whose step need not be found. One that makes a step of this
            library is left alone.
        step: The name of the jitted function that is the step; None for the first that takes a gradient.
        target: What the step is to be compiled for; None for the attached devices.
    """
    seen = Seen()
    if target is not None:
        _see_devices_of(target)
    source = source_of(script)
    is_found_by_name, is_edited = source.function is not None, not is_unedited(source.path)
    gradients = StandIns(seen, is_told=is_found_by_name or step is not None)
    watching = Watching(seen, gradients, step, elsewhere=target is not None and target.platform != "cpu")
    before: list[tuple[types.ModuleType, str, Any]] = []
    try:
        unedited = (
            *GRADIENTS,
            *AT_ONCE,
            *(() if is_found_by_name else (*JITS, *(("jax.lax", name) for name in LOOPS))),
        )
        for place in (*(() if is_edited else unedited), *_MADE):
            module_name, attribute = place
            try:
                module = importlib.import_module(module_name)
                real = getattr(module, attribute)
            except Exception:  # noqa: BLE001, S112 - not every user has every framework, or one that goes with this JAX
                continue
            before.append((module, attribute, real))
            if place in GRADIENTS:
                new = gradients.instead_of(*place, real)
            elif place in AT_ONCE:
                new = gradients.at_once(real)
            else:
                made_as = _MADE.get(place, Watched) if not (is_edited or is_found_by_name) else Named
                new = watching.loop(real) if place[0] == "jax.lax" else watching.jit(real, made_as)
            setattr(module, attribute, new)
        yield seen
    finally:
        watching.is_on = False
        for module, attribute, real in reversed(before):
            setattr(module, attribute, real)


def _see_devices_of(target: Target) -> None:
    """Let the script see as many devices as the target has, where its own are CPUs: a mesh of all of them is then the target's.

    What the user says of their number holds, and so does a backend that has started already.
    """
    is_said = jax.config.values["jax_num_cpu_devices"] > 0 or _CPU_DEVICES in os.environ.get("XLA_FLAGS", "")
    if 1 < target.device_count <= _MOST_DEVICES and not is_said:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", target.device_count)
