"""`jm.remat`: any loss, rematerialised without editing the model.

The loss is traced, cut where few bytes are alive, and each segment is checkpointed; scans get a checkpointed body. What is
computed is the same: only what is kept between the forward and the backward pass changes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, cast

import jax

from jaxmem_callbacks.records.arguments import name_of, require_function
from jaxmem_callbacks.records.errors import LossRefusedError, PolicyError
from jaxmem_callbacks.records.plans import FrontierPoint
from jaxmem_callbacks.records.policies import GATHERED, OwnCheckpoint, StepPolicy, own_checkpoints_words
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.transforms.checkpoints import (
    apply,
    checkpoint_policy,
    named_by_the_loss,
    require_names,
    require_offloaded,
)
from jaxmem_callbacks.transforms.chunks import in_chunks
from jaxmem_callbacks.transforms.costs import copies, residual_bytes
from jaxmem_callbacks.transforms.cuts import choose
from jaxmem_callbacks.transforms.frameworks import framework_of, refuse_framework_objects
from jaxmem_callbacks.transforms.fsdp_all_gather import Gathers, gathered_places, gathering_loops, gathering_mesh
from jaxmem_callbacks.transforms.loss_profile import (
    CheapValues,
    LossProfile,
    cheap_values,
    is_layer_scan,
    profile_loss,
    small_part,
)
from jaxmem_callbacks.transforms.own_checkpoints import own_checkpoints, without_checkpoints
from jaxmem_callbacks.transforms.policy import OFFLOAD, REMAT, activate, active_policy
from jaxmem_callbacks.transforms.save_frontier import MergedFrontier
from jaxmem_callbacks.transforms.tracing import (
    Equations,
    checkpointed_functions,
    derive,
    evaluate,
    evaluate_closed,
    flatten,
    has_own_checkpoint,
    refuse_effects,
    reports_inside,
    side_effects,
    split_arrays,
    trace,
    variables,
    where,
    with_first_checkpoints,
)

_ONE_LEVEL = "Inside a shard_map there is one level of checkpoints: levels=2 acts on the rest of the loss."


def remat(  # noqa: PLR0913 - the fields of a policy, by name
    loss: Callable[..., Any],
    policy: str = "full",
    *,
    segments: int | Literal["blocks"] | None = None,
    levels: int = 1,
    keep: float = 0.0,
    assume_fusion: bool = True,
    save: Sequence[str] = (),
    offload: Sequence[str] = (),
    own_checkpoints: Literal["keep", "replace"] = "keep",
) -> Callable[..., Any]:
    """The same loss, keeping less between its forward and its backward pass.

    Args:
        loss: Any traceable function. Arrays among its arguments are traced; every other leaf and keyword is static.
        policy: What each segment keeps in addition to its inputs: ``none`` (the loss untouched), ``full`` (nothing),
            ``dots_saveable``, ... or a synonym.
        segments: How many segments; ``blocks`` for one around each block that repeats, such as a layer, and nothing around the
            rest; or None to choose by live bytes.
        levels: 2 puts checkpoints around groups of segments too, and makes loops of loops: about the root of what one level
            keeps, for one more forward computation.
        keep: From 0 to 1: of the intermediates that are expensive to recompute, which share of the bytes the segments keep,
            those first that save most operations a byte. 1 computes hardly more than cheap elementwise operations again.
        assume_fusion: False chooses cuts for a compiler that holds what JAX keeps, as a CPU's does, and does little elementwise
            work inside what reads it.
        save: Names from ``jax.ad_checkpoint.checkpoint_name`` that are kept in addition.
        offload: Such names that wait in host memory; ``cuts`` and ``kept`` mean what the library stores of loops over layers:
            what each step hands to the next, and what ``keep`` keeps of each.
        own_checkpoints: ``replace`` takes the checkpoints that the loss has already (``jax.checkpoint``, ``nn.remat``,
            ``eqx.filter_checkpoint``) out of the trace, so that the policy replaces them; ``keep`` leaves them alone.

    Returns:
        A function with the same arguments and results; ``loss`` itself for ``none`` that replaces nothing.

    Raises:
        PolicyError: no such policy or name, or more segments than the loss can be cut into; when called: nothing to replace.
        LossRefusedError: when called: the loss has effects a recomputation would repeat, or nothing to cut.
        TypeError: when called with objects of a framework that are not plain arrays; names the call to use.
    """
    require_function(loss, "jm.remat")
    chosen = StepPolicy(
        remat=policy,
        segments=segments,
        levels=levels,
        keep=keep,
        assume_fusion=assume_fusion,
        save=cast("tuple[str, ...]", save),
        offload=cast("tuple[str, ...]", offload),
        own_checkpoints=own_checkpoints,
    )
    return rematerialised(loss, chosen)


def rematerialised(
    loss: Callable[..., Any], policy: StepPolicy, weights: Callable[[tuple[Any, ...]], Any] | None = None
) -> Callable[..., Any]:
    """``loss`` under the remat part of a policy; see `remat`. Under ``fsdp`` its loops gather their weights.

    Checkpoints of its own that are to be replaced are left out of the trace before anything else is done.

    Args:
        loss: The function.
        policy: What is done to it.
        weights: From the positional arguments to those that are differentiated, which ``fsdp`` divides.
    """
    mesh = gathering_mesh(policy) if policy.sharding in GATHERED else None
    replaces = policy.own_checkpoints == "replace"
    is_as_written = policy.remat == "none" and not replaces and not policy.chunked
    if is_as_written and mesh is None:
        return loss

    @functools.wraps(loss)
    def cheaper_loss(*args: Any, **kwargs: Any) -> Any:
        if is_as_written and framework_of(args, kwargs) is not None:
            return loss(*args, **kwargs)
        refuse_framework_objects(args, kwargs)
        arrays, closed, joined = _traced(loss, (args, kwargs), replaces=replaces)
        flat = flatten(closed)
        for path, count in policy.chunked:
            with _or_left(path, loss, policy):
                flat = in_chunks(flat, path, count)
        places = {} if weights is None or mesh is None else gathered_places(weights(args), policy, mesh)
        mine = list(zip(flat.invars[len(flat.consts) :], arrays, strict=True))
        divided = {var: places[id(array)] for var, array in mine if id(array) in places}
        if policy.remat != "none":
            trained = set() if weights is None else set(map(id, jax.tree.leaves(weights(args))))
            differentiated = frozenset(var for var, array in mine if id(array) in trained)
            gathers = None if mesh is None else Gathers(mesh, divided)
            refuse_effects(flat.eqns)
            jaxpr = derive(flat.template, invars=flat.invars, outvars=flat.outvars, eqns=flat.eqns)
            with _or_left(REMAT, loss, policy):
                cut = cut_equations(flat, policy, gathers, differentiated or None)
                jaxpr = cut.jaxpr
                with _or_left(OFFLOAD, loss, policy):
                    require_offloaded(policy, jaxpr, cut.keep)
        elif not any(map(side_effects, flat.eqns)) and (gathered := gathering_loops(flat, divided, mesh)) is not flat:
            jaxpr = derive(flat.template, invars=flat.invars, outvars=flat.outvars, eqns=gathered.eqns)
        elif policy.chunked:
            jaxpr = derive(flat.template, invars=flat.invars, outvars=flat.outvars, eqns=flat.eqns)
        elif replaces:
            return joined(evaluate_closed(closed, arrays))
        else:
            return loss(*args, **kwargs)
        return joined(evaluate(jaxpr, [*flat.consts, *arrays]))

    return cheaper_loss


@contextlib.contextmanager
def _or_left(part: str, loss: Callable[..., Any], policy: StepPolicy) -> Generator[None]:
    """Where one loss of a step has no place for a part of the step's policy, it stays as it is there: another may obey."""
    active = active_policy()
    if active is None or active.policy is not policy:
        yield
        return
    try:
        yield
    except (LossRefusedError, PolicyError) as error:
        active.leave(part, loss, error.with_traceback(None))  # its frames hold the call's arrays
    else:
        active.obeyed.add(part)


