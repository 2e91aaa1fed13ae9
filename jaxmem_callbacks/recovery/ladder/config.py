"""The configuration of a recovery: presets, policies and plans in any accepted form."""

from __future__ import annotations

from typing import Any

from jaxmem_callbacks.config.named import policy_of
from jaxmem_callbacks.planning.choice import pareto
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.presets import Preset, RecoverySettings


def settings_wanted(policy: Any) -> RecoverySettings:
    """The ``recovery`` section of a preset; the defaults for everything else."""
    return policy.recovery if isinstance(policy, Preset) else RecoverySettings()


def policy_wanted(policy: Any, plan: Any) -> StepPolicy:
    """The policy to begin with: what was said, else the plan's, else none.

    Raises:
        TypeError: something that is no policy and no preset.
        PlanError: the policy of a plan in which nothing fits.
    """
    says_policy = not isinstance(policy, Preset) or any(key.startswith("policy.") for key in policy.said)
    if policy is not None and (says_policy or plan is None):
        return policy_of(policy)
    return StepPolicy() if plan is None else policy_of(plan.policy)


def record_of(plan: Any) -> PlanRecord | None:
    """The record of a plan.

    Raises:
        TypeError: something else.
    """
    record = getattr(plan, "record", None)
    if plan is None or isinstance(record, PlanRecord):
        return record
    msg = f"Recovery got {type(plan).__name__} as plan. Expected a plan of jm.plan or jm.load_plan."
    raise TypeError(msg)


def frontier_below(plan: PlanRecord | None, policy: StepPolicy) -> list[StepPolicy]:
    """Policies of the plan's frontier that need less than this one's remat does, from most bytes to least."""
    if plan is None:
        return []
    chosen = plan.candidates[plan.chosen]
    like = [each for each in plan.candidates if (each.batch_rows, each.mesh) == (chosen.batch_rows, chosen.mesh)]
    like = [each for each in like if each.policy.sharding == chosen.policy.sharding and each.step_bytes is not None]
    now = next((each for each in like if _remat(each.policy) == _remat(policy)), chosen)
    return [each.policy for each in pareto(like) if (each.step_bytes or 0) < (now.step_bytes or 0)]


def promised_by(plan: PlanRecord | None, policy: StepPolicy) -> int | None:
    """Bytes on one device that the plan's program reuses under this policy; None where it says nothing of it."""
    if plan is None or plan.target != "attached":
        return None
    chosen = plan.candidates[plan.chosen]
    return chosen.alias_bytes if chosen.policy == policy else None


def _remat(policy: StepPolicy) -> tuple[Any, ...]:
    return policy.remat, policy.segments, policy.levels, policy.keep, policy.save, policy.offload
