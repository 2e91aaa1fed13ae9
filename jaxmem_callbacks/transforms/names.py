"""From a policy's words to JAX's checkpoint policies, and the names that a model really has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxmem_callbacks._compat.jaxprs import subjaxprs
from jaxmem_callbacks.records.errors import PolicyError, did_you_mean
from jaxmem_callbacks.records.policies import OFFLOAD_CUTS, OFFLOAD_KEPT, StepPolicy, canonical_remat

# Given to what the library itself chose to keep.
KEPT = "jaxmem_kept"
# The same for what waits in host memory, by the policy's own words for it.
ON_HOST = {OFFLOAD_CUTS: "jaxmem_cut_on_host", OFFLOAD_KEPT: "jaxmem_kept_on_host"}
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
        return offloading([ON_HOST.get(name, name) for name in policy.offload], names)
    if not names:
        return by_kind
    by_name = _POLICIES.save_only_these_names(*names)
    return by_name if by_kind is None else _POLICIES.save_from_both_policies(by_kind, by_name)


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


def require_offloaded(policy: StepPolicy, jaxpr: Any) -> None:
    """Refuse to offload where nothing of the kind is stored.

    Raises:
        PolicyError: the function that was cut has no loop that stores it.
    """
    words = [word for word in policy.offload if word in ON_HOST]
    present = _names(jaxpr.eqns) if words else set[str]()
    for word in words:
        if ON_HOST[word] not in present:
            msg = (
                f"offload={policy.offload!r}: {word!r} moves {_MOVED[word]}, and this loss has no loop that stores any. Layers "
                "written out one by one are never offloaded: compilers for an H100 and a v5e then needed more device memory, not "
                "less. Write the layers as one jax.lax.scan (nn.scan, nnx.scan), or leave offload out."
            )
            raise PolicyError(msg)


_MOVED = {
    OFFLOAD_CUTS: "what a loop over layers hands from step to step",
    OFFLOAD_KEPT: "what keep keeps of each step of a loop over layers",
}


def _names(eqns: Iterable[Any]) -> set[str]:
    found: set[str] = set()
    for eqn in eqns:
        if eqn.primitive.name == "name":
            found.add(eqn.params["name"])
        for body in subjaxprs(eqn):
            found |= _names(body.eqns)
    return found
