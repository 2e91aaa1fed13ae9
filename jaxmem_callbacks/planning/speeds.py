"""Peak figures of accelerators from their vendors' data sheets, for modelled times only. Nothing here is measured."""

from __future__ import annotations

from dataclasses import dataclass

from jaxmem_callbacks.programs.targets.target import Target, nearest_target


@dataclass(frozen=True, slots=True)
class Speed:
    """Peaks of one JAX device.

    Attributes:
        flops: Dense matrix operations a second in bfloat16.
        bandwidth: Bytes a second between the chip and its memory.
        link: Bytes a second to neighbouring devices, all links together, one direction.
        float32_share: Speed of float32 matrix products at JAX's default precision, as a share of ``flops``.
        host: Bytes a second between the device and its host's memory, one direction, or None where nobody says.
    """

    flops: float
    bandwidth: float
    link: float
    float32_share: float
    host: float | None = None


# PCI Express of 16 lanes, third to fifth generation; NVLink to the CPU of a superchip, shared by its two GPUs. Google's data
# sheets do not tell a TPU's: these are of its engineers' book "How to Scale Your Model".
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
