"""Checkpoints: what they keep by name, and segments and loops put under them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from jaxmem_callbacks._compat.remat3 import first_checkpoints
from jaxmem_callbacks.records.errors import PolicyError, did_you_mean
from jaxmem_callbacks.records.policies import (
    KEPT,
    MAXTEXT_REMAT,
    OFFLOAD_CUTS,
    OFFLOAD_KEPT,
    ON_HOST,
    StepPolicy,
    canonical_remat,
)
from jaxmem_callbacks.transforms.costs import is_complex, view_roots
from jaxmem_callbacks.transforms.loss_profile import CheapValues, LossProfile
from jaxmem_callbacks.transforms.save_frontier import named
from jaxmem_callbacks.transforms.segments import Choice, Loop, Segment, offloads_by_kind, results_by_segment, sizes
from jaxmem_callbacks.transforms.tracing import (
    CHECKPOINTS,
    Equations,
    Sharing,
    checkpoint_equation,
    checkpoint_template,
    close,
    derive,
    flatten,
    has_own_checkpoint,
    is_movable,
    is_variable,
    new_variable,
    open_jaxpr,
    operands_of,
    scan_arity,
    subjaxprs,
    unused_dropped,
    variables,
)

# Complex of real operands.
_FROM_REAL = {"complex", "fft"}
_POLICIES = jax.checkpoint_policies
_WITHOUT_NAMES: dict[str, Callable[[], Callable[..., Any] | None]] = {
    "full": lambda: None,
    "everything_saveable": lambda: _POLICIES.everything_saveable,
    "dots_saveable": lambda: _POLICIES.dots_saveable,
    "dots_with_no_batch_dims_saveable": lambda: _POLICIES.dots_with_no_batch_dims_saveable,
    "offload_dot_with_no_batch_dims": lambda: _POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "save_only_these_names": lambda: None,
    "save_and_offload_only_these_names": lambda: None,
}


def checkpoint_policy(policy: StepPolicy) -> Callable[..., Any]:
    """JAX's policy for what a segment keeps besides its inputs.

    Raises:
        PolicyError: offloading by name together with a policy that also saves by kind, or by kind together with names or a
            share that are kept: JAX cannot combine them.
    """
    by_kind = _WITHOUT_NAMES[policy.remat]()
    by_kind = by_kind and _of_real_values(by_kind)
    names = [*policy.save, KEPT]  # what waits for the loss's head keeps that even where the policy keeps nothing
    if policy.offload:
        if by_kind is not None:
            msg = (
                f"remat={policy.remat!r} with offload={policy.offload!r}: JAX combines offloading by name with no other "
                "policy. Use remat='full' with save=(...) and offload=(...)."
            )
            raise PolicyError(msg)
        return offloading([ON_HOST.get(name, name) for name in policy.offload], names)
    if by_kind is None:
        return _POLICIES.save_only_these_names(*names)
    if not offloads_by_kind(policy):
        return _POLICIES.save_from_both_policies(by_kind, _POLICIES.save_only_these_names(*names))
    if policy.save or policy.keep:
        also = f"save={policy.save!r}" if policy.save else f"keep={policy.keep}"
        msg = (
            f"remat={policy.remat!r} with {also}: what is kept on the device would be matrix products that this policy moves to "
            "the host. Leave it out, or use remat='full' with save=(...) and offload=(...)."
        )
        raise PolicyError(msg)
    return by_kind


def _of_real_values(by_kind: Callable[..., Any]) -> Callable[..., Any]:
    """The same policy, but complex values are computed again: JAX (to 0.12 at least) cannot round them to what it would keep."""

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        dtypes = [params.get("new_dtype"), *(getattr(aval, "dtype", None) for aval in avals)]
        makes_complex = primitive.name in _FROM_REAL or any(map(is_complex, dtypes))
        return False if makes_complex else by_kind(primitive, *avals, **params)

    return policy


def offloading(offload: Sequence[str], save: Sequence[str] = ()) -> Callable[..., Any]:
    """JAX's checkpoint policy under which some names wait in pinned host memory and others stay where they are."""
    return _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=list(save),
        names_which_can_be_offloaded=list(offload),
        offload_src="device",
        offload_dst="pinned_host",
    )


