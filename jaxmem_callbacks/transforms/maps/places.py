"""Where a dimension goes in one equation: the table of primitives that are known to work position by position.

What has no row is not known, and refused. A row holds all ways in which a dimension passes: its axis in each operand, or None
where all positions share the operand, and its axis in each result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal


class NotAMapError(ValueError):
    """No map along the dimension; the message names the equation and what it does."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the dimension is in a value.

    Attributes:
        axis: The axis that holds it: of the shape ``before * N * after``, in this order of nesting, for N positions.
        before: How many other positions vary more slowly on that axis, as after a reshape that merged it.
        after: How many vary faster.
        offset: Which position of the map is the first of the N, as after ``x[:, 1:]``.
    """

    axis: int
    before: int = 1
    after: int = 1
    offset: int = 0

    @property
    def is_whole_axis(self) -> bool:
        """Whether the axis holds nothing else."""
        return self.before == self.after == 1

    def positions(self, atom: Any) -> int:
        """How many positions a value has."""
        return atom.aval.shape[self.axis] // (self.before * self.after)

    def shape(self, atom: Any, size: int) -> tuple[int, ...]:
        """The shape of a value with another number of positions."""
        axis = self.before * size * self.after
        return tuple(axis if each == self.axis else length for each, length in enumerate(atom.aval.shape))


SUM: Final = "sum"  # in place of a result's place: it is a sum over all positions
Where = Place | None  # None: all positions share the value
Result = Place | Literal["sum"] | None


_ELEMENTWISE = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj "
    "convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag "
    "integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not or polygamma population_count "
    "pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor"
)
_REDUCTIONS = "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"
# Along the dimension that this parameter names, positions meet each other; along every other they do not.
_ALONG = {"cumlogsumexp": "axis", "cummax": "axis", "cummin": "axis", "cumprod": "axis", "cumsum": "axis"} | {
    "concatenate": "dimension",
    "sort": "dimension",
    "split": "axis",
    "top_k": "axis",
}
# Work on the last so many dimensions; those before them are batches.
_LAST = {"cholesky": 2, "eigh": 2, "householder_product": 2, "lu": 2, "qr": 2, "svd": 2, "triangular_solve": 2}
# The dtype of keys of threefry2x32.
_INDEPENDENT_KEYS = "key<fry>"
# What an explicit mesh says of a result: no part of one is placed so.
_PLACED = ("out_sharding", "sharding")
# One way in which a dimension passes: its axis in each operand (None: the operand whole) and in each result.
_Way = tuple[tuple[int | None, ...], tuple[int, ...]]
# Where a dimension is in all operands and in all results.
Passing = tuple[tuple[Where, ...], tuple[Result, ...]]


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return tuple(atom.aval.shape)


def _same(eqn: Any) -> list[_Way]:
    """Elementwise: an operand without a dimension, or with one of length 1, is the same for all its positions."""
    out = shape_of(eqn.outvars[0])

    def axis_in(atom: Any, axis: int) -> int | None:
        return axis if shape_of(atom) and shape_of(atom)[axis] == out[axis] else None

    if any(shape_of(atom) and len(shape_of(atom)) != len(out) for atom in eqn.invars):
        return []
    if out and not any(shape_of(atom) for atom in eqn.invars):  # such as the words of one number
        return []
    return [(tuple(axis_in(atom, axis) for atom in eqn.invars), (axis,)) for axis in range(len(out))]


def _reduced(eqn: Any) -> list[_Way]:
    gone = {int(axis) for axis in eqn.params.get("axes", eqn.params.get("dimensions", ()))}
    kept = [axis for axis in range(len(shape_of(eqn.invars[0]))) if axis not in gone]
    return [((axis,), (place,)) for place, axis in enumerate(kept)]


def _along(eqn: Any) -> list[_Way]:
    length = len(shape_of(eqn.invars[0]))
    own = eqn.params.get(_ALONG[eqn.primitive.name], length - 1) % length
    return [((axis,) * len(eqn.invars), (axis,) * len(eqn.outvars)) for axis in range(length) if axis != own]


def _stacked(eqn: Any) -> list[_Way]:
    """Operands side by side along a new axis."""
    own, length = eqn.params["axis"], len(shape_of(eqn.invars[0]))
    return [((axis,) * len(eqn.invars), (axis + (axis >= own),)) for axis in range(length)]


def _unstacked(eqn: Any) -> list[_Way]:
    own, length = eqn.params["axis"], len(shape_of(eqn.invars[0]))
    return [((axis,), (axis - (axis > own),) * len(eqn.outvars)) for axis in range(length) if axis != own]


def _broadcast(eqn: Any) -> list[_Way]:
    out, source = shape_of(eqn.outvars[0]), shape_of(eqn.invars[0])
    given = {int(axis): place for place, axis in enumerate(eqn.params["broadcast_dimensions"])}
    same = {axis: place for axis, place in given.items() if source[place] == out[axis]}
    others = (None,) * (len(eqn.invars) - 1)
    return [((same.get(axis), *others), (axis,)) for axis in range(len(out))]


def _transposed(eqn: Any) -> list[_Way]:
    return [((int(axis),), (place,)) for place, axis in enumerate(eqn.params["permutation"])]


def _multiplied(eqn: Any) -> list[_Way]:
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    free = [
        [axis for axis in range(len(shape_of(atom))) if axis not in {*used, *batch}]
        for atom, used, batch in zip(eqn.invars, (left, right), (left_batch, right_batch), strict=True)
    ]
    pairs: list[tuple[int | None, int | None]] = [
        *zip(left_batch, right_batch, strict=True),
        *((axis, None) for axis in free[0]),
        *((None, axis) for axis in free[1]),
    ]
    return [(pair, (place,)) for place, pair in enumerate(pairs)]


def _gathered(eqn: Any) -> list[_Way]:
    """Each index picks from the whole operand, or from its own part of it; a window that is a whole dimension passes it on."""
    numbers, sizes, operand = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], shape_of(eqn.invars[0])
    rows = [axis for axis in range(len(shape_of(eqn.outvars[0]))) if axis not in numbers.offset_dims]
    own = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    hidden = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = [axis for axis in range(len(operand)) if axis not in hidden]
    ways: list[_Way] = [((own.get(place), place), (axis,)) for place, axis in enumerate(rows)]
    return ways + [
        ((source, None), (axis,))
        for axis, source in zip(numbers.offset_dims, windows, strict=True)
        if sizes[source] == operand[source] and source not in numbers.start_index_map
    ]


def _sliced_elsewhere(eqn: Any) -> list[_Way]:
    """Of dynamic slices: the dimensions that they take whole."""
    array, out = eqn.invars[0], eqn.outvars[0]
    updates = eqn.primitive.name == "dynamic_update_slice"
    part = eqn.invars[1] if updates else out
    starts = (None,) * (len(eqn.invars) - 1 - updates)
    return [
        ((axis, *((axis,) if updates else ()), *starts), (axis,))
        for axis, length in enumerate(shape_of(array))
        if shape_of(part)[axis] == length
    ]


def _padded(eqn: Any) -> list[_Way]:
    return [
        ((axis, None), (axis,)) for axis, each in enumerate(eqn.params["padding_config"]) if tuple(each) == (0, 0, 0)
    ]


def _convolved(eqn: Any) -> list[_Way]:
    numbers = eqn.params["dimension_numbers"]
    if eqn.params["batch_group_count"] != 1:
        return []
    return [((numbers.lhs_spec[0], None), (numbers.out_spec[0],))]


def _windowed(eqn: Any) -> list[_Way]:
    keys = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    each = zip(*(eqn.params[key] for key in keys), eqn.params["padding"], strict=True)
    return [((axis,), (axis,)) for axis, found in enumerate(each) if found == (1, 1, 1, 1, (0, 0))]


def _batched(eqn: Any) -> list[_Way]:
    """Of linear algebra: the dimensions before the matrix."""
    first = shape_of(eqn.invars[0])[: -_LAST[eqn.primitive.name]]
    atoms = (*eqn.invars, *eqn.outvars)
    return [
        ((axis,) * len(eqn.invars), (axis,) * len(eqn.outvars))
        for axis in range(len(first))
        if all(shape_of(atom)[: len(first)] == first for atom in atoms)
    ]


def _transformed(eqn: Any) -> list[_Way]:
    rest = len(shape_of(eqn.invars[0])) - len(eqn.params["fft_lengths"])
    return [((axis,), (axis,)) for axis in range(rest)]


def _reversed(eqn: Any) -> list[_Way]:
    axes = range(len(shape_of(eqn.invars[0])))
    return [((axis,), (axis,)) for axis in axes if axis not in eqn.params["dimensions"]]


def _of_keys(eqn: Any) -> list[_Way]:
    """Random keys in other words, and draws: each key has draws of its own, and those of one are made together.

    Under implementations other than JAX's default the keys of a batch draw together.
    """
    draws = eqn.primitive.name in {"random_bits", "random_split", "random_fold_in"}
    if draws and str(eqn.invars[0].aval.dtype) != _INDEPENDENT_KEYS:
        return []
    if eqn.primitive.name == "random_fold_in":
        return _same(eqn)
    few = min(eqn.invars[0].aval.ndim, eqn.outvars[0].aval.ndim)
    return [((axis,), (axis,)) for axis in range(few)]


def _counted(eqn: Any) -> list[_Way]:
    """An iota; along its own dimension `compute` counts from the first position."""
    return [((), (axis,)) for axis in range(len(shape_of(eqn.outvars[0])))]


_WAYS: dict[str, Callable[[Any], list[_Way]]] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _same),
    **dict.fromkeys(_REDUCTIONS.split(), _reduced),
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(_LAST, _batched),
    **dict.fromkeys(("random_bits", "random_fold_in", "random_split", "random_unwrap", "random_wrap"), _of_keys),
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice"), _sliced_elsewhere),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), _windowed),
    "bitcast_convert_type": _same,
    "broadcast_in_dim": _broadcast,
    "conv_general_dilated": _convolved,
    "dot_general": _multiplied,
    "fft": _transformed,
    "gather": _gathered,
    "iota": _counted,
    "pad": _padded,
    "rev": _reversed,
    "squeeze": _reduced,
    "stack": _stacked,
    "transpose": _transposed,
    "unstack": _unstacked,
}


def place_of(eqn: Any, at: Result) -> Place:
    """Where the dimension is in what an equation uses; refuses a sum over it."""
    if not isinstance(at, Place):
        raise refusal(eqn, "needs a sum over all positions")
    return at


def refusal(eqn: Any, what: str) -> NotAMapError:
    """The refusal of an equation by what it does."""
    out = eqn.outvars[0].aval.str_short() if eqn.outvars else ""
    return NotAMapError(f"`{eqn.primitive.name}`{f', which makes {out},' if out else ''} {what}")


def _ways(eqn: Any) -> list[_Way]:
    name = eqn.primitive.name
    if name not in _WAYS or any(eqn.params.get(key) is not None for key in _PLACED) or eqn.effects:
        raise refusal(eqn, "is not known to work position by position")
    return _WAYS[name](eqn)


def from_operand(eqn: Any, place: int, at: Place) -> Passing:
    """Where the dimension is in all operands and results of an equation that has it in one operand.

    Raises:
        NotAMapError: it works along the dimension, or is not known.
    """
    name = eqn.primitive.name
    if name == "reshape":
        return (at,), (_reshaped(eqn, at, eqn.invars[0], eqn.outvars[0]),)
    if name == "slice":
        return (at,), (replace(at, offset=at.offset + _start(eqn, at)),)
    for ins, outs in _ways(eqn):
        if ins[place] == at.axis:
            return _placed(ins, outs, at)
    if name == "reduce_sum" and place == 0:
        return (at,), (SUM,)
    if name == "dot_general":
        (left, right), _ = eqn.params["dimension_numbers"]
        index = (left, right)[place].index(at.axis)
        return (replace(at, axis=left[index]), replace(at, axis=right[index])), (SUM,)
    raise refusal(eqn, "works along the dimension")


def from_result(eqn: Any, place: int, at: Place) -> Passing:
    """The same of an equation that is to have it in one result."""
    name = eqn.primitive.name
    if name == "reshape":
        return (_reshaped(eqn, at, eqn.outvars[0], eqn.invars[0]),), (at,)
    if name == "slice":
        return (replace(at, offset=at.offset - _start(eqn, at)),), (at,)
    for ins, outs in _ways(eqn):
        if outs[place] == at.axis:
            return _placed(ins, outs, at)
    raise refusal(eqn, "works along the dimension")


def _placed(ins: Sequence[int | None], outs: Sequence[int], at: Place) -> Passing:
    return (
        tuple(None if axis is None else replace(at, axis=axis) for axis in ins),
        tuple(replace(at, axis=axis) for axis in outs),
    )


def _reshaped(eqn: Any, at: Place, old: Any, new: Any) -> Place:
    """Where the dimension is after a reshape: as many positions must vary more slowly than it, and faster, as before."""
    if eqn.params.get("dimensions") is not None or eqn.params.get("sharding") is not None:
        raise refusal(eqn, "is not known to work position by position")
    shape, count = shape_of(old), at.positions(old)
    slower, faster = math.prod(shape[: at.axis]) * at.before, math.prod(shape[at.axis + 1 :]) * at.after
    for axis, length in enumerate(shape_of(new)):
        outer, inner = math.prod(shape_of(new)[:axis]), math.prod(shape_of(new)[axis + 1 :])
        before, after = slower // max(outer, 1), faster // max(inner, 1)
        # Both arrays have as many positions, so a quotient that was rounded makes this product smaller.
        if length and before * count * after == length:
            return Place(axis, before, after, at.offset)
    raise refusal(eqn, "cuts through the dimension")


def _start(eqn: Any, at: Place) -> int:
    """How many positions a slice leaves out at the beginning."""
    axis, strides = at.axis, eqn.params["strides"]
    if shape_of(eqn.invars[0])[axis] == shape_of(eqn.outvars[0])[axis]:
        return 0
    if not at.is_whole_axis or (strides is not None and strides[axis] != 1):
        raise refusal(eqn, "takes some positions and leaves others out")
    return int(eqn.params["start_indices"][axis])
