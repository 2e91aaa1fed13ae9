"""The plans of `make gpu-check`: a policy is planned for this GPU and without it, then really run, in a process of its own.

Enters: a policy and whether this is the small preflight on CPU. Leaves: what was foretold (bytes by the attached compiler and by
the nearest target's, modelled time), and what was seen (the allocator's peak, seconds a step); null where that is not reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.compiles import Compiler
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.request import budget_for
from jaxmem_callbacks.programs.targets.target import nearest_target, resolve_target
from jaxmem_callbacks.records.errors import JaxmemError
from jaxmem_callbacks.records.plans import Candidate

POLICIES = {
    "plan_none": jm.StepPolicy(),
    "plan_full": jm.StepPolicy(remat="full"),
    "plan_keep": jm.StepPolicy(remat="full", keep=0.5),
}
_WARM, _TIMED = 2, 7


def layers_loss(weights: jax.Array, x: jax.Array) -> jax.Array:
    """A scan over layers; weights[L, D, D], x[B, D]."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(jax.nn.gelu(x @ w) + x), None

    return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)


def train_step(state: Any, x: jax.Array) -> Any:
    """Momentum, by the library's own gradient; the state is donated by `jm.jit_step`."""
    loss, grads = jm.value_and_grad(layers_loss)(state["weights"], x)
    momentum = 0.9 * state["momentum"] + grads
    return {"weights": state["weights"] - 0.01 * momentum, "momentum": momentum}, loss


def plan_against_run(policy: jm.StepPolicy, *, small: bool) -> dict[str, Any]:
    """Foretell, run, and say both."""
    device = jax.local_devices()[0]
    layers, width, batch = (4, 64, 256) if small else (24, 4096, 16384)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    while limit is not None and 20 * layers * width * batch > limit // 2:  # five arrays of four bytes a layer
        batch //= 2
    weights = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
    shapes = {"weights": weights, "momentum": weights}, jax.ShapeDtypeStruct((batch, width), jnp.float32)
    near = nearest_target(device.platform, device.device_kind)
    foretold = {"attached": foretell(policy, shapes, None)}
    if near is not None:
        foretold["without_the_device"] = foretell(policy, shapes, near)
    return {
        "policy": {"remat": policy.remat, "keep": policy.keep},
        "nearest_target": near,
        "shapes": {"layers": layers, "width": width, "rows": batch},
        "foretold": foretold,
        "seen": run(policy, shapes, device),
    }


def foretell(policy: jm.StepPolicy, shapes: tuple[Any, ...], target: str | None) -> dict[str, Any]:
    """What a plan says of one policy; the error where it cannot."""
    try:
        hardware = None if target is None else resolve_target(target)
        problem = Problem(
            train_step=train_step, args=shapes, kwargs={}, target=hardware, budget=budget_for(None, hardware)
        )
        found: Candidate = Compiler(problem).lowered(policy)()
    except (JaxmemError, ImportError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    names = ("step_bytes", "argument_bytes", "temp_bytes", "extra_flops", "flops", "compiler_remat", "modelled_s")
    return {name: getattr(found, name) for name in names}


def run(policy: jm.StepPolicy, shapes: tuple[Any, ...], device: Any) -> dict[str, Any]:
    """The step itself, a few times; the peak is the process's own since it began, so nothing larger may come before."""
    step = jm.jit_step(train_step, policy)
    fill: Callable[[jax.ShapeDtypeStruct], jax.Array] = lambda leaf: jnp.full(leaf.shape, 0.01, leaf.dtype)  # noqa: E731
    state, x = jax.block_until_ready(jax.tree.map(fill, shapes))
    before = device.memory_stats() or {}
    seconds: list[float] = []
    for _ in range(_WARM + _TIMED):
        start = time.perf_counter()
        state, loss = jax.block_until_ready(step(state, x))
        seconds.append(time.perf_counter() - start)
    after = device.memory_stats() or {}
    return {
        "peak_bytes": after.get("peak_bytes_in_use"),
        "peak_before_bytes": before.get("peak_bytes_in_use"),
        "in_use_before_bytes": before.get("bytes_in_use"),
        "step_s": statistics.median(seconds[_WARM:]),
        "loss_is_finite": bool(jnp.isfinite(loss)),
    }
