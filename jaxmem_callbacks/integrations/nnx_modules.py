"""Remat of NNX modules by path, without editing the model.

A matched module's class is exchanged for a subclass of the same name whose ``__call__`` runs under `nnx.remat`. State,
paths, ``repr`` and ``isinstance`` stay; `Undo` gives the classes back.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from flax import nnx

from jaxmem_callbacks._compat.checkpoints import is_checkpointed
from jaxmem_callbacks.integrations.module_remat import (
    CallSplitter,
    Pattern,
    Rule,
    is_rematerialising,
    nothing_matched,
    refuse_second_checkpoint,
    rematerialising,
    rule_for,
    rules,
)
from jaxmem_callbacks.records.errors import PatternError, PolicyError
from jaxmem_callbacks.transforms.checkpoints import named_policy

_MARK = "_jaxmem_policy"
_SPLITTER = CallSplitter(lambda value: isinstance(value, (nnx.Pytree, nnx.Variable)))


class Undo:
    """Gives modules their own classes back: call it, or leave its ``with`` block. A second call does nothing.

    Copies made in the meantime (`nnx.clone`, `nnx.merge`) keep the classes they were made with.

    Attributes:
        paths: Path of each rematerialised module to its policy.
    """

    def __init__(self, swapped: Mapping[str, tuple[nnx.Module, type, type]]) -> None:
        self.paths = {path: getattr(new, _MARK) for path, (_, _, new) in swapped.items()}
        self._swapped = dict(swapped)

    def __call__(self) -> None:
        """Restore every class.

        Raises:
            PolicyError: somebody else has exchanged a class since; nothing is restored then.
        """
        for path, (module, _, new) in self._swapped.items():
            if type(module) is not new:
                msg = f"The class of `{path}` was exchanged again after jm.nnx.remat. Undo that change first, then this one."
                raise PolicyError(msg)
        for module, own, _ in self._swapped.values():
            object.__setattr__(module, "__class__", own)
        self._swapped = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self()


def remat(model: nnx.Module, pattern: Pattern | Mapping[Any, str], policy: str = "full") -> Undo:
    r"""Rematerialise the modules of a model that a pattern means, in place, without editing the model.

        undo = jm.nnx.remat(model, r"blocks/\d+")             # before the first trace
        undo = jm.nnx.remat(model, {r"encoder/.*": "full", Decoder: "dots_saveable"})

    Only ``__call__`` changes. Where a module and one inside it are both meant, the outer one called is rematerialised and
    the inner runs as it is. A stack of layers run by `nnx.scan` is one module, and each of its iterations is rematerialised.

    Args:
        model: Any NNX module, abstract ones included.
        pattern: A regular expression that a module's whole path must match, such as ``blocks/0/attention``; or a module
            class; or a mapping from either to a policy, where the first match counts. The model itself is never meant.
        policy: What each module keeps in addition to its inputs: ``full`` (nothing), ``dots_saveable``, ... or a synonym.

    Returns:
        The function that undoes it, also a context manager.

    Raises:
        PatternError: nothing matches, or the pattern is none; lists what could have matched.
        PolicyError: no such policy; a module is rematerialised already, by this function or by its author, or its class
            refuses subclasses. At the first trace: a module is called inside a checkpoint that is already there.
    """
    if not isinstance(model, nnx.Pytree):
        msg = f"jm.nnx.remat takes an nnx.Module, not a {type(model).__name__}. For a Linen model use jm.linen.remat."
        raise PatternError(msg)
    wanted = rules(pattern, policy)
    found = _callables(model)
    chosen = _choose(wanted, found)
    _require_all(wanted, chosen.values(), found, type(model).__name__)
    swapped: dict[str, tuple[nnx.Module, type, type]] = {}
    for path, rule in chosen.items():
        module = found[path][0]
        swapped[path] = (module, type(module), _exchanged(type(module), path, rule.policy))
    for module, _, new in swapped.values():
        object.__setattr__(module, "__class__", new)
    return Undo(swapped)


def _callables(model: nnx.Module) -> dict[str, tuple[nnx.Module, list[str]]]:
    """Every module below the model that can be called, by its first path, with all of its paths."""
    first: dict[int, str] = {}
    found: dict[str, tuple[nnx.Module, list[str]]] = {}
    for path, module in _walk(model, "", ()):
        if not path or not callable(module):
            continue
        name = first.setdefault(id(module), path)
        found.setdefault(name, (module, []))[1].append(path)
    return found


def _walk(node: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, nnx.Module]]:
    """Modules with their paths, top down; a shared one at each of its paths, a ring of them once."""
    if id(node) in above:
        return
    if isinstance(node, nnx.Module):
        yield path, node
    for name, child in _children(node):
        yield from _walk(child, f"{path}/{name}" if path else str(name), (*above, id(node)))


def _children(node: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(node, nnx.Variable):
        return ()
    if isinstance(node, nnx.Pytree):
        return [(name, value) for name, value in vars(node).items() if not name.startswith("_pytree__")]
    if isinstance(node, Mapping):
        return node.items()
    return enumerate(node) if isinstance(node, (list, tuple)) else ()


def _choose(wanted: tuple[Rule, ...], found: Mapping[str, tuple[nnx.Module, list[str]]]) -> dict[str, Rule]:
    pairs = {path: rule_for(wanted, paths, type(module)) for path, (module, paths) in found.items()}
    return {path: rule for path, rule in pairs.items() if rule is not None}


def _require_all(
    wanted: Iterable[Rule],
    used: Iterable[Rule],
    found: Mapping[str, tuple[nnx.Module, list[str]]],
    model: str,
) -> None:
    """Refuse a rule that no module has fallen to."""
    by_path = {path: type(module).__name__ for path, (module, _) in found.items()}
    known = {id(rule) for rule in used}
    for rule in wanted:
        if id(rule) in known:
            continue
        if any(rule.matches(path, type(module)) for module, paths in found.values() for path in paths):
            msg = f"Pattern {rule} would do nothing: an earlier pattern takes every module it matches. Put it first."
            raise PatternError(msg)
        raise PatternError(nothing_matched(rule, by_path, model))


def _exchanged(own: type, path: str, policy: str) -> type:
    """The class to give a module, refusing one that is rematerialised already."""
    if hasattr(own, _MARK):
        msg = f"`{path}` ({own.__name__}) is rematerialised already, policy {getattr(own, _MARK)!r}: undo that first."
        raise PolicyError(msg)
    if is_checkpointed(getattr(own, "__call__")):  # noqa: B004, B009 - the class's function, not whether there is one
        msg = (
            f"`{path}`: {own.__name__}.__call__ is under nnx.remat or jax.checkpoint already, by its author. Leave it out "
            "of the pattern, or remove that decorator."
        )
        raise PolicyError(msg)
    return _rematerialised_class(own, policy)


@functools.cache
def _rematerialised_class(own: type, policy: str) -> type:
    """One subclass for each class and policy, so that equal models have equal graph definitions."""
    call: Callable[..., Any] = getattr(own, "__call__")  # noqa: B004, B009 - the class's function, not whether there is one
    keep = named_policy(policy)

    @functools.wraps(call)
    def rematerialised_call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        if is_rematerialising():
            return call(self, *args, **kwargs)
        refuse_second_checkpoint(f"A {own.__name__} meant by jm.nnx.remat")
        return _SPLITTER.run(functools.partial(_checkpointed, keep), self, call, args, kwargs)

    def reduce(self: nnx.Module, protocol: Any) -> Any:
        # A pickle must be readable without this process and this library: it holds the module as its author's class.
        _, _, *state = object.__reduce_ex__(self, protocol)
        return object.__new__, (own,), *state

    def shallow_copy(self: nnx.Module) -> Any:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    body = {
        "__call__": rematerialised_call,
        "__copy__": shallow_copy,
        "__reduce_ex__": reduce,
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        _MARK: policy,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # warned of already, when the class itself was made
        try:
            return type(own)(own.__name__, (own,), body, pytree=getattr(own, "_pytree__is_pytree", True))
        except Exception as error:
            msg = (
                f"jm.nnx.remat needs a subclass of {own.__name__}, and making one failed ({error}). Leave it out of the "
                "pattern, or write nnx.remat in the model."
            )
            raise PolicyError(msg) from error


def _checkpointed(keep: Callable[..., Any] | None, function: Callable[..., Any]) -> Callable[..., Any]:
    def marked(module: Any, traced: Any) -> Any:
        with rematerialising():
            return function(module, traced)

    return nnx.remat(marked, policy=keep)
