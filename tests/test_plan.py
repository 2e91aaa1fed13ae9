"""`jm.plan` on the attached CPU: the compiler's own bytes, the cheapest step that fits, and a plan that can be run."""

from __future__ import annotations

import json
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxmem_callbacks as jm
from jaxmem_callbacks.config.presets import parse_preset
from jaxmem_callbacks.planning.choice import choose, pareto
from jaxmem_callbacks.records.errors import PlanError
from jaxmem_callbacks.records.peaks import Peak
from jaxmem_callbacks.records.plans import Candidate
from tests.sample_plans import sentences

DEPTH, WIDTH, ROWS = 8, 32, 2048
OPTIMIZER = optax.adam(1e-3)


def loss_fn(params: Any, batch: Any) -> Any:
    def layer(x: Any, weight: Any) -> Any:
        return x + (jnp.tanh(x @ weight["up"]) * (x @ weight["gate"])) @ weight["down"], None

    return (jax.lax.scan(layer, batch, params)[0] ** 2).mean()


def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
    loss, grads = jm.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def abstract() -> Any:
    params = {
        "up": jax.ShapeDtypeStruct((DEPTH, WIDTH, 4 * WIDTH), jnp.float32),
        "gate": jax.ShapeDtypeStruct((DEPTH, WIDTH, 4 * WIDTH), jnp.float32),
        "down": jax.ShapeDtypeStruct((DEPTH, 4 * WIDTH, WIDTH), jnp.float32),
    }
    return params, jax.eval_shape(OPTIMIZER.init, params), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def real() -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 4))
    params = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) / 16, abstract()[0])
    return params, OPTIMIZER.init(params), jax.random.normal(next(keys), (ROWS, WIDTH))


def told_bytes(peak: Peak) -> tuple[int, int]:
    """What a compiler may say that a step needs: jax 0.10 leaves the program's constants out."""
    return peak.bytes, peak.bytes - peak.bytes_of("constants")


@pytest.fixture(scope="module")
def frontier() -> jm.Plan:
    before = len(jax.live_arrays())
    plan = jm.plan(train_step, *abstract())
    assert len(jax.live_arrays()) == before, "planning takes no device memory"
    return plan


@pytest.mark.core
def test_without_a_limit_the_plain_step_is_chosen_and_the_frontier_is_whole(frontier: jm.Plan) -> None:
    assert frontier.policy == jm.StepPolicy()
    assert 4 <= frontier.compiles == len(frontier.candidates) <= 8
    sizes = [each.step_bytes for each in frontier.frontier]
    extras = [each.extra_flops for each in frontier.frontier]
    assert sizes == sorted(sizes, reverse=True)
    assert extras == sorted(extras)
    assert extras[0] == 0
    assert sizes[-1] < 0.5 * sizes[0]
    assert "no limit" in str(frontier)


@pytest.mark.core
def test_a_candidates_bytes_are_those_of_the_step_itself(frontier: jm.Plan) -> None:
    for each in (frontier.candidates[0], frontier.candidates[-1]):
        memory = jm.step_memory(jm.jit_step(train_step, each.policy), *abstract())
        assert each.step_bytes == memory.step_bytes
        assert each.temp_bytes == memory.temp_bytes
        assert each.alias_bytes == memory.alias_bytes


@pytest.mark.core
@pytest.mark.parametrize("part", [0.25, 0.6])
def test_within_a_budget_the_cheapest_step_that_fits(frontier: jm.Plan, part: float) -> None:
    most, least = frontier.candidates[0].step_bytes, frontier.candidates[-1].step_bytes
    budget = int(least + part * (most - least))
    plan = jm.plan(train_step, *abstract(), budget=budget)
    chosen = plan.chosen
    assert chosen.fits is True
    assert chosen.step_bytes <= budget
    assert plan.compiles <= 8
    # As good as the best point of the whole frontier that fits, or better.
    assert chosen.extra_flops <= min(each.extra_flops for each in frontier.candidates if each.step_bytes <= budget)
    assert "of all that fit" in sentences(plan)


@pytest.mark.core
def test_a_plan_can_be_run_and_changes_no_number(frontier: jm.Plan) -> None:
    plan = jm.plan(train_step, *abstract(), budget=int(frontier.candidates[-1].step_bytes * 1.3))
    assert plan.policy.remat == "full"
    wanted = jax.jit(train_step)(*real())
    got = jm.jit_step(train_step, plan.policy)(*real())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)


