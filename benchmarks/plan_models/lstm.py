"""A character LSTM in Flax Linen, two layers over time by `nn.RNN`; by hand: remat of the cell, and scans of scans.

Saving by name is left out: what the cell's backward pass needs are its gates, which are nearly all that there is.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax

from benchmarks.plan_models.case import (
    FULL,
    NONE,
    OPTIMIZER,
    Loss,
    PlanCase,
    compared_losses,
    next_token_loss,
    policy,
    random_tokens,
)

DOTS, CHUNKED = "dots", "chunked"


def _scan(function: Any) -> Any:
    """`nn.scan` over the leading axis, with one set of parameters."""
    return nn.scan(function, variable_broadcast="params", split_rngs={"params": False})


def _chunked(cell: nn.RNNCellBase, x: jax.Array) -> jax.Array:
    """The cell over x[B, T, C], in about sqrt(T) chunks of which only the first carry is kept."""
    batch, length, width = x.shape
    count = next(n for n in range(math.isqrt(length), 0, -1) if length % n == 0)

    def chunk(cell: nn.RNNCellBase, carry: Any, part: jax.Array) -> Any:
        return _scan(lambda cell, carry, x: cell(carry, x))(cell, carry, part)

    parts = x.swapaxes(0, 1).reshape(count, length // count, batch, width)
    carry = cell.initialize_carry(jax.random.key(0), (batch, width))
    _, out = _scan(nn.remat(chunk, prevent_cse=False))(cell, carry, parts)
    return out.reshape(length, batch, -1).swapaxes(0, 1)


class CharLSTM(nn.Module):
    """tokens[B, T] -> logits[B, T, vocabulary]."""

    width: int
    layers: int
    vocabulary: int
    remat: str = NONE

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        cell: Any = nn.OptimizedLSTMCell
        if self.remat in (FULL, DOTS):
            cell = nn.remat(cell, prevent_cse=False, policy=policy(self.remat, ()))
        x: Any = nn.Embed(self.vocabulary, self.width)(tokens)
        for index in range(self.layers):
            layer = cell(self.width, name=f"lstm_{index}")
            x = _chunked(layer, x) if self.remat == CHUNKED else nn.RNN(layer, name=f"rnn_{index}")(x)
        return nn.Dense(self.vocabulary)(x)


def lstm(batch: int = 64, length: int = 1024, width: int = 256, layers: int = 2, vocabulary: int = 256) -> PlanCase:
    """The character LSTM, float32."""

    def model(remat: str) -> CharLSTM:
        return CharLSTM(width, layers, vocabulary, remat)

    def loss_of(remat: str) -> Loss:
        return lambda params, tokens: next_token_loss(model(remat).apply(params, tokens[:, :-1]), tokens)

    def initial(key: jax.Array) -> tuple[Any, ...]:
        tokens = random_tokens(key, batch, length, vocabulary)
        params = model(NONE).init(key, tokens[:1, :4])
        return params, OPTIMIZER.init(params), tokens

    return compared_losses("LSTM, Linen, over time", loss_of, initial, (FULL, DOTS, CHUNKED))
