"""The jit of a plain step under a policy."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from jaxmem_callbacks.programs.steps.donation import (
    LeafUse,
    Written,
    check_names,
    infer_donation,
    needs_results,
    updated_arguments,
    worth_donating,
)
from jaxmem_callbacks.programs.steps.host_state import fetching, pins_on_host
from jaxmem_callbacks.programs.steps.leaves import Leaf, call_leaves, named_arguments, parameter_names
from jaxmem_callbacks.programs.steps.placement import (
    Pin,
    jit_shardings,
    pin_of_state,
    pinned_leaves,
    pins_of_policy,
    require_placed,
)
from jaxmem_callbacks.programs.steps.user_jit import (
    Jitted,
    already_jitted,
    jax_traced,
    jit_plain,
    jit_word,
    static_arguments,
)
from jaxmem_callbacks.records.errors import DonationError, DonationWarning, PolicyError
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.transforms.frameworks import framework_of


@dataclass(kw_only=True, slots=True)
class JitOptions:
    """What was asked of a step's jit, and what was decided at its first call.

    Attributes:
        donate: Argument names, ``()`` for none; ``auto`` or None to infer.
        state_shardings: What the state is pinned to, or None.
        policy: Its sharding, where it has one, is the place of all that is updated.
        pins: Where arguments must be, decided at the first call.
        pinned_like: What the pinned arguments were like then: for others the pins are decided again.
        static: Arguments found to be static so far.
        donated: Arguments that are donated.
        jitted: The jit made so far.
    """

    donate: Literal["auto"] | tuple[str, ...] | None
    state_shardings: Any = None
    policy: StepPolicy = field(default_factory=StepPolicy)
    pins: tuple[Pin, ...] = ()
    pinned_like: tuple[Any, ...] = ()
    static: tuple[str, ...] = ()
    donated: tuple[str, ...] = ()
    jitted: Jitted | None = field(default=None)

    def explicit(self, *, own_jit: bool) -> bool:
        """Whether the user wrote down what is donated, here or in a jit of his own."""
        return own_jit or isinstance(self.donate, tuple)

    @property
    def places(self) -> bool:
        """Whether the place of the state is given."""
        policy = self.policy
        return self.state_shardings is not None or policy.sharding is not None or policy.state_offload is not None

    def pinned(self, leaves: list[Leaf]) -> list[Leaf]:
        """The call's leaves, those of a pinned state with the place that it will have."""
        for one in self.pins:
            leaves = pinned_leaves(leaves, one)
        return leaves

    def refuse_for_jitted(self, step: Callable[..., Any], donate_argnames: tuple[str, ...] | None) -> None:
        """Refuse what only the user's own jit can do.

        Raises:
            DonationError: ``donate_argnames`` or ``state_shardings`` beside a step that is already jitted.
        """
        name = getattr(step, "__name__", "the step")
        for word, value in (("donate_argnames", donate_argnames), ("state_shardings", self.state_shardings)):
            if value is not None:
                where = f"{word}={value!r}" if word == "donate_argnames" else "in_shardings=..., out_shardings=..."
                msg = (
                    f"{word} was given for {name}, which is already jitted and keeps its own settings. Write {where} in "
                    f"the {jit_word(step)} of {name}, or pass the plain function to jm.jit_step."
                )
                raise DonationError(msg)

    def require_placed(self, step: Callable[..., Any], arguments: Sequence[tuple[str, Any]], results: Any) -> None:
        """Hold the arguments of the user's own jit against the policy's sharding.

        Raises:
            PolicyError: there is no mesh, or the state is elsewhere.
        """
        if self.policy.sharding is not None:
            pin(step, self, arguments, results)

    def check_jitted(self, step: Callable[..., Any], uses: Sequence[LeafUse], undonated: Sequence[str]) -> None:
        """Compare what the policy asks with what the user's own jit donates.

        Raises:
            DonationError: the policy names an argument that the jit does not donate.
        """
        name = getattr(step, "__name__", "the step")
        donated = dict.fromkeys(use.argument for use in uses if use.requested)
        missing = [n for n in self.donate if n not in donated] if isinstance(self.donate, tuple) else []
        own = already_jitted(step)
        assert own is not None  # else nothing was decided for its user
        if missing:
            msg = (
                f"The policy has donate={self.donate!r}, but {name} is already jitted and does not donate "
                f"{', '.join(missing)}. {own.donating(name, missing, donated)}"
            )
            raise DonationError(msg)
        undonated = worth_donating(undonated, [(use.argument, use.bytes) for use in uses])
        if self.donate == "auto" and undonated:
            msg = (
                f"The policy has donate='auto', but {name} is already jitted and returns {', '.join(undonated)} updated "
                f"without donating. {own.donating(name, undonated, donated)}"
            )
            warnings.warn(msg, DonationWarning, stacklevel=5)
            self.donate = None


