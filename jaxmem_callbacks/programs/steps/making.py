"""A plain step, what was asked for and the first arguments enter; its jit leaves, static and donated arguments decided."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxmem_callbacks.programs.steps.aliases import LeafUse
from jaxmem_callbacks.programs.steps.donation import check_names, infer_donation, needs_results
from jaxmem_callbacks.programs.steps.jitting import Jitted, jit_plain, static_arguments
from jaxmem_callbacks.programs.steps.leaves import Leaf, named_arguments, parameter_names
from jaxmem_callbacks.programs.steps.placement import jit_shardings, require_placed, state_argument
from jaxmem_callbacks.records.errors import DonationError, DonationWarning, PolicyError


@dataclass(kw_only=True, slots=True)
class Making:
    """What was asked of a step's jit, and what was decided at its first call.

    Attributes:
        donate: Argument names, ``()`` for none; ``auto`` or None to infer.
        state_shardings: What the state is pinned to, or None.
        static: Arguments found to be static so far.
        donated: Arguments that are donated.
        jitted: The jit made so far.
    """

    donate: Literal["auto"] | tuple[str, ...] | None
    state_shardings: Any = None
    static: tuple[str, ...] = ()
    donated: tuple[str, ...] = ()
    jitted: Jitted | None = field(default=None)

    def explicit(self, *, own_jit: bool) -> bool:
        """Whether the user wrote down what is donated, here or in a jit of his own."""
        return own_jit or isinstance(self.donate, tuple)

    def refuse_for_jitted(self, step: Callable[..., Any], donate_argnames: tuple[str, ...] | None) -> None:
        """Refuse what only the user's own jit can do.

        Raises:
            DonationError: ``donate_argnames`` or ``state_shardings`` beside a step that is already jitted.
        """
        name = getattr(step, "__name__", "the step")
        for word, value in (("donate_argnames", donate_argnames), ("state_shardings", self.state_shardings)):
            if value is not None:
                where = "donate_argnames" if word == "donate_argnames" else "in_shardings=..., out_shardings"
                msg = (
                    f"{word} was given for {name}, which is already jitted and keeps its own settings. Write it where it is "
                    f"jitted: jax.jit({name}, {where}={value if word == 'donate_argnames' else '...'}), or pass the plain "
                    "function to jm.jit_step."
                )
                raise DonationError(msg)

    def check_jitted(self, step: Callable[..., Any], uses: Sequence[LeafUse], undonated: Sequence[str]) -> None:
        """Compare what the policy asks with what the user's own jit donates.

        Raises:
            DonationError: the policy names an argument that the jit does not donate.
        """
        name = getattr(step, "__name__", "the step")
        donated = {use.argument for use in uses if use.requested}
        missing = [n for n in self.donate if n not in donated] if isinstance(self.donate, tuple) else []
        if missing:
            msg = (
                f"The policy says donate={self.donate!r}, but {name} is already jitted and does not donate "
                f"{', '.join(missing)}. Write it where it is jitted: jax.jit({name}, donate_argnames={tuple(missing)!r})."
            )
            raise DonationError(msg)
        if self.donate == "auto" and undonated:
            msg = (
                f"The policy says donate='auto', but {name} is already jitted and returns {', '.join(undonated)} updated "
                f"without donating. Write it where it is jitted: jax.jit({name}, donate_argnames={tuple(undonated)!r})."
            )
            warnings.warn(msg, DonationWarning, stacklevel=5)
            self.donate = None


def make_jit(function: Callable[..., Any], making: Making, args: Sequence[Any], kwargs: dict[str, Any]) -> Jitted:
    """The jit of a plain step; made at the first call, and again when a call brings a static argument not seen before.

    Raises:
        DonationError: ``donate_argnames`` has a name that is no argument.
        PolicyError: the state lies elsewhere than ``state_shardings`` says.
        TypeError: a value that is no array sits inside a tree of arrays.
    """
    arguments = named_arguments(function, args, kwargs)
    static = static_arguments(arguments, function)
    require_pinned(arguments, making, function)
    if making.jitted is not None and set(static) <= set(making.static):
        return making.jitted
    making.static = tuple(dict.fromkeys((*making.static, *static)))
    options = _options("static", making.static, function, arguments, len(args))
    traced = [(name, value) for name, value in arguments if name not in making.static]
    results = _results_if_needed(function, making, traced, options, (args, kwargs))
    making.donated = _donated(function, making, traced, results)
    options |= _options("donate", making.donated, function, arguments, len(args))
    if making.state_shardings is not None:
        options |= _pinned(function, making, traced, results, kwargs)
    call = jit_plain(function, arguments, **options)
    making.jitted = Jitted(call=call, lowering=call, function=function, bound_kwargs={})
    return making.jitted


def require_pinned(arguments: Sequence[tuple[str, Any]], making: Making, function: Callable[..., Any]) -> None:
    """Refuse a state that lies elsewhere than it is pinned to.

    Raises:
        PolicyError: with the line that moves it.
    """
    if making.state_shardings is not None:
        index = state_argument(arguments, making.state_shardings, function)
        require_placed(*arguments[index], making.state_shardings)


def undonated_names(arguments: Sequence[tuple[str, Any]], leaves: Sequence[Leaf], results: Any) -> tuple[str, ...]:
    """Arguments that the step returns updated and of which nothing is donated."""
    present = {leaf.argument for leaf in leaves}
    donated = {leaf.argument for leaf in leaves if leaf.donated}
    inferred = infer_donation([(n, v) for n, v in arguments if n in present], results)
    return tuple(name for name in inferred if name not in donated)


def _results_if_needed(
    function: Callable[..., Any],
    making: Making,
    traced: Sequence[tuple[str, Any]],
    options: dict[str, Any],
    call: tuple[Sequence[Any], dict[str, Any]],
) -> Any:
    """The step's results as shapes. Jits of one plain function share their trace; an NNX jit is traced once more."""
    inferring = not isinstance(making.donate, tuple) and needs_results(traced)
    if not inferring and making.state_shardings is None:
        return None
    args, kwargs = call
    return jit_plain(function, traced, **options).eval_shape(*args, **kwargs)


def _donated(
    function: Callable[..., Any], making: Making, traced: Sequence[tuple[str, Any]], results: Any
) -> tuple[str, ...]:
    if isinstance(making.donate, tuple):
        check_names(making.donate, traced, function)
        return making.donate
    return infer_donation(traced, results)


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


def _pinned(
    function: Callable[..., Any],
    making: Making,
    traced: Sequence[tuple[str, Any]],
    results: Any,
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    dynamic = [name for name in kwargs if name not in making.static]
    if dynamic:
        msg = (
            f"state_shardings pins arguments by position, and {', '.join(dynamic)} came by keyword. Call the step with "
            f"positional arrays: step({', '.join(name for name, _ in traced)})."
        )
        raise PolicyError(msg)
    index = state_argument(traced, making.state_shardings, function)
    return jit_shardings(index, len(traced), making.state_shardings, results, traced[index][1])
