"""The check of a whole step before its first call: its gradients accumulated against its gradients in full."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxmem_callbacks._compat.jaxprs import derive, evaluate
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.transforms.accumulation.accumulate import GradientCall
from jaxmem_callbacks.transforms.accumulation.batch import SplitCall
from jaxmem_callbacks.transforms.accumulation.equivalence_check import Comparison, compare, require_equal, rounding
from jaxmem_callbacks.transforms.frameworks import framework_of
from jaxmem_callbacks.transforms.tracing import inlined, is_jit, needed_equations

# The context in which a step is traced under its policy; each gradient that is accumulated is handed to a function.
Under = Callable[[Callable[..., None]], AbstractContextManager[None]]
_MARK = "jaxmem_comparison_"


def require_accumulable(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    under: Under,
) -> None:
    """Compare the gradients of a step with their accumulation; compiles and runs one small program, or two.

    Args:
        step: The step as it will be called, jitted or not.
        args: Its arguments with real arrays; they are read only.
        kwargs: Likewise.
        under: Its policy, which has microbatches.

    Raises:
        PolicyError: a loss of the step would have another gradient, or could not be checked.
    """
    arrays, join = _arrays((args, kwargs))
    shards = _shards(arrays)
    comparisons: list[Comparison] = []

    def called(*values: Any) -> None:
        inner_args, inner_kwargs = join(values)
        step(*inner_args, **inner_kwargs)

    def compared(*gradient: Any) -> Any:
        comparison = compare(*gradient, shards=shards)
        # A tracer kept here would outlive its trace, which `jax.checking_leaks()` calls a leak.
        comparisons.append(replace(comparison, differences=None))
        return comparison.differences

    @functools.cache
    def moved() -> list[Any]:
        return _at_gradients(called, arrays, under, lambda *gradient: rounding(*gradient, shards=shards))

    # What looks for the user's transfers and NaNs would find ours: a row that is masked may divide by nothing.
    with jax.transfer_guard("allow"), jax.debug_nans(False):
        found = _at_gradients(called, arrays, under, compared)
        for index, (comparison, differences) in enumerate(zip(comparisons, found, strict=True)):
            require_equal(comparison, differences, lambda index=index: moved()[index])


def _at_gradients(
    called: Callable[..., None], arrays: Sequence[Any], under: Under, computed: Callable[..., Any]
) -> list[Any]:
    """What a function of each gradient call computes, as the step reaches them; of the step only what that needs is run."""
    met: list[tuple[str, int]] = []  # the loss, and its microbatches

    def mark(call: GradientCall, batch: SplitCall, count: int, program: Any) -> None:
        gradient = computed(call, batch, count, program)
        checkpoint_name(gradient, f"{_MARK}{len(met)}")  # so that it is found again from outside
        met.append((call.name, count))

    def traced(*values: Any) -> None:
        with under(mark):
            called(*values)

    flat = inlined(jax.make_jaxpr(traced)(*arrays), is_inlined=is_jit)
    places = {
        int(eqn.params["name"].removeprefix(_MARK)): eqn.outvars[0]
        for eqn in flat.eqns
        if eqn.primitive.name == "name" and str(eqn.params["name"]).startswith(_MARK)
    }
    for index, (name, count) in enumerate(met):
        if index not in places:
            msg = (
                f"microbatches={count}: the gradient of {name} is taken inside a loop, a branch or a "
                "shard_map, where it can't be compared with a full one. Expected it directly in the step. Return "
                f"{advise('loss.weighted', arguments='loss_sum, weight_sum')} in {name}, which needs no check."
            )
            raise PolicyError(msg)
    if not met:
        return []
    outvars = [places[index] for index in range(len(met))]
    # What the step reports besides is reported when it runs.
    needed = derive(flat.template, invars=flat.invars, outvars=outvars, eqns=needed_equations(outvars, flat.eqns))

    def jaxmem_accumulation_check(consts: Any, values: Any) -> list[Any]:
        return evaluate(needed, [*consts, *values])

    return jax.jit(jaxmem_accumulation_check)(flat.consts, arrays)


def _arrays(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The arrays of a step's arguments, NumPy's included, and a copy of the arguments around others."""
    framework = framework_of(tree)
    if framework is not None:
        return framework.apart(tree)
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

    def join(values: Sequence[Any]) -> Any:
        filled = list(leaves)
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        return jax.tree.unflatten(treedef, filled)

    return [jnp.asarray(leaves[i]) for i in places], join


def _shards(arrays: Sequence[Any]) -> int:
    """Devices that the step's arrays lie on, at most."""
    return max((len(array.sharding.device_set) for array in arrays if isinstance(array, jax.Array)), default=1)
