"""Counting operations: the figures that can be worked out by hand, and what rematerialisation adds under a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.memory import step_flops
from jaxmem_callbacks.transforms.costs import count_flops, jaxpr_flops

pytestmark = pytest.mark.core
BATCH, WIDTH, LAYERS = 8, 16, 12


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


X, W = shape(BATCH, WIDTH), shape(WIDTH, WIDTH)
MATMUL = 2 * BATCH * WIDTH * WIDTH


def block(w, x):
    """Both products are needed again by the backward pass."""
    return jnp.sin(jnp.sin(x @ w) @ w)


def loss(w, x):
    return block(w, x).sum()


def extra_flops(recomputing, plain, *args):
    """What recomputation adds."""
    return step_flops(recomputing, *args) - step_flops(plain, *args)


def rematted(w, x):
    return jax.checkpoint(block)(w, x).sum()


def test_a_matrix_product_is_two_operations_a_term():
    assert jaxpr_flops(jax.make_jaxpr(lambda x, w: x @ w)(X, W)) == MATMUL


def test_a_batched_product_counts_every_batch():
    closed = jax.make_jaxpr(lambda a, b: jnp.einsum("bij,bjk->bik", a, b))(shape(3, 4, 5), shape(3, 5, 6))
    assert jaxpr_flops(closed) == 2 * 3 * 4 * 5 * 6


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_counts_kernel_terms_of_each_output(groups):
    def convolve(x, k):
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", feature_group_count=groups)

    closed = jax.make_jaxpr(convolve)(shape(2, 4, 8, 8), shape(6, 4 // groups, 3, 3))
    assert jaxpr_flops(closed) == 2 * (2 * 6 * 8 * 8) * (4 // groups * 3 * 3)


def test_the_gradient_of_a_strided_convolution_costs_as_much_as_the_convolution():
    def convolve(x, k):
        return jax.lax.conv_general_dilated(x, k, (2, 2), "VALID").sum()

    x, k = shape(1, 3, 9, 9), shape(5, 3, 3, 3)
    forward = step_flops(convolve, x, k).dot_flops
    data = step_flops(jax.grad(convolve), x, k).dot_flops
    assert forward == 2 * 5 * 4 * 4 * 27
    assert 0.8 * forward <= data <= 2 * forward  # the border is padded, so a little more than by hand


def test_elementwise_operations_count_results_and_reductions_count_operands():
    assert step_flops(jnp.sin, X).flops == BATCH * WIDTH
    assert step_flops(lambda x: jax.lax.reduce_sum_p.bind(x, axes=(0, 1), out_sharding=None), X).flops == BATCH * WIDTH
    assert step_flops(jax.lax.cumsum, X).flops == BATCH * WIDTH


def test_moving_data_costs_nothing():
    assert step_flops(lambda x: jnp.transpose(x).reshape(-1)[None].astype(jnp.bfloat16), X).flops == 0


def test_a_scan_counts_its_body_for_every_trip():
    closed = jax.make_jaxpr(lambda w, x: jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=LAYERS)[0])(W, X)
    assert jaxpr_flops(closed) == LAYERS * MATMUL


def test_nested_scans_multiply():
    def inner(w, x):
        return jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=3)[0]

    outer = jax.make_jaxpr(lambda w, x: jax.lax.scan(lambda c, _: (inner(w, c), None), x, None, length=5)[0])(W, X)
    assert jaxpr_flops(outer) == 15 * MATMUL


def test_a_while_loop_counts_once_and_says_so():
    def loop(w, x):
        return jax.lax.while_loop(lambda c: c[0] < 7, lambda c: (c[0] + 1, c[1] @ w), (0, x))[1]

    count = count_flops(jax.make_jaxpr(loop)(W, X))
    assert count.dot_flops == MATMUL
    assert count.loops_once == 1
    assert step_flops(loss, W, X).loops_once == 0


def test_a_conditional_counts_its_dearest_branch():
    def choose(p, w, x):
        return jax.lax.cond(p, lambda: x @ w @ w, lambda: x @ w)

    assert step_flops(choose, jax.ShapeDtypeStruct((), jnp.bool_), W, X).dot_flops == 2 * MATMUL


@pytest.mark.parametrize(
    "wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.jit(f))], ids=["jit", "remat", "nested jit"]
)
def test_calls_count_what_they_call(wrap):
    assert step_flops(wrap(loss), W, X).flops == step_flops(loss, W, X).flops


def test_custom_derivatives_count_the_function_itself():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    assert step_flops(product, X, W).flops == MATMUL
    assert step_flops(lambda x, w: jax.nn.relu(x @ w), X, W).dot_flops == MATMUL  # relu is a custom_jvp
    assert step_flops(jax.grad(lambda x, w: product(x, w).sum()), X, W).dot_flops == MATMUL


def test_shard_map_counts_every_device():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    split = PartitionSpec("data")
    mapped = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(split, PartitionSpec()), out_specs=split)
    assert step_flops(mapped, X, W).dot_flops == MATMUL


def test_what_nobody_reads_is_not_counted():
    def step(x, w):
        unread = jax.jit(lambda: (x @ w @ w, x @ w))()[0]
        del unread
        return x @ w

    assert step_flops(step, X, W).dot_flops == MATMUL


def test_unread_results_of_a_scan_are_not_counted():
    def step(x, w):
        carry, _stacked = jax.lax.scan(lambda c, _: (c + 1, c @ w), x, None, length=LAYERS)
        return carry

    assert step_flops(step, X, W).dot_flops == 0


def test_remat_under_a_gradient_adds_exactly_one_forward_of_the_block():
    plain, recomputing = jax.value_and_grad(loss), jax.value_and_grad(rematted)
    forward = step_flops(block, W, X)
    extra = extra_flops(recomputing, plain, W, X)
    assert extra.dot_flops == forward.dot_flops == 2 * MATMUL
    assert step_flops(recomputing, W, X).flops > step_flops(plain, W, X).flops


def test_remat_of_a_scanned_block_adds_one_forward_a_layer():
    def model(body):
        def total(w, x):
            return jax.lax.scan(lambda c, _: (body(w, c), None), x, None, length=LAYERS)[0].sum()

        return jax.grad(total)

    assert extra_flops(model(jax.checkpoint(block)), model(block), W, X).dot_flops == LAYERS * 2 * MATMUL


def test_saving_the_products_adds_no_product():
    saving = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)
    extra = extra_flops(jax.value_and_grad(lambda w, x: saving(w, x).sum()), jax.value_and_grad(loss), W, X)
    assert extra.dot_flops == 0


def test_a_forward_pass_whose_loss_nobody_reads_is_dead_once_the_backward_pass_repeats_it():
    assert extra_flops(jax.grad(rematted), jax.grad(loss), W, X).dot_flops == 0


def test_full_remat_costs_up_to_a_third_and_up_to_a_half_where_parameters_are_frozen():
    """As the preset full_remat says of itself; a layer has one product forward, and two or one backward."""

    def deep(weights, x):
        return jax.lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, weights)[0].sum()

    def more(differentiated):
        plain, cut = (
            jaxpr_flops(jax.make_jaxpr(jax.value_and_grad(each, differentiated))(shape(LAYERS, WIDTH, WIDTH), X))
            for each in (deep, jm.remat(deep))
        )
        return cut / plain - 1

    trained, frozen = more(0), more(1)
    assert 0.3 < trained <= 1 / 3
    assert 0.4 < frozen <= 1 / 2
    description = jm.load_preset("full_remat").description
    assert "up to a third more FLOPs, up to a half where most parameters are frozen" in description


def test_without_a_gradient_remat_adds_nothing():
    assert extra_flops(rematted, loss, W, X).flops == 0


def test_triangular_work_and_sorting_are_estimated():
    square = shape(WIDTH, WIDTH)
    assert step_flops(jnp.linalg.cholesky, square).dot_flops == WIDTH**3 // 3
    assert step_flops(lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True), square, W).dot_flops == WIDTH**3
    assert step_flops(jnp.sort, shape(1024)).flops >= 1024 * 10
    assert step_flops(lambda x: x.at[jnp.array([0, 2])].add(1.0), shape(8)).flops >= 2


def test_static_leaves_and_keywords_are_passed_on():
    def step(x, w, *, activation, scale):
        return activation(x @ w) * scale

    assert step_flops(step, X, W, activation=jnp.tanh, scale=2.0).dot_flops == MATMUL


def test_what_an_nnx_step_changes_in_place_counts_as_used():
    """It returns only the loss: gradients and updates live in the module and the optimizer."""

    def train_step(model, optimizer, x):
        value, grads = nnx.value_and_grad(lambda model: model(x).sum())(model)
        optimizer.update(model, grads)
        return value

    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    arguments = (model, optimizer, X)
    assert step_flops(train_step, *arguments).dot_flops == 2 * MATMUL
    assert step_flops(nnx.jit(train_step), *arguments).dot_flops == 2 * MATMUL
    assert step_flops(jm.jit_step(train_step), *arguments).dot_flops == 2 * MATMUL
