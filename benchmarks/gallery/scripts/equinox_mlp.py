"""Equinox: the loop of its documentation, written anew."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from benchmarks.gallery import outcome

model = eqx.nn.MLP(64, 64, 512, 8, key=jax.random.key(0))
optimizer = optax.adam(1e-3)
opt_state = optimizer.init(eqx.filter(model, eqx.is_array))


def loss_fn(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@eqx.filter_jit
def make_step(model, opt_state, x, y):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, model)
    return eqx.apply_updates(model, updates), opt_state, loss


x = jax.random.normal(jax.random.key(1), (512, 64))
losses, hooks = [], outcome.hooks()
for step in range(4):
    model, opt_state, loss = make_step(model, opt_state, x, jnp.sin(x))
    losses.append(loss)
    for hook in hooks:
        hook(step)
outcome.keep(losses, (model, opt_state))
