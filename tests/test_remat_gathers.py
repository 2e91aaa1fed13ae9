"""Under fsdp a loop gathers its slice of the weights, again where a step is computed again; nothing is divided by features."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.reading.hlo import collectives_of, parse_module
from jaxmem_callbacks.transforms.tracing import open_jaxpr, subjaxprs
from tests.comparisons import assert_close

LAYERS, WIDTH, ROWS = 6, 64, 1024
WHOLE = LAYERS * 2 * WIDTH * WIDTH * 2  # the looped weights in bfloat16, bytes


def loss_fn(params: Any, batch: Any) -> Any:
    def layer(carry: Any, slices: Any) -> tuple[Any, None]:
        w, noise = slices
        narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), w)
        hidden = jax.nn.gelu(carry @ narrow["up"])
        return carry + hidden @ narrow["down"] + w["bias"].astype(jnp.bfloat16) + noise.astype(jnp.bfloat16), None

    x = batch["x"].astype(jnp.bfloat16)
    x, _ = jax.lax.scan(layer, x, (params, batch["noise"]))
    return (x.astype(jnp.float32) ** 2).mean()


def train_step(params: Any, batch: Any) -> Any:
    loss, gradients = jm.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def arguments() -> tuple[Any, Any]:
    def draw(*shape: int) -> Any:
        return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape) / 8, "float32")

    weights = {"up": draw(LAYERS, WIDTH, WIDTH), "down": draw(LAYERS, WIDTH, WIDTH), "bias": draw(LAYERS, WIDTH)}
    return weights, {"x": draw(ROWS, WIDTH), "noise": draw(LAYERS, ROWS, WIDTH)}


def placed(policy: jm.StepPolicy, axes: str, **options: Any) -> tuple[Any, Any, Any]:
    mesh = jm.make_mesh(axes, **options)
    params, batch = arguments()
    rows = {"x": P(mesh.axis_names), "noise": P(None, mesh.axis_names)}
    batch = {name: jax.device_put(value, NamedSharding(mesh, rows[name])) for name, value in batch.items()}
    return mesh, jax.device_put(params, jm.infer_shardings(params, mesh, policy)), batch


def gathers(policy: jm.StepPolicy, axes: str, **options: Any) -> list[str]:
    """Dtypes and shapes of what loops gather, by the traced step."""
    mesh, params, batch = placed(policy, axes, **options)

    def constraints(jaxpr: Any) -> Any:
        for eqn in open_jaxpr(jaxpr).eqns:
            if eqn.primitive.name == "sharding_constraint" and len(eqn.outvars[0].aval.shape) < 3:
                yield f"{eqn.outvars[0].aval.dtype}{list(eqn.outvars[0].aval.shape)}"
            for body in subjaxprs(eqn):
                yield from constraints(body)

    with jax.set_mesh(mesh):
        return list(constraints(jax.make_jaxpr(jm.apply_policy(train_step, policy))(params, batch)))


FULL, PLAIN = jm.StepPolicy(remat="full", sharding="fsdp"), jm.StepPolicy(sharding="fsdp")


@pytest.mark.core
@pytest.mark.parametrize("policy", [FULL, PLAIN], ids=["full", "none"])
def test_weights_are_gathered_behind_their_casts_and_the_batch_is_not(policy: jm.StepPolicy) -> None:
    found = gathers(policy, "fsdp=8")
    assert set(found) == {"bfloat16[64, 64]", "bfloat16[64]"}  # neither the noise of the batch nor anything in float32
    assert set(gathers(policy, "data=2,fsdp=4")) == set(found)


@pytest.mark.parametrize(("policy", "axes"), [
    (jm.StepPolicy(remat="full", sharding="zero1"), "fsdp=8"),
    (FULL, "fsdp=4,tensor=2"), (PLAIN, "fsdp=4,tensor=2"), (jm.StepPolicy(sharding="replicate"), "fsdp=8"),
], ids=str)  # fmt: skip
def test_other_shardings_gather_nothing_nor_does_fsdp_where_a_slice_would_stay_divided(
    policy: jm.StepPolicy, axes: str
) -> None:
    assert gathers(policy, axes) == []


def test_on_explicit_axes_the_users_types_decide() -> None:
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        text = str(jax.make_jaxpr(jm.apply_policy(train_step, FULL))(*arguments()))
    assert "sharding_constraint" not in text


@pytest.mark.core
@pytest.mark.parametrize(
    ("policy", "wanted"), [(FULL, jm.StepPolicy(remat="full")), (PLAIN, jm.StepPolicy())], ids=["full", "none"]
)
def test_the_numbers_stay_and_only_weights_and_their_gradients_travel(
    policy: jm.StepPolicy, wanted: jm.StepPolicy
) -> None:
    mesh, params, batch = placed(policy, "fsdp=8")
    there, loss_there = jax.jit(jm.apply_policy(train_step, wanted))(*arguments())
    step = jm.jit_step(train_step, policy, donate_argnames=())
    with jax.set_mesh(mesh):
        compiled = step.lower(params, batch).compile()
        updated, loss = step(params, batch)
    assert_close(jax.device_get(loss), jax.device_get(loss_there))
    change = jax.tree.map(
        lambda new, old: np.asarray(new) - np.asarray(old), (updated, there), (params, arguments()[0])
    )
    for ours, theirs in zip(*map(jax.tree.leaves, change), strict=True):
        assert np.linalg.norm(ours - theirs) <= 2e-2 * np.linalg.norm(theirs)  # bfloat16 sums in another order
    hlo = compiled.as_text()
    assert "all-to-all" not in hlo
    # Gathered for the forward pass and for the backward one, and gradients summed once; a CPU computes bfloat16 in float32.
    assert collectives_of(parse_module(hlo), 8).moved_bytes < 1.2 * (2 * 2 * WHOLE + 2 * 2 * WHOLE)


@pytest.mark.core
def test_what_the_plain_step_keeps_for_the_backward_pass_is_no_weight() -> None:
    """What is gathered would be every layer's whole weights on every device."""
    mesh, params, batch = placed(PLAIN, "fsdp=8")

    def kept(policy: jm.StepPolicy) -> list[tuple[int, ...]]:
        with jax.set_mesh(mesh):
            traced: Any = jax.make_jaxpr(jm.apply_policy(train_step, policy))(params, batch)
        loop = next(eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "scan")
        return sorted(var.aval.shape for var in loop.outvars)

    matrix = (LAYERS, WIDTH, WIDTH)
    assert matrix not in kept(PLAIN)
    assert kept(PLAIN) == [shape for shape in kept(jm.StepPolicy()) if shape != matrix]  # and no more of anything else


