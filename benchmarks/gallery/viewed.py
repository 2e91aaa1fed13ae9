"""A program trained under JAX's profiler, and what XProf's memory viewer shows of its step. Prints that as its last line.

    python viewed.py PROGRAM.py STEP

Runs in the gallery's environment, which has XProf's converter.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

MIB = 2**20


def profiled(script: str) -> Path:
    """The profile of a run of a program."""
    import jax

    # A program from JAX's persistent cache, which MaxText turns on, has no trace of its heap: XProf would show what it holds
    # throughout, and none of its temporaries.
    jax.config.update("jax_enable_compilation_cache", False)
    folder, options = tempfile.mkdtemp(), jax.profiler.ProfileOptions()
    # Of the profile the programs alone are read, and calls of Python would take gigabytes.
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        runpy.run_path(script, run_name="__main__")
    (found,) = Path(folder).rglob("*.xplane.pb")
    return found


def viewed(profile: Path, step: str) -> dict[str, Any]:
    """The step's program in the memory viewer; of several of that name the first, since `jaxmem inspect` stops at the first call.

    Raises:
        LookupError: the profile has no program of that name.
    """
    from xprof.convert import raw_to_tool_data as converter

    converter.xspace_to_tool_names([str(profile)])  # writes a file for each program
    names = [each.name.removesuffix(".hlo_proto.pb") for each in profile.parent.glob("*.hlo_proto.pb")]
    found = [name for name in names if name.partition("(")[0] == f"jit_{step}"]
    if not found:
        msg = f"no program jit_{step} among {', '.join(sorted(names))}"
        raise LookupError(msg)
    first = min(found, key=lambda name: int(name.rpartition("(")[2].rstrip(")")))
    asked = {"module_name": first, "memory_space": "0"}
    data, _ = converter.xspace_to_tool_data([str(profile)], "memory_viewer", asked)
    return json.loads(data)


if __name__ == "__main__":
    view = viewed(profiled(sys.argv[1]), sys.argv[2])
    buffers = [(round(each["logicalBufferSizeMib"] * MIB), each.get("shapeString")) for each in view["maxHeap"]]
    total, peak = (round(view[name] * MIB) for name in ("totalBufferAllocationMib", "peakHeapMib"))
    print()
    print(json.dumps({"program_bytes": total, "peak_bytes": peak, "buffers": buffers}))
