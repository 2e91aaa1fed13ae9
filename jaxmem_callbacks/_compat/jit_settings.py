"""Settings that the user gave to a jit: its compiler options, and where it wants its arguments.

JAX has no public way to read them before a compile. Its jitted functions and traces keep them. Where these have another form
there are none: options that are to count for a compile elsewhere then belong into ``XLA_FLAGS``; arguments count where they are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

# Where Flax NNX and Equinox keep the jitted function that they made.
_INSIDE = ("jitted_fn", "_cached")


def compiler_options_of(jitted: Any) -> dict[str, Any]:
    """The compiler options of a jit, by name; empty where none were given."""
    for function in (jitted, *(getattr(jitted, name, None) for name in _INSIDE)):
        options = getattr(getattr(function, "_jit_info", None), "compiler_options_kvs", None)
        if options:
            return dict(options)
    return {}


def with_compiler_options(jitted: Any, options: Mapping[str, Any]) -> Callable[..., Any] | None:
    """The same jit with further compiler options: its donation, static arguments and shardings stay.

    Args:
        jitted: What `jax.jit`, ``nnx.jit`` or ``eqx.filter_jit`` made; it is not changed.
        options: Compiler options by name.

    Returns:
        None where the jit's own settings cannot be read.
    """
    if hasattr(jitted, "_jit_info"):
        return _made_anew(jitted, jitted.__wrapped__, options)
    for name in _INSIDE:
        inner: Any = getattr(jitted, name, None)
        if hasattr(inner, "_jit_info"):
            outer, function = copy.copy(jitted), inner.__wrapped__
            if getattr(function, "ctxtag", None) is jitted:  # by which NNX knows the objects of one call
                function = dataclasses.replace(function, ctxtag=outer)
            made = _made_anew(inner, function, options)
            if made is not None:
                object.__setattr__(outer, name, made)
                return outer
    return None


_SETTINGS = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "device", "backend")


def _made_anew(jitted: Any, function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any] | None:
    info = jitted._jit_info  # noqa: SLF001 - what this file is for
    try:
        settings = {name: value for name in _SETTINGS if (value := getattr(info, name)) not in (None, ())}
        settings |= {"keep_unused": info.keep_unused, "inline": info.inline}
        for side in ("in", "out"):
            if any(layout is not None for layout in getattr(info, f"{side}_layouts_leaves")):
                return None
            places = getattr(info, f"{side}_shardings_leaves")
            settings[f"{side}_shardings"] = jax.tree.unflatten(getattr(info, f"{side}_shardings_treedef"), places)
        own = dict(info.compiler_options_kvs)
    except AttributeError:
        return None
    return jax.jit(function, **settings, compiler_options={**own, **options})


def in_shardings_of(traced: Any, count: int) -> tuple[jax.sharding.Sharding | None, ...]:
    """The ``in_shardings`` of a jit, one for each array that it takes, in order; None where nothing was given.

    Args:
        traced: What JAX traced.
        count: How many arrays the call has.
    """
    params = getattr(traced, "_params", None)
    given = params.get("in_shardings", ()) if isinstance(params, dict) else ()
    # What the function closes over comes before its arguments.
    own = tuple(given)[max(len(given) - count, 0) :]
    known = tuple(each if isinstance(each, jax.sharding.Sharding) else None for each in own)
    return known if len(known) == count else (None,) * count
