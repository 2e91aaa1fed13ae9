"""PPO in one scan, after PureJaxRL: rollouts, advantages and minibatch updates of an actor and critic in one jitted step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.plan_models.case import NONE, OPTIMIZER, PlanCase, Step, compared, named, policy

SAVED = ("hidden",)
TRACK = 2.0  # beyond it an episode ends


class Transition(NamedTuple):
    """What a rollout keeps of each step, of every environment."""

    seen: jax.Array
    action: jax.Array
    value: jax.Array
    log_probability: jax.Array
    reward: jax.Array
    done: jax.Array


def tower(layers: list[Any], x: jax.Array, remat: str) -> jax.Array:
    """A stack of tanh layers and a linear one; x[..., in]."""
    for weights, bias in layers[:-1]:
        x = jnp.tanh(named(x @ weights + bias, "hidden", remat))
    weights, bias = layers[-1]
    return x @ weights + bias


def moved(state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A cart on a line in many dimensions: the next state, the reward, and whether it ended."""
    force = jnp.where(action == 0, -1.0, 1.0)[:, None]
    after = 0.95 * state + 0.1 * jnp.sin(jnp.roll(state, 1, axis=-1)) + 0.05 * force
    done = jnp.abs(after[:, 0]) > TRACK
    return jnp.where(done[:, None], 0.0, after), -jnp.square(after).sum(-1), done


def advantages(some: Transition, last: jax.Array) -> jax.Array:
    """Generalised advantage estimates, [T, environments]."""

    def back(carry: tuple[jax.Array, jax.Array], one: Transition) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        advantage, after = carry
        delta = one.reward + 0.99 * after * (1 - one.done) - one.value
        advantage = delta + 0.99 * 0.95 * (1 - one.done) * advantage
        return (advantage, one.value), advantage

    _, found = jax.lax.scan(back, (jnp.zeros_like(last), last), some, reverse=True)
    return found


def ppo(  # noqa: PLR0913, C901 - sizes; one function is the form that is meant
    *,
    environments: int = 2048,
    length: int = 64,
    minibatches: int = 4,
    epochs: int = 2,
    updates: int = 4,
    state: int = 64,
    width: int = 512,
    layers: int = 4,
    actions: int = 4,
) -> PlanCase:
    """The whole of PPO's training as one step, float32."""

    def step_of(value_and_grad: Callable[..., Any], remat: str) -> Step:
        def both(params: Any, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
            call = lambda some, x: (tower(some["actor"], x, remat), tower(some["critic"], x, remat)[..., 0])  # noqa: E731
            return (call if remat == NONE else jax.checkpoint(call, policy=policy(remat, SAVED)))(params, seen)

        def loss(params: Any, batch: tuple[Transition, jax.Array, jax.Array]) -> jax.Array:
            some, gained, targets = batch
            logits, value = both(params, some.seen)
            logs = jax.nn.log_softmax(logits)
            chosen = jnp.take_along_axis(logs, some.action[:, None], -1)[:, 0]
            ratio = jnp.exp(chosen - some.log_probability)
            gained = (gained - gained.mean()) / (gained.std() + 1e-8)
            actor = -jnp.minimum(ratio * gained, jnp.clip(ratio, 0.8, 1.2) * gained).mean()
            near = some.value + jnp.clip(value - some.value, -0.2, 0.2)
            critic = 0.5 * jnp.maximum(jnp.square(value - targets), jnp.square(near - targets)).mean()
            entropy = -(jnp.exp(logs) * logs).sum(-1).mean()
            return actor + 0.5 * critic - 0.01 * entropy

        def step(params: Any, opt_state: Any, seen: jax.Array, key: jax.Array) -> Any:
            def act(carry: Any, _: None) -> Any:
                params, seen, key = carry
                key, own = jax.random.split(key)
                logits, value = both(params, seen)
                action = jax.random.categorical(own, logits)
                log = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], -1)[:, 0]
                after, reward, done = moved(seen, action)
                return (params, after, key), Transition(seen, action, value, log, reward, done.astype(jnp.float32))

            def learn(carry: Any, batch: Any) -> Any:
                params, opt_state = carry
                value, grads = value_and_grad(loss)(params, batch)
                changes, opt_state = OPTIMIZER.update(grads, opt_state, params)
                return (optax.apply_updates(params, changes), opt_state), value

            def epoch(carry: Any, _: None) -> Any:
                params, opt_state, batch, key = carry
                key, own = jax.random.split(key)
                order = jax.random.permutation(own, environments * length)
                parts = jax.tree.map(
                    lambda x: x.reshape(-1, *x.shape[2:])[order].reshape(minibatches, -1, *x.shape[2:]), batch
                )
                (params, opt_state), values = jax.lax.scan(learn, (params, opt_state), parts)
                return (params, opt_state, batch, key), values

            def update(carry: Any, _: None) -> Any:
                params, opt_state, seen, key = carry
                (_, seen, key), some = jax.lax.scan(act, (params, seen, key), None, length)
                gained = advantages(some, both(params, seen)[1])
                batch = some, gained, gained + some.value
                (params, opt_state, _, key), values = jax.lax.scan(epoch, (params, opt_state, batch, key), None, epochs)
                return (params, opt_state, seen, key), values.mean()

            (params, opt_state, seen, key), values = jax.lax.scan(update, (params, opt_state, seen, key), None, updates)
            return params, opt_state, values.mean()

        return step

    def initial(key: jax.Array) -> tuple[Any, ...]:
        def stack(seed: int, results: int) -> list[Any]:
            sizes = [state, *[width] * layers, results]
            keys = jax.random.split(jax.random.fold_in(key, seed), layers + 1)
            return [
                (jax.random.normal(one, (sizes[i], sizes[i + 1])) / sizes[i] ** 0.5, jnp.zeros(sizes[i + 1]))
                for i, one in enumerate(keys)
            ]

        params = {"actor": stack(0, actions), "critic": stack(1, 1)}
        return params, OPTIMIZER.init(params), jax.random.normal(key, (environments, state)), key

    return compared("PPO in one scan", step_of, initial)
