"""`own_checkpoints="replace"`: a loss without its author's checkpoints, the same numbers, and the policy in their place."""

from __future__ import annotations

import functools
import itertools
import re
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import LossRefusedError, PolicyError
from jaxmem_callbacks.transforms.own_checkpoints import own_checkpoints, without_checkpoints
from jaxmem_callbacks.transforms.tracing import close, consts_of, derive, flatten, open_jaxpr, subjaxprs, variables
from tests import pasting
from tests.checkpointed_losses import (
    FORMS,
    HIDDEN,
    INPUTS,
    LAYERS,
    ROWS,
    STACK,
    WIDTH,
    block,
    in_a_scan,
    in_python,
    layers_of,
    nested,
)
from tests.comparisons import assert_close, stored_bytes
from tests.losses import SAMPLES

pytestmark = pytest.mark.core
REPLACE = jm.StepPolicy(remat="full", own_checkpoints="replace")
# Forms whose trace is not that of the loss without checkpoints: a gradient inside computed some of it again already.
OTHER_TRACE = {"of_slopes"}


def operations(loss: Any, *args: Any) -> list[Any]:
    """What a loss computes, in order: each operation, the shapes that it makes, and what the functions inside it compute."""

    def of(eqns: Any) -> list[Any]:
        made = ((eqn, [str(var.aval) for var in eqn.outvars]) for eqn in eqns)
        return [(eqn.primitive.name, shapes, [of(body.eqns) for body in subjaxprs(eqn)]) for eqn, shapes in made]

    return of(flatten(jax.make_jaxpr(loss)(*args)).eqns)


def step_of(loss: Any, value_and_grad: Any = jm.value_and_grad) -> Any:
    def train_step(params: Any, x: Any) -> Any:
        value, gradients = value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return train_step


@pytest.mark.parametrize("name", sorted(FORMS))
def test_a_loss_without_its_checkpoints_is_the_loss_written_without(name: str) -> None:
    written, without, params = FORMS[name]()
    assert own_checkpoints(jax.make_jaxpr(written)(params, INPUTS).eqns), "else this proves nothing"
    replaced = jm.remat(written, "none", own_checkpoints="replace")
    assert own_checkpoints(jax.make_jaxpr(replaced)(params, INPUTS).eqns) == ()
    if name not in OTHER_TRACE:
        assert operations(replaced, params, INPUTS) == operations(without, params, INPUTS)
        ours, theirs = jm.remat(written, own_checkpoints="replace"), jm.remat(without)
        assert operations(ours, params, INPUTS) == operations(theirs, params, INPUTS)


@pytest.mark.parametrize("name", sorted(FORMS))
def test_loss_and_gradients_are_the_same(name: str) -> None:
    written, without, params = FORMS[name]()
    wanted = jax.jit(jax.value_and_grad(without))(params, INPUTS)
    plainly = jax.jit(jax.value_and_grad(jm.remat(written, "none", own_checkpoints="replace")))(params, INPUTS)
    assert_close(plainly, wanted)
    for policy in (REPLACE, jm.StepPolicy(remat="dots", own_checkpoints="replace")):
        step = jm.apply_policy(jm.value_and_grad(written), policy)
        assert_close(jax.jit(step)(params, INPUTS), wanted)


def test_dropout_keeps_its_masks() -> None:
    written, _, params = FORMS["dropped"]()
    masks = [
        jax.value_and_grad(loss)(params, INPUTS) for loss in (written, jm.remat(written, own_checkpoints="replace"))
    ]
    assert_close(*masks)
    other = jax.value_and_grad(written)(params, INPUTS, jax.random.key(9))
    assert abs(float(other[0] - masks[0][0])) > 1e-4, "else every key gives the same masks"


