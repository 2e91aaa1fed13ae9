"""What arrays take on accelerators besides their own bytes. Writes results/padding_jax_<version>.json.

    python -m benchmarks.padding [--targets v5e h100_sxm ...]

Arrays of many shapes and dtypes as arguments of one program each, compiled by every target's own compiler, none of which need
be there: what it lays them out in, and how many bytes that is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem_callbacks as jm
from benchmarks.sources import write_result
from jaxmem_callbacks.records.errors import TargetError

Row = dict[str, Any]
TARGETS = ("v4", "v5e", "v5p", "v6e", "h100_sxm")
SHAPES = (
    ((100, 100), jnp.float32),
    ((100, 100), jnp.bfloat16),
    ((100, 100), jnp.int8),
    ((1000, 3), jnp.float32),
    ((1000, 1), jnp.float32),
    ((1000,), jnp.float32),
    ((1,), jnp.float32),
    ((2, 2, 2, 2), jnp.float32),
    ((129, 129), jnp.bfloat16),
    ((8, 12, 1024, 64), jnp.bfloat16),
    ((8, 6, 1024, 128), jnp.bfloat16),
    ((8, 224, 224, 3), jnp.float32),
    ((50257, 768), jnp.bfloat16),
    ((50304, 768), jnp.bfloat16),
)


def measure(target: str) -> list[Row]:
    """A row for each array: its own bytes, those that the target gives it, and the layout in the compiler's words."""
    arrays = {f"a{place:02d}": jax.ShapeDtypeStruct(shape, dtype) for place, (shape, dtype) in enumerate(SHAPES)}

    def program(a: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: array + 1 for name, array in a.items()}

    peak = jm.step_memory(program, arrays, target=target).peak()
    laid_out = {buffer.operation: buffer for buffer in peak.buffers if buffer.kind == "argument"}
    rows: list[Row] = []
    for name, array in arrays.items():
        buffer = laid_out[f"a['{name}']"]
        typed, _, layout = buffer.shape.partition("{")
        rows.append(
            {
                "target": target,
                "array": typed,
                "own_bytes": array.size * array.dtype.itemsize,
                "device_bytes": buffer.bytes,
                "layout": "{" + layout,
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is asked and can be compiled for, print a table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    targets = parser.parse_args(arguments).targets
    rows, missing = [], {}
    for target in targets:
        try:
            rows += measure(target)
        except TargetError as error:
            missing[target] = str(error).partition("\n")[0]
            print(f"{target} is left out: {missing[target]}")
    for row in rows:
        own, device = row["own_bytes"], row["device_bytes"]
        print(f"{row['target']:10s} {row['array']:24s} {own:>12} {device:>12} {device / own:8.2f} {row['layout']}")
    write_result("padding", options="--targets " + " ".join(targets), not_measured=missing, rows=rows)


if __name__ == "__main__":
    main()
