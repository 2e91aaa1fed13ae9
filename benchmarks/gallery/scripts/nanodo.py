"""A decoder-only transformer after nanodo, written anew: Flax Linen, a trainer that holds its jitted step, hooks in its loop."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.gallery import outcome


@dataclasses.dataclass(frozen=True)
class DoConfig:
    D: int = 128
    H: int = 4
    L: int = 128
    N: int = 4
    V: int = 1024
    F: int = 512
    remat: bool = False


class TBlock(nn.Module):
    docfg: DoConfig

    @nn.compact
    def __call__(self, x):
        cfg = self.docfg
        y = nn.LayerNorm(use_bias=False)(x)
        q, k, v = (nn.DenseGeneral((cfg.H, cfg.D // cfg.H), use_bias=False, name=name)(y) for name in "qkv")
        att = jnp.einsum("...qhd,...khd->...hqk", q / (cfg.D // cfg.H) ** 0.5, k)
        att = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((cfg.L, cfg.L), bool)), att, -1e9))
        y = jnp.einsum("...hqk,...khd->...qhd", att, v)
        x = x + nn.DenseGeneral(cfg.D, axis=(-2, -1), use_bias=False)(y)
        y = nn.LayerNorm(use_bias=False)(x)
        return x + nn.Dense(cfg.D, use_bias=False)(nn.gelu(nn.Dense(cfg.F, use_bias=False)(y)))


class TransformerDo(nn.Module):
    docfg: DoConfig

    @nn.compact
    def __call__(self, tokens):
        cfg = self.docfg
        embed = nn.Embed(cfg.V, cfg.D)
        x = embed(tokens) + nn.Embed(cfg.L, cfg.D)(jnp.arange(cfg.L)[None])
        block = nn.remat(TBlock, prevent_cse=False) if cfg.remat else TBlock
        for _ in range(cfg.N):
            x = block(cfg)(x)
        return embed.attend(nn.LayerNorm(use_bias=False)(x))


def loss_and_grad(model, params, tokens):
    def loss_fn(params):
        logits = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return jax.value_and_grad(loss_fn)(params)


class Trainer:
    def __init__(self, cfg):
        self.cfg, self.model = cfg, TransformerDo(cfg)
        self.optimizer = optax.adamw(1e-3)
        params = self.model.init(jax.random.key(0), jnp.ones((1, cfg.L), jnp.int32))["params"]
        self.state = (params, self.optimizer.init(params))
        self.step_fn = jax.jit(self._step, donate_argnums=0)

    def _step(self, state, tokens):
        params, opt_state = state
        loss, grads = loss_and_grad(self.model, params, tokens)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


def train_and_evaluate(cfg, steps, hooks):
    trainer, losses = Trainer(cfg), []
    for step in range(steps):
        tokens = jax.random.randint(jax.random.fold_in(jax.random.key(1), step), (8, cfg.L + 1), 0, cfg.V)
        trainer.state, metrics = trainer.step_fn(trainer.state, tokens)
        losses.append(metrics["loss"])
        for hook in hooks:
            hook(step)
    return losses, trainer.state


outcome.keep(*train_and_evaluate(DoConfig(), 4, outcome.hooks()))
