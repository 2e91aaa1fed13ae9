"""Plans of a GPT-3-sized scanned step for pods that are not there. Writes results/plan_scale_jax_<version>.json.

    python -m benchmarks.plan_scale [--targets h100_sxm:64 h100_sxm:1024 v5p:4x4x4 v5p:8x8x16]

96 layers of width 12,288 as one scan, bfloat16 activations, float32 parameters and Adam, a batch of one row of 2,048 tokens a
device. Each target twice: with all that is usable as the budget, the answer alone, and without a budget, which is the frontier
too. Seconds, and the most resident memory of this process and its compilers at one moment; the cache of compiles is not used.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp
import optax
import psutil

import jaxmem_callbacks as jm
from benchmarks.sources import RESULTS, source_hash
from jaxmem_callbacks.programs.targets.target import resolve_target

TARGETS = ("h100_sxm:64", "v5p:4x4x4", "h100_sxm:1024", "v5p:8x8x16")
BUDGETS = (1.0, None)
LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 96, 12_288, 96, 2_048, 50_304
OPTIMIZER = optax.adamw(1e-4)


def parameters() -> Any:
    """Shapes of all parameters, about 174 billion of them."""
    layer = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    layer |= {"norm_1": (WIDTH,), "norm_2": (WIDTH,)}
    stacked = {name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32) for name, shape in layer.items()}
    return {
        "embed": jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32),
        "position": jax.ShapeDtypeStruct((LENGTH, WIDTH), jnp.float32),
        "layers": stacked,
    }


def normed(x: Any, scale: Any) -> Any:
    """RMS norm in float32."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def block(x: Any, layer: Any) -> tuple[Any, None]:
    """x[B, L, D] -> [B, L, D]: attention and MLP, both with a norm before them."""
    batch, length, width = x.shape
    q, k, v = jnp.split(normed(x, layer["norm_1"]) @ layer["qkv"].astype(x.dtype), 3, axis=-1)
    q, k, v = (part.reshape(batch, length, HEADS, width // HEADS) for part in (q, k, v))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, length, width)
    x = x + attended @ layer["out"].astype(x.dtype)
    hidden = jax.nn.gelu(normed(x, layer["norm_2"]) @ layer["up"].astype(x.dtype))
    return x + hidden @ layer["down"].astype(x.dtype), None


def loss_fn(params: Any, tokens: Any) -> Any:
    """Mean cross entropy of the next token."""
    x = (params["embed"][tokens[:, :-1]] + params["position"]).astype(jnp.bfloat16)
    x, _ = jax.lax.scan(block, x, params["layers"])
    logits = (x @ params["embed"].T.astype(x.dtype)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(params: Any, opt_state: Any, tokens: Any) -> Any:
    """One AdamW step."""
    loss, grads = jm.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def resident_bytes() -> int:
    """Resident memory of this process and all that it started; what they share is counted in each."""
    own, found = psutil.Process(), 0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it ended
            found += process.memory_info().rss
    return found


@contextmanager
def most_resident() -> Generator[list[int]]:
    """Looks five times a second; the list holds the most seen so far."""
    most, done = [resident_bytes()], threading.Event()

    def look() -> None:
        while not done.wait(0.2):
            most[0] = max(most[0], resident_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def measure(target: str, budget: float | None) -> dict[str, Any]:
    """One plan, with nothing cached."""
    devices = resolve_target(target).device_count
    params = parameters()
    tokens = jax.ShapeDtypeStruct((devices, LENGTH + 1), jnp.int32)
    begun = time.perf_counter()
    with most_resident() as most, tempfile.TemporaryDirectory() as folder:
        os.environ["JAXMEM_CACHE_DIR"] = folder
        arguments = params, jax.eval_shape(OPTIMIZER.init, params), tokens
        plan = jm.plan(train_step, *arguments, target=target, budget=budget, progress=True)
    print(plan, flush=True)
    chosen = plan.chosen
    return {
        "target": target,
        "budget": budget,
        "sources": source_hash("plan_scale"),
        "devices": devices,
        "seconds": round(time.perf_counter() - begun, 1),
        "compiles": plan.compiles,
        "frontier": len(plan.frontier),
        "largest_resident_bytes": most[0],
        "chosen": {"sharding": chosen.policy.sharding, "remat": chosen.policy.remat, "keep": chosen.policy.keep},
        "step_bytes": chosen.step_bytes,
        "budget_bytes": plan.record.budget_bytes,
        "fits": chosen.fits,
        "extra_flops_share": round(chosen.extra_flops / min(each.flops for each in plan.candidates), 4),
    }


def main() -> None:
    """Plan for every target and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    targets: list[str] = parser.parse_args().targets
    place = RESULTS / f"plan_scale_jax_{jax.__version__}.json"
    known = json.loads(place.read_text())["rows"] if place.exists() else []
    rows = {(row["target"], row.get("budget", 1.0)): row for row in known}
    for target, budget in itertools.product(targets, BUDGETS):
        rows[target, budget] = measure(target, budget)
        result = {
            "command": "python -m benchmarks.plan_scale",
            "versions": {"jax": jax.__version__, "python": platform.python_version()},
            "cpus": os.cpu_count(),
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(parameters())),
            "rows": [rows[key] for key in itertools.product(TARGETS, BUDGETS) if key in rows],
        }
        place.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        print(json.dumps(rows[target, budget]), flush=True)


if __name__ == "__main__":
    main()
