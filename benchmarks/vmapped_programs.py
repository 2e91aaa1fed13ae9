"""A `vmap` over samples that does not fit, in the fewest chunks that do. Writes results/vmapped_programs_jax_<version>.json.

    python -m benchmarks.vmapped_programs

Five scientific and reinforcement-learning programs after their public form, each a gradient step whose samples stand side by side
under `jax.vmap`, are planned on the CPU for a quarter of what the plain step needs, with chunks and without remat. The
search ends where the bytes that were compiled leave no larger chunk that may fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem_callbacks as jm
from benchmarks.sources import write_result

PART = 4  # the budget is what the plain step needs, divided by this
Array = jax.Array
Loss = Callable[[Any, Any], Array]


def _floats(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def neural_ode(params: Any, paths: Array) -> Array:
    """Trajectories of a network's field by Runge-Kutta steps, as one fits a neural ODE; paths[N, T, D]."""

    def field(y: Array) -> Array:
        return jnp.tanh(y @ params["in"]) @ params["out"]

    def one(path: Array) -> Array:
        def step(y: Array, _: None) -> tuple[Array, Array]:
            a = field(y)
            b = field(y + 0.05 * a)
            c = field(y + 0.05 * b)
            d = field(y + 0.1 * c)
            y = y + 0.1 / 6 * (a + 2 * b + 2 * c + d)
            return y, y

        found = jax.lax.scan(step, path[0], None, length=path.shape[0])[1]
        return jnp.square(found - path).mean()

    return jax.vmap(one)(paths).mean()


def pde_residual(params: Any, points: Array) -> Array:
    """The residual of Poisson's equation at points, second derivatives by forward over reverse mode; points[N, 2]."""

    def solution(x: Array) -> Array:
        return jnp.tanh(jnp.tanh(x @ params["in"]) @ params["mid"]) @ params["last"]

    def residual(x: Array) -> Array:
        return jnp.square(jnp.trace(jax.hessian(solution)(x)) - jnp.sin(x).sum())

    return jax.vmap(residual)(points).mean()


def policy_by_dynamics(params: Any, states: Array) -> Array:
    """Returns of a policy through a differentiable pendulum, as in analytic policy gradients; states[N, 2]."""

    def one(state: Array) -> Array:
        def step(state: Array, _: None) -> tuple[Array, Array]:
            hidden = jnp.tanh(jnp.stack([jnp.sin(state[0]), jnp.cos(state[0]), state[1]]) @ params["in"])
            force = jnp.tanh(jnp.tanh(hidden @ params["mid"]) @ params["last"])
            speed = state[1] + 0.05 * (9.81 * jnp.sin(state[0]) + force)
            state = jnp.stack([state[0] + 0.05 * speed, speed])
            return state, jnp.square(state).sum() + 0.001 * jnp.square(force)

        return jax.lax.scan(step, state, None, length=50)[1].sum()

    return jax.vmap(one)(states).mean()


def molecules(params: Any, replicas: Array) -> Array:
    """Replicas of particles under a learned pair force, integrated over time; replicas[N, P, 3]."""

    def one(places: Array) -> Array:
        def step(state: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
            places, speeds = state
            apart = places[:, None] - places[None]
            near = jnp.exp(-jnp.square(apart).sum(-1, keepdims=True) * params["scale"])
            speeds = speeds + 0.01 * (near * apart).sum(1) * params["force"]
            return (places + 0.01 * speeds, speeds), None

        (places, _), _ = jax.lax.scan(step, (places, jnp.zeros_like(places)), None, length=20)
        return jnp.square(places).mean()

    return jax.vmap(one)(replicas).mean()


def variational(params: Any, noise: Array) -> Array:
    """The evidence bound of a Bayesian network by Monte Carlo samples of its weights; noise[N, D * H]."""
    rows = jnp.linspace(-1, 1, 512)[:, None] * jnp.ones((1, 8))

    def one(noise: Array) -> Array:
        weights = (params["mean"] + jnp.exp(params["log_scale"]) * noise).reshape(8, -1)
        found = jnp.tanh(rows @ weights).mean(-1)
        return jnp.square(found - jnp.sin(rows[:, 0])).sum() + 0.5 * jnp.square(weights).sum()

    return jax.vmap(one)(noise).mean() - params["log_scale"].sum()


# Program -> its loss, the shapes of its parameters, and those of its samples.
PROGRAMS: dict[str, tuple[Loss, Any, jax.ShapeDtypeStruct]] = {
    "neural ODE": (neural_ode, {"in": _floats(8, 64), "out": _floats(64, 8)}, _floats(1024, 32, 8)),
    "PDE residual": (
        pde_residual,
        {"in": _floats(2, 64), "mid": _floats(64, 64), "last": _floats(64)},
        _floats(4096, 2),
    ),
    "policy by dynamics": (
        policy_by_dynamics,
        {"in": _floats(3, 64), "mid": _floats(64, 64), "last": _floats(64)},
        _floats(2048, 2),
    ),
    "molecules": (molecules, {"scale": _floats(), "force": _floats()}, _floats(256, 32, 3)),
    "variational inference": (variational, {"mean": _floats(512), "log_scale": _floats(512)}, _floats(256, 512)),
}


def step_of(loss: Loss) -> Callable[..., Any]:
    """A step of plain descent."""

    def train_step(params: Any, samples: Array) -> Any:
        value, gradients = jm.value_and_grad(loss)(params, samples)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value

    return train_step


def measure(name: str) -> dict[str, Any]:
    """What a plan finds for one program."""
    loss, params, samples = PROGRAMS[name]
    step, args = step_of(loss), (params, samples)
    plain = jm.step_memory(jm.jit_step(step), *args).step_bytes
    budget = plain // PART
    plan = jm.plan(step, *args, budget=budget, search={"chunks": True, "remat": False}, progress=False)
    ((part, count),) = plan.policy.chunked or (("", 1),)
    rows = samples.shape[0]
    return {
        "program": name, "samples": rows, "plain_bytes": plain, "budget_bytes": budget, "fits": plan.chosen.fits,
        "chunks": count, "chunk_samples": -(-rows // count), "step_bytes": plan.chosen.step_bytes,
        "compiles": plan.compiles, "part": part,
    }  # fmt: skip


def main() -> None:
    """Plan every program, print a table and write the result file."""
    rows: list[dict[str, Any]] = []
    for name in PROGRAMS:
        rows.append(measure(name))
        print(rows[-1], flush=True)
    write_result("vmapped_programs", options="", not_measured={}, rows=rows)


if __name__ == "__main__":
    main()
