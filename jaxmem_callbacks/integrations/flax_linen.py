"""Flax Linen: remat by module path, without editing the model.

`jm.linen` is this module. Calls of the modules that a pattern means are intercepted while ``apply`` is traced, and run
under `nn.remat`; parameters, their paths and random streams are those of the plain model. The axis names in Linen's metadata
boxes (``nn.Partitioned``, ``nn.LogicallyPartitioned``) are read here too (`transforms.frameworks.Annotator`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from flax import linen as nn
from flax.core import meta
from flax.core.spmd import get_logical_axis_rules

from jaxmem_callbacks.integrations.module_remat import (
    CallSplitter,
    Pattern,
    Rule,
    is_marked,
    is_rematerialising,
    marked,
    nothing_matched,
    refuse_second_checkpoint,
    rematerialising,
    rule_for,
    rules,
)
from jaxmem_callbacks.records.errors import PatternError
from jaxmem_callbacks.transforms.checkpoints import named_policy
from jaxmem_callbacks.transforms.frameworks import Annotation, rule_pairs

__all__ = ["remat"]

_SPLITTER = CallSplitter(lambda value: isinstance(value, (nn.Module, nn.Variable)) and value.scope is not None)
_AROUND = (
    "\nAnother jm.linen.remat is around this one. If it takes the module, give both patterns to one call, as a mapping."
)


def remat(apply: Callable[..., Any], pattern: Pattern | Mapping[Any, str], policy: str = "full") -> Callable[..., Any]:
    r"""The same ``apply``, rematerialising the modules that a pattern means.

        apply = jm.linen.remat(model.apply, r"block_\d+")
        state = TrainState.create(apply_fn=jm.linen.remat(model.apply, Block), params=params, tx=tx)

    Only ``__call__`` of a module is rematerialised. Where a module and one inside it are both meant, the outer one is, and
    the inner runs as it is. A module run by `nn.scan` has one path, and each of its iterations is rematerialised.

    Args:
        apply: ``model.apply``, ``state.apply_fn``, or any function that calls it, such as a loss.
        pattern: A regular expression that a module's whole path must match, such as ``encoder/block_0/attention``; or a
            module class; or a mapping from either to a policy, where the first match counts. The model itself, whose path
            is empty, is never meant.
        policy: What each module keeps in addition to its inputs: ``full`` (nothing), ``dots_saveable``, ... or a synonym.

    Returns:
        A function with the same arguments and results.

    Raises:
        PatternError: ``apply`` or the pattern is none. At the first call: nothing matches; lists the modules called.
        PolicyError: no such policy. When called: a module is inside a checkpoint that is already there.
    """
    if isinstance(apply, nn.Module) or not callable(apply):
        msg = (
            f"jm.linen.remat takes a function: model.apply, state.apply_fn or a loss, not a {type(apply).__name__}. "
            "For an NNX model use jm.nnx.remat."
        )
        raise PatternError(msg)
    wanted = rules(pattern, policy)
    # Rules that have had a module in any call so far: what the user jitted is traced, and met, in the first call only.
    used: set[int] = set()
    mark = object()

    @functools.wraps(apply)
    def rematerialised_apply(*args: Any, **kwargs: Any) -> Any:
        calls, around = _Calls(wanted), _AROUND if is_marked() else ""
        with marked(mark), nn.intercept_methods(calls.intercept):
            result = apply(*args, **kwargs)
        used.update(calls.used)
        for index, rule in enumerate(wanted):
            if index not in used:
                raise PatternError(calls.unused(rule) + around)
        return result

    return rematerialised_apply


class _Calls:
    """What one call of ``apply`` meets: the interceptor, and its memory of the modules it saw."""

    def __init__(self, wanted: Sequence[Rule]) -> None:
        self._wanted = wanted
        self._kinds: dict[str, type] = {}
        self._methods: dict[str, set[str]] = {}
        self.used: set[int] = set()

    def intercept(self, call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        """Run one method of one module, under a checkpoint where it is meant.

        Methods that nn.scan, nn.vmap, nn.jit and nn.remat put around an author's are never intercepted, only the author's
        own inside them: so a checkpoint lands inside the loop, where it saves something.
        """
        module, method = context.module, cast("functools.partial[Any]", context.orig_method).func
        if module.scope is None or context.method_name == "setup":
            return call(*args, **kwargs)
        path = "/".join(module.path)
        self._kinds[path] = type(module)
        self._methods.setdefault(path, set()).add(context.method_name)
        rule = rule_for(self._wanted, (path,), type(module))
        if rule is None or context.method_name != "__call__" or is_rematerialising():
            return call(*args, **kwargs)
        refuse_second_checkpoint(f"`{path}` ({type(module).__name__})")
        self.used.add(self._wanted.index(rule))
        return _SPLITTER.run(functools.partial(_checkpointed, named_policy(rule.policy)), module, method, args, kwargs)

    def unused(self, rule: Rule) -> str:
        """The message about a rule under which nothing was rematerialised."""
        met = [path for path, kind in self._kinds.items() if rule.matches(path, kind)]
        if not met:
            called = {path: kind.__name__ for path, kind in self._kinds.items() if path}
            return nothing_matched(rule, called, "those that were called")
        first = f"`{met[0]}`"
        if not any("__call__" in self._methods[path] for path in met):
            methods = ", ".join(sorted(self._methods[met[0]]))
            reason = f"{first} is not called itself, only its {methods}. Match a module inside it, or move the work to __call__."
        else:
            reason = (
                f"{first} and all others it matches are inside one rematerialised already, or an earlier pattern's."
            )
        return f"Pattern {rule} would do nothing: {reason}"


def _checkpointed(keep: Callable[..., Any] | None, function: Callable[..., Any]) -> Callable[..., Any]:
    def rematerialised(module: nn.Module, traced: Any) -> Any:
        with rematerialising():
            return function(module, traced)

    return nn.remat(rematerialised, policy=keep)


def is_annotated(node: Any) -> bool:
    """Whether a node is a box of Flax Linen."""
    return isinstance(node, meta.AxisMetadata)


def annotation(node: Any) -> Annotation | None:
    """The box's names: those that ``nn.with_partitioning`` or ``nn.with_logical_partitioning`` gave and nn.scan extended."""
    if not isinstance(node, meta.Partitioned):
        return None  # another kind of metadata, such as of weight norms: nothing about sharding
    own = getattr(node, "rules", None) or ()
    return Annotation(names=tuple(node.names), rules=rule_pairs((*own, *get_logical_axis_rules())))
