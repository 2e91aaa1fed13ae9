"""`jm.plan(search=..., beside=...)` on the attached CPU: every figure compiled, every budget kept, no number changed."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.config.presets import parse_preset
from jaxmem_callbacks.records.errors import PlanError
from tests.sample_plans import sentences
from tests.searched_steps import (
    OPTIMIZER,
    ROWS,
    WIDTH,
    abstract,
    eval_step,
    forward,
    loss_fn,
    obeys,
    parameters,
    rows_of,
    same,
    train_step,
)

FULL = jm.StepPolicy(remat="full", assume_fusion=False)  # as a plan for a CPU compiles it


@pytest.fixture(scope="module")
def largest() -> jm.Plan:
    return jm.plan(train_step, *abstract(), budget="2500KiB", search={"batch": {"multiple_of": 32}})


@pytest.mark.core
def test_the_largest_batch_was_compiled_and_the_next_too(largest: jm.Plan) -> None:
    obeys(largest)
    assert largest.compiles == len(largest.candidates) <= 16
    chosen = largest.chosen
    assert chosen.batch_rows > ROWS
    assert chosen.batch_rows % 32 == 0
    (following,) = [
        c for c in largest.candidates if c.policy == chosen.policy and c.batch_rows == chosen.batch_rows + 32
    ]
    assert following.fits is False
    assert f"{chosen.batch_rows} rows fit and {following.batch_rows} do not, both compiled" in str(largest)
    memory = jm.step_memory(jm.jit_step(train_step, largest.policy), *abstract(chosen.batch_rows))
    assert memory.step_bytes == chosen.step_bytes
    assert f"Under full, 2 levels {chosen.batch_rows + 32} rows do not fit either." in str(largest), (
        "one compile, no more"
    )
    plain = max(c.batch_rows for c in largest.candidates if c.fits and c.policy == jm.StepPolicy())
    assert plain < chosen.batch_rows, "remat buys rows"


@pytest.mark.core
def test_a_plan_for_other_rows_says_which(largest: jm.Plan) -> None:
    rows = largest.chosen.batch_rows
    assert dict(largest.record.signature)["batch"] == f"float32[{rows},{WIDTH}]"
    assert f"full at {rows} rows" in str(largest)
    assert f"at {rows} rows" in parse_preset(largest.to_yaml()).description
    shares = {each.batch_rows: each.extra_share for each in largest.candidates if each.policy == FULL}
    assert max(shares.values()) - min(shares.values()) < 0.02, "a share of the plain step on as many rows"
    (axes,) = largest.figure().axes
    drawn = {text.get_text().partition("\n")[0]: text.xy[1] for text in axes.texts}
    assert drawn[f"full at {rows} rows"] == pytest.approx(100 * largest.chosen.extra_share)


def test_two_levels_are_used_where_one_does_not_reach_so_far() -> None:
    def deep(weights: Any, batch: Any) -> Any:
        def loss(weights: Any, batch: Any) -> Any:
            return jnp.square(jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), batch, weights)[0]).mean()

        return weights - jm.grad(loss)(weights, batch)

    arguments = jax.ShapeDtypeStruct((36, 16, 16), jnp.float32), jax.ShapeDtypeStruct((256, 16), jnp.float32)
    plan = jm.plan(deep, *arguments, budget="1MiB", search={"batch": {"multiple_of": 192, "at_most": 768}})
    assert (plan.chosen.batch_rows, plan.policy.levels) == (768, 2)
    (once,) = [each for each in plan.candidates if each.batch_rows == 768 and each.policy == FULL]
    assert once.fits is False
    assert re.search(r"Under full (384|576) rows fit and (576|768) do not, both compiled\.", sentences(plan))
    assert "Under full, 2 levels all 768 rows fit that were allowed." in sentences(plan)


def test_room_beside_the_most_rows_is_filled_with_what_is_dear() -> None:
    def tall(weights: Any, batch: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return h + jnp.tanh(jnp.tanh(jnp.tanh(h @ w) @ w) @ w) @ w, None

        return weights - jm.grad(lambda w, h: jnp.square(jax.lax.scan(layer, h, w)[0]).mean())(weights, batch)

    arguments = jax.ShapeDtypeStruct((6, 16, 16), jnp.float32), jax.ShapeDtypeStruct((256, 16), jnp.float32)
    plan = jm.plan(tall, *arguments, budget="1MiB", search={"batch": {"multiple_of": 768}}, progress=False)
    assert "Under full 768 rows fit and 1536 do not, both compiled." in sentences(plan)
    (full,) = [each for each in plan.candidates if each.batch_rows == 768 and each.policy == FULL]
    assert (full.fits, plan.chosen.fits, plan.chosen.batch_rows) == (True, True, 768)
    assert plan.chosen.extra_flops < 0.75 * full.extra_flops
    assert plan.policy.keep > 0


def test_up_to_a_bound_the_cheapest_step_of_those_rows() -> None:
    search = {"batch": {"multiple_of": 64, "at_most": 1100}, "microbatches": [4]}
    plan = jm.plan(train_step, *abstract(), budget="1500KiB", search=search)
    obeys(plan)
    assert plan.chosen.batch_rows == 1088 // 64 * 64 == 1088
    assert plan.chosen.extra_share < 0.05
    assert "Under full, 4 microbatches all 1088 rows fit that were allowed." in sentences(plan)
    assert (plan.policy.remat, plan.policy.microbatches) == ("none", 4)


def test_the_batch_search_needs_a_limit_a_batch_and_a_size_that_divides() -> None:
    with pytest.raises(
        PlanError, match=r"asks for the largest batch that fits, and there is no limit to fit into: .*='12"
    ):
        jm.plan(train_step, *abstract(), search={"batch": "largest"})
    with pytest.raises(
        PlanError, match=r"no batch of at most 7 rows is a multiple of 8, which .* Type search=.*\"at_most\": 8"
    ):
        jm.plan(train_step, *abstract(), budget="1GiB", search={"batch": {"at_most": 7}, "microbatches": [8]})
    with pytest.raises(PlanError, match=r"opt is none of them. Name those that hold the batch: search="):
        jm.plan(train_step, *abstract(), budget="1GiB", search={"batch": {"argnames": ["opt"]}})

    def two(params: Any, first: Any, second: Any) -> Any:
        return jm.value_and_grad(lambda p: loss_fn(p, first) + loss_fn(p, second))(params)

    params, _, batch = abstract()
    half = jax.ShapeDtypeStruct((ROWS // 2, WIDTH), jnp.float32)
    with pytest.raises(
        PlanError, match=r"Which rows the batch of two has is not clear.* first: leading dimension 1024; second"
    ):
        jm.plan(two, params, batch, half, budget="1GiB", search={"batch": "largest"})


@pytest.fixture(scope="module")
def accumulated() -> jm.Plan:
    """Of real rows: the loss is compared before anything is proposed."""
    params = parameters()
    batch = rows_of(ROWS)
    return jm.plan(
        train_step,
        params,
        OPTIMIZER.init(params),
        batch,
        budget="900KiB",
        search={"remat": False, "microbatches": True},
    )


@pytest.mark.core
def test_the_fewest_microbatches_that_fit_are_chosen(accumulated: jm.Plan) -> None:
    obeys(accumulated)
    chosen = accumulated.chosen
    assert chosen.fits
    assert chosen.policy.remat == "none"
    assert chosen.policy.microbatches > 1
    fewer = chosen.policy.microbatches // 2
    (before,) = [c for c in accumulated.candidates if c.policy == jm.StepPolicy(microbatches=fewer)]
    assert before.fits is False
    assert chosen.extra_share < 0.01
    assert f"none, {chosen.policy.microbatches} microbatches" in str(accumulated)
    assert "was not checked" not in str(accumulated)


@pytest.mark.core
def test_an_accumulated_plan_is_a_preset_and_changes_no_number(accumulated: jm.Plan) -> None:
    preset = parse_preset(accumulated.to_yaml())
    assert preset.policy == accumulated.policy
    params = parameters()
    arguments = params, OPTIMIZER.init(params), rows_of(ROWS)
    wanted = jax.jit(train_step)(*arguments)
    same(jm.jit_step(train_step, preset)(*jax.tree.map(jnp.copy, arguments)), wanted)


def test_a_loss_that_nobody_could_check_is_told_and_one_that_fails_is_not_accumulated() -> None:
    plan = jm.plan(train_step, *abstract(), budget="900KiB", search={"remat": False, "microbatches": [3, 8]})
    assert plan.policy == jm.StepPolicy(microbatches=8)
    assert "Microbatches 3 were not tried: they do not divide the 1024 rows of the batch." in str(plan)
    assert "Whether the loss may be accumulated was not checked" in str(plan)
    with pytest.raises(
        PlanError,
        match=r"^Microbatches 3, 5 do not divide the 1024 rows of the batch\. Expected some that do: 2, 4, 8, 16, 32, 64\.$",
    ):
        jm.plan(train_step, *abstract(), budget="900KiB", search={"microbatches": [3, 5]})

    def masked(params: Any, batch: Any, mask: Any) -> Any:
        return jm.value_and_grad(lambda p, batch, mask: ((forward(p, batch) ** 2).sum(1) * mask).sum() / mask.sum())(
            params, batch, mask
        )

    mask = (jnp.arange(ROWS) % 3 > 0).astype(jnp.float32)
    search = {"remat": False, "microbatches": [8]}
    refused = jm.plan(masked, parameters(), rows_of(ROWS), mask, budget="900KiB", search=search)
    assert {each.policy.microbatches for each in refused.candidates} == {1}
    assert "Microbatches were not tried: " in str(refused)
    assert refused.chosen.fits is False


@pytest.mark.core
def test_multi_steps_is_not_doubled() -> None:
    optimizer = optax.MultiSteps(OPTIMIZER, every_k_schedule=2)

    def stepped(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jm.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, _, batch = abstract()
    state = jax.eval_shape(optimizer.init, params)
    plan = jm.plan(stepped, params, state, batch, budget="900KiB", search={"remat": False, "microbatches": True})
    assert {each.policy.microbatches for each in plan.candidates} == {1}
    assert "Microbatches were not tried: optax.MultiSteps accumulates already" in str(plan)


def test_without_a_budget_every_number_of_microbatches_has_its_frontier() -> None:
    plan = jm.plan(train_step, *abstract(), search={"microbatches": [4], "remat": False})
    assert {each.policy.microbatches for each in plan.candidates} == {1, 4}
    assert plan.policy == jm.StepPolicy()
    assert min(each.step_bytes for each in plan.candidates) < 0.6 * max(each.step_bytes for each in plan.candidates)


def test_without_a_budget_every_number_of_microbatches_is_tried_with_what_compiles_are_left() -> None:
    plan = jm.plan(train_step, *abstract(), search={"microbatches": True})
    counts = [each.policy.microbatches for each in plan.candidates]
    assert set(counts) == {1, 2, 4, 8, 16, 32, 64}
    assert len(counts) == plan.compiles <= 16
    assert plan.policy == jm.StepPolicy(), "there is no limit here"


@pytest.mark.core
def test_what_donating_would_save_is_compiled_and_the_users_word_stands() -> None:
    mine = jm.jit_step(train_step, donate_argnames=())
    state = sum(leaf.size * 4 for leaf in jax.tree.leaves(abstract()[:2]))
    plan = jm.plan(mine, *abstract(), budget="1GiB", search={"remat": False})
    assert plan.policy == jm.StepPolicy(donate=())
    assert "params, opt_state: returned updated and not donated. Donating would save" in str(plan)
    assert plan.compiles == 2
    asked = jm.plan(mine, *abstract(), budget="1GiB", search={"remat": False, "donate": True})
    assert asked.policy == jm.StepPolicy(donate="auto")
    assert "Donating params, opt_state saves" in str(asked)
    without = next(each for each in asked.candidates if each.policy.donate == ())
    assert without.step_bytes == plan.chosen.step_bytes
    assert 0 < without.step_bytes - asked.chosen.step_bytes <= state
    assert parse_preset(asked.to_yaml()).policy == asked.policy


@pytest.mark.core
@pytest.mark.parametrize(
    ("donated", "words"),
    [
        (
            (),
            r"params, opt_state: returned updated and not donated. Donating would save .* compiled\. Write donate_argnames",
        ),
        (("params", "opt_state"), None),
    ],
)
def test_the_users_own_jit_keeps_its_donation_and_hears_what_to_write(
    donated: tuple[str, ...], words: str | None
) -> None:
    search = {"remat": False, "donate": True}
    plan = jm.plan(jax.jit(train_step, donate_argnames=donated), *abstract(), budget="1GiB", search=search)
    assert plan.policy == jm.StepPolicy()
    if words is None:
        assert "donat" not in str(plan)
    else:
        assert re.search(words, sentences(plan))
        assert "Write donate_argnames=('params', 'opt_state') in the jax.jit of train_step." in sentences(plan)


@pytest.mark.core
def test_a_program_beside_the_step_counts_with_the_state_it_does_not_take() -> None:
    params, opt_state, batch = abstract()
    resident = {"ema": abstract()[0]}
    plan = jm.plan(
        train_step,
        *(params, opt_state, batch),
        budget="1GiB",
        resident=[resident, 64],
        search={"remat": False},
        beside=[(eval_step, (params, batch)), (forward, (resident["ema"], batch))],
    )
    obeys(plan)
    of_eval, of_ema = plan.chosen.beside
    optimizer = sum(leaf.size * 4 for leaf in jax.tree.leaves(opt_state))
    weights = sum(leaf.size * 4 for leaf in jax.tree.leaves(params))
    assert of_eval.held_bytes == optimizer + weights + 64
    assert of_ema.held_bytes == optimizer + weights + 64, "the step's own parameters stay, the average is its argument"
    assert of_eval.program_bytes == jm.step_memory(jax.jit(eval_step), params, batch).step_bytes
    assert plan.chosen.sets_need == "eval_step"
    assert plan.chosen.need_bytes == of_eval.need_bytes > plan.chosen.step_bytes + plan.record.resident_bytes
    assert "eval_step sets the need: " in str(plan)
    assert (plan.compiles, plan.record.beside_compiles) == (1, 2)
    assert "\n1 compile and 2 of programs beside the step (jax" in str(plan)
    copies = abstract()
    alike = jm.plan(
        train_step, params, opt_state, batch, budget="1GiB", search={"remat": False}, beside=(forward, copies[::2])
    )
    assert alike.chosen.beside[0].held_bytes == optimizer, "the same shapes are the same state"


def test_where_a_program_beside_is_too_much_no_policy_of_the_step_helps() -> None:
    params, opt_state, batch = abstract()
    plan = jm.plan(train_step, params, opt_state, batch, budget="3MiB", beside=[(eval_step, (params, batch))])
    obeys(plan)
    assert plan.chosen.fits is False
    assert "That is too much, whatever the step's policy." in sentences(plan)
    assert (plan.compiles, plan.record.beside_compiles) == (2, 1), "the two ends and the program, nothing in vain"
    with pytest.raises(PlanError, match="Nothing fits"):
        jm.jit_step(train_step, plan.policy)


def test_ctrl_c_gives_the_best_of_a_wide_search() -> None:
    def until_the_second(_what: str, done: int, _most: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    search = {"batch": {"multiple_of": 64}}
    plan = jm.plan(train_step, *abstract(), budget="2500KiB", search=search, progress=until_the_second)
    assert len(plan.candidates) == 2
    assert "Interrupted: this is the best of what was compiled so far." in str(plan)
    assert plan.chosen.fits is True


@pytest.mark.core
def test_integers_of_numpy_are_planned_as_jax_traces_them() -> None:
    """They have 64 bits, and 32 in a trace: a shape that asks for 64 is a warning, which is an error here."""

    @jax.jit
    def train_step(table: jax.Array, tokens: Any) -> jax.Array:
        return table - jax.grad(lambda table: jnp.tanh(table[tokens["ids"]]).mean())(table)

    table, tokens = jnp.ones((512, 64)), {"ids": np.arange(4096).reshape(64, 64) % 512}
    assert tokens["ids"].dtype == np.int64
    memory = jm.step_memory(train_step, table, tokens)
    assert not memory.causes()
    plan = jm.plan(train_step, table, tokens, budget="8MiB", search={"batch": {"at_most": 128}}, progress=False)
    assert plan.record.candidates[-1].batch_rows is not None
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        assert jm.plan(train_step, table, tokens, progress=False).record.candidates
