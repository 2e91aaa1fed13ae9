"""The largest batch over several devices: the placement that has most rows, and nothing said of what was not compiled."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.policies import policy_words
from tests.searched_steps import abstract, train_step

SEARCH: dict[str, Any] = {"batch": "largest", "sharding": True}
LAYERS, WIDE, GIVEN = 16, 128, 64


def deep_step(weights: Any, batch: Any) -> Any:
    """Bytes are flat in few rows: what the first sizes tell is far from what fits."""

    def layer(h: Any, weight: Any) -> Any:
        return h + jnp.tanh(jnp.tanh(h @ weight["up"]) @ weight["down"]), None

    def loss(weights: Any, batch: Any) -> Any:
        return jnp.square(jax.lax.scan(layer, jnp.sin(batch), weights)[0]).mean()

    return jax.tree.map(lambda w, g: w - g, weights, jm.grad(loss)(weights, batch))


@pytest.fixture(scope="module")
def divided() -> jm.Plan:
    weight = jax.ShapeDtypeStruct((LAYERS, WIDE, WIDE), jnp.float32)
    weights, batch = {"up": weight, "down": weight}, jax.ShapeDtypeStruct((GIVEN, WIDE), jnp.float32)
    return jm.plan(deep_step, weights, batch, budget="8MiB", search=SEARCH | {"microbatches": [2]}, progress=False)


def test_the_placement_with_most_rows_has_the_compiles(divided: jm.Plan) -> None:
    """Whole on each device the state leaves room for 1,900 rows; divided for 15,000, as either was found alone."""
    assert divided.compiles == 16
    assert divided.chosen.step_bytes <= divided.record.budget_bytes
    assert divided.policy.sharding in ("fsdp", "fsdp_tensor")
    assert divided.chosen.batch_rows > 100 * GIVEN, "half of the compiles told which"


def test_what_is_said_of_rows_was_compiled(divided: jm.Plan) -> None:
    """Sixteen compiles are few for several placements and policies: what none was left for has not a word."""
    few = jm.plan(train_step, *abstract(), budget="256KiB", search=SEARCH | {"microbatches": [2, 4]}, progress=False)
    for plan in (divided, few):
        notes = [note for note in plan.record.notes if note.startswith("Under ")]
        assert notes
        for note in notes:
            under = [each for each in plan.candidates if note.startswith(f"Under {policy_words(each.policy)} ")]
            compiled = {each.batch_rows for each in under}
            told = {int(rows) for rows in re.findall(r"\b\d+(?= rows fit\b| rows do not| do not, both)", note)}
            assert told, note
            assert told <= compiled, note
