"""From a policy's words to JAX's checkpoint policies, and the names that a model really has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxmem_callbacks._compat.jaxprs import subjaxprs
from jaxmem_callbacks.records.errors import PolicyError, did_you_mean
from jaxmem_callbacks.records.policies import MAXTEXT_REMAT, OFFLOAD_CUTS, OFFLOAD_KEPT, StepPolicy, canonical_remat
from jaxmem_callbacks.transforms.costs import is_complex, view_roots
from jaxmem_callbacks.transforms.tracing import variables

# Given to what the library itself chose to keep.
KEPT = "jaxmem_kept"
# The same for what waits in host memory, by the policy's own words for it.
ON_HOST = {OFFLOAD_CUTS: "jaxmem_cut_on_host", OFFLOAD_KEPT: "jaxmem_kept_on_host"}
# Complex of real operands.
_FROM_REAL = {"complex", "fft"}
# The checkpoint's own name, on every JAX line.
CHECKPOINTS = {"checkpoint", "remat", "remat2"}
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


def offloads_by_kind(policy: StepPolicy) -> bool:
    """Whether a policy moves values to the host that have no names, which JAX combines with nothing that is kept by name."""
    return policy.remat == "offload_dot_with_no_batch_dims"


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
        keep: The policy of its checkpoints.

    Raises:
        PolicyError: the function has no loop that stores it, or the named value lies where nothing is cut.
    """
    if not policy.offload:
        return
    present, obeyed = _names(jaxpr.eqns), _obeyed(jaxpr.eqns, keep)
    for word in policy.offload:
        if word not in ON_HOST and word not in obeyed:
            msg = (
                f"offload={policy.offload!r}: {word!r} lies where nothing is cut (the end of the loss, or a loop or checkpoint "
                "left as it is) or at a cut, so it would stay on the device. Leave it out of offload."
            )
            raise PolicyError(msg)
        if word in ON_HOST and ON_HOST[word] not in present:
            raise PolicyError(_NO_LOOP)


# The same words whatever was asked for: a plan tells once what all its policies that offload share.
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
    """Names inside checkpoints that have this policy, of values that these do not hand on: such lie on the device anyway."""
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
