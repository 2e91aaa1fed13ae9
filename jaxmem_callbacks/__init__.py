"""Memory callbacks for JAX training: apply remat and donation policies, watch device memory, explain what happens.

    import jaxmem_callbacks as jm

Names load lazily, so importing the package starts no backend and costs almost nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmem_callbacks.api.environment import apply_environment as apply_environment
    from jaxmem_callbacks.api.plan import Plan as Plan
    from jaxmem_callbacks.api.plan import load_plan as load_plan
    from jaxmem_callbacks.api.plan import plan as plan
    from jaxmem_callbacks.api.simulation import simulate_allocator as simulate_allocator
    from jaxmem_callbacks.callbacks.monitor import MemoryMonitor as MemoryMonitor
    from jaxmem_callbacks.config.presets import list_presets as list_presets
    from jaxmem_callbacks.config.presets import load_preset as load_preset
    from jaxmem_callbacks.integrations import equinox as eqx
    from jaxmem_callbacks.integrations import flax_linen as linen
    from jaxmem_callbacks.integrations import flax_nnx as nnx
    from jaxmem_callbacks.probes.protocol import ScriptedProbe as ScriptedProbe
    from jaxmem_callbacks.programs.memory import StepMemory as StepMemory
    from jaxmem_callbacks.programs.memory import step_memory as step_memory
    from jaxmem_callbacks.programs.steps.step import jit_step as jit_step
    from jaxmem_callbacks.programs.steps.step import place_state as place_state
    from jaxmem_callbacks.records.errors import ComparisonError as ComparisonError
    from jaxmem_callbacks.records.errors import CompileError as CompileError
    from jaxmem_callbacks.records.errors import CompileTimeoutError as CompileTimeoutError
    from jaxmem_callbacks.records.errors import DefragmentError as DefragmentError
    from jaxmem_callbacks.records.errors import DonationError as DonationError
    from jaxmem_callbacks.records.errors import DonationWarning as DonationWarning
    from jaxmem_callbacks.records.errors import EnvironmentSettingError as EnvironmentSettingError
    from jaxmem_callbacks.records.errors import JaxmemError as JaxmemError
    from jaxmem_callbacks.records.errors import LossRefusedError as LossRefusedError
    from jaxmem_callbacks.records.errors import PatternError as PatternError
    from jaxmem_callbacks.records.errors import PlanError as PlanError
    from jaxmem_callbacks.records.errors import PolicyError as PolicyError
    from jaxmem_callbacks.records.errors import PresetError as PresetError
    from jaxmem_callbacks.records.errors import RecoveryError as RecoveryError
    from jaxmem_callbacks.records.errors import RecoveryWarning as RecoveryWarning
    from jaxmem_callbacks.records.errors import RunFileError as RunFileError
    from jaxmem_callbacks.records.errors import SimulationError as SimulationError
    from jaxmem_callbacks.records.errors import TargetError as TargetError
    from jaxmem_callbacks.records.policies import StepPolicy as StepPolicy
    from jaxmem_callbacks.records.presets import Preset as Preset
    from jaxmem_callbacks.recovery.defragment import defragment as defragment
    from jaxmem_callbacks.recovery.guard import oom_guard as oom_guard
    from jaxmem_callbacks.recovery.recovery import Recovery as Recovery
    from jaxmem_callbacks.recovery.texts.parsing import parse_oom as parse_oom
    from jaxmem_callbacks.transforms.accumulation.accumulate import weighted as weighted
    from jaxmem_callbacks.transforms.gradients import apply_policy as apply_policy
    from jaxmem_callbacks.transforms.gradients import grad as grad
    from jaxmem_callbacks.transforms.gradients import value_and_grad as value_and_grad
    from jaxmem_callbacks.transforms.prefetch import prefetch as prefetch
    from jaxmem_callbacks.transforms.remat import remat as remat
    from jaxmem_callbacks.transforms.sharding.infer import infer_shardings as infer_shardings
    from jaxmem_callbacks.transforms.sharding.mesh import make_mesh as make_mesh
    from jaxmem_callbacks.writers.adapters import as_writer as as_writer
    from jaxmem_callbacks.writers.metric_files import CsvWriter as CsvWriter
    from jaxmem_callbacks.writers.metric_files import PrometheusWriter as PrometheusWriter
    from jaxmem_callbacks.writers.protocol import CollectingWriter as CollectingWriter

# Public name -> (module, attribute); None for a module that is itself the public name. `__all__` says the names once
# more, for type checkers, and a test compares the three.
_EXPORTS: dict[str, tuple[str, str | None]] = {
    "CollectingWriter": ("writers.protocol", "CollectingWriter"),
    "ComparisonError": ("records.errors", "ComparisonError"),
    "CompileError": ("records.errors", "CompileError"),
    "CompileTimeoutError": ("records.errors", "CompileTimeoutError"),
    "CsvWriter": ("writers.metric_files", "CsvWriter"),
    "DefragmentError": ("records.errors", "DefragmentError"),
    "DonationError": ("records.errors", "DonationError"),
    "DonationWarning": ("records.errors", "DonationWarning"),
    "EnvironmentSettingError": ("records.errors", "EnvironmentSettingError"),
    "JaxmemError": ("records.errors", "JaxmemError"),
    "LossRefusedError": ("records.errors", "LossRefusedError"),
    "MemoryMonitor": ("callbacks.monitor", "MemoryMonitor"),
    "PatternError": ("records.errors", "PatternError"),
    "Plan": ("api.plan", "Plan"),
    "PlanError": ("records.errors", "PlanError"),
    "PolicyError": ("records.errors", "PolicyError"),
    "Preset": ("records.presets", "Preset"),
    "PresetError": ("records.errors", "PresetError"),
    "PrometheusWriter": ("writers.metric_files", "PrometheusWriter"),
    "Recovery": ("recovery.recovery", "Recovery"),
    "RecoveryError": ("records.errors", "RecoveryError"),
    "RecoveryWarning": ("records.errors", "RecoveryWarning"),
    "RunFileError": ("records.errors", "RunFileError"),
    "ScriptedProbe": ("probes.protocol", "ScriptedProbe"),
    "SimulationError": ("records.errors", "SimulationError"),
    "StepMemory": ("programs.memory", "StepMemory"),
    "StepPolicy": ("records.policies", "StepPolicy"),
    "TargetError": ("records.errors", "TargetError"),
    "apply_environment": ("api.environment", "apply_environment"),
    "apply_policy": ("transforms.gradients", "apply_policy"),
    "as_writer": ("writers.adapters", "as_writer"),
    "defragment": ("recovery.defragment", "defragment"),
    "eqx": ("integrations.equinox", None),
    "grad": ("transforms.gradients", "grad"),
    "infer_shardings": ("transforms.sharding.infer", "infer_shardings"),
    "jit_step": ("programs.steps.step", "jit_step"),
    "linen": ("integrations.flax_linen", None),
    "list_presets": ("config.presets", "list_presets"),
    "load_plan": ("api.plan", "load_plan"),
    "load_preset": ("config.presets", "load_preset"),
    "make_mesh": ("transforms.sharding.mesh", "make_mesh"),
    "nnx": ("integrations.flax_nnx", None),
    "oom_guard": ("recovery.guard", "oom_guard"),
    "parse_oom": ("recovery.texts.parsing", "parse_oom"),
    "place_state": ("programs.steps.step", "place_state"),
    "plan": ("api.plan", "plan"),
    "prefetch": ("transforms.prefetch", "prefetch"),
    "remat": ("transforms.remat", "remat"),
    "simulate_allocator": ("api.simulation", "simulate_allocator"),
    "step_memory": ("programs.memory", "step_memory"),
    "value_and_grad": ("transforms.gradients", "value_and_grad"),
    "weighted": ("transforms.accumulation.accumulate", "weighted"),
}

__version__ = "0.1.0"
__all__ = [
    "CollectingWriter",
    "ComparisonError",
    "CompileError",
    "CompileTimeoutError",
    "CsvWriter",
    "DefragmentError",
    "DonationError",
    "DonationWarning",
    "EnvironmentSettingError",
    "JaxmemError",
    "LossRefusedError",
    "MemoryMonitor",
    "PatternError",
    "Plan",
    "PlanError",
    "PolicyError",
    "Preset",
    "PresetError",
    "PrometheusWriter",
    "Recovery",
    "RecoveryError",
    "RecoveryWarning",
    "RunFileError",
    "ScriptedProbe",
    "SimulationError",
    "StepMemory",
    "StepPolicy",
    "TargetError",
    "apply_environment",
    "apply_policy",
    "as_writer",
    "defragment",
    "eqx",
    "grad",
    "infer_shardings",
    "jit_step",
    "linen",
    "list_presets",
    "load_plan",
    "load_preset",
    "make_mesh",
    "nnx",
    "oom_guard",
    "parse_oom",
    "place_state",
    "plan",
    "prefetch",
    "remat",
    "simulate_allocator",
    "step_memory",
    "value_and_grad",
    "weighted",
]


if not TYPE_CHECKING:  # a type checker that sees it takes every misspelt name for one that exists

    def __getattr__(name: str) -> Any:
        """Import a public name on first use."""
        if name not in _EXPORTS:
            from jaxmem_callbacks.records.errors import did_you_mean

            meant = did_you_mean(name, __all__)
            msg = f"module {__name__!r} has no attribute {name!r}.{meant} Public names: {', '.join(__all__)}."
            raise AttributeError(msg)
        module, attribute = _EXPORTS[name]
        loaded = importlib.import_module(f"{__name__}.{module}")
        value = loaded if attribute is None else getattr(loaded, attribute)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return [*__all__, "__version__"]
