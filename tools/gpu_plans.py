"""The plans of `make gpu-check`: a policy is planned for this GPU and without it, then really run, in a process of its own.

A case's answer is what was predicted (bytes by the attached compiler and by the nearest target's, modelled time) and what was
measured (the allocator's peak, seconds a step); null where that is not reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.compiles import Compiler
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.request import budget_for
from jaxmem_callbacks.planning.state_candidates import on_host
from jaxmem_callbacks.programs.targets.target import nearest_target, resolve_target
from jaxmem_callbacks.records.errors import JaxmemError
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.policies import jax_line, platform_word

_WARM, _TIMED = 2, 7
Shapes = tuple[Any, ...]
# Platform -> an option of its compiler that moves bytes.
_OPTIONS = {
    "gpu": {"xla_gpu_memory_limit_slop_factor": 1},
    "cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"},
}


def _floats(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


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


def layers_shapes(limit: int | None, *, small: bool) -> Shapes:
    """Those of `train_step`."""
    layers, width, batch = (4, 64, 256) if small else (24, 4096, 16384)
    while limit is not None and 20 * layers * width * batch > limit // 2:  # five arrays of four bytes a layer
        batch //= 2
    weights = _floats(layers, width, width)
    return {"weights": weights, "momentum": weights}, _floats(batch, width)


def head_loss(params: Any, tokens: jax.Array) -> jax.Array:
    """The loss of the next word, its head most of what it holds; params' words[V, D] and mix[D, D], tokens[1, T]."""
    x = params["words"][tokens]
    x = x + jnp.tanh(jnp.cumsum(x @ params["mix"], 1) * 0.01)
    logp = jax.nn.log_softmax(x @ params["words"].T)
    return -jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], -1).mean()


def head_step(params: Any, tokens: jax.Array) -> Any:
    """Plain descent of `head_loss`."""
    loss, grads = jm.value_and_grad(head_loss)(params, tokens)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss


def head_shapes(limit: int | None, *, small: bool) -> Shapes:
    """Those of `head_step`."""
    words, width, length = (8192, 32, 256) if small else (131072, 1024, 8192)
    while limit is not None and 16 * words * length > limit // 2:  # four arrays of logits
        length //= 2
    return {"words": _floats(words, width), "mix": _floats(width, width)}, jax.ShapeDtypeStruct((1, length), jnp.int32)


def chain_loss(params: Any, x: jax.Array) -> jax.Array:
    """Layers written out; each of params[D, D], x[B, D]."""
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.square(x).mean()


def adam_step(params: Any, moments: Any, x: jax.Array) -> Any:
    """Adam's two moments of each weight, in arguments of their own."""
    loss, grads = jm.value_and_grad(chain_loss)(params, x)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments["mean"], grads)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, moments["square"], grads)
    params = jax.tree.map(lambda p, m, s: p - 1e-3 * m * jax.lax.rsqrt(s + 1e-8), params, mean, square)
    return params, {"mean": mean, "square": square}, loss


def adam_shapes(limit: int | None, *, small: bool) -> Shapes:
    """Those of `adam_step`."""
    layers, width = (8, 64) if small else (48, 4096)
    while limit is not None and 16 * layers * width * width > limit // 2:  # weights, gradients and moments
        layers //= 2
    params = {f"w{index}": _floats(width, width) for index in range(layers)}
    return params, {"mean": params, "square": params}, _floats(64, width)


