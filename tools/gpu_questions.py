"""The questions of `make gpu-check`: one is asked in each process, by name, and answers with one line of JSON.

Arguments are a question's name and whether this is the small preflight on CPU. The answer is a line `ANSWER {...}` on stdout;
figures that the platform does not report are null. Imports JAX, and the library only where the question is about it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

MIB, GIB = 2**20, 2**30
TEXT = 6000  # characters of an error text that are kept


def device() -> Any:
    """The device that is asked about."""
    return jax.local_devices()[0]


def stats() -> dict[str, int] | str | None:
    """The allocator's statistics, as they come."""
    try:
        return device().memory_stats()
    except jax.errors.JaxRuntimeError as error:
        return f"{type(error).__name__}: {error}"[:TEXT]


def value(counters: Any, key: str) -> int | None:
    """One figure of the counters; null where there are none."""
    return counters.get(key) if isinstance(counters, dict) else None


def error_of(call: Callable[[], Any]) -> dict[str, str] | None:
    """Type and text of what ``call`` raises, asynchronous errors included; null when it succeeds."""
    try:
        jax.block_until_ready(call())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return {"type": type(error).__name__, "text": str(error)[:TEXT]}
    return None


def presence(*, small: bool) -> dict[str, Any]:
    """What is attached, and with which versions."""
    del small
    here = device()
    return {
        "jax": jax.__version__,
        "packages": {entry.name: entry.version for entry in metadata.distributions() if entry.name.startswith("jax")},
        "python": sys.version.split()[0],
        "platform": here.platform,
        "device_kind": here.device_kind,
        "devices": jax.local_device_count(),
        "platform_version": here.client.platform_version,
    }


