"""What an argument holds: parameters, optimizer state, a batch."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

PARAMETERS, OPTIMIZER, BATCH, STATE, OTHER = "parameters", "optimizer state", "batch", "state", "other"

# Names that a batch or a part of it goes by. An argument with such a name is never donated by inference.
BATCH_NAMES = frozenset(
    {"batch", "batches", "microbatch", "minibatch", "x", "y", "xs", "ys", "xb", "yb", "data", "example", "examples"}
    | {"sample", "samples", "input", "inputs", "input_ids", "inp", "target", "targets", "label", "labels", "image"}
    | {"images", "token", "tokens", "ids", "mask", "masks", "attention_mask", "features", "observations", "obs"}
    | {"actions", "rewards", "text", "audio", "frames", "weights_mask", "segment_ids", "positions", "loss_mask"}
)
# Names in a path or of an argument -> what is under them.
_BY_NAME = {
    PARAMETERS: ("params", "parameters", "weights", "model", "ema_params", "trainable", "frozen", "theta", "net"),
    OPTIMIZER: ("opt_state", "optimizer_state", "optimizer", "opt", "opt_states", "optim_state", "momentum"),
    STATE: ("state", "train_state", "batch_stats", "model_state", "mutable", "stats", "carry", "ema", "cache"),
}
_KIND_OF_NAME = {name: kind for kind, names in _BY_NAME.items() for name in names}
# Flax NNX variables by class name, nearest class first.
_NNX_VARIABLES = {"OptVariable": OPTIMIZER, "OptArray": OPTIMIZER, "OptState": OPTIMIZER, "Param": PARAMETERS}


@dataclass(frozen=True, slots=True)
class _Word:
    """A step of a written path, in the form of a key of a pytree's path."""

    name: str


@dataclass(frozen=True, slots=True)
class NodeKind:
    """What a whole node holds; one found in two places is one variable where ``shared_by_identity``."""

    name: str
    shared_by_identity: bool = False


def kind_of_node(node: Any) -> NodeKind | None:
    """What a node holds by its class: an NNX variable or an Optax state; None for all others."""
    return _kind_of_class(type(node))


@functools.cache
def _kind_of_class(kind: type) -> NodeKind | None:
    bases = [base for base in kind.__mro__ if base.__module__.startswith("flax.nnx")]
    if any(base.__name__ == "Variable" for base in bases):
        names = [base.__name__ for base in bases]
        return NodeKind(next((_NNX_VARIABLES[n] for n in names if n in _NNX_VARIABLES), STATE), shared_by_identity=True)
    if kind.__module__.partition(".")[0] == "optax" and issubclass(kind, tuple):
        return NodeKind(OPTIMIZER)
    return None


def kind_of_argument(name: str, path: tuple[Any, ...] = ()) -> str:
    """What a leaf of argument ``name`` holds, by the names on its path; the argument's own name comes last.

    A table name nearer to the root wins over a deeper one, because ``opt_state`` holds trees named like the parameters.
    """
    words = [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]
    if any(_KIND_OF_NAME.get(word) == OPTIMIZER for word in (name, *words)):
        return OPTIMIZER
    found = next((_KIND_OF_NAME[word] for word in words if word in _KIND_OF_NAME), None)
    if found is not None:
        return found
    return BATCH if is_batch_name(name) else _KIND_OF_NAME.get(name, OTHER)


def kind_of_path(path: str) -> str:
    """What the leaf at a written path holds, such as ``state.opt_state[0].mu['w']``, by the names in it."""
    words = re.findall(r"\w+", path)
    return kind_of_argument(words[0], tuple(_Word(word) for word in words[1:])) if words else OTHER


def is_named(path: str) -> bool:
    """Whether what is below an argument's own name has a name of the tables on its path."""
    return any(word in _KIND_OF_NAME for word in re.findall(r"\w+", path)[1:])


def batch_of(signature: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Path -> dtype and shape of what is batch in a step's signature, by the names in the paths."""
    return {path: text for path, text in signature if kind_of_path(path) == BATCH}


def is_batch_name(name: str) -> bool:
    """Whether an argument is called what batches are called: in the table, or ending in ``_batch``."""
    word = name.lower()
    return word in BATCH_NAMES or word.endswith("_batch") or (word.startswith("batch_") and word != "batch_stats")


def is_raw_key(leaf: Any) -> bool:
    """Whether an array looks like one random key as plain integers: two of 32 bits."""
    return tuple(leaf.shape) == (2,) and str(leaf.dtype) == "uint32"
