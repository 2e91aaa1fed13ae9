"""`jm.remat`: any loss, rematerialised without editing the model.

The loss is traced, cut where few bytes are alive, and each segment is checkpointed; scans get a checkpointed body. What is
computed is the same: only what is kept between the forward and the backward pass changes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, cast

import jax
import numpy as np

from jaxmem_callbacks._compat.jaxprs import derive, evaluate, evaluate_closed
from jaxmem_callbacks.records.errors import LossRefusedError, PolicyError, require_function
from jaxmem_callbacks.records.policies import OwnCheckpoint, StepPolicy, own_checkpoints_words
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.transforms.checkpoints import (
    Cuts,
    checkpoint_policy,
    cut,
    grouped,
    keeping,
    loop_in_chunks,
    loop_in_steps,
    loop_in_two_levels,
    named_by_the_loss,
    offloads_by_kind,
    require_names,
    require_offloaded,
)
from jaxmem_callbacks.transforms.costs import Held, copies, gradient_spans, held, nbytes, residual_bytes, sink
from jaxmem_callbacks.transforms.cuts import (
    Landscape,
    alive,
    choose_cuts,
    choose_two_levels,
    head_position,
    held_together,
    is_layer_scan,
    lives_of,
    segment_peaks,
    smallest_peak,
    steps_together,
    stored_between,
)
from jaxmem_callbacks.transforms.frameworks import framework_of
from jaxmem_callbacks.transforms.fsdp_all_gather import (
    Weights,
    gathered_places,
    gathering_loop,
    gathering_loops,
    gathering_mesh,
)
from jaxmem_callbacks.transforms.own_checkpoints import own_checkpoints, without_checkpoints
from jaxmem_callbacks.transforms.policy import activate, active_policy
from jaxmem_callbacks.transforms.save_frontier import Share
from jaxmem_callbacks.transforms.tracing import (
    Equations,
    TracedResult,
    checkpointed_functions,
    flatten,
    has_own_checkpoint,
    refuse_effects,
    reports_inside,
    side_effects,
    split_arrays,
    variables,
    where,
)

_OPAQUE = {"jit", "pjit", "shard_map"}
# A loop whose residuals are under this share of the whole is left alone: checkpointing it costs time and saves nothing.
_SMALL_SHARE = 0.01
_ONE_LEVEL = "Inside a shard_map there is one level of checkpoints: levels=2 acts on the rest of the loss."


def remat(  # noqa: PLR0913 - the fields of a policy, by name
    loss: Callable[..., Any],
    policy: str = "full",
    *,
    segments: int | None = None,
    levels: int = 1,
    keep: float = 0.0,
    save: Sequence[str] = (),
    offload: Sequence[str] = (),
    own_checkpoints: Literal["keep", "replace"] = "keep",
) -> Callable[..., Any]:
    """The same loss, keeping less between its forward and its backward pass.

    Args:
        loss: Any traceable function. Arrays among its arguments are traced; every other leaf and keyword is static.
        policy: What each segment keeps besides its inputs: ``none`` (the loss untouched), ``full`` (nothing),
            ``dots_saveable``, ... or a synonym.
        segments: How many segments, or None to choose by live bytes.
        levels: 2 puts checkpoints around groups of segments too, and makes loops of loops: about the root of what one level
            keeps, for one more forward computation.
        keep: From 0 to 1: of the intermediates that are dear to compute again, which share of the bytes the segments keep,
            those first that save most operations a byte. 1 computes hardly more than cheap elementwise operations again.
        save: Names from ``jax.ad_checkpoint.checkpoint_name`` that are kept besides.
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
    mesh = gathering_mesh(policy)
    replaces = policy.own_checkpoints == "replace"
    if policy.remat == "none" and mesh is None and not replaces:
        return loss

    @functools.wraps(loss)
    def cheaper_loss(*args: Any, **kwargs: Any) -> Any:
        if policy.remat == "none" and not replaces and framework_of(args, kwargs) is not None:
            return loss(*args, **kwargs)
        refuse_framework_objects(args, kwargs)
        arrays, join = split_arrays((args, kwargs))
        result = TracedResult()

        def traced(*values: Any) -> list[Any]:
            inner_args, inner_kwargs = join(values)
            with activate(None):  # a gradient taken inside the loss is part of what is being cut
                return result.split(loss(*inner_args, **inner_kwargs))

        closed = jax.make_jaxpr(traced)(*arrays)
        if replaces:
            written, closed = closed, without_checkpoints(closed)
            _tell_replaced(loss, was_replaced=closed is not written)
        flat = flatten(closed)
        places = {} if weights is None or mesh is None else gathered_places(weights(args), policy, mesh)
        mine = list(zip(flat.invars[len(flat.consts) :], arrays, strict=True))
        own = {var: places[id(array)] for var, array in mine if id(array) in places}
        if policy.remat != "none":
            trained = set() if weights is None else set(map(id, jax.tree.leaves(weights(args))))
            differentiated = frozenset(var for var, array in mine if id(array) in trained)
            jaxpr = cut_equations(flat, policy, own, differentiated or None)
        elif not any(map(side_effects, flat.eqns)) and gathering_loops(flat, own, mesh):
            jaxpr = derive(flat.template, invars=flat.invars, outvars=flat.outvars, eqns=flat.eqns)
        elif replaces:
            return result.join(evaluate_closed(closed, arrays))
        else:
            return loss(*args, **kwargs)
        return result.join(evaluate(jaxpr, [*flat.consts, *arrays]))

    return cheaper_loss


