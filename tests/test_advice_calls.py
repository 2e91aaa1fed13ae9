"""Lines of code that errors, events and logs print: each is triggered, pasted as it was printed, and measured."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.analysis.array_detectors import SPLIT
from jaxmem_callbacks.analysis.limit_detectors import LOWER, NEED_LESS
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.environment.apply import require_applied
from jaxmem_callbacks.recovery.failure import FailingProgram
from jaxmem_callbacks.recovery.reports.remedies import Forecast, Forecasts, remedies
from jaxmem_callbacks.recovery.texts.explain import tries
from jaxmem_callbacks.recovery.texts.log import read_oom_log
from tests.pasting import pasted, run, value

pytestmark = pytest.mark.core


def weights() -> dict[str, Any]:
    return {"in": jnp.full((8, 64, 128), 0.01), "out": jnp.full((8, 128, 64), 0.02)}


BATCH = jnp.linspace(0.0, 1.0, 512 * 64).reshape(512, 64)


def loss(params: Any, x: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(jnp.tanh(h @ w["in"]) @ w["out"]) + h, None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def descended(state: Any, batch: Any, rate: float = 0.1) -> Any:
    value, gradients = jm.value_and_grad(loss)(state, batch)
    return jax.tree.map(lambda p, g: p - rate * g, state, gradients), value


class Trainer:
    def train_step(self, state: Any, batch: Any) -> Any:
        return descended(state, batch)


STEPS = {
    "a function": descended,
    "a method": Trainer().train_step,
    "a partial": functools.partial(descended, rate=0.2),
}


def close(ours: Any, expected: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), ours, expected)


def step_bytes(step: Any) -> int:
    return jm.step_memory(step, weights(), BATCH).step_bytes


@functools.cache
def plain_bytes(function: Any) -> int:
    return step_bytes(jm.jit_step(function))


@functools.cache
def plain_result(function: Any) -> Any:
    return jax.jit(function)(weights(), BATCH)


def on_one_device(tree: Any) -> int:
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


# step.under


@pytest.mark.parametrize("text", [NEED_LESS, LOWER])
@pytest.mark.parametrize("kind", STEPS)
def test_a_step_is_put_under_the_policy_that_an_event_names(text: str, kind: str) -> None:
    function = STEPS[kind]
    step = value(pasted("step.under", text), jm=jm, train_step=function)
    assert step_bytes(step) < plain_bytes(function) * 0.7
    close(step(weights(), BATCH), plain_result(function))


@pytest.mark.parametrize("kind", STEPS)
def test_what_lies_whole_is_split_as_an_event_names_it(kind: str) -> None:
    function, mesh = STEPS[kind], jm.make_mesh({"fsdp": -1})
    tree = jax.device_put(weights(), NamedSharding(mesh, P()))
    whole = on_one_device(tree)
    with jax.set_mesh(mesh):
        tree = run(pasted("sharding.move", SPLIT.partition(": ")[2]), jax=jax, jm=jm, mesh=mesh, tree=tree)["tree"]
        step = value(pasted("step.under", SPLIT), jm=jm, step=function)
        tree, _ = step(tree, jax.device_put(BATCH, NamedSharding(mesh, P("fsdp"))))
    assert on_one_device(tree) * 8 == whole
    close(tree, plain_result(function)[0])


# step.made, oom.plan, oom.look


def tried(name: str) -> str:
    text = f"RESOURCE_EXHAUSTED: Out of memory allocating 4294967296 bytes. [executable_name='jit_{name}']"
    found = read_oom_log([text])
    assert found is not None
    return "\n".join(f"    {line}" for _, line in tries(found))


@pytest.mark.parametrize("name", ["train_step", "update", "finetune"])
def test_a_failed_step_is_made_as_a_log_advises(name: str) -> None:
    lines = [line for line in tried(name).splitlines() if "step = " in line]
    assert len(lines) == 2, "remat, and microbatches"
    for line in lines:
        step = run(pasted("step.made", line), jm=jm, **{name: descended})["step"]
        assert step_bytes(step) < plain_bytes(descended) * 0.8
        close(step(weights(), BATCH), plain_result(descended))


@pytest.mark.parametrize("name", ["train_step", "update", "finetune"])
def test_a_failed_step_is_planned_as_a_log_advises(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = pasted("oom.plan", tried(name))
    run(line, jm=jm, state=weights(), batch=BATCH, **{name: descended})
    assert "full" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["train_step", "update", "finetune"])
def test_what_a_failed_step_holds_is_printed_as_a_log_advises(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = pasted("oom.look", tried(name))
    run(line, jm=jm, state=weights(), batch=BATCH, **{name: descended})
    assert "parameters" in capsys.readouterr().out


# oom.rows


@pytest.mark.parametrize("names", [("batch",), ("x", "y"), ("tokens", "mask", "weights")])
def test_half_the_batch_is_taken_as_printed(names: tuple[str, ...]) -> None:
    def train_step(state: Any, *parts: Any) -> Any:
        return descended(state, sum(part["rows"] for part in parts))

    given = {name: {"rows": BATCH} for name in names}
    failing = FailingProgram(name="train_step", known_by="", step=jm.jit_step(train_step))
    half = Forecast(kind="rows", policy=jm.StepPolicy(), names=names, rows=256, why="not compiled here")
    found = remedies(failing, Forecasts(tried=(half,)), (), cause="capacity", lacking_bytes=1, platform="cpu")
    (lines,) = (each.lines for each in found if each.what.startswith("Half the batch"))
    for line in lines:
        given |= {name: each for name, each in run(pasted("oom.rows", line), jax=jax, **given).items() if name in given}
    whole = jm.step_memory(train_step, weights(), *({"rows": BATCH} for _ in names)).step_bytes
    assert jm.step_memory(train_step, weights(), *given.values()).step_bytes < 0.7 * whole


# memory.defragment


def asked_while_traced() -> str:
    with pytest.raises(jm.DefragmentError) as refused:
        jax.jit(lambda state: jm.defragment(state)[0])(weights())
    return str(refused.value)


def asked_of_deleted() -> str:
    state = weights()
    state["in"].delete()
    with pytest.raises(jm.DefragmentError) as refused:
        jm.defragment(state)
    return str(refused.value)


def asked_after_a_failure() -> str:
    gpu = {"lacking_bytes": None, "platform": "gpu"}
    first = remedies(None, Forecasts(), (), cause="fragmentation", **gpu)[0]  # type: ignore[arg-type]
    return "\n".join(first.lines)


@pytest.mark.parametrize("ask", [asked_while_traced, asked_of_deleted, asked_after_a_failure])
def test_arrays_are_moved_together_as_printed(ask: Any) -> None:
    line = pasted("memory.defragment", ask())
    state = run(line, jm=jm, state=weights())["state"]
    close(state, weights())
    moved = jm.simulate_allocator(
        "losses_in_a_list", "gpu_preallocate", device_memory="12GiB", defragment="when_needed"
    )
    ended = jm.simulate_allocator("losses_in_a_list", "gpu_preallocate", device_memory="12GiB")
    assert (moved.survived, ended.survived) == (True, False), "what it is for, in the simulated pool"


# preset.load


def listed(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["presets"]) == 0
    return capsys.readouterr().out


def without_sharding(_: Any) -> str:
    with pytest.raises(jm.PolicyError) as refused:
        jm.infer_shardings(weights(), jm.make_mesh({"fsdp": -1}), jm.StepPolicy())
    return str(refused.value)


def not_applied(_: Any) -> str:
    with pytest.raises(jm.EnvironmentSettingError) as refused:
        require_applied(jm.load_preset("full_remat", "gpu_async"))
    return str(refused.value)


@pytest.mark.parametrize(
    ("ask", "name"),
    [(listed, "donate+full_remat"), (without_sharding, "fsdp"), (not_applied, "full_remat+gpu_async")],
)
def test_a_preset_is_loaded_as_printed(ask: Any, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    preset = value(pasted("preset.load", ask(capsys)), jm=jm)
    assert preset.name == name
    assert preset.policy == jm.load_preset(*name.split("+")).policy


# mesh.make


def without_axes() -> None:
    jm.infer_shardings(weights(), jm.make_mesh({"tensor": -1}), "fsdp")


def without_a_mesh() -> None:
    jm.infer_shardings(weights(), None, "fsdp")  # type: ignore[arg-type]


def for_other_devices() -> None:
    jm.make_mesh({"fsdp": 3})


def for_fewer_devices() -> None:
    jm.make_mesh({"data": 2, "fsdp": 3})


@pytest.mark.parametrize("ask", [without_axes, without_a_mesh, for_other_devices, for_fewer_devices])
def test_a_mesh_is_made_as_printed(ask: Any) -> None:
    with pytest.raises(jm.PolicyError) as refused:
        ask()
    for printed in str(refused.value).split(" or on fewer devices "):
        mesh = value(pasted("mesh.make", printed), jm=jm, jax=jax)
        tree = {"w": jnp.ones((96, 96))}
        state = jax.device_put(tree, jm.infer_shardings(tree, mesh, "fsdp"))
        assert on_one_device(state) < on_one_device(tree)


# monitor.call, guard.call


def given_a_folder(folder: Path) -> None:
    jm.MemoryMonitor(str(folder))


def given_no_preset(_: Path) -> None:
    jm.MemoryMonitor(3)  # type: ignore[arg-type]


def given_no_plan(_: Path) -> None:
    jm.MemoryMonitor(plan=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("ask", [given_a_folder, given_no_preset, given_no_plan])
def test_a_monitor_is_made_as_printed(ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError) as refused:
        ask(tmp_path)
    plan = jm.plan(descended, weights(), BATCH, search={"remat": False})
    Path("plan.json").write_text(plan.to_json())
    with value(pasted("monitor.call", refused.value), jm=jm) as monitor:
        step = jm.jit_step(descended)
        _, loss = step(weights(), BATCH)
        monitor(0, {"loss": loss})
    if ask is given_a_folder:
        assert list(tmp_path.glob("*.jsonl"))


def fails() -> None:
    msg = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4.00GiB."
    raise jax.errors.JaxRuntimeError(msg)


def guarded(guard: Any) -> str:
    """What a guard says of a failure in its block."""
    try:
        with guard:
            fails()
    except jax.errors.JaxRuntimeError:
        pass
    (report,) = (each for each in Path("reports").rglob("*.json"))
    return report.read_text()


def of_a_path() -> str:
    with pytest.raises(TypeError) as refused:
        jm.oom_guard("reports")  # type: ignore[arg-type]
    return str(refused.value)


def of_a_generator() -> str:
    def batches() -> Any:
        yield BATCH

    with pytest.raises(TypeError) as refused:
        jm.oom_guard()(batches)
    return str(refused.value)


def of_a_number() -> str:
    with pytest.raises(TypeError) as refused:
        jm.oom_guard(monitor=3)  # type: ignore[arg-type]
    return str(refused.value)


@pytest.mark.parametrize("ask", [of_a_path, of_a_generator, of_a_number])
def test_a_guard_is_made_as_printed(ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    guard = value(pasted("guard.call", ask()), jm=jm)
    assert "4.00GiB" in guarded(guard)


# sharding.of_state, sharding.put, donation.copy


def pinned_step(name: str) -> Any:
    scope: dict[str, Any] = {"jax": jax}
    exec(f"def train(x, {name}):\n    return x.sum(), jax.tree.map(lambda p: p * 0.5, {name})", scope)  # noqa: S102
    return scope["train"]


@pytest.mark.parametrize("wrong", [{"v": 1}, [1, 2], (1, 2, 3)])
def test_shardings_are_those_of_the_state(wrong: Any) -> None:
    mesh = jm.make_mesh({"fsdp": -1})
    split = NamedSharding(mesh, P("fsdp"))
    state = jax.device_put(weights(), split)
    with pytest.raises(jm.PolicyError) as refused:
        jm.jit_step(pinned_step("state"), state_shardings=jax.tree.map(lambda _: split, wrong))(jnp.ones(3), state)
    shardings = value(pasted("sharding.of_state", refused.value), jax=jax, state=state)
    _, after = jm.jit_step(pinned_step("state"), state_shardings=shardings)(jnp.ones(3), state)
    assert on_one_device(after) * 8 == on_one_device(weights())


@pytest.mark.parametrize("name", ["state", "params", "model_and_optimizer"])
def test_a_state_is_put_where_it_is_pinned(name: str) -> None:
    split = NamedSharding(jm.make_mesh({"fsdp": -1}), P("fsdp"))
    shardings = jax.tree.map(lambda _: split, weights())
    step, state = jm.jit_step(pinned_step(name), state_shardings=shardings), weights()
    with pytest.raises(jm.PolicyError) as refused:
        step(jnp.ones(3), state)
    state = run(pasted("sharding.put", refused.value), jax=jax, state_shardings=shardings, **{name: state})[name]
    _, after = step(jnp.ones(3), state)
    assert on_one_device(after) * 8 == on_one_device(weights())


def mean_and_state(params: Any, average: Any) -> Any:
    return jax.tree.map(lambda p, a: p * 0.9 + a, params, average), jax.tree.map(lambda a: a * 0.5, average)


def read_beside(params: Any, teacher: Any) -> Any:
    return jax.tree.map(lambda p, t: p - t, params, teacher)


def tied(params: Any, old: Any, x: Any = 1.0) -> Any:
    return jax.tree.map(lambda p, o: x * p + o, params, old)


@pytest.mark.parametrize("function", [mean_and_state, read_beside, tied])
def test_a_shared_buffer_is_copied_as_printed(function: Any) -> None:
    first, second = list(function.__code__.co_varnames[:2])
    names = dict.fromkeys((first, second), weights())
    expected = function(*names.values())
    step = jm.jit_step(function, donate_argnames=(first,))
    with pytest.raises(jm.DonationError) as refused:
        step(*names.values())
    lines = {pasted("donation.copy", refused.value)}
    names |= {n: each for line in lines for n, each in run(line, jax=jax, jnp=jnp, **names).items() if n in names}
    close(step(*names.values()), expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(names[first]))


# loss.weighted, loss.batch

MASK = (jnp.arange(512) < 300).astype(jnp.float32)
TWO = jm.StepPolicy(microbatches=2)


def losses_of(w: Any, x: Any) -> Any:
    return jnp.sum((x @ w) ** 2, -1)


def masked_mean(w: Any, x: Any, mask: Any) -> Any:
    return (losses_of(w, x) * mask).sum() / mask.sum()


def wrongly_weighted(w: Any, x: Any, mask: Any) -> Any:  # noqa: ARG001
    return jm.weighted(losses_of(w, x).sum(), jnp.float32(7.0))


def of_rows(w: Any, x: Any, mask: Any) -> Any:
    return jm.weighted(losses_of(w, x) * mask, mask.sum())


def with_statistics(w: Any, x: Any, mask: Any) -> Any:  # noqa: ARG001
    return losses_of(w, x).mean(), (losses_of(w, x).sum() / jnp.sqrt(x.sum()))


def refused_of(function: Any, *, has_aux: bool = False) -> str:
    def step(w: Any, x: Any, mask: Any) -> Any:
        return jm.value_and_grad(function, has_aux=has_aux)(w, x, mask)

    with pytest.raises((ValueError, TypeError)) as refused:
        jm.jit_step(step, TWO)(jnp.eye(64), BATCH, MASK)
    return str(refused.value)


@pytest.mark.parametrize(
    ("function", "has_aux"),
    [(masked_mean, False), (wrongly_weighted, False), (of_rows, False), (with_statistics, True)],
)
def test_a_loss_says_its_weight_as_printed(function: Any, has_aux: bool) -> None:
    line = pasted("loss.weighted", refused_of(function, has_aux=has_aux))

    def said(w: Any, x: Any, mask: Any) -> Any:
        losses = losses_of(w, x)
        if function is wrongly_weighted:
            mask = jnp.ones_like(mask)
        names = {"losses": losses, "mask": mask, "loss_sum": (losses * mask).sum(), "weight_sum": mask.sum()}
        return value(line, jm=jm, sum=names["loss_sum"], weight=names["weight_sum"], **names)

    def plain(w: Any, x: Any, mask: Any) -> Any:
        return masked_mean(w, x, jnp.ones_like(mask) if function is wrongly_weighted else mask)

    step = jm.jit_step(jm.value_and_grad(said), TWO)
    close(step(jnp.eye(64), BATCH, MASK), jax.value_and_grad(plain)(jnp.eye(64), BATCH, MASK))


def table_like_a_batch(w: Any, x: Any, table: Any) -> Any:
    return jnp.mean((x @ w) ** 2) + jnp.sum(table)


def two_like_a_batch(w: Any, x: Any, table: Any, other: Any) -> Any:
    return jnp.mean((x @ w) ** 2) + jnp.sum(table) * jnp.sum(other)


def single(w: Any, x: Any, scale: Any) -> Any:
    return jnp.mean((x @ w) ** 2) * scale.sum()


@pytest.mark.parametrize(
    ("function", "more"),
    [
        (table_like_a_batch, (jnp.ones(512),)),
        (two_like_a_batch, (jnp.ones((512, 2)), jnp.ones(512))),
        (single, (jnp.ones((512, 1, 2)),)),
    ],
)
def test_the_batch_is_named_as_printed(function: Any, more: Any) -> None:
    def step(w: Any, *given: Any) -> Any:
        return jm.value_and_grad(function)(w, *given)

    with pytest.raises(ValueError, match="leading dimension of 512 too") as refused:
        jm.jit_step(step, TWO)(jnp.eye(64), BATCH, *more)
    _, _, if_not = str(refused.value).partition(" if so, ")
    line = pasted("loss.batch", refused.value)
    named = line.replace(line[line.index("batch_argnames=") : -1], if_not.removesuffix(" if not."))
    gradient = value(named, jm=jm, **{function.__name__: function})
    ours = jm.jit_step(gradient, TWO)(jnp.eye(64), BATCH, *more)
    close(ours, jax.value_and_grad(function)(jnp.eye(64), BATCH, *more))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert callable(value(line, jm=jm, **{function.__name__: function}))


def with_a_table(w: Any, signal: Any, table: Any) -> Any:
    return jnp.mean((signal @ w) ** 2) * table.sum()


class Regression:
    def with_scales(self, w: Any, signal: Any, scales: Any) -> Any:
        return jnp.mean((signal @ w) ** 2) * scales.sum()


def with_both(w: Any, signal: Any, table: Any, scales: Any) -> Any:
    return with_a_table(w, signal, table) * scales.mean()


@pytest.mark.parametrize(
    ("function", "more"),
    [
        (with_a_table, (jnp.ones(7),)),
        (Regression().with_scales, (jnp.ones((3, 512)),)),
        (with_both, (jnp.ones(7), jnp.ones(9))),
    ],
)
def test_a_batch_that_no_name_and_no_shape_tells_is_named(function: Any, more: Any) -> None:
    with pytest.raises(ValueError, match=r"Is it signal\? Then name it") as refused:
        jm.jit_step(jm.value_and_grad(function), TWO)(jnp.eye(64), BATCH, *more)
    gradient = value(pasted("loss.batch", refused.value), jm=jm, **{function.__name__: function})
    close(
        jm.jit_step(gradient, TWO)(jnp.eye(64), BATCH, *more), jax.value_and_grad(function)(jnp.eye(64), BATCH, *more)
    )


def test_a_batch_that_a_loss_closes_over_is_not_named() -> None:
    def step(w: Any, x: Any) -> Any:
        return jm.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    with pytest.raises(ValueError, match=r"must become an argument of <lambda>\.\n-"):
        jm.jit_step(step, TWO)(jnp.eye(64), BATCH)


# train.named, sharding.set_mesh, sharding.move of a plan

PLANNED = """
import jax, jax.numpy as jnp
import jaxmem_callbacks as jm

