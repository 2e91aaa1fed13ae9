"""The detectors of a monitor: settings, and the run's policy and plan, enter; one detector for each kind of event leaves."""

from __future__ import annotations

from collections.abc import Mapping

from jaxmem_callbacks.analysis.fragmentation import FragmentationDetector
from jaxmem_callbacks.analysis.growth import GrowthDetector, HostGrowthDetector
from jaxmem_callbacks.analysis.mesh_balance import ImbalanceDetector, ReplicationDetector
from jaxmem_callbacks.analysis.near_oom import NearOomDetector
from jaxmem_callbacks.analysis.observation import Detector
from jaxmem_callbacks.analysis.plan_check import PlanDetector
from jaxmem_callbacks.analysis.recompilation import DonationDetector, RecompilationDetector
from jaxmem_callbacks.probes.host_objects import largest_containers
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.transforms.sharding.shapes import would_split


def detectors_of(
    settings: MonitorSettings,
    *,
    split: str | None = None,
    plan: PlanRecord | None = None,
    versions: Mapping[str, str] | None = None,
    since_s: float = 0.0,
) -> tuple[Detector, ...]:
    """All of them, fresh.

    Args:
        settings: Their thresholds.
        split: How the policy splits the state over a mesh, or None.
        plan: What was foretold of the step, or None.
        versions: Package -> version of the process, for a plan.
        since_s: When the run began: compiles before are history.
    """
    return (
        NearOomDetector(settings),
        FragmentationDetector(settings),
        GrowthDetector(settings),
        HostGrowthDetector(settings, largest_containers),
        DonationDetector(since_s=since_s),
        RecompilationDetector(since_s=since_s),
        ReplicationDetector(settings, split, would_split),
        ImbalanceDetector(settings),
        *([PlanDetector(plan, versions or {})] if plan is not None else []),
    )
