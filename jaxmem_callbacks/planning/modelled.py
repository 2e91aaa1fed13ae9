"""A traced step and a device's peaks enter, modelled seconds leave. A model ranks policies; it is never a measurement.

Matrix products take the longer of their operations and their operands' traffic. Compilers fuse elementwise work into its
neighbours, so of its results a share is charged as traffic; reductions and gathers read and write memory in full.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxmem_callbacks.planning.speeds import Speed
from jaxmem_callbacks.transforms.flops import Amount, leaf_flops, total_cost
from jaxmem_callbacks.transforms.residuals import nbytes

# Of what elementwise equations make, about this share is written to memory: the rest lives in registers of one fusion.
_WRITTEN = 0.25
# JAX rounds what a checkpoint keeps by `reduce_precision` to its own precision: no reduction, in spite of its name.
_FREE = {
    *("broadcast_in_dim", "iota", "name", "optimization_barrier", "pvary"),
    *("reduce_precision", "reshape", "squeeze", "stop_gradient"),
}


def modelled_seconds(closed_jaxpr: Any, speed: Speed, devices: int = 1) -> float | None:
    """Seconds of one call, the work shared evenly by the devices and nothing waiting for a collective.

    What is offloaded counts as if none of its way to the host and back were hidden behind other work: so it is chosen over
    computing again only where it is faster even then. None where it is offloaded and nobody says how fast the way is.

    Args:
        closed_jaxpr: The traced step, with the shapes of the whole mesh.
        speed: Peaks of one device.
        devices: How many share the work.
    """
    nothing = Amount(0.0)
    work = total_cost(closed_jaxpr, lambda eqn: _equation(eqn, speed), nothing, nothing).weight / devices
    moved = host_bytes(closed_jaxpr) / devices
    if not moved:
        return work
    return None if speed.host is None else work + moved / speed.host


def host_bytes(closed_jaxpr: Any) -> int:
    """Bytes that one call moves between device and host memory, both ways together, loops multiplied in."""
    nothing = Amount(0.0)
    return int(total_cost(closed_jaxpr, lambda eqn: Amount(float(_crossing(eqn))), nothing, nothing).weight)


def _crossing(eqn: Any) -> int:
    """Bytes of one equation's operands that it puts into another memory."""
    if eqn.primitive.name != "device_put":
        return 0
    pairs = zip(eqn.invars, eqn.outvars, strict=True)
    return sum(nbytes(out) for given, out in pairs if _memory(given) != _memory(out))


def _memory(atom: Any) -> Any:
    return getattr(atom.aval, "memory_space", None)


def _equation(eqn: Any, speed: Speed) -> Amount:
    name = eqn.primitive.name
    if name in _FREE:
        return Amount(0.0)
    made = sum(map(nbytes, eqn.outvars))
    work = leaf_flops(eqn)
    if work.dot_flops:
        traffic = made + sum(map(nbytes, eqn.invars[:2]))
        return Amount(max(work.dot_flops / _matrix_flops(eqn, speed), traffic / speed.bandwidth))
    if name.startswith(("reduce", "arg", "cum", "sort", "scatter", "gather", "dynamic", "concatenate")):
        taken = sum(map(nbytes, eqn.invars)) if name.startswith(("reduce", "arg", "cum", "sort")) else made
        return Amount((made + taken) / speed.bandwidth)
    return Amount(_WRITTEN * made / speed.bandwidth)


def _matrix_flops(eqn: Any, speed: Speed) -> float:
    width = max(np.dtype(var.aval.dtype).itemsize for var in eqn.invars[:2])
    return speed.flops * (speed.float32_share if width >= np.dtype(np.float32).itemsize else 1.0)
