"""A diffusion transformer (DiT), written anew in Flax NNX: adaptive layer norms, an EMA of the parameters in the step."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.gallery import outcome

WIDTH, HEADS, DEPTH, PATCHES, PATCH, CLASSES, ROWS = 128, 4, 4, 64, 16, 10, 16


def modulate(x, shift, scale):
    return x * (1 + scale[:, None]) + shift[:, None]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, use_bias=False, use_scale=False, rngs=rngs) for _ in range(2)])
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.adapt = nnx.Linear(WIDTH, 6 * WIDTH, rngs=rngs)

    def __call__(self, x, c):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = jnp.split(self.adapt(nnx.silu(c)), 6, axis=-1)
        x = x + gate_a[:, None] * self.attention(modulate(self.norms[0](x), shift_a, scale_a))
        return x + gate_m[:, None] * self.down(nnx.gelu(self.up(modulate(self.norms[1](x), shift_m, scale_m))))


class DiT(nnx.Module):
    def __init__(self, rngs):
        self.patches = nnx.Linear(PATCH, WIDTH, rngs=rngs)
        self.places = nnx.Param(0.02 * jax.random.normal(rngs.params(), (PATCHES, WIDTH)))
        self.classes = nnx.Embed(CLASSES, WIDTH, rngs=rngs)
        self.time = nnx.Linear(32, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])
        self.head = nnx.Linear(WIDTH, PATCH, rngs=rngs)

    def __call__(self, x, t, labels):
        angles = t[:, None] * jnp.exp(-jnp.arange(16) * 0.5)
        c = self.time(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)) + self.classes(labels)
        x = self.patches(x) + self.places[...]
        for block in self.blocks:
            x = block(x, c)
        return self.head(x)


@nnx.jit
def train_step(model, optimizer, ema, x, labels, key):
    def loss_fn(model):
        noise_key, time_key = jax.random.split(key)
        noise, t = jax.random.normal(noise_key, x.shape), jax.random.uniform(time_key, (ROWS,))
        mixed = (1 - t)[:, None, None] * x + t[:, None, None] * noise
        return jnp.mean((model(mixed, t, labels) - (noise - x)) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss, jax.tree.map(lambda old, new: 0.99 * old + 0.01 * new, ema, nnx.state(model, nnx.Param))


model = DiT(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)
ema = nnx.state(model, nnx.Param)
x = jax.random.normal(jax.random.key(1), (ROWS, PATCHES, PATCH))
labels = jnp.arange(ROWS) % CLASSES
losses, hooks = [], outcome.hooks()
for step in range(4):
    loss, ema = train_step(model, optimizer, ema, x, labels, jax.random.fold_in(jax.random.key(2), step))
    losses.append(loss)
    for hook in hooks:
        hook(step)
outcome.keep(losses, (nnx.state(model), nnx.state(optimizer), ema))
