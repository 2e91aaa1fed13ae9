"""The pictures of docs/allocation.md, drawn from the simulated pool. Writes three files of docs/images.

    python -m benchmarks.allocation_picture

Nothing is measured: each moment is what `jaxmem_callbacks.simulator.allocators` answers to the requests that stand here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.sources import ROOT
from jaxmem_callbacks.records.units import MIB, format_bytes
from jaxmem_callbacks.simulator.allocators import BINS, MIN_BYTES, Bfc, bin_of

IMAGES = ROOT / "docs" / "images"
POOL_BYTES = 64 * MIB
LOSS_BYTES = 4
COLOURS = {"state": "#1f77b4", "samples": "#2ca02c", "temporaries": "#ff7f0e", "loss": "#d62728", "arrays": "#9467bd"}
FREE = "#eceff1"


@dataclass(frozen=True)
class Moment:
    """A pool after one thing that happened: its regions, what is where, and what failed."""

    words: str
    regions: list[tuple[int, int]]
    taken: list[tuple[int, int, str]]  # address, bytes, name
    free_bytes: int
    largest_bytes: int
    refused_bytes: int = 0


@dataclass
class Drawn:
    """A pool whose requests have names; each request or return that is given words becomes a moment."""

    pool: Bfc
    moments: list[Moment] = field(default_factory=list[Moment])
    held: dict[str, int] = field(default_factory=dict[str, int])

    def take(self, name: str, size: int, words: str = "") -> None:
        """Ask for a block; one that is refused is drawn and not held."""
        address = self.pool.allocate(size)
        if address is not None:
            self.held[name] = address
        if words:
            self.draw(words, refused=size if address is None else 0)

    def free(self, name: str, words: str = "") -> None:
        """Give a block back."""
        self.pool.free(self.held.pop(name))
        if words:
            self.draw(words)

    def draw(self, words: str, refused: int = 0) -> None:
        """Keep what the pool looks like now."""
        sizes = {address: size for address, size, _ in self.pool.chunks()}
        taken = [(address, sizes[address], name) for name, address in self.held.items()]
        pool = self.pool
        largest = pool.largest_free_bytes()
        free = pool.pool_bytes - pool.in_use_bytes
        self.moments.append(Moment(words, pool.regions(), taken, free, largest, refused))


def one_loss() -> list[Moment]:
    """How one kept loss, 4 bytes, divides the free memory of a preallocated pool."""
    drawn = Drawn(Bfc(POOL_BYTES, preallocate=True, partitioned=True))
    drawn.take("state", 16 * MIB, "the state: the pool is cut")
    drawn.take("samples", 20 * MIB, "a first program's result")
    drawn.take("loss", LOSS_BYTES)
    drawn.take("temporaries", 12 * MIB, "a second program: its loss, its temporaries")
    drawn.free("temporaries", "it ends; the loss is kept")
    drawn.free("samples", "the result is let go: two holes")
    drawn.take("temporaries", 30 * MIB, "30 MiB in one piece: refused")
    drawn.free("loss", "float(loss): the holes become one")
    drawn.take("temporaries", 30 * MIB, "30 MiB: there")
    return drawn.moments


def growing() -> tuple[list[Moment], list[Moment]]:
    """The same requests of a pool that grows and of one that is taken at once."""
    return _fill_and_empty(preallocate=False), _fill_and_empty(preallocate=True)


def _fill_and_empty(*, preallocate: bool) -> list[Moment]:
    drawn = Drawn(Bfc(POOL_BYTES, preallocate=preallocate, partitioned=preallocate))
    for number, size in enumerate((1.5, 3, 6, 12, 24)):
        drawn.take(f"arrays {number}", int(size * MIB))
    drawn.draw("arrays of 1.5, 3, 6, 12 and 24 MiB")
    for name in list(drawn.held):
        drawn.free(name)
    drawn.draw("all of them are given back")
    drawn.take("temporaries", 40 * MIB)
    refused = 0 if "temporaries" in drawn.held else 40 * MIB
    drawn.draw(f"40 MiB in one piece: {'refused' if refused else 'there'}", refused=refused)
    return drawn.moments


def search() -> tuple[list[tuple[int, int]], int, int]:
    """Free blocks by size and bin, a request, and the block that it is cut from."""
    pool = Bfc(POOL_BYTES, preallocate=True)
    sizes = [512, 3 * 1024, 40 * 1024, 300 * 1024, MIB, 7 * MIB // 2]
    holes = [(pool.allocate(size), pool.allocate(MIN_BYTES))[0] or 0 for size in sizes]
    for hole in holes:
        pool.free(hole)
    blocks = [(size, number) for number, keys in enumerate(pool.bins()) for size, _ in keys]
    asked = 3 * MIB // 2
    before = {size for size, _ in blocks}
    pool.allocate(asked)
    after = {size for keys in pool.bins() for size, _ in keys}
    (cut,) = before - after
    return blocks, asked, cut


def draw_moments(axes: Any, moments: list[Moment]) -> None:
    """A row for each moment, the first on top: addresses from left to right."""
    for row, moment in enumerate(moments):
        for start, size in moment.regions:
            axes.barh(
                row, size / MIB, left=_place(moment, start), height=0.72, color=FREE, edgecolor="#455a64", linewidth=1
            )
        for address, size, name in sorted(moment.taken, key=lambda block: -block[1]):  # thin ones last, on top
            kind = name.split(" ")[0]
            width = max(size, MIB // 3) / MIB  # a loss would be too thin to be seen
            axes.barh(
                row,
                width,
                left=_place(moment, address),
                height=0.72,
                color=COLOURS[kind],
                edgecolor="white",
                linewidth=0.4,
            )
            if size >= 8 * MIB:
                axes.text(
                    _place(moment, address) + width / 2, row, kind, ha="center", va="center", color="white", fontsize=8
                )
        free, largest = format_bytes(moment.free_bytes), format_bytes(moment.largest_bytes)
        colour = "#b71c1c" if moment.refused_bytes else "#263238"
        axes.text(POOL_BYTES / MIB + 1, row, f"{free} free, largest {largest}", va="center", fontsize=8, color=colour)
    axes.set_yticks(range(len(moments)), [moment.words for moment in moments], fontsize=8)
    for label, moment in zip(axes.get_yticklabels(), moments, strict=True):
        label.set_color("#b71c1c" if moment.refused_bytes else "#263238")
    axes.set_xlim(0, POOL_BYTES / MIB)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _place(moment: Moment, address: int) -> float:
    """MiB from the left, the gaps between regions left out: the driver's addresses are others anyway."""
    before = 0
    for start, size in moment.regions:
        if start <= address < start + size:
            return (before + address - start) / MIB
        before += size
    raise AssertionError(address)