def chunked(loss: Any, bounds: list[float], policy: Any) -> Any:
    """A loss of arrays with checkpoints around stretches of its equations."""

    def checkpointed(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(loss, return_shape=True)(*args)
        jaxpr = open_jaxpr(closed)
        places = sorted({0, len(jaxpr.eqns), *(int(bound * len(jaxpr.eqns)) for bound in bounds)})
        known = dict(zip(jaxpr.constvars, consts_of(closed), strict=True))
        known |= dict(zip(jaxpr.invars, jax.tree.leaves(args), strict=True))
        for start, end in itertools.pairwise(places):
            eqns = jaxpr.eqns[start:end]
            made = {var for eqn in eqns for var in eqn.outvars}
            taken = list(dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars) if v not in made))
            later = [v for eqn in jaxpr.eqns[end:] for v in variables(eqn.invars)] + variables(jaxpr.outvars)
            given_on = [v for v in dict.fromkeys(later) if v in made]
            body = core.jaxpr_as_fun(close(derive(closed, invars=taken, outvars=given_on, eqns=eqns)))
            known |= zip(given_on, jax.checkpoint(body, policy=policy)(*(known[v] for v in taken)), strict=True)
        values = [known[atom] if atom in variables(jaxpr.outvars) else atom.val for atom in jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(shape), values)

    return checkpointed


PLACES = st.lists(st.floats(0.05, 0.95), min_size=1, max_size=4)
KINDS = st.sampled_from(
    [None, jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.save_only_these_names("hidden")]
)
# Each a loss of arrays alone; the first three hold every kind of equation with a function inside.
ARRAYS = (
    "while",
    "cond",
    "custom_rules",
    "named",
    "scanned",
    "reversed_scan",
    "own_remat",
    "several_losses",
    "shard_mapped",
)


@functools.cache
def plainly(name: str) -> tuple[Any, Any, Any]:
    """A loss, its equations without its author's checkpoints, and what they compute."""
    sample = SAMPLES[name]()
    args = (sample.params, *sample.rest)
    plain = without_checkpoints(jax.make_jaxpr(sample.loss)(*args))
    return sample, plain, jax.jit(core.jaxpr_as_fun(plain))(*jax.tree.leaves(args))


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(ARRAYS), bounds=PLACES, more=PLACES, policy=KINDS)
def test_checkpoints_around_any_stretches_of_any_loss_leave_no_trace(
    name: str, bounds: list[float], more: list[float], policy: Any
) -> None:
    sample, plain, wanted = plainly(name)
    args = (sample.params, *sample.rest)
    inner = chunked(sample.loss, bounds, policy)
    written = chunked(inner, more, None)  # checkpoints around checkpoints
    closed = jax.make_jaxpr(written)(*args)
    assert own_checkpoints(closed.eqns)
    without = without_checkpoints(closed)
    assert own_checkpoints(open_jaxpr(without).eqns) == ()
    assert without_checkpoints(without) is without
    assert len(flatten(without).eqns) == len(flatten(plain).eqns)
    assert_close(jax.jit(core.jaxpr_as_fun(without))(*jax.tree.leaves(args)), wanted)


@pytest.mark.parametrize("name", ["custom_rules", "scanned", "dropout"])
def test_a_chunked_loss_trains_as_before(name: str) -> None:
    sample = SAMPLES[name]()
    written = chunked(sample.loss, [0.2, 0.5, 0.8], None)
    ours, theirs = (
        jax.jit(jm.apply_policy(lambda p, *rest, f=f: jm.value_and_grad(f)(p, *rest), policy))(
            sample.params, *sample.rest
        )
        for f, policy in ((written, REPLACE), (sample.loss, jm.StepPolicy()))
    )
    assert_close(ours, theirs)


def test_names_inside_are_within_the_policys_reach() -> None:
    written = in_a_scan(jax.checkpoint)
    with pytest.raises(PolicyError, match="only inside checkpoints of its own"):
        jax.grad(jm.remat(written, save=("hidden",)))(STACK, INPUTS)
    kept, not_kept = (jm.remat(written, save=save, own_checkpoints="replace") for save in (("hidden",), ()))
    assert stored_bytes(kept, STACK, INPUTS) - stored_bytes(not_kept, STACK, INPUTS) == LAYERS * ROWS * HIDDEN * 4


