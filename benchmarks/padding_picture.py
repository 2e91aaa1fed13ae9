"""The pictures of docs/gpu_and_tpu.md. The measured padding enters; docs/images/padding.png and memory_spaces.png leave.

    python -m benchmarks.padding_picture

The first is drawn from results/padding_*.json; the second is a sketch without a scale, of the page's table.
"""

from __future__ import annotations

import json
import re
from typing import Any

from benchmarks.allocation_picture import COLOURS, FREE, IMAGES, figure
from benchmarks.sources import RESULTS

TPU, EXAMPLE = "v5e", "f32[100,100]"
DARK, OUTSIDE, ON_CHIP = "#455a64", "#b0bec5", "#546e7a"
# From the bottom: width, words, colour; of a GPU's memory, of a TPU's, and of the host of either.
SPACES = {
    "GPU: JAX's pool, three quarters of the card": [
        (20, "state", COLOURS["state"]),
        (6, "free", FREE),
        (3, "kept", COLOURS["loss"]),
        (15, "free", FREE),
        (20, "temporaries", COLOURS["temporaries"]),
        (11, "free", FREE),
        (25, "outside the pool:\nCUDA, NCCL, cuDNN", OUTSIDE),
    ],
    "on the GPU's chip: no allocator's": [
        (24, "L2 cache: by itself", ON_CHIP),
        (38, "shared memory of each core: a kernel's,\nwhich fails where it wants too much", ON_CHIP),
        (38, "registers: a kernel's,\nwhat does not fit spills into the card's memory", ON_CHIP),
    ],
    "TPU: all of the chip's main memory (HBM)": [
        (22, "reserved by programs", COLOURS["temporaries"]),
        (20, "state", COLOURS["state"]),
        (3, "kept", COLOURS["loss"]),
        (55, "free, in one piece: the runtime moves blocks", FREE),
    ],
    "on the TPU's chip: the compiler's alone": [
        (
            62,
            "VMEM, vectors: tiles at work, and what need not wait in HBM;\na kernel that wants too much is refused",
            ON_CHIP,
        ),
        (38, "SMEM, scalars: counters and addresses", ON_CHIP),
    ],
    "host of either: Linux's": [
        (32, "pinned: offloaded arrays", COLOURS["samples"]),
        (68, "the process: data, checkpoints on their way; on a TPU also arrays, unpinned", OUTSIDE),
    ],
}


def measured() -> list[dict[str, Any]]:
    """The rows of the result file for one TPU; the others are like it."""
    (path,) = RESULTS.glob("padding_*.json")
    rows = json.loads(path.read_text("utf-8"))["rows"]
    return [row for row in rows if row["target"] == TPU]


def tiles(row: dict[str, Any]) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Of a two-dimensional array that is laid out as it is: its shape, a tile, and how many tiles each way."""
    shape = tuple(int(number) for number in re.findall(r"\d+", row["array"].partition("[")[2]))
    tile = tuple(int(number) for number in re.findall(r"\d+", row["layout"].partition("T(")[2].partition(")")[0]))
    (rows, columns), (high, wide) = shape, tile
    return (rows, columns), (high, wide), (-(-rows // high), -(-columns // wide))


def draw_tiles(axes: Any) -> None:
    """The example's numbers, and the tiles that hold them."""
    row = next(row for row in measured() if row["array"] == EXAMPLE)
    (rows, columns), (high, wide), (down, across) = tiles(row)
    for number in range(down):
        for place in range(across):
            corner = (place * wide, number * high)
            axes.add_patch(_box(corner, wide, high, FREE, DARK))
    axes.add_patch(_box((0, 0), columns, rows, COLOURS["state"], "none", alpha=0.75))
    axes.set_xlim(-1, across * wide + 1)
    axes.set_ylim(down * high + 1, -1)
    axes.set_xlabel(f"{columns} of {across * wide} numbers", fontsize=8)
    axes.set_ylabel(f"{rows} of {down * high} rows", fontsize=8)
    axes.tick_params(labelsize=7)
    words = (
        f"{EXAMPLE}: {row['own_bytes']:,} bytes\nin {down * across} tiles of {high} x {wide}: {row['device_bytes']:,}"
    )
    axes.set_title(words, fontsize=9, loc="left")


def draw_ratios(axes: Any) -> None:
    """A bar for each measured array: what it takes over its own bytes."""
    rows = measured()
    shares = [row["device_bytes"] / row["own_bytes"] for row in rows]
    axes.barh(range(len(rows)), shares, color=COLOURS["state"], height=0.65)
    for place, share in enumerate(shares):
        axes.text(share * 1.05, place, f"{share:.2f}", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [row["array"] for row in rows], fontsize=7)
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.9, 400)
    axes.set_xticks([1, 2, 8, 32, 128], ["1", "2", "8", "32", "128"], fontsize=7)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("on a TPU, times its own bytes; 1 everywhere on an H100", fontsize=9, loc="left")


def draw_spaces(axes: Any) -> None:
    """A bar for each memory; of those that have addresses, from low ones to high ones."""
    for row, parts in enumerate(SPACES.values()):
        left = 0
        for width, words, colour in parts:
            axes.barh(row, width, left=left, height=0.6, color=colour, edgecolor="white")
            dark = colour in (FREE, OUTSIDE)
            if width > max(map(len, words.splitlines())) * 0.77:
                axes.text(
                    left + width / 2,
                    row,
                    words,
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color=DARK if dark else "white",
                )
            left += width
    axes.set_yticks(range(len(SPACES)), [words.replace(": ", ":\n") for words in SPACES], fontsize=8)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_xlabel(
        "a sketch without a scale; pools from low addresses to high ones; red: a small array that is kept", fontsize=8
    )
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _box(corner: tuple[float, float], width: float, height: float, face: str, edge: str, **options: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, facecolor=face, edgecolor=edge, linewidth=0.8, **options)


def padding_figure() -> Any:
    """Tiles on the left, the measured arrays on the right."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(9.0, 3.4), dpi=110, layout="constrained")
    left, right = made.subplots(1, 2, width_ratios=(2, 3))
    draw_tiles(left)
    draw_ratios(right)
    return made


def main() -> None:
    """Draw and write both."""
    padding_figure().savefig(IMAGES / "padding.png")
    figure(3.9, 1, lambda axes: draw_spaces(axes[0])).savefig(IMAGES / "memory_spaces.png", bbox_inches="tight")
    print("docs/images/padding.png from results/padding_*.json, docs/images/memory_spaces.png")


if __name__ == "__main__":
    main()
