"""StepPolicy: what plans choose, presets say and steps obey. One table here has the remat policies' names and synonyms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxmem_callbacks.records.errors import PolicyError, did_you_mean

# Canonical spelling -> other frameworks' words for it. `none` (no wrapper) and `everything_saveable` are different
# programs: the second costs more memory than no remat at all, so `save_all` is a synonym of it and never of `none`.
REMAT_SYNONYMS: dict[str, tuple[str, ...]] = {
    "none": ("off", "disabled"),
    "full": ("nothing_saveable", "recompute", "recompute_all"),
    "everything_saveable": ("save_all",),
    "dots_saveable": ("dots", "checkpoint_dots"),
    "dots_with_no_batch_dims_saveable": (
        "dots_with_no_batch_dims",
        "checkpoint_dots_with_no_batch_dims",
    ),
    "save_only_these_names": ("save_names", "names"),
    "offload_dot_with_no_batch_dims": ("offload_dots", "offload"),
    "save_and_offload_only_these_names": ("offload_names", "save_and_offload"),
}
_CANONICAL = {word: name for name, synonyms in REMAT_SYNONYMS.items() for word in (name, *synonyms)}
_NEEDS_NAMES = {"save_only_these_names", "save_and_offload_only_these_names"}


def canonical_remat(name: str) -> str:
    """The one spelling of a remat policy, from any synonym.

    Raises:
        PolicyError: no such policy; the message lists all and the nearest. ``minimal`` is refused by name, because it is
            a list of MaxText's tensor names and means nothing without them.
    """
    word = name.strip().lower() if isinstance(name, str) else name
    if word in _CANONICAL:
        return _CANONICAL[word]
    if word == "minimal":
        msg = (
            "Remat policy 'minimal' is MaxText's list of tensor names, not a JAX policy. "
            "Name the tensors instead: remat='save_only_these_names', save=('context', 'out_proj', ...)."
        )
        raise PolicyError(msg)
    hint = did_you_mean(str(word), _CANONICAL)
    msg = f"Unknown remat policy {name!r}.{hint} Expected one of: {', '.join(REMAT_SYNONYMS)}."
    raise PolicyError(msg)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPolicy:
    """What is done to a train step to make it cheaper in memory.

    Attributes:
        remat: What the backward pass keeps, by canonical name or synonym; ``none`` leaves the loss untouched, ``full``
            keeps only the values at the cuts.
        segments: Number of segments the loss is cut into, or None to choose by live bytes.
        keep: Share, from 0 to 1, of the bytes of intermediates dear to compute again that are kept besides; those that save
            most operations a byte come first.
        save: Names given by ``checkpoint_name`` in the model that are kept besides.
        offload: Such names that are moved to host memory between forward and backward.
        donate: ``auto`` (every argument that the step returns updated), argument names, an empty tuple for none, or
            None where nothing was said (``jit_step`` then takes ``auto``).
    """

    remat: str = "none"
    segments: int | None = None
    keep: float = 0.0
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    donate: Literal["auto"] | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "remat", canonical_remat(self.remat))
        for field in ("save", "offload"):
            value = getattr(self, field)
            if isinstance(value, str):
                msg = f"{field}={value!r} is one text, expected a tuple of names: {field}=({value!r},)."
                raise PolicyError(msg)
            object.__setattr__(self, field, tuple(value))
        if isinstance(self.donate, str) and self.donate != "auto":
            msg = (
                f"donate={self.donate!r}: expected 'auto', a tuple of argument names such as ({self.donate!r},), or ()."
            )
            raise PolicyError(msg)
        if self.donate is not None and not isinstance(self.donate, str):
            object.__setattr__(self, "donate", tuple(self.donate))
        if self.segments is not None and (isinstance(self.segments, bool) or self.segments < 1):
            msg = f"segments={self.segments!r}: expected a whole number of at least 1, or None to choose by live bytes."
            raise PolicyError(msg)
        if isinstance(self.keep, bool) or not 0 <= self.keep <= 1:
            msg = f"keep={self.keep!r}: expected a share from 0 (only the values at the cuts) to 1 (all that is dear to compute)."
            raise PolicyError(msg)
        if self.remat == "none" and (self.segments is not None or self.keep or self.save or self.offload):
            msg = (
                "remat='none' leaves the loss untouched, so segments, keep, save and offload would do nothing. "
                "Use remat='full'."
            )
            raise PolicyError(msg)
        if self.remat in _NEEDS_NAMES and not (self.save or self.offload):
            msg = (
                f"remat={self.remat!r} needs the names to keep: save=('context', ...) with names from checkpoint_name."
            )
            raise PolicyError(msg)

    @property
    def changes_gradients(self) -> bool:
        """Whether the policy acts inside ``jm.value_and_grad`` (and so needs the step to call it)."""
        return self.remat != "none"
