"""Remat by module path, for both Flax interfaces: patterns, calls split for a checkpoint, one checkpoint at a time.

Modules have paths (``blocks/0/attention``). A pattern that matches none is a `PatternError` that lists what could have matched.
The marks of what is under a checkpoint ride in JAX's own trace context, which is part of every jit cache key: what was traced
inside a checkpoint, or under some patterns, is never reused outside.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem_callbacks._compat.checkpoints import inside_checkpoint
from jaxmem_callbacks.records.errors import PatternError, PolicyError
from jaxmem_callbacks.records.policies import canonical_remat
from jaxmem_callbacks.transforms.checkpoints import named_policy
from jaxmem_callbacks.transforms.tracing import split_arrays

Pattern = str | re.Pattern[str] | type
_SHOWN = 12
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One pattern and what is done to the modules it matches.

    Attributes:
        path: A regular expression for the whole path, or None.
        kind: A module class, or None.
        policy: Canonical name of the remat policy.
    """

    path: re.Pattern[str] | None
    kind: type | None
    policy: str

    def matches(self, path: str, kind: type) -> bool:
        """Whether a module of class ``kind`` at ``path`` is meant. The model itself, whose path is empty, never is."""
        if not path:
            return False
        if self.path is not None:
            return self.path.fullmatch(path) is not None
        return self.kind is not None and issubclass(kind, self.kind)

    def __str__(self) -> str:
        return repr(self.path.pattern) if self.path is not None else getattr(self.kind, "__name__", "")


def rules(pattern: Pattern | Mapping[Any, str], policy: str) -> tuple[Rule, ...]:
    """What the user typed as rules, first match first.

    Args:
        pattern: A regular expression for the whole path, a module class, or a mapping from either to a policy.
        policy: The policy of a single pattern; a mapping brings its own.

    Raises:
        PatternError: not a regular expression, not a pattern at all, or an empty mapping.
        PolicyError: no such policy, or ``none``.
    """
    if not isinstance(pattern, Mapping):
        return (_rule(pattern, policy),)
    if not pattern:
        msg = "pattern={} names no module. Write one such as {r'blocks/\\d+': 'full'}."
        raise PatternError(msg)
    return tuple(_rule(one, its_policy) for one, its_policy in pattern.items())


def _rule(pattern: Any, policy: str) -> Rule:
    named_policy(policy)  # refuses what is no policy by module, before any work
    canonical = canonical_remat(policy)
    if isinstance(pattern, type):
        return Rule(path=None, kind=pattern, policy=canonical)
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        msg = f"pattern={pattern!r} is not a regular expression: {error}. Write one such as r'blocks/\\d+'."
        raise PatternError(msg) from None
    except TypeError:
        compiled = None
    if compiled is None or isinstance(compiled.pattern, bytes):
        msg = f"pattern={pattern!r}: expected a regular expression such as r'blocks/\\d+', a module class or a mapping."
        raise PatternError(msg)
    return Rule(path=compiled, kind=None, policy=canonical)


def rule_for(among: Sequence[Rule], paths: Iterable[str], kind: type) -> Rule | None:
    """The first rule that means a module, by any of its paths; None where no rule does."""
    known = tuple(paths)
    return next((rule for rule in among if any(rule.matches(path, kind) for path in known)), None)


def nothing_matched(rule: Rule, modules: Mapping[str, str], where: str) -> str:
    """The message about a rule that means no module.

    Args:
        rule: The rule.
        modules: Class name of every module that could have been meant, by path.
        where: What was searched, for the message.
    """
    like: dict[str, list[str]] = {}
    for path in modules:
        like.setdefault(_NUMBER.sub("#", path), []).append(path)
    firsts = {paths[0]: len(paths) for paths in like.values()}
    shown = _nearest(rule, firsts)
    lines = [_line(path, modules[path], firsts[path]) for path in shown] or ["    none"]
    if len(firsts) > len(shown):
        lines.append(f"    ... and {len(firsts) - len(shown)} more")
    return f"Pattern {rule} matches no module of {where}.{_hint(rule, modules)} It could match:\n" + "\n".join(lines)


def _line(path: str, kind: str, count: int) -> str:
    return f"    {path}  ({kind}{f', {count} of these' if count > 1 else ''})"


def _hint(rule: Rule, modules: Iterable[str]) -> str:
    """What the user may have meant instead, by the most common mistakes."""
    if rule.path is None:
        return ""
    if not rule.path.pattern.strip("^$"):
        return " The model itself is never meant: a checkpoint around all of it saves nothing."
    if any(rule.path.search(path) for path in modules):
        return f" It matches a part of some paths, and a pattern is for the whole: try r'.*{rule.path.pattern}.*'."
    return ""


def _nearest(rule: Rule, paths: Iterable[str]) -> list[str]:
    """The paths most like what was typed, then those nearest to the top, in the model's own order."""
    known = list(paths)
    near = difflib.get_close_matches(rule.path.pattern if rule.path else str(rule), known, n=_SHOWN // 2, cutoff=0.6)
    rest = sorted((path for path in known if path not in near), key=lambda path: path.count("/"))
    chosen = {*near, *rest[: _SHOWN - len(near)]}
    return [path for path in known if path in chosen]


_INSIDE = "inside a checkpoint"


@functools.cache
def _context() -> Any:
    """JAX's user context, made on first use: importing the package must not touch JAX's configuration."""
    return jax.make_user_context(())


def marked(mark: object) -> AbstractContextManager[None]:
    """A context in which nothing traced elsewhere is reused; ``mark`` is compared by equality."""
    return _context()((*_context().value, mark))


def is_marked() -> bool:
    """Whether any such context is around the code being traced."""
    return bool(_context().value)


def rematerialising() -> AbstractContextManager[None]:
    """The context in which a checkpoint of ours is being traced."""
    return marked(_INSIDE)


def is_rematerialising() -> bool:
    """Whether the code being traced is inside a checkpoint that `remat` by module made."""
    return _INSIDE in _context().value


def refuse_second_checkpoint(name: str) -> None:
    """Refuse to put a module's checkpoint inside one that its caller wrote.

    Raises:
        PolicyError: names the module and what to change.
    """
    if inside_checkpoint():
        msg = (
            f"{name} is called inside a checkpoint that is already there (nn.remat, nnx.remat or jax.checkpoint in the "
            "model or around the loss). A second one inside it would compute the module three times. Remove that one, or "
            "leave this module out of the pattern."
        )
        raise PolicyError(msg)


class CallSplitter:
    """Parts pytrees into what is traced and the rest.

    Args:
        is_object: Whether a value is one of the framework's own, which travel with the arrays and are never looked into.
    """

    def __init__(self, is_object: Callable[[Any], bool]) -> None:
        self._is_object = is_object

    def run(
        self, checkpointed: Callable[..., Any], module: Any, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """The result of ``call(module, *args, **kwargs)``, run by ``checkpointed``.

        Args:
            checkpointed: From a function of a module and a list of traced values, the same function under a checkpoint.
            module: The module.
            call: Its method, unbound.
            args: The caller's.
            kwargs: The caller's.
        """
        traced, join = split_arrays((args, kwargs), self._is_object)
        rest: list[Callable[[Sequence[Any]], Any]] = []

        def rematerialised(inner_module: Any, inner_traced: Sequence[Any]) -> list[Any]:
            inner_args, inner_kwargs = join(inner_traced)
            results, join_results = split_arrays(call(inner_module, *inner_args, **inner_kwargs), self._is_object)
            rest.append(join_results)
            return results

        results = checkpointed(rematerialised)(module, traced)
        return rest[-1](results)