def build_jit(
    function: Callable[..., Any], jit_options: JitOptions, args: Sequence[Any], kwargs: dict[str, Any]
) -> Jitted:
    """The jit of a plain step; made at the first call, and again when a call brings a static argument not seen before.

    Raises:
        DonationError: ``donate_argnames`` has a name that is no argument.
        PolicyError: the state is elsewhere than ``state_shardings`` or the policy's sharding requires.
        TypeError: a value that is no array sits inside a tree of arrays.
    """
    arguments = named_arguments(function, args, kwargs)
    static = static_arguments(arguments, function)
    pins_hold = require_pinned(arguments, jit_options, function)
    if jit_options.jitted is not None and pins_hold and set(static) <= set(jit_options.static):
        return jit_options.jitted
    jit_options.static = tuple(dict.fromkeys((*jit_options.static, *static)))
    options = _options("static", jit_options.static, function, arguments, len(args))
    traced = [(name, value) for name, value in arguments if name not in jit_options.static]
    on_host = jit_options.policy.state_offload is not None
    looked_at = fetching(function) if on_host else function
    results, leaves = _traced_if_needed(looked_at, jit_options, traced, options, (args, kwargs))
    jit_options.donated = _donated(function, jit_options, traced, results, leaves)
    options |= _options("donate", jit_options.donated, function, arguments, len(args))
    if jit_options.places:
        pin(function, jit_options, traced, results, leaves)
        options |= _pinned_options(function, jit_options, traced, results, kwargs)
    if on_host:
        function = fetching(function, jit_options.pins)
    call = jit_plain(function, arguments, compiler_options=jit_options.policy.options, **options)
    jit_options.jitted = Jitted(call=call, lowering=call, function=function, bound_kwargs={})
    return jit_options.jitted


def require_pinned(arguments: Sequence[tuple[str, Any]], jit_options: JitOptions, function: Callable[..., Any]) -> bool:
    """Refuse a state that is not where it is pinned; whether the pins are those for a state like this one.

    Raises:
        PolicyError: with the line that moves it.
    """
    if jit_options.pinned_like != _likeness(arguments, jit_options.pins):
        return False
    by_name = dict(arguments)
    if jit_options.state_shardings is not None and not jit_options.pins:
        own = pin_of_state(arguments, jit_options.state_shardings, {}, None, function)
        require_placed(own, by_name[own.argument])
    for one in jit_options.pins:
        require_placed(one, by_name[one.argument])
    return True


def host_pins(
    function: Callable[..., Any], jit_options: JitOptions, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Pin, ...]:
    """Where a policy has the optimizer's state of a call, wherever it is now.

    Raises:
        PolicyError: the step holds no such state that can be moved.
    """
    arguments = named_arguments(function, args, kwargs)
    static = static_arguments(arguments, function)
    traced = [(name, value) for name, value in arguments if name not in static]
    options = _options("static", static, function, arguments, len(args))
    results, leaves = _traced_if_needed(fetching(function), jit_options, traced, options, (args, kwargs))
    return tuple(_pins(function, jit_options, traced, results, leaves))


def pin(
    function: Callable[..., Any],
    jit_options: JitOptions,
    traced: Sequence[tuple[str, Any]],
    results: Any,
    leaves: Sequence[Leaf] | None = None,
) -> None:
    """Decide where the state must be, and refuse one that is elsewhere.

    Raises:
        PolicyError: there is no mesh, or the state is elsewhere. The message has the line to type.
    """
    pins = _pins(function, jit_options, traced, results, leaves)
    jit_options.pins, jit_options.pinned_like = tuple(pins), _likeness(traced, pins)
    require_pinned(traced, jit_options, function)


def _pins(
    function: Callable[..., Any],
    jit_options: JitOptions,
    traced: Sequence[tuple[str, Any]],
    results: Any,
    leaves: Sequence[Leaf] | None,
) -> list[Pin]:
    """Where the state must be, by the user's word and by the policy."""
    updated = updated_arguments(traced, results)
    own = None
    if jit_options.state_shardings is not None:
        own = pin_of_state(traced, jit_options.state_shardings, updated, results, function)
    pins = [] if own is None else [own]
    if jit_options.policy.sharding is not None:
        pins += pins_of_policy(jit_options.policy, traced, updated, own, function)
    if jit_options.policy.state_offload is not None:
        pins = pins_on_host(traced, updated, leaves or (), pins, function)
    return pins


