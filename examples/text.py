"""Real text that every machine has: the source files of Python's standard library, as bytes. Shared by the transformers.

Leaves: training and held-out text, split by file, and batches of tokens int32[batch, length + 1].
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCABULARY = 256  # bytes
LEFT_OUT = {"test", "tests", "site-packages", "idlelib", "lib2to3", "__pycache__"}  # not on every machine
HELD_OUT = 10  # every tenth file


def standard_library(at_most: int = 8_000_000) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out text as uint8[bytes], always the same for one Python version."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if LEFT_OUT.isdisjoint(path.relative_to(root).parts))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for index, path in enumerate(files):
        if size < at_most:
            content = path.read_bytes()
            parts[index % HELD_OUT == 0].append(content)
            size += len(content)
    train, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return train, held_out


def sequences(text: np.ndarray, count: int, length: int, seed: int = 0) -> np.ndarray:
    """``count`` windows of the text at random places, int32[count, length + 1]."""
    starts = np.random.default_rng(seed).integers(0, len(text) - length, count)
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def batches(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """The rows in batches; as in most data loaders the last one is shorter unless ``size`` divides their number."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
