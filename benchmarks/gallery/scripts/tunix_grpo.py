"""Tunix: a `GRPOLearner` of the toy transformer and vocabulary that the package carries: rollouts, rewards, updates."""

import jax
import numpy as np
import optax
from flax import nnx
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.tests.test_common import MockVocab, ModelConfig, ToyTransformer

from benchmarks.gallery import outcome

vocabulary = MockVocab()
config = ModelConfig(vocab_size=vocabulary.GetPieceSize())
model, reference = (ToyTransformer(config, rngs=nnx.Rngs(0)) for _ in range(2))
mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
Role = rl_cluster.Role
cluster = rl_cluster.RLCluster(
    actor=model,
    reference=reference,
    tokenizer=vocabulary,
    cluster_config=rl_cluster.ClusterConfig(
        role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: mesh},
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adamw(1e-2), eval_every_n_steps=100, max_steps=3
        ),
        rollout_config=RolloutConfig(max_tokens_to_generate=32, max_prompt_length=32, kv_cache_size=128),
    ),
)
for monitor in outcome.hooks():
    from jaxmem_callbacks.integrations.tunix import MemoryHooks

    cluster.actor_trainer.with_training_hooks(MemoryHooks(monitor, cluster.actor_trainer.training_hooks))


def reward(prompts, completions, **_):
    return [float(len(set(completion.split()))) for completion in completions]


learner = GRPOLearner(cluster, GRPOConfig(num_generations=4, num_iterations=1), reward)
prompts = [{"prompts": np.array(["input string", "hello world", "My name is", "Morgane"])} for _ in range(3)]
learner.train(prompts)
losses = cluster.actor_trainer.metrics_logger.get_metric_history("actor", "loss", "train")
outcome.keep(losses, nnx.state(model, nnx.Param))
