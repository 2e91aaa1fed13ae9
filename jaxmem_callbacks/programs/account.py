"""A step's memory enters, its account leaves: what is saved of it, and compared with what it needs another day."""

from __future__ import annotations

import importlib.metadata

import jax

from jaxmem_callbacks.programs.memory import StepMemory
from jaxmem_callbacks.programs.targets.compilers import compiler_versions
from jaxmem_callbacks.records.accounts import ONE_STEP, Account, parts_of
from jaxmem_callbacks.records.peaks import Peak
from jaxmem_callbacks.records.policies import StepPolicy, policy_words
from jaxmem_callbacks.records.programs import ProgramMemory
from jaxmem_callbacks.transforms.arg_roles import batch_of

_COMPILERS = {"gpu": "cuda", "tpu": "tpu"}


def account_of_step(memory: StepMemory, policy: StepPolicy, peak: Peak | None) -> Account:
    """The account of one compiled step.

    Args:
        memory: What `jm.step_memory` told.
        policy: What the step was compiled under.
        peak: What makes its peak, told by group; None where nobody asked.
    """
    program = memory.program
    return Account(
        form="step memory",
        name=program.name,
        hardware=f"the attached {jax.devices()[0].device_kind}" if program.target == "attached" else program.target,
        judged={ONE_STEP: memory.step_bytes},
        shown=parts_of(program, peak),
        batch=batch_of(memory.signature),
        conditions={"policy": policy_words(policy), **_versions(program)},
    )


def _versions(program: ProgramMemory) -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    if program.target != "attached" and program.platform in _COMPILERS:
        found |= compiler_versions(_COMPILERS[program.platform])
    return found
