"""Where a jit puts its arguments, and the settings of JAX, count for absent targets as they do for JAX's own compile."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxmem_callbacks as jm
from jaxmem_callbacks._compat.jit_settings import in_shardings_of
from jaxmem_callbacks.programs.targets.compilers import target_folders
from tests import forked, setting_steps
from tests.setting_steps import BATCH, SETTINGS, TARGET, WEIGHTS, divided, scaled_step, settings, sizes
from tests.target_step import needs_compiler

P = PartitionSpec


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))


def figures(program: Any) -> list[int]:
    return [program.temp_bytes, program.argument_bytes, program.output_bytes, program.alias_bytes]


@pytest.fixture(scope="module")
def by_hand() -> dict[str, list[int]]:
    """What JAX alone says of the step under each setting, in a process without this library's worker."""
    needs_compiler(TARGET)
    quiet = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "CUDA_VISIBLE_DEVICES": ""}
    (folder, *_) = [*target_folders(), ""]
    run = forked.run(
        [sys.executable, setting_steps.__file__, folder],
        env=os.environ | quiet | {"PYTHONPATH": str(Path(__file__).parents[1]), "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return {name: told for line in run.stdout.splitlines() for name, told in json.loads(line).items()}


@pytest.mark.targets
@pytest.mark.filterwarnings("ignore:.*custom_prng:DeprecationWarning")
@pytest.mark.parametrize("name", SETTINGS)
def test_figures_of_an_absent_target_are_those_of_jaxs_own_compile(name: str, by_hand: dict[str, list[int]]) -> None:
    with settings(name):
        memory = jm.step_memory(divided(mesh()), WEIGHTS, BATCH, 3, target=TARGET)
    assert figures(memory.program) == by_hand[name]
    if name not in ("none", "the older partitioner"):
        assert by_hand[name] != by_hand["none"], "another program, so that a setting left out would be seen"


def of_prefix() -> Any:
    return divided(mesh()), (WEIGHTS, BATCH, 3)


def of_specs() -> Any:
    """Bare specs, whose mesh is the one that is set; the weights are on one device, bound to none."""
    step = jax.jit(setting_steps.train_step, in_shardings=(P("data"), P(("data", "model")), P()))
    return step, (jnp.ones((4, 256, 256)), {"x": jnp.ones((512, 256)), "mask": np.ones((512, 1), np.float32)}, 3)


def of_partial() -> Any:
    """Behind a bound static argument."""
    on = functools.partial(NamedSharding, mesh())
    places = on(P(None, "model")), on(P("data")), on(P())
    step = jax.jit(scaled_step, in_shardings=places, static_argnums=0, donate_argnums=1)
    return functools.partial(step, "twice"), (WEIGHTS, BATCH, 3)


def of_shapes() -> Any:
    """Shapes that are nowhere, and weights that are bound to their places already."""
    on = functools.partial(NamedSharding, mesh())
    weights = jax.device_put(jnp.ones((4, 256, 256)), on(P("data")))
    step = jax.jit(setting_steps.train_step, in_shardings=(on(P("data")), on(P("data", None)), None))
    batch = {name: jax.ShapeDtypeStruct(array.shape, jnp.float32) for name, array in BATCH.items()}
    return step, (weights, batch, jax.ShapeDtypeStruct((), jnp.int32))


def of_closure() -> Any:
    """A table that the step closes over stands among JAX's own arguments."""
    table, on = jnp.arange(512.0 * 256).reshape(512, 256), functools.partial(NamedSharding, mesh())

    def own_step(weights: Any, batch: Any) -> Any:
        return weights - jax.grad(lambda w: jnp.mean(jnp.tanh((batch + table) @ w) ** 2))(weights)

    return jax.jit(own_step, in_shardings=(on(P()), on(P("data")))), (np.ones((256, 256)), np.ones((512, 256)))


def lowered(step: Any, *args: Any) -> Any:
    return step.func.lower(*step.args, *args) if isinstance(step, functools.partial) else step.lower(*args)


WAYS = {"prefix": of_prefix, "specs": of_specs, "partial": of_partial, "shapes": of_shapes, "closure": of_closure}


@pytest.mark.core
@pytest.mark.parametrize("way", WAYS)
def test_arguments_count_where_their_jit_puts_them(way: str) -> None:
    step, args = WAYS[way]()
    with jax.set_mesh(mesh()):
        truth = sizes(lowered(step, *args).compile().memory_analysis())
        told = jm.step_memory(step, *args, target="cpu")
    assert figures(told.program) == truth
    rows = {row.name: row.bytes for row in told.arguments}
    assert rows["batch"] * 4 <= sum(leaf.size * 4 for leaf in jax.tree.leaves(args[1])), "a part of it on each device"


@pytest.mark.core
def test_a_plan_counts_them_there_too() -> None:
    step, args = of_prefix()
    truth = sizes(step.lower(*args).compile().memory_analysis())
    (plain,) = [each for each in jm.plan(step, *args).record.candidates if each.policy.remat == "none"]
    assert figures(plain) == truth


@pytest.mark.core
def test_a_jit_that_says_nothing_leaves_them_where_they_lie() -> None:
    whole = jax.jit(setting_steps.train_step)
    assert in_shardings_of(whole.trace(WEIGHTS, BATCH, 3), 4) == (None,) * 4
    assert in_shardings_of(object(), 2) == (None, None)
    assert in_shardings_of(divided(mesh()).trace(WEIGHTS, BATCH, 3), 9) == (None,) * 9
