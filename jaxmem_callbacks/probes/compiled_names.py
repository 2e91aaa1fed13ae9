"""A compiled function's name enters; whether the user made it, and not JAX or a library of parts, leaves.

JAX tells of a compile the function's name only. Operations outside of jit compile under their own name, or under that of their
primitive, once a shape; so do functions that a library jitted in its own module, such as optax's ``tree_bias_correction``.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, primitives

# Libraries of parts. One that brings a training loop is none: its step is the user's to be told of.
_LIBRARIES = frozenset(
    ("jax", "optax", "flax", "equinox", "chex", "haiku", "distrax", "rlax", "jaxopt", "lineax", "diffrax", "optimistix")
)
_PASSED = frozenset(("jax", "jaxlib", "jaxmem_callbacks", "contextlib", "functools"))
_STEP = "jaxmem_callbacks.programs.steps.step"
_PLACED = re.compile(r"<[^<>]+> \(.+:\d+\)", re.DOTALL)
_CALLBACKS = ("pure_callback", "io_callback")  # primitives that JAX does not list


def made_by_user(name: str) -> bool:
    """Whether a compiled function of this name is the user's; one that has the name of an operation is taken for that."""
    if _PLACED.fullmatch(name):
        return True
    if not name.isidentifier() or name.startswith("_") or name in _CALLBACKS:
        return False
    if any(hasattr(module, name) for module in (jnp, jax.lax, jax.random, jax.nn, jnp.linalg)):
        return False
    return name not in _primitive_names() and name not in _jitted_by_libraries(len(sys.modules))


def placed(name: str) -> str:
    """The name of a function that has one, else with the line that calls it, such as ``<lambda> (train.py:12)``.

    JAX gives lambdas, partials and objects one name for all, and compiles them at their call, so that the caller tells them
    apart. Where a library calls, the name is left as it is, and where a step of this library does, which is registered.
    """
    if not name.startswith("<"):
        return name
    for frame, line in traceback.walk_stack(inspect.currentframe()):
        module = str(frame.f_globals.get("__name__", ""))
        if module == _STEP:
            return name
        package = module.partition(".")[0]
        if package not in _PASSED:
            is_part = package in _LIBRARIES
            return name if is_part else f"{name} ({Path(frame.f_code.co_filename).name}:{line})"
    return name


@functools.cache
def _primitive_names() -> frozenset[str]:
    return frozenset(each.name for each in vars(primitives).values() if isinstance(each, Primitive))


@functools.lru_cache(maxsize=1)
def _jitted_by_libraries(modules: int) -> frozenset[str]:  # noqa: ARG001 - asked again once more are imported
    """The names of the jitted functions that lie in modules of libraries."""
    found: set[str] = set()
    for module_name, module in tuple(sys.modules.items()):
        if module_name.partition(".")[0] in _LIBRARIES:
            found.update(_name_of(each) for each in tuple(getattr(module, "__dict__", {}).values()) if _is_jitted(each))
    return frozenset(found)


def _is_jitted(each: object) -> bool:
    """Whether it can be lowered and wraps a function; of its class, since an object may answer every attribute."""
    kind = type(each)
    return callable(getattr(kind, "lower", None)) and hasattr(each, "__wrapped__")


def _name_of(jitted: object) -> str:
    return str(getattr(jitted, "__name__", ""))
