"""The module that a live array belongs to: from its path in the step's arguments, as Flax writes it, and nothing else."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

from jaxmem_callbacks.programs.steps.leaves import Leaf, user_leaves
from jaxmem_callbacks.records.oom import ModuleHolder, OomReport
from jaxmem_callbacks.recovery.reports.live_buffers import family_of, find_live_buffers, modules_of, same_form
from jaxmem_callbacks.writers.oom_report import oom_markdown

WIDTH = 40


class Block(linen.Module):
    @linen.compact
    def __call__(self, x):
        kernel = linen.with_partitioning(linen.initializers.ones, (None, None))
        return linen.BatchNorm(use_running_average=False)(linen.Dense(WIDTH, kernel_init=kernel)(x))


class Model(linen.Module):
    @linen.compact
    def __call__(self, x):
        for _ in range(3):
            x = Block()(x)
        return linen.Dense(7, name="head")(x)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(9, 4, rngs=rngs)
        self.blocks = nnx.List([nnx.BatchNorm(4, rngs=rngs) for _ in range(2)])


def linen_state():
    variables = Model().init(jax.random.key(0), jnp.ones((2, WIDTH)))
    tx = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    state = TrainState.create(apply_fn=None, params=variables["params"], tx=tx)
    return {"train": state, "batch_stats": variables["batch_stats"], "rng": jax.random.key(1)}


def modules_in(name, value):
    leaves = user_leaves(name, value)
    return {leaf.path: module for leaf in leaves if (module := modules_of(leaves).get(leaf.path))}


def test_arrays_of_linen_and_their_moments_belong_to_a_module():
    found = modules_in("state", linen_state())
    assert found["state['train'].params['Block_1']['Dense_0']['kernel'].value"] == "Block_1/Dense_0"
    assert found["state['train'].opt_state[1][0].mu['Block_1']['Dense_0']['kernel'].value"] == "Block_1/Dense_0"
    assert found["state['train'].params['head']['bias']"] == "head"
    assert found["state['batch_stats']['Block_2']['BatchNorm_0']['mean']"] == "Block_2/BatchNorm_0"
    assert not {path for path in found if path.endswith(("step", "count", "['rng']"))}
    whole = Model().init(jax.random.key(0), jnp.ones((2, WIDTH)))
    assert modules_in("params", whole)["params['params']['head']['bias']"] == "head"


@pytest.mark.parametrize("split", [False, True])
def test_arrays_of_nnx_and_their_moments_belong_to_a_module(split):
    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)
    if split:
        found = modules_in("state", nnx.split((net, optimizer))[1])
    else:
        found = {**modules_in("model", net), **modules_in("args", (net, optimizer))}
    ends = {module for path, module in found.items() if "embedding" in path}
    assert ends == {"embed"}
    assert {module for path, module in found.items() if "scale" in path} == {"blocks/0", "blocks/1"}
    moments = [path for path, module in found.items() if "'mu'" in path or ".mu" in path]
    assert len(moments) == 5, "an optimizer's moments belong to the module of their parameter"


def test_paths_through_no_module_have_none():
    adam = optax.adam(1.0)
    state = {
        "params": {"w": jnp.ones(2)},
        "opt": adam.init({"w": jnp.ones(2)}),
        "ema": {"decay": {"rate": jnp.ones(1)}},
    }
    assert modules_in("state", state) == {}
    assert modules_in("batch", {"image": {"left": jnp.ones(3)}}) == {}
    assert modules_in("params", {"block/~/linear": {"w": jnp.ones(2)}}) == {
        "params['block/~/linear']['w']": "block/~/linear"
    }


def test_modules_that_repeat_are_a_family():
    modules = [f"net/layer_{number}/{part}" for number in (0, 1) for part in ("attn_0", "mlp_0")] + ["net/head_0"]
    told = family_of(modules)
    assert told("net/layer_1/mlp_0") == ("net/layer_1", "net/layer_*")
    assert told("net/head_0") == ("net/head_0", "net/head_0")
    assert same_form(("net/layer_0/mlp_0", "net/layer_1/mlp_0")) == "net/layer_*/mlp_0"
    assert same_form(("net/layer_0/attn_0", "net/layer_1/mlp_0")) == ""
    assert same_form(("net/head_0", "net/layer_1/mlp_0")) == ""


def held(leaves, *, are_the_calls):
    """What is told of this test's own arrays among all that live here."""
    found = find_live_buffers(leaves, {}, are_the_calls=are_the_calls)
    return found, {each.name: each for each in found.modules}


