"""What an argument holds (parameters, optimizer state, a batch), by its name or, of a traced step, by dataflow.

By dataflow an input is returned updated where some result has its shape and dtype and is made of it element by element. If the
result is also made of the backward pass, the input is a parameter where the forward pass reads it, and the optimizer's where it
does not. An input without such a result is a parameter where the step returns a gradient for it. What the step only reads is left
open: no dataflow distinguishes a batch from a frozen weight.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jaxmem_callbacks.transforms.tracing import is_variable, open_jaxpr, scan_arity, subjaxprs

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


# What makes its result of other elements of an operand than those at the same place.
_MIXING = frozenset(
    {
        "dot_general",
        "conv_general_dilated",
        "gather",
        "sort",
        "rev",
        "transpose",
        "cumsum",
        "cumprod",
        "cummax",
    }
    | {
        "cummin",
        "cumlogsumexp",
        "dynamic_slice",
        "triangular_solve",
        "cholesky",
        "lu",
        "qr",
        "svd",
        "fft",
        "random_bits",
    }
    | {"random_wrap", "random_unwrap", "random_split", "random_fold_in", "threefry2x32", "all_gather", "ppermute"}
    | {"all_to_all", "psum_scatter", "reduce_scatter", "rng_bit_generator", "eigh", "eig", "schur", "iota"}
)
# What makes less of an operand than its elements: what is made of a sum of an array is no later value of that array.
_SUMMING = frozenset({"dot_general", "conv_general_dilated", "argmax", "argmin"})
_HALF = 1 / 2
_PASSES = ("jvp(", "transpose(")


@dataclass(frozen=True, slots=True)
class Role:
    """What one input is in a step.

    Attributes:
        kind: A word of `transforms.arg_roles`, or None where dataflow does not show it.
        updated: Whether some result is the same array updated.
        accumulates: Whether gradients are added to it until some step begins again, as `optax.MultiSteps` does.
    """

    kind: str | None
    updated: bool
    accumulates: bool = False


@dataclass(frozen=True, slots=True)
class Dataflow:
    """What the inputs of a traced step become.

    Attributes:
        roles: Of each input; None where the step only reads it.
        no_update: Of each input the results that are no later value of it, although they may have its shape: gradients, where
            the differentiated function reads it.
    """

    roles: tuple[Role | None, ...]
    no_update: tuple[frozenset[int], ...]


@dataclass(frozen=True, slots=True)
class _Made:
    """What a value is made of.

    Attributes:
        elements: Inputs that it is made of element by element, as bits.
        sources: Inputs that it is made of in any way.
        is_gradient: Whether the backward pass is in it.
        moved: Inputs whose elements reach it past the backward pass, most of their value with them.
        dropped: Inputs that are in it element by element, or not at all by a switch, in favour of a constant.
        is_switch: Whether it is one yes or no that no gradient decides, such as "every fourth step"; spread over a shape too.
    """

    elements: int = 0
    sources: int = 0
    is_gradient: bool = False
    moved: int = 0
    dropped: int = 0
    is_switch: bool = False

    def __or__(self, other: _Made) -> _Made:
        return _Made(
            self.elements | other.elements,
            self.sources | other.sources,
            self.is_gradient or other.is_gradient,
            self.moved | other.moved,
            self.dropped | other.dropped,
            self.is_switch and other.is_switch,
        )


_NOTHING = _Made()


def roles_of(closed: Any) -> tuple[Role | None, ...]:
    """The role of each input of a traced step; None where the step only reads it.

    Args:
        closed: What was traced.
    """
    return dataflow_of(closed).roles


def dataflow_of(closed: Any) -> Dataflow:
    """What the inputs of a traced step become.

    Args:
        closed: What was traced.
    """
    jaxpr = open_jaxpr(closed)
    if (known := _KNOWN.get(jaxpr)) is None:
        known = _KNOWN[jaxpr] = _followed(jaxpr)
    return known


# Jits of one function share its trace: what a step is jitted with is decided by one, and what its arguments are by another.
_KNOWN: weakref.WeakKeyDictionary[Any, Dataflow] = weakref.WeakKeyDictionary()


def _followed(jaxpr: Any) -> Dataflow:
    flow = _Flow()
    given = [_Made(1 << place, 1 << place, moved=1 << place) for place in range(len(jaxpr.invars))]
    made = [_settled(each, flow.read_forward) for each in flow.through(jaxpr, given, pass_around="")]
    claimed = _claimed(jaxpr, made, flow.read_forward)
    forward = [bool(flow.read_forward >> place & 1) for place in range(len(jaxpr.invars))]
    roles: list[Role | None] = [None] * len(jaxpr.invars)
    for place, result in claimed.items():
        kind = _kind_of_updated(jaxpr, place, made[result], is_read=forward[place])
        of_weights = (
            made[result].moved & flow.read_forward & ~(1 << place)
        )  # such as a slow copy of them, and no sum of gradients
        accumulates = kind == OPTIMIZER and not of_weights and bool(made[result].dropped >> place & 1)
        roles[place] = Role(kind, updated=True, accumulates=accumulates)
    changed = {place: result for place, result in claimed.items() if jaxpr.outvars[result] is not jaxpr.invars[place]}
    for place in _with_gradients(jaxpr, made, changed, forward):  # also of those that are given back as they came
        roles[place] = Role(PARAMETERS, updated=False)
    no_update = tuple(
        frozenset(at for at, each in enumerate(made) if is_read and each.is_gradient and not each.moved >> place & 1)
        for place, is_read in enumerate(forward)
    )
    return Dataflow(tuple(roles), no_update)


def _settled(made: _Made, read_forward: int) -> _Made:
    """A result, where a gradient is no update of what was differentiated but for what reaches it past the backward pass."""
    return replace(made, elements=made.elements & (~read_forward | made.moved)) if made.is_gradient else made


def _kind_of_updated(jaxpr: Any, place: int, result: _Made, *, is_read: bool) -> str | None:
    """What is made of itself alone is left open: a parameter that the loss does not use, and its moments, get zeros."""
    if not jnp.issubdtype(jaxpr.invars[place].aval.dtype, jnp.inexact):
        return STATE
    if result.is_gradient:
        return PARAMETERS if is_read else OPTIMIZER
    return None if result.sources == 1 << place else STATE


def _claimed(jaxpr: Any, made: Sequence[_Made], read_forward: int) -> dict[int, int]:
    """Input -> the result that is the same array updated.

    Results that are made of fewest inputs choose first: new moments, then new parameters, then averages of these. An input that
    the forward pass reads is left for a later result that is made of it too, as where moments hold decayed weights.
    """
    places: dict[Any, list[int]] = {}
    for place, var in enumerate(jaxpr.invars):
        places.setdefault(_type(var), []).append(place)
    claimed: dict[int, int] = {}
    order = sorted(range(len(made)), key=lambda each: made[each].elements.bit_count())
    later = Counter(
        place
        for result in order
        for place in places.get(_type(jaxpr.outvars[result]), ())
        if made[result].elements >> place & 1
    )
    for result in order:
        alike = [place for place in places.get(_type(jaxpr.outvars[result]), ()) if made[result].elements >> place & 1]
        later.subtract(alike)
        free = [place for place in alike if place not in claimed]
        read = [place for place in free if read_forward >> place & 1]
        others = [place for place in free if place not in read]
        if made[result].is_gradient and any(not later[place] for place in read):
            others = []
        for place in (others or free)[:1]:
            claimed[place] = result
    return claimed


def _with_gradients(
    jaxpr: Any, made: Sequence[_Made], claimed: dict[int, int], forward: Sequence[bool]
) -> Iterable[int]:
    """Inputs that the forward pass reads and whose gradient the step returns as it is."""
    taken = set(claimed.values())
    left: dict[Any, int] = {}
    for result, var in enumerate(jaxpr.outvars):
        if result not in taken and made[result].is_gradient and not made[result].elements and var.aval.shape:
            left[_type(var)] = left.get(_type(var), 0) + 1
    for place, var in enumerate(jaxpr.invars):
        if place not in claimed and forward[place] and left.get(_type(var)):
            left[_type(var)] -= 1
            yield place


def _type(var: Any) -> Any:
    return getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None)


class _Flow:
    """Follows inputs through a jaxpr; remembers which of them the differentiated function reads."""

    def __init__(self) -> None:
        self.read_forward = 0

    def through(self, jaxpr: Any, given: Sequence[_Made], *, pass_around: str) -> list[_Made]:
        """What the results of a jaxpr are made of.

        Args:
            jaxpr: An open one.
            given: What its inputs are made of.
            pass_around: The names of the transforms that the jaxpr as a whole is a part of.
        """
        known: dict[Any, _Made] = dict(zip(jaxpr.invars, given, strict=True))
        for eqn in jaxpr.eqns:
            operands = [known.get(each, _NOTHING) if is_variable(each) else _NOTHING for each in eqn.invars]
            scope = pass_around + _scope(eqn.source_info.name_stack)
            results = self._made_by(eqn, operands, scope)
            known |= dict(zip(eqn.outvars, results, strict=True))
        return [known.get(each, _NOTHING) if is_variable(each) else _NOTHING for each in jaxpr.outvars]

    def _made_by(self, eqn: Any, operands: list[_Made], scope: str) -> list[_Made]:
        name = eqn.primitive.name
        if name == "scan":
            return self._made_by_scan(eqn, operands, scope)
        if name == "while":
            return self._made_by_while(eqn, operands, scope)
        inner = subjaxprs(eqn)
        if name == "cond":
            branches = [self.through(each, operands[1:], pass_around=scope) for each in inner]
            several = list(zip(*branches, strict=True))
            return [_either(each, switch=operands[0]) for each in several]
        if inner and len(inner[0].invars) == len(operands) and len(inner[0].outvars) == len(eqn.outvars):
            return self.through(inner[0], operands, pass_around=scope)
        is_differentiated = any(word in scope for word in _PASSES)
        if is_differentiated:
            for operand in operands:
                self.read_forward |= 0 if operand.is_gradient else operand.sources
        is_backward = _PASSES[1] in scope
        is_gradient = is_backward or any(operand.is_gradient for operand in operands)
        sources = functools.reduce(int.__or__, (operand.sources for operand in operands), 0)
        moved = (
            0 if is_backward or _leaves_little(eqn) else functools.reduce(int.__or__, (o.moved for o in operands), 0)
        )
        return [
            _Made(
                _elements(eqn, operands, var),
                sources,
                is_gradient,
                moved,
                _dropped(eqn, operands, var),
                not is_gradient and _is_switch(eqn, operands, var),
            )
            for var in eqn.outvars
        ]

    def _made_by_scan(self, eqn: Any, operands: list[_Made], scope: str) -> list[_Made]:
        constants, carried = scan_arity(eqn)
        (body,) = subjaxprs(eqn)
        sliced = operands[constants + carried :]
        held, results = operands[constants : constants + carried], []
        while True:  # what it is made of grows until nothing is added
            results = self.through(body, [*operands[:constants], *held, *sliced], pass_around=scope)
            grown = [one | other for one, other in zip(held, results[:carried], strict=True)]
            if grown == held:
                break
            held = grown
        # Slice by slice is element by element: a loop over layers updates each of them.
        return [*held, *results[carried:]]

    def _made_by_while(self, eqn: Any, operands: list[_Made], scope: str) -> list[_Made]:
        before, inside = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        body = open_jaxpr(eqn.params["body_jaxpr"])
        held = operands[before + inside :]
        while True:  # what it is made of grows until nothing is added
            results = self.through(body, [*operands[before : before + inside], *held], pass_around=scope)
            grown = [one | other for one, other in zip(held, results, strict=True)]
            if grown == held:
                break
            held = grown
        return held


def _elements(eqn: Any, operands: Sequence[_Made], result: Any) -> int:
    """Inputs that a result is made of element by element: through operands of its shape."""
    if eqn.primitive.name in _MIXING:
        return 0
    shape, elements = getattr(result.aval, "shape", ()), 0
    for atom, operand in zip(eqn.invars, operands, strict=True):
        if getattr(atom.aval, "shape", ()) == shape:
            elements |= operand.elements
    return elements


def _either(cases: Sequence[_Made], *, switch: _Made) -> _Made:
    """What is one of several values, by a switch."""
    return replace(
        functools.reduce(_Made.__or__, cases),
        dropped=functools.reduce(int.__or__, (each.dropped for each in cases), _dropped_by(switch, cases)),
        is_switch=False,
    )


def _dropped_by(switch: _Made, cases: Sequence[_Made]) -> int:
    """Inputs that one of several values is made of, where another is made of no input at all, such as zeros."""
    if switch.is_gradient or all(each.sources for each in cases):
        return 0
    return functools.reduce(int.__or__, (each.elements for each in cases))


def _dropped(eqn: Any, operands: Sequence[_Made], result: Any) -> int:
    name, shape = eqn.primitive.name, getattr(result.aval, "shape", ())
    if name in _MIXING:
        return 0
    if name == "select_n" and (operands[0].is_switch or not getattr(eqn.invars[0].aval, "shape", ())):
        return _sometimes(operands[1:]) | _dropped_by(operands[0], operands[1:])
    if name == "mul" and shape and any(each.is_switch for each in operands):  # as a number, 0 or 1
        return _sometimes(operands) | _dropped_by(
            _NOTHING, [_NOTHING, *(each for each in operands if not each.is_switch)]
        )
    return _sometimes(operands)


def _sometimes(operands: Sequence[_Made]) -> int:
    """Inputs that are dropped from each operand that is made of them, and so from what all of them make."""
    dropped = functools.reduce(int.__or__, (each.dropped for each in operands), 0)
    return dropped & ~functools.reduce(int.__or__, (each.elements & ~each.dropped for each in operands), 0)


def _is_switch(eqn: Any, operands: Sequence[_Made], result: Any) -> bool:
    """A yes or no, or what is made of such alone."""
    if getattr(result.aval, "dtype", None) == jnp.bool_ and not getattr(result.aval, "shape", ()):
        return True
    made_of = [operand for atom, operand in zip(eqn.invars, operands, strict=True) if is_variable(atom)]
    return bool(made_of) and all(each.is_switch for each in made_of)


def _leaves_little(eqn: Any) -> bool:
    """Whether its result has little of its operands: a sum over them, or a small part of their value."""
    name = eqn.primitive.name
    if name in _SUMMING or (name.startswith("reduce_") and name != "reduce_precision"):
        return True
    if name not in ("mul", "div"):  # of others a constant may be no number: float0, a key
        return False
    numbers = [abs(each.val) for each in eqn.invars if not is_variable(each) and not getattr(each.val, "shape", ())]
    if name == "mul":  # by less than a half: decay, or a penalty's gradient, and no later value of the array
        return any(number < _HALF for number in numbers)
    return not is_variable(eqn.invars[1]) and any(number * _HALF > 1 for number in numbers)


@functools.lru_cache(maxsize=4096)
def _scope(name_stack: Any) -> str:
    return str(name_stack)
