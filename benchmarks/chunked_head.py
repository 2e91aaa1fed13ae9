"""A vocabulary's head in chunks, by the library and by hand: bytes by the compiler, FLOPs by count.

Writes results/chunked_head_jax_<version>.json.

    python -m benchmarks.chunked_head [--targets h100_sxm v5e cpu]

One step of Adam of a transformer of two layers with 100,000 words, on one row of 4,096 tokens. By hand the table is cast to
bfloat16 in front of the loop, as most write it, so that its gradient adds up over the chunks in bfloat16; or inside, so that it
adds up in float32, as the library's does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem_callbacks as jm
from benchmarks.sources import write_result
from jaxmem_callbacks.programs.targets.compile import compile_for_target
from jaxmem_callbacks.records.errors import TargetError
from jaxmem_callbacks.transforms.costs import jaxpr_flops

LAYERS, WIDTH, WORDS, LENGTH, HEADS, CHUNKS = 2, 512, 100_000, 4096, 8, 16
bf16 = jnp.bfloat16


def layer(x: Any, p: Any) -> Any:
    """A block with attention and a gated MLP, in bfloat16."""

    def norm(x: Any, gain: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * gain).astype(bf16)

    h = norm(x, p["norm_1"])
    q, k, v = (each.reshape(*each.shape[:2], HEADS, -1) for each in jnp.split(h @ p["qkv"].astype(bf16), 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9), -1).astype(bf16)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["out"].astype(bf16)
    h = norm(x, p["norm_2"])
    return x + (jax.nn.silu(h @ p["gate"].astype(bf16)) * (h @ p["up"].astype(bf16))) @ p["down"].astype(bf16)


def body(params: Any, tokens: Any) -> Any:
    """All but the head."""
    x = params["words"].astype(bf16)[tokens]
    for each in params["layers"]:
        x = layer(x, each)
    return x


def plain(params: Any, tokens: Any) -> Any:
    """The loss as one writes it."""
    logits = (body(params, tokens) @ params["words"].astype(bf16).T).astype(jnp.float32)[:, :-1]
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


def by_hand(params: Any, tokens: Any, *, adds_up_in: Any = bf16) -> Any:
    """The same with its head in chunks."""
    x, y = body(params, tokens)[:, :-1], tokens[:, 1:]
    x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1)
    count, missing = len(y), -len(y) % CHUNKS
    x, y, counts = jnp.pad(x, ((0, missing), (0, 0))), jnp.pad(y, (0, missing)), jnp.arange(count + missing) < count
    table = params["words"].astype(adds_up_in)

    @jax.checkpoint
    def one(total: Any, part: Any) -> Any:
        x, y, counts = part
        logits = (x @ table.astype(bf16).T).astype(jnp.float32)
        losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, y[:, None], -1)[:, 0]
        return total + jnp.where(counts, losses, 0).sum(), None

    parts = tuple(each.reshape(CHUNKS, -1, *each.shape[1:]) for each in (x, y, counts))
    return jax.lax.scan(one, jnp.float32(0), parts)[0] / count


def by_hand_in_float32(params: Any, tokens: Any) -> Any:
    """The same with a gradient of the words that adds up in float32."""
    return by_hand(params, tokens, adds_up_in=jnp.float32)


def train_step(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A step of Adam."""

    def step(params: Any, m: Any, v: Any, tokens: Any) -> Any:
        value, gradients = jm.value_and_grad(loss)(params, tokens)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, gradients)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, v, gradients)
        params = jax.tree.map(lambda p, m, v: p - 1e-3 * m * jax.lax.rsqrt(v + 1e-8), params, m, v)
        return params, m, v, value

    return step


def arguments() -> tuple[Any, ...]:
    """Shapes of the parameters, Adam's moments and the tokens."""

    def shape(*dims: int) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    sizes = {
        "norm_1": (WIDTH,), "norm_2": (WIDTH,), "qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH),
        "gate": (WIDTH, 4 * WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH),
    }  # fmt: skip
    layers = [{name: shape(*dims) for name, dims in sizes.items()} for _ in range(LAYERS)]
    params = {"words": shape(WORDS, WIDTH), "layers": layers}
    return params, params, params, jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)


# Row -> loss, chunks and what the row is compared with.
ROWS: dict[str, tuple[Callable[..., Any], int]] = {
    "plain": (plain, 1),
    "by hand": (by_hand, 1),
    "by hand, float32": (by_hand_in_float32, 1),
    "chunks": (plain, CHUNKS),
}


def measure(name: str, remat: str, target: str) -> dict[str, Any]:
    """Bytes and FLOPs of one row."""
    loss, chunks = ROWS[name]
    step = jm.apply_policy(train_step(loss), jm.StepPolicy(remat=remat, chunks=chunks))
    args = arguments()
    compiled = compile_for_target(step, args, target=target, donate_argnums=(0, 1, 2), keep_hlo=False)
    found = compiled.memory.step_bytes if compiled.memory is not None else compiled.needed_bytes
    return {
        "target": target, "remat": remat, "head": name, "step_bytes": found,
        "flops": jaxpr_flops(jax.make_jaxpr(step)(*args)),
    }  # fmt: skip


def main() -> None:
    """Measure every row on every target and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["h100_sxm", "v5e", "cpu"])
    targets: list[str] = parser.parse_args().targets
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for target in targets:
        for remat in ("none", "full"):
            try:
                found = {name: measure(name, remat, target) for name in ROWS}
            except TargetError as error:
                missing[target] = str(error)
                break
            for hand in ("by hand", "by hand, float32"):
                ratios = {key: round(found["chunks"][key] / found[hand][key], 4) for key in ("step_bytes", "flops")}
                found["chunks"][f"over {hand}"] = ratios
                print(f"{target:9s} {remat:5s} chunks over {hand}: {ratios}", flush=True)
            rows += found.values()
    write_result("chunked_head", options="--targets " + " ".join(targets), not_measured=missing, rows=rows)


if __name__ == "__main__":
    main()