@pytest.mark.parametrize("are_the_calls", [True, False])
def test_the_report_says_what_repeated_modules_hold_together(are_the_calls):
    rows = 2**17  # large enough to be listed in a process of many tests
    params = {f"Block_{number}": {"Dense_0": {"kernel": jnp.ones((rows, 3))}} for number in range(4)}
    params["head"] = {"kernel": jnp.ones((rows, 2))}
    state = {"params": params, "opt": optax.adam(1e-3).init(params)}
    leaves = user_leaves("state", state)
    found, modules = held(leaves, are_the_calls=are_the_calls)
    kernel, head = rows * 3 * 4, rows * 2 * 4
    kinds = {"optimizer state": 8 * kernel, "parameters": 4 * kernel}
    alike = {"optimizer state or parameters": 12 * kernel}
    assert modules["Block_*"] == ModuleHolder(
        name="Block_*", modules=4, count=12, bytes=12 * kernel, kinds=kinds if are_the_calls else alike
    )
    assert (modules["head"].count, modules["head"].bytes, modules["head"].modules) == (3, 3 * head, 1)
    mine = [each.module for each in found.holders if each.type_text == f"float32[{rows},3]"]
    assert mine[0] == ("Block_*/Dense_0" if not are_the_calls else mine[0])
    assert set(mine) == ({f"Block_{number}/Dense_0" for number in range(4)} if are_the_calls else {"Block_*/Dense_0"})
    report = OomReport(
        sentence="", cause="unknown", evidence="", time_s=0.0, process="", error_type="", error_text="",
        holders=found.holders, modules=found.modules, live_bytes=found.bytes, live_count=found.count,
    )  # fmt: skip
    text = oom_markdown(report)
    assert "| what | module | kind |" in text
    without = tuple(dataclasses.replace(each, module="") for each in found.holders)
    told = oom_markdown(dataclasses.replace(report, holders=without, modules=()))
    assert "| what | kind |" in told, "no column for what no array has"
    assert "| Block_* (4 modules) | 12 | 18.0 MiB | " in text
    assert "| float32[131072,3] | " in text
    del state, leaves


def test_an_array_that_may_be_of_several_modules_is_counted_to_none():
    value = jnp.ones((2**17, 5))
    names = {"one": {"kernel": value}, "other": {"kernel": value}}
    leaves = [
        Leaf(
            argument="params",
            path=f"params['{name}']['kernel']",
            kind="parameters",
            shape=value.shape,
            dtype=value.dtype,
        )
        for name in names
    ]
    found, modules = held(leaves, are_the_calls=False)
    (mine,) = [each for each in found.holders if each.type_text == "float32[131072,5]"]
    assert (mine.module, modules) == ("", {})


def test_thousands_of_arrays_of_one_shape_are_all_named():
    """In the time that there is for names: what is said of a shape is made once, and not for each array of it."""
    kept = [jax.device_put(np.ones((3, 1, 1, 7), np.float32)) for _ in range(4000)]
    form = {"kind": "parameters", "shape": kept[0].shape, "dtype": kept[0].dtype}
    paths = [f"params['Block_{number}']['scale']" for number in range(len(kept))]
    found, modules = held([Leaf(argument="params", path=path, **form) for path in paths], are_the_calls=False)
    assert (modules["Block_*"].modules, modules["Block_*"].count) == (4000, 4000)
    assert found.count >= len(kept)