def statistics_of_allocator(*, small: bool) -> dict[str, Any]:
    """The keys and values of ``memory_stats()`` at rest, with 256 MiB held, and after a program with temporaries."""
    at_rest = stats()
    held = jax.block_until_ready(jnp.ones((1 if small else 256, MIB // 4), jnp.float32))
    holding = stats()
    jax.block_until_ready(jax.jit(lambda x: jnp.sort(x, axis=1).sum())(held))
    after = stats()
    start = time.perf_counter()
    for _ in range(100):
        stats()
    each = (time.perf_counter() - start) / 100
    block = value(after, "largest_free_block_bytes")
    return {
        "at_rest": at_rest,
        "holding_256_mib": holding,
        "after_a_program": after,
        "keys": sorted(after) if isinstance(after, dict) else None,
        "largest_free_block_is_filled": None if block is None else block > 0,
        "call_us": round(each * 1e6, 2),
        "our_reading": our_reading(),
    }


def our_reading() -> list[dict[str, Any]]:
    """What the library's own probe makes of the same statistics."""
    from jaxmem_callbacks.probes.device_memory import AllocatorProbe

    return [dataclasses.asdict(entry) for entry in AllocatorProbe().read(0)]


def impossible_bytes() -> int:
    """More than any device here can hold."""
    limit = value(stats(), "bytes_limit") or 0
    return max(2**47 if device().platform == "cpu" else 2**42, 4 * limit)


def out_of_memory(*, small: bool) -> dict[str, Any]:
    """Whether donated inputs survive a program whose temporaries, or outputs, cannot be allocated, and the real texts."""
    rows = impossible_bytes() // (4 * 2**20)
    dumps = Path(tempfile.mkdtemp())
    os.environ["TF_BFC_MEMORY_DUMP"] = str(dumps / "dump")  # read by the allocator when it gives up

    def temporaries(state: Any, x: jax.Array) -> Any:
        tall = jnp.broadcast_to(x, (rows, 2**20)) * jnp.arange(rows, dtype=jnp.float32)[:, None]
        turns = x[0].astype(jnp.int32) + 1  # known at run time only, so that the loop and what it carries stay
        carried = jax.lax.fori_loop(0, turns, lambda i, t: t * 1.5 + i, tall)
        return jax.tree.map(lambda leaf: leaf + carried.sum() * 0 + 1, state)

    def outputs(state: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: leaf + 1, state), jnp.broadcast_to(x, (rows, 2**20)) + 1

    answer: dict[str, Any] = {"asked_bytes": rows * 2**22}
    for name, program in (("temporaries", temporaries), ("outputs", outputs)):
        answer[name] = donated_through(program, 1 if small else 64)
    answer["plain_allocation"] = error_of(lambda: jnp.zeros((rows, 2**20), jnp.float32))
    answer["statistics_afterwards"] = stats()
    answer["memory_dump_bytes"] = [path.stat().st_size for path in dumps.iterdir()]
    return answer


def donated_through(program: Callable[..., Any], mebibytes: int) -> dict[str, Any]:
    """Run a program that runs out of memory with a donated state; what becomes of the state."""
    state = {"a": jnp.ones((mebibytes, MIB // 4)), "b": jnp.ones((10,))}
    x = jnp.ones((2**20,), jnp.float32)
    jax.block_until_ready((state, x))
    compiled: list[Any] = []
    failed = error_of(lambda: compiled.append(jax.jit(program, donate_argnums=0).lower(state, x).compile()))
    if failed:
        return {"compile_error": failed}
    failed = error_of(lambda: compiled[0](state, x))
    deleted = {name: leaf.is_deleted() for name, leaf in state.items()}
    analysis = compiled[0].memory_analysis()
    return {
        "run_error": failed,
        "donated_inputs_deleted": deleted,
        "donated_inputs_intact": {name: intact(leaf) for name, leaf in state.items()},
        "alias_bytes": analysis.alias_size_in_bytes,
        "temp_bytes": analysis.temp_size_in_bytes,
    }


def intact(ones: jax.Array) -> bool | str:
    """Whether an array of ones still is one, or what reading it raises."""
    found: list[bool] = []
    failed = error_of(lambda: found.append(bool((ones == 1).all())))
    return found[0] if failed is None else f"{failed['type']}: {failed['text']}"


def prediction(*, small: bool) -> dict[str, Any]:
    """The compiled need of a donated, scanned training step against the peak that the allocator saw, by JAX alone."""
    layers, width, batch = (4, 64, 32) if small else (24, 4096, 16384)
    limit = value(stats(), "bytes_limit")
    while limit is not None and 16 * layers * width * batch > limit // 2:  # four arrays of four bytes a layer
        batch //= 2
    body = lambda x, w: (jnp.tanh(jax.nn.gelu(x @ w) + x), None)  # noqa: E731 - scanned

    def loss(params: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, x: jax.Array) -> Any:
        value_, grads = jax.value_and_grad(loss)(state["params"], x)
        momentum = 0.9 * state["momentum"] + grads
        return {"params": state["params"] - 0.01 * momentum, "momentum": momentum}, value_

    params = jax.random.normal(jax.random.key(0), (layers, width, width)) / width**0.5
    state, x = {"params": params, "momentum": jnp.zeros_like(params)}, jnp.ones((batch, width))
    del params  # its buffer goes with the donated state
    jax.block_until_ready((state, x))
    compiled = step.lower(state, x).compile()
    before = stats()
    for _ in range(2):
        state, _ = jax.block_until_ready(compiled(state, x))
    after = stats()
    memory = compiled.memory_analysis()
    parts = {name: getattr(memory, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")}
    need = parts["argument"] + parts["output"] - parts["alias"] + parts["temp"]
    peak, earlier = value(after, "peak_bytes_in_use"), value(before, "peak_bytes_in_use")
    return {
        "need_bytes": need,
        "runtime_total_bytes": getattr(memory, "total_allocation_bytes", None),
        **{f"{name}_bytes": count for name, count in parts.items()},
        "in_use_before_bytes": value(before, "bytes_in_use"),
        "peak_before_bytes": earlier,
        "peak_after_bytes": peak,
        "peak_over_need": round(peak / need, 4)
        if peak is not None and earlier is not None and peak > earlier
        else None,
    }


def planned(name: str, *, small: bool) -> dict[str, Any]:
    """What a plan predicts of a step under one policy, and what running it shows."""
    from gpu_plans import plan_against_run

    return plan_against_run(name, small=small)


def simulated(case: str, *, small: bool) -> dict[str, Any]:
    """How far the simulated allocator goes with the real one."""
    from gpu_allocator import simulated_against_device

    return simulated_against_device(case, small=small)


def recorded_runs(*, small: bool) -> dict[str, Any]:
    """The monitor's events of healthy and faulty runs here, and their recordings."""
    from gpu_recordings import record_on

    return record_on(small=small)


def calibrated_step(seconds: float) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """A jitted step of about that many seconds on this device, compiled and warm."""
    w = jnp.eye(1024) * 0.5

    @jax.jit
    def turn(x: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jax.lax.fori_loop(0, count, lambda _, y: jnp.tanh(y @ w), x)
        return x, x.sum()

    def timed(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(turn(w, jnp.int32(count)))
        return time.perf_counter() - start

    timed(1)
    count = 8
    while (took := timed(count)) < 0.05:  # noqa: PLR2004 - seconds, long enough to time
        count *= 2
    return functools.partial(turn, count=jnp.int32(max(1, round(count * seconds / took))))


def loop(step: Callable[..., Any], steps: int, hook: Callable[[int, Any], Any]) -> dict[str, float]:
    """Run a training loop; the host's microseconds in the hook and in the whole step, and the seconds of it all."""
    state = jnp.eye(1024) * 0.5
    hooks, hosts = [], []
    begin = time.perf_counter()
    for i in range(steps):
        start = time.perf_counter()
        state, loss = step(state)
        dispatched = time.perf_counter()
        hook(i, {"loss": loss})
        end = time.perf_counter()
        hooks.append(end - dispatched)
        hosts.append(end - start)
    jax.block_until_ready(state)
    return {
        "steps": steps,
        "hook_median_us": round(statistics.median(hooks) * 1e6, 2),
        "hook_p99_us": round(sorted(hooks)[int(0.99 * (steps - 1))] * 1e6, 2),
        "hook_max_us": round(max(hooks) * 1e6, 2),
        "host_max_ms": round(max(hosts) * 1e3, 3),
        "total_s": round(time.perf_counter() - begin, 4),
    }


def hook(*, small: bool) -> dict[str, Any]:
    """The monitor's cost a step of 5 ms, and whether steps of 200 ms still overlap with the host under it."""
    import jaxmem_callbacks as jm

    quick, slow = calibrated_step(0.005), calibrated_step(0.05 if small else 0.2)
    steps, slow_steps = (60, 4) if small else (800, 12)
    with tempfile.TemporaryDirectory() as logdir:
        bare = loop(quick, steps, lambda *_: None)
        bare_slow = loop(slow, slow_steps, lambda *_: None)
        with jm.MemoryMonitor(logdir=logdir) as monitor:
            watched = loop(quick, steps, monitor)
            serialised = loop(slow, slow_steps, monitor)
            state = jnp.eye(1024)
            before = stats()
            state, loss = slow(state)
            during = stats()
            jax.block_until_ready(loss)
        files = sorted(path.name for path in Path(logdir).rglob("*") if path.is_file())
    return {
        "bare_5_ms": bare,
        "watched_5_ms": watched,
        "bare_slow": bare_slow,
        "watched_slow": serialised,
        "slow_step_ms": 50 if small else 200,
        "overhead_share": round(watched["total_s"] / bare["total_s"] - 1, 5),
        "in_use_before_dispatch_bytes": value(before, "bytes_in_use"),
        "in_use_right_after_dispatch_bytes": value(during, "bytes_in_use"),
        "files": files,
    }


def fragmentation(*, small: bool) -> dict[str, Any]:
    """What is read before, with, and after holes; and the text of an allocation that only the holes prevent."""
    size = (1 if small else 64) * MIB
    limit = value(stats(), "bytes_limit")
    count = 16 if limit is None else int(0.9 * limit) // size
    blocks = [jax.block_until_ready(jnp.full((size // 4,), i, jnp.float32)) for i in range(count)]
    readings = {"full": (stats(), our_reading())}
    for i in range(0, count, 2):
        blocks[i].delete()
    readings["holes"] = (stats(), our_reading())
    free = (limit or 0) - (value(readings["holes"][0], "bytes_in_use") or 0)
    asked = int(free * 0.8)
    failed = error_of(lambda: jnp.zeros((asked // 4,), jnp.float32)) if limit else None
    for block in blocks:
        block.delete()
    readings["empty"] = (stats(), our_reading())
    again = error_of(lambda: jnp.zeros((asked // 4,), jnp.float32)) if limit else None
    answer = {
        name: {"statistics": counters, "share": share(counters), "our_reading": ours}
        for name, (counters, ours) in readings.items()
    }
    return {**answer, "asked_bytes": asked, "error_with_holes": failed, "error_when_empty": again}


def share(counters: Any) -> float | None:
    """XLA's own fragmentation: the part of the pool's free bytes that is outside the largest free block."""
    pool, used, block = (value(counters, key) for key in ("pool_bytes", "bytes_in_use", "largest_free_block_bytes"))
    if not pool or used is None or not block or pool <= used:
        return None
    return round(1 - block / (pool - used), 4)


def defragment(*, small: bool) -> dict[str, Any]:
    """What the client's own defragmentation does with one live array; on plugin wheels the process is expected to abort."""
    x = jax.block_until_ready(jnp.ones((1 if small else 64, MIB // 4)))
    print("calling", flush=True)
    failed = error_of(device().client.defragment)
    return {"error": failed, "array_intact": intact(x)}


def moved_together(*, small: bool) -> dict[str, Any]:
    """What `jm.defragment` makes of a fragmented pool: largest free block, fragmentation, and the speed of its copies."""
    import gpu_moves

    return gpu_moves.moved_together(small=small)


def applied(preset: str, *, small: bool) -> dict[str, Any]:
    """What a preset of the environment sets here, what holds of it, and what the start and an allocation cost under it."""
    import jaxmem_callbacks as jm

    started = time.perf_counter()
    done = jm.apply_environment(preset)
    jax.block_until_ready(jnp.ones((1 if small else 256, MIB // 4)))
    start_s = time.perf_counter() - started
    fill = jax.jit(lambda: jnp.zeros((MIB // 4,)))
    jax.block_until_ready(fill())
    times: list[float] = []
    for _ in range(20 if small else 1000):
        begun = time.perf_counter()
        jax.block_until_ready(fill())
        times.append(time.perf_counter() - begun)
    refused = None
    try:
        done = jm.apply_environment(preset)
    except ValueError as error:
        refused = str(error)
    return {
        "set": dict(done.set),
        "already": dict(done.already),
        "checks": [dataclasses.asdict(check) for check in done.checks],
        "refused": refused,
        "start_and_first_allocation_s": round(start_s, 2),
        "fill_1_mib_us": round(statistics.median(times) * 1e6, 1),
        "statistics": stats(),
    }


QUESTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "presence": presence,
    "statistics": statistics_of_allocator,
    "out_of_memory": out_of_memory,
    "prediction_plain": prediction,
    **{
        name: functools.partial(planned, name)
        for name in ("plan_none", "plan_full", "plan_keep", "plan_chunks", "plan_option", "plan_state")
    },
    "hook": hook,
    "fragmentation": fragmentation,
    **{name: functools.partial(simulated, name) for name in ("losses_in_a_list", "train_and_evaluate")},
    "recorded_runs": recorded_runs,
    "defragment": defragment,
    "moved_together": moved_together,
    **{
        name: functools.partial(applied, name)
        for name in ("gpu_preallocate", "gpu_growth", "gpu_shared", "gpu_async", "gpu_platform_debug")
    },
}

if __name__ == "__main__":
    print("ANSWER " + json.dumps(QUESTIONS[sys.argv[1]](small="--small" in sys.argv[2:])), flush=True)