def test_reports_inside_come_once(capfd: pytest.CaptureFixture[str]) -> None:
    def reporting(x: Any, p: Any) -> Any:
        jax.debug.print("seen {m}", m=x.mean())
        return block(x, p)

    def loss(stack: Any, x: Any) -> Any:
        for p in layers_of(stack):
            x = jax.checkpoint(reporting)(x, p)
        return (x**2).mean()

    for remat in ("none", "full"):
        jax.block_until_ready(jax.jit(jax.grad(jm.remat(loss, remat, own_checkpoints="replace")))(STACK, INPUTS))
        jax.effects_barrier()
        assert capfd.readouterr().out.count("seen") == len(layers_of(STACK))


class Net(nnx.Module):
    """Blocks with dropout and batch statistics, under `nnx.remat` or not."""

    def __init__(self, rngs: nnx.Rngs, *, checkpointed: bool) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])
        self.norm, self.dropout = nnx.BatchNorm(WIDTH, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
        self.checkpointed = checkpointed

    def __call__(self, x: Any) -> Any:
        def run(net: Net, x: Any) -> Any:
            for layer in net.layers:
                x = jnp.tanh(layer(x))
            return net.dropout(net.norm(x))

        return (nnx.remat(run) if self.checkpointed else run)(self, x)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_nnx_state_moves_as_without_checkpoints(remat: str) -> None:
    def run(policy: jm.StepPolicy, *, checkpointed: bool) -> Any:
        net = Net(nnx.Rngs(0), checkpointed=checkpointed)

        @nnx.jit
        def step(net: Net, x: Any) -> Any:
            def gradients(net: Net) -> Any:
                return jm.nnx.value_and_grad(lambda net: (net(x) ** 2).mean())(net)

            return jm.apply_policy(gradients, policy)(net)

        values = [step(net, INPUTS) for _ in range(2)]
        state = nnx.to_pure_dict(nnx.state(net))
        return values, state["norm"], state["dropout"]["rngs"]["count"]

    ours = run(jm.StepPolicy(remat=remat, own_checkpoints="replace"), checkpointed=True)
    theirs = run(jm.StepPolicy(), checkpointed=False)
    assert_close(ours, theirs)
    assert ours[-1] == 2


def test_over_microbatches_and_under_jit_step() -> None:
    written, without, params = FORMS["scan"]()
    policy = jm.StepPolicy(remat="full", own_checkpoints="replace", microbatches=2)
    ours = jm.jit_step(step_of(written), policy, donate_argnames=())(params, INPUTS)
    assert_close(ours, jax.jit(step_of(without, jax.value_and_grad))(params, INPUTS))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("by_block", r"checkpointed_losses\.py:\d+ around block, 4 times"),
        ("scan", r"checkpointed_losses\.py:\d+, 4 times"),
        ("nested", r"checkpointed_losses\.py:\d+ around pair, 2 times; .*around block, 4 times"),
        ("whole", r"checkpointed_losses\.py:\d+ around loss, once"),
        ("linen_scan", r"checkpointed_losses\.py:\d+, 4 times"),
        ("equinox_scan", r"checkpointed_losses\.py:\d+, 4 times"),
    ],
)
def test_places_are_the_users_own_lines(name: str, place: str) -> None:
    written, _, params = FORMS[name]()
    step = jm.jit_step(step_of(written), jm.StepPolicy(remat="full"))
    try:
        told = " ".join(jm.step_memory(step, params, INPUTS).warnings)
    except LossRefusedError as error:  # there was nothing else to cut
        told = str(error)
    assert re.search(rf"The loss has its own checkpoints \([^(]*{place}", told), told


