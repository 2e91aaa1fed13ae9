"""`StepPolicy(microbatches=n)` where a gradient is taken."""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.transforms.accumulation.accumulate import (
    Accumulated,
    GradientCall,
    accumulate,
    is_weighted,
    joined,
)
from jaxmem_callbacks.transforms.accumulation.batch import ROWS, BatchPlaces, SplitCall, split_call
from jaxmem_callbacks.transforms.accumulation.equivalence_check import (
    compare,
    require_equal,
    require_weights_that_add_up,
    rounding,
)
from jaxmem_callbacks.transforms.policy import ActivePolicy, activate
from jaxmem_callbacks.transforms.tracing import derive, evaluate, flatten, split_arrays, trace


def refuse_second_accumulation(policy: StepPolicy, *trees: Any) -> None:
    """Refuse microbatches beside `optax.MultiSteps`, by its state among a step's arguments.

    Raises:
        PolicyError: both would accumulate.
    """
    if accumulates_already(*trees):
        msg = (
            f"microbatches={policy.microbatches} and optax.MultiSteps (its MultiStepsState is among the step's arguments) would "
            "accumulate twice. Expected one of them: pass the inner optimizer without optax.MultiSteps, or microbatches=1."
        )
        raise PolicyError(msg)


def accumulates_already(*trees: Any) -> bool:
    """Whether a step's arguments hold the state of `optax.MultiSteps`."""
    return any(_is_multi_steps(node) for node in jax.tree.leaves(trees, is_leaf=_is_multi_steps))


def _is_multi_steps(node: Any) -> bool:
    return type(node).__name__ == "MultiStepsState" and type(node).__module__.partition(".")[0] == "optax"


_SHOWN = 4


def unseen(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss where no policy is active: a gradient taken inside it is a part of each microbatch."""

    @functools.wraps(loss)
    def loss_without_policy(*args: Any, **kwargs: Any) -> Any:
        with activate(None):
            return loss(*args, **kwargs)

    return loss_without_policy


def accumulated(
    active: ActivePolicy, call: GradientCall, args: Sequence[Any], kwargs: Mapping[str, Any], found: BatchPlaces
) -> tuple[Any, Any, Any]:
    """Value, aux and gradients of a call, taken over microbatches.

    Args:
        active: The policy.
        call: The gradient of a loss that is `unseen`.
        args: Pure trees of arrays.
        kwargs: Likewise.
        found: Which of them are the batch.

    Raises:
        PolicyError: the loss's gradient would be another one, or that could not be checked; an entry of aux can't be joined.
    """
    count = active.policy.microbatches
    batch = split_call(args, kwargs, found)
    done = accumulate(call, batch, count)
    _, (weight, aux) = done.parts
    if weight is None:
        _admit(active, call, batch, count, done)
    if weight is not None or any(is_weighted(leaf) for leaf in jax.tree.leaves(aux, is_leaf=is_weighted)):
        require_weights_that_add_up(call, batch, count)
    return joined(call, batch, count, done)


def _admit(active: ActivePolicy, call: GradientCall, batch: SplitCall, count: int, done: Accumulated) -> None:
    """Have a loss compared that does not return what it sums and what it divides by."""
    if active.compared is not None:
        active.compared(call, batch, count, done.program)
        return
    if active.defer is not None:
        active.defer()
        return
    if any(isinstance(array, Tracer) for array in batch.arrays):
        msg = (
            f"microbatches={count}: whether {call.name} may be accumulated can only be checked with real arrays, and here its "
            "arguments are being traced. Use jm.jit_step, which checks at its first call, or return "
            f"{advise('loss.weighted', arguments='loss_sum, weight_sum')} in {call.name}, which needs no check."
        )
        raise PolicyError(msg)
    # By what is computed and not by the name: another lambda of the same step has the same one.
    text = re.sub(r" at 0x[0-9a-f]+", "", str(done.program))
    signature = (call.name, count, hashlib.sha256(text.encode()).hexdigest())
    if signature not in active.checked:
        _compare_now(call, batch, count, done.program)
        active.checked.add(signature)


def _compare_now(call: GradientCall, batch: SplitCall, count: int, program: Any) -> None:
    comparisons = []

    def differences(arrays: Sequence[jax.Array]) -> jax.Array:
        comparisons.append(compare(call, batch.replaced(arrays), count, program))
        return comparisons[0].differences

    def moved(arrays: Sequence[jax.Array]) -> jax.Array:
        return rounding(call, batch.replaced(arrays), count, program)

    with jax.debug_nans(False):  # a row that is masked may divide by nothing
        found = jax.jit(differences)(batch.arrays)
        require_equal(comparisons[0], found, lambda: jax.jit(moved)(batch.arrays))


def state_after(call: GradientCall, batch: SplitCall, count: int) -> Any:
    """The state that one plain call of the loss leaves, which no row of the batch may have a part in.

    Raises:
        PolicyError: state that the batch changes, such as BatchNorm's statistics; names it.
    """

    def of_first(*arrays: Any) -> Any:
        args, kwargs = batch.microbatch(arrays, 0, count, lambda key, _: key)
        return call.evaluate(args, kwargs)[1]

    closed, join = trace(of_first, batch.arrays)
    flat = flatten(closed)  # of the loss, only what the state needs is left
    needed = derive(flat.template, invars=flat.invars, outvars=flat.outvars, eqns=flat.eqns)
    state = join(evaluate(needed, [*flat.consts, *batch.arrays]))
    _require_independent(call, batch, count, state)
    return state


def _require_independent(call: GradientCall, batch: SplitCall, count: int, state: Any) -> None:
    """JAX's own batching finds what depends on the rows: mapped over microbatches, such a state would be mapped too."""
    axes = [0 if role == ROWS else None for role in batch.roles]
    stacked = [
        jax.ShapeDtypeStruct((count, array.shape[0] // count, *array.shape[1:]), array.dtype) if role == ROWS else array
        for array, role in zip(batch.arrays, batch.roles, strict=True)
    ]

    def holds(chosen: Callable[[list[Any]], list[Any]]) -> bool:
        def of_rows(*arrays: Any) -> list[Any]:
            return chosen(split_arrays(call.evaluate(*batch.join(arrays))[1])[0])

        try:
            jax.eval_shape(jax.vmap(of_rows, in_axes=axes, out_axes=None), *stacked)
        except ValueError:
            return False
        return True

    if holds(lambda values: values):
        return
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    paths = [_readable(jax.tree_util.keystr(path)) for path, leaf in flat if isinstance(leaf, jax.Array)]
    changed = (path for i, path in enumerate(paths) if not holds(lambda values, i=i: [values[i]]))
    msg = (
        f"microbatches={count}: {call.name} changes state by the batch: {', '.join(itertools.islice(changed, _SHOWN))}. "
        "Statistics of a whole batch (BatchNorm) are other numbers for microbatches; what is sown would be that of one. "
        "Expected state that does not depend on the batch, such as counters of random streams. Take this gradient without "
        "microbatches, or write use_running_average=True, or LayerNorm in place of BatchNorm."
    )
    raise PolicyError(msg)


def _readable(path: str) -> str:
    """A path without the places that only the splitting of objects made: from the first name on."""
    return path[max(path.find("['"), 0) :].removesuffix(".value")