def _tell_replaced(loss: Callable[..., Any], *, was_replaced: bool) -> None:
    """Tell the active policy whether it replaced checkpoints; where none is active, refuse that there are none.

    Raises:
        PolicyError: nobody else will know that nothing was replaced.
    """
    active = active_policy()
    if active is not None:
        active.replaced |= was_replaced
    elif not was_replaced:
        name = getattr(loss, "__name__", type(loss).__name__)
        msg = f"own_checkpoints='replace' would do nothing: {name} has no checkpoints of its own. Leave it out."
        raise PolicyError(msg)


def refuse_framework_objects(*trees: Any) -> None:
    """Refuse stateful objects, whose state a plain function would silently leave behind.

    Raises:
        LossRefusedError: which is a ValueError; names the function that keeps their state.
    """
    framework = framework_of(*trees)
    if framework is not None:
        msg = (
            f"The arguments hold {framework.NAME} objects, whose state (BatchNorm statistics, dropout counters) a plain "
            f"gradient would leave behind. Use {framework.VALUE_AND_GRAD} instead."
        )
        raise LossRefusedError(msg)


def cut_equations(
    flat: Equations,
    policy: StepPolicy,
    weights: Weights | None = None,
    differentiated: Collection[Any] | None = None,
) -> Any:
    """The function as an open jaxpr, cut and checkpointed as the policy says.

    Args:
        flat: The function; its equations are used up.
        policy: What is done to it.
        weights: Those of its variables that are differentiated arguments, and how they lie once a loop has gathered them.
        differentiated: Those of its variables that are differentiated arguments; None where that is not known.

    Raises:
        LossRefusedError: effects that a recomputation would repeat, or nothing that could be cut.
        PolicyError: a name that the loss does not have, or too many segments.
    """
    refuse_effects(flat.eqns)
    policy = named_by_the_loss(policy, flat.eqns)
    require_names(policy, flat.eqns)
    keep = checkpoint_policy(policy)
    active = active_policy()
    notes, survey = ({}, None) if active is None else (active.notes, active.survey)
    told = _Told(notes=notes, survey=survey, weights=weights or {}, differentiated=differentiated)
    own, known = own_checkpoints(flat.eqns), checkpointed_functions(flat.eqns)
    if active is not None:
        active.left_alone |= dict.fromkeys(own)
    jaxpr = _cut(flat, policy, keep, told)
    if not checkpointed_functions(jaxpr.eqns) - known:
        _refuse_no_checkpoint(flat, policy, own)
    require_offloaded(policy, jaxpr, keep)
    return jaxpr


@dataclass(frozen=True, kw_only=True, slots=True)
class _Told:
    """Who hears what while a function is cut.

    Attributes:
        notes: What stays as it is; see `ActivePolicy`.
        survey: Told what other shares of ``keep`` would keep; see `ActivePolicy`.
        copies: Devices that each compute the function on a part of their own; 0 outside a `shard_map`.
        weights: Variables that ``fsdp`` divides; none inside a `shard_map`, where everything is local.
        differentiated: Arguments that are; None where that is not known, such as inside a `shard_map`.
    """

    notes: dict[str, None]
    survey: Callable[[list[Share]], None] | None
    copies: int = 0
    weights: Weights = field(default_factory=dict)
    differentiated: Collection[Any] | None = None

    def inside(self, eqn: Any) -> _Told:
        """The same for the body of a `shard_map`, whose figures are those of one device."""
        parts, survey = copies(eqn), self.survey

        def of_all(found: list[Share]) -> None:
            assert survey is not None
            survey(
                [
                    replace(one, **{name: parts * getattr(one, name) for name in ("bytes", "flops", "work", "peak")})
                    for one in found
                ]
            )

        return replace(self, copies=parts, weights={}, differentiated=None, survey=None if survey is None else of_all)


