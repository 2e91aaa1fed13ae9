"""Tunix: a `PeftTrainer` of a small Llama 3."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

from benchmarks.gallery import outcome

LENGTH, VOCABULARY, ROWS, STEPS = 128, 512, 8, 4
config = llama.ModelConfig(
    num_layers=4,
    vocab_size=VOCABULARY,
    embed_dim=128,
    hidden_dim=512,
    num_heads=4,
    head_dim=32,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-5,
)
model = llama.Llama3(config, rngs=nnx.Rngs(0))


def loss_fn(model, tokens):
    places = jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (ROWS, LENGTH, LENGTH))
    logits, _ = model(tokens[:, :-1], places, None, mask)
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()


trainer = PeftTrainer(model, optax.adamw(1e-3), TrainingConfig(eval_every_n_steps=100, max_steps=STEPS))
trainer.with_loss_fn(loss_fn)
for monitor in outcome.hooks():
    from jaxmem_callbacks.integrations.tunix import MemoryHooks

    trainer.with_training_hooks(MemoryHooks(monitor))
rows = jax.random.randint(jax.random.key(0), (STEPS, ROWS, LENGTH + 1), 0, VOCABULARY)
trainer.train([{"tokens": batch} for batch in rows])
losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
outcome.keep(losses, nnx.state(model, nnx.Param))
