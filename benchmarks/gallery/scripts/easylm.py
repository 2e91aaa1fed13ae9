"""LLaMA after EasyLM, written anew: Flax Linen over a mesh of all devices, with EasyLM's own remat around each block."""

import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.gallery import outcome

WIDTH, HEADS, LAYERS, LENGTH, VOCABULARY, ROWS = 128, 4, 4, 128, 1024, 16
REMAT = os.environ.get("GALLERY_REMAT", "nothing_saveable")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        dense = lambda width, name: nn.Dense(width, use_bias=False, name=name)  # noqa: E731
        y = nn.RMSNorm()(x)
        q, k, v = (dense(WIDTH, name)(y).reshape((*x.shape[:2], HEADS, -1)) for name in ("wq", "wk", "wv"))
        x = x + dense(WIDTH, "wo")(nn.dot_product_attention(q, k, v, mask=mask).reshape(x.shape))
        y = nn.RMSNorm()(x)
        return x + dense(WIDTH, "w2")(nn.silu(dense(4 * WIDTH, "w1")(y)) * dense(4 * WIDTH, "w3")(y))


class Llama(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        block = nn.remat(Block, policy=getattr(jax.checkpoint_policies, REMAT), prevent_cse=False) if REMAT else Block
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        for at in range(LAYERS):
            x = block(name=f"h_{at}")(x, nn.make_causal_mask(tokens))
        return nn.Dense(VOCABULARY, use_bias=False, name="lm_head")(nn.RMSNorm()(x))


def spec_of(leaf):
    """Matrices are divided over both axes, as EasyLM's rules do; all else is whole."""
    return PartitionSpec("fsdp", "mp") if leaf.ndim == 2 else PartitionSpec()


columns = min(2, jax.device_count())
mesh = Mesh(np.array(jax.devices()).reshape(1, -1, columns), ("dp", "fsdp", "mp"))
model = Llama()
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))


def make(key):
    params = model.init(key, jnp.ones((1, LENGTH), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


shapes = jax.eval_shape(make, jax.random.key(0))
placed = jax.tree.map(lambda leaf: NamedSharding(mesh, spec_of(leaf)), shapes)
batch_placed = NamedSharding(mesh, PartitionSpec(("dp", "fsdp")))
state = jax.jit(make, out_shardings=placed)(jax.random.key(0))


def train_step(state, tokens):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


sharded_train_step = jax.jit(
    train_step, in_shardings=(placed, batch_placed), out_shardings=(placed, None), donate_argnums=0
)
losses, hooks = [], outcome.hooks()
for step in range(4):
    tokens = jax.random.randint(jax.random.key(step), (ROWS, LENGTH + 1), 0, VOCABULARY)
    state, loss = sharded_train_step(state, jax.device_put(tokens, batch_placed))
    losses.append(loss)
    for hook in hooks:
        hook(step)
outcome.keep(losses, state)