def rows_shapes(limit: int | None, *, small: bool) -> Shapes:
    """Those of `adam_step` with so many rows that what its layers make is most of what it needs."""
    layers, width, rows = (8, 64, 1024) if small else (24, 1024, 65536)
    while limit is not None and 12 * layers * width * rows > limit // 2:  # three arrays of four bytes a layer
        rows //= 2
    params = {f"w{index}": _floats(width, width) for index in range(layers)}
    return params, {"mean": params, "square": params}, _floats(rows, width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A step, its arguments' shapes by the limit of the device, and its policy."""

    step: Callable[..., Any]
    shapes: Callable[..., Shapes]
    policy: jm.StepPolicy

    @property
    def words(self) -> dict[str, Any]:
        """What of the policy is no default, for the result."""
        policy, default = self.policy, jm.StepPolicy()
        names = ("remat", "keep", "chunks", "state_offload")
        set_here = {name: getattr(policy, name) for name in names if getattr(policy, name) != getattr(default, name)}
        return set_here | ({} if policy.options is None else {"compiler_options": dict(policy.options.by_name)})


def case_of(name: str) -> Case:
    """The case of a question.

    Args:
        name: ``plan_none``, ``plan_full`` and ``plan_keep`` differ in remat. ``plan_chunks`` has its head in chunks,
            ``plan_option`` an option of the compiler, and ``plan_state`` its moments in host memory.
    """
    if name == "plan_chunks":
        return Case(step=head_step, shapes=head_shapes, policy=jm.StepPolicy(chunks=16))
    if name == "plan_state":
        return Case(step=adam_step, shapes=adam_shapes, policy=jm.StepPolicy(state_offload="optimizer"))
    if name == "plan_option":
        platform = platform_word(jax.local_devices()[0].platform)
        options = {"platform": platform, "jax": jax_line(jax.__version__), **_OPTIONS[platform]}
        return Case(step=adam_step, shapes=rows_shapes, policy=jm.StepPolicy(compiler_options=options))
    policies = {
        "plan_none": jm.StepPolicy(),
        "plan_full": jm.StepPolicy(remat="full"),
        "plan_keep": jm.StepPolicy(remat="full", keep=0.5),
    }
    return Case(step=train_step, shapes=layers_shapes, policy=policies[name])


def plan_against_run(name: str, *, small: bool) -> dict[str, Any]:
    """What is predicted of one case, and what its run shows."""
    case, device = case_of(name), jax.local_devices()[0]
    shapes = case.shapes((device.memory_stats() or {}).get("bytes_limit"), small=small)
    near = nearest_target(device.platform, device.device_kind)
    predicted = {"attached": predict(case, shapes, None)}
    if near is not None:
        predicted["without_the_device"] = predict(case, shapes, near)
    return {
        "policy": case.words,
        "nearest_target": near,
        "shapes": [f"{leaf.dtype}{list(leaf.shape)}" for leaf in dict.fromkeys(jax.tree.leaves(shapes))],
        "predicted": predicted,
        "seen": run(case, shapes, device),
    }


def predict(case: Case, shapes: Shapes, target: str | None) -> dict[str, Any]:
    """What a plan knows of one policy; the error where it cannot."""
    try:
        hardware = None if target is None else resolve_target(target)
        problem = Problem(
            train_step=case.step, args=shapes, kwargs={}, target=hardware, budget=budget_for(None, hardware)
        )
        if case.policy.state_offload is not None:
            problem = on_host(problem)
        found: Candidate = Compiler(problem).lowered(case.policy)()
    except (JaxmemError, ImportError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    names = ("step_bytes", "argument_bytes", "temp_bytes", "extra_flops", "flops", "compiler_remat", "modelled_s")
    return {name: getattr(found, name) for name in names}


def run(case: Case, shapes: Shapes, device: Any) -> dict[str, Any]:
    """The step itself, a few times; the peak is the process's own since it began, so nothing larger may come before."""
    step = jm.jit_step(case.step, case.policy)
    fill: Callable[[jax.ShapeDtypeStruct], jax.Array] = lambda leaf: jnp.full(leaf.shape, 0.01, leaf.dtype)  # noqa: E731
    if case.policy.state_offload is None:
        args = jax.tree.map(fill, shapes)
    else:  # an array at a time: all of them on the device would be the peak
        places = jm.place_state(step, *shapes)
        args = jax.tree.map(lambda leaf: jax.device_put(fill(leaf), leaf.sharding or device), places)
    *state, x = jax.block_until_ready(args)
    before = device.memory_stats() or {}
    seconds: list[float] = []
    for _ in range(_WARM + _TIMED):
        start = time.perf_counter()
        *state, loss = jax.block_until_ready(step(*state, x))
        seconds.append(time.perf_counter() - start)
    after = device.memory_stats() or {}
    return {
        "peak_bytes": after.get("peak_bytes_in_use"),
        "peak_before_bytes": before.get("peak_bytes_in_use"),
        "in_use_before_bytes": before.get("bytes_in_use"),
        "step_s": statistics.median(seconds[_WARM:]),
        "loss_is_finite": bool(jnp.isfinite(loss)),
    }
