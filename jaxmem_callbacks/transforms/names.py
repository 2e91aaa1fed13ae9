"""From a policy's words to JAX's checkpoint policies, and the names that a model really has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxmem_callbacks._compat.jaxprs import subjaxprs
from jaxmem_callbacks.records.errors import PolicyError, did_you_mean
from jaxmem_callbacks.records.policies import StepPolicy, canonical_remat

# Given to what the library itself chose to keep.
KEPT = "jaxmem_kept"
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


def checkpoint_policy(policy: StepPolicy) -> Callable[..., Any] | None:
    """JAX's policy for what a segment keeps besides its inputs; None keeps nothing.

    Raises:
        PolicyError: offloading by name together with a policy that also saves by kind, which JAX cannot combine.
    """
    by_kind = _WITHOUT_NAMES[policy.remat]()
    names = [*policy.save, *([KEPT] if policy.keep else [])]
    if policy.offload:
        if by_kind is not None:
            msg = (
                f"remat={policy.remat!r} with offload={policy.offload!r}: JAX combines offloading by name with no other "
                "policy. Use remat='full' with save=(...) and offload=(...)."
            )
            raise PolicyError(msg)
        return _POLICIES.save_and_offload_only_these_names(
            names_which_can_be_saved=names,
            names_which_can_be_offloaded=list(policy.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )
    if not names:
        return by_kind
    by_name = _POLICIES.save_only_these_names(*names)
    return by_name if by_kind is None else _POLICIES.save_from_both_policies(by_kind, by_name)


def named_policy(name: str) -> Callable[..., Any] | None:
    """JAX's checkpoint policy for one word of ours, for remat by module.

    Raises:
        PolicyError: unknown, or ``none``, which is no checkpoint at all.
    """
    canonical = canonical_remat(name)
    if canonical == "none":
        msg = "policy='none' is no checkpoint at all: leave the module as it is, or use policy='full'."
        raise PolicyError(msg)
    return checkpoint_policy(StepPolicy(remat=canonical))


def require_names(policy: StepPolicy, eqns: Iterable[Any]) -> None:
    """Refuse names that no `checkpoint_name` in the loss gives.

    Raises:
        PolicyError: names each missing one and lists those that exist.
    """
    wanted = (*policy.save, *policy.offload)
    if not wanted:
        return
    present = _names(eqns)
    for name in wanted:
        if name not in present:
            known = ", ".join(sorted(present)) or "none"
            msg = (
                f"The loss has no value named {name!r}.{did_you_mean(name, present)} Names given by "
                f"jax.ad_checkpoint.checkpoint_name in it: {known}."
            )
            raise PolicyError(msg)


def _names(eqns: Iterable[Any]) -> set[str]:
    found: set[str] = set()
    for eqn in eqns:
        if eqn.primitive.name == "name":
            found.add(eqn.params["name"])
        for body in subjaxprs(eqn):
            found |= _names(body.eqns)
    return found