def named_policy(name: str) -> Callable[..., Any] | None:
    """JAX's checkpoint policy for one word of ours, for remat by module.

    Raises:
        PolicyError: unknown, ``none``, which is no checkpoint at all, or a word of MaxText's, whose tensors would have to be
            looked up in the loss.
    """
    canonical = canonical_remat(name)
    if canonical == "none":
        msg = "policy='none' is no checkpoint at all: leave the module as it is, or use policy='full'."
        raise PolicyError(msg)
    if canonical in MAXTEXT_REMAT:
        msg = (
            f"policy={canonical!r} is MaxText's list of tensor names, which a module's own checkpoint can't look up. Use "
            f"remat={canonical!r} of the step's policy or of jm.remat, which look at the whole loss."
        )
        raise PolicyError(msg)
    return _WITHOUT_NAMES[StepPolicy(remat=canonical).remat]()


def named_by_the_loss(policy: StepPolicy, eqns: Iterable[Any]) -> StepPolicy:
    """A policy by a word of MaxText's as the names that the loss really has; any other as it is.

    Raises:
        PolicyError: the loss has none of them.
    """
    if policy.remat not in MAXTEXT_REMAT:
        return policy
    wanted, present = MAXTEXT_REMAT[policy.remat], _names(eqns)
    found = tuple(name for name in wanted if name in present)
    if not found:
        known = ", ".join(sorted(present)) or "none"
        msg = (
            f"remat={policy.remat!r} keeps MaxText's tensors {', '.join(wanted)}, and the loss names none of these. Names "
            f"given by jax.ad_checkpoint.checkpoint_name in it: {known}. Name them there, or use remat='dots_with_no_batch_dims'."
        )
        raise PolicyError(msg)
    if policy.remat.endswith("_offloaded"):
        return replace(policy, remat="save_and_offload_only_these_names", offload=(*policy.offload, *found))
    return replace(policy, remat="save_only_these_names", save=(*policy.save, *found))


def require_names(policy: StepPolicy, eqns: Iterable[Any]) -> None:
    """Refuse names that no `checkpoint_name` in the loss gives, or that only a checkpoint of the user's own would obey.

    Raises:
        PolicyError: names each missing one and lists those that exist.
    """
    wanted = (*policy.save, *policy.offload)
    if not wanted:
        return
    present, within_reach = _names(eqns), _names(eqns, own_checkpoints=False)
    not_real = {
        one.params["name"]: one.invars[0].aval.dtype for one in _namings(eqns) if is_complex(one.invars[0].aval.dtype)
    }
    for name in wanted:
        if name in not_real:
            msg = (
                f"The loss's value named {name!r} is {not_real[name]}, and JAX's checkpoints keep real values only. Name its "
                "real and imaginary parts (jnp.real, jnp.imag) and compute on from those, or leave the name out."
            )
            raise PolicyError(msg)
        if name in policy.offload and name in ON_HOST:
            if name in present:
                msg = (
                    f"offload={policy.offload!r}: {name!r} means what the library stores of loops, and the loss has a value of "
                    "that name too. Give the value another name in its checkpoint_name call."
                )
                raise PolicyError(msg)
        elif name not in present:
            known = ", ".join(sorted(present)) or "none"
            msg = (
                f"The loss has no value named {name!r}.{did_you_mean(name, present)} Names given by "
                f"jax.ad_checkpoint.checkpoint_name in it: {known}."
            )
            raise PolicyError(msg)
        elif name not in within_reach:
            msg = (
                f"The loss names {name!r} only inside checkpoints of its own (jax.checkpoint, nn.remat, nnx.remat), which stay "
                f"as you wrote them: the policy would do nothing. Give them a policy that saves "
                f"{name!r}, or remove them."
            )
            raise PolicyError(msg)


