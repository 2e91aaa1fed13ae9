"""Models as their users write them, with no hint for the library, and the remat a good engineer writes in them by hand.

Each case gives the same step twice: plain, and with `nn.remat` / `nnx.remat` around its blocks. Everything is abstract:
no parameter is ever allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

Loss = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model with its arguments as shapes.

    Attributes:
        name: Its name in tables.
        plain: Loss of (parameters, batch) without any remat.
        by_hand: The same with remat around each block.
        arguments: Parameters and batch as ShapeDtypeStructs.
    """

    name: str
    plain: Loss
    by_hand: Loss
    arguments: tuple[Any, ...]


OPTIMIZER = optax.adamw(1e-3)


def train_step(value_and_grad: Callable[..., Any], loss: Loss) -> Callable[..., Any]:
    """A whole AdamW step of (parameters, optimizer state, batch), with the gradient function to use."""

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = value_and_grad(loss)(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of logits[B, T, V] at predicting tokens[B, T + 1]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()


# Llama-like, Flax Linen, layers unrolled: RMSNorm, rotary positions, grouped queries, SwiGLU, bf16 compute.


def rotary(x: jax.Array) -> jax.Array:
    """Rotary positions for x[B, T, heads, depth]."""
    length, depth = x.shape[1], x.shape[-1]
    angles = jnp.arange(length)[:, None] / 10_000 ** (jnp.arange(0, depth, 2) / depth)
    cos, sin = jnp.cos(angles)[:, None, :].astype(x.dtype), jnp.sin(angles)[:, None, :].astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class LlamaBlock(nn.Module):
    """Pre-norm attention with grouped queries, then SwiGLU; x[B, T, width]."""

    width: int
    heads: int = 8
    groups: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        depth = self.width // self.heads
        dense = lambda *shape: nn.DenseGeneral(shape, use_bias=False, dtype=jnp.bfloat16)  # noqa: E731
        h = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        query = rotary(dense(self.heads, depth)(h))
        key = rotary(dense(self.groups, depth)(h))
        value = dense(self.groups, depth)(h)
        key, value = (jnp.repeat(a, self.heads // self.groups, axis=2) for a in (key, value))
        mask = nn.make_causal_mask(x[..., 0])
        attended = nn.dot_product_attention(query, key, value, mask=mask, dtype=jnp.bfloat16)
        x = x + nn.DenseGeneral(self.width, axis=(-2, -1), use_bias=False, dtype=jnp.bfloat16)(attended)
        h = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        gated = nn.silu(dense(4 * self.width)(h)) * dense(4 * self.width)(h)
        return x + nn.Dense(self.width, use_bias=False, dtype=jnp.bfloat16)(gated)


class Llama(nn.Module):
    """tokens[B, T] -> logits[B, T, vocabulary]."""

    width: int = 512
    layers: int = 8
    vocabulary: int = 4096
    wrap: Callable[[Any], Any] = staticmethod(lambda block: block)

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.width, dtype=jnp.bfloat16)(tokens)
        block = self.wrap(LlamaBlock)
        for index in range(self.layers):
            x = block(self.width, name=f"block_{index}")(x)
        x = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=jnp.bfloat16)(x)


def llama(batch: int = 8, length: int = 512, layers: int = 8) -> Case:
    """The unrolled Llama-like Linen model."""

    def loss_of(model: Llama) -> Loss:
        return lambda params, tokens: next_token_loss(model.apply(params, tokens[:, :-1]), tokens)

    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    short = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    return Case(
        name="llama, Linen, unrolled",
        plain=loss_of(Llama(layers=layers)),
        by_hand=loss_of(Llama(layers=layers, wrap=nn.remat)),
        arguments=(jax.eval_shape(Llama(layers=layers).init, jax.random.key(0), short), tokens),
    )


# A transformer in Flax NNX whose layers are scanned, in the split / merge style.


class NnxBlock(nnx.Module):
    """Pre-norm attention and a GELU layer; x[B, T, width]."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class NnxTransformer(nnx.Module):
    """tokens[B, T] -> logits[B, T, vocabulary], one scan over the stacked blocks."""

    def __init__(self, width: int, layers: int, vocabulary: int, *, by_hand: bool, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> NnxBlock:
            return NnxBlock(width, 8, rngs=rngs)

        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.blocks = stack(rngs)
        self.head = nnx.Linear(width, vocabulary, rngs=rngs)
        self.by_hand = by_hand

    def __call__(self, tokens: jax.Array) -> jax.Array:
        def layer(x: jax.Array, block: NnxBlock) -> jax.Array:
            return block(x)

        if self.by_hand:
            layer = nnx.remat(layer)
        x = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(self.embed(tokens), self.blocks)
        return self.head(x)


def nnx_scanned(batch: int = 8, length: int = 256, width: int = 256, layers: int = 8) -> Case:
    """The scanned NNX transformer, as a function of its pure state."""

    def make(*, by_hand: bool) -> NnxTransformer:
        return NnxTransformer(width, layers, 2048, by_hand=by_hand, rngs=nnx.Rngs(0))

    def loss_of(*, by_hand: bool) -> tuple[Loss, Any]:
        graph, state = nnx.split(nnx.eval_shape(lambda: make(by_hand=by_hand)))

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            return next_token_loss(nnx.merge(graph, params)(tokens[:, :-1]), tokens)

        return loss, state

    plain, state = loss_of(by_hand=False)
    by_hand, _ = loss_of(by_hand=True)
    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    return Case(name="transformer, NNX, scanned", plain=plain, by_hand=by_hand, arguments=(state, tokens))


# A U-Net, Flax Linen: skips that live from one end of the network to the other.


class ConvBlock(nn.Module):
    """Two convolutions with group norm; x[B, H, W, C] -> [B, H, W, channels]."""

    channels: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.silu(nn.GroupNorm(num_groups=8)(nn.Conv(self.channels, (3, 3))(x)))
        return x


class UNet(nn.Module):
    """images[B, H, W, 3] -> [B, H, W, 3]."""

    channels: tuple[int, ...] = (32, 64, 128)
    wrap: Callable[[Any], Any] = staticmethod(lambda block: block)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = self.wrap(ConvBlock)
        skips = []
        for index, channels in enumerate(self.channels):
            x = block(channels, name=f"down_{index}")(x)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = block(2 * self.channels[-1], name="middle")(x)
        for index, channels in reversed(list(enumerate(self.channels))):
            x = jax.image.resize(x, (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "nearest")
            x = block(channels, name=f"up_{index}")(jnp.concatenate([x, skips.pop()], axis=-1))
        return nn.Conv(3, (1, 1))(x)


def unet(batch: int = 16, size: int = 64, channels: tuple[int, ...] = (32, 64, 128)) -> Case:
    """The U-Net, trained to give back its input."""

    def loss_of(model: UNet) -> Loss:
        return lambda params, images: jnp.mean((model.apply(params, images) - images) ** 2)

    images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
    return Case(
        name="U-Net, Linen",
        plain=loss_of(UNet(channels)),
        by_hand=loss_of(UNet(channels, wrap=nn.remat)),
        arguments=(jax.eval_shape(UNet(channels).init, jax.random.key(0), images), images),
    )


CASES: tuple[Callable[[], Case], ...] = (llama, nnx_scanned, unet)
