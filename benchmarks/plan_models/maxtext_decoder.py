"""A decoder after MaxText's, in Flax Linen: one scan over layers, values named, and MaxText's own words for what is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from benchmarks.plan_models.case import (
    NONE,
    OPTIMIZER,
    Loss,
    PlanCase,
    compared_losses,
    next_token_loss,
    random_tokens,
)

_QKV = ("query_proj", "value_proj", "key_proj", "qkv_proj")
_KEPT = {
    "save_qkv_proj": _QKV,
    "save_out_proj": ("out_proj",),
    "save_dot_except_mlpwi": (*_QKV, "out_proj", "mlpwo"),
    "save_dot_except_mlp": (*_QKV, "out_proj"),
    "save_dot_with_context_except_mlp": (*_QKV, "context", "out_proj"),
}
_POLICIES: Mapping[str, Any] = {
    "full": None,
    "minimal": jax.checkpoint_policies.save_only_these_names(*_QKV, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo"),
    "minimal_with_context": jax.checkpoint_policies.save_only_these_names(
        *_QKV, "context", "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo"
    ),
} | {name: jax.checkpoint_policies.save_only_these_names(*kept) for name, kept in _KEPT.items()}


def rotary(x: jax.Array) -> jax.Array:
    """Rotary positions for x[B, T, heads, depth], in float32."""
    length, depth = x.shape[1], x.shape[-1]
    angles = jnp.arange(length)[:, None] / 10_000 ** (jnp.arange(0, depth, 2) / depth)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Layer(nn.Module):
    """Pre-norm attention and SwiGLU, each product under a name; x[B, T, width], as a scan's body."""

    width: int
    heads: int
    dtype: Any
    names: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        depth = self.width // self.heads

        def called(value: jax.Array, name: str) -> jax.Array:
            return checkpoint_name(value, name) if self.names else value

        def dense(*shape: int, name: str, axis: Any = -1) -> Any:
            return nn.DenseGeneral(shape, axis=axis, use_bias=False, dtype=self.dtype, name=name)

        h = nn.RMSNorm(dtype=self.dtype)(x)
        query = called(rotary(dense(self.heads, depth, name="query")(h)), "query_proj")
        key = called(rotary(dense(self.heads, depth, name="key")(h)), "key_proj")
        value = called(dense(self.heads, depth, name="value")(h), "value_proj")
        mask = nn.make_causal_mask(x[..., 0])
        context = called(nn.dot_product_attention(query, key, value, mask=mask, dtype=self.dtype), "context")
        x = x + called(dense(self.width, name="out", axis=(-2, -1))(context), "out_proj")
        h = nn.RMSNorm(dtype=self.dtype)(x)
        gate = called(dense(4 * self.width, name="wi_0")(h), "mlpwi_0")
        up = called(dense(4 * self.width, name="wi_1")(h), "mlpwi_1")
        return x + called(dense(self.width, name="wo")(nn.silu(gate) * up), "mlpwo"), None


class Decoder(nn.Module):
    """tokens[B, T] -> logits[B, T, vocabulary]."""

    width: int
    heads: int
    layers: int
    vocabulary: int
    dtype: Any
    remat: str = NONE

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        layer: Any = Layer
        if self.remat != NONE:
            layer = nn.remat(Layer, policy=_POLICIES[self.remat], prevent_cse=False)
        stack = nn.scan(layer, variable_axes={"params": 1}, split_rngs={"params": True}, length=self.layers)
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        x, _ = stack(self.width, self.heads, self.dtype, self.remat != NONE, name="layers")(x, None)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(nn.RMSNorm(dtype=self.dtype)(x))


def maxtext_decoder(  # noqa: PLR0913 - sizes
    *,
    batch: int = 16,
    length: int = 512,
    width: int = 512,
    heads: int = 8,
    layers: int = 8,
    vocabulary: int = 32_000,
    dtype: Any = jnp.bfloat16,
) -> PlanCase:
    """The scanned decoder of MaxText's form, with its own remat policies by hand."""

    def loss_of(remat: str) -> Loss:
        model = Decoder(width, heads, layers, vocabulary, dtype, remat)
        return lambda params, tokens: next_token_loss(model.apply(params, tokens[:, :-1]), tokens)

    def initial(key: jax.Array) -> tuple[Any, ...]:
        tokens = random_tokens(key, batch, length, vocabulary)
        params = Decoder(width, heads, layers, vocabulary, dtype).init(key, tokens[:1, :8])
        return params, OPTIMIZER.init(params), tokens

    return compared_losses("decoder after MaxText, scanned", loss_of, initial, rows=tuple(_POLICIES))
