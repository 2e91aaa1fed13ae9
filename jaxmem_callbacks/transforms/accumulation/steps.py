"""A training step about to be called enters, its arrays real; it leaves unharmed, or as an error, if it may not be accumulated.

The step is traced once more with a comparison at each gradient; of that trace only what the comparisons need is compiled and
run, on a few rows. Nothing is donated, and no object of the user's is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxmem_callbacks._compat.jaxprs import derive, evaluate
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.transforms.accumulation.check import Comparison, require_equal
from jaxmem_callbacks.transforms.equations import inlined, needed_by
from jaxmem_callbacks.transforms.frameworks import framework_of
from jaxmem_callbacks.transforms.policy import ActivePolicy, activate

_MARK = "jaxmem_comparison_"


class _Marking(list[Comparison]):
    """Comparisons as they are traced; each is named in the trace, so that it is found again from outside."""

    def append(self, comparison: Comparison) -> None:
        checkpoint_name(comparison.differences, f"{_MARK}{len(self)}")
        # A tracer kept here would outlive its trace, which `jax.checking_leaks()` calls a leak.
        super().append(replace(comparison, differences=None))


def require_accumulable(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], policy: StepPolicy
) -> None:
    """Compare the gradients of a step with their accumulation; compiles and runs one small program.

    Args:
        step: The step as it will be called, jitted or not.
        args: Its arguments with real arrays; they are read only.
        kwargs: Likewise.
        policy: Has microbatches.

    Raises:
        PolicyError: a loss of the step would have another gradient, or could not be checked.
    """
    marking = _Marking()
    arrays, join = _arrays((args, kwargs))
    active = ActivePolicy(policy)
    active.comparisons, active.shards = marking, _shards(arrays)

    def traced(*values: Any) -> None:
        inner_args, inner_kwargs = join(values)
        with activate(active):
            step(*inner_args, **inner_kwargs)

    flat = inlined(jax.make_jaxpr(traced)(*arrays), every_jit=True)
    places = {
        int(eqn.params["name"].removeprefix(_MARK)): eqn.outvars[0]
        for eqn in flat.eqns
        if eqn.primitive.name == "name" and str(eqn.params["name"]).startswith(_MARK)
    }
    for index, comparison in enumerate(marking):
        if index not in places:
            msg = (
                f"microbatches={policy.microbatches}: the gradient of {comparison.name} is taken inside a loop, a branch or a "
                "shard_map, where it can't be compared with a full one. Expected it directly in the step. Return "
                f"jm.weighted(loss_sum, weight_sum) in {comparison.name}, which needs no check."
            )
            raise PolicyError(msg)
    if not marking:
        return
    outvars = [places[index] for index in range(len(marking))]
    # What the step reports besides is reported when it runs.
    needed = derive(flat.template, invars=flat.invars, outvars=outvars, eqns=needed_by(outvars, flat.eqns))

    def jaxmem_accumulation_check(consts: Any, values: Any) -> list[Any]:
        return evaluate(needed, [*consts, *values])

    with jax.transfer_guard("allow"):  # a guard is there to find the user's transfers, and these are ours
        found = jax.jit(jaxmem_accumulation_check)(flat.consts, arrays)
        for comparison, differences in zip(marking, found, strict=True):
            require_equal(comparison, differences)


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
