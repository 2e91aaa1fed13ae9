"""A trace, a compiled program and this process enter; under what a program was compiled leaves, for plans to be compared with.

Two traces of one step have the same operations in every process, for attached and absent devices: names, source lines, constants
and where values are pinned on a mesh do not count.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

from jaxmem_callbacks.records.programs import Conditions

# What pins a value on a mesh says nothing of the mathematics.
_PLACING = frozenset({"sharding_constraint", "reshard", "mesh_cast"})
# Flags that change no program: where files go, how many CPU devices there are (which is counted), and what JAX sets on every TPU.
_HARMLESS = ("xla_dump", "xla_force_host_platform_device_count", "xla_tpu_use_enhanced_launch_barrier")


def operations_of(jaxpr: Any) -> str:
    """A short hash of a jaxpr's operations with shapes and dtypes of their results, inner jaxprs included."""
    known: dict[int, str] = {}  # by identity: all of them are held by the jaxpr that is read

    def told(jaxpr: Any) -> str:
        if id(jaxpr) not in known:
            eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
            text = "\n".join(line(eqn) for eqn in eqns if eqn.primitive.name not in _PLACING)
            known[id(jaxpr)] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return known[id(jaxpr)]

    def line(eqn: Any) -> str:
        types = [f"{getattr(v.aval, 'dtype', '')}{getattr(v.aval, 'shape', '')}" for v in eqn.outvars]
        inner = [told(each) for name in sorted(eqn.params) for each in _jaxprs(eqn.params[name])]
        return f"{eqn.primitive.name} {types} {inner} {eqn.params.get('length', '')}"

    return told(jaxpr)


@contextmanager
def unguarded() -> Generator[None]:
    """Where this library traces and compiles a step: what JAX watches in the caller's own code changes no program, and is off.

    What changes the program holds, such as ``jax_debug_nans``, under which JAX donates nothing. Without a jit there is no program
    at all: under ``jax_disable_jit`` a step is told as it is jitted.
    """
    with ExitStack() as off:
        off.enter_context(jax.transfer_guard("allow"))
        for watch in (jax.check_tracer_leaks, jax.debug_infs, jax.debug_key_reuse, jax.no_tracing):
            off.enter_context(watch(False))
        off.enter_context(jax.disable_jit(False))
        yield


def flags_now() -> dict[str, str]:
    """The flags that XLA's compilers take from this process, without those that change no program."""
    words = f"{os.environ.get('XLA_FLAGS', '')} {os.environ.get('LIBTPU_INIT_ARGS', '')}".split()
    parted = (word.lstrip("-").partition("=") for word in words if word.startswith("--"))
    return {name: value for name, _, value in parted if not name.startswith(_HARMLESS)}


def kind_here() -> str:
    """What the attached devices are."""
    return jax.local_devices()[0].device_kind


def conditions_of(compiled: jax.stages.Compiled, operations: str) -> Conditions:
    """What a compiled program runs on, and what it was compiled with.

    Args:
        compiled: For the devices of this process.
        operations: What `operations_of` gave, or empty.
    """
    shardings = jax.tree.leaves((compiled.output_shardings, compiled.input_shardings))
    devices: Iterable[Any] = max((each.device_set for each in shardings), key=len, default=())
    kinds, meshes = {each.device_kind for each in devices}, [_axes(each) for each in shardings]
    return Conditions(
        device_kind=kinds.pop() if len(kinds) == 1 else "",
        device_count=len(list(devices)) or None,
        mesh=next((axes for axes in meshes if axes), {}),
        flags=flags_now(),
        operations=operations,
    )


def _axes(sharding: Any) -> Mapping[str, int]:
    mesh = sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else None
    return {} if mesh is None else {str(name): int(size) for name, size in mesh.shape.items()}


def _jaxprs(value: Any) -> list[Any]:
    parts = value if isinstance(value, list | tuple) else (value,)
    return [part for part in parts if hasattr(getattr(part, "jaxpr", part), "eqns")]
