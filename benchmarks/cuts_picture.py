"""The picture of docs/remat.md: bytes alive along a loss, and where it is cut. Writes docs/images/cuts.png.

    python -m benchmarks.cuts_picture

Nothing is compiled: a loss of twelve blocks is traced from shapes, profiled and cut as under the policy `full`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.allocation_picture import figure
from benchmarks.sources import ROOT
from jaxmem_callbacks.records.units import MIB
from jaxmem_callbacks.transforms.costs import alive
from jaxmem_callbacks.transforms.cuts import choose_cuts
from jaxmem_callbacks.transforms.loss_profile import LiveBytesProfile, cheap_values, profile_loss
from jaxmem_callbacks.transforms.tracing import flatten

PICTURE = ROOT / "docs" / "images" / "cuts.png"
BLOCKS, ROWS, WIDTH, WIDE = 12, 4096, 256, 4


def loss(params: Any, x: Any) -> Any:
    """Blocks that are narrow between each other and four times as wide inside."""
    for up, down in params:
        x = jnp.tanh(x @ up) @ down
    return jnp.square(x).mean()


def profile() -> LiveBytesProfile:
    """What is alive where in that loss."""
    shapes = (WIDTH, WIDE * WIDTH), (WIDE * WIDTH, WIDTH)
    block = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    flat = flatten(jax.make_jaxpr(loss)([block] * BLOCKS, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)))
    return profile_loss(flat, cheap_values(flat)[0]).live


def live_bytes(found: LiveBytesProfile) -> np.ndarray:
    """Bytes alive at each position between two equations."""
    return alive(found.spans[:, :3], found.length)


def draw(axes: Any) -> None:
    """Live bytes as hills, cuts as lines in the valleys."""
    found = profile()
    live, cuts = live_bytes(found) / MIB, choose_cuts(found)
    places = np.arange(len(live))
    axes[0].fill_between(places, live, step="mid", color="#a6e1c0", linewidth=0)
    axes[0].step(places, live, where="mid", color="#008954", linewidth=1)
    for number, cut in enumerate(cuts):
        axes[0].axvline(cut, color="#b3261e", linewidth=1.2, linestyle="--", label=None if number else "a cut")
        axes[0].plot([cut], [live[cut]], "o", color="#b3261e", markersize=4)
    axes[0].set_xlabel(f"place between two equations of a loss of {BLOCKS} blocks", fontsize=8)
    axes[0].set_ylabel("bytes alive there, MiB", fontsize=8)
    axes[0].set_ylim(0, None)
    axes[0].margins(x=0.01)
    axes[0].tick_params(labelsize=8)
    axes[0].legend(fontsize=8, loc="upper right", frameon=False)
    for side in ("top", "right"):
        axes[0].spines[side].set_visible(False)


def main() -> None:
    """Draw and write it."""
    figure(2.4, 1, draw).savefig(PICTURE, bbox_inches="tight")
    print("docs/images/cuts.png from a traced loss")


if __name__ == "__main__":
    main()