def require_offloaded(policy: StepPolicy, jaxpr: Any, keep: Callable[..., Any]) -> None:
    """Refuse to offload where nothing of the kind is stored.

    Args:
        policy: What was asked for.
        jaxpr: The function, cut.
        keep: What its checkpoints keep, as JAX's policy.

    Raises:
        PolicyError: the function has no loop that stores it, or the named value is where nothing is cut.
    """
    policy = named_by_the_loss(policy, jaxpr.eqns)
    if not policy.offload:
        return
    present, obeyed = _names(jaxpr.eqns), _obeyed(jaxpr.eqns, keep)
    for word in policy.offload:
        if word not in ON_HOST and word not in obeyed:
            msg = (
                f"offload={policy.offload!r}: {word!r} is where nothing is cut (the end of the loss, or a loop or checkpoint "
                "left as it is) or at a cut, so it would stay on the device. Leave it out of offload."
            )
            raise PolicyError(msg)
        if word in ON_HOST and ON_HOST[word] not in present:
            raise PolicyError(_NO_LOOP)


# The same words whatever was asked for: a plan prints once what all its policies that offload share.
_NO_LOOP = (
    f"In offload {OFFLOAD_CUTS!r} moves what a loop over layers hands from step to step, {OFFLOAD_KEPT!r} moves what keep keeps "
    "of each step, and this loss has no loop that stores what was asked for. Layers written out one by one are never offloaded: "
    "compilers for an H100 and a v5e then needed more device memory, not less. Write the layers as one jax.lax.scan (nn.scan, "
    "nnx.scan), or leave offload out."
)


def _names(eqns: Iterable[Any], *, own_checkpoints: bool = True) -> set[str]:
    """Names given in equations and their bodies, those of checkpoints too or not."""
    return {eqn.params["name"] for eqn in _namings(eqns, own_checkpoints=own_checkpoints)}


def _namings(eqns: Iterable[Any], *, own_checkpoints: bool = True) -> Iterator[Any]:
    """The equations that give names, in bodies too."""
    for eqn in eqns:
        if eqn.primitive.name == "name":
            yield eqn
        if own_checkpoints or eqn.primitive.name not in CHECKPOINTS:
            for body in subjaxprs(eqn):
                yield from _namings(body.eqns, own_checkpoints=own_checkpoints)


def _obeyed(eqns: Iterable[Any], keep: Callable[..., Any]) -> set[str]:
    """Names inside checkpoints that have this policy, of values that these do not hand on: such are on the device anyway."""
    found: set[str] = set()
    for eqn in eqns:
        if eqn.primitive.name in CHECKPOINTS and eqn.params.get("policy") is keep:
            (body,) = subjaxprs(eqn)
            roots = view_roots(body.eqns)
            handed_on = {roots.get(var, var) for var in variables(body.outvars)}
            found |= _names(
                one for one in body.eqns if handed_on.isdisjoint(roots.get(var, var) for var in one.outvars)
            )
        else:
            found = found.union(*(_obeyed(body.eqns, keep) for body in subjaxprs(eqn)))
    return found


Policy = Callable[..., Any] | None


def apply(loss: LossProfile, choice: Choice, policy: Policy) -> Any:
    """The loss as a jaxpr with the checkpoints that were chosen.

    Args:
        loss: The loss.
        choice: Where it is cut, and what its pieces keep.
        policy: What checkpoints keep in addition, as JAX's checkpoint policy.
    """
    flat, cheap = loss.flat, choice.cheap
    template, sharing = checkpoint_template(policy, prevent_cse=True), Sharing()
    put_loop = loop_in_two_levels if choice.levels > 1 else loop_in_chunks
    eqns: list[Any] = loss.cheap.equations_for(choice.shared)
    for piece in choice.pieces:
        segment = piece.segment
        if piece.loop is not None:
            segment = Segment(put_loop(piece.loop, policy, piece.kept), cheap, segment.results)
        if piece.is_checkpointed:
            eqns += _checkpointed(segment, flat, template, dict.fromkeys(piece.kept, KEPT), sharing)
        else:
            eqns += segment.eqns
    eqns += cheap.equations_for(variables(flat.outvars))
    # Outside the segments a cheap value may have been asked for more than once: it is made at the first place.
    once = {id(eqn): eqn for eqn in eqns}
    jaxpr = derive(flat.template, invars=flat.invars, outvars=flat.outvars, eqns=list(once.values()))
    return grouped(flat, jaxpr, choice.groups) if choice.levels > 1 else jaxpr


