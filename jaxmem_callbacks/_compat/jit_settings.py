"""Settings that the user gave to a jit: its compiler options, and where it wants its arguments.

JAX has no public way to read them before a compile. Its jitted functions and traces keep them. Where these have another form
there are none: options that are to count for a compile elsewhere then belong into ``XLA_FLAGS``, and arguments count as they lie.
"""

from __future__ import annotations

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
