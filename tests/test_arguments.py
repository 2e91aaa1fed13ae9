"""Every argument of every public name, given things of other types: each refusal is the library's own and names the argument."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxmem_callbacks as jm
from tests import sample_plans

pytestmark = pytest.mark.core
HERE = Path(jm.__file__).parent


def loss(params, batch):
    return ((batch @ params) ** 2).mean()


def train_step(state, batch):
    value, grads = jm.value_and_grad(loss)(state, batch)
    return state - 0.1 * grads, {"loss": value}


def given() -> tuple[jax.Array, jax.Array]:
    return jnp.ones((4, 4)), jnp.ones((2, 4))


def stepped(recovery: jm.Recovery) -> None:
    recovery.step(0, *given())


def entered(guard: Any) -> None:
    with guard:
        pass


def closed(monitor: jm.MemoryMonitor) -> None:
    with monitor:
        monitor(0, {"loss": 1.0})


# Name -> what a right call needs, and what is done with the result; a name alone is a call without arguments.
CALLS: dict[str, tuple[dict[str, Any], Callable[[Any], object]]] = {
    "CollectingWriter": ({}, repr),
    "CsvWriter": ({"path": "memory.csv"}, lambda writer: closed(jm.MemoryMonitor(writer=writer))),
    "MemoryMonitor": ({}, closed),
    "MemoryMonitor.wrap": ({"train_step": train_step}, lambda step: step(*given())),
    "Plan": ({"record": sample_plans.six()}, str),
    "Preset": ({"name": "mine"}, repr),
    "PrometheusWriter": ({"path": "memory.prom"}, lambda writer: closed(jm.MemoryMonitor(writer=writer))),
    "Recovery": ({"train_step": train_step}, stepped),
    "ScriptedProbe": ({"script": []}, lambda probe: probe.read(0)),
    "StepPolicy": ({}, repr),
    "apply_environment": ({"preset": "monitor_only"}, repr),
    "apply_policy": ({"train_step": train_step, "policy": "full"}, lambda step: step(*given())),
    "as_writer": ({"obj": lambda step, scalars: None}, repr),
    "defragment": ({"tree": {}}, repr),
    "grad": ({"loss": loss}, lambda function: function(*given())),
    "infer_shardings": ({"state": given()[0], "mesh": jm.make_mesh({"data": -1}), "policy": "zero1"}, repr),
    "jit_step": ({"train_step": train_step}, lambda step: step(*given())),
    "list_presets": ({}, repr),
    "load_plan": ({"path": "plan.json"}, repr),
    "load_preset": ({}, repr),
    "make_mesh": ({"axes": {"data": -1}}, repr),
    "oom_guard": ({}, entered),
    "parse_oom": ({"exception_or_text": ""}, repr),
    "place_state": ({"train_step": train_step}, repr),
    "plan": ({"train_step": train_step}, repr),
    "prefetch": ({"iterable": [jnp.ones(2)]}, list),
    "remat": ({"loss": loss}, lambda function: function(*given())),
    "simulate_allocator": (
        {"trace": "losses_in_a_list", "settings": "gpu_growth", "device_memory": "80GiB"},
        repr,
    ),
    "step_memory": ({"step": train_step}, str),
    "value_and_grad": ({"loss": loss}, lambda function: function(*given())),
    "weighted": ({"total": 1.0, "weight": 1.0}, repr),
    "nnx.value_and_grad": ({"loss": loss}, repr),
    "nnx.remat": ({"model": nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "pattern": "none"}, repr),
    "eqx.value_and_grad": ({"loss": loss}, lambda function: function(*given())),
    "eqx.grad": ({"loss": loss}, lambda function: function(*given())),
    "linen.remat": ({"apply": loss, "pattern": "block"}, repr),
}
# What an error may call an argument by besides its name.
ALSO = {
    ("linen.remat", "pattern"): "policy",
    ("nnx.remat", "pattern"): "policy",
    ("load_plan", "path"): "cannot be read",
    ("make_mesh", "axes"): "axis",
    ("remat", "save"): "no value named",
    ("remat", "offload"): "no value named",
    ("plan", "train_step"): "its step",
    ("simulate_allocator", "settings"): "preset",
    ("simulate_allocator", "device_memory"): "target",
}
# A loss without the aux that was said, and batches that are no arrays, fail in JAX's own words.
LEFT_TO_JAX = {"has_aux", "iterable"}
DECORATORS = {"eqx.value_and_grad", "eqx.grad"}  # without a loss
INTERNAL = {"StepMemory"}  # made by `jm.step_memory` alone
POSITIONAL = {"place_state", "plan", "step_memory"}  # what follows the step are its own arguments
WRONG = (
    3,
    -1,
    2.5,
    float("nan"),
    True,
    None,
    "no such thing",
    "",
    b"x",
    "a\0b",
    [3],
    ["full"],
    {"a": 3},
    object(),
    "\uff12",
)


def public() -> dict[str, Any]:
    """Each public name that can be called, also those of the modules, and what a monitor makes of a function."""
    found: dict[str, Any] = {"MemoryMonitor.wrap": jm.MemoryMonitor().wrap}
    for name in jm.__all__:
        value = getattr(jm, name)
        inner = {f"{name}.{each}": getattr(value, each) for each in getattr(value, "__all__", ())}
        found |= inner or {name: value}
    return {
        name: value
        for name, value in found.items()
        if not (isinstance(value, type) and issubclass(value, Exception)) and name not in INTERNAL
    }


def arguments() -> list[tuple[str, str]]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        (name, each.name)
        for name, value in public().items()
        for each in inspect.signature(value).parameters.values()
        if each.kind not in kinds and each.name not in LEFT_TO_JAX
    ]


def test_every_public_name_has_a_right_call():
    assert set(CALLS) == set(public())


@pytest.mark.parametrize(("name", "argument"), arguments(), ids=str)
def test_a_wrong_argument_is_refused_in_the_librarys_words_and_named(name, argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    right, used = CALLS[name]
    first = next(iter(inspect.signature(public()[name]).parameters))
    behind = given() if name in POSITIONAL else ()
    problems: list[str] = []
    names = [
        argument,
        argument.removesuffix("s"),
        ALSO.get((name, argument), argument),
        *([" first"] if argument == first else []),
    ]
    for wrong in WRONG:
        if wrong is None and name in DECORATORS:
            continue
        words = {**right, argument: wrong}
        leading = [words.pop(first)] if behind else []
        try:
            used(public()[name](*leading, *behind, **words))
        except (jm.JaxmemError, TypeError, ValueError) as error:
            raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            if not raised.is_relative_to(HERE):
                problems.append(f"{wrong!r}: raised by {raised.name}: {type(error).__name__}: {error}")
            elif not any(each in str(error).lower() for each in names):
                problems.append(f"{wrong!r}: does not name it: {error}")
        except Exception as error:  # noqa: BLE001 - every other one is a finding
            problems.append(f"{wrong!r}: {type(error).__name__}: {error}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jm.prefetch(3), r"jm\.prefetch: iterable=3 is of type int\. Expected an iterable of batches"),
        (lambda: jm.prefetch("x"), r"iterable='x' is of type str"),
        (lambda: jm.prefetch([1], batches=2.5), r"batches=2\.5 is of type float\. Expected a whole number"),
        (
            lambda: jm.jit_step(train_step, donate_argnames=["state", 3]),
            r"donate_argnames=\['state', 3\] is of type list",
        ),
        (
            lambda: jm.jit_step(train_step, state_shardings=3),
            r"state_shardings=3 is of type int\. Expected None, a sharding",
        ),
        (
            lambda: jm.MemoryMonitor("monitor_only", probes=[3]),
            r"probes=\[3\] is of type list\. Expected a list of probes",
        ),
        (lambda: jm.oom_guard(outdir=b"x"), r"outdir=b'x' is of type bytes\. Expected a path as text or pathlib\.Path"),
        (lambda: jm.oom_guard(plan_seconds=True), r"plan_seconds=True is of type bool\. Expected seconds"),
        (lambda: jm.grad(3), r"jm\.grad got int first"),
        (lambda: jm.grad(loss, argnums=[0, "x"]), r"jm\.grad: argnums='x' is of type str\. Expected a whole number"),
        (lambda: jm.nnx.value_and_grad(3), r"jm\.nnx\.value_and_grad got int first"),
        (lambda: jm.eqx.grad("x"), r"jm\.eqx\.grad got str first"),
        (lambda: jm.weighted(1.0, float("nan")), r"weight=nan weighs nothing"),
        (lambda: jm.weighted(None, 1.0), r"total=None is None\. Expected a scalar"),
        (lambda: jm.ScriptedProbe([3]), r"script=3 is of type int\. Expected one entry a read"),
        (lambda: jm.load_plan(3), r"jm\.load_plan: path=3 is of type int\. Expected a path"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_was_expected(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