def test_what_would_do_nothing_is_refused() -> None:
    without, written = in_python(lambda f: f), in_a_scan(jax.checkpoint)
    with pytest.raises(
        PolicyError, match=r"own_checkpoints='replace' would do nothing: loss has no checkpoints of its own"
    ):
        jax.grad(jm.remat(without, own_checkpoints="replace"))(STACK, INPUTS)
    for train in (jm.jit_step, jm.apply_policy):
        with pytest.raises(PolicyError, match=r"no loss of train_step has checkpoints of its own. Leave it out"):
            train(step_of(without), REPLACE)(STACK, INPUTS)
    with pytest.raises(PolicyError, match=r"own_checkpoints='replace' would do nothing: train_step never calls"):
        jm.apply_policy(step_of(written, jax.value_and_grad), jm.StepPolicy(own_checkpoints="replace"))(STACK, INPUTS)
    words = r"remat='full' would do nothing. The loss has its own checkpoints \(.*py:\d+, 4 times\).*own_checkpoints='replace'"
    with pytest.raises(LossRefusedError, match=words) as refused:
        jm.apply_policy(step_of(written), jm.StepPolicy(remat="full"))(STACK, INPUTS)
    advised = re.findall(r"own_checkpoints='\w+'", str(refused.value))[0]
    policy = pasting.value(f"jm.StepPolicy(remat='full', {advised})", jm=jm)
    theirs = jm.apply_policy(step_of(written), jm.StepPolicy())(STACK, INPUTS)
    assert_close(jm.apply_policy(step_of(written), policy)(STACK, INPUTS), theirs)
    with pytest.raises(
        PolicyError, match=r"own_checkpoints='replaced'. Did you mean `replace`\? Expected 'keep'.*or 'replace'"
    ):
        jm.StepPolicy(own_checkpoints="replaced")  # pyright: ignore[reportArgumentType]


def test_of_several_losses_one_may_have_none() -> None:
    """A step is refused only where none of its losses has checkpoints."""

    def train_step(params: Any, x: Any) -> Any:
        return [jm.grad(loss)(params, x) for loss in (in_python(lambda f: f), nested(jax.checkpoint))]

    ours = jm.apply_policy(train_step, REPLACE)(STACK, INPUTS)
    assert_close(ours, jm.apply_policy(train_step, jm.StepPolicy())(STACK, INPUTS))


def test_a_working_folder_that_is_gone_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    written, _, params = FORMS["by_block"]()
    found = own_checkpoints(jax.make_jaxpr(written)(params, INPUTS).eqns)
    assert found
    assert all(each.place.startswith(str(Path(__file__).parent)) for each in found)


WRITTEN = """
import functools
import flax.linen as nn
import jax, jax.numpy as jnp
from jax import checkpoint as ckpt
from jax.ad_checkpoint import checkpoint_name

@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("mid"))  # decorated
def decorated(p, h):
    return h + checkpoint_name(jnp.tanh(h @ p), "mid") @ p

pair = jax.checkpoint(lambda p, h: decorated(p, decorated(p, h)))  # of a lambda

def block(p, h):
    return jnp.tanh(h @ p)

assigned = ckpt(block)  # assigned
with_policy = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)

@with_policy  # by a name of its own
def third(p, h):
    return jnp.cos(h @ p)

def loss(p, h):
    h = pair(p, h)
    h = assigned(p, h)
    return third(p, h).sum()

class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.tanh(nn.Dense(8)(x))

Remat = nn.remat(Block)  # a class

@nn.remat  # a decorated class
class Other(Block):
    pass

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Remat()(x)
        return Other()(x)
"""


def test_a_checkpoint_is_told_by_the_line_on_which_it_is_written(tmp_path: Path) -> None:
    script = tmp_path / "losses.py"
    script.write_text(WRITTEN)
    names = runpy.run_path(str(script))
    p, h, net = jnp.ones((8, 8)), jnp.ones((4, 8)), names["Net"]()
    variables = net.init(jax.random.key(0), h)
    lines = WRITTEN.splitlines()

    def told(function: Any, *args: Any) -> set[tuple[str, str]]:
        found = own_checkpoints(jax.make_jaxpr(function)(*args).eqns)
        return {(each.function, lines[int(each.place.rpartition(":")[2]) - 1].partition("  # ")[2]) for each in found}

    assert told(names["loss"], p, h) == {
        ("", "of a lambda"),
        ("decorated", "decorated"),
        ("block", "assigned"),
        ("third", "by a name of its own"),
    }
    assert told(net.apply, variables, h) == {("", "a class"), ("", "a decorated class")}
