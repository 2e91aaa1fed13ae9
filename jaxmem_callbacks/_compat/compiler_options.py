"""Compiler options that the user gave to a jit: `jax.jit(step, compiler_options={...})`, or a framework's jit around one.

JAX has no public way to read them. Its jitted function keeps them with its other settings. Where that has another form there are
none, and options that are to count for a compile elsewhere belong into ``XLA_FLAGS``.
"""

from __future__ import annotations

from typing import Any

# Where Flax NNX and Equinox keep the jitted function that they made.
_INSIDE = ("jitted_fn", "_cached")


def compiler_options_of(jitted: Any) -> dict[str, Any]:
    """The options by name; empty where none were given."""
    for function in (jitted, *(getattr(jitted, name, None) for name in _INSIDE)):
        told = getattr(getattr(function, "_jit_info", None), "compiler_options_kvs", None)
        if told:
            return dict(told)
    return {}
