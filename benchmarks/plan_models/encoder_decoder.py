"""An encoder-decoder in Flax NNX, layers unrolled: every decoder layer attends to the encoder's result; dropout is state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.plan_models.case import (
    NONE,
    OPTIMIZER,
    PlanCase,
    named,
    next_token_loss,
    policy,
)
from benchmarks.plan_models.nnx_transformer import functional_case

SAVED = ("attention", "crossed", "up")


class Layer(nnx.Module):
    """Self attention, cross attention where there is something to attend to, and a GELU layer; x[B, T, width]."""

    def __init__(  # noqa: PLR0913 - sizes
        self, width: int, heads: int, dropout: float, dtype: Any, remat: str, *, crossed: bool, rngs: nnx.Rngs
    ) -> None:
        def attention() -> nnx.MultiHeadAttention:
            return nnx.MultiHeadAttention(heads, width, dtype=dtype, decode=False, rngs=rngs)

        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = attention()
        if crossed:
            self.norm3 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
            self.cross = attention()
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.remat = remat

    def __call__(self, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
        mask = None if memory is None else nnx.make_causal_mask(x[..., 0])
        h = named(self.attention(self.norm1(x), mask=mask), "attention", self.remat)
        x = x + self.dropout(h)
        if memory is not None:
            h = named(self.cross(self.norm3(x), memory), "crossed", self.remat)
            x = x + self.dropout(h)
        h = named(self.up(self.norm2(x)), "up", self.remat)
        return x + self.dropout(self.down(nnx.gelu(h)))


class EncoderDecoder(nnx.Module):
    """source[B, S], target[B, T] -> logits[B, T, vocabulary], with one shared embedding."""

    def __init__(  # noqa: PLR0913 - sizes
        self,
        *,
        width: int,
        heads: int,
        layers: int,
        length: int,
        vocabulary: int,
        dropout: float,
        dtype: Any,
        remat: str,
        rngs: nnx.Rngs,
    ) -> None:
        def stack(*, crossed: bool) -> nnx.List:
            return nnx.List(
                [Layer(width, heads, dropout, dtype, remat, crossed=crossed, rngs=rngs) for _ in range(layers)]
            )

        self.embed = nnx.Embed(vocabulary, width, dtype=dtype, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, width)))
        self.encoder, self.decoder = stack(crossed=False), stack(crossed=True)
        self.encoder_norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.decoder_norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.remat = remat

    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        def layer(layer: Layer, x: jax.Array, *memory: jax.Array) -> jax.Array:
            return layer(x, *memory)

        if self.remat != NONE:
            layer = nnx.remat(layer, policy=policy(self.remat, SAVED))
        x = self.embed(source)
        x = x + self.positions[...].astype(x.dtype)
        for block in self.encoder:
            x = layer(block, x)
        memory = self.encoder_norm(x)
        y = self.embed(target)
        y = y + self.positions[...].astype(y.dtype)
        for block in self.decoder:
            y = layer(block, y, memory)
        return self.embed.attend(self.decoder_norm(y))


def _loss(model: EncoderDecoder, batch: dict[str, jax.Array]) -> jax.Array:
    return next_token_loss(model(batch["source"], batch["target"][:, :-1]), batch["target"])


def encoder_decoder(  # noqa: PLR0913 - sizes
    *,
    batch: int = 32,
    length: int = 256,
    width: int = 384,
    heads: int = 6,
    layers: int = 2,
    vocabulary: int = 4096,
    dropout: float = 0.1,
    dtype: Any = jnp.bfloat16,
) -> PlanCase:
    """The encoder-decoder: ``layers`` of each kind."""

    def make(remat: str, key: Any) -> EncoderDecoder:
        return EncoderDecoder(
            width=width,
            heads=heads,
            layers=layers,
            length=length,
            vocabulary=vocabulary,
            dropout=dropout,
            dtype=dtype,
            remat=remat,
            rngs=nnx.Rngs(key),
        )

    def initial(key: jax.Array) -> tuple[Any, ...]:
        model = make(NONE, key)
        source, target = jax.random.split(key)
        pairs = {
            "source": jax.random.randint(source, (batch, length), 0, vocabulary),
            "target": jax.random.randint(target, (batch, length + 1), 0, vocabulary),
        }
        return nnx.state(model), OPTIMIZER.init(nnx.state(model, nnx.Param)), pairs

    return functional_case("encoder-decoder, NNX", make, _loss, initial)
