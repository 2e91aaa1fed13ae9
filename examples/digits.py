"""Images that scikit-learn brings along: 1,797 handwritten digits of 8 by 8. Shared by the classifiers.

Leaves: images for training and unseen ones, each ``{"image": float32[n, 64], "label": int32[n]}``, and batches of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    message = f"This example needs scikit-learn for its images: pip install scikit-learn ({error})"
    raise SystemExit(message) from None

Images = dict[str, np.ndarray]


def load() -> tuple[Images, Images]:
    """1,400 images for training and 397 unseen ones, always the same."""
    loaded = load_digits()
    order = np.random.default_rng(0).permutation(len(loaded.target))
    images = {"image": (loaded.data / 16).astype(np.float32)[order], "label": loaded.target.astype(np.int32)[order]}
    return chosen(images, slice(1400)), chosen(images, slice(1400, None))


def chosen(images: Images, rows: slice | np.ndarray) -> Images:
    """Some rows of both arrays."""
    return {name: array[rows] for name, array in images.items()}


def batches(images: Images, steps: int, size: int) -> Iterator[Images]:
    """A batch a step, drawn at random, the same ones each time."""
    for i in range(steps):
        yield chosen(images, np.random.default_rng(i).choice(len(images["label"]), size, replace=False))
