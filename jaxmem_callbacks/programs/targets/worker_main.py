"""The worker's side of a compile for absent hardware: a folder with a request in, the same folder with an answer out.

Started as ``python -m jaxmem_callbacks.programs.targets.worker_main FOLDER`` with the environment that `worker.py` made. Reads
``request.json`` and ``program.bin``, writes ``answer.json`` and ``optimised.hlo``; the compiler dumps beside them. With
``--with-caller`` it ends, and removes the folder, as soon as its standard input is closed.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
import warnings
from typing import Any

# Typed keys by the names of their dtypes; JAX shows a key's implementation only of an array.
_KEY_KINDS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def main(folder: str) -> None:
    """Compile the request in ``folder``. An error of the compiler is an answer too; anything else ends in a traceback."""
    place = pathlib.Path(folder)
    request = json.loads((place / "request.json").read_text("utf-8"))
    sys.path.extend(request["folders"])
    import jax

    for name, value in request["jax_config"].items():
        if getattr(jax.config, name, jax.config.values.get(name)) != value:  # some warn of being set at all
            jax.config.update(name, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            answer: dict[str, Any] = _compile(request, place)
        except jax.errors.JaxRuntimeError as error:
            answer = {"error": str(error)}
    answer["warnings"] = [str(warning.message) for warning in caught if warning.category is UserWarning]
    (place / "answer.json").write_text(json.dumps(answer), "utf-8")


def _compile(request: dict[str, Any], place: pathlib.Path) -> dict[str, Any]:
    """Lower the traced program for the topology's devices, compile it and read the compiler's figures."""
    from jaxmem_callbacks.programs.reading.buffer_assignment import memory_figures

    start = time.monotonic()
    lowered, kept = _lower(request, place)
    compiled = lowered.compile(compiler_options=request["compiler_options"])
    seconds = time.monotonic() - start
    (place / "optimised.hlo").write_text(compiled.as_text() or "", "utf-8")
    figures = memory_figures(compiled, request["platform"])
    figures |= _assigned(request, place)
    return {"figures": figures, "compile_seconds": seconds, "kept": kept}


def _assigned(request: dict[str, Any], place: pathlib.Path) -> dict[str, int]:
    """Figures by the buffer assignment, where this compile wrote it beside its answer and it can be read."""
    from jaxmem_callbacks.programs.reading.buffer_assignment import assigned_by_kind
    from jaxmem_callbacks.records.errors import CompileError

    dump = pathlib.Path(request["compiler_options"].get("xla_dump_to", ""))
    if dump.parent != place:
        return {}
    try:
        sizes = assigned_by_kind(dump, request["platform"])
    except CompileError as error:
        warnings.warn(f"{error} Its figures are those of the compiler's statistics, which can be others.", stacklevel=1)
        return {}
    return {"temp_bytes": sizes.get("temporary", 0), "assigned_bytes": sum(sizes.values())}


def _lower(request: dict[str, Any], place: pathlib.Path) -> tuple[Any, list[int]]:
    """The lowered program, and which of the exported arguments it keeps."""
    import jax
    import jax.export

    from jaxmem_callbacks._compat.exported import callable_here

    exported = callable_here(jax.export.deserialize(bytearray((place / "program.bin").read_bytes())))
    devices = _devices(request)
    shardings = [_sharding(text, devices, request["device_count"]) for text in request["shardings"]]
    kept = list(exported.module_kept_var_idx)
    avals = exported.in_avals

    # Arguments that JAX would drop in a direct compile are dropped here too, else they would count as memory.
    def step(*arguments: Any) -> Any:
        given = dict(zip(kept, arguments, strict=True))
        fill = [given[i] if i in given else _empty(aval) for i, aval in enumerate(avals)]
        return exported.call(*fill)

    step.__name__ = request["name"]
    donated = tuple(kept.index(i) for i in request["donated"] if i in kept)
    out = request["out_shardings"]
    options: dict[str, Any] = (
        {} if out is None else {"out_shardings": [_sharding(text, devices, request["device_count"]) for text in out]}
    )
    structs = [jax.ShapeDtypeStruct(avals[i].shape, avals[i].dtype, sharding=shardings[i]) for i in kept]
    return jax.jit(step, donate_argnums=donated, **options).lower(*structs), kept


def _empty(aval: Any) -> Any:
    """A value for an argument that the program never reads; it leaves no trace in the compiled program."""
    import jax
    import jax.numpy as jnp

    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        key = jax.random.key(0, impl=_KEY_KINDS[str(aval.dtype)])
        return jnp.broadcast_to(key, aval.shape)
    return jnp.zeros(aval.shape, aval.dtype)


def _devices(request: dict[str, Any]) -> list[Any]:
    """The devices of the topology, as the target's compiler knows them."""
    import jax
    from jax.experimental import topologies

    if request["platform"] == "cpu":
        return jax.devices("cpu")
    options = dict(request["topology_options"])
    if request["target_config"]:
        options["target_config"] = request["target_config"]
    name = {"topology_name": request["topology"]} if request["platform"] == "tpu" else {"topology_name": ""}
    if request["platform"] == "cuda":
        options["topology"] = request["topology"]
    return list(topologies.get_topology_desc(platform=request["platform"], **name, **options).devices)


def _sharding(text: dict[str, Any] | None, devices: list[Any], device_count: int) -> Any:
    """A sharding over the topology's devices. Axes are Auto: the program was partitioned by its own annotations already."""
    import jax
    import numpy as np

    kind = text["memory_kind"] if text else None
    if text is None and device_count > 1:
        return None
    if text is None or not text["axes"]:
        return jax.sharding.SingleDeviceSharding(devices[0], memory_kind=kind)
    names, sizes = zip(*text["axes"], strict=True)
    array = np.array(devices[: math.prod(sizes)]).reshape(sizes)
    mesh = jax.sharding.Mesh(array, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
    spec = jax.sharding.PartitionSpec(*(tuple(part) if isinstance(part, list) else part for part in text["spec"]))
    return jax.sharding.NamedSharding(mesh, spec, memory_kind=kind)


def _end_with_caller(folder: str) -> None:
    """Wait until the caller is gone, killed perhaps, with nobody left to end this compile or to remove its files."""
    while os.read(0, 1):  # not sys.stdin, whose lock a thread may not hold when the interpreter ends
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # which a scheduler sends to every process: the caller decides
        signal.signal(number, signal.SIG_IGN)
    if "--with-caller" in sys.argv[2:]:
        threading.Thread(target=_end_with_caller, args=(sys.argv[1],), daemon=True).start()
    main(sys.argv[1])
