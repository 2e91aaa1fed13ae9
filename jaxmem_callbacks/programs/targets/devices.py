"""What JAX calls an attached device enters; the target that is most like it leaves."""

from __future__ import annotations

import re

from jaxmem_callbacks.programs.targets.target import resolve_target, target_names

# JAX's own kinds, of which some say the chip's code name and some the product's.
_TPUS = {
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


def nearest_target(platform: str, kind: str) -> str | None:
    """The target that is most like a device, by its name; None where none is of its model.

    Args:
        platform: JAX's word for it.
        kind: Its device kind, such as ``NVIDIA H100 80GB HBM3`` or ``TPU v5 lite``.
    """
    if platform == "cpu":
        return "cpu"
    if platform == "tpu":
        return _TPUS.get(kind)
    said = re.sub(r"rtx pro (\d+)", r"rtx\1pro", kind.lower())
    words = {re.sub(r"^sxm\d*$", "sxm", word.removesuffix("gb")) for word in re.split(r"[^a-z0-9]+", said)}
    if "pcie" not in words:
        words.add("sxm")  # a module's kind may say nothing but its memory; a card's says PCIe
    names = [name for name in target_names() if resolve_target(name, require_installed=False).platform == "cuda"]
    same = [name for name in names if name.split("_")[0] in words]
    return max(same, key=lambda name: len(words.intersection(name.split("_"))), default=None)