def _traced(
    loss: Callable[..., Any], arguments: Any, *, replaces: bool
) -> tuple[list[Any], Any, Callable[[Sequence[Any]], Any]]:
    """The arrays that a loss is given, its closed jaxpr, and the function that puts arrays into its results.

    Checkpoints of its own are left out if they are to be replaced.
    """
    arrays, join = split_arrays(arguments)

    def call(*values: Any) -> Any:
        args, kwargs = join(values)
        with activate(None):  # a gradient taken inside the loss is part of what is being cut
            return loss(*args, **kwargs)

    traced, joined = trace(call, arrays)
    written = with_first_checkpoints(traced)
    if not replaces:
        return arrays, written, joined
    closed = without_checkpoints(written)
    _note_replaced(loss, was_replaced=closed is not written)
    return arrays, closed, joined


def _note_replaced(loss: Callable[..., Any], *, was_replaced: bool) -> None:
    """Record with the active policy whether it replaced checkpoints; where none is active, refuse that there are none.

    Raises:
        PolicyError: nobody else will know that nothing was replaced.
    """
    active = active_policy()
    if active is not None:
        active.replaced |= was_replaced
    elif not was_replaced:
        name = name_of(loss)
        msg = f"own_checkpoints='replace' would do nothing: {name} has no checkpoints of its own. Leave it out."
        raise PolicyError(msg)


