"""`jm.plan(search={"sharding": ...})`: where the plan places a state, a batch and what is beside it, on eight CPU devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.compiles import CompileBudget, CompileQueue, Compiler
from jaxmem_callbacks.planning.orchestrate import explore
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.request import budget_for
from jaxmem_callbacks.planning.sharding_candidates import spread
from jaxmem_callbacks.records.errors import PlanError, PolicyError
from tests.sample_plans import sentences
from tests.test_plan_search import OPTIMIZER, ROWS, abstract, forward, loss_fn, obeys, parameters, rows_of, train_step


@pytest.mark.core
def test_shardings_of_the_attached_devices_when_asked() -> None:
    search = {"sharding": ["replicate", "fsdp", "fsdp_tensor"], "remat": False}
    params = parameters()
    plan = jm.plan(train_step, params, OPTIMIZER.init(params), rows_of(ROWS), budget="1GiB", search=search)
    obeys(plan)
    held = {each.policy.sharding: each.argument_bytes or 0 for each in plan.candidates}
    assert held["replicate"] > held["fsdp"]
    meshes = {each.policy.sharding: each.mesh for each in plan.candidates}
    assert meshes == {"replicate": {"fsdp": 8}, "fsdp": {"fsdp": 8}, "fsdp_tensor": {"fsdp": 4, "tensor": 2}}
    assert plan.record.device_count == 8
    assert plan.record.mesh == plan.chosen.mesh
    assert plan.record.mesh == {"fsdp": 8}
    (matrices,) = [line for line in str(plan).splitlines() if "fsdp_tensor" in line]
    assert "on mesh fsdp=4, tensor=2" in matrices, "the header's mesh is the chosen one's"
    assert str(plan).count(" on mesh ") == 1
    place = jax.sharding.NamedSharding(jm.make_mesh({"fsdp": 8}), jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), abstract())
    with pytest.raises(
        PlanError,
        match=r"\[\"sharding\"\]='fsdp' says how .* the arguments carry shardings, which say .* Leave it out",
    ):
        jm.plan(train_step, *placed, search={"sharding": "fsdp"})


@pytest.mark.core
def test_a_batch_by_keyword_is_divided_and_what_lies_beside_it_is_not() -> None:
    def looked_up(params: Any, opt_state: Any, batch: Any, table: Any, key: Any) -> Any:
        noise = jax.random.uniform(jax.random.wrap_key_data(key), batch.shape)
        return train_step(params, opt_state, batch + table.sum() + noise)

    params, table, key = parameters(), jnp.ones((16, 1024)), jax.random.key_data(jax.random.key(0))
    plan = jm.plan(
        looked_up, params, OPTIMIZER.init(params), batch=rows_of(ROWS), table=table, key=key,
        budget="1GiB", search={"sharding": ["replicate"], "remat": False},
    )  # fmt: skip
    state = sum(leaf.nbytes for leaf in jax.tree.leaves((params, OPTIMIZER.init(params))))
    assert plan.chosen.argument_bytes == state + rows_of(ROWS).nbytes // 8 + table.nbytes + key.nbytes


@pytest.mark.core
def test_by_keyword_a_program_beside_finds_the_state_where_the_plan_places_it() -> None:
    params, opt_state, batch = abstract()
    plan = jm.plan(
        train_step, opt_state=opt_state, params=params, batch=batch,
        budget="1GiB", search={"sharding": ["zero1"], "remat": False}, beside=[(forward, (params, batch))],
    )  # fmt: skip
    optimizer = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(opt_state))
    assert plan.chosen.beside[0].held_bytes == pytest.approx(optimizer / 8, rel=0.02)
    assert (plan.compiles, plan.record.beside_compiles) == (1, 1)


def test_what_is_kept_is_counted_on_one_device_and_fills_the_budget() -> None:
    """A survey's bytes are those of all devices: taken for those of one, so little is kept that compiles are wasted."""
    widths = [16 * (2 + number) for number in range(5)]

    def narrowing(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            def layer(h: Any, weights: Any) -> Any:
                for into, out in weights:
                    h = h + jnp.tanh(jnp.sin(h @ into) @ out)
                return h, None

            return (jax.lax.scan(layer, batch, params)[0] ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jm.grad(loss)(params))

    params = [(jnp.ones((4, 32, width)) / 64, jnp.ones((4, width, 32)) / 64) for width in widths]
    given, search = (params, jnp.ones((8 * 512, 32))), {"sharding": ["replicate"]}
    problem = Problem(train_step=narrowing, args=given, kwargs={}, target=None, budget=budget_for("1MiB", None))
    traced, queue = problem.step(problem.base).traced(problem.args, {}), CompileQueue(budget=CompileBudget(2))
    placed = Compiler(spread(problem, traced, jm.make_mesh({"fsdp": 8}), "replicate", queue.results.note))
    policies = [replace(placed.problem.base, remat=remat) for remat in ("none", "full")]
    none, full = (each.step_bytes for each in queue.compile([(placed, policy) for policy in policies]))
    budget = (none + 2 * full) // 3
    plan = jm.plan(narrowing, *given, budget=budget, search=search)
    assert plan.chosen.fits
    assert (plan.chosen.step_bytes or 0) > 0.9 * budget
    assert plan.compiles <= 8


@pytest.mark.core
def test_what_would_split_nothing_is_noted() -> None:
    def without_optimizer(params: Any, batch: Any) -> Any:
        loss, grads = jm.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params, _, batch = abstract()
    search = {"sharding": ["zero1", "replicate"], "remat": False}
    plan = jm.plan(without_optimizer, params, batch, search=search)
    assert (
        "zero1 was not tried: sharding='zero1' divides the optimizer's state alone, and this step has none"
        in sentences(plan)
    )
    assert plan.policy.sharding == "replicate"
    odd = {name: jax.ShapeDtypeStruct((3, 15, 15), jnp.float32) for name in ("up", "down")}
    plan = jm.plan(train_step, odd, jax.eval_shape(OPTIMIZER.init, odd), jnp.ones((64, 15)), search=search)
    assert "zero1 was not tried: sharding='zero1' would do nothing on this mesh (fsdp=8): no array" in sentences(plan)


@pytest.mark.core
@pytest.mark.parametrize(
    ("mesh", "search", "words"),
    [
        ({"model": 8}, ["zero1", "fsdp"], r"model=8 every device would do all the work under .*fsdp'.* Type mesh={\"fsdp\": 8}"),
        ({"a": 2, "b": 4}, "replicate", r"axes a=2, b=4 every device would do all .* called fsdp.* Type mesh={\"fsdp\": 8}"),
        ({"fsdp": 8}, "fsdp_tensor", r"an axis for matrices.* has the axes fsdp=8. Type mesh={\"fsdp\": 4, \"tensor\": 2}\.$"),
    ],
)  # fmt: skip
def test_a_mesh_on_which_every_device_would_do_all_the_work_is_refused(mesh: Any, search: Any, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        jm.plan(train_step, *abstract(), mesh=mesh, search={"sharding": search, "remat": False})


def test_without_a_budget_the_compiles_that_are_left_fill_a_divided_frontier() -> None:
    plan = jm.plan(train_step, *abstract(), search={"sharding": ["replicate", "fsdp"]})
    ends = {(sharding, remat) for sharding in ("replicate", "fsdp") for remat in ("none", "full")}
    assert ends <= {(each.policy.sharding, each.policy.remat) for each in plan.candidates}
    between = [each for each in plan.candidates if each.policy.keep]
    assert {each.policy.sharding for each in between} == {"fsdp"} | {plan.policy.sharding}
    assert len(ends) < plan.compiles == len(plan.candidates) <= 16


def test_on_several_devices_near_the_budget_with_no_compile_left_the_search_ends() -> None:
    def searched(budget: int) -> CompileQueue:
        problem = Problem(
            train_step=train_step, args=abstract(), kwargs={}, target=None, budget=budget_for(f"{budget}B", None)
        )
        traced, queue = problem.step(problem.base).traced(problem.args, {}), CompileQueue(budget=CompileBudget(3))
        placed = spread(problem, traced, jm.make_mesh({"fsdp": 8}), "fsdp", queue.results.note)
        explore(Compiler(placed), (), queue, remat=True, frontier=False)
        return queue

    near = searched(min(each.candidate.step_bytes or 0 for each in searched(1024).results.entries) - 64)
    assert [each.candidate.fits for each in near.results.entries] == [False] * 3
    assert near.remaining == 0


def test_a_mesh_that_divides_part_of_the_work_says_so_and_time_counts_it() -> None:
    problem = Problem(train_step=train_step, args=abstract(), kwargs={}, target=None, budget=budget_for("1GiB", None))
    traced = problem.step(problem.base).traced(problem.args, {})
    notes: list[str] = []
    half = spread(problem, traced, jm.make_mesh({"a": 2, "fsdp": 4}), "fsdp", notes.append)
    assert (half.device_count, half.workers) == (8, 4)
    assert "divides the work into 4 parts for 8 devices: each part is done 2 times" in notes[0]
    matrices = spread(problem, traced, jm.make_mesh({"fsdp": 1, "tensor": 8}), "fsdp_tensor", notes.append)
    assert matrices.workers == 8
    rules = (("mlp", "b"),)
    assert spread(problem, traced, jm.make_mesh({"fsdp": 2, "b": 4}), rules, notes.append).workers == 8
    assert len(notes) == 1


def test_arrays_that_the_devices_do_not_divide_are_named() -> None:
    def weighing(params: Any, opt_state: Any, batch: Any) -> Any:
        return train_step(params, opt_state, batch["x"] * batch["weight"].sum())

    def given(rows: int, weights: int) -> Any:
        shapes = {"x": (rows, abstract()[2].shape[1]), "weight": (weights,)}
        return *abstract()[:2], {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    asked: dict[str, Any] = {"budget": "1GiB", "search": {"sharding": ["replicate"], "remat": False}}
    noted = sentences(jm.plan(weighing, *given(ROWS, 7), **asked))
    assert (
        "Whole on every device, since 8 devices do not divide its first dimension: batch['weight'] (7 rows)." in noted
    )
    with pytest.raises(
        PlanError, match=r"^8 devices do not divide the first dimension of batch\['x'\] \(1001 rows\), and"
    ):
        jm.plan(weighing, *given(1001, 8), **asked)
    both = r"batch\['weight'\] \(7 rows\), batch\['x'\] \(1001 rows\).* Give a batch of a multiple of 8 rows"
    with pytest.raises(PlanError, match=both):
        jm.plan(weighing, *given(1001, 7), **asked)


@pytest.mark.core
def test_a_step_that_makes_its_data_of_a_random_key_is_whole_on_every_device() -> None:
    """A key is no batch, typed or as integers, alone or several, whatever it is called; and a vector is none by itself."""

    def training(key: Any, rates: Any = ()) -> Any:
        keys = jax.random.split(key if key.ndim == jax.random.key(0).ndim or key.shape == (2,) else key[0])
        params = {"w": jax.random.normal(keys[0], (64, 64))}
        x = jax.random.normal(keys[1], (ROWS, 64))

        def loss_of(params: Any) -> Any:
            return jnp.tanh(jnp.tanh(x @ params["w"]) @ params["w"]).mean()

        loss, grads = jm.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - sum(rates, 0.1) * g, params, grads), loss

    asked: dict[str, Any] = {"budget": "1GiB", "search": {"sharding": ["replicate"], "remat": False}}
    typed, raw = jax.random.key(0), jax.random.PRNGKey(0)
    alone = "No argument is a batch to divide, so each of the 8 devices does all of the work of a step, but for what"
    for given in [(typed,), (raw,), (jax.random.split(raw, 3),), (jax.random.split(typed, 3),), (typed, jnp.ones(3))]:
        plan = jm.plan(training, *given, **asked)
        assert alone in sentences(plan)
        assert plan.record.device_count == 8
        is_one_key = given[-1] is typed or given[-1] is raw
        assert ("divide its first dimension" in sentences(plan)) != is_one_key, "the words of one are no rows"
    assert "divide its first dimension: rates (3 rows)." in sentences(plan)
    x = jax.random.key(0)
    assert alone in sentences(jm.plan(lambda x: training(x, ()), x, **asked))
    with pytest.raises(PlanError, match=r"^8 devices do not divide the first dimension of table \(3 rows\), and"):
        jm.plan(lambda key, table: training(key, table.sum(axis=1)), typed, jnp.ones((3, 4)), **asked)


@pytest.mark.core
def test_a_step_that_takes_its_state_by_keyword_alone_is_planned_whole_on_every_device() -> None:
    """As flowjax's. A jit pins arguments by position, so no sharding divides such a state."""

    def keyword_only(params: Any, batch: Any, *, opt_state: Any) -> Any:
        return train_step(params, opt_state, batch)

    params = parameters()
    opt_state, batch = OPTIMIZER.init(params), rows_of(ROWS)
    asked: dict[str, Any] = {"budget": "1GiB", "search": {"sharding": ["replicate", "fsdp"], "remat": False}}
    plan = jm.plan(keyword_only, params, batch, opt_state=opt_state, **asked)
    assert [each.policy.sharding for each in plan.candidates] == [None]
    assert (plan.record.device_count, plan.record.mesh) == (8, {"fsdp": 8})
    why = "pins arguments by position, and the step takes opt_state by keyword alone."
    assert f"fsdp was not tried: sharding='fsdp' {why}" in sentences(plan)
    asked["search"]["sharding"] = ["fsdp"]
    with pytest.raises(PolicyError, match=f"^sharding='fsdp' {why}"):
        jm.plan(keyword_only, params, batch, opt_state=opt_state, **asked)


@pytest.mark.core
def test_the_steps_own_sharding_is_kept() -> None:
    """A plan of another program than the one that runs would be no plan."""
    params, batch = parameters(), rows_of(ROWS)
    state = (params, OPTIMIZER.init(params))
    mesh, fsdp = jm.make_mesh({"fsdp": 8}), jm.StepPolicy(sharding="fsdp")
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    shardings = jm.infer_shardings(state, mesh, fsdp)
    placed, step = jax.device_put(state, shardings), jm.jit_step(train_step, fsdp)
    asked: dict[str, Any] = {"budget": "1GiB", "search": {"remat": False}}

    plan = jm.plan(step, *placed, batch, **asked)  # by where its arguments are
    assert plan.policy.sharding == "fsdp"
    assert plan.record.mesh == {"fsdp": 8}
    assert (plan.chosen.argument_bytes or 0) - batch.nbytes == pytest.approx(whole / 8, rel=0.02)
    with jax.set_mesh(mesh):  # by the mesh that is set
        again = jm.plan(step, *abstract(), **asked)
    assert (again.policy, again.chosen.argument_bytes) == (plan.policy, plan.chosen.argument_bytes)
    pinned = jm.plan(
        jm.jit_step(train_step, state_shardings=shardings[0]), *abstract(), **asked
    )  # by what pins the state
    assert (pinned.record.device_count, pinned.record.mesh) == (8, {"fsdp": 8})
    assert (pinned.chosen.argument_bytes or 0) < whole / 2 + batch.nbytes


@pytest.mark.core
def test_a_sharding_that_contradicts_the_steps_own_is_refused() -> None:
    step = jm.jit_step(train_step, jm.StepPolicy(sharding="fsdp"))
    with pytest.raises(
        PlanError, match=r"already under sharding='fsdp', and search asks for \['zero1', 'fsdp'\]. Leave"
    ):
        jm.plan(step, *abstract(), search={"sharding": ["zero1", "fsdp"]})
    with pytest.raises(
        PlanError, match=r"already under sharding='fsdp', and the plan is for one device. Name a target"
    ):
        jm.plan(step, *abstract())
    plan = jm.plan(step, *abstract(), budget="1GiB", search={"sharding": ["fsdp"], "remat": False})
    assert plan.policy.sharding == "fsdp"