def _checkpointed(
    segment: Segment, flat: Equations, template: Any, kept: Mapping[Any, str], sharing: Sharing
) -> list[Any]:
    """One checkpoint equation around a segment, and the segment's reports behind it.

    Args:
        segment: What is put under it.
        flat: The function being cut.
        template: A checkpoint equation to fill in.
        kept: Values that it keeps, inputs too, and the names by which its policy knows them.
        sharing: The segments made before, for one that is equal.
    """
    made = dict.fromkeys(var for eqn in segment.own for var in eqn.outvars)
    reported = operands_of(segment.reports)
    invars = [var for var in operands_of(segment.own) if var not in made]
    outvars = [var for var in made if var not in segment.cheap.makers and (var in reported or var in segment.results)]
    if not outvars:
        return [*segment.report_makers, *segment.reports]
    eqns, names = named(segment.own, kept)
    inner = derive(flat.template, invars=invars, outvars=[names.get(var, var) for var in outvars], eqns=eqns)
    one = checkpoint_equation(template, sharing.shared(inner), invars, outvars)
    return [one, *segment.report_makers, *segment.reports]


def _kept_name(loop: Loop) -> str:
    """The name of what a loop's steps keep."""
    return ON_HOST[OFFLOAD_KEPT] if loop.keeps_on_host else KEPT


def _checkpointed_loop(loop: Loop, policy: Policy, kept: frozenset[Any], moved: frozenset[int] = frozenset()) -> Any:
    """A loop with a checkpointed body. Inside a loop nothing merges the recomputation with the original: no barrier.

    Args:
        loop: The loop.
        policy: What the body keeps, as JAX's checkpoint policy.
        kept: Values of the body that it keeps.
        moved: Which of the carried values wait in host memory.
    """
    flat = loop.flat
    consts, _ = scan_arity(loop.eqn)
    names = dict.fromkeys(kept, _kept_name(loop))
    names |= {flat.invars[consts + place]: ON_HOST[OFFLOAD_CUTS] for place in moved}
    reports = [inner for inner in flat.eqns if is_movable(inner)]
    # JAX (to 0.12 at least) cannot differentiate a scan whose report uses a checkpoint's result: what a report needs is
    # computed beside the checkpoint, where XLA merges it with the same values inside.
    beside = unused_dropped(flat.eqns, [var for report in reports for var in report.invars])
    template = checkpoint_template(policy, prevent_cse=False)
    eqns = [*_renamed(beside), *_checkpointed(loop.body, flat, template, names, Sharing())]
    return _with_body(loop, derive(flat.template, invars=flat.invars, outvars=flat.outvars, eqns=eqns))


def _named_loop(loop: Loop, kept: frozenset[Any]) -> Any:
    """A loop as it is, its kept values named: for a checkpoint around several of its steps."""
    flat = loop.flat
    eqns, names = named(flat.eqns, dict.fromkeys(kept, _kept_name(loop)))
    outvars = [names.get(var, var) if is_variable(var) else var for var in flat.outvars]
    return _with_body(loop, derive(flat.template, invars=flat.invars, outvars=outvars, eqns=eqns))


def _with_body(loop: Loop, body: Any) -> Any:
    return loop.eqn.replace(params={**loop.eqn.params, "jaxpr": close(body)})