@dataclass(frozen=True, kw_only=True, slots=True)
class CutLoss:
    """A function with checkpoints, and what was found while it was cut.

    Attributes:
        jaxpr: The function, open.
        keep: What its checkpoints keep, as JAX's policy.
        notes: What stays as it is, a sentence each.
        frontiers: What could be kept in addition, of the function and of each body in it that is cut; none unless asked for.
    """

    jaxpr: Any
    keep: Callable[..., Any]
    notes: tuple[str, ...] = ()
    frontiers: tuple[tuple[FrontierPoint, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _CutContext:
    """What holds for a function that is cut, or for the body of a `shard_map` in it.

    Attributes:
        policy: What is done.
        keep: What its checkpoints keep, as JAX's policy.
        survey: Whether to find what could be kept in addition.
        copies: Devices that each compute the function on a part of their own; 0 outside a `shard_map`.
        gathers: How loops gather weights; None where they do not, as inside a `shard_map`, where everything is local.
        differentiated: Arguments that are; None where that is not known, such as inside a `shard_map`.
    """

    policy: StepPolicy
    keep: Callable[..., Any]
    survey: bool
    copies: int = 0
    gathers: Gathers | None
    differentiated: Collection[Any] | None

    def inside(self, eqn: Any) -> _CutContext:
        """The same for the body of a `shard_map`."""
        policy = self.policy if self.policy.segments == "blocks" else replace(self.policy, segments=None)
        return replace(self, policy=policy, copies=copies(eqn), gathers=None, differentiated=None)


def cut_equations(
    flat: Equations,
    policy: StepPolicy,
    gathers: Gathers | None = None,
    differentiated: Collection[Any] | None = None,
) -> CutLoss:
    """The function, cut and checkpointed under the policy.

    What was found on the way is recorded once with the active policy, where there is one.

    Args:
        flat: The function.
        policy: What is done to it.
        gathers: How its loops gather their weights; None where they do not.
        differentiated: Those of its variables that are differentiated arguments; None where that is not known.

    Raises:
        LossRefusedError: nothing that could be cut.
        PolicyError: a name that the loss does not have, or too many segments.
    """
    policy = named_by_the_loss(policy, flat.eqns)
    require_names(policy, flat.eqns)
    keep = checkpoint_policy(policy)
    active = active_policy()
    known = checkpointed_functions(flat.eqns)
    own = own_checkpoints(flat.eqns) if known else ()
    if active is not None:
        active.left_alone |= dict.fromkeys(own)
    survey = active is not None and active.survey
    context = _CutContext(policy=policy, keep=keep, survey=survey, gathers=gathers, differentiated=differentiated)
    cut = _cut(flat, context)
    if not checkpointed_functions(cut.jaxpr.eqns) - known:
        _refuse_no_checkpoint(flat, policy, own)
    if active is not None:
        active.record(cut.notes, cut.frontiers)
    return cut


def _cut(flat: Equations, context: _CutContext) -> CutLoss:
    """Cut a function, or the body of a `shard_map`: profile it, choose, and apply what was chosen."""
    cheap, flat = cheap_values(flat)
    if not flat.eqns:  # a constant, or something cheap of the arguments
        made = cheap.equations_for(variables(flat.outvars))
        jaxpr = derive(flat.template, invars=flat.invars, outvars=flat.outvars, eqns=made)
        return CutLoss(jaxpr=jaxpr, keep=context.keep)
    flat, kept_bytes, bodies = _with_cut_bodies(flat, cheap, context)
    loss = profile_loss(flat, cheap, kept_bytes)
    if context.gathers is not None:
        loss = replace(loss, flat=context.gathers.in_loops(loss))
    choice = choose(
        loss,
        context.policy,
        differentiated=context.differentiated,
        is_local=bool(context.copies),
        survey=context.survey,
    )
    notes = [_ONE_LEVEL] if context.policy.levels > choice.levels else []
    found = () if choice.frontier is None or not context.survey else (_of_all(choice.frontier, context.copies or 1),)
    return CutLoss(
        jaxpr=apply(loss, choice, context.keep),
        keep=context.keep,
        notes=(*(note for body in bodies for note in body.notes), *notes, *_left_whole(loss)),
        frontiers=(*(each for body in bodies for each in body.frontiers), *found),
    )


def _of_all(frontier: MergedFrontier, copies: int) -> tuple[FrontierPoint, ...]:
    """A frontier's points, of all devices that each compute a part of the function."""
    return tuple(point.times(copies) for point in frontier.points())


def _with_cut_bodies(
    flat: Equations, cheap: CheapValues, context: _CutContext
) -> tuple[Equations, int | None, list[CutLoss]]:
    """A function with checkpoints inside its `shard_map` bodies, what it kept before, and what was found in each body.

    Where it has no `shard_map` what it keeps is not asked for, and None.
    """
    if not any(eqn.primitive.name == "shard_map" for eqn in flat.eqns):
        return flat, None, []
    residuals = residual_bytes(flat.eqns, set(cheap.origins))
    total = int(residuals.sum())
    eqns, found = list(flat.eqns), []
    for index, eqn in enumerate(flat.eqns):
        if _is_worth_opening(eqn, int(residuals[index]), total):
            body = _cut(flatten(eqn.params["jaxpr"], hoist_constants=False), context.inside(eqn))
            found.append(body)
            if any(map(has_own_checkpoint, body.jaxpr.eqns)):
                eqns[index] = eqn.replace(params={**eqn.params, "jaxpr": body.jaxpr})
    return replace(flat, eqns=tuple(eqns)), total, found


def _is_worth_opening(eqn: Any, kept: int, total: int) -> bool:
    """Whether a `shard_map` is cut inside: it holds loops over layers, or most of what the function keeps.

    A smaller one, such as one layer's experts, is computed again as a whole with the segment that it is in.
    """
    if eqn.primitive.name != "shard_map" or has_own_checkpoint(eqn) or reports_inside(eqn):
        return False
    body = flatten(eqn.params["jaxpr"], hoist_constants=False)
    has_layers = any(is_layer_scan(inner, small_part(total) // copies(eqn)) for inner in body.eqns)
    return has_layers or 2 * kept > total > 0


def _left_whole(loss: LossProfile) -> list[str]:
    """What stays as it is and could be thought to be cut: loops and branches that report."""
    return [
        f"A `{eqn.primitive.name}` stays as it is and keeps about {format_bytes(int(loss.live.residuals[index]))} for the "
        f"backward pass: it reports from inside a loop or branch, and recomputed it would report twice{where(eqn)}. Move its "
        "jax.debug calls into the body of the outermost loop, or out of it."
        for index, eqn in enumerate(loss.flat.eqns)
        if index in loss.whole and reports_inside(eqn)
    ]


def _refuse_no_checkpoint(flat: Equations, policy: StepPolicy, own: Sequence[OwnCheckpoint]) -> NoReturn:
    """Refuse a policy that made no checkpoint; see `cut_equations`."""
    if own:
        msg = (
            f"remat={policy.remat!r} would do nothing. {own_checkpoints_words(own)}: nothing else can be cut. With "
            "own_checkpoints='replace' the policy replaces them; or leave remat out."
        )
        raise LossRefusedError(msg)
    if policy.segments == "blocks":
        msg = (
            "segments='blocks' would do nothing: no block of this loss repeats, or checkpoints around those that do would save "
            "nothing. Leave segments out: then the loss is cut where least is alive."
        )
        raise LossRefusedError(msg)
    advice = "Put jm.remat around the function inside it, or"
    _, left = cheap_values(flat)
    if any(eqn.primitive.name == "scan" and reports_inside(eqn) for eqn in left.eqns):
        advice = "A loop whose inner loop or branch reports stays whole: move jax.debug calls into the outer body, or"
    only = ", ".join(f"`{eqn.primitive.name}`" for eqn in left.eqns[:3])
    why = f"the loss is {only}, which cannot be cut from outside" if only else "the loss keeps nothing for its gradient"
    msg = f"remat={policy.remat!r} would do nothing: {why}. {advice} take this gradient with jax.value_and_grad."
    raise LossRefusedError(msg)
