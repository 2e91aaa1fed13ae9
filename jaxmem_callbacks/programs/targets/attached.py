"""The attached devices as a target: platform, kind and number enter, a name for `resolve_target` leaves, or None.

So that what runs here can be compiled in a worker, where a compile takes no device memory, may crash, and can be ended.
"""

from __future__ import annotations

import re
from dataclasses import replace

from jaxmem_callbacks.programs.targets.target import Target, gpu_of_kind, resolve_target, target_names
from jaxmem_callbacks.records.errors import TargetError

_TPU_KINDS = {
    "TPU v2": "v2",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
# Number of devices -> topology, of the kinds whose chips are one device each.
_FLAT = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBE = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}
_SHAPES = {"v5e": _FLAT, "v6e": _FLAT, "v4": _CUBE, "v5p": _CUBE}


def attached_target(platform: str, device_kind: str, count: int) -> Target:
    """The target that the attached devices are; the CPU's compiled in a worker too.

    Args:
        platform: ``cpu``, ``gpu`` or ``tpu``.
        device_kind: What JAX calls one device.
        count: Devices that the program is for.

    Raises:
        TargetError: no target is like them, or its compiler is not installed.
    """
    if platform == "cpu":
        return replace(resolve_target("cpu"), device_count=count, apart=True)
    if platform == "gpu" and (name := gpu_of_kind(device_kind)) is not None:
        return resolve_target(name if count == 1 else f"{name}:{count}")
    kind = _TPU_KINDS.get(device_kind) if platform == "tpu" else None
    shape = _SHAPES.get(kind or "", {}).get(count)
    if kind is not None and (count == 1 or shape is not None):
        return resolve_target(kind if shape is None else f"{kind}:{shape}")
    msg = (
        f"{count} attached devices of the kind {device_kind!r} ({platform}) are like no target. Expected one of those that "
        "docs/targets.md lists; name it yourself by target=."
    )
    raise TargetError(msg)


def nearest_target(platform: str, kind: str) -> str | None:
    """The target that is most like one device, by its name; None where none is of its model, or it is a part or a laptop's.

    Args:
        platform: JAX's word for it.
        kind: Its device kind, such as ``NVIDIA H100 80GB HBM3`` or ``TPU v5 lite``.
    """
    if platform == "cpu":
        return "cpu"
    if platform == "tpu":
        return _TPU_KINDS.get(kind)
    said = re.sub(r"rtx (?:(pro) )?(\d+)(?: (ada))?", lambda m: f"rtx{m[2]}{m[1] or m[3] or ''}", kind.lower())
    words = {re.sub(r"^sxm\d*$", "sxm", word.removesuffix("gb")) for word in re.split(r"[^a-z0-9]+", said)}
    if words & {"mig", "laptop"}:
        return None
    if "pcie" not in words:
        words.add("sxm")  # a module's kind may say nothing but its memory; a card's says PCIe
    names = [name for name in target_names() if resolve_target(name, require_installed=False).platform == "cuda"]
    same = [name for name in names if name.split("_")[0] in words]
    return max(same, key=lambda name: len(words.intersection(name.split("_"))), default=None)
