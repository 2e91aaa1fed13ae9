"""The picture of docs/simulate.md, drawn from a trace that comes with the package. Writes docs/images/simulate.png.

    python -m benchmarks.simulator_picture

Nothing is measured: the case is a committed file, and the figure is the one that `jaxmem simulate CASE --figure` draws.
"""

from __future__ import annotations

from benchmarks.sources import ROOT
from jaxmem_callbacks.api.simulation import device_bytes_of, simulate_ways, trace_of
from jaxmem_callbacks.writers.simulation import save_figure

CASE = "train_and_evaluate"
PICTURE = ROOT / "docs" / "images" / "simulate.png"


def main() -> None:
    """Draw and write the picture."""
    trace = trace_of(CASE)
    save_figure(simulate_ways(trace, device_bytes_of(None, trace)), PICTURE)
    print(f"{PICTURE.relative_to(ROOT)} from the case {CASE}")


if __name__ == "__main__":
    main()
