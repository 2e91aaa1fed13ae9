"""A verdict of a plan leads with what stops it and what fits; every line of it was pasted, and no search is advised in vain."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.plan import search_of
from jaxmem_callbacks.planning.verdict import unfit_reason
from tests.pasting import pasted, value
from tests.sample_plans import sentences
from tests.target_step import needs_compiler, shape

ELEMENTS = 5 * 10**9  # two arrays of 20 GB, read and made anew: 80 of the 85 GB of the card
PAIR, RATE = {"w": shape(ELEMENTS), "b": shape(ELEMENTS)}, shape()


def descend(agent, rate):
    value, g = jax.value_and_grad(lambda a: jnp.sum(a["w"] * rate) + jnp.sum(a["b"] ** 2))(agent)
    return jax.tree.map(lambda p, d: p - 1e-3 * d, agent, g), value


class Trainer:
    def __init__(self, scale):
        self.scale = scale

    def step(self, net, rate):
        g = jax.grad(lambda n: self.scale * sum(jnp.sum(jnp.sin(leaf) * rate) for leaf in n.values()))(net)
        return jax.tree.map(lambda p, d: p - d, net, g)


def scaled(scale, a, rate):
    return jax.tree.map(lambda p: p * (1 - scale) + jax.grad(lambda q: jnp.sum(q**2) * rate)(p), a)


LARGE = {
    "a function": jax.jit(descend),
    "a method": jax.jit(Trainer(2.0).step),
    "a partial": jax.jit(functools.partial(scaled, 0.5)),
}


@functools.cache
def planned(kind):
    needs_compiler("h100_sxm")
    return jm.plan(LARGE[kind], PAIR, RATE, target="h100_sxm", progress=False, search={"remat": False})


@pytest.mark.targets
@pytest.mark.recorded
@pytest.mark.parametrize("kind", LARGE)
def test_a_larger_share_of_the_gpu_that_is_printed_fits(kind, monkeypatch):
    plan = planned(kind)
    assert plan.chosen.fits is False
    name, _, share = pasted("plan.share", plan).partition("=")
    assert 0.75 < float(share) <= 0.95
    monkeypatch.setenv(name, share)
    again = jm.plan(LARGE[kind], PAIR, RATE, target="h100_sxm", progress=False, search={"remat": False})
    assert again.chosen.fits is True
    assert again.chosen.step_bytes == plan.chosen.step_bytes


@pytest.mark.targets
@pytest.mark.recorded
def test_the_donation_that_fits_leads_and_is_the_first_line_to_write():
    plan = planned("a function")
    lines = [line for line in str(plan).splitlines() if line.startswith(("->", "agent:", "It fits", "Parameters"))]
    assert [line.split(":")[0].split()[0] for line in lines] == ["->", "agent", "It", "Parameters"]
    option = re.search(r"Write (donate_argnames=\(.*?\)) in the jax\.jit of descend\. No", sentences(plan))[1]
    step = value(f"jax.jit(descend, {option})", jax=jax, descend=descend)
    again = jm.plan(step, PAIR, RATE, target="h100_sxm", progress=False, search={"remat": False})
    assert again.chosen.fits is True
    assert again.chosen.step_bytes == plan.chosen.step_bytes - 8 * ELEMENTS
    assert "Parameters and optimizer state alone are 37.3 GiB. Or plan for a smaller batch" in sentences(plan)
    assert "Donating would save 37.3 GiB" in unfit_reason(plan.record)


@pytest.mark.targets
@pytest.mark.recorded
def test_a_share_that_leaves_no_room_for_cuda_is_not_advised():
    needs_compiler("h100_sxm")
    nearly_all = {"w": shape(10**9), "b": shape(93 * 10**8)}
    plan = jm.plan(jax.jit(descend), nearly_all, RATE, target="h100_sxm", progress=False, search={"remat": False})
    assert plan.chosen.fits is False
    assert "larger share" not in str(plan)


W, X = [jnp.ones((64, 64)) / 64] * 6, jnp.ones((512, 64))


def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def update(params, g):
    return jax.tree.map(lambda p, d: p - 0.1 * d, params, g)


def given(params, x):
    value, g = jm.value_and_grad(loss)(params, x)
    return update(params, g), value


def by_keyword(params, *, batch):
    return update(params, jm.grad(loss)(params, batch["rows"]))


def with_labels(state, rows):
    def compared(net, rows):
        h = functools.reduce(lambda h, w: jnp.tanh(h @ w), net, rows["x"])
        return ((h.sum(-1) - rows["y"]) ** 2).mean()

    return update(state, jm.grad(compared)(state, rows))


def closed_over(params, x):
    value, g = jm.value_and_grad(lambda p: loss(p, x))(params)
    return update(params, g), value


def over_the_batch(params, x):
    def normalized(p, x):
        h = x @ p[0]
        return (((h - h.mean(0)) / (h.std(0) + 1e-3)) ** 3).mean() + 0 * loss(p, x)

    return update(params, jm.grad(normalized)(params, x))


def out_of_reach(params, x):
    return update(params, jax.grad(loss)(params, x))


def unfit(step, *args, **kwargs):
    plan = jm.plan(step, *args, budget="400KiB", progress=False, search={"remat": False}, **kwargs)
    assert plan.chosen.fits is False
    return plan


@pytest.mark.core
@pytest.mark.parametrize(
    ("step", "args", "kwargs"),
    [(given, (W, X), {}), (by_keyword, (W,), {"batch": {"rows": X}}), (with_labels, (W, {"x": X, "y": X[:, 0]}), {})],
)
def test_a_search_that_is_printed_can_be_had_and_needs_less(step, args, kwargs):
    plan = unfit(step, *args, **kwargs)
    option = pasted("plan.search", plan).removeprefix("--search ")
    again = jm.plan(step, *args, budget="400KiB", progress=False, search=search_of([option, "remat=no"]), **kwargs)
    least = min(each.step_bytes for each in again.candidates if each.policy.microbatches > 1)
    assert least < plan.chosen.step_bytes


@pytest.mark.core
@pytest.mark.parametrize("step", [closed_over, over_the_batch, out_of_reach])
def test_microbatches_are_not_advised_to_losses_that_cannot_have_them(step):
    plan = unfit(step, W, X)
    assert "--search" not in str(plan)
    assert "Try a smaller batch, more devices or a larger one." in sentences(plan)


@pytest.mark.core
def test_what_stops_the_policies_stands_above_all_else():
    plan = jm.plan(out_of_reach, W, X, budget="400KiB", progress=False)
    after = str(plan).partition("this comes nearest.\n")[2]
    assert after.startswith("Remat was not tried: The policy remat='full' would do nothing: out_of_reach never calls")
    assert str(plan).count("Remat was not tried") == 1
    assert "Remat was not tried" in unfit_reason(plan.record)


@pytest.mark.core
def test_what_stays_beside_a_step_that_fits_without_it_is_asked_about():
    needed = jm.step_memory(given, W, X).step_bytes
    plan = jm.plan(given, W, X, budget=f"{needed}B", resident=["1MiB"], progress=False, search={"remat": False})
    assert "Without the 1.0 MiB that stay beside the step it fits: are they needed while it runs?" in sentences(plan)