def _renamed(eqns: Sequence[Any]) -> list[Any]:
    """The same equations making variables of their own."""
    names: dict[Any, Any] = {}
    renamed = []
    for eqn in eqns:
        invars = [names.get(atom, atom) if is_variable(atom) else atom for atom in eqn.invars]
        outvars = [new_variable(var) for var in eqn.outvars]
        names.update(zip(eqn.outvars, outvars, strict=True))
        renamed.append(eqn.replace(invars=invars, outvars=outvars))
    return renamed


# Two groups of two: of fewer, a second level would save hardly anything.
_FEWEST = 2 * 2


def loop_in_steps(loop: Loop, policy: Policy, kept: frozenset[Any]) -> list[Any]:
    """A loop with a checkpoint around each step, made without tracing it again."""
    return [_checkpointed_loop(loop, policy, kept, loop.moved)]


def loop_in_chunks(loop: Loop, policy: Policy, kept: frozenset[Any]) -> list[Any]:
    """A loop with a checkpoint around each step, or around as many steps as take least bytes together."""
    found = _loop_of_loops(_named_loop(loop, kept), loop.chunk, policy, loop.moved) if loop.chunk > 1 else None
    return found or loop_in_steps(loop, policy, kept)


def loop_in_two_levels(loop: Loop, policy: Policy, kept: frozenset[Any]) -> list[Any]:
    """A loop with checkpoints around its steps and around parts of about the root of its length."""
    once = _checkpointed_loop(loop, policy, kept)
    # What is left over is one more part, and one more copy of stacks: a divisor is better.
    part = min(sizes(loop.trips), key=lambda n: n + -(-loop.trips // n) + bool(loop.trips % n), default=0)
    deep = loop.trips >= _FEWEST and not once.effects
    outer = offloading([ON_HOST[OFFLOAD_CUTS]]) if loop.moved else None
    found = _loop_of_loops(once, part, outer, loop.moved) if deep else None
    return found or loop_in_steps(loop, policy, kept)


def _loop_of_loops(eqn: Any, inner: int, policy: Policy, moved: frozenset[int]) -> list[Any] | None:
    """A `scan` as a scan of checkpointed scans over ``inner`` steps each; None where its equation cannot be replaced.

    What is left over is a checkpointed scan of its own, which runs last.

    Args:
        eqn: The scan.
        inner: Steps of each inner loop.
        policy: What the checkpoints around these keep.
        moved: Which of the values carried from one to the next wait in host memory.
    """
    length = int(eqn.params["length"])
    consts, carry = scan_arity(eqn)
    body = core.jaxpr_as_fun(eqn.params["jaxpr"])
    # As the user wrote the loop; the outer one is this library's, and its steps are large enough.
    as_written = {name: eqn.params[name] for name in ("reverse", "_split_transpose") if name in eqn.params}
    unroll = min(eqn.params["unroll"], inner)

    left = length % inner

    def nested(*operands: Any) -> Any:
        fixed, start, stacked = operands[:consts], operands[consts : consts + carry], operands[consts + carry :]

        def step(state: Any, slices: Any) -> Any:
            results = body(*fixed, *state, *slices)
            return tuple(results[:carry]), tuple(results[carry:])

        @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)  # in a loop nothing merges the two passes
        def part(state: Any, slices: Any) -> Any:
            state = tuple(
                checkpoint_name(value, ON_HOST[OFFLOAD_CUTS]) if place in moved else value
                for place, value in enumerate(state)
            )
            return jax.lax.scan(step, state, slices, length=inner, unroll=unroll, **as_written)

        @functools.partial(jax.checkpoint, policy=policy)
        def last(state: Any, slices: Any) -> Any:
            return jax.lax.scan(step, state, slices, length=left, unroll=min(unroll, left), **as_written)

        # The loop ends with its first elements where it runs backwards.
        divided = [_divided(x, left, first=eqn.params["reverse"]) for x in stacked]
        parts = tuple(x.reshape(length // inner, inner, *x.shape[1:]) for x, _ in divided)
        end, made = jax.lax.scan(part, tuple(start), parts, length=length // inner, **as_written)
        made = [y.reshape(length - left, *y.shape[2:]) for y in made]
        if left:
            end, more = last(end, tuple(rest for _, rest in divided))
            joined = [more, made] if eqn.params["reverse"] else [made, more]
            made = [jax.lax.concatenate(pair, 0) for pair in zip(*joined, strict=True)]
        return [*end, *made]

    return _in_place_of(eqn, nested)


def _divided(stacked: Any, left: int, *, first: bool) -> tuple[Any, Any]:
    """A stack without ``left`` of its elements, its first or its last, and those."""
    place = left if first else stacked.shape[0] - left
    halves = stacked[:place], stacked[place:]
    return halves[::-1] if first else halves


def _in_place_of(eqn: Any, function: Any) -> list[Any] | None:
    """The equations of a function that computes what an equation does, with its variables; None where they cannot be had."""
    # The types whole: where they are on an explicit mesh and along which axes of a shard_map they vary is part of them.
    with first_checkpoints():
        flat = flatten(jax.make_jaxpr(function)(*(atom.aval for atom in eqn.invars)))
    made = {var for one in flat.eqns for var in one.outvars}
    results = variables(flat.outvars)
    if flat.consts or len(set(results)) != len(flat.outvars) or not made.issuperset(results):
        return None
    names = dict(zip(flat.invars, eqn.invars, strict=True)) | dict(zip(results, eqn.outvars, strict=True))
    return [
        _with_source(
            one.replace(
                invars=[names.get(atom, atom) if is_variable(atom) else atom for atom in one.invars],
                outvars=[names.get(var, var) for var in one.outvars],
            ),
            eqn.source_info,
            depth=2 if one.primitive.name == "scan" else 1,
        )
        for one in flat.eqns
    ]


def _with_source(one: Any, source: Any, depth: int) -> Any:
    """An equation of ours with the user's line and scope: the outer loop, the checkpoint in it or left over, the loop in that.

    What is deeper is the user's own body, which has its lines.
    """
    params = dict(one.params)
    if depth and "jaxpr" in params:
        body = open_jaxpr(params["jaxpr"])
        plain = source.replace(name_stack=one.source_info.name_stack)
        eqns = [_with_source(inner, plain, depth - 1) for inner in body.eqns]
        derived = derive(params["jaxpr"], invars=body.invars, outvars=body.outvars, eqns=eqns)
        params["jaxpr"] = close(derived) if one.primitive.name == "scan" else derived
    return one.replace(params=params, source_info=source)


def grouped(flat: Equations, jaxpr: Any, groups: Sequence[int] = ()) -> Any:
    """A function that is cut into segments, with checkpoints around groups of them.

    Args:
        flat: The function.
        jaxpr: It, cut.
        groups: After how many of the segments each group but the last ends; about the root of their number is a group without.
    """
    eqns = list(jaxpr.eqns)
    ends = [place for place, eqn in enumerate(eqns, 1) if has_own_checkpoint(eqn)]
    if len(ends) < _FEWEST:
        return jaxpr
    # Segments hold about equal bytes already, so groups of equally many do too.
    each = math.ceil(len(ends) / round(math.sqrt(len(ends))))
    # A segment of reports alone has no checkpoint.
    after = [ends[count - 1] for count in groups if count <= len(ends)] or ends[each - 1 :: each]
    bounds = sorted({0, *after, len(eqns)})
    template, sharing, nothing = checkpoint_template(None, prevent_cse=True), Sharing(), CheapValues({}, {})
    found: list[Any] = []
    for (start, end), results in zip(
        itertools.pairwise(bounds), results_by_segment(eqns, jaxpr.outvars, bounds), strict=True
    ):
        if end == len(eqns):
            found += eqns[start:end]
        else:
            found += _checkpointed(Segment(eqns[start:end], nothing, results), flat, template, {}, sharing)
    return derive(flat.template, invars=jaxpr.invars, outvars=jaxpr.outvars, eqns=found)