def draw_search(axes: Any) -> None:
    """Free blocks over their bins, the request, and where it is cut from."""
    blocks, asked, cut = search()
    for number in range(0, BINS, 2):
        axes.axvspan(MIN_BYTES << number, MIN_BYTES << (number + 1), color="#f3f6f8")
    for size, number in blocks:
        chosen = size == cut
        axes.plot([size], [0], "o", markersize=13 if chosen else 9, color=COLOURS["temporaries" if chosen else "state"])
        axes.annotate(
            f"{format_bytes(size)}\nbin {number}",
            (size, 0),
            (0, 14),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axes.axvline(asked, color="#b71c1c", linestyle="--", linewidth=1.2)
    words = f"asked: {format_bytes(asked)}, bin {bin_of(asked)}"
    axes.annotate(words, (asked, 0.66), (-5, 0), textcoords="offset points", ha="right", fontsize=8, color="#b71c1c")
    rest = f"{format_bytes(asked)} are cut from {format_bytes(cut)}; {format_bytes(cut - asked)} stay free"
    axes.annotate(rest, (cut, 0), (0, -32), textcoords="offset points", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_xlim(MIN_BYTES, MIN_BYTES << BINS)
    ticks = [MIN_BYTES << number for number in range(0, BINS + 1, 4)]
    axes.set_xticks(ticks, [format_bytes(tick) for tick in ticks], fontsize=8)
    axes.set_ylim(-0.8, 0.8)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)


def figure(height: float, rows: int, draw: Callable[[Any], None]) -> Any:
    """A figure in the house's size, drawn by a function of its axes."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(9.0, height), dpi=110, layout="constrained")
    draw(made.subplots(rows, 1, squeeze=False)[:, 0])
    return made


def _draw_one_loss(axes: Any) -> None:
    draw_moments(axes[0], one_loss())
    axes[0].set_xlabel("address in a pool of 64 MiB, MiB", fontsize=8)


def _draw_growing(axes: Any) -> None:
    for one, moments, words in zip(
        axes, growing(), ("a pool that grows (gpu_growth)", "one piece (the default)"), strict=True
    ):
        draw_moments(one, moments)
        one.set_title(words, fontsize=9, loc="left")
    axes[-1].set_xlabel("memory of the pool, region by region, MiB; the limit is 64", fontsize=8)


def pictures() -> Iterator[tuple[str, Any]]:
    """File name and figure of each."""
    yield "allocation_steps.png", figure(4.2, 1, _draw_one_loss)
    yield "allocation_growth.png", figure(3.8, 2, _draw_growing)
    yield "allocation_bins.png", figure(1.9, 1, lambda axes: draw_search(axes[0]))


def main() -> None:
    """Draw and write them."""
    for name, drawn in pictures():
        drawn.savefig(IMAGES / name, bbox_inches="tight")
        print(f"docs/images/{name} from the simulated pool")


if __name__ == "__main__":
    main()
