"""What is looked for in a script that does not know this library, and what of it was seen. Imports no JAX."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from jaxmem_callbacks.cli.frames import Called
from jaxmem_callbacks.records.errors import JaxmemError
from jaxmem_callbacks.records.terminal import put


@dataclass(frozen=True, slots=True)
class GradFunction:
    """A gradient function as people write it, and what they write instead.

    Attributes:
        old: Such as ``jax.grad``.
        new: Such as ``jm.grad``; empty where it is this library's already.
    """

    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Edit:
    """A gradient function that a policy does not reach, as the user's own file writes it.

    Attributes:
        where: Its file and line: ``train.py:12``.
        old: What stands there, such as ``jax.grad``.
        new: What to write instead, such as ``jm.grad``.
    """

    where: str
    old: str
    new: str


# Module and gradient function there -> its word.
GRADIENTS = {
    ("jax", "value_and_grad"): GradFunction("jax.value_and_grad", "jm.value_and_grad"),
    ("jax", "grad"): GradFunction("jax.grad", "jm.grad"),
    ("flax.nnx", "value_and_grad"): GradFunction("nnx.value_and_grad", "jm.nnx.value_and_grad"),
    ("flax.nnx", "grad"): GradFunction("nnx.grad", "the second result of jm.nnx.value_and_grad"),
    ("equinox", "filter_value_and_grad"): GradFunction("eqx.filter_value_and_grad", "jm.eqx.value_and_grad"),
    ("equinox", "filter_grad"): GradFunction("eqx.filter_grad", "jm.eqx.grad"),
    ("jaxmem_callbacks", "value_and_grad"): GradFunction("jm.value_and_grad", ""),
    ("jaxmem_callbacks", "grad"): GradFunction("jm.grad", ""),
    ("jaxmem_callbacks.integrations.flax_nnx", "value_and_grad"): GradFunction("jm.nnx.value_and_grad", ""),
    ("jaxmem_callbacks.integrations.equinox", "value_and_grad"): GradFunction("jm.eqx.value_and_grad", ""),
    ("jaxmem_callbacks.integrations.equinox", "grad"): GradFunction("jm.eqx.grad", ""),
}
# What takes a gradient at once, and has no counterpart that obeys a policy.
AT_ONCE = {("jax", "vjp")}
# Module and what makes jitted functions there.
JITS = {("jax", "jit"), ("flax.nnx", "jit"), ("equinox", "filter_jit"), ("jax.experimental.pjit", "pjit")}
# Loops of `jax.lax` -> the name of the body, and of the arguments that are data.
LOOPS = {
    "scan": ("f", ("init", "xs")),
    "fori_loop": ("body_fun", ("init_val",)),
    "while_loop": ("body_fun", ("init_val",)),
    "map": ("f", ("xs",)),
}


@dataclass(slots=True)
class TraceLog:
    """What of a script took part.

    Attributes:
        edits: The gradient functions that its step called, in their order.
        jitted: Names of the jitted functions that it called, in their order.
        without_effect: Of those, names that take a gradient on which none of their results depends.
        passed: Of those that take a gradient, names that are not the one that was asked for.
        step: How its step is written where it is made; empty where it has no name there, None where nobody looked.
        trainer: What the script calls where a package jits the step, such as ``model.fit``; else empty.
        refused: Why the step that was found is not looked at.
        outside: The line where it takes a gradient outside of jit; empty where none was seen.
        called: How the script writes what it calls as its step; None where that has no name.
    """

    edits: dict[Edit, None] = field(default_factory=dict[Edit, None])
    jitted: dict[str, None] = field(default_factory=dict[str, None])
    without_effect: dict[str, None] = field(default_factory=dict[str, None])
    passed: set[str] = field(default_factory=set[str])
    step: str | None = None
    trainer: str = ""
    refused: JaxmemError | None = None
    outside: str = ""
    called: Called | None = None

    def pass_by(self, name: str, wanted: str) -> None:
        """Say at once that a step has another name than is asked for: where that is misspelt, the script trains to its end."""
        if name not in self.passed:
            self.passed.add(name)
            put(
                f"jaxmem: {name} takes a gradient; the script goes on to {wanted}. Stop it with Ctrl-C if {name} is meant.\n",
                sys.stderr,
            )
