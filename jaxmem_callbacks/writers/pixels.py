"""Pixels: a drawn picture enters; what loggers take that draw no PNG leaves."""

from __future__ import annotations

import io
from typing import Any

from jaxmem_callbacks.writers.protocol import Picture


def pixels_of(picture: Picture) -> Any:
    """The picture as height x width x 3 colours of uint8, on white: not every logger takes a fourth for what shines through."""
    import numpy as np
    from matplotlib.image import imread

    image = np.asarray(imread(io.BytesIO(picture.png), format="png"))
    solid = image[..., 3:]
    return ((image[..., :3] * solid + (1 - solid)) * 255).round().astype(np.uint8)