@pytest.mark.core
def test_a_budget_that_the_plain_step_keeps_needs_two_compiles(frontier: jm.Plan) -> None:
    plan = jm.plan(train_step, *abstract(), budget=frontier.candidates[0].step_bytes)
    assert plan.policy == jm.StepPolicy()
    assert plan.compiles == 2


@pytest.mark.core
def test_what_stays_beside_the_step_counts(frontier: jm.Plan) -> None:
    copy = abstract()[0]  # an exponential moving average of the parameters
    room = frontier.candidates[0].step_bytes
    plan = jm.plan(train_step, *abstract(), budget=room, resident=[copy, "1KiB", 24])
    assert plan.record.resident_bytes == 3 * DEPTH * 4 * WIDTH * WIDTH * 4 + 1024 + 24
    assert plan.policy.remat == "full"
    assert "Beside the step stay" in str(plan)
    with pytest.raises(PlanError, match="resident holds object, which has no arrays"):
        jm.plan(train_step, *abstract(), resident=[object()])


def test_a_plan_for_one_of_several_attached_devices_says_how_to_use_the_others(frontier: jm.Plan) -> None:
    assert frontier.chosen.fits is not False
    assert any("search={'sharding': True}" in note for note in frontier.record.notes)


def test_where_nothing_fits_the_plan_says_so_and_nobody_runs_it() -> None:
    plan = jm.plan(train_step, *abstract(), budget="1MiB")
    assert plan.chosen.fits is False
    assert plan.chosen.step_bytes == min(each.step_bytes for each in plan.candidates)
    state = sum(leaf.size * 4 for leaf in jax.tree.leaves(abstract()[:2]))
    assert plan.record.least_bytes == state
    assert "2 levels: nothing fits, by" in sentences(plan)
    told = f"planned for 1 of {jax.device_count()} attached devices. To divide the step among all of them, "
    assert sum(told in note and "search={'sharding': True}" in note for note in plan.record.notes) == 1
    assert sentences(plan).count("this comes nearest") == 1
    assert plan.peak is not None
    assert plan.chosen.step_bytes in told_bytes(plan.peak)
    assert "What makes its peak of" in str(plan)
    with pytest.raises(
        PlanError,
        match=r"Nothing fits: train_step needs .* more than the budget of 1.0 MiB .* alone are .* makes its peak of [\d.]+ MiB: ",
    ):
        jm.jit_step(train_step, plan.policy)
    with pytest.raises(PlanError, match="Nothing fits"):
        jm.apply_policy(train_step, plan.policy)


def test_a_step_without_remat_is_traced_once_for_all_that_a_plan_asks_of_it() -> None:
    """Of 10,000 equations a trace with its gradients takes seconds."""
    seen = []

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        seen.append(1)
        return train_step(params, opt_state, batch)

    assert jm.plan(step, *abstract(), search={"remat": False}).compiles == 1
    assert len(seen) == 1


def test_nothing_is_said_to_fit_only_after_every_compile_was_used(frontier: jm.Plan) -> None:
    least = min(each.step_bytes or 0 for each in frontier.candidates)
    plan = jm.plan(train_step, *abstract(), budget=int(0.9 * least))
    assert plan.chosen.fits is False
    assert plan.compiles >= 5
    assert len({each.policy.keep for each in plan.candidates}) > 2


def test_a_refusal_without_a_figure_never_comes_nearest() -> None:
    refused, known = (
        Candidate(policy=jm.StepPolicy(), step_bytes=size, fits=False, flops=100, extra_flops=0) for size in (None, 50)
    )
    assert choose([refused, known])[0] == 1
    assert choose([known, refused])[0] == 0


def test_what_a_progress_function_raises_ends_the_plan_and_leaves_no_thread() -> None:
    def progress(what: str, _done: int, _most: int) -> None:
        msg = f"no more of {what}"
        raise RuntimeError(msg)

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="no more of"):
        jm.plan(train_step, *abstract(), progress=progress)
    assert threading.active_count() <= before


@pytest.mark.core
def test_the_peak_is_told_by_group_on_the_attached_devices(frontier: jm.Plan) -> None:
    held = DEPTH * 3 * WIDTH * 4 * WIDTH * 4
    for each in frontier.candidates:
        assert each.peak is not None
        assert each.step_bytes in told_bytes(each.peak)
        assert each.peak.bytes_of("parameters") == held
        assert each.peak.bytes_of("optimizer state") == 2 * held + 4
    saved = [each.peak.bytes_of("saved activations") for each in frontier.candidates if each.peak]
    assert saved[0] - saved[-1] >= 3 * DEPTH * ROWS * 4 * WIDTH * 4  # tanh, its factor and their product
    assert str(frontier.peak).startswith("The peak of ")


