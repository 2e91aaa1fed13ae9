"""A DCGAN after Flax's former example, written anew: two jitted steps in turn, each with an optimizer of its own."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from benchmarks.gallery import outcome

LATENT, ROWS = 64, 32


class State(train_state.TrainState):
    batch_stats: dict


class Generator(nn.Module):
    @nn.compact
    def __call__(self, z, train=True):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train)
        x = z.reshape((-1, 1, 1, LATENT))
        for width, strides, padding in ((128, (1, 1), "VALID"), (64, (2, 2), "SAME"), (32, (2, 2), "SAME")):
            x = nn.relu(norm()(nn.ConvTranspose(width, (4, 4), strides, padding, use_bias=False)(x)))
        return nn.tanh(nn.ConvTranspose(1, (4, 4), (2, 2), "SAME")(x))


class Discriminator(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        for width in (32, 64, 128):
            x = nn.Conv(width, (4, 4), (2, 2), use_bias=False)(x)
            x = nn.leaky_relu(nn.BatchNorm(use_running_average=not train)(x), 0.2)
        return nn.Dense(1)(x.reshape((x.shape[0], -1)))[:, 0]


def made(model, key, sample):
    variables = model.init(key, sample)
    return State.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.adam(2e-4, b1=0.5),
    )


def run(state, params, x):
    variables = {"params": params, "batch_stats": state.batch_stats}
    return state.apply_fn(variables, x, mutable=["batch_stats"])


@jax.jit
def discriminator_step(generator, discriminator, images, key):
    fakes, _ = run(generator, generator.params, jax.random.normal(key, (ROWS, LATENT)))

    def loss_fn(params):
        real, stats = run(discriminator, params, images)
        fake, stats = run(discriminator.replace(batch_stats=stats["batch_stats"]), params, fakes)
        return jnp.mean(nn.softplus(-real) + nn.softplus(fake)), stats["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(discriminator.params)
    return discriminator.apply_gradients(grads=grads, batch_stats=stats), loss


@jax.jit
def generator_step(generator, discriminator, key):
    def loss_fn(params):
        fakes, stats = run(generator, params, jax.random.normal(key, (ROWS, LATENT)))
        fake, _ = run(discriminator, discriminator.params, fakes)
        return jnp.mean(nn.softplus(-fake)), stats["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(generator.params)
    return generator.apply_gradients(grads=grads, batch_stats=stats), loss


generator = made(Generator(), jax.random.key(0), jnp.ones((1, LATENT)))
discriminator = made(Discriminator(), jax.random.key(1), jnp.ones((1, 32, 32, 1)))
images = jax.random.normal(jax.random.key(2), (ROWS, 32, 32, 1))
losses, hooks = [], outcome.hooks()
for step in range(4):
    key = jax.random.fold_in(jax.random.key(3), step)
    discriminator, loss = discriminator_step(generator, discriminator, images, key)
    generator, generator_loss = generator_step(generator, discriminator, key)
    losses += [loss, generator_loss]
    for hook in hooks:
        hook(step)
outcome.keep(losses, (generator, discriminator))
