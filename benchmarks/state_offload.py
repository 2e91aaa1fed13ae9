"""The optimizer's state on the host: what a step's peak falls by, of the bytes that are moved.

Writes results/state_offload_jax_<version>.json.

    python -m benchmarks.state_offload [--targets h100_sxm v5e cpu]

One step of Adam of chains of square layers and of a transformer whose layers are written out, batches small: the state is most of
what the step needs. On a TPU also under the options that plans try: its scheduler that hides latency brings all of it at once.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmem_callbacks as jm
from benchmarks import chunked_head
from benchmarks.sources import write_result
from jaxmem_callbacks.planning.state_candidates import OPTIONS
from jaxmem_callbacks.planning.step_time import host_bytes
from jaxmem_callbacks.records.errors import TargetError

CHAINS = {"64 layers of 1,024": (64, 1024), "32 layers of 2,048": (32, 2048), "8 layers of 4,096": (8, 4096)}
TRANSFORMER = "transformer of 12 layers"
ADAM = optax.adam(1e-3)


def chain(params: Any, x: Any) -> Any:
    """A loss of square layers."""
    for weight in params.values():
        x = jnp.tanh(x @ weight)
    return jnp.square(x).mean()


def shape(*dims: int) -> Any:
    """A float32 array of some dimensions."""
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def model(name: str) -> tuple[Any, Any, Any]:
    """A loss, its parameters and its batch, as shapes."""
    if name in CHAINS:
        layers, width = CHAINS[name]
        return chain, {f"w{i}": shape(width, width) for i in range(layers)}, shape(64, width)
    params, _, _, _ = chunked_head.arguments()
    params = {"words": shape(2_048, chunked_head.WIDTH), "layers": params["layers"][:1] * 12}
    return chunked_head.plain, params, jax.ShapeDtypeStruct((1, 256), jnp.int32)


def measure(name: str, target: str, options: dict[str, Any] | None) -> dict[str, Any]:
    """Bytes with the state on the device and on the host."""
    loss, params, batch = model(name)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, gradients = jm.value_and_grad(loss)(params, batch)
        updates, opt_state = ADAM.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    args = params, jax.eval_shape(ADAM.init, params), batch
    plain = jm.step_memory(jm.jit_step(step), *args, target=target).step_bytes
    moving = jm.jit_step(step, jm.StepPolicy(state_offload="optimizer", compiler_options=options))
    placed = jm.place_state(moving, *args)
    less = plain - jm.step_memory(moving, *placed, target=target).step_bytes
    passed = host_bytes(moving.traced(placed, {}).jaxpr)
    return {
        "target": target, "model": name, "options": options or {}, "step_bytes": plain,
        "on_host_bytes": passed // 2, "passed_bytes": passed, "less_bytes": less, "share": round(2 * less / passed, 4),
    }  # fmt: skip


def main() -> None:
    """Measure every model on every target and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["h100_sxm", "v5e", "cpu"])
    targets: list[str] = parser.parse_args().targets
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    line = ".".join(jax.__version__.split(".")[:2])
    for target in targets:
        known = OPTIONS.get("tpu" if target.startswith("v") else target, ())
        tried = [None, *({"platform": "tpu", "jax": line, **each} for each in known)]
        try:
            for name in (*CHAINS, TRANSFORMER):
                for options in tried:
                    rows.append(measure(name, target, options))
                    print(rows[-1], flush=True)
        except TargetError as error:
            missing[target] = str(error)
    write_result("state_offload", options="--targets " + " ".join(targets), not_measured=missing, rows=rows)


if __name__ == "__main__":
    main()
