"""Brax: `ppo.train` on the environment that its own tests train on."""

from brax import envs
from brax.training.agents.ppo import train as ppo

from benchmarks.gallery import outcome

losses, hooks = [], outcome.hooks()


def progress(step, metrics):
    losses.extend(float(value) for name, value in sorted(metrics.items()) if name.endswith("total_loss"))
    for hook in hooks:
        hook(step)


_, params, _ = ppo.train(
    envs.get_environment("fast"),
    num_timesteps=2048,
    num_envs=16,
    episode_length=64,
    unroll_length=16,
    batch_size=16,
    num_minibatches=2,
    num_evals=3,
    num_eval_envs=4,
    progress_fn=progress,
)
outcome.keep(losses, params)
