"""A training script whose step is another program in each of its contexts; by itself it shows what JAX makes of it there.

``python context_steps.py NAME`` trains in one context. ``python context_steps.py --told NAMES [TARGET]`` prints one JSON object
for each of the contexts: the bytes of the step's temporaries, arguments, outputs and aliases as compiled inside it.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
import jax
import jax.experimental.pjit
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

copies = 1
rows_kept: contextvars.ContextVar[int] = contextvars.ContextVar("rows_kept", default=1)
auto = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)
explicit = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Explicit,))


def loss(table: Any, ids: Any) -> Any:
    times = copies * rows_kept.get()
    hidden = jnp.concatenate([table[ids]] * times).astype(jnp.result_type(float))
    hidden = nn.with_logical_constraint(hidden, ("batch", None))
    for _ in range(3):
        hidden = jnp.tanh(hidden @ table.astype(hidden.dtype).T @ table.astype(hidden.dtype)) + hidden
    noise = jax.random.bernoulli(jax.random.key(0), 0.5, hidden.shape)
    return jnp.where(noise, hidden, 0).mean()


def train_step(table: Any, ids: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(table, ids)
    return table - 0.1 * gradient.astype(table.dtype), value


def explicit_step(table: Any, ids: Any) -> Any:
    def loss(table: Any) -> Any:
        taken = jax.sharding.auto_axes(lambda t, i: t[i], out_sharding=P("rows", None))(table, ids)
        for _ in range(3):
            product = jnp.einsum("nd,vd->nv", taken, table, out_sharding=P("rows", None))
            taken = jnp.tanh(jnp.einsum("nv,vd->nd", product, table, out_sharding=P("rows", None))) + taken
        return jnp.square(taken).mean()

    value, gradient = jax.value_and_grad(loss)(table)
    return table - 0.1 * gradient, value


def plain() -> Any:
    def own_step(table: Any, ids: Any) -> Any:  # JAX would look the trace of another context up
        return train_step(table, ids)

    return jax.jit(own_step, donate_argnums=0)


def by_specs(jit: Any) -> Any:
    def own_step(table: Any, ids: Any) -> Any:
        return train_step(table, ids)

    return jit(own_step, donate_argnums=0, in_shardings=(P(), P("rows")), out_shardings=(P(), P()))


@contextlib.contextmanager
def twice_the_rows() -> Generator[None]:
    global copies  # noqa: PLW0603 - as people's own managers do
    copies = 2
    try:
        yield
    finally:
        copies = 1


@contextlib.contextmanager
def three_kept() -> Generator[None]:
    token = rows_kept.set(3)
    try:
        yield
    finally:
        rows_kept.reset(token)


@contextlib.contextmanager
def setting(name: str, value: Any) -> Generator[None]:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextlib.contextmanager
def rules() -> Generator[None]:
    with jax.set_mesh(auto), nn.logical_axis_rules([("batch", "rows")]):
        yield


Context = Callable[[], AbstractContextManager[Any]]
split, whole = NamedSharding(auto, P("rows")), NamedSharding(auto, P())
# Name -> the context, what makes the step that is called in it, and where its ids are.
CONTEXTS: dict[str, tuple[Context, Callable[[], Any], NamedSharding | None]] = {
    "nothing": (contextlib.nullcontext, plain, None),
    "set_mesh": (lambda: jax.set_mesh(auto), lambda: by_specs(jax.jit), split),
    "old mesh": (lambda: auto, lambda: by_specs(jax.experimental.pjit.pjit), split),
    "explicit mesh": (
        lambda: jax.set_mesh(explicit),
        lambda: jax.jit(explicit_step, donate_argnums=0),
        NamedSharding(explicit, P("rows")),
    ),
    "no rules": (lambda: jax.set_mesh(auto), plain, whole),
    "logical rules": (rules, plain, whole),
    "x64": (lambda: jax.enable_x64(True), plain, None),
    "precision": (lambda: jax.default_matmul_precision("BF16_BF16_F32_X3"), plain, None),
    "ranks": (lambda: jax.numpy_rank_promotion("raise"), plain, None),
    "dtypes": (lambda: jax.numpy_dtype_promotion("strict"), plain, None),
    "nans": (lambda: jax.debug_nans(True), plain, None),
    "a global": (twice_the_rows, plain, None),
    "a context variable": (three_kept, plain, None),
    "a config value": (lambda: setting("jax_default_prng_impl", "unsafe_rbg"), plain, None),
    "leaks": (jax.checking_leaks, plain, None),
    "transfers": (lambda: jax.transfer_guard("disallow"), plain, None),
    "keys": (lambda: jax.debug_key_reuse(True), plain, None),
}


def arguments(place: NamedSharding | None) -> tuple[Any, Any]:
    table, ids = jnp.ones((128, 64)), jnp.zeros(2048, jnp.int32)
    return (table, ids) if place is None else jax.device_put((table, ids), (NamedSharding(place.mesh, P()), place))


def told(name: str, target: str) -> list[int]:
    # One device where the context has no mesh.
    target = "" if not target else target if CONTEXTS[name][2] is None else f"{target}:8"
    context, make, place = CONTEXTS[name]
    step, (table, ids) = make(), arguments(place)
    with context():
        if not target:
            memory: Any = step.lower(table, ids).compile().memory_analysis()
        else:
            from jaxmem_callbacks.programs.targets.compile import compile_for_target

            donated = () if jax.config.jax_debug_nans else (0,)
            memory = compile_for_target(step, (table, ids), target=target, donate_argnums=donated).memory
    if target:
        return [memory.temp_bytes, memory.argument_bytes, memory.output_bytes, memory.alias_bytes]
    sizes = "temp", "argument", "output", "alias"
    return [getattr(memory, f"{size}_size_in_bytes") for size in sizes]


def train(name: str) -> None:
    context, make, place = CONTEXTS[name]
    step, (table, ids) = make(), arguments(place)
    with context():
        for _ in range(2):
            table, value = step(table, ids)
        sys.exit(f"trained to {value}")


if __name__ == "__main__":
    if sys.argv[1] == "--told":
        names, target = (*sys.argv[2:], "")[:2]
        for each in names.split(","):
            sys.stdout.write(f"{json.dumps({each: told(each, target)})}\n")
    elif sys.argv[1] == "thread":
        in_thread = threading.Thread(target=train, args=("x64",))
        in_thread.start()
        in_thread.join()
    else:
        train(sys.argv[1])