def _cut(flat: Equations, policy: StepPolicy, keep: Callable[..., Any], told: _Told) -> Any:
    """A function, or the body of a `shard_map`, as an open jaxpr with checkpoints."""
    sunk = sink(flat.eqns, flat.invars)
    flat.eqns = [eqn for eqn in flat.eqns if not eqn.outvars or any(var not in sunk.makers for var in eqn.outvars)]
    if not flat.eqns:  # a constant, or something cheap of the arguments
        made = sunk.equations_for(variables(flat.outvars))
        return derive(flat.template, invars=flat.invars, outvars=flat.outvars, eqns=made)
    resident = set(sunk.origins)
    residuals = residual_bytes(flat.eqns, resident)
    mapped = [index for index, eqn in enumerate(flat.eqns) if _is_worth_opening(eqn, int(residuals[index]), residuals)]
    for index in mapped:
        flat.eqns[index] = _with_cut_body(flat.eqns[index], policy, keep, told)
    enough = int(residuals.sum() * _SMALL_SHARE)
    residuals = residual_bytes(flat.eqns, resident) if mapped else residuals
    loops = [index for index, eqn in enumerate(flat.eqns) if is_layer_scan(eqn, enough)]
    own = {*loops, *(index for index, eqn in enumerate(flat.eqns) if has_own_checkpoint(eqn) or reports_inside(eqn))}
    mesh = gathering_mesh(policy)
    for index in sorted(own) if mesh is not None else ():
        if flat.eqns[index].primitive.name == "scan":
            again = index not in loops
            flat.eqns[index] = gathering_loop(flat.eqns[index], told.weights, sunk, mesh, again=again)
    bare = _landscape(flat, held(flat.eqns, resident), own, residuals)

    def land_with(together: Mapping[int, int]) -> Landscape:
        return _with_loops(bare, flat.eqns, together)

    # Inside a shard_map a loop is not traced anew: its collectives have no axis to speak of there.
    together = dict.fromkeys(loops, 1)
    if not told.copies:
        scans = {index: flat.eqns[index] for index in loops}
        together = steps_together(scans, policy.offloaded, lambda chosen: smallest_peak(land_with(chosen)))
    land = land_with(together)
    twice = policy.levels > 1 and not told.copies
    places, groups = _places(land, policy, flat.eqns, twice=twice)
    if policy.levels > 1 and told.copies:
        told.notes.setdefault(_ONE_LEVEL)
    told.notes.update(dict.fromkeys(_left_whole(flat.eqns, sorted(own.difference(loops, mapped)), residuals)))
    # What waits for the head keeps values by name, which groups of segments would compute again and offloading by kind does not
    # combine with; inside a shard_map its collectives would come again.
    cuts = Cuts(
        places=places,
        loops=together,
        whole=frozenset(own.difference(loops)),
        loop=loop_in_steps if told.copies else loop_in_two_levels if twice else loop_in_chunks,
        offload=policy.offloaded,
        head=None if twice or told.copies or offloads_by_kind(policy) else head_position(land, places),
        differentiated=told.differentiated,
    )
    peaks = functools.partial(segment_peaks, land, places)
    jaxpr = cut(flat, cuts, sunk, keep, keeping(policy.keep, told.survey, peaks))
    return grouped(flat, jaxpr, groups) if twice else jaxpr


