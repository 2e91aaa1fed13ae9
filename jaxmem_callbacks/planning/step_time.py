"""The modelled time of a step, from the peak figures of accelerators; and how long it waits for its collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxmem_callbacks.programs.reading.hlo import (
    COLLECTIVES,
    Instruction,
    Module,
    calls_of,
    moved_bytes,
    padded_bytes,
    product_flops,
)
from jaxmem_callbacks.programs.targets.target import Target, nearest_target
from jaxmem_callbacks.transforms.costs import Amount, leaf_flops, nbytes, total_cost


@dataclass(frozen=True, slots=True)
class Speed:
    """Peaks of one JAX device.

    Attributes:
        flops: Dense matrix operations a second in bfloat16.
        bandwidth: Bytes a second between the chip and its memory.
        link: Bytes a second to neighbouring devices, all links together, one direction.
        float32_share: Speed of float32 matrix products at JAX's default precision, as a share of ``flops``.
        host: Bytes a second between the device and its host's memory, one direction, or None where it is unknown.
    """

    flops: float
    bandwidth: float
    link: float
    float32_share: float
    host: float | None = None


# PCI Express of 16 lanes, third to fifth generation; NVLink to the CPU of a superchip, shared by its two GPUs. Google's data
# sheets do not give a TPU's: these are of its engineers' book "How to Scale Your Model".
_PCIE3, _PCIE4, _PCIE5, _C2C, _TPU, _TPU_V6E = 15.75e9, 31.5e9, 63e9, 225e9, 16e9, 32e9
# Data sheets of the vendors, dense figures, sums in float32. A tpu7x chip has two JAX devices, and so have v2 and v3. At JAX's
# default precision float32 products are done in TF32 on GPUs, at half the bfloat16 speed, and in bfloat16 on TPUs. A T4 has
# neither of the two: XLA does products of both types in float32 there.
_SPEEDS = {
    "v2": Speed(22.5e12, 350e9, 62e9, 1.0),
    "v3": Speed(61.5e12, 450e9, 82e9, 1.0),
    "v4": Speed(275e12, 1228e9, 150e9, 1.0, _TPU),
    "v5e": Speed(197e12, 819e9, 100e9, 1.0, _TPU),
    "v5p": Speed(459e12, 2765e9, 300e9, 1.0, _TPU),
    "v6e": Speed(918e12, 1640e9, 224e9, 1.0, _TPU_V6E),
    "tpu7x": Speed(1153e12, 3690e9, 300e9, 1.0),
    "a100": Speed(312e12, 2039e9, 300e9, 0.5, _PCIE4),
    "a6000": Speed(155e12, 768e9, 56e9, 0.5, _PCIE4),
    "h100_pcie": Speed(756e12, 2000e9, 300e9, 0.5, _PCIE5),
    "h100": Speed(989e12, 3352e9, 450e9, 0.5, _PCIE5),
    "h200": Speed(989e12, 4800e9, 450e9, 0.5, _PCIE5),
    "gb200": Speed(2500e12, 8000e9, 900e9, 0.5, _C2C),
    "gb300": Speed(2500e12, 8000e9, 900e9, 0.5, _C2C),
    "b200": Speed(2250e12, 8000e9, 900e9, 0.5, _PCIE5),
    "b300": Speed(2250e12, 8000e9, 900e9, 0.5, _PCIE5),
    "rtx6000pro": Speed(503e12, 1792e9, 64e9, 0.5, _PCIE5),
    "a10g": Speed(70e12, 600e9, _PCIE4, 0.5, _PCIE4),
    "a40": Speed(150e12, 696e9, 56e9, 0.5, _PCIE4),
    "l4": Speed(121e12, 300e9, _PCIE4, 0.5, _PCIE4),
    "l40s": Speed(362e12, 864e9, _PCIE4, 0.5, _PCIE4),
    "rtx3090": Speed(71e12, 936e9, 56e9, 0.5, _PCIE4),
    "rtx4090": Speed(165e12, 1008e9, _PCIE4, 0.5, _PCIE4),
    "rtx5090": Speed(210e12, 1792e9, _PCIE5, 0.5, _PCIE5),
    "rtx6000ada": Speed(364e12, 960e9, _PCIE4, 0.5, _PCIE4),
    "t4": Speed(8.1e12, 320e9, _PCIE3, 1.0, _PCIE3),
}


def speed_of(target: Target) -> Speed | None:
    """Peaks of one device of a target, or None where no data sheet figure is known (the CPU)."""
    return _speed(target.name.partition(":")[0])


def speed_of_device(platform: str, kind: str) -> Speed | None:
    """Peaks of an attached device, or None where no data sheet figure is known.

    Args:
        platform: JAX's word for it, such as ``gpu``.
        kind: Its device kind, such as ``NVIDIA H100 80GB HBM3``.
    """
    return _speed(nearest_target(platform, kind) or "")


def _speed(name: str) -> Speed | None:
    return next((_SPEEDS[known] for known in sorted(_SPEEDS, key=len, reverse=True) if name.startswith(known)), None)


# Tuned: of what elementwise equations make, about this share is written to memory: the rest lives in registers of one fusion.
_WRITTEN = 0.25
# JAX rounds what a checkpoint keeps by `reduce_precision` to its own precision: no reduction, in spite of its name.
_FREE = {
    *("broadcast_in_dim", "iota", "name", "optimization_barrier", "pvary"),
    *("reduce_precision", "reshape", "squeeze", "stop_gradient"),
}


def modelled_seconds(closed_jaxpr: Any, speed: Speed, devices: int = 1) -> float | None:
    """Seconds of one call, the work shared evenly by the devices and nothing waiting for a collective.

    What is offloaded counts as if none of its way to the host and back were hidden behind other work: so it is chosen over
    computing again only where it is faster even then. None where it is offloaded and the speed of the link is unknown.

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
    # A kind of memory is named where a state waits on the host, which the type of a shape does not show.
    named = any(isinstance(place, jax.memory.Space) for place in eqn.params.get("devices", ()))
    pairs = zip(eqn.invars, eqn.outvars, strict=True)
    return sum(nbytes(out) for given, out in pairs if named or _memory(given) != _memory(out))


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


