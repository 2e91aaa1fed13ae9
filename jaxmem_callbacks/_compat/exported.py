"""A program of `jax.export` that can be called where JAX's older partitioner is chosen (``jax_use_shardy_partitioner`` off).

JAX writes the shardings of such a program's arguments and results in the words of the newer partitioner, and then refuses to
lower a call of it. Whoever calls it gives the same shardings by the jit around the call, so these are left out. There is no
public way; where JAX's own fields have other names the program stays as it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.export

_FIELDS = ("_in_named_shardings", "_out_named_shardings")


def callable_here(exported: jax.export.Exported) -> jax.export.Exported:
    """The program, without its own shardings where the older partitioner is chosen."""
    fields: dict[str, Any] = {name: getattr(exported, name, None) for name in _FIELDS}
    if getattr(jax.config, "jax_use_shardy_partitioner", True) or not all(
        isinstance(each, tuple) for each in fields.values()
    ):
        return exported
    return dataclasses.replace(exported, **{name: (None,) * len(each) for name, each in fields.items()})