@pytest.mark.core
def test_every_candidate_is_traced_under_the_settings_of_the_thread_that_asks() -> None:
    seen: list[tuple[Any, str | None]] = []

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss = jax.lax.with_sharding_constraint(batch.sum(), jax.sharding.PartitionSpec())
        seen.append((loss.dtype, jax.config.jax_default_matmul_precision))
        return train_step(params, opt_state, batch)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        plan = jm.plan(step, *abstract())
    assert len(seen) >= plan.compiles > 2
    assert set(seen) == {(jnp.dtype("float32"), "highest")}


def test_a_plan_as_preset_as_json_as_html_and_as_a_picture(frontier: jm.Plan, tmp_path: Any) -> None:
    plan = jm.plan(train_step, *abstract(), budget=int(frontier.candidates[-1].step_bytes * 1.3))
    preset = parse_preset(plan.to_yaml())
    assert preset.policy == plan.policy
    assert plan.record.fingerprint in preset.description
    figures = json.loads(plan.to_json())
    assert figures["candidates"][figures["chosen"]]["step_bytes"] == plan.chosen.step_bytes
    assert "<table>" in plan._repr_html_()
    assert plan.to_html(tmp_path / "plan.html") == tmp_path / "plan.html"
    assert plan.record.target in (tmp_path / "plan.html").read_text()
    plan.figure().savefig(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


@pytest.mark.core
def test_a_step_past_the_library_is_planned_as_it_is() -> None:
    def past(params: Any, batch: Any) -> Any:
        return jax.grad(loss_fn)(params, batch)

    params, _, batch = abstract()
    plan = jm.plan(past, params, batch, budget="1GiB")
    assert plan.compiles == 1
    assert "Remat was not tried: The policy remat='full' would do nothing: past never calls" in str(plan)


@pytest.mark.core
def test_the_users_own_jit_and_progress() -> None:
    told: list[tuple[str, int, int]] = []
    plan = jm.plan(
        jax.jit(train_step, donate_argnums=(0, 1)),
        *abstract(),
        budget="1GiB",
        progress=lambda *said: told.append(said),
    )
    assert plan.compiles == 2
    assert told[0] == ("none and full", 0, 8)
    assert told[-1][1] == 2


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("much", r"budget='much': Not a size"),
        (1.5, r"budget=1.5: a float is a share"),
        (0.5, r"budget=0.5 is a share, and the whole is unknown: the attached cpu has no limit"),
        (-4, r"budget=-4: A size is not negative"),
    ],
)
def test_a_budget_that_makes_no_sense(budget: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        jm.plan(train_step, *abstract(), budget=budget)


@pytest.mark.core
def test_what_is_under_a_policy_already_is_refused() -> None:
    step = jm.jit_step(train_step, jm.StepPolicy(remat="full"))
    with pytest.raises(PlanError, match=r"already under remat='full'. Plan train_step, the function that you wrote"):
        jm.plan(step, *abstract())
    assert jm.plan(jm.jit_step(train_step), *abstract(), budget="1GiB").policy == jm.StepPolicy()


numbers = st.integers(1, 5)
points = st.builds(
    lambda size, extra, seconds, fits: Candidate(
        policy=jm.StepPolicy(),
        step_bytes=size,
        fits=fits,
        flops=100 + extra,
        extra_flops=extra,
        modelled_s=float(seconds),
    ),
    *(numbers, numbers, numbers, st.booleans()),
)


@given(st.lists(points, min_size=1, max_size=6))
def test_the_choice_fits_and_no_other_that_fits_costs_less(candidates: list[Candidate]) -> None:
    index, reason = choose(candidates)
    best = candidates[index]
    fitting = [each for each in candidates if each.fits]
    if fitting:
        assert best.fits
        assert best.extra_flops == min(each.extra_flops for each in fitting)
    else:
        assert best.step_bytes == min(each.step_bytes for each in candidates)
        assert "nothing fits" in reason
    for each in candidates:
        assert any(p.step_bytes <= each.step_bytes and p.extra_flops <= each.extra_flops for p in pareto(candidates))
