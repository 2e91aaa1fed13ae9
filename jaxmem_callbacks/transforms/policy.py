"""The active policy: how `jm.value_and_grad` inside the user's own step learns what to do.

A policy rides in JAX's own trace context (`jax.make_user_context`), which is part of every jit cache key. So a step that
was traced under another policy, or under none, is traced again, inner jitted functions included: no stale trace, no
unwrapping of the user's jit, and half a microsecond a call.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arguments import name_of
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.plans import FrontierPoint
from jaxmem_callbacks.records.policies import OwnCheckpoint, StepPolicy, gradient_words

#: Which gradients of a step obey its policy: those that are taken through this library, or those of JAX's own functions too.
Gradients = Literal["own", "all"]


_OUT_OF_REACH = ("jax.vjp", "jax.linearize", "jax.jacrev", "jax.jacobian", "jax.hessian")


# Parts of a policy that a loss may have no place for; others are the paths of its chunks.
ALL, REMAT, OFFLOAD = "all", "remat", "offload"
_LEFT = {ALL: "stays as JAX takes it", REMAT: "stays without checkpoints", OFFLOAD: "moves nothing to the host"}


class ActivePolicy:
    """One policy on one step. Compared by identity, so every wrapped step is traced once for itself.

    Attributes:
        policy: What to apply.
        gradients: Which gradients obey it.
        used: Whether a gradient has met it while tracing.
        survey: Whether to find what other shares of ``keep`` would store and compute again.
        frontiers: What was found so, of each loss.
        compared: Called with each gradient that is accumulated though its loss gives no weight, the batch, the number
            of microbatches and the traced gradient of one; None where nobody asks.
        defer: Called where such a loss is traced, by who will have it compared before anything runs; None where nobody will.
        mesh: That of the shardings that the state is pinned to, for where no mesh is set around the step; or None.
        checked: Losses that were compared where the gradient was taken.
        notes: What the policy left as it was, a sentence each, in the order of their first meeting.
        left_alone: Checkpoints of the losses' own that it left as they were.
        replaced: Whether it took such checkpoints out of a loss.
        obeyed: Parts of the policy (``remat``, ``offload``, the path of each of its chunks) that some loss of the step obeys.
        refused: Part of the policy -> the first error of a loss that stays as it is there, though it should obey.
        hidden: Whether the step has another policy inside, by `jm.apply_policy`, which hides this one.

    Raises:
        PolicyError: ``gradients`` is neither ``own`` nor ``all``.
    """

    def __init__(
        self,
        policy: StepPolicy,
        *,
        gradients: Gradients = "own",
        survey: bool = False,
    ) -> None:
        if gradients not in get_args(Gradients):
            msg = (
                f"gradients={gradients!r}: expected 'own' (gradients taken by jm.value_and_grad, jm.grad, "
                "jm.nnx.value_and_grad or jm.eqx.value_and_grad) or 'all' (those by jax.value_and_grad and jax.grad too, "
                "in any package)."
            )
            raise PolicyError(msg)
        self.policy = policy
        self.gradients: Gradients = gradients
        self.used = False
        self.survey = survey
        self.frontiers: list[tuple[FrontierPoint, ...]] = []
        self.compared: Callable[[Any, Any, int, Any], None] | None = None
        self.defer: Callable[[], None] | None = None
        self.mesh: Any = None
        self.checked: set[Any] = set()
        self.notes: dict[str, None] = {}
        self.left_alone: dict[OwnCheckpoint, None] = {}
        self.replaced = False
        self.obeyed: set[str] = set()
        self.refused: dict[str, Exception] = {}
        self.hidden = False

    def record(self, notes: Iterable[str], frontiers: Iterable[tuple[FrontierPoint, ...]]) -> None:
        """Keep what was found while a loss was cut."""
        self.notes |= dict.fromkeys(notes)
        self.frontiers += frontiers

    def leave(self, part: str, loss: Callable[..., Any], error: Exception) -> None:
        """Note that a loss does not obey a part of the policy; `require_used` raises the error where no loss of the step does."""
        self.refused.setdefault(part, copy.copy(error))  # whose frames hold the call's arrays
        left = _LEFT.get(part, f"stays without chunks at {part!r}")
        self.notes.setdefault(f"The gradient of {name_of(loss)} {left}: {error}")


@dataclass(frozen=True, slots=True)
class _Taking:
    """Where a gradient is taken under a policy: what that calls of JAX's own functions is no gradient of the step."""

    active: ActivePolicy


