"""The active policy: how `jm.value_and_grad` inside the user's own step learns what to do.

A policy rides in JAX's own trace context (`jax.make_user_context`), which is part of every jit cache key. So a step that
was traced under another policy, or under none, is traced anew, inner jitted functions included: no stale trace, no
unwrapping of the user's jit, and half a microsecond a call.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax

from jaxmem_callbacks.config.named import Name, policy_of
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.policies import OwnCheckpoint, StepPolicy, gradient_words
from jaxmem_callbacks.records.presets import Preset
from jaxmem_callbacks.transforms.accumulation.multi_steps import refuse_second_accumulation
from jaxmem_callbacks.transforms.keeping import Share


class ActivePolicy:
    """One policy on one step. Compared by identity, so every wrapped step is traced once for itself.

    Attributes:
        policy: What to apply.
        used: Whether a `jm.value_and_grad`, `jm.grad` or `jm.nnx.value_and_grad` has met it while tracing.
        survey: Called once a loss with what other shares of ``keep`` would store and compute again; None where nobody asks.
        compared: Called with each gradient that is accumulated though its loss did not say its weight, the batch, the number
            of microbatches and the traced gradient of one; None where nobody asks.
        defer: Called where such a loss is traced, by who will have it compared before anything runs; None where nobody will.
        mesh: That of the shardings that the state is pinned to, for where no mesh is set around the step; or None.
        checked: Losses that were compared where the gradient was taken.
        notes: What the policy left as it was, a sentence each, in the order of their first meeting.
        left_alone: Checkpoints of the losses' own that it left as they were.
        replaced: Whether it took such checkpoints out of a loss.
    """

    def __init__(self, policy: StepPolicy, survey: Callable[[list[Share]], None] | None = None) -> None:
        self.policy = policy
        self.used = False
        self.survey = survey
        self.compared: Callable[[Any, Any, int, Any], None] | None = None
        self.defer: Callable[[], None] | None = None
        self.mesh: Any = None
        self.checked: set[Any] = set()
        self.notes: dict[str, None] = {}
        self.left_alone: dict[OwnCheckpoint, None] = {}
        self.replaced = False


@functools.cache
def _made_once() -> Any:
    return jax.make_user_context(None)


_making = threading.Lock()


def _context() -> Any:
    """JAX's user context, made on first use: importing the package must not touch JAX's configuration."""
    with _making:  # two threads that come first together must not make two
        return _made_once()


def activate(active: ActivePolicy | None) -> AbstractContextManager[None]:
    """The context in which tracing sees ``active``; ``None`` hides an outer policy."""
    return _context()(active)


def active_policy() -> ActivePolicy | None:
    """The policy that the code now being traced is under, or None."""
    return _context().value


def apply_policy(train_step: Callable[..., Any], policy: StepPolicy | Preset | Name) -> Callable[..., Any]:
    """The user's step under a policy: a pure function, not jitted. Remat and microbatches; donation belongs to ``jm.jit_step``.

    Args:
        train_step: Any function that calls ``jm.value_and_grad``, ``jm.grad`` or ``jm.nnx.value_and_grad``.
        policy: What to apply: a policy, a preset or the name of one, as in `jm.jit_step`.

    Returns:
        A function with the same arguments and results.

    Raises:
        PolicyError: at the first call, when the policy should act on gradients and the step never asked for any
            through this library; the message names the line to change.
    """
    active = ActivePolicy(policy_of(policy))

    @functools.wraps(train_step)
    def step_under_policy(*args: Any, **kwargs: Any) -> Any:
        refuse_second_accumulation(active.policy, args, kwargs)
        with activate(active):
            result = train_step(*args, **kwargs)
        require_used(active, train_step)
        return result

    return step_under_policy


def require_used(active: ActivePolicy, train_step: Callable[..., Any]) -> None:
    """Refuse a policy that did nothing: no gradient of the step went through the library, or no loss had what it replaces.

    Raises:
        PolicyError: with the line of ``train_step`` that takes the gradient past the library, where it can be found.
    """
    name = getattr(train_step, "__name__", type(train_step).__name__)
    if active.used and active.policy.own_checkpoints == "replace" and not active.replaced:
        msg = f"own_checkpoints='replace' would do nothing: no loss of {name} has checkpoints of its own. Leave it out."
        raise PolicyError(msg)
    if active.used or not active.policy.changes_gradients:
        return
    msg = (
        f"The policy {gradient_words(active.policy)} would do nothing: {name} never calls jm.value_and_grad, jm.grad or "
        f"jm.nnx.value_and_grad. {_line_to_change(train_step)}"
    )
    raise PolicyError(msg)


def _line_to_change(train_step: Callable[..., Any]) -> str:
    """Where the step takes its gradient with JAX's or NNX's own function, as ``file:line: source``."""
    function = inspect.unwrap(train_step)
    try:
        lines, first = inspect.getsourcelines(function)
        where = inspect.getsourcefile(function)
    except (OSError, TypeError):
        lines, first, where = [], 0, None
    for offset, line in enumerate(lines):
        for prefix, better in (("jax.", "jm."), ("nnx.", "jm.nnx.")):
            for call in ("value_and_grad(", "grad("):
                if f"{prefix}{call}" in line and f"jm.{prefix}{call}" not in line and f"jm.{call}" not in line:
                    return f"Change {where}:{first + offset} from {prefix}{call[:-1]} to {better}{call[:-1]}:\n    {line.strip()}"
    return "Take the gradient with jm.value_and_grad(loss)(...) in place of jax.value_and_grad(loss)(...)."