def _likeness(arguments: Sequence[tuple[str, Any]], pins: Sequence[Pin]) -> tuple[Any, ...]:
    """Tree and shapes of the arguments that a policy pins; what the user pins is the user's word for every state."""
    names = {one.argument for one in pins if one.required_by != "state_shardings"}
    return tuple(
        (name, jax.tree.structure(value), tuple(getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(value)))
        for name, value in arguments
        if name in names
    )


def written_call(  # noqa: PLR0913 - what the call and its trace know, each once
    jitted: Jitted,
    arguments: Sequence[tuple[str, Any]],
    positional: int,
    leaves: Sequence[Leaf],
    results: Any,
    *,
    own_jit: bool,
) -> Written:
    """How a step's user writes its call, as far as names show."""
    name = getattr(jitted.function, "__qualname__", "").rpartition("<locals>.")[2]
    present = {leaf.argument for leaf in leaves}
    updated = updated_arguments([(n, v) for n, v in arguments if n in present], results)
    firsts: dict[Any, str] = {}
    for argument, value in arguments[:positional]:
        firsts.setdefault(jax.tree.structure(value), argument)
    names = [n if at < positional else f"{n}={n}" for at, (n, _) in enumerate(arguments)]
    return Written(
        step=name if name.isidentifier() and not jitted.is_equinox else "",
        call=", ".join(names),
        places={n: "".join(f"[{index}]" for index in place) for n, place in updated.items() if place is not None},
        pinnable=frozenset(() if own_jit else firsts.values())
        & {n for n, place in updated.items() if place is not None},
    )


def _traced_if_needed(
    function: Callable[..., Any],
    jit_options: JitOptions,
    traced: Sequence[tuple[str, Any]],
    options: dict[str, Any],
    call: tuple[Sequence[Any], dict[str, Any]],
) -> tuple[Any, list[Leaf] | None]:
    """The step's results as shapes, and its arrays by what it does with them.

    Jits of one plain function share their trace; an NNX jit is traced once more.
    """
    inferring = not isinstance(jit_options.donate, tuple) and needs_results(traced)
    if not inferring and not (jit_options.places and needs_results(traced)):
        return None, None
    args, kwargs = call
    made = jax_traced(jit_plain(function, traced, **options).trace(*args, **kwargs))
    positional = sum(name in dict(traced) for name, _ in named_arguments(function, args, {}))
    return made.out_info, call_leaves(traced, positional, made, made.jaxpr)


def _donated(
    function: Callable[..., Any],
    jit_options: JitOptions,
    traced: Sequence[tuple[str, Any]],
    results: Any,
    leaves: Sequence[Leaf] | None,
) -> tuple[str, ...]:
    if isinstance(jit_options.donate, tuple):
        check_names(jit_options.donate, traced, function)
        return jit_options.donate
    return infer_donation(traced, results, leaves)


def _options(
    kind: str, names: Sequence[str], function: Callable[..., Any], arguments: Sequence[tuple[str, Any]], count: int
) -> dict[str, Any]:
    """The ``..._argnums`` and ``..._argnames`` of jit for arguments that may be given either way."""
    by_position = parameter_names(function)
    given = [name for name, _ in arguments[:count]]
    numbers = {by_position.index(name) for name in names if name in by_position}
    numbers |= {given.index(name) for name in names if name in given}
    by_name = [
        name for name in names if name not in given[len(by_position) :] and not _is_position_only(name, function)
    ]
    return {f"{kind}_argnums": tuple(sorted(numbers)), f"{kind}_argnames": tuple(by_name)}


def _is_position_only(name: str, function: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(function).parameters.get(name)
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind is parameter.POSITIONAL_ONLY


def _pinned_options(
    function: Callable[..., Any],
    jit_options: JitOptions,
    traced: Sequence[tuple[str, Any]],
    results: Any,
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    values = dict(traced)
    in_place = any(framework_of(values[one.argument]) is not None for one in jit_options.pins)
    refused = [name for name in kwargs if in_place or name not in jit_options.static]
    if refused:
        order = {name: place for place, name in enumerate(parameter_names(function))}
        names = sorted((name for name, _ in traced), key=lambda name: order.get(name, len(order)))
        msg = (
            f"{jit_options.pins[0].required_by} pins arguments by position, and {', '.join(refused)} came by keyword. "
            f"Call the step with positional arguments: step({', '.join(names)})."
        )
        raise PolicyError(msg)

    def prefix_of(name: str, shardings: Any) -> Any:
        framework = framework_of(values[name])
        return shardings if framework is None else framework.pinned(values[name], shardings)

    options = jit_shardings(jit_options.pins, [name for name, _ in traced], results, prefix_of)
    if kwargs:  # jax.jit takes no in_shardings beside keywords: the state was checked, and its update is pinned
        del options["in_shardings"]
    return options