@functools.cache
def _made_once() -> Any:
    return jax.make_user_context(None)


_making = threading.RLock()  # a signal's handler may take a step while this thread has it


def _context() -> Any:
    """JAX's user context, made on first use: importing the package must not touch JAX's configuration."""
    with _making:  # two threads that come first together must not make two
        return _made_once()


def activate(active: ActivePolicy | None) -> AbstractContextManager[None]:
    """The context in which tracing sees ``active``; ``None`` hides an outer policy."""
    return _context()(active)


def active_policy() -> ActivePolicy | None:
    """The policy that the code now being traced is under, or None."""
    value = _context().value
    return value.active if isinstance(value, _Taking) else value


def policy_of_plain_gradients() -> ActivePolicy | None:
    """The policy that a gradient of JAX's own functions must obey here; None where it is JAX's own affair."""
    value = _context().value
    return value if isinstance(value, ActivePolicy) and value.gradients == "all" else None


def taking(active: ActivePolicy | None) -> AbstractContextManager[None]:
    """The context in which a gradient is taken by JAX's own functions on behalf of ``active``, which met it already."""
    if active is None or active.gradients == "own":
        return nullcontext()
    return _context()(_Taking(active))


def require_used(active: ActivePolicy, train_step: Callable[..., Any]) -> None:
    """Refuse a policy that did nothing: no gradient of the step went through the library, or no loss had what it replaces.

    Raises:
        PolicyError: with the line of ``train_step`` that takes the gradient past the library, where it can be found.
    """
    name = name_of(train_step)
    if active.used and active.policy.own_checkpoints == "replace" and not active.replaced:
        msg = f"own_checkpoints='replace' would do nothing: no loss of {name} has checkpoints of its own. Leave it out."
        raise PolicyError(msg)
    obeyed = active.obeyed | {ALL} if active.used else active.obeyed
    for error in (error for part, error in active.refused.items() if part not in obeyed):
        raise copy.copy(error)
    if active.used or not active.policy.changes_gradients:
        return
    what = f"The policy {gradient_words(active.policy)} would do nothing: {name}"
    if active.hidden:
        msg = f"{what} has another one inside, by jm.apply_policy, and the inner one holds. Give the step without it."
        raise PolicyError(msg)
    if active.gradients == "all":
        msg = (
            f"{what} takes no gradient by jax.value_and_grad or jax.grad, in its own code or in a package's. Out of reach are "
            "jax.vjp, jax.linearize, jax.jacrev, and what the backward function of a jax.custom_vjp computes"
            f"{_line_out_of_reach(train_step)}. Give the step no policy, and let "
            "jm.remat wrap what is differentiated there."
        )
    else:
        msg = (
            f"{what} never calls jm.value_and_grad, jm.grad, jm.nnx.value_and_grad or jm.eqx.value_and_grad. "
            f"{_line_to_change(train_step)}\n"
            f"Where a package takes the gradient, which you do not edit: {advise('gradients.all', step=name)}."
        )
    raise PolicyError(msg)


def _line_to_change(train_step: Callable[..., Any]) -> str:
    """Where the step takes its gradient with a function of JAX, NNX or Equinox, as ``file:line: source``."""
    for place, line in _source(train_step):
        for prefix, better in (("jax.", "jm."), ("nnx.", "jm.nnx."), ("eqx.filter_", "jm.eqx.")):
            for call in ("value_and_grad(", "grad("):
                if f"{prefix}{call}" in line and f"jm.{prefix}{call}" not in line and f"jm.{call}" not in line:
                    return f"Change {place} from {prefix}{call[:-1]} to {better}{call[:-1]}:\n    {line.strip()}"
    return "Take the gradient by jm.value_and_grad in place of jax.value_and_grad."


def _line_out_of_reach(train_step: Callable[..., Any]) -> str:
    """Where the step differentiates by what no policy reaches, as ``; see file:line: source``."""
    for place, line in _source(train_step):
        if any(f"{call}(" in line for call in _OUT_OF_REACH):
            return f"; see {place}: {line.strip()}"
    return ""


def _source(train_step: Callable[..., Any]) -> list[tuple[str, str]]:
    """``file:line`` and text of each line of a step; none where its source is not known."""
    function = inspect.unwrap(train_step)
    try:
        lines, first = inspect.getsourcelines(function)
        where = inspect.getsourcefile(function)
    except (OSError, TypeError):
        return []
    return [(f"{where}:{first + offset}", line) for offset, line in enumerate(lines)]
