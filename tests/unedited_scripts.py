"""Training scripts that make no step of this library, as their users write them; for tests."""

from __future__ import annotations

import textwrap
from pathlib import Path

LAYERS = """
def loss(params, batch):
    for weight in params:
        batch = jnp.tanh(batch @ weight) + batch
    return (batch**2).mean()

params, batch = [jnp.ones((32, 32)) + at for at in range(4)], jnp.ones((4096, 32))
"""
# Each ends by saying that it went on after its step, which none may.
SCRIPTS = {
    "a decorator of JAX": """
        import functools
        import jax, jax.numpy as jnp
        {layers}
        @jax.jit
        def initial(key):
            return [jax.random.normal(key, weight.shape) / 9 for weight in params]

        @functools.partial(jax.jit, donate_argnums=0)
        def train_step(params, batch):
            value, gradients = jax.value_and_grad(loss)(params, batch)
            return [p - 0.1 * g for p, g in zip(params, gradients)], value

        params, value = train_step(initial(jax.random.key(0)), batch)
        raise SystemExit("went on")
    """,
    "names from JAX": """
        import jax.numpy as jnp
        from jax import grad, jit
        {layers}
        gradient = grad(loss)

        def train_step(params, batch):
            return [p - 0.1 * g for p, g in zip(params, gradient(params, batch))]

        step = jit(train_step)
        for _ in range(3):
            params = step(params, batch)
        raise SystemExit("went on")
    """,
    "a method": """
        import jax, jax.numpy as jnp
        from functools import partial
        {layers}
        class Trainer:
            @partial(jax.jit, static_argnums=0)
            def train_step(self, params, batch):
                gradients, value = jax.grad(self.both, has_aux=True)(params, batch)
                return [p - 0.1 * g for p, g in zip(params, gradients)], value

            def both(self, params, batch):
                value = loss(params, batch)
                return value, value

        Trainer().train_step(params, batch)
        raise SystemExit("went on")
    """,
    "NNX": """
        import jax.numpy as jnp, optax
        from flax import nnx

        class Net(nnx.Module):
            def __init__(self, rngs):
                self.layers = nnx.List(nnx.Linear(32, 32, rngs=rngs) for _ in range(4))

            def __call__(self, x):
                for layer in self.layers:
                    x = nnx.tanh(layer(x)) + x
                return x

        @nnx.jit
        def train_step(model, optimizer, batch):
            @nnx.value_and_grad(has_aux=True)
            def gradient(model):
                value = (model(batch) ** 2).mean()
                return value, value

            (value, _), gradients = gradient(model)
            optimizer.update(model, gradients)
            return value

        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        nnx.cached_partial(train_step, model, optimizer)(jnp.ones((4096, 32)))
        raise SystemExit("went on")
    """,
    "Equinox": """
        import equinox as eqx, jax, jax.numpy as jnp

        @eqx.filter_jit(donate="all-except-first")
        def train_step(batch, model):
            value, gradients = eqx.filter_value_and_grad(loss)(model, batch)
            return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients)), value

        def loss(model, batch):
            return (jax.vmap(model)(batch) ** 2).mean()

        model = eqx.nn.MLP(32, 32, 32, 8, key=jax.random.key(0))
        train_step(jnp.ones((4096, 32)), model)
        raise SystemExit("went on")
    """,
}

TWO = """
    import jax, jax.numpy as jnp
    {layers}
    @jax.jit
    def warm_up(params, batch):
        return jax.grad(loss)(params, batch)

    @jax.jit
    def finetune(params, batch):
        return loss(params, batch)

    warm_up(params, batch)
    finetune(params, batch)
    print("went on")
"""


# Two steps, each with an optimizer's state of its own: that of the generator is there while the discriminator's step runs.
GAN = """
    import jax, jax.numpy as jnp

    def fake(weights, noise):
        return jnp.tanh(noise @ weights)

    def update(weights, moments, gradients):
        moments = 0.9 * moments + gradients
        return weights - 0.1 * moments, moments

    @jax.jit
    def critic_step(weights, moments, batch):
        return update(weights, moments, jax.grad(lambda w: jnp.square(jnp.tanh(batch @ w)).mean())(weights))

    def maker_step(weights, moments, critic, noise):
        return update(weights, moments, jax.grad(lambda w: jnp.tanh(fake(w, noise) @ critic).mean())(weights))

    run_maker = jax.jit(maker_step)
    evaluate = jax.jit(lambda critic, batch: jnp.tanh(batch @ critic).mean())
    maker, critic = jnp.ones((1024, 1031)), jnp.ones((1031, 8))
    of_maker, of_critic = jnp.zeros_like(maker), jnp.zeros_like(critic)
    for _ in range(2):
        noise = jnp.ones((16, 1024))
        critic, of_critic = critic_step(critic, of_critic, fake(maker, noise))
        maker, of_maker = run_maker(maker, of_maker, critic, noise)
    raise SystemExit("went on")
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text).replace("{layers}", LAYERS))
    return str(path)
