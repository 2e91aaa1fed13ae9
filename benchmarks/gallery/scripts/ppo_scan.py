"""PPO after PureJaxRL, written anew: environment, rollout, epochs and minibatches in one jitted scan."""

import jax
import jax.numpy as jnp
import optax

from benchmarks.gallery import outcome

ENVS, STEPS, UPDATES, EPOCHS, MINIBATCHES, WIDTH, ACTIONS, OBSERVED = 64, 32, 3, 2, 4, 128, 2, 4


def reset(key):
    return jax.random.uniform(key, (OBSERVED,), minval=-0.05, maxval=0.05)


def env_step(key, state, action):
    """A pole on a cart, without its friction."""
    x, v, angle, spin = state
    force = jnp.where(action == 1, 10.0, -10.0)
    push = (force + 0.05 * spin**2 * jnp.sin(angle)) / 1.1
    pull = (9.8 * jnp.sin(angle) - jnp.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1))
    new = state + 0.02 * jnp.array([v, push - 0.05 * pull * jnp.cos(angle) / 1.1, spin, pull])
    done = (jnp.abs(new[0]) > 2.4) | (jnp.abs(new[2]) > 0.21)
    return jnp.where(done, reset(key), new), 1.0, done


def network(params, observed):
    x = observed
    for weight, bias in params["body"]:
        x = jnp.tanh(x @ weight + bias)
    return x @ params["actor"], (x @ params["critic"])[..., 0]


def init(key):
    keys = jax.random.split(key, 5)
    sizes = [OBSERVED, WIDTH, WIDTH, WIDTH]
    body = [
        (jax.random.normal(k, (a, b)) / a**0.5, jnp.zeros(b)) for k, a, b in zip(keys, sizes, sizes[1:], strict=False)
    ]
    return {"body": body, "actor": 0.01 * jax.random.normal(keys[3], (WIDTH, ACTIONS)), "critic": jnp.zeros((WIDTH, 1))}


optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4, eps=1e-5))


def loss_fn(params, batch):
    logits, value = network(params, batch["observed"])
    log_probability = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["action"][:, None], 1)[:, 0]
    ratio = jnp.exp(log_probability - batch["log_probability"])
    gain = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
    actor = -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()
    entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1).mean()
    return actor + 0.5 * jnp.square(value - batch["target"]).mean() - 0.01 * entropy


def train(key):
    key, first, envs = jax.random.split(key, 3)
    params = init(first)

    def update(carry, _):
        params, opt_state, states, key = carry

        def act(carry, key):
            states = carry
            logits, value = network(params, states)
            choose, move = jax.random.split(key)
            action = jax.random.categorical(choose, logits)
            log_probability = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
            new, reward, done = jax.vmap(env_step)(jax.random.split(move, ENVS), states, action)
            seen = {"observed": states, "action": action, "log_probability": log_probability, "value": value}
            return new, seen | {"reward": jnp.full(ENVS, reward[0]), "done": done}

        key, rollout, shuffle = jax.random.split(key, 3)
        states, seen = jax.lax.scan(act, states, jax.random.split(rollout, STEPS))
        _, last = network(params, states)

        def advantage(carry, step):
            gain, following = carry
            delta = step["reward"] + 0.99 * following * (1 - step["done"]) - step["value"]
            gain = delta + 0.99 * 0.95 * (1 - step["done"]) * gain
            return (gain, step["value"]), gain

        _, gains = jax.lax.scan(advantage, (jnp.zeros_like(last), last), seen, reverse=True)
        batch = {name: seen[name] for name in ("observed", "action", "log_probability")}
        batch |= {"advantage": gains, "target": gains + seen["value"]}
        flat = jax.tree.map(lambda x: x.reshape((ENVS * STEPS, *x.shape[2:])), batch)

        def epoch(carry, key):
            order = jax.random.permutation(key, ENVS * STEPS)
            parts = jax.tree.map(lambda x: x[order].reshape((MINIBATCHES, -1, *x.shape[1:])), flat)

            def minibatch(carry, part):
                params, opt_state = carry
                loss, grads = jax.value_and_grad(loss_fn)(params, part)
                updates, opt_state = optimizer.update(grads, opt_state)
                return (optax.apply_updates(params, updates), opt_state), loss

            return jax.lax.scan(minibatch, carry, parts)

        (params, opt_state), losses = jax.lax.scan(epoch, (params, opt_state), jax.random.split(shuffle, EPOCHS))
        return (params, opt_state, states, key), losses.mean()

    start = (params, optimizer.init(params), jax.vmap(reset)(jax.random.split(envs, ENVS)), key)
    (params, opt_state, *_), losses = jax.lax.scan(update, start, None, UPDATES)
    return params, opt_state, losses


hooks = outcome.hooks()
train_jit = jax.jit(train)
params, opt_state, losses = train_jit(jax.random.key(0))
for hook in hooks:
    hook(0)
outcome.keep(losses, (params, opt_state))
