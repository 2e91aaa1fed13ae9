"""Names and paths where a preset or a policy is taken: `jm.jit_step(step, "full_remat")`, `jm.MemoryMonitor("quiet_monitor")`."""

from __future__ import annotations

import os
from typing import TypeVar

from jaxmem_callbacks.config.documents import shipped_names
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import PlanError, PolicyError, PresetError, did_you_mean
from jaxmem_callbacks.records.policies import (
    REMAT_SYNONYMS,
    SHARDING_SYNONYMS,
    StepPolicy,
    UnfitPolicy,
    canonical_remat,
    canonical_sharding,
)
from jaxmem_callbacks.records.presets import Preset

_Given = TypeVar("_Given")
Name = str | os.PathLike[str]


def load_named(given: _Given | Name) -> _Given | Preset:
    """The preset that a name or a path means; anything else as it is.

    Args:
        given: A name of a shipped preset, several of them joined by ``+``, or the path of a YAML file.

    Raises:
        PresetError: no such preset, or a file that is none.
    """
    if not isinstance(given, str | os.PathLike):
        return given
    from jaxmem_callbacks.config.presets import load_preset  # pydantic, which a step without a name need not import

    name: Name = given
    if isinstance(name, str) and "+" in name and set(parts := name.split("+")) <= set(shipped_names()):
        return load_preset(*parts)
    return load_preset(name)


def resolve_policy(given: StepPolicy | Preset | Name) -> StepPolicy | Preset:
    """What is given as a step's policy, its name looked up.

    A name is that of a preset first, then a word of ``StepPolicy.remat``, then one of ``StepPolicy.sharding``. ``fsdp``,
    ``fsdp_tensor``, ``zero1`` and ``replicate`` are presets and words of ``sharding``: the preset is taken, which has that
    sharding and nothing else.

    Raises:
        PresetError: a name or path that is none of these.
        PolicyError: a word of ``remat`` that needs more than its name.
        TypeError: neither a policy, a preset nor a name.
    """
    if isinstance(given, StepPolicy | Preset):
        return given
    if isinstance(given, str) and (policy := _from_word(given)) is not None:
        return policy
    if isinstance(given, str | os.PathLike):
        return load_named(given)
    msg = f"Expected a StepPolicy, a Preset or the name of one, got {type(given).__name__}. For example: 'full_remat'."
    raise TypeError(msg)


def policy_of(given: StepPolicy | Preset | Name) -> StepPolicy:
    """The policy itself, from any of the forms that users give; see `resolve_policy`.

    Raises:
        PlanError: the policy of a plan in which nothing fits.
        PresetError, PolicyError, TypeError: as `resolve_policy`.
    """
    if isinstance(given, UnfitPolicy):
        raise PlanError(given.reason)
    found = resolve_policy(given)
    return found.policy if isinstance(found, Preset) else found


def _from_word(word: str) -> StepPolicy | None:
    """The policy of one word of remat or sharding; None for what may be a preset.

    Raises:
        PresetError: nothing has this name.
    """
    presets = shipped_names()
    if word.endswith((".yaml", ".yml")) or "/" in word or os.sep in word or set(word.split("+")) <= set(presets):
        return None
    try:
        remat = canonical_remat(word)
    except PolicyError:
        pass
    else:
        return StepPolicy(remat=remat)
    try:
        return StepPolicy(sharding=canonical_sharding(word))
    except PolicyError:
        known = [*presets, *REMAT_SYNONYMS, *SHARDING_SYNONYMS]
        msg = (
            f"Unknown preset or policy {word!r}.{did_you_mean(word, known)} Expected a preset ({', '.join(presets)}), a word of "
            f"remat ({', '.join(REMAT_SYNONYMS)}), one of sharding ({', '.join(SHARDING_SYNONYMS)}), or a path such as "
            f"./{word}.yaml.\nNext: `{advise('command.typed', typed='presets')}` describes each preset."
        )
        raise PresetError(msg) from None
