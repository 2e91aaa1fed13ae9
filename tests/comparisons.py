"""What tests of rematerialised models compare: the checkpoints of a traced function, and values leaf by leaf."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxmem_callbacks.transforms.tracing import open_jaxpr, subjaxprs

CHECKPOINTS = {"checkpoint", "remat", "remat2"}  # the primitive's name on every JAX line


def checkpoints(function: Any, *args: Any) -> list[Any]:
    """Every checkpoint equation of a traced function, nested ones included."""

    def inside(jaxpr):
        for eqn in open_jaxpr(jaxpr).eqns:
            if eqn.primitive.name in CHECKPOINTS:
                yield eqn
            for body in subjaxprs(eqn):
                yield from inside(body)

    return list(inside(jax.make_jaxpr(function)(*args)))


def assert_close(got: Any, expected: Any) -> None:
    """The same tree, and the norm of each leaf's error within 1e-6 of its size; the first leaf that is not is named."""
    structures = jax.tree.structure(got), jax.tree.structure(expected)
    assert structures[0] == structures[1], structures
    for (path, value), other in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        error, size = (np.linalg.norm(np.asarray(part, np.float64)) for part in (other - value, value))
        assert error <= 1e-6 * max(size, 1.0), (jax.tree_util.keystr(path), error, size)


def stored_bytes(loss: Any, *args: Any) -> int:
    """What goes from the forward to the backward pass, by shapes."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(loss, *a)[1], *args))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
