"""rejax: `PPO.train`, whose environment, rollouts and updates are one program."""

import jax
from rejax import PPO

from benchmarks.gallery import outcome

algorithm = PPO.create(
    env="CartPole-v1",
    total_timesteps=4096,
    eval_freq=2048,
    num_envs=32,
    num_steps=32,
    num_epochs=2,
    num_minibatches=4,
    agent_kwargs={"hidden_layer_sizes": (128, 128)},
)
train = jax.jit(algorithm.train)
hooks = outcome.hooks()
state, (lengths, returns) = train(jax.random.key(0))
for hook in hooks:
    hook(0)
outcome.keep(returns.mean(axis=-1), (state.actor_ts.params, state.critic_ts.params))