_START, _DONE = "-start", "-done"
# These run nothing.
_RUNS_NOTHING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}


def waiting_seconds(module: Module, device_count: int, speed: Speed) -> float:
    """Modelled seconds of a program's collectives that no other work hides.

    The links carry one collective at a time, in the order of their starts. What is asynchronous is carried while the work between
    its start and its end goes on; all else is waited for. Loops count as often as they run, and of branches the longest.

    Args:
        module: The program, its instructions in the order in which they run.
        device_count: Devices that it is for.
        speed: Peaks of one device.
    """
    return _Schedule(module, device_count, speed).total(module.entry)[1]


class _Schedule:
    """Work and waiting of each computation of a program."""

    def __init__(self, module: Module, device_count: int, speed: Speed) -> None:
        self._module, self._device_count, self._speed = module, device_count, speed
        self._instructions: dict[str, list[Instruction]] = {}
        for each in module.instructions.values():
            self._instructions.setdefault(each.computation, []).append(each)
        self._known: dict[str, tuple[float, float]] = {}

    def total(self, computation: str) -> tuple[float, float]:
        """Seconds of one run of a computation's work, and those that it waits."""
        if computation not in self._known:
            work = waits = 0.0
            carried: dict[str, float] = {}  # what is on its way -> seconds that the links still need for it
            for each in self._instructions.get(computation, ()):
                if each.opcode.removesuffix(_START) in COLLECTIVES:
                    seconds = moved_bytes(each, self._device_count) / self._speed.link
                    if each.opcode.endswith(_START):
                        carried[each.name] = seconds
                    else:
                        waits += seconds
                elif each.opcode.endswith(_DONE) and each.operands and each.operands[0] in carried:
                    waits += carried.pop(each.operands[0])
                elif each.opcode not in _RUNS_NOTHING:
                    own_work, own_waits = self._of(each)
                    work, waits = work + own_work, waits + own_waits
                    _carry(carried, own_work)
            self._known[computation] = work, waits
        return self._known[computation]

    def _of(self, each: Instruction) -> tuple[float, float]:
        """The same of one instruction: of what it runs, or of at least its products and of writing its results."""
        work = waits = 0.0
        for either, times in [] if each.calls else calls_of(each):
            inner_work, inner_waits = max(map(self.total, either), key=sum)
            work, waits = work + times * inner_work, waits + times * inner_waits
        if work or waits:
            return work, waits
        inside = self._instructions.get(each.calls or "", ())
        flops = sum(product_flops(one, self._module) for one in (each, *inside))
        return max(flops / self._speed.flops, padded_bytes(each.shape) / self._speed.bandwidth), 0.0


def _carry(carried: dict[str, float], seconds: float) -> None:
    """Let the links carry for so long, what started first first."""
    for name, left in carried.items():
        done = min(left, seconds)
        carried[name] = left - done
        seconds -= done
