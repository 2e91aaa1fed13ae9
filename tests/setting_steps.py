"""Steps of divided arguments under settings of JAX. Run as a program it compiles them for eight H100 by JAX alone.

python tests/setting_steps.py FOLDER_OF_COMPILERS
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Generator, Iterator
from typing import Any

if __name__ == "__main__":
    sys.path.append(sys.argv[1])  # JAX looks for compilers when it starts

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmem_callbacks.programs.targets.compilers import options_without_device
from jaxmem_callbacks.programs.targets.target import resolve_target

P, TARGET = PartitionSpec, "h100_sxm:8"
# Each sets several that must not cancel each other: what is left out shows in one of them.
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "the older partitioner": {"jax_use_shardy_partitioner": False},
    "random numbers": {"jax_threefry_partitionable": False, "jax_enable_custom_prng": True},
    "numbers": {"jax_enable_x64": True, "jax_default_matmul_precision": "BF16_BF16_F32_X3"},
    "efforts": {
        "jax_exec_time_optimization_effort": -1.0,
        "jax_memory_fitting_effort": 1.0,
        "jax_memory_fitting_level": "O3",
        "jax_optimization_level": "O1",
        "jax_disable_most_optimizations": True,
    },
}
WEIGHTS, BATCH = np.ones((4, 256, 256)), {"x": np.ones((512, 256)), "mask": np.ones((512, 1))}


@contextlib.contextmanager
def settings(name: str) -> Generator[None]:
    """One of these, as far as this JAX has it."""
    chosen = {key: value for key, value in SETTINGS[name].items() if key in jax.config.values}
    before = {key: getattr(jax.config, key, jax.config.values[key]) for key in chosen}
    try:
        for key, value in chosen.items():
            jax.config.update(key, value)
        yield
    finally:
        for key, value in before.items():
            jax.config.update(key, value)


def loss(weights: Any, batch: Any, key: Any) -> Any:
    x = batch["x"] * jax.random.bernoulli(key, 0.9, batch["x"].shape)
    x = jax.lax.scan(lambda x, w: (jax.nn.gelu(x @ w), None), x, weights)[0]
    return jnp.mean((x * batch["mask"]) ** 2)


def train_step(weights: Any, batch: Any, seed: Any) -> Any:
    return weights - 0.1 * jax.grad(loss)(weights, batch, jax.random.PRNGKey(seed))


def scaled_step(scale: Any, weights: Any, batch: Any, seed: Any) -> Any:
    return train_step(weights, batch, seed) * (2 if scale == "twice" else 1)


def divided(mesh: Mesh) -> Any:
    """A step whose jit alone says where its arguments are: a batch by one word for all of it."""
    on = functools.partial(NamedSharding, mesh)
    places = on(P(None, None, "model")), on(P("data")), on(P())
    return jax.jit(train_step, in_shardings=places, donate_argnums=0)


def by_hand() -> Iterator[tuple[str, Any]]:
    """What JAX's own compile for the target says under each of the settings."""
    from jax.experimental import topologies

    target = resolve_target(TARGET)
    about: dict[str, Any] = {
        **target.topology_options,
        "topology": target.topology,
        "target_config": target.target_config,
    }
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", **about)
    mesh = Mesh(np.array(topology.devices).reshape(4, 2), ("data", "model"))
    for name in SETTINGS:
        jax.clear_caches()  # which do not know that a compiler's settings are others
        with settings(name):
            lowered = divided(mesh).lower(WEIGHTS, BATCH, 3)
            yield name, lowered.compile(compiler_options=options_without_device("cuda")).memory_analysis()


def sizes(analysis: Any) -> list[int]:
    """Temporaries, arguments, outputs and aliases."""
    return [getattr(analysis, f"{size}_size_in_bytes") for size in ("temp", "argument", "output", "alias")]


if __name__ == "__main__":
    for each, found in by_hand():
        sys.stdout.write(f"{json.dumps({each: sizes(found)})}\n")