def test_inside_checkpoints_of_the_users_own_they_are_gathered_too() -> None:
    mesh, params, batch = placed(PLAIN, "fsdp=8")

    def own_loss(params: Any, batch: Any) -> Any:
        @jax.checkpoint
        def layer(carry: Any, w: Any) -> tuple[Any, None]:
            return carry + jax.nn.gelu(carry @ w["up"]) @ w["down"] + w["bias"], None

        return (jax.lax.scan(layer, batch["x"], params)[0] ** 2).mean()

    def gradients(params: Any, batch: Any) -> Any:
        return jm.value_and_grad(own_loss)(params, batch)

    def kept(traced: Any) -> list[tuple[int, ...]]:
        return [var.aval.shape for eqn in traced.eqns if eqn.primitive.name == "scan" for var in eqn.outvars]

    with jax.set_mesh(mesh):
        plain = jax.jit(gradients).trace(params, batch)
        ours = jax.jit(jm.apply_policy(gradients, PLAIN)).trace(params, batch)
        assert str(ours.jaxpr).count("sharding_constraint") >= 3
        assert kept(ours.jaxpr) == kept(plain.jaxpr)
        assert_close(ours.lower().compile()(params, batch), plain.lower().compile()(params, batch))


def test_a_plain_loss_with_effects_is_left_as_it_is() -> None:
    mesh, params, batch = placed(PLAIN, "fsdp=8")
    calls = []

    def reporting(params: Any, batch: Any) -> Any:
        loss = loss_fn(params, batch)
        jax.debug.callback(calls.append, loss)
        return loss

    with jax.set_mesh(mesh):
        step = jax.jit(jm.apply_policy(jm.value_and_grad(reporting), PLAIN))
        assert "sharding_constraint" not in str(step.trace(params, batch).jaxpr)
        jax.block_until_ready(step(params, batch))
        jax.effects_barrier()
    assert len(calls) == 1


