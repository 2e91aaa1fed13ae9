"""A script as its user has it enters, without a step of this library: its jitted step is found, and its gradients obey policies.

While such a script is looked at, JAX's own names stand for this library's: the gradient functions of JAX, Flax NNX and Equinox
for `jm.value_and_grad` and its like, and what their jits make announces the call that takes a gradient. No file is edited, and
the modules' names are put back at the end; what the script, or a package that it imports, took by ``from jax import grad`` stays
with it, and does for a package what JAX's does.
"""

from __future__ import annotations

import ast
import importlib
import pathlib
import types
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from jaxmem_callbacks.cli.stand_ins import AT_ONCE, GRADIENTS, Seen, StandIns
from jaxmem_callbacks.cli.watched import Watching
from jaxmem_callbacks.programs.targets.target import Target

# What makes a step of this library.
_OWN_STEPS = {"jit_step", "apply_policy"}
# Module and what makes jitted functions there.
_JITS = {("jax", "jit"), ("flax.nnx", "jit"), ("equinox", "filter_jit"), ("jax.experimental.pjit", "pjit")}


def is_unedited(script: pathlib.Path) -> bool:
    """Whether a script makes no step of this library itself. Words in comments and texts count for nothing."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):  # which running it tells
        return False
    names = (getattr(node, field, None) for node in ast.walk(tree) for field in ("id", "attr", "name"))
    return _OWN_STEPS.isdisjoint(name for name in names if isinstance(name, str))


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
    file, _, name = script.rpartition(":")
    is_found_by_name = bool(file and name.isidentifier())
    if not is_unedited(pathlib.Path(file if is_found_by_name else script)):
        yield seen
        return
    gradients = StandIns(seen, is_told=is_found_by_name or step is not None)
    watching = Watching(seen, gradients, step, elsewhere=target is not None and target.platform != "cpu")
    before: list[tuple[types.ModuleType, str, Any]] = []
    try:
        for place in (*GRADIENTS, *AT_ONCE, *(() if is_found_by_name else _JITS)):
            module_name, attribute = place
            try:
                module = importlib.import_module(module_name)
                real = getattr(module, attribute)
            except Exception:  # noqa: BLE001, S112 - not every user has every framework, or one that goes with this JAX
                continue
            before.append((module, attribute, real))
            if place in GRADIENTS:
                new = gradients.instead_of(*place, real)
            else:
                new = gradients.at_once(real) if place in AT_ONCE else watching.instead_of(real)
            setattr(module, attribute, new)
        yield seen
    finally:
        for module, attribute, real in reversed(before):
            setattr(module, attribute, real)