def _is_worth_opening(eqn: Any, kept: int, residuals: np.ndarray) -> bool:
    """Whether a `shard_map` is cut inside: it holds loops over layers, or most of what the function keeps.

    A smaller one, such as one layer's experts, is computed again as a whole with the segment that it is in.
    """
    if eqn.primitive.name != "shard_map" or has_own_checkpoint(eqn) or reports_inside(eqn):
        return False
    enough = int(residuals.sum() * _SMALL_SHARE)
    body = flatten(eqn.params["jaxpr"], hoist_constants=False)
    has_layers = any(is_layer_scan(inner, enough // copies(eqn)) for inner in body.eqns)
    return has_layers or 2 * kept > int(residuals.sum()) > 0


def _with_cut_body(eqn: Any, policy: StepPolicy, keep: Callable[..., Any], told: _Told) -> Any:
    """A `shard_map` with checkpoints in its body; the equation itself where the body cannot be cut."""
    body = flatten(eqn.params["jaxpr"], hoist_constants=False)
    jaxpr = _cut(body, replace(policy, segments=None), keep, told.inside(eqn))
    return eqn.replace(params={**eqn.params, "jaxpr": jaxpr}) if any(map(has_own_checkpoint, jaxpr.eqns)) else eqn


def _left_whole(eqns: Sequence[Any], own: Sequence[int], residuals: np.ndarray) -> list[str]:
    """What stays as it is and could be thought to be cut: loops and branches that report."""
    return [
        f"A `{eqns[index].primitive.name}` stays as it is and keeps about {format_bytes(int(residuals[index]))} for the backward "
        f"pass: it reports from inside a loop or branch, and recomputed it would report twice{where(eqns[index])}. Move its "
        "jax.debug calls into the body of the outermost loop, or out of it."
        for index in own
        if reports_inside(eqns[index])
    ]


def _refuse_no_checkpoint(flat: Equations, policy: StepPolicy, own: Sequence[OwnCheckpoint]) -> NoReturn:
    """Refuse a policy that made no checkpoint; see `cut_equations`."""
    if own:
        msg = (
            f"remat={policy.remat!r} would do nothing. {own_checkpoints_words(own)}: nothing else can be cut. With "
            "own_checkpoints='replace' the policy replaces them; or leave remat out."
        )
        raise LossRefusedError(msg)
    advice = "Put jm.remat around the function inside it, or"
    if any(eqn.primitive.name == "scan" and reports_inside(eqn) for eqn in flat.eqns):
        advice = "A loop whose inner loop or branch reports stays whole: move jax.debug calls into the outer body, or"
    only = ", ".join(f"`{eqn.primitive.name}`" for eqn in flat.eqns[:3]) or "no equation at all"
    msg = (
        f"remat={policy.remat!r} would do nothing: the loss is {only}, which cannot be cut from outside. "
        f"{advice} take this gradient with jax.value_and_grad."
    )
    raise LossRefusedError(msg)


def _landscape(flat: Equations, found: Held, own: set[int], residuals: np.ndarray) -> Landscape:
    """What lives where, without what loops hold and store."""
    lives = lives_of(flat.eqns, flat.outvars)
    spans = [(nbytes(var), first, last, found.needed_until(var)) for var, first, last in lives]
    return Landscape(
        spans=np.array(spans, np.int64).reshape(-1, 4),
        held=found.rows[~np.isin(found.rows[:, 1], list(own))],
        gradients=alive(gradient_spans(flat.eqns, lives), len(flat.eqns)),
        made=found.made,
        stored=np.zeros(len(flat.eqns), np.int64),
        forced=tuple(sorted({place for index in own for place in (index, index + 1)} - {0, len(flat.eqns)})),
        residuals=residuals,
        last_product=found.last_product,
    )


def _with_loops(land: Landscape, eqns: Sequence[Any], together: Mapping[int, int]) -> Landscape:
    """The same with loops of so many steps under one checkpoint."""
    rows, stored, residuals = [land.held], land.stored.copy(), land.residuals.copy()
    for index, steps in together.items():
        stored[index] = stored_between(eqns[index], steps)  # there for the loop itself too, and for all before it
        residuals[index] = held_together(eqns[index], steps) + stored[index]
        rows.append(np.array([(residuals[index], index, index)], np.int64))
    return replace(land, held=np.vstack(rows), stored=stored, residuals=residuals)


def _places(land: Landscape, policy: StepPolicy, eqns: Sequence[Any], *, twice: bool) -> tuple[list[int], list[int]]:
    """Where to cut, and after how many segments each group of two levels ends; no groups where these are left to `grouped`."""
    try:
        places = choose_cuts(land, policy.segments)
    except ValueError as error:
        raise PolicyError(str(error)) from None
    # One checkpoint around all that a single equation hides would recompute it and save nothing.
    opaque = sum(eqn.primitive.name in _OPAQUE for eqn in eqns) == 1
    if not places and policy.segments is None and not opaque:
        # Where parameters outweigh activations the estimate sees nothing to gain; it was asked for, so the best cut is made.
        with contextlib.suppress(ValueError):
            places = choose_cuts(land, 2)
    if not (twice and places) or land.forced or policy.segments is not None:
        return places, []
    places, bounds = choose_two_levels(land, places)
    return places, [places.index(bound) + 1 for bound in bounds]
