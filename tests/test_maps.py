"""Which functions are proved to be maps along a dimension, and that what is proved computes the same position by position."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem_callbacks.transforms.maps.evaluation import Positions, compute
from jaxmem_callbacks.transforms.maps.places import SUM, NotAMapError, Place
from jaxmem_callbacks.transforms.maps.proof import prove
from jaxmem_callbacks.transforms.tracing import flatten, is_variable

pytestmark = pytest.mark.core

ROWS = 6
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (ROWS, 4, 5))
Y = jax.random.normal(jax.random.key(1), (ROWS, 4, 5))
W = jax.random.normal(jax.random.key(2), (5, 3))
LABELS = jnp.arange(ROWS * 4).reshape(ROWS, 4) % 5
KERNEL = jax.random.normal(jax.random.key(3), (3, 2, 3))


def at_positions(function: Any, places: Any, *args: Any, chosen: Any = (4, 1, 1)) -> list[tuple[Any, Any, Any]]:
    """Each result of a function at some positions: computed so, its place, and taken from the whole.

    Args:
        function: To arrays.
        places: Where the dimension is in each argument; None for shared ones.
        *args: Arrays.
        chosen: The positions.
    """
    traced = jax.make_jaxpr(function)(*args)
    flat = flatten(traced)
    invars = flat.invars[len(flat.consts) :]
    steps = prove(flat.eqns, dict.fromkeys(flat.invars) | dict(zip(invars, places, strict=True)))
    numbers = jnp.array(chosen, jnp.int32)
    values = dict(zip(flat.invars, [*flat.consts, *args], strict=True))
    lies = dict(zip(invars, places, strict=True))
    lies |= {var: at for step in steps for var, at in zip(step.eqn.outvars, step.outs, strict=True)}

    def look(atom: Any, at: Any) -> Any:
        return values[atom] if at is None else taken(values[atom], at, numbers)

    made = compute(steps, look, Positions(numbers, None))
    wholes = jax.tree.leaves(function(*args))
    return [
        (made[var], lies[var], taken(whole, lies[var], numbers) if isinstance(lies[var], Place) else whole)
        for var, whole in zip(flat.outvars, wholes, strict=True)
        if is_variable(var) and var in made
    ]


def taken(value: Any, at: Place, numbers: Any) -> Any:
    """Some positions of a value, by numpy."""
    shape = value.shape
    parts = np.asarray(jax.random.key_data(value) if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended) else value)
    tail = parts.shape[len(shape) :]
    parts = parts.reshape(*shape[: at.axis], at.before, -1, at.after, *shape[at.axis + 1 :], *tail)
    parts = np.take(parts, np.asarray(numbers) - at.offset, axis=at.axis + 1)
    parts = parts.reshape(*shape[: at.axis], -1, *shape[at.axis + 1 :], *tail)
    return jax.random.wrap_key_data(jnp.asarray(parts)) if tail else jnp.asarray(parts)


def scanned(x: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        return carry + jnp.tanh(row), carry.sum(-1)

    return jax.lax.scan(step, jnp.zeros((ROWS, 5)), jnp.swapaxes(x, 0, 1))


def batched_matrices(x: Any) -> Any:
    matrix = jnp.einsum("bij,bkj->bik", x, x) + 9 * jnp.eye(4)
    factor = jnp.linalg.cholesky(matrix)
    return jax.scipy.linalg.solve_triangular(factor, x, lower=True), jnp.linalg.eigh(matrix)[0]


def convolved(x: Any, kernel: Any) -> Any:
    return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME")


def branching(x: Any) -> Any:
    return jax.lax.cond(jnp.bool_(True), lambda v: v * 2, jnp.zeros_like, x)


FIRST = Place(0)
MAPS = {
    "elementwise": (lambda x, y: jnp.where(x > 0, jnp.exp(x) * y, jnp.clip(y, -1, 1)) ** 2, (FIRST, FIRST), (X, Y)),
    "shared": (lambda x, b: x + b, (FIRST, None), (X, W[:, 0])),
    "product": (lambda x, w: x @ w, (FIRST, None), (X, W)),
    "batched product": (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), (FIRST, FIRST), (X, Y)),
    "attention": (lambda q, k: jax.nn.softmax(jnp.einsum("qd,kd->qk", q, k)), (FIRST, None), (X[:, 0], Y[:, 0])),
    "softmax beside": (jax.nn.log_softmax, (FIRST,), (X,)),
    "reductions beside": (lambda x: (x.sum(1), x.max((1, 2)), x.argmin(2), x.prod(1)), (FIRST,), (X,)),
    "layout": (lambda x: jnp.swapaxes(x, 0, 2)[::-1, :, None] + jnp.zeros((2, 5, 1, 4, 1)), (FIRST,), (X,)),
    "merged": (lambda x: x.reshape(-1, 5) * 2, (FIRST,), (X,)),
    "merged behind": (lambda x: x.reshape(ROWS * 4, 5) * 2, (Place(1),), (X,)),
    "merged and parted": (lambda x: x.reshape(-1, 5).reshape(ROWS, 2, 2, 5).sum(1), (FIRST,), (X,)),
    "picked": (lambda x, i: jnp.take_along_axis(x, i[..., None], -1), (FIRST, FIRST), (X, LABELS)),
    "looked up": (lambda w, i: w[i], (None, FIRST), (W, LABELS)),
    "column": (lambda x: x[:, 1:3, ::2] + jax.lax.dynamic_slice(x, (0, 1, 0), (ROWS, 2, 3)), (FIRST,), (X,)),
    "scan beside": (lambda x: jnp.cumsum(x, 1) + jnp.sort(x, 1) + jax.lax.cummax(x, 2), (FIRST,), (X,)),
    "top": (lambda x: jax.lax.top_k(x, 2), (FIRST,), (X,)),
    "joined beside": (lambda x, y: jnp.pad(jnp.concatenate([x, y], 1), ((0, 0), (1, 2), (0, 0))), (FIRST,) * 2, (X, Y)),
    "stacked": (lambda x, y: (jnp.stack([x, y], 1), jnp.stack([x, y], -1)), (FIRST,) * 2, (X, Y)),
    "unstacked": (lambda x: jnp.unstack(x, axis=1), (FIRST,), (X,)),
    "unstacked before": (lambda x: jnp.unstack(x, axis=0), (Place(1),), (X,)),
    "split": (lambda x: jnp.split(x, 2, 1), (FIRST,), (X,)),
    "own rule": (lambda x: jax.nn.relu(x) + jax.nn.softplus(x) + jax.nn.silu(x), (FIRST,), (X,)),
    "own rule with a table": (lambda x: by_table(x), (FIRST,), (X,)),  # noqa: PLW0108 - defined below
    "picked once": (lambda x: x.at[:, jnp.array([2, 0])].get(unique_indices=True), (FIRST,), (X,)),
    "convolution": (convolved, (FIRST, None), (X[:, :2], KERNEL)),
    "transform": (lambda x: jnp.fft.fft(x).real, (FIRST,), (X,)),
    "matrices": (batched_matrices, (FIRST,), (X,)),
    "loop": (scanned, (FIRST,), (X,)),
    "branch": (branching, (FIRST,), (X,)),
    "checkpoint": (jax.checkpoint(lambda x: jnp.sin(x).sum(-1)), (FIRST,), (X,)),
    "counted": (lambda x: x[:, :, 0] + jax.lax.broadcasted_iota(jnp.int32, (ROWS, 4), 1), (FIRST,), (X,)),
    "keys": (jax.vmap(lambda k: jax.random.normal(k, (3,))), (FIRST,), (jax.random.split(KEY, ROWS),)),
    "shifted": (lambda x: jnp.sin(x[1:]) + jnp.cos(x[1:]), (FIRST,), (X,)),
    "pooled": (lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 2, 1), "VALID"), (FIRST,), (X,)),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPS)
def test_a_map_is_proved_and_computes_the_same(name: str) -> None:
    function, places, args = MAPS[name]
    found = at_positions(function, places, *args, chosen=(3, 1, 1))
    assert found
    for ours, at, whole in found:
        assert isinstance(at, Place)
        np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_sums_over_all_positions_add_up(axis: int) -> None:
    for function in (lambda x: x.sum((0, 1)), lambda x: jnp.einsum("abc,abd->cd", x, x)):
        parts = [
            at_positions(function, (Place(axis),), X, chosen=each) for each in np.split(np.arange(X.shape[axis]), 2)
        ]
        assert {at for part in parts for _, at, _ in part} == {SUM}
        np.testing.assert_allclose(sum(part[0][0] for part in parts), parts[0][0][2], rtol=1e-4, atol=1e-5)


NO_MAPS = {
    "softmax along": lambda x: jax.nn.softmax(x, 0),
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "running maximum": lambda x: jax.lax.cummax(x, 0),
    "sort": lambda x: jnp.sort(x, 0),
    "reversal": lambda x: x[::-1] * x,
    "median": lambda x: jnp.median(x, 0),
    "batchnorm": lambda x: (x - x.mean(0)) / x.std(0),
    "maximum along": lambda x: x.max(0) * 2,
    "neighbours": lambda x: x[1:] - x[:-1],
    "every second": lambda x: jnp.sin(x[::2]),
    "roll": lambda x: jnp.roll(x, 1, 0),
    "convolution along": lambda x: jax.vmap(lambda r: jnp.convolve(r, jnp.ones(3), "same"), 1, 1)(x[:, :, 0]),
    "scatter": lambda x: x.at[jnp.arange(ROWS)[::-1]].add(1.0),
    "scatter elsewhere": lambda x: x.at[:, 1].set(0.0),
    "gather of rows": lambda x: x[jnp.array([2, 0, 1])],
    "mixed index": lambda x: x[jnp.arange(ROWS), jnp.arange(ROWS) % 4],
    "against itself": lambda x: x[:, 0] @ x[:, 0].T,
    "merged away": lambda x: x.reshape(3, 8, 5).sum(1),
    "flat reshape": lambda x: x.reshape(5, 4, ROWS),
    "joined along": lambda x: jnp.concatenate([x, x], 0),
    "padded along": lambda x: jnp.pad(x, ((1, 1), (0, 0), (0, 0))),
    "dynamic slice along": lambda x: jax.lax.dynamic_slice(x, (1, 0, 0), (2, 4, 5)),
    "transform along": lambda x: jnp.fft.fft(x, axis=0).real,
    "matrix along": lambda x: jnp.linalg.cholesky(jnp.einsum("bi,ci->bc", x[:, 0], x[:, 0]) + 9 * jnp.eye(ROWS)),
    "pooled along": lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 1, 1), (2, 1, 1), "VALID"),
    "loop along": lambda x: jax.lax.scan(lambda c, r: (c + r, c), jnp.zeros((4, 5)), x)[1],
    "loop that adds up": lambda x: jax.lax.scan(lambda c, r: (c + r.sum(), c), 0.0, jnp.swapaxes(x, 0, 1))[0],
    "loop that turns": lambda x: jax.lax.scan(lambda c, _: (c.T, None), x[:4, :, 0], None, length=2)[0],
    "branch by position": lambda x: jax.lax.cond(x[0, 0, 0] > 0, jnp.sin, jnp.cos, x),
    "while": lambda x: jax.lax.while_loop(lambda v: v.sum() < 9, lambda v: v + 1, x),
    "sum and back": lambda x: x * x.sum(0),
    "own rule that adds up": lambda x: adds_up(x),  # noqa: PLW0108 - defined below
    "report": lambda x: [jax.debug.print("{}", x), jnp.sin(x)][1],
    "float count along": lambda x: x + jax.lax.broadcasted_iota(jnp.float32, x.shape, 0),
    "random bits": lambda x: x + jax.random.normal(KEY, x.shape),
}  # fmt: skip


@jax.custom_jvp
def adds_up(x: Any) -> Any:
    """A map whose derivative is none."""
    return jnp.sin(x)


@adds_up.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return adds_up(primals[0]), tangents[0] - tangents[0].mean(0)


TABLE = jnp.arange(5.0)


@jax.custom_jvp
def by_table(x: Any) -> Any:
    """A map with constants, in its value and in its rule."""
    return jnp.sin(x) * TABLE


@by_table.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return by_table(primals[0]), tangents[0] * jnp.cos(primals[0]) * TABLE


def test_positions_that_come_twice_are_not_called_unique() -> None:
    traced = jax.make_jaxpr(lambda w, i: w.at[i].get(unique_indices=True))(W, LABELS[0])
    steps = prove(traced.jaxpr.eqns, dict(zip(traced.jaxpr.invars, (None, FIRST), strict=True)))
    values = dict(zip(traced.jaxpr.invars, (W, LABELS[0]), strict=True))
    numbers = jnp.array([1, 1], jnp.int32)

    def made(w: Any) -> Any:
        def look(atom: Any, at: Any) -> Any:
            value = w if atom is traced.jaxpr.invars[0] else values[atom]
            return value if at is None else taken(value, at, numbers)

        found = compute(steps, look, Positions(numbers, None))
        return [found[var] for var in traced.jaxpr.outvars]

    gathers = [eqn for eqn in jax.make_jaxpr(made)(W).eqns if eqn.primitive.name == "gather"]
    assert gathers
    assert not any(eqn.params["unique_indices"] for eqn in gathers)


@pytest.mark.parametrize("name", NO_MAPS)
def test_what_is_no_map_is_refused(name: str) -> None:
    if name in {"float count along", "random bits"}:  # made whole, and then divided: no harm
        ((ours, _, whole),) = at_positions(NO_MAPS[name], (FIRST,), X)
        np.testing.assert_allclose(ours, whole, rtol=1e-6)
        return
    with pytest.raises(NotAMapError):
        at_positions(NO_MAPS[name], (FIRST,), X)


@pytest.mark.parametrize("draw", [lambda k: jax.random.bits(k, (3,)), jax.random.split])
def test_keys_that_draw_together_are_refused(draw: Any) -> None:
    keys = jax.random.split(jax.random.key(0, impl="unsafe_rbg"), ROWS)
    with pytest.raises(NotAMapError, match="works along the dimension"):
        at_positions(jax.vmap(draw), (FIRST,), keys)


def test_numbers_folded_into_keys_are_a_map() -> None:
    keys, numbers = jax.random.split(KEY, ROWS), jnp.arange(ROWS)
    ((ours, _, whole),) = at_positions(jax.vmap(jax.random.fold_in), (FIRST, FIRST), keys, numbers)
    np.testing.assert_array_equal(jax.random.key_data(ours), jax.random.key_data(whole))


def test_a_message_names_the_equation_and_what_it_does() -> None:
    with pytest.raises(NotAMapError, match=r"`cumsum`, which makes float32\[6,4,5\], works along the dimension"):
        at_positions(NO_MAPS["cumsum"], (FIRST,), X)
    with pytest.raises(NotAMapError, match="needs all positions of a value that has the dimension"):
        at_positions(NO_MAPS["against itself"], (FIRST,), X)
    with pytest.raises(NotAMapError, match="mixes positions"):
        at_positions(NO_MAPS["neighbours"], (FIRST,), X)
    with pytest.raises(NotAMapError, match=r"`while`.* is not known to work position by position"):
        at_positions(NO_MAPS["while"], (FIRST,), X)


# Functions of an array of three dimensions to another, of which compositions are drawn.
STEPS = {
    "sin": jnp.sin,
    "relu": jax.nn.relu,
    "swap": lambda x: jnp.swapaxes(x, 0, 1),
    "turn": lambda x: jnp.moveaxis(x, 0, -1),
    "flip": lambda x: x[::-1],
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "softmax": jax.nn.softmax,
    "norm": lambda x: x / (1 + jnp.square(x).sum(0, keepdims=True)),
    "self": lambda x: jnp.einsum("abc,adc->adb", x, x)[:, :, : x.shape[2]],
    "merge": lambda x: x.reshape(x.shape[0] * x.shape[1], 1, -1),
    "part": lambda x: x.reshape(-1, 2, x.size // 2 // max(x.shape[0], 1)) if x.size % (2 * x.shape[0]) == 0 else x,
    "tail": lambda x: x[:, max(x.shape[1] - 2, 0) :],
    "pick": lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1),
    "rows": lambda x: x[jnp.arange(x.shape[0]) // 2],
    "weights": lambda x: x @ jnp.cos(jnp.arange(x.shape[2] * 3.0)).reshape(-1, 3),
    "mean": lambda x: x - x.mean(1, keepdims=True),
    "count": lambda x: x + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0),
    "loop": lambda x: jax.lax.scan(lambda c, r: (jnp.tanh(c + r), c), jnp.zeros(x.shape[1:]), x)[1],
    "vmap": jax.vmap(lambda r: jnp.cumsum(r, 0) * r.max()),
}


def proved(names: list[str], axis: int, chosen: Any) -> int:
    """How many results of a composition are proved, each compared; 0 where it is refused."""

    def function(x: Any) -> Any:
        for name in names:
            x = STEPS[name](x)
        return x

    try:
        found = at_positions(function, (Place(axis),), X, chosen=chosen)
    except NotAMapError:
        return 0
    placed = [(ours, whole) for ours, at, whole in found if isinstance(at, Place)]
    for ours, whole in placed:
        np.testing.assert_allclose(ours, whole, rtol=1e-4, atol=1e-4)
    return len(placed)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5), st.integers(0, 2))
def test_whatever_is_proved_of_random_functions_computes_the_same(names: list[str], axis: int) -> None:
    rng = random.Random(str(names))  # noqa: S311 - no secret
    proved(names, axis, [X.shape[axis] - rng.randint(1, 2) for _ in range(3)])  # "tail" keeps the last two


def test_random_functions_are_not_all_refused() -> None:
    assert sum(proved([name], axis, (X.shape[axis] - 2,)) for name in STEPS for axis in (0, 1)) >= len(STEPS)
