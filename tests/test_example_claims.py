"""What the examples claim in words, by numbers: LoRA's average, and the bytes that half of the precision saves."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem_callbacks as jm
from tests.target_step import needs_compiler, shape

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
STEPS = 12


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of examples/, imported as its own folder sees it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(name)


@pytest.mark.core
def test_the_average_of_the_adapters_is_the_one_that_is_computed_by_hand(monkeypatch):
    """In float64, from the adapters that each step gave."""
    lora = example("lora", monkeypatch)
    train, _ = lora.digits.load()
    frozen = {name: jax.random.normal(jax.random.key(0), sizes) / 10 for name, sizes in lora.SHAPES.items()}
    state = lora.new_state()
    step = jm.jit_step(lora.train_step, jm.load_preset("full_remat"))
    first = by_hand = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(state.adapters)]
    for batch in lora.digits.batches(train, STEPS, lora.ROWS):
        state, _ = step(state, frozen, batch)
        adapters = [np.asarray(leaf) for leaf in jax.tree.leaves(state.adapters)]
        by_hand = [0.9 * kept + 0.1 * new for kept, new in zip(by_hand, adapters, strict=True)]
    average = [np.asarray(leaf) for leaf in jax.tree.leaves(state.average)]
    for ours, hand, last, before in zip(average, by_hand, adapters, first, strict=True):
        np.testing.assert_allclose(ours, hand, rtol=1e-5, atol=1e-8)
        assert np.abs(ours - before).max() > 1e-3, "it moved"
        assert np.abs(ours - last).max() > 1e-3, "it lags behind"


@pytest.mark.targets
@pytest.mark.timeout(300)
def test_half_of_the_precision_halves_what_is_kept_for_the_backward_pass_on_an_h100(monkeypatch):
    """Of each block: two arrays of its inner width (before and after gelu) and two of its outer one, two bytes a number less."""
    needs_compiler("h100_sxm")
    mixed = example("mixed_precision", monkeypatch)
    monkeypatch.setattr(mixed, "LAYERS", 1)  # what is told of a block is told of each; a third of the compile
    batch = {"image": shape(mixed.ROWS, 64), "label": shape(mixed.ROWS, dtype=jnp.int32)}
    step = jm.jit_step(mixed.train_step, jm.load_preset("monitor_only"))
    single, half = (
        jm.step_memory(step, *nnx.eval_shape(lambda dtype=dtype: mixed.new_state(dtype)), batch, target="h100_sxm")
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    kept = mixed.ROWS * (2 * 4 * mixed.WIDTH + 2 * mixed.WIDTH)
    assert 2 * kept <= single.temp_bytes - half.temp_bytes <= single.temp_bytes / 2
    assert (half.alias_bytes, half.argument_bytes) == (single.alias_bytes, single.argument_bytes), (
        "the state is float32"
    )