def loss(state, batch):
    x = batch
    for w in state:
        x = jnp.tanh(x @ w)
    return (x ** 2).mean()

def train_step(state, batch):
    value, g = jm.value_and_grad(loss)(state, batch)
    return [p - 0.1 * d for p, d in zip(state, g)], value

def arguments():
    return [jnp.ones((64, 64)) * 0.01] * 3, jnp.ones((128, 64))

step = jm.jit_step(train_step)
step(*arguments())
"""


@pytest.mark.parametrize("axes", ["fsdp=8", "data=2,fsdp=-1", "data=4,fsdp=2"])
def test_the_lines_of_a_plan_with_places_are_pasted(
    axes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLANNED)
    saved = tmp_path / "plan.yaml"
    ask = [
        "plan",
        "--search",
        "remat=no",
        "--search",
        "sharding=fsdp",
        "--mesh",
        axes,
        "--save",
        str(saved),
        str(script),
    ]
    assert main(ask) == 0
    printed = capsys.readouterr().out
    block = [line.strip() for line in printed.partition("To train so:\n")[2].partition("\n\n")[0].splitlines()]
    code = [line for line in block if not line.startswith("#")]
    assert pasted("train.named", printed) in code
    assert any(line.startswith(pasted("sharding.set_mesh", printed)) for line in code)
    names = run(PLANNED.rpartition("step = ")[0])
    state, batch = names["arguments"]()
    expected = jax.jit(names["train_step"])(state, batch)
    whole = on_one_device(state)
    before = jax.sharding.get_mesh()
    try:
        after = run("\n".join(code), **names | {"state": state, "batch": batch})
        ours = after["step"](after["state"], batch)
    finally:
        jax.set_mesh(before)
    close(ours, expected)
    assert on_one_device(ours[0]) < whole