def test_without_a_mesh_set_the_one_of_the_states_shardings_is_used() -> None:
    _, params, batch = placed(FULL, "fsdp=8")
    wanted = jax.tree.map(lambda leaf: leaf.sharding, params)
    for policy in (FULL, PLAIN):
        traced = jm.jit_step(train_step, policy, state_shardings=wanted).trace(params, batch)
        assert "sharding_constraint" in str(traced.jaxpr)


HEADS, LENGTH, VOCABULARY = 4, 32, 1024


def attention_loss(params: Any, batch: Any) -> Any:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        q, k, v = (jnp.einsum("btw,whd->bthd", x, w[name]) for name in "qkv")
        shares = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        x = x + jnp.einsum("bthd,hdw->btw", jnp.einsum("bhts,bshd->bthd", shares, v), w["out"])
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    return (jax.lax.scan(layer, params["embed"][batch], params["layers"])[0] ** 2).mean()


def test_beside_a_tensor_axis_weights_keep_their_part_of_it(capfd: pytest.CaptureFixture[str]) -> None:
    """Left to XLA, activations go between places that it cannot connect: it makes them whole on every device, and says so."""
    width = 2 * WIDTH
    shapes = dict.fromkeys("qkv", (3, width, HEADS, width // HEADS)) | {"out": (3, HEADS, width // HEADS, width)}
    shapes |= {"up": (3, width, 4 * width), "down": (3, 4 * width, width)}
    draw = np.random.default_rng(0)
    layers = {name: jnp.asarray(draw.standard_normal(shape) / 32, "float32") for name, shape in shapes.items()}
    params = {"embed": jnp.asarray(draw.standard_normal((VOCABULARY, width)), "float32"), "layers": layers}
    mesh, policy = jm.make_mesh("fsdp=4,tensor=2"), jm.StepPolicy(remat="full", sharding="fsdp_tensor")
    places = jm.infer_shardings(params, mesh, policy)
    batch = jax.device_put(jnp.asarray(draw.integers(0, VOCABULARY, (16, LENGTH))), NamedSharding(mesh, P("fsdp")))
    params = jax.device_put(params, places)

    def compiled(policy: jm.StepPolicy) -> tuple[Any, str]:
        def step(params: Any, batch: Any) -> Any:
            return jm.value_and_grad(attention_loss)(params, batch)

        with jax.set_mesh(mesh):
            lowered = jax.jit(jm.apply_policy(step, policy), out_shardings=(None, places)).lower(params, batch)
            made = lowered.compile()
        return made, capfd.readouterr().err

    left, complaints = compiled(jm.StepPolicy(remat="full"))
    if jax.__version_info__ >= (0, 11):  # XLA's log of older lines says nothing of it
        assert "Involuntary full rematerialization" in complaints
    ours, complaints = compiled(policy)
    assert "Involuntary full rematerialization" not in complaints
    moved, moved_left = (collectives_of(parse_module(each.as_text()), 8).moved_bytes for each in (ours, left))
    assert moved < 0.6 * moved_left
    assert ours.memory_analysis().temp_size_in_bytes < 0.9 * left.memory_analysis().temp_size_in_bytes
    assert_close(jax.device_get(ours(params, batch)), jax.device_get(left(params, batch)))
